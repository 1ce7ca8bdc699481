"""The names of `torch.cpu.amp`, with its order of arguments: the device type is "cpu"."""

from __future__ import annotations

from typing import Any

import torch

from preamp.torch.amp.by_device import DeviceAutocast, DeviceGradScaler

__all__ = ["GradScaler", "autocast"]


class autocast(DeviceAutocast):  # PyTorch's name
    """`preamp.torch.autocast("cpu", ...)`. Deprecated, as in PyTorch."""

    device_type = "cpu"

    def __new__(
        cls,
        enabled: bool = True,
        dtype: torch.dtype | None = torch.bfloat16,
        cache_enabled: bool = True,
        **beyond: Any,
    ) -> Any:
        return cls._make(enabled, dtype, cache_enabled, beyond)

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype | None = torch.bfloat16, cache_enabled: bool = True
    ) -> None:
        super().__init__(self.device_type, dtype, enabled, cache_enabled)


class GradScaler(DeviceGradScaler):
    """`preamp.torch.GradScaler("cpu", ...)`."""

    device_type = "cpu"
