"""The names of `torch.cpu.amp`, with its order of arguments: the device type is "cpu"."""

from __future__ import annotations

from typing import Any

import torch

from preamp.torch import amp
from preamp.torch.amp.by_device import DeviceGradScaler

__all__ = ["GradScaler", "autocast"]


def autocast(
    enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True, **beyond: Any
) -> amp.autocast:
    """Return `preamp.torch.autocast("cpu", ...)`; `beyond` are its arguments that PyTorch does not have."""
    return amp.autocast("cpu", dtype, enabled, cache_enabled, **beyond)


class GradScaler(DeviceGradScaler):
    """`preamp.torch.GradScaler("cpu", ...)`."""

    device_type = "cpu"
