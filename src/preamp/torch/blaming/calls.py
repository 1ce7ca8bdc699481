"""What kind of call a function makes: which of its tensors it writes, and what its copies in float32 do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from preamp.autocasting import tables
from preamp.blaming.blame import Part
from preamp.torch.autocasting import operators, rules


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


LOW = frozenset(
    getattr(torch, name)
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
BACKWARD = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])
# Their results do not depend on the values of the tensor that they are given.
FACTORIES = _names(
    "empty_like new_empty new_empty_strided zeros_like ones_like new_zeros new_ones full_like new_full "
    "rand_like randn_like randint_like new_tensor new"
)
CASTS = _names("to half bfloat16 float double type type_as cpu cuda xpu")
GRADIENT, DATA, REQUIRES_GRAD = (
    vars(Tensor.__base__)[name].__get__ for name in ("grad", "data", "requires_grad")
)
# They are about a tensor's gradient, which the program's tensors do not have here.
IGNORED = _names("register_hook retain_grad register_post_accumulate_grad_hook")
IN_PLACE = _names(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ "
    "__ior__ __ixor__ __ilshift__ __irshift__"
)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name that a function has in Python, such as "softmax" or "__iadd__"."""
    return getattr(function, "__name__", "") or str(function)


def operator_of(function: Callable[..., Any]) -> str:
    """Return the name of the operator that a function calls, as in autocast's tables."""
    name = name_of(function)
    if name == "__setitem__":
        return "copy_"
    if name in IN_PLACE:
        return name.strip("_")[1:]
    return operators.functions().get(function) or name


def is_tracked(value: object) -> bool:
    """Return whether a value is a tensor that has a gradient if anything has."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def raised(x: Tensor) -> Tensor:
    """Return a tensor in low precision in float32, any other as it is."""
    return x.float() if x.dtype in LOW else x


def written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor that a call writes into, None if there is none."""
    name = name_of(function)
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return next(
            (value for value in (*args, *kwargs.values()) if isinstance(value, (Tensor, list, tuple))), None
        )
    return None


def is_random(name: str) -> bool:
    """Return whether a function without tensors returns something else each time, or nothing definite."""
    return any(part in name for part in ("rand", "normal", "bernoulli", "multinomial", "empty"))


@cache
def part_of(operator: str) -> Part:
    """Return what low precision is to an operator: what it exists for, what autocast keeps it from, or other.

    It is what the table of CUDA's autocast says.
    """
    rule = rules.rules_of(rules.Edits("cuda", tables.CUDA)).get(operator.removesuffix("_"))
    return "product" if rule == "lower" else "sensitive" if rule == "float32" else "other"
