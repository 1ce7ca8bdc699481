"""Convert a model's parameters, buffers and inputs to a precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters to half precision, and leave buffers as they are, as DeepSpeed does.

    Tables of positions or frequencies would lose too much in float16. The statistics of a batch norm follow
    its parameters, because PyTorch requires it. Complex numbers have no half precision and stay.

    Args:
        model: whose parameters stay the same objects.
        dtype: float16 or bfloat16.
    """
    norms = nn.modules.batchnorm._NormBase
    kept = [(module, dict(module._buffers)) for module in model.modules() if not isinstance(module, norms)]
    model.half() if dtype is torch.float16 else model.bfloat16()
    for module, tensors in kept:
        module._buffers.update(tensors)


def to_precision(inputs: object, dtype: torch.dtype) -> Any:
    """Return inputs with every floating-point tensor converted, and anything else unchanged."""
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, MutableMapping):
        cast = {} if type(inputs) is dict else copy.copy(inputs)
        for name, value in inputs.items():
            cast[name] = to_precision(value, dtype)
        return cast
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(to_precision(value, dtype) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(to_precision(value, dtype) for value in inputs)
    return inputs


def explain(error: RuntimeError, inputs: object, dtype: torch.dtype) -> None:
    """Add a note to an error if an input has another precision than the parameters."""
    others = {value.dtype for value in _tensors(inputs) if value.is_floating_point()} - {dtype}
    if others and "type" in str(error):
        name = str(dtype).removeprefix("torch.")
        error.add_note(
            f"The parameters are {name}, an input is {others.pop()}. Write engine(inputs.to(torch.{name}))"
            + (', or "auto_cast": true in the section "fp16".' if dtype is torch.float16 else ".")
        )


def _tensors(inputs: object) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        yield from _tensors(tuple(inputs.values()))
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from _tensors(value)
