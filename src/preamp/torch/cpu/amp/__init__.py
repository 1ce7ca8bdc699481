"""The names of `torch.cpu.amp`, with its order of arguments: the device type is "cpu"."""

from __future__ import annotations

from typing import Any

import torch

from preamp.torch import amp

__all__ = ["GradScaler", "autocast"]


def autocast(
    enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True, **beyond: Any
) -> amp.autocast:
    """Return `preamp.torch.autocast("cpu", ...)`; `beyond` are its arguments that PyTorch does not have."""
    return amp.autocast("cpu", dtype, enabled, cache_enabled, **beyond)


class GradScaler(amp.GradScaler):
    """`preamp.torch.GradScaler("cpu", ...)`; `beyond` are its arguments that PyTorch does not have."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **beyond: Any,
    ) -> None:
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled, **beyond)
