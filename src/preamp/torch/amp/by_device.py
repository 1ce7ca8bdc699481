"""The scaler of one device type, with the order of arguments of `torch.cuda.amp` and `torch.cpu.amp`."""

from __future__ import annotations

from typing import Any, ClassVar

from preamp.torch.scaler import GradScaler

__all__ = ["DeviceGradScaler"]


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
