"""Tensors in lists, tuples, dicts and what users nest of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from torch import Tensor

__all__ = ["map_tensors"]


def map_tensors(function: Callable[[Tensor], Tensor], outputs: Any) -> Any:
    """Apply a function to a tensor, or to every tensor in a structure; return the same structure.

    Lists, tuples, named tuples and mutable mappings keep their type. Any other iterable becomes an
    iterator, as in PyTorch.

    Raises:
        ValueError: for what is neither a tensor nor an iterable of them.
    """
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
