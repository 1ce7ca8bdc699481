"""Keras on PyTorch: every step is decided on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import torch
from torch import Tensor

from preamp.arrays import Unscaled
from preamp.arrays import torch as arrays
from preamp.keras.scaler import ScaledStep
from preamp.keras_shared.variables import Number

F = TypeVar("F", bound=Callable[..., Any])

# Keras's optimizers that apply a sparse gradient on PyTorch. The others raise in the middle of an update.
TAKE_SPARSE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.Nadam,
    keras.optimizers.Lion,
)


def untraced(function: F) -> F:
    kept: F = torch.compiler.disable(torch.no_grad()(function))  # type: ignore[no-untyped-call]
    return kept


def take_traced(step: ScaledStep[Tensor, Tensor]) -> bool:
    return False  # the compiler runs every step eagerly, because of `untraced`


def update(
    inner: keras.Optimizer, gradients: Sequence[Tensor | None], variables: Sequence[keras.Variable]
) -> None:
    is_sparse = False
    for gradient in gradients:
        is_sparse |= gradient is not None and gradient.layout is not torch.strided
    if is_sparse and not _takes_sparse(inner):
        gradients = [g if g is None or g.layout is torch.strided else g.to_dense() for g in gradients]
    inner.apply(gradients, variables)


def _takes_sparse(inner: keras.Optimizer) -> bool:
    """Return whether an optimizer applies sparse gradients. A user's own optimizer is assumed to."""
    if inner.clipvalue or inner.gradient_accumulation_steps:
        return False
    return isinstance(inner, TAKE_SPARSE) or not type(inner).__module__.startswith("keras.")


def unscale(
    gradients: Sequence[Tensor], variables: Sequence[keras.Variable], scale: Tensor | None
) -> Unscaled[Tensor, Tensor]:
    """Unscale a gradient that is its parameter's `.grad` in place, as PyTorch's GradScaler does.

    Other tensors stay as they were given.
    """
    assert scale is not None  # only `preamp.tensorflow` divides beforehand
    own: set[int] = set()
    addresses: set[int] = set()
    for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        address = (gradient if gradient.layout is torch.strided else arrays.stored(gradient)).data_ptr()
        if getattr(variable, "value", variable).grad is gradient and address not in addresses:
            own.add(place)
        addresses.add(address)  # gradients that share memory would be divided twice in place
    return arrays.unscale(gradients, scale, own)


def write(variable: keras.Variable, value: Tensor | Number) -> None:
    with torch.no_grad():
        if isinstance(value, tuple):
            variable.value.copy_(torch.tensor(value))
        else:
            variable.value.fill_(value)  # nothing is copied to a device


def scalar(value: object) -> Tensor | None:
    if isinstance(value, float):
        return torch.tensor(value)
    return value.detach() if isinstance(value, Tensor) and value.ndim == 0 else None


def is_concrete(value: Tensor | None) -> bool:
    return not torch.compiler.is_compiling()


def replica() -> int:
    return 0  # each process has an optimizer of its own


def becomes_constant(value: Tensor) -> bool:
    return False  # compiled programs read tensors


def stateless_inputs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies: Keras's optimizers for PyTorch write in place."""
    return [torch.as_tensor(tensor).detach().clone() for tensor in tensors]
