"""The engine on plain PyTorch: exact steps, DeepSpeed's rule for the scale, and what cannot work."""

from __future__ import annotations

import argparse
import copy
import logging
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from preamp import ConfigError, Dynamic, Starved, Static, Trace, UsageError, dialects, simulate
from preamp.config import Settings
from preamp.deepspeed import Engine, initialize
from preamp.torch import LossScaleOptimizer

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Weight(nn.Module):
    """One weight, whose gradient is what the model is called with."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), value))

    def forward(self, gradient: float) -> Tensor:
        return (self.weight.float() * gradient).sum()


def fp16(**section: Any) -> dict[str, Any]:
    """Return a configuration that does not clip and whose scale leaves float16 room for gradients of 1."""
    return {"fp16": {"enabled": True, "initial_scale_power": 8, **section}, "gradient_clipping": 0.0}


def trained(model: nn.Module, config: Any, lr: float = 1.0, **more: Any) -> Engine:
    """Return an engine that trains a model with SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return initialize(model=model, optimizer=optimizer, config=config, **more)[0]


def step(engine: Engine, *inputs: Any) -> None:
    engine.backward(engine(*inputs))
    engine.step()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def master(engine: Engine) -> float:
    """Return the float32 weight that an optimizer trains."""
    return float(engine.optimizer.param_groups[0]["params"][0].detach())


# The document.


def test_the_quick_start_of_the_document():
    args = argparse.Namespace(local_rank=-1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs, labels = torch.randn(16, 4).half(), torch.randint(2, (16,))
    criterion = nn.CrossEntropyLoss()

    model_engine, optimizer, _, _ = initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        optimizer=torch.optim.AdamW,  # the document has none, and DeepSpeed then refuses backward as we do
        config={"fp16": {"enabled": True, "loss_scale": 0}},
    )
    losses = []
    for _ in range(50):
        outputs = model_engine(inputs)
        loss = criterion(outputs, labels)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())

    assert isinstance(optimizer, LossScaleOptimizer)
    assert losses[-1] < losses[0]
    assert model_engine.global_steps == 50
    assert model_engine.cur_scale in (2.0**15, 2.0**16)  # 2**16 is not a float16


def test_without_an_optimizer_the_engine_evaluates():
    engine, optimizer, _, scheduler = initialize(model=Weight(3.0), config=fp16())
    assert engine(2.0).item() == 6.0
    assert (optimizer, scheduler, engine.cur_scale) == (None, None, 1.0)
    for call in (lambda: engine.backward(engine(1.0)), engine.step, engine.get_lr):
        with pytest.raises(UsageError, match=r"Write initialize\(\.\.\., optimizer=torch.optim.AdamW"):
            call()


# Steps.


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_step_on_gradient_1_is_the_learning_rate_on_growth_steps_too(window):
    trace = Trace()
    engine = trained(Weight(), fp16(initial_scale_power=4, loss_scale_window=window), on_step=trace)
    for number in range(1, 9):
        step(engine, 1.0)
        assert master(engine) == -number
        assert engine.module.weight.item() == -number
        assert engine.get_global_grad_norm() == 1.0
    assert trace.summary().growths > 0


@settings(max_examples=25, deadline=None)
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=20),
    hysteresis=st.integers(1, 3),
    window=st.integers(1, 3),
    consecutive=st.booleans(),
)
def test_the_scale_moves_by_deepspeeds_rule(overflows, hysteresis, window, consecutive):
    section = {"hysteresis": hysteresis, "loss_scale_window": window, "consecutive_hysteresis": consecutive}
    section |= {"raise_error_at_min_scale": False}
    trace = Trace()
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    engine = trained(Weight(), fp16(initial_scale_power=10, **section), on_step=trace, lr_scheduler=halve)
    taken = 0
    for overflow in overflows:
        before = master(engine)
        step(engine, math.inf if overflow else 2.0**-15)  # up to a scale of 2**30
        assert engine.was_step_applied() is not overflow
        assert (master(engine) == before) is overflow
        taken += not overflow
        assert engine.get_lr() == [0.5**taken]
        assert engine.module.weight.grad is None

    policy = dialects.DEEPSPEED(
        init_scale=2.0**10,
        scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        raise_error_at_min_scale=False,
    )
    expected = simulate(policy, overflows)
    assert [(s.index, s.scale, s.new_scale, s.skipped) for s in trace] == [
        (s.index, s.scale, s.new_scale, s.skipped) for s in expected
    ]
    assert engine.global_steps == len(overflows)
    assert engine.skipped_steps == sum(overflows)
    assert engine.cur_scale == trace[-1].new_scale


def test_a_static_scale_stays():
    engine = trained(Weight(), fp16(loss_scale=128))
    for gradient in (1.0, math.nan, 1.0):
        step(engine, gradient)
        assert engine.cur_scale == engine.loss_scale() == 128.0
    assert (master(engine), engine.skipped_steps, engine.get_global_grad_norm()) == (-2.0, 1, 1.0)


@pytest.mark.parametrize("section", HALVES)
def test_half_parameters_are_updated_in_float32(section):
    engine = trained(Weight(1.0), {section: {"enabled": True}}, lr=2.0**-14)
    assert engine.module.weight.dtype is HALVES[section]
    for _ in range(16):
        step(engine, 0.5)
    assert master(engine) == 1.0 - 16 * 2.0**-15
    assert engine.module.weight.item() == torch.tensor(master(engine)).to(HALVES[section]).item()


@pytest.mark.parametrize("section", HALVES)
def test_micro_steps_add_up_in_float32(section):
    low = {section: {"enabled": True, **({"initial_scale_power": 0} if section == "fp16" else {})}}
    engine = trained(Weight(), {**low, "gradient_clipping": 0.0, "gradient_accumulation_steps": 8})
    for gradient in (4096.0, *[1.0] * 7):  # each lost beside the first, in half precision
        assert master(engine) == 0.0
        step(engine, gradient)
    assert master(engine) == -(4096.0 + 7 * 1.0) / 8


def test_a_loss_in_float16_is_shared_before_it_is_scaled():
    model = Weight()
    engine = trained(model, {**fp16(initial_scale_power=16), "gradient_accumulation_steps": 4})
    for _ in range(4):
        engine.backward((model.weight * 1.0).sum())
        engine.step()
    assert (master(engine), engine.skipped_steps) == (-1.0, 0)


@pytest.mark.parametrize("boundary", [False, True])
def test_an_overflow_in_any_micro_step_skips_the_update(boundary):
    engine = trained(Weight(), {**fp16(hysteresis=1), "gradient_accumulation_steps": 2})
    gradients = [1.0, math.inf] if boundary else [math.inf, 1.0]
    for gradient in gradients:
        assert engine.cur_scale == 2.0**8
        step(engine, gradient)
    assert (engine.cur_scale, engine.skipped_steps, engine.global_steps) == (2.0**7, 1, 1)
    for gradient in (1.0, 3.0):
        step(engine, gradient)
    assert master(engine) == -2.0


def test_counters_and_boundaries():
    config = {**fp16(), "train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}
    engine = trained(Weight(), config)
    assert engine.gradient_accumulation_steps() == 3
    boundaries = []
    for _ in range(7):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        step(engine, 1.0)
    assert boundaries == [False, False, True, False, False, True, False]
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (7, 2, 24)

    engine.set_train_batch_size(8)  # two micro-steps, of which one has been
    step(engine, 1.0)
    assert (engine.global_steps, engine.global_samples) == (3, 32)
    with pytest.raises(UsageError, match=r"Write engine.set_train_batch_size\(4\)"):
        engine.set_train_batch_size(10)

    engine.set_gradient_accumulation_boundary(False)
    for _ in range(4):
        step(engine, 1.0)
    assert engine.global_steps == 3
    engine.set_gradient_accumulation_boundary(True)
    step(engine, 1.0)
    assert engine.global_steps == 4


def test_several_losses_add_up_and_scale_is_the_manual_way():
    engine = trained(Weight(), {**fp16(), "gradient_accumulation_steps": 2})
    loss = engine(3.0)
    assert engine.backward(loss, retain_graph=True).item() == 0.0
    engine.scale(loss).backward()
    engine.step()
    engine.backward(engine(1.0), scale_wrt_gas=False)
    engine.step()
    assert master(engine) == -(3.0 / 2 + 3.0 / 2 + 1.0)


@pytest.mark.parametrize("section", [{}, fp16(), {"bf16": {"enabled": True}}])
@pytest.mark.parametrize("norm", [5.0, 20.0])
def test_the_norm_is_that_of_the_unscaled_gradients_and_is_clipped(section, norm):
    model = nn.ModuleList([Weight(), Weight()])
    config = {**section, "gradient_clipping": 10.0, "gradient_accumulation_steps": 2}
    engine = trained(model, config)
    for _ in range(2):
        engine.backward(model[0](0.6 * norm) + model[1](0.8 * norm))
        engine.step()
    clipped = min(norm, 10.0)
    moved = [-p.item() for p in engine.optimizer.param_groups[0]["params"]]
    assert moved == pytest.approx([0.6 * clipped, 0.8 * clipped], rel=4e-3)
    assert math.hypot(*moved) <= clipped * (1 + 1e-3)
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=4e-3)
    assert engine.gradient_clipping() == 10.0


def test_without_a_policy_nothing_is_checked():
    for config in ({}, {"bf16": {"enabled": True, "check_grad_overflow": False}}):
        engine = trained(Weight(), {**config, "gradient_clipping": 0.0})
        step(engine, math.nan)
        assert math.isnan(master(engine))
        assert (engine.skipped_steps, engine.was_step_applied()) == (0, True)
        assert engine.get_global_grad_norm() is None


def test_a_policy_that_gives_up_leaves_the_engine_whole():
    trace = Trace()
    engine = trained(Weight(), fp16(initial_scale_power=0, hysteresis=1), on_step=trace)
    with pytest.raises(Starved):
        step(engine, math.inf)
    assert (master(engine), engine.skipped_steps, engine.global_steps) == (0.0, 1, 1)
    assert [s.skipped for s in trace] == [True]
    step(engine, 1.0)
    assert master(engine) == -1.0


def test_a_skipped_step_is_logged_with_the_names_of_parameters(caplog):
    model = nn.ModuleDict({"fine": Weight(), "broken": Weight()})
    engine = trained(model, fp16())
    engine.backward(model["fine"](1.0) + model["broken"](math.inf) * 1e-3)
    with caplog.at_level(logging.WARNING, "preamp.deepspeed"):
        engine.step()
    (record,) = caplog.records
    assert record.culprits == ("broken.weight",)
    assert (record.step, record.scale, record.new_scale, record.hysteresis_left) == (0, 2.0**8, 2.0**8, 1)
    assert engine.get_global_grad_norm() == math.inf


# What the engine is besides.


def test_the_engine_stands_for_the_model():
    model = net()
    model.config = {"hidden": 5}
    engine = trained(model, {})
    assert engine.config is model.config
    assert engine.module is model
    assert list(engine.parameters()) == list(model.parameters())
    assert not engine.eval().module.training
    assert engine.train().module[0].training
    with pytest.raises(AttributeError, match="nothing"):
        _ = engine.nothing
    assert engine.get_mom() == [0]
    assert not engine.zero_optimization()
    assert engine.zero_optimization_stage() == 0


def test_settings_and_files_and_arguments_configure(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"fp16": {"enabled": true, "loss_scale": 8}} // a comment')
    chosen = Settings(precision="float16", policy=Static(8.0), max_norm=1.0)
    for given_ in (
        {"config": path},
        {"config": str(path)},
        {"config_params": path},
        {"config": chosen},
        {"args": argparse.Namespace(deepspeed_config=str(path))},
    ):
        engine = trained(Weight(), given_.pop("config", None), **given_)
        assert (engine.cur_scale, engine.gradient_clipping(), engine.fp16_enabled()) == (8.0, 1.0, True)


def test_any_policy_of_preamp_trains():
    policy = Dynamic(init_scale=4.0, growth_interval=1, max_scale=16.0)
    engine = trained(Weight(), Settings(precision="float16", policy=policy))
    for _ in range(3):
        step(engine, 1.0)
    assert (engine.cur_scale, master(engine)) == (16.0, -3.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_keeps_parameters_in_float32(dtype):
    model = net()
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    engine = trained(model, {"torch_autocast": {"enabled": True, "dtype": dtype}})
    engine.backward(engine(torch.ones(2, 3)).float().mean() * 1e-3)
    engine.step()
    assert seen == [getattr(torch, dtype)]
    assert model[0].weight.dtype is torch.float32
    assert engine.cur_scale == (2.0**16 if dtype == "float16" else 1.0)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, False)


def test_auto_cast_reaches_inputs_in_any_structure():
    class Echo(nn.Linear):
        def forward(self, *inputs: Any, **named: Any) -> Any:
            return inputs, named

    engine = initialize(model=Echo(1, 1), config=fp16(auto_cast=True))[0]
    whole = torch.ones(1, dtype=torch.int64)
    (first, second), named = engine(
        [torch.ones(1), whole], "text", mask={"a": (torch.ones(1, dtype=torch.double),)}
    )
    assert [first[0].dtype, first[1].dtype, second] == [torch.float16, torch.int64, "text"]
    assert named["mask"]["a"][0].dtype is torch.float16


def test_inputs_of_another_precision_are_explained():
    for section, line in (("fp16", '"auto_cast": true'), ("bf16", "inputs.to(torch.bfloat16)")):
        engine = initialize(model=net(), config={section: {"enabled": True}})[0]
        with pytest.raises(RuntimeError) as raised:
            engine(torch.ones(2, 3))
        assert line in raised.value.__notes__[0]


def test_a_clients_scheduler_is_stepped():
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    engine, _, _, returned = initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=fp16()
    )
    assert engine.lr_scheduler is returned is scheduler
    for metric in (1.0, 2.0):
        engine.backward(engine(1.0))
        engine.step({"metrics": metric})
    assert engine.get_lr() == [0.5]


def test_frozen_parameters_and_clients_groups():
    model = net()
    model[0].requires_grad_(False)
    groups = [{"params": [model[2].weight], "lr": 0.5}, {"params": [model[2].bias]}]
    config = {**fp16(), "optimizer": {"type": "SGD", "params": {"lr": 0.25}}}
    engine, optimizer, _, _ = initialize(model=model, model_parameters=groups, config=config)
    assert engine.get_lr() == [0.5, 0.25]
    assert [group["param_names"] for group in optimizer.param_groups] == [["2.weight"], ["2.bias"]]
    before = copy.deepcopy(model.state_dict())
    engine.backward(engine(torch.ones(2, 3).half()).float().mean())
    engine.step()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["2.weight", "2.bias"]

    _, optimizer, _, _ = initialize(model=model, config=config)
    assert optimizer.param_groups[0]["param_names"] == ["2.weight", "2.bias"]


def test_a_loader_of_micro_batches():
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    config = {**fp16(), "train_micro_batch_size_per_gpu": 4}
    loader = initialize(model=Weight(), config=config, training_data=data)[2]
    batches = [batch for (batch,) in loader]
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert sorted(torch.cat(batches).tolist()) == list(range(12))
    stream = type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda _: iter(range(8))})()
    assert [len(batch) for batch in initialize(model=Weight(), config=config, training_data=stream)[2]] == [
        4,
        4,
    ]


# What cannot work.

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
    "no model": ({"model": Weight, "config": {}}, "is no torch.nn.Module. Write"),
    "batches": (
        {"config": {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}},
        'x gradient_accumulation_steps 4 x 1 ranks. Write "train_batch_size": 8',
    ),
    "an unknown optimizer": ({"config": {"optimizer": {"type": "AdamX"}}}, '"AdamX" is unknown. Write "Adam'),
    "DeepSpeed's optimizer": ({"config": {"optimizer": {"type": "OneBitAdam"}}}, "in DeepSpeed only.*attach"),
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


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "OneCycle"}, '"OneCycle" exists in DeepSpeed only. Write lr_scheduler='),
        ({"type": "WarmUpLR"}, 'scheduler.type: "WarmUpLR" is unknown. Write "WarmupLR"'),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "0 is no whole number above 0"),
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
    for loss in (torch.ones(2, requires_grad=True), 1.0):
        with pytest.raises(UsageError, match=r"Write engine.backward\(loss.mean\(\)\)"):
            engine.backward(loss)
    engine.zero_grad()
    step(engine, 1.0)
    assert (master(engine), engine.micro_steps) == (-1.0, 1)
    engine(1.0).backward()
    with pytest.raises(UsageError, match="no loss was scaled since the last update"):
        engine.step()


def test_models_that_others_look_after_are_refused():
    with pytest.raises(UsageError, match=re.escape("Write model=model.module.")):
        initialize(model=nn.DataParallel(net()), config={})
