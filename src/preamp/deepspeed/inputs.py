"""What a model is called with, in the precision it computes in.

This room looks into tuples, lists and dicts of a model's inputs. It refuses to know what the model does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["explain", "to_precision"]


def to_precision(inputs: Any, dtype: torch.dtype) -> Any:
    """Return inputs with every floating-point tensor in a precision; anything else as it is."""
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {name: to_precision(value, dtype) for name, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(to_precision(value, dtype) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(to_precision(value, dtype) for value in inputs)
    return inputs


def explain(error: RuntimeError, inputs: Any, dtype: torch.dtype) -> None:
    """Say below an error that inputs are of another precision than the parameters, if they are."""
    others = {value.dtype for value in _tensors(inputs) if value.is_floating_point()} - {dtype}
    if others and "type" in str(error):
        name = str(dtype).removeprefix("torch.")
        error.add_note(
            f"The parameters are {name}, an input is {others.pop()}. Write engine(inputs.to(torch.{name}))"
            + (', or "auto_cast": true in the section "fp16".' if dtype is torch.float16 else ".")
        )


def _tensors(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        yield from _tensors(tuple(inputs.values()))
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from _tensors(value)
