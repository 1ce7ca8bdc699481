"""What the engine cannot do: one clear error each, and nothing is changed."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest
import torch
from torch import nn

from preamp import ConfigError, UsageError
from preamp.deepspeed import initialize

from .engines import Weight, fp16, master, net, step, trained

ZERO = {"zero_optimization": {"stage": 2}}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "ZeRO": (
        {"config": ZERO},
        r"stage: 2 .*\. Write engine, \*_ = deepspeed.initialize\(\.\.\.\).*attach\(engine\)",
    ),
    "another reduction": (
        {"config": {"gradient_allreduce_op": "sum"}},
        "gradient_allreduce_op: 'sum' .*attach",
    ),
    "tensor parallel": ({"config": {"tensor_parallel": {"autotp_size": 2}}}, "tensor_parallel: .*attach"),
    "mpu": ({"config": {}, "mpu": object()}, "mpu= is not supported here.*attach"),
    "data": ({"config": {}, "training_data": [1]}, "training_data= is not supported here. Leave it out"),
    "a schedule": (
        {"config": {"scheduler": {"type": "WarmupLR"}}},
        "scheduler: {'type': 'WarmupLR'} needs DeepSpeed itself.*or remove scheduler",
    ),
    "no configuration": ({}, "no configuration is given. Write config="),
    "two configurations": (
        {"args": argparse.Namespace(deepspeed_config="a.json"), "config": {}},
        "args.deepspeed_config='a.json' and config= are both given",
    ),
    "no model": ({"model": Weight, "config": {}}, "is not a torch.nn.Module. Write"),
    "batches": (
        {"config": {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}},
        'x gradient_accumulation_steps 4 x 1 ranks. Write "train_batch_size": 8',
    ),
    "an unknown optimizer": ({"config": {"optimizer": {"type": "AdamX"}}}, '"AdamX" is unknown. Write "Adam'),
    "DeepSpeed's optimizer": ({"config": {"optimizer": {"type": "Lamb"}}}, "in DeepSpeed only.*attach"),
    "a one-bit optimizer": (
        {"config": {"optimizer": {"type": "OneBitAdam"}}},
        r"in DeepSpeed only.*deepspeed.initialize\(\.\.\.\) of DeepSpeed itself\.$",
    ),
    "an unknown option": (
        {"config": {"optimizer": {"type": "SGD", "params": {"lrr": 1}}}},
        "SGD refuses {'lrr': 1}: .*lrr",
    ),
    "an impossible option": ({"config": {"optimizer": {"type": "SGD", "params": {"lr": -1}}}}, "SGD refuses"),
    "a norm as an option": (
        {"config": {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 2.0}}}},
        'Write "gradient_clipping": 2.0',
    ),
    "no bias correction": (
        {"config": {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}},
        "bias_correction: false is not in",
    ),
    "no optimizer": ({"config": {}, "optimizer": "SGD"}, "optimizer='SGD' neither is nor makes a"),
    "an optimizer of a copy": (
        {"config": {}, "optimizer": torch.optim.SGD(Weight().parameters())},
        r"parameters that are not the model's: .*nn.ModuleList\(\[...\]\)",
    ),
    "an optimizer with a closure": (
        {"config": {}, "optimizer": torch.optim.LBFGS},
        "LBFGS evaluates the loss",
    ),
    "nothing to train": (
        {"model": Weight().requires_grad_(False), "config": {"optimizer": {"type": "SGD"}}},
        "no parameter of the model needs a gradient. Write initialize",
    ),
    "float16 without a scale": (
        {"model": Weight().half(), "config": {}, "optimizer": torch.optim.SGD},
        'no loss scale is configured. Write config={"fp16": {"enabled": True}}, or model.float()',
    ),
    "buffers of another precision": (
        {"config": {**fp16(), "data_types": {"buffer_dtype": "bf16"}}},
        "data_types: .* needs DeepSpeed itself",
    ),
    "buffers to restore without a skip": (
        {"config": {}, "optimizer": torch.optim.SGD, "restore_buffers": True},
        "restore_buffers= are for updates that are skipped, and here none is",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_work_is_refused(name):
    arguments, message = UNFIT[name]
    with pytest.raises((ConfigError, UsageError), match=message):
        initialize(**{"model": Weight(), **arguments})


def test_what_is_refused_was_not_cast():
    model = Weight()
    with pytest.raises(UsageError, match="LBFGS"):
        initialize(model=model, optimizer=torch.optim.LBFGS, config=fp16())
    assert model.weight.dtype is torch.float32


def test_calls_at_the_wrong_place_are_refused():
    engine = trained(Weight(), fp16())
    engine(1.0).backward()
    with pytest.raises(UsageError, match=r"Write engine.backward\(loss\), not loss.backward\(\)"):
        engine.step()
    for loss, remedy in ((torch.ones(2, requires_grad=True), "loss.mean()"), (1.0, "loss")):
        with pytest.raises(UsageError, match=re.escape(f"Write engine.backward({remedy})")):
            engine.backward(loss)
    engine.zero_grad()
    step(engine, 1.0)
    assert (master(engine), engine.micro_steps) == (-1.0, 1)
    engine(1.0).backward()
    with pytest.raises(UsageError, match="no loss was scaled since the last step"):
        engine.step()


def test_models_that_others_look_after_are_refused():
    with pytest.raises(UsageError, match=re.escape("Write model=model.module.")):
        initialize(model=nn.DataParallel(net()), config={})
