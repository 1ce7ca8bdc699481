"""Small models, and engines that train them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from preamp.deepspeed import Engine, initialize

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
