"""The engine on plain PyTorch: exact steps, DeepSpeed's rule for the scale, and what cannot work."""

from __future__ import annotations

import argparse
import copy
import logging
import math
from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from preamp import Dynamic, ScaleExhausted, Static, Trace, UsageError, dialects, simulate
from preamp.deepspeed import initialize
from preamp.systems.deepspeed_config import Settings
from tests.seeing import Remembering

from .engines import HALVES, Weight, fp16, master, net, step, trained

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
        # The document has no optimizer, and DeepSpeed then refuses backward as we do.
        config={"fp16": {"enabled": True, "loss_scale": 0}, "optimizer": {"type": "AdamW"}},
    )
    losses = []
    for _ in range(50):
        outputs = model_engine(inputs)
        loss = criterion(outputs, labels)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())

    assert type(optimizer) is torch.optim.AdamW
    assert losses[-1] < losses[0]
    assert model_engine.global_steps == 50
    assert model_engine.cur_scale in (2.0**15, 2.0**16)  # 2**16 is not a float16


def test_without_an_optimizer_the_engine_evaluates():
    engine, optimizer, *_ = initialize(model=Weight(3.0), config=fp16())
    assert engine(2.0).item() == 6.0
    assert (optimizer, engine.cur_scale, engine.get_global_grad_norm()) == (None, 1.0, None)
    for call in (lambda: engine.backward(engine(1.0)), engine.step):
        with pytest.raises(UsageError, match=r"Write initialize\(\.\.\., optimizer=torch.optim.AdamW"):
            call()


# Steps.


def test_a_policy_that_sees_is_shown_what_the_micro_steps_add_up_to():
    policy = Remembering(init_scale=2.0**4)
    engine = trained(Weight(), Settings(precision="float16", policy=policy, gradient_accumulation_steps=2))
    for gradient in (1.0, -5.0):
        step(engine, gradient)
    assert engine.last_step.amax == engine.scaler.policy_state.amax == 2.0**5


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
    assert trace.policy == repr(engine.scaler.policy)


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
    engine = trained(Weight(), fp16(initial_scale_power=10, **section), on_step=trace)
    for overflow in overflows:
        before = master(engine)
        step(engine, math.inf if overflow else 2.0**-15)  # up to a scale of 2**30
        assert engine.was_step_applied() is not overflow
        assert (master(engine) == before) is overflow
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
        assert engine.cur_scale == 128.0
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
    assert (engine.micro_steps, engine.global_steps) == (7, 2)


def test_several_losses_add_up():
    engine = trained(Weight(), {**fp16(), "gradient_accumulation_steps": 2})
    loss = engine(3.0)
    assert engine.backward(loss, retain_graph=True).item() == 0.0
    engine.backward(loss)
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
    with pytest.raises(ScaleExhausted):
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


def test_settings_and_files_and_arguments_configure(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"fp16": {"enabled": true, "loss_scale": 8}} // a comment')
    chosen = Settings(precision="float16", policy=Static(8.0), max_norm=1.0)
    for given_ in (
        {"config": path},
        {"config": str(path)},
        {"config": chosen},
        {"args": argparse.Namespace(deepspeed_config=str(path))},
    ):
        engine = trained(Weight(), given_.pop("config", None), **given_)
        assert (engine.cur_scale, engine.settings) == (8.0, chosen)


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


def test_auto_cast_keeps_the_kind_of_a_mapping():
    class Batch(UserDict):
        size = 2

    class Sized(nn.Linear):
        def forward(self, batch: Any) -> Any:
            return batch.size, batch["x"].dtype

    batch = Batch(x=torch.ones(1))
    engine = initialize(model=Sized(1, 1), config=fp16(auto_cast=True))[0]
    assert engine(batch) == (2, torch.float16)
    assert batch["x"].dtype is torch.float32


@pytest.mark.parametrize("section", HALVES)
def test_a_batch_norm_trains_in_half_precision_and_complex_numbers_stay(section):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("rotations", torch.tensor([1j]))
    model.register_buffer("positions", torch.tensor([2.0**12 + 1]))
    engine = trained(model, {section: {"enabled": True}}, lr=0.1)
    engine.backward(engine(torch.randn(8, 3).to(HALVES[section])).float().square().mean() / 1024)
    engine.step()
    assert model[1].num_batches_tracked == 1
    assert (model.rotations, model.positions) == (torch.tensor([1j]), torch.tensor([2.0**12 + 1]))


def test_inputs_of_another_precision_are_explained():
    for section, line in (("fp16", '"auto_cast": true'), ("bf16", "inputs.to(torch.bfloat16)")):
        engine = initialize(model=net(), config={section: {"enabled": True}})[0]
        with pytest.raises(RuntimeError) as raised:
            engine(torch.ones(2, 3))
        assert line in raised.value.__notes__[0]


def test_frozen_parameters_and_clients_groups():
    model = net()
    model[0].requires_grad_(False)
    groups = [{"params": [model[2].weight], "lr": 0.5}, {"params": [model[2].bias]}]
    config = {**fp16(), "optimizer": {"type": "SGD", "params": {"lr": 0.25}}}
    engine, optimizer, _, _ = initialize(model=model, model_parameters=groups, config=config)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    before = copy.deepcopy(model.state_dict())
    engine.backward(engine(torch.ones(2, 3).half()).float().mean())
    engine.step()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["2.weight", "2.bias"]

    _, optimizer, _, _ = initialize(model=model, config=config)
    assert [group["params"][0].shape for group in optimizer.param_groups] == [model[2].weight.shape]
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_a_group_added_later_is_trained_and_named(caplog):
    model = nn.ModuleDict({"head": Weight(), "body": Weight().requires_grad_(False)})
    optimizer = torch.optim.SGD(model["head"].parameters(), lr=1.0)
    engine, scaled, _, _ = initialize(model=model, optimizer=optimizer, config=fp16())
    model["body"].requires_grad_(True)
    scaled.add_param_group({"params": list(model["body"].parameters()), "lr": 0.5})
    for gradient in (1.0, math.inf):
        engine.backward(model["head"](1.0) + model["body"](gradient))
        engine.step()
    assert [group["params"][0].item() for group in scaled.param_groups] == [-1.0, -0.5]
    assert engine.last_step.culprits == ("body.weight",)
    assert caplog.records[-1].culprits == ("body.weight",)


def test_gradients_of_before_are_forgotten():
    model = Weight()
    model(3.0).backward()
    engine = trained(model, fp16())
    step(engine, 1.0)
    assert master(engine) == -1.0


def test_an_update_without_gradients_is_not_counted():
    model = nn.ModuleList([Weight(), Weight()])
    engine = initialize(model=model, optimizer=torch.optim.SGD(model[0].parameters(), lr=1.0), config=fp16())[
        0
    ]
    engine.backward(model[1](1.0))
    with pytest.raises(AssertionError, match="have grad None"):
        engine.step()
    assert (engine.micro_steps, engine.global_steps, engine.is_gradient_accumulation_boundary()) == (
        0,
        0,
        True,
    )
    engine.backward(model[0](1.0))
    engine.step()
    assert (engine.micro_steps, master(engine)) == (1, -1.0)


# Checkpoints.


@pytest.mark.parametrize(
    "section", [{}, fp16(hysteresis=1, loss_scale_window=2), {"bf16": {"enabled": True}}]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_goes_on_bit_for_bit(section, accumulation, tmp_path):
    config = {**section, "optimizer": {"type": "AdamW"}, "gradient_accumulation_steps": accumulation}
    whole, resumed = (initialize(model=net(), config=config)[0] for _ in range(2))
    random = torch.Generator().manual_seed(0)
    batches = torch.randn(8, 4, 3, generator=random).to(whole.module[0].weight.dtype)

    def train(engine: Any, begin: int, end: int) -> None:
        for number in range(begin, end):
            factor = math.inf if section and number == 1 else 1.0
            engine.backward(engine(batches[number]).float().square().mean() * factor)
            engine.step()

    train(whole, 0, 4)
    torch.save(whole.state_dict(), tmp_path / "engine.pt")
    train(whole, 4, 8)
    train(resumed, 0, 1)  # forgotten
    resumed.load_state_dict(torch.load(tmp_path / "engine.pt", weights_only=True))
    train(resumed, 4, 8)
    assert str(resumed.state_dict()) == str(whole.state_dict())
    for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert (resumed.micro_steps, resumed.skipped_steps) == (8, 1 if section else 0)


def test_an_unfinished_update_begins_anew():
    engine, resumed = (trained(Weight(), {**fp16(), "gradient_accumulation_steps": 2}) for _ in range(2))
    for gradient in (1.0, 1.0, 64.0):
        step(engine, gradient)
    resumed.load_state_dict(engine.state_dict())
    assert (resumed.micro_steps, resumed.global_steps) == (2, 1)
    for gradient in (3.0, 3.0):
        step(resumed, gradient)
    assert master(resumed) == -4.0
