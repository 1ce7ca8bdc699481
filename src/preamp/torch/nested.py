"""Map functions over nested tensors, and say what to write for a loss that is none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from preamp.checks import shown

T = TypeVar("T")


def map_tensors(function: Callable[[Tensor], Tensor], outputs: T) -> T:
    """Apply a function to a tensor, or to every tensor in a structure; return the same structure.

    Lists, tuples, named tuples and mutable mappings keep their type. Any other iterable becomes an
    iterator, as in PyTorch.

    Raises:
        ValueError: for something that is neither a tensor nor an iterable of tensors.
    """
    mapped: T = _mapped(function, outputs)
    return mapped


def _mapped(function: Callable[[Tensor], Tensor], outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, MutableMapping):
        mapped = copy.copy(outputs)
        for key, value in outputs.items():
            mapped[key] = map_tensors(function, value)
        return mapped
    if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes)):
        raise ValueError(
            f"outputs must be a Tensor or an iterable of Tensors, and {shown(outputs)} is not one. Write "
            "scaler.scale(loss) with the tensor that was computed from the model's outputs, without .item() "
            "or float()."
        )
    items = (map_tensors(function, value) for value in outputs)
    if hasattr(outputs, "_fields"):
        return type(outputs)(*items)
    return type(outputs)(items) if isinstance(outputs, (list, tuple)) else items


def how_to_write(loss: Any, line: str) -> str:
    """Return the likeliest remedy for a loss that is not a tensor with one element.

    Args:
        loss: what was given.
        line: the call to write instead, with {} for the loss.
    """
    if isinstance(loss, Tensor) and not loss.is_floating_point():
        return f"Write {line.format('loss')} with a loss of a floating-point dtype, not {loss.dtype}."
    if isinstance(loss, Tensor):
        return f"Write {line.format('loss.mean()')}."
    keys: Iterable[Any] = ()
    if isinstance(loss, Mapping):
        keys = ["loss", *loss] if "loss" in loss else loss
    elif isinstance(loss, Sequence) and not isinstance(loss, str | bytes):
        keys = range(len(loss))
    for key in keys:
        if isinstance(loss[key], Tensor):
            one, kind = f"loss[{key!r}]", type(loss).__name__
            return f"Write {line.format(one)} if the loss is that part of the {kind}."
    return (
        f"Write {line.format('loss')} with the tensor that was computed from the model's outputs, without "
        ".item() or float()."
    )
