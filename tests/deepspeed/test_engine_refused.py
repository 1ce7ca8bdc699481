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
from preamp.torch import LossScaleOptimizer

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
    "mpu": ({"config": {}, "mpu": object()}, "mpu= splits the model.*attach"),
    "mesh": ({"config": {}, "mesh_param": (1, 1)}, "mesh_param= splits the model.*attach"),
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
    "buffers of no precision": (
        {"config": {**fp16(), "data_types": {"buffer_dtype": "fp17"}}},
        "buffer_dtype: 'fp17' is unknown. Write",
    ),
    "a scaled optimizer": (
        {"config": {}, "optimizer": lambda p: LossScaleOptimizer(torch.optim.SGD(p))},
        "Write optimizer=optimizer.inner_optimizer",
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


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "OneCycle"}, '"OneCycle" exists in DeepSpeed only. Write lr_scheduler='),
        ({"type": "WarmUpLR"}, 'scheduler.type: "WarmUpLR" is unknown. Write "WarmupLR"'),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "0 is not a whole number above 0"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, 'Write "log" or "linear"'),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [1.0, 2.0]}}, "one for each of 1 parameter groups"),
        ({"type": "WarmupDecayLR"}, "WarmupDecayLR refuses {}: .*total_num_steps"),
        ({"type": "StepLR", "params": {"steps": 3}}, "StepLR refuses {'steps': 3}"),
    ],
)
def test_schedules_that_cannot_work_are_refused(section, message):
    config = {"optimizer": {"type": "SGD"}, "scheduler": section}
    with pytest.raises(ConfigError, match=message):
        initialize(model=Weight(), config=config)


def test_calls_at_the_wrong_place_are_refused():
    engine = trained(Weight(), fp16())
    engine(1.0).backward()
    with pytest.raises(UsageError, match=r"Write engine.backward\(loss\), not loss.backward\(\)"):
        engine.step()
    with engine.no_sync(), pytest.raises(UsageError, match=r"inside engine.no_sync\(\)"):
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
