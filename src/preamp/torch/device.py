"""Which device types a scaler can work on."""

from __future__ import annotations

from typing import Any

import torch

from preamp.checks import shown
from preamp.errors import PolicyError

__all__ = ["check_device"]

# PyTorch knows these names, and no tensor on them holds numbers that can be multiplied and read.
WITHOUT_NUMBERS = ("meta", "mkldnn", "opengl", "opencl", "ideep", "fpga")


def check_device(device: Any) -> None:
    """Refuse what is not a device, or one that never computes.

    Whether this machine has the device is not asked: the same script may run on another one. The name of a
    renamed backend counts from the import of its package on.

    Args:
        device: a device type, such as "cuda", a device, such as "cuda:0", or a `torch.device`.

    Raises:
        PolicyError: naming the device and what to write.
    """
    known = isinstance(device, str | torch.device)
    kind = str(device).partition(":")[0]
    if known and kind not in WITHOUT_NUMBERS:
        try:
            torch.device(device)
            return
        except RuntimeError:
            known = False
    reason = "has no numbers to scale" if known else "is not a device type of PyTorch"
    raise PolicyError(
        f'device={shown(device)} {reason}. Write device="cuda" or device="cpu", or the type of the device '
        'that the model is on, such as "mps" or "xpu"; for a backend of its own import its package first.'
    )
