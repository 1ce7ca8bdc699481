"""The engine, and the optimizers beside those of the installed DeepSpeed, where it is right."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from preamp.deepspeed import initialize

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


def optimizer_of(section: dict[str, Any]) -> torch.optim.Optimizer:
    return initialize(model=nn.Linear(1, 1), config={"optimizer": section})[1]


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
        counted = engine.global_steps, engine.micro_steps, engine.skipped_steps
        seen.append((loss.item(), shared.item(), boundary, *counted, engine.was_step_applied()))
    return seen


@pytest.mark.parametrize("steps", [1, 3])
def test_in_float32_all_numbers_are_equal(both, steps):
    config = {**BATCH, "gradient_clipping": 0.0, "gradient_accumulation_steps": steps}
    ours, original = both(config, sgd)
    assert train(ours, torch.float32) == train(original, torch.float32)
    for mine, theirs in zip(ours.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_in_bfloat16_all_numbers_are_equal(both):
    ours, original = both({**BATCH, "gradient_clipping": 0.0, "bf16": {"enabled": True}}, sgd)
    assert train(ours, torch.bfloat16) == train(original, torch.bfloat16)
    for mine, theirs in zip(ours.parameters(), original.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_parameters_are_cast_and_buffers_are_not(both):
    ours, original = both({**BATCH, "bf16": {"enabled": True}}, sgd)
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


# Optimizers.


@pytest.mark.parametrize("params", [{}, {"adam_w_mode": False}, {"torch_adam": True}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("name", ["adamw", "ADAM"])
def test_adam_is_deepspeeds_adam(name, params):
    """DeepSpeed's kernel is not built on a CPU: its defaults are compared, and whether decay is decoupled."""
    from deepspeed.ops.adam import FusedAdam

    optimizer = optimizer_of({"type": name, "params": params})
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
    optimizer = optimizer_of({"type": name})
    assert type(optimizer).__name__.lower() == name.lower()
    assert math.isfinite(optimizer.param_groups[0]["lr"])
