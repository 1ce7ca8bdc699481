"""Decorators for custom autograd functions: forward with inputs cast, backward in forward's precision.

They do what PyTorch's decorators of the same names do. Beyond that, a structure of inputs keeps its type,
dataclasses are cast too, and backward restores an edited table or emulation along with the precision, in
whichever thread it runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from preamp.errors import UsageError
from preamp.torch.autocasting.modes import current, in_force, is_eligible
from preamp.torch.autocasting.region import autocast

F = TypeVar("F", bound=Callable[..., Any])


@overload
def custom_fwd(fwd: F, *, device_type: str, cast_inputs: torch.dtype | None = None) -> F: ...


@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[[F], F]: ...


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorate the `forward` of an autograd function for use in autocast regions.

    Args:
        fwd: the static method `forward(ctx, ...)`; None returns a decorator.
        device_type: "cpu", "cuda", ...
        cast_inputs: inside a region, floating-point tensors of the device type, float64 excepted, are cast to
            this dtype, also in lists, tuples, mappings and dataclasses, and forward runs with autocast off.
            None leaves the inputs and the region as they are. Outside of regions it has no effect.

    Raises:
        ValueError: when `device_type` is not a string.
    """
    _check(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        inside = torch.is_autocast_enabled(device_type)
        ctx._dtype = torch.get_autocast_dtype(device_type)
        ctx._fwd_used_autocast = inside and cast_inputs is None
        mode = current(device_type)
        ctx._edits = mode and mode.key
        if not inside or cast_inputs is None:
            return fwd(ctx, *args, **kwargs)
        with autocast(device_type, enabled=False):
            return fwd(ctx, *_cast(args, device_type, cast_inputs), **_cast(kwargs, device_type, cast_inputs))

    return forward


@overload
def custom_bwd(bwd: F, *, device_type: str) -> F: ...


@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[F], F]: ...


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Any:
    """Decorate the `backward` of an autograd function: it runs in the autocast state that forward ran in.

    Args:
        bwd: the static method `backward(ctx, ...)`; None returns a decorator.
        device_type: "cpu", "cuda", ...

    Raises:
        ValueError: when `device_type` is not a string.
        UsageError: in backward, when forward was not decorated.
    """
    _check(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(ctx, "_fwd_used_autocast"):
            raise UsageError(
                "custom_bwd does not know the autocast state of forward. "
                f"Put @custom_fwd(device_type={device_type!r}) on forward."
            )
        edits = getattr(ctx, "_edits", None)
        inner = autocast(device_type, dtype=ctx._dtype, enabled=ctx._fwd_used_autocast)
        with in_force(device_type, edits) if edits else nullcontext(), inner:
            return bwd(ctx, *args, **kwargs)

    return backward


def _check(device_type: object) -> None:
    if not isinstance(device_type, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Return a value with the eligible tensors in lists, tuples and dicts cast, as PyTorch does."""
    if isinstance(value, Tensor):
        return value.to(dtype) if is_eligible(value, device_type) else value
    if type(value) is dict:
        return {key: _cast(item, device_type, dtype) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)  # of the same type, such as a defaultdict
        for key, item in value.items():
            copied[key] = _cast(item, device_type, dtype)
        return copied
    if isinstance(value, (list, tuple)):
        cast = [_cast(item, device_type, dtype) for item in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    return value
