"""Autocast and the scaler for one device type, with the arguments of `torch.cuda.amp` and `torch.cpu.amp`."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch.compiler import is_compiling

from preamp.checks import level_of_caller
from preamp.errors import UsageError
from preamp.torch.autocasting.region import autocast
from preamp.torch.scaling.grad_scaler import GradScaler


class DeviceAutocast(autocast):
    """`preamp.torch.autocast` without its first argument, which is the device type of the class.

    Args:
        enabled: as there.
        dtype: as there; each class has a default.
        cache_enabled: as there.
        beyond: `casting`, `report` and `emulate`, which PyTorch does not have. With one of them the result is
            what `preamp.torch.autocast` returns: an edited region, not an instance of this class.

    Raises:
        UsageError: when a subclass is given one of those.
    """

    device_type: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if DeviceAutocast not in cls.__bases__:
            _warn(cls.device_type)

    @classmethod
    def _make(
        cls, enabled: bool, dtype: torch.dtype | None, cache_enabled: bool, beyond: dict[str, Any]
    ) -> Any:
        """Return what `__new__` returns; `beyond` are the arguments that PyTorch does not have."""
        if is_compiling():  # PyTorch's own region knows how to be compiled
            return autocast(cls.device_type, dtype, enabled, cache_enabled, **beyond)
        if DeviceAutocast in cls.__bases__:
            _warn(cls.device_type)
            if beyond:
                return autocast(cls.device_type, dtype, enabled, cache_enabled, **beyond)
        elif beyond:
            raise UsageError(
                f"{cls.__name__} is a subclass of autocast, and cannot take {', '.join(beyond)}. "
                f"Write preamp.torch.autocast({cls.device_type!r}, ...)."
            )
        return object.__new__(cls)


def _warn(device_type: str) -> None:
    """Warn that the names of a device type are deprecated, as PyTorch does."""
    warnings.warn(
        f"`preamp.torch.{device_type}.amp.autocast(args...)` is deprecated, like PyTorch's "
        f"`torch.{device_type}.amp.autocast`. Write `preamp.torch.autocast({device_type!r}, args...)`.",
        FutureWarning,
        stacklevel=level_of_caller("torch"),
    )


class DeviceGradScaler(GradScaler):
    """`preamp.torch.GradScaler` without its first argument, which is the device type of the class.

    Args:
        init_scale: as there, like the others.
        growth_factor: as there.
        backoff_factor: as there.
        growth_interval: as there.
        enabled: as there.
        beyond: the arguments that PyTorch does not have.
    """

    device_type: ClassVar[str]

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **beyond: Any,
    ) -> None:
        settings = (init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        super().__init__(self.device_type, *settings, **beyond)
