"""Keras on PyTorch: unscale and check in one pass, read once, decide on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import keras
import torch
from torch import Tensor

from preamp.arrays.torch import HALF_DTYPES, Gradients, note_writing, unscale_
from preamp.arrays.torch_devices import widest
from preamp.checks import FLOAT32_MAX
from preamp.keras.step import ScaledStep, Unscaled

F = TypeVar("F", bound=Callable[..., Any])

# Keras's optimizers that apply a sparse gradient on PyTorch. The others raise in the middle of an update.
TAKE_SPARSE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.Nadam,
    keras.optimizers.Lion,
)

COUNTS = (torch.int32, torch.int64)  # float32 would round large ones


def untraced(function: F) -> F:
    kept: F = torch.compiler.disable(torch.no_grad()(function))  # type: ignore[no-untyped-call]
    return kept


def take_traced(step: ScaledStep[Tensor, Tensor]) -> bool:
    return False  # `untraced` has the compiler run every step eagerly


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
    """Return whether an optimizer applies sparse gradients; one that is not Keras's own has to know."""
    if inner.clipvalue or inner.gradient_accumulation_steps:
        return False
    return isinstance(inner, TAKE_SPARSE) or not type(inner).__module__.startswith("keras.")


def unscale(
    gradients: Sequence[Tensor], variables: Sequence[keras.Variable], scale: Tensor | None
) -> Unscaled[Tensor, Tensor]:
    """Unscale a gradient that is its parameter's `.grad` in place, as PyTorch's GradScaler does.

    What else was given stays as it was.
    """
    assert scale is not None  # only `preamp.tensorflow` unscales beforehand
    tensors, values, places = [], [], set()
    for gradient, variable in zip(gradients, variables, strict=True):
        is_dense = gradient.layout is torch.strided
        place = (gradient if is_dense else _values(gradient)).data_ptr()
        owned = getattr(variable, "value", variable).grad is gradient and place not in places
        places.add(place)  # no two in the same memory: it would be unscaled twice
        if gradient.dtype in HALF_DTYPES:
            tensor = gradient.float()
        else:
            tensor = gradient if owned else gradient.detach().clone()
        tensors.append(tensor)
        values.append(tensor if is_dense else _values(tensor))
    found = torch.zeros((), dtype=torch.float32, device=scale.device)
    flags = unscale_(values, scale.reciprocal(), found)
    note_writing(values)
    if len(flags) > 1:
        found = torch.stack([flag.to(scale.device) for flag in flags.values()]).sum()
    else:
        found = next(iter(flags.values()), found)
    norm = torch.nn.utils.get_total_norm(values)
    return Unscaled(tensors, found == 0.0, norm)


def all_finite(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([_values(gradient).isfinite().all() for gradient in gradients]).all()


def gradient_stats(
    needs: Collection[str], edge: float | Tensor, gradients: Sequence[Tensor]
) -> dict[str, Tensor]:
    if not gradients:
        return dict.fromkeys(needs, torch.zeros(()))
    values = [_values(gradient) for gradient in gradients]
    measured, stats = Gradients(values, values), {}
    if "peak" in needs:
        stats["peak"] = measured.largest().amax().clamp(max=FLOAT32_MAX)
    if "share" in needs:
        count = measured.count(float(edge), range(len(gradients)))
        stats["share"] = count / max(measured.entries(), 1.0)
    return stats


def read(scalars: Sequence[Tensor]) -> list[float]:
    device = scalars[-1].device
    dtype = torch.float32
    for scalar in scalars:
        if scalar.dtype in COUNTS:
            dtype = widest(device)
    return torch.stack([scalar.to(device, dtype) for scalar in scalars]).tolist()


def write(values: Sequence[tuple[keras.Variable, float]]) -> None:
    with torch.no_grad():
        for variable, value in values:
            variable.value.fill_(value)


def known_scalar(value: object) -> Tensor | None:
    if torch.compiler.is_compiling() or not isinstance(value, Tensor | float):
        return None
    if isinstance(value, float):
        return torch.tensor(value)
    return value.detach() if value.ndim == 0 else None


def becomes_constant(value: Tensor) -> bool:
    return False  # compiled programs read tensors


def stateless_inputs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies: Keras's optimizers for PyTorch write in place."""
    return [torch.as_tensor(tensor).detach().clone() for tensor in tensors]


def _values(gradient: Tensor) -> Tensor:
    """Return a gradient's entries, in its own memory: those that a sparse one stores, or the tensor."""
    if gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient.values()
