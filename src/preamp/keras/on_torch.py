"""Keras on PyTorch: unscale and check in one pass, read once, decide on the host.

This room multiplies and reads tensors. It refuses to know policies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from preamp.arrays.torch import HALF_DTYPES, Gradients, note_writing, unscale_
from preamp.arrays.torch_devices import widest
from preamp.checks import FLOAT32_MAX

# Keras's optimizers that apply a sparse gradient on PyTorch. The others raise in the middle of an update.
TAKE_SPARSE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.Nadam,
    keras.optimizers.Lion,
)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads a flag and then decides
@torch.no_grad()
def apply(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> None:
    """Update the variables or skip."""
    optimizer._step_on_host(gradients, variables, scale.value)


def update(inner: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Have the inner optimizer update the variables, with what it cannot apply sparse made dense."""
    if not _takes_sparse(inner):
        gradients = [g if g is None or g.layout is torch.strided else g.to_dense() for g in gradients]
    inner.apply(gradients, variables)


def _takes_sparse(inner: Any) -> bool:
    """Return whether an optimizer applies sparse gradients; one that is not Keras's own has to know."""
    if inner.clipvalue or inner.gradient_accumulation_steps:
        return False
    return isinstance(inner, TAKE_SPARSE) or not type(inner).__module__.startswith("keras.")


def unscale(gradients: Sequence[Tensor], variables: Sequence[Any], scale: Tensor) -> tuple[list[Tensor], Any]:
    """Return gradients divided by the scale, and whether all of them are finite, as a 0-dim tensor.

    A gradient that is its parameter's `.grad` is unscaled in place, as PyTorch's GradScaler does. What else
    was given stays as it was. Half-precision gradients become float32. A sparse gradient stays sparse: its
    stored entries are unscaled and checked.
    """
    tensors = _writable(gradients, variables)
    values = [_values(tensor) for tensor in tensors]
    found = torch.zeros((), dtype=torch.float32, device=scale.device)
    flags = unscale_(values, scale.reciprocal(), found)
    note_writing(values)
    if len(flags) > 1:
        found = torch.stack([flag.to(scale.device) for flag in flags.values()]).sum()
    else:
        found = next(iter(flags.values()), found)
    return tensors, found == 0.0


def seen(sees: Collection[str], edge: float, gradients: Sequence[Tensor]) -> dict[str, Any]:
    """Return the peak of gradients, and the share from the edge on, as far as asked: 0-dim tensors.

    Of a sparse gradient the stored entries count.
    """
    if not gradients:
        return dict.fromkeys(sees, torch.zeros(()))
    values = [_values(gradient) for gradient in gradients]
    measured, found = Gradients(values, values), {}
    if "peak" in sees:
        found["peak"] = measured.largest().amax().clamp(max=FLOAT32_MAX)
    if "share" in sees:
        found["share"] = measured.count(edge, range(len(gradients))) / max(measured.entries(), 1.0)
    return found


def are_finite(tensors: Sequence[Tensor]) -> Any:
    """Return whether all tensors are finite, as a 0-dim tensor."""
    return torch.stack([_values(tensor).isfinite().all() for tensor in tensors]).all()


def read(scalars: Sequence[Tensor]) -> list[float]:
    """Read 0-dim tensors, all of them at once."""
    first = scalars[-1].device
    counts = any(scalar.dtype in (torch.int32, torch.int64) for scalar in scalars)
    exact = widest(first) if counts else torch.float32
    return torch.stack([scalar.to(first, exact) for scalar in scalars]).tolist()


def known_scalar(value: Any) -> Any:
    """Return a scalar that can be read later, without its graph; None for what is no scalar."""
    if torch.compiler.is_compiling() or not isinstance(value, Tensor | float):
        return None
    if isinstance(value, float):
        return torch.tensor(value)
    return value.detach() if value.ndim == 0 else None


def write(variable: Any, value: float) -> None:
    """Set a scalar variable to a number."""
    with torch.no_grad():
        variable.value.fill_(value)


def bakes(value: Any) -> bool:
    """Return whether a value read now would be a constant of a compiled program: no, steps read tensors."""
    return False


def stateless_inputs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies: Keras's optimizers for PyTorch write in place."""
    return [torch.as_tensor(tensor).detach().clone() for tensor in tensors]


def _writable(gradients: Sequence[Tensor], variables: Sequence[Any]) -> list[Tensor]:
    """Return tensors that may be written: `.grad` itself, or a copy, no two in the same memory."""
    seen: set[int] = set()
    tensors = []
    for gradient, variable in zip(gradients, variables, strict=True):
        place = _values(gradient).data_ptr()
        owned = _tensor_of(variable).grad is gradient and place not in seen
        seen.add(place)
        if gradient.dtype in HALF_DTYPES:
            tensors.append(gradient.float())
        else:
            tensors.append(gradient if owned else gradient.detach().clone())
    return tensors


def _values(gradient: Tensor) -> Tensor:
    """Return a gradient's entries, in its own memory: those that a sparse one stores, or the tensor."""
    if gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient.values()


def _tensor_of(variable: Any) -> Any:
    return getattr(variable, "value", variable)
