"""The names of `torch.cuda.amp`, with its order of arguments: the device type is "cuda"."""

from __future__ import annotations

import functools
from typing import Any

import torch

from preamp.torch import amp
from preamp.torch.amp.by_device import DeviceAutocast, DeviceGradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

custom_fwd: functools.partial[Any] = functools.partial(amp.custom_fwd, device_type="cuda")
custom_bwd: functools.partial[Any] = functools.partial(amp.custom_bwd, device_type="cuda")


class autocast(DeviceAutocast):  # PyTorch's name
    """`preamp.torch.autocast("cuda", ...)`. Deprecated, as in PyTorch."""

    device_type = "cuda"

    def __new__(
        cls,
        enabled: bool = True,
        dtype: torch.dtype | None = torch.float16,
        cache_enabled: bool = True,
        **beyond: Any,
    ) -> Any:
        return cls._make(enabled, dtype, cache_enabled, beyond)

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype | None = torch.float16, cache_enabled: bool = True
    ) -> None:
        super().__init__(self.device_type, dtype, enabled, cache_enabled)


class GradScaler(DeviceGradScaler):
    """`preamp.torch.GradScaler("cuda", ...)`."""

    device_type = "cuda"
