"""Tensors in lists, tuples, dicts and what users nest of them.

This room walks structures and compares shapes. It refuses to know what the tensors are for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from preamp.checks import shown
from preamp.errors import PolicyError, UsageError

T = TypeVar("T")


def map_tensors(function: Callable[[Tensor], Tensor], outputs: T) -> T:
    """Apply a function to a tensor, or to every tensor in a structure; return the same structure.

    Lists, tuples, named tuples and mutable mappings keep their type. Any other iterable becomes an
    iterator, as in PyTorch.

    Raises:
        ValueError: for what is neither a tensor nor an iterable of them.
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
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    items = (map_tensors(function, value) for value in outputs)
    if hasattr(outputs, "_fields"):
        return type(outputs)(*items)
    return type(outputs)(items) if isinstance(outputs, (list, tuple)) else items


def require_tensor(loss: Any, line: str) -> None:
    """Refuse a loss that is not a tensor, such as a Python number.

    Args:
        loss: what was given.
        line: what to write for a loss that the model led to.

    Raises:
        UsageError: naming the loss.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"the loss is {shown(loss)}, a {type(loss).__name__} and not a tensor, so it has no gradient. "
            f"Write {line} with the tensor that the model's outputs led to, without .item() or float()."
        )


def check_shapes(
    name: str, saved: Any, tensors: Sequence[Tensor], *, may_lack: bool = False, all_of_them: bool = False
) -> None:
    """Refuse saved tensors that are not of the shapes of others, from the first of these on.

    Args:
        name: what they are, for the message.
        saved: the value of a checkpoint.
        tensors: what they are to fit.
        may_lack: None may stand for a tensor.
        all_of_them: whether there must be as many.

    Raises:
        PolicyError: naming the shapes of both.
    """
    values = saved if isinstance(saved, list | tuple) else [saved]
    ours = [tuple(tensor.shape) for tensor in tensors]
    theirs = [tuple(value.shape) if isinstance(value, Tensor) else value for value in values]
    pairs = zip(theirs, ours, strict=False)
    fit = all(shape == our or (may_lack and shape is None) for shape, our in pairs)
    if not fit or len(theirs) > len(ours) or (all_of_them and len(theirs) < len(ours)):
        raise PolicyError(
            f"the checkpoint has {name} of shapes {shown(theirs)}, the optimizer of {shown(ours)}. "
            "Make the optimizer as it was when the checkpoint was written."
        )
