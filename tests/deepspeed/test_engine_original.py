"""The engine, the optimizers and the schedules beside those of the installed DeepSpeed, where it is right."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from preamp.deepspeed import initialize
from preamp.deepspeed.engine import schedules
from preamp.deepspeed.engine.sections import optimizer_of

BATCH = {"train_micro_batch_size_per_gpu": 4}


@pytest.fixture
def both(peer, monkeypatch):
    """Return our engine and DeepSpeed's for one model and one configuration."""
    import deepspeed

    monkeypatch.setenv("LOCAL_RANK", "0")

    def engines(config: dict[str, Any], make: Any = None) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        model.register_buffer("table", torch.arange(3.0))
        model.register_buffer("count", torch.arange(3))
        made = []
        for initializes in (initialize, deepspeed.initialize):
            own = copy.deepcopy(model)
            optimizer = make(own.parameters()) if make else None
            made.append(initializes(model=own, optimizer=optimizer, config=copy.deepcopy(config))[0])
        return made

    return engines


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(engine: Any, dtype: torch.dtype, steps: int = 12) -> list[tuple[Any, ...]]:
    """Train on the same numbers, and return what there is to see after each micro-step."""
    random = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(steps):
        loss = engine(torch.randn(4, 4, generator=random).to(dtype)).float().square().mean()
        boundary = engine.is_gradient_accumulation_boundary()
        shared = engine.backward(loss)
        engine.step()
        counted = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
        told = engine.was_step_applied(), engine.get_lr(), engine.get_mom()
        seen.append((loss.item(), shared.item(), boundary, *counted, *told))
    return seen


@pytest.mark.parametrize("steps", [1, 3])
def test_in_float32_all_numbers_are_equal(both, steps):
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 3}}
    config = {**BATCH, "gradient_clipping": 0.0, "gradient_accumulation_steps": steps, "scheduler": schedule}
    ours, original = both(config, sgd)
    assert train(ours, torch.float32) == train(original, torch.float32)
    for mine, theirs in zip(ours.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_in_bfloat16_all_numbers_are_equal(both):
    ours, original = both({**BATCH, "gradient_clipping": 0.0, "bf16": {"enabled": True}}, sgd)
    assert train(ours, torch.bfloat16) == train(original, torch.bfloat16)
    for mine, theirs in zip(ours.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("data_types", [{}, {"buffer_dtype": "bf16"}, {"buffer_dtype": "torch.float32"}])
def test_parameters_are_cast_and_buffers_as_configured(both, data_types):
    config = {**BATCH, "bf16": {"enabled": True}, "data_types": data_types}
    ours, original = both(config, sgd)
    assert {name: value.dtype for name, value in ours.module.state_dict().items()} == {
        name: value.dtype for name, value in original.module.state_dict().items()
    }


def test_clipping_differs_by_deepspeeds_1e_6(both):
    ours, original = both({**BATCH, "gradient_clipping": 0.1}, sgd)
    train(ours, torch.float32), train(original, torch.float32)
    for mine, theirs in zip(ours.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_without_an_optimizer_both_refuse_backward(both):
    for engine in both({**BATCH}):
        loss = engine(torch.ones(4, 4)).mean()
        with pytest.raises((RuntimeError, AssertionError), match="optimizer"):
            engine.backward(loss)


def test_deepspeeds_checkpoint_gives_its_weights(both, tmp_path):
    ours, original = both({**BATCH, "bf16": {"enabled": True}}, sgd)
    train(original, torch.bfloat16)
    original.save_checkpoint(tmp_path, client_state={"epoch": 3})
    with pytest.raises(ValueError, match="Write load_module_only=True for the model's weights"):
        ours.load_checkpoint(tmp_path)
    path, _ = ours.load_checkpoint(tmp_path, load_module_only=True)
    assert path.endswith("global_step12/mp_rank_00_model_states.pt")
    for mine, theirs in zip(ours.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_of_ours_gives_deepspeed_its_weights(both, tmp_path):
    ours, original = both({**BATCH}, sgd)
    train(ours, torch.float32)
    ours.save_checkpoint(tmp_path)
    original.load_checkpoint(tmp_path, load_module_only=True)
    for mine, theirs in zip(ours.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# Schedules.

rates = st.floats(0.0, 1.0)
counts = st.integers(1, 12)
warmups = {"warmup_num_steps": counts, "warmup_type": st.sampled_from(["log", "linear"])}
SCHEDULES = {
    "WarmupLR": st.fixed_dictionaries(warmups, optional={"warmup_min_lr": rates, "warmup_max_lr": rates}),
    "WarmupDecayLR": st.fixed_dictionaries(
        {**warmups, "total_num_steps": counts}, optional={"warmup_min_lr": rates, "warmup_max_lr": rates}
    ),
    "WarmupCosineLR": st.fixed_dictionaries(
        {**warmups, "total_num_steps": counts}, optional={"warmup_min_ratio": rates, "cos_min_ratio": rates}
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_schedules_give_deepspeeds_rates(name, data):
    from deepspeed.runtime import lr_schedules

    options = data.draw(SCHEDULES[name])
    rates = []
    for module in (schedules, lr_schedules):
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.3)]
        optimizer = torch.optim.SGD(groups)
        schedule = getattr(module, name)(optimizer, **options)
        seen = []
        for _ in range(30):
            seen.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
        rates.append(seen)
    assert rates[0] == rates[1]


def test_a_schedule_goes_on_from_its_state():
    def made() -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return schedules.WarmupCosineLR(optimizer, total_num_steps=9, warmup_num_steps=3)

    first, second = made(), made()
    for _ in range(5):
        first.optimizer.step()
        first.step()
    second.load_state_dict(first.state_dict())
    for one in (first, second):
        one.optimizer.step()
        one.step()
    assert first.get_last_lr() == second.get_last_lr()


# Optimizers.


@pytest.mark.parametrize("params", [{}, {"adam_w_mode": False}, {"torch_adam": True}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("name", ["Adam", "adamw", "ADAM"])
def test_adam_is_deepspeeds_adam(name, params):
    """DeepSpeed's kernel is not built on a CPU: its defaults are compared, and whether decay is decoupled."""
    from deepspeed.ops.adam import FusedAdam

    optimizer = optimizer_of({"type": name, "params": params}, [nn.Parameter(torch.ones(1))])
    decoupled = name.lower() == "adamw" or params.get("adam_w_mode", True)
    assert isinstance(optimizer, torch.optim.AdamW) is decoupled
    original = (
        (torch.optim.AdamW if decoupled else torch.optim.Adam) if params.get("torch_adam") else FusedAdam
    )
    defaults = inspect.signature(original).parameters
    for option in ("lr", "betas", "eps", "weight_decay"):
        assert optimizer.param_groups[0][option] == params.get(option, defaults[option].default)


@pytest.mark.parametrize("name", ["adagrad", "Adagrad", "RMSprop", "Adadelta"])
def test_other_optimizers_go_by_their_names(name):
    optimizer = optimizer_of({"type": name}, [nn.Parameter(torch.ones(1))])
    assert type(optimizer).__name__.lower() == name.lower()
    assert math.isfinite(optimizer.param_groups[0]["lr"])
