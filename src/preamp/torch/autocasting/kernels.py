"""The kernels of edited operators: one for each rule, and one for emulation.

Each runs the operator with autocast off, so that the operators it calls follow the same rule. The dispatcher
passes the set of dispatch keys first; kernels that call the operator from the top ignore it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from preamp.arrays import torch_compat as compat
from preamp.autocasting.tables import Rule
from preamp.errors import UsageError
from preamp.torch.autocasting import operators
from preamp.torch.autocasting.thread_state import Kernel

# These take little more than half the time of Tensor.to, which parses its arguments.
CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
}
ELIGIBLE = {torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
ELIGIBLE |= {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
INSTEAD = {"binary_cross_entropy": "binary_cross_entropy_with_logits on what the sigmoid was applied to"}


def make(rule: Rule, name: str, device_type: str) -> Kernel:
    """Return the kernel of an operator under a rule."""
    if rule == "untouched":
        return operators.without_autocast(name, device_type)
    if rule == "refuse":
        return _refuse(name)
    if rule == "widest":
        return _cast_to(lambda values: _widest(values, device_type), name, device_type)
    if rule == "float32" and operators.listed(device_type).get(name) == "lower":
        return _listed_with(torch.float32, name, device_type)
    if rule == "float32":
        run = _cast_to(lambda _: torch.float32, name, device_type)
    else:
        run = _cast_to(lambda _: torch.get_autocast_dtype(device_type), name, device_type)
    return _unless_dtype_given(run, name, device_type)


def cast(values: Iterable[object], dtype: torch.dtype, device_type: str) -> list[Any]:
    """Return values with every eligible tensor cast, those in lists too.

    Eligible are floating-point tensors of the device type, except float64.
    """
    to = CASTS[dtype] if dtype in CASTS else lambda tensor: tensor.to(dtype)
    return [
        to(value)
        if isinstance(value, Tensor)
        and (has := value.dtype) is not dtype
        and has in ELIGIBLE
        and value.device.type == device_type
        else cast(value, dtype, device_type)
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]


def is_eligible(value: object, device_type: str) -> TypeGuard[Tensor]:
    """Return whether autocast casts a value: a floating-point tensor of the device type, float64 excepted."""
    return isinstance(value, Tensor) and value.dtype in ELIGIBLE and value.device.type == device_type


def emulate(name: str, device_type: str, dtype: torch.dtype | None) -> Kernel:
    """Return an operator that rounds its inputs and its result, and computes in float32 in between.

    Autograd records the casts down and up again, so gradients are rounded at the same places. It is what a
    tensor core does that accumulates in float32.
    """
    operator, switch = operators.call(name), torch.set_autocast_enabled

    @compat.untraced
    def emulated(_: object, /, *args: object, **kwargs: object) -> object:
        low = torch.get_autocast_dtype(device_type)
        if dtype and low is torch.float16:  # it stands for float8, of which PyTorch has no regions
            low = dtype
        to = CASTS[low] if low in CASTS else lambda tensor: tensor.to(low)
        switch(device_type, False)
        try:
            if kwargs:
                kwargs = dict(zip(kwargs, _rounded(kwargs.values(), to, device_type), strict=True))
            result = operator(*_rounded(args, to, device_type), **kwargs)
            return _rounded([result], to, device_type)[0]
        finally:
            switch(device_type, True)

    return emulated


@cache
def before(device_type: str, name: str) -> Kernel:
    """Return what the dispatcher does without our kernel: PyTorch's cast, or just the operator."""
    if name in operators.registered(device_type):
        kernel = compat.kernel_at(f"aten::{name}", operators.dispatch_key(device_type))
        if kernel:
            return kernel
        if rule := operators.listed(device_type).get(name):  # ours follows the same rule, without the cache
            return make(rule, name, device_type)
    if not operators.is_composite(name):
        return operators.without_autocast(name, device_type)
    operator, below = operators.find(name), operators.keys_below(device_type)
    return lambda keyset, *args, **kwargs: operator.redispatch(keyset & below, *args, **kwargs)


def _listed_with(dtype: torch.dtype, name: str, device_type: str) -> Kernel:
    """Return PyTorch's own cast of a listed operator, to another precision: it is faster than ours."""
    listed = before(device_type, name)

    @compat.untraced
    def cast_by_pytorch(keyset: torch.DispatchKeySet, /, *args: object, **kwargs: object) -> object:
        low = torch.get_autocast_dtype(device_type)
        torch.set_autocast_dtype(device_type, dtype)
        try:
            return listed(keyset, *args, **kwargs)
        finally:
            torch.set_autocast_dtype(device_type, low)

    return cast_by_pytorch


def _cast_to(choose: Callable[[Sequence[object]], torch.dtype], name: str, device_type: str) -> Kernel:
    operator, switch = operators.call(name), torch.set_autocast_enabled

    @compat.untraced
    def cast_first(_: object, /, *args: object, **kwargs: object) -> object:
        switch(device_type, False)  # not a context manager: these lines are the whole cost of an edit
        try:
            if not kwargs:
                return operator(*cast(args, choose(args), device_type))
            values = [*args, *kwargs.values()]
            values = cast(values, choose(values), device_type)
            named = dict(zip(kwargs, values[len(args) :], strict=True))
            return operator(*values[: len(args)], **named)
        finally:
            switch(device_type, True)

    return cast_first


def _widest(values: Sequence[object], device_type: str) -> torch.dtype:
    dtypes = set(_dtypes(values, device_type))
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _refuse(name: str) -> Kernel:
    base = name.partition(".")[0]
    instead = INSTEAD.get(
        base, f"`with autocast(device_type, enabled=False)` around {base} of float32 tensors"
    )
    message = f"{base} is refused in this autocast region. Write {instead}."

    def refused(*args: object, **kwargs: object) -> NoReturn:
        raise UsageError(message)

    return refused


def _unless_dtype_given(run: Kernel, name: str, device_type: str) -> Kernel:
    """Return a kernel that casts nothing where `dtype=` is given."""
    arguments = [argument.name for argument in operators.find(name)._schema.arguments]
    if "dtype" not in arguments:
        return run
    place, uncast = arguments.index("dtype"), operators.without_autocast(name, device_type)

    def run_unless_dtype_given(keyset: torch.DispatchKeySet, *args: object, **kwargs: object) -> object:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        return (run if given is None else uncast)(keyset, *args, **kwargs)

    return run_unless_dtype_given


def _rounded(values: Iterable[object], to: Callable[[Tensor], Tensor], device_type: str) -> list[Any]:
    """Return values with every eligible tensor rounded to a low precision, in float32."""
    return [
        to(value).float()
        if is_eligible(value, device_type)
        else type(value)(_rounded(value, to, device_type))
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]


def _dtypes(values: Iterable[object], device_type: str) -> Iterable[torch.dtype]:
    for value in values:
        if is_eligible(value, device_type):
            yield value.dtype
        elif isinstance(value, (list, tuple)):
            yield from _dtypes(value, device_type)
