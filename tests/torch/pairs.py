"""What the tests of the PyTorch scaler share: scalers of both makes, parameters, gradients, comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from preamp.torch import GradScaler

INF, NAN = float("inf"), float("nan")
SETTINGS = {"init_scale": 2.0**10, "growth_interval": 3}


def ours(**changes: Any) -> GradScaler:
    return GradScaler("cpu", **{**({} if "policy" in changes else SETTINGS), **changes})


def theirs(**changes: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{**SETTINGS, **changes})


def make(kind: str, parameters: Iterable[Any], lr: float = 0.5, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of `torch.optim`; "AdamW fused" is short for `fused=True`."""
    name, *fused = kind.split()
    return getattr(torch.optim, name)(parameters, lr=lr, **options, **dict.fromkeys(fused, True))


def weights(count: int = 1, *, dtype: torch.dtype = torch.float32, size: int = 3) -> list[torch.nn.Parameter]:
    """Return parameters that are 0, so that SGD writes its steps into them."""
    return [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in range(count)]


def give(scaler: torch.amp.GradScaler, parameter: torch.Tensor, gradient: Any) -> None:
    """Give a parameter a scaled gradient without a backward pass."""
    scaler.scale(torch.zeros(()))
    parameter.grad = gradient if isinstance(gradient, torch.Tensor) else torch.full_like(parameter, gradient)


def contents(value: Any) -> Any:
    """Return nested containers with lists in place of tensors, so that == compares every bit but NaN's."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: contents(one) for key, one in value.items()}
    return [contents(one) for one in value] if isinstance(value, (list, tuple)) else value


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return what an optimizer remembers, as plain numbers."""
    return contents(optimizer.state_dict()["state"])
