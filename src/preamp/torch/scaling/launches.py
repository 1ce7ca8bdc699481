"""Where the scalar work of a step is done by `triton_kernels`, and the launches.

On CUDA and XPU devices, for which PyTorch brings Triton. Nothing is imported before the first step on such a
device. Every function returns None, or False, where PyTorch's operators have to do the work instead: without
Triton, after TensorFlow was imported (loading Triton then crashes the process), in code
that `torch.compile` traces (which fuses operators itself), and where the first launch fails, as it does
without a C compiler or, on some XPU devices, without float64.

A CUDA graph that is being captured gets no kernel that was not launched before: compiling and loading belong
to the warm-up that PyTorch requires before a capture.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preamp.arrays.torch import note_writing
from preamp.checks import to_float32
from preamp.policy import Dynamic, Policy

DEVICE_TYPES = ("cuda", "xpu")
_launched: set[tuple[Any, ...]] = set()
_failed: set[str] = set()  # device types


class Prepared(NamedTuple):
    """The inputs of an optimizer's step, and its record, as 0-dim tensors of their own.

    Attributes:
        scale: the scale that was in the loss.
        divisor: the divisor of the gradients.
        multiplier: the same with clipping, for `grad_scale`.
        found_inf: 1.0 if a gradient is not finite, else 0.0.
        finite: the opposite, as a boolean.
    """

    scale: Tensor
    divisor: Tensor
    multiplier: Tensor
    found_inf: Tensor
    finite: Tensor


def can_prepare(scale: Tensor) -> bool:
    """Return whether `prepare` is worth asking, with this scale."""
    return _is_covered(scale) and _may_launch("prepare", scale.device, ())


def prepare(total: Tensor, scale: Tensor, constant: float, max_norm: float | None) -> Prepared | None:
    """Return what follows from the norm of all gradients.

    Args:
        total: the norm of the scaled gradients; float32, or None is returned.
        scale: the scale that is in them.
        constant: what else is in them.
        max_norm: what to clip the norm to.
    """
    device = scale.device
    if total.dtype is not torch.float32 or total.device != device or not can_prepare(scale):
        return None
    numbers = torch.empty(4, dtype=torch.float32, device=device)
    finite = torch.empty((), dtype=torch.bool, device=device)
    limit = math.inf if max_norm is None else to_float32(max_norm)
    if not _launch("prepare", device, (total, scale, numbers, finite, to_float32(constant), limit), {}):
        return None
    scale, divisor, multiplier, found_inf = numbers.unbind()
    return Prepared(scale, divisor, multiplier, found_inf, finite)


def advance(policy: Policy[Any], state: Any, finite: Tensor) -> Tensor | None:
    """Move a policy's state on by one step, in place; return a copy of the new scale.

    Args:
        policy: `Dynamic`, or None is returned.
        state: 0-dim tensors.
        finite: a 0-dim boolean where the state is.
    """
    if type(policy) is not Dynamic or not _is_covered(state.scale):
        return None
    copy, device = torch.empty_like(state.scale), state.scale.device
    if not _launch("advance", device, (finite, *state, copy), _settings(policy)):
        return None
    note_writing(state)
    return copy


def _settings(policy: Dynamic) -> dict[str, float | bool]:
    compat, resets = policy.compat, policy.hysteresis_reset
    return {
        "GROWTH": policy.growth_factor,
        "BACKOFF": policy.backoff_factor if compat.backoff_divisor is None else compat.backoff_divisor,
        "DIVIDES": compat.backoff_divisor is not None,
        "INTERVAL": to_float32(policy.growth_interval),
        "DELAY": to_float32(compat.growth_delay),
        "HYSTERESIS": to_float32(policy.hysteresis),
        "FLOOR": 0.0 if policy.min_scale is None else to_float32(policy.min_scale),
        "CEILING": math.inf if policy.max_scale is None else to_float32(policy.max_scale),
        "REFUSES": compat.at_ceiling == "refuse",
        "STRICT": compat.bounds == "strict",
        "ALWAYS": compat.bounds == "always",
        "RESET_BY_CLEAN": "clean" in resets,
        "RESET_BY_GROWTH": "growth" in resets,
        "RESET_BY_BACKOFF": "backoff" in resets,
    }


def _is_covered(scale: Tensor) -> bool:
    """Return whether there are kernels for tensors on this tensor's device."""
    if torch.compiler.is_compiling() or scale.device.type not in DEVICE_TYPES:
        return False
    usual = type(scale) is Tensor and scale.dtype is torch.float32 and scale.dim() == 0
    return usual and scale.device.type not in _failed and _kernels() is not None


def _kernels() -> Any:
    """Return the module of the kernels; None where Triton cannot be imported."""
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        return None
    return _imported()


@cache
def _imported() -> Any:
    try:
        return import_module("preamp.torch.scaling.triton_kernels")
    except Exception:  # a Triton that is broken, or that fits another Python, raises what it likes
        return None


def _may_launch(name: str, device: torch.device, settings: tuple[Any, ...]) -> bool:
    """Return whether a kernel was launched before, or may be now for the first time."""
    if (name, device, settings) in _launched:
        return True
    is_capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return is_capturing is None or not is_capturing()


def _launch(name: str, device: torch.device, arguments: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    """Return whether a kernel could be launched."""
    key = (name, device, tuple(settings.values()))
    if not _may_launch(*key):
        return False
    try:
        with _current(device):
            getattr(_kernels(), name)[(1,)](*arguments, **settings, num_warps=1)
    except Exception:
        if key in _launched:
            raise
        _failed.add(device.type)
        return False
    _launched.add(key)
    return True


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the one that Triton launches on; a CPU is one in its interpreter alone."""
    if device.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context
