"""Which device types a scaler can work on, and what a device has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch_compat import cpu_features
from preamp.checks import shown
from preamp.errors import PolicyError

# PyTorch knows these names, and no tensor on them holds numbers that can be multiplied and read.
WITHOUT_NUMBERS = ("meta", "mkldnn", "opengl", "opencl", "ideep", "fpga")

# Whether a device type computes in float64, as far as that is known; the others are asked once.
_has_double = {"cpu": True, "cuda": True, "meta": True, "mps": False}


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


def widest(device: torch.device) -> torch.dtype:
    """Return the widest float dtype that a device computes in: float64, or float32 where that raises.

    MPS has no float64, and neither have some XPU devices and several backends of their own. Inside
    `torch.compile` a device that has not been asked before counts as one without.
    """
    kind = device.type
    if kind not in _has_double and not torch.compiler.is_compiling():
        _has_double[kind] = _computes_in_double(device)
    return torch.float64 if _has_double.get(kind) else torch.float32


def _computes_in_double(device: torch.device) -> bool:
    try:
        return (torch.ones(1, dtype=torch.float64, device=device) * 0.5).dtype is torch.float64
    except (RuntimeError, TypeError):  # both are raised, by different backends
        return False


def is_capturing(tensor: Tensor) -> bool:
    """Return whether what is computed on a tensor's device now is recorded into a graph, as CUDA's are."""
    module = getattr(torch, tensor.device.type, None)
    asked = getattr(module, "is_current_stream_capturing", None)  # of CUDA, and of backends with such graphs
    return asked is not None and bool(asked())


def device_types() -> list[str]:
    """Return the types of device that this machine has: the CPU, and an accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def synchronize(kind: str) -> None:
    """Wait until a device type has computed what was asked of it."""
    wait = getattr(getattr(torch, kind, None), "synchronize", None)
    if wait is not None and kind != "cpu":
        wait()


def native_precisions(kind: str) -> dict[str, bool]:
    """Return which precisions the hardware has, by what PyTorch says; what it does not say is left out.

    Args:
        kind: the device type. Of a CUDA device type, the current device is asked.
    """
    if kind == "cpu":
        features = cpu_features()
        if "avx512_bf16" not in features:  # another architecture, of which the names are not known here
            return {}
        return {
            "bfloat16": features["avx512_bf16"] or features.get("amx_bf16", False),
            "float16": features.get("avx512_fp16", False) or features.get("amx_fp16", False),
            "float8": features.get("avx10_2", False),
        }
    if kind == "cuda":
        found = {"bfloat16": torch.cuda.is_bf16_supported(including_emulation=False)}
        if not torch.version.hip:
            capability = torch.cuda.get_device_capability()
            found |= {"float16": capability >= (5, 3), "float8": capability >= (8, 9)}
        return found
    asked = getattr(getattr(torch, kind, None), "is_bf16_supported", None)
    return {} if asked is None else {"bfloat16": bool(asked())}
