"""The names of `torch.cuda.amp`, with its order of arguments: the device type is "cuda"."""

from __future__ import annotations

import functools
from typing import Any

import torch

from preamp.torch import amp
from preamp.torch.amp.by_device import DeviceGradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

custom_fwd: functools.partial[Any] = functools.partial(amp.custom_fwd, device_type="cuda")
custom_bwd: functools.partial[Any] = functools.partial(amp.custom_bwd, device_type="cuda")


def autocast(
    enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True, **beyond: Any
) -> amp.autocast:
    """Return `preamp.torch.autocast("cuda", ...)`; `beyond` are its arguments that PyTorch does not have."""
    return amp.autocast("cuda", dtype, enabled, cache_enabled, **beyond)


class GradScaler(DeviceGradScaler):
    """`preamp.torch.GradScaler("cuda", ...)`."""

    device_type = "cuda"
