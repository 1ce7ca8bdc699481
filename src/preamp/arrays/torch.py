"""Arithmetic on PyTorch tensors: the functions of `Arrays`, and what PyTorch's own scaler needs besides.

That is `Gradients`, an optimizer's gradients as they lie in memory, arithmetic in place, and `Stamp`, which
tells whether a tensor was written to since.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from preamp.arrays import Unscaled
from preamp.arrays.torch_compat import amp_unscale_, foreach_mul_, foreach_norm, group_tensors
from preamp.arrays.torch_devices import widest
from preamp.checks import FLOAT32_MAX

# On a CPU torch.dot reads at memory speed; the norm of one large tensor takes half as long again.
DOT_FROM = 2**15
SMALL = 2**12
DOT_DTYPES = (torch.float32, torch.float64)
HALF_DTYPES = (torch.float16, torch.bfloat16)
LONG_DTYPES = (torch.int32, torch.int64)  # integers of these can be too large for a float32
KERNEL_DTYPES = (torch.float16, torch.float32, torch.float64)  # bfloat16 only on a CPU
_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]
LEAST_SQUARED_NORM = 2.0**-100  # of less, terms may have underflowed in float32


# ---- The functions of `Arrays` -----------------------------------------------------------------------------


def unscale(
    arrays: Sequence[Tensor], scale: Tensor, overwritten: Collection[int] = ()
) -> Unscaled[Tensor, Tensor]:
    """Unscale and check with the kernel of PyTorch's own scaler.

    Args:
        arrays: dense or sparse.
        scale: a float32 scalar.
        overwritten: the positions of tensors to unscale in place. No two of them may share memory.
    """
    unscaled, values = [], []
    for place, tensor in enumerate(arrays):
        if tensor.dtype in HALF_DTYPES:
            tensor = tensor.float()
        elif place not in overwritten:
            tensor = tensor.detach().clone()
        unscaled.append(tensor)
        values.append(tensor if tensor.layout is torch.strided else stored(tensor))
    found = torch.zeros((), dtype=torch.float32, device=scale.device)
    flags = unscale_(values, scale.reciprocal(), found)
    note_writing(values)
    if len(flags) > 1:
        found = torch.stack([flag.to(scale.device) for flag in flags.values()]).sum()
    else:
        found = next(iter(flags.values()), found)
    return Unscaled(unscaled, found == 0.0, global_norm(values))


def all_finite(arrays: Sequence[Tensor]) -> Tensor:
    return torch.stack([stored(tensor).isfinite().all() for tensor in arrays]).all()


def global_norm(arrays: Sequence[Tensor]) -> Tensor:
    values = [tensor if tensor.layout is torch.strided else stored(tensor) for tensor in arrays]
    wide = [tensor.float() if tensor.dtype in HALF_DTYPES else tensor for tensor in values]
    norm: Tensor = torch.nn.utils.get_total_norm(wide)
    return norm


def amax(arrays: Sequence[Tensor]) -> Tensor:
    if not arrays:
        return torch.zeros(())
    values = [stored(tensor) for tensor in arrays]
    return Gradients(values, values).largest().amax().clamp(max=FLOAT32_MAX)


def read(scalars: Sequence[Tensor]) -> list[float]:
    device, dtype = scalars[-1].device, torch.float32
    for scalar in scalars:
        if scalar.dtype in LONG_DTYPES:
            dtype = widest(device)
    return torch.stack([scalar.to(device, dtype) for scalar in scalars]).tolist()


def stored(tensor: Tensor) -> Tensor:
    """Return a tensor's entries, in its own memory: those that a sparse one stores, or the tensor."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


# ---- The gradients of an optimizer -------------------------------------------------------------------------


@dataclass(slots=True)
class Gradients:
    """The gradients of one optimizer.

    Attributes:
        parameters: those that have a gradient, in the optimizer's order.
        tensors: where the numbers of each gradient lie: dense, real, on this rank, every one once.
        shares: which part of each squared norm is this rank's to count; None counts all of each.
        meshes: where DTensors are among the gradients, the mesh that has the ranks of all of them; without
            one, all their meshes.
        aliased: True when several parameters have the same gradient.
    """

    parameters: list[Tensor]
    tensors: list[Tensor]
    shares: list[float] | None = None
    meshes: list[Any] = field(default_factory=list)
    aliased: bool = False

    def norm(self) -> float:
        """Return the L2 norm of this rank's share; inf or NaN if an entry is, or if it is above 1.8e308.

        Squares are summed in the gradients' dtype, or in float32 if it is narrower. Where that overflows or
        underflows they are summed again, of entries divided by the largest one.
        """
        squared = self._squared_norm(self.tensors)
        if LEAST_SQUARED_NORM < squared < math.inf:
            return math.sqrt(squared)
        amaxes = self.amaxes()
        if not all(map(math.isfinite, amaxes)):
            return math.inf
        amax = max(amaxes, default=0.0)
        if amax == 0.0:
            return 0.0
        return math.sqrt(self._squared_norm([t.to(widest(t.device)) / amax for t in self.tensors])) * amax

    def are_finite(self) -> bool:
        """Return whether every entry on this rank is finite; less work than the norm."""
        small = [t for t in self.tensors if t.is_cpu and not _suits_dot(t)]
        if small:  # PyTorch's kernel reads many small tensors fast, and multiplies them by 1
            flag = torch.zeros((), dtype=torch.float32, device="cpu")  # whatever the user's defaults are
            unscale_(small, torch.ones_like(flag), flag)
            if flag.item():
                return False
        others = [t for t in self.tensors if not t.is_cpu or _suits_dot(t)] if small else self.tensors
        # A square can overflow where the entry is finite.
        return not others or math.isfinite(squared_norm(others)) or all(map(math.isfinite, self.amaxes()))

    def amaxes(self) -> list[float]:
        """Return the largest magnitude in each gradient; NaN where it holds one."""
        amaxes: list[float] = self.largest().tolist() if self.tensors else []
        return amaxes

    def largest(self) -> Tensor:
        """Return the same as a tensor of shape [gradients], unread."""
        return self._of_each(largest)

    def norms(self) -> Tensor:
        """Return the L2 norm of each gradient on this rank, of shape [gradients], unread.

        It is not finite only if an entry is not, or if the device's widest dtype does not hold it.
        """
        return self._of_each(norms)

    def total_norm(self, each: Tensor) -> Tensor:
        """Return the L2 norm of this rank's share, 0-dim, unread, from `norms()`."""
        if self.shares is not None:
            each = each * torch.tensor(self.shares, dtype=each.dtype, device=each.device).sqrt()
        norm: Tensor
        if all([_squares_fit(dtype, each.device) for dtype in {t.dtype for t in self.tensors}]):
            norm = torch.linalg.vector_norm(each)
        else:
            unit = torch.where(each.amax() > 0.0, each.amax(), 1.0)
            norm = torch.linalg.vector_norm(each / unit) * unit
        return norm

    def fits(self, divisor: float) -> bool:
        """Return whether every gradient stays finite when it is divided by a number up to 1.

        Division is multiplication by `1 / divisor`, so that has to be finite too.
        """
        limits = (torch.finfo(t.dtype).max for t in self.tensors)
        fit = (amax / divisor <= limit for amax, limit in zip(self.amaxes(), limits, strict=True))
        return 1.0 / divisor <= FLOAT32_MAX and all(fit)

    def fit(self, amaxes: Tensor, divisor: Tensor) -> Tensor:
        """Return whether every entry is finite, and stays so when it is divided: a 0-dim boolean, unread.

        Args:
            amaxes: the largest magnitude in each gradient.
            divisor: 0-dim.
        """
        limits: Any = torch.finfo(self.tensors[0].dtype).max
        if any(t.dtype is not self.tensors[0].dtype for t in self.tensors):
            limits = self._of_each(_limits)
        fit: Tensor = (amaxes / divisor.to(amaxes.device) <= limits).all()
        return fit

    def without(self, ids: set[int]) -> Gradients:
        """Return the gradients of the other parameters, given by their ids."""
        if not ids:
            return self
        return self.only([i for i, p in enumerate(self.parameters) if id(p) not in ids])

    def only(self, places: Sequence[int]) -> Gradients:
        """Return the gradients at some positions."""
        shares = self.shares and [self.shares[i] for i in places]
        parameters, tensors = [self.parameters[i] for i in places], [self.tensors[i] for i in places]
        return Gradients(parameters, tensors, shares, self.meshes, self.aliased)

    def _of_each(self, measure: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Return one number of each gradient, measured in groups that are alike: of shape [gradients]."""
        groups = _alike(self.tensors)
        parts = [measure(_at(self.tensors, group)) for group in groups.values()]
        first = self.tensors[0].device
        dtype = widest(first) if any(part.dtype is torch.float64 for part in parts) else torch.float32
        if len(parts) == 1:
            return parts[0].to(first, dtype)
        each = torch.cat([part.to(first, dtype) for part in parts])
        places = dict(zip(chain(*groups.values()), each.unbind(), strict=True))
        return torch.stack([places[i] for i in range(len(places))])

    def _squared_norm(self, tensors: Sequence[Tensor]) -> float:
        """Return the squared L2 norm of this rank's share of `tensors`, which stand for the gradients."""
        if self.shares is None:
            return squared_norm(tensors)
        return sum(share * squared_norm([t]) for share, t in zip(self.shares, tensors, strict=True))


class HasParameters(Protocol):
    """An optimizer, or an object like one."""

    param_groups: list[dict[str, Any]]


def gather(optimizer: HasParameters) -> Gradients:
    """Return the gradients that an optimizer's parameters have at this moment.

    A sparse gradient that is not coalesced is replaced by a coalesced one, and a DTensor that is still a sum
    over ranks by the sum.

    Raises:
        AssertionError: as PyTorch, for a parameter that is not a tensor.
    """
    parameters: list[Tensor] = []
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = getattr(parameter, "grad", None)
            if gradient is not None:
                parameters.append(parameter)
                tensors.append(gradient)
            elif not isinstance(parameter, Tensor):
                kind = type(parameter).__name__
                raise AssertionError(f"expected param to be torch.Tensor, got {kind}")
    if torch.compiler.is_compiling():
        if all([type(t) is Tensor and not (t.is_sparse or t.is_complex()) for t in tensors]):
            return Gradients(parameters, tensors)
    # In C: a loop in Python over many small tensors takes as long as their update.
    elif set(map(type, tensors)) <= {Tensor} and not any([d.is_complex for d in set(map(_dtype, tensors))]):
        with suppress(RuntimeError):  # of a sparse tensor, which has no memory of its own
            return _once(Gradients(parameters, tensors))
    return _gather_unusual(parameters)


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """Return the squared L2 norm of dense tensors, read to the host: one read per device and dtype."""
    products: dict[torch.dtype, list[Tensor]] = {}
    others: list[Tensor] = []
    for t in tensors:
        if t.numel() >= DOT_FROM and _suits_dot(t):
            flat = t.view(-1)
            products.setdefault(t.dtype, []).append(torch.dot(flat, flat))
        else:
            others.append(t)
    total = 0.0
    for dtype in DOT_DTYPES:
        if dtype in products:
            total += torch.stack(products[dtype]).sum(dtype=torch.float64).item()
    for (device, dtype), indices in _alike(others).items():
        wide = torch.float32 if dtype in HALF_DTYPES else None
        group = _at(others, indices)
        if device.type == "cpu":  # one norm of all small tensors takes a quarter of the time of many norms
            small = [t if t.dim() == 1 else t.ravel() for t in group if t.numel() <= SMALL]
            group = [t for t in group if t.numel() > SMALL]
            if small:
                total += torch.linalg.vector_norm(torch.cat(small), dtype=wide).item() ** 2
        if group:
            norms = torch.stack(foreach_norm(group, 2.0, dtype=wide))
            total += torch.linalg.vector_norm(norms).item() ** 2
    return total


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in each of some tensors that are alike, unread; NaN where one is."""
    if not tensors[0].is_cpu:
        filled = [t if t.numel() else t.new_zeros(1) for t in tensors]
        return torch.stack(foreach_norm(filled, math.inf))
    ends: list[Tensor] = []
    for t in tensors:  # on a CPU the maximum norm takes ten times as long
        least, greatest = torch.aminmax(t if t.numel() else t.new_zeros(1))
        ends += [least, greatest]
    return torch.stack(ends).abs().view(-1, 2).amax(1)


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm of each of some tensors that are alike, unread, in the device's widest dtype."""
    wide = widest(tensors[0].device)
    if _squares_fit(tensors[0].dtype, tensors[0].device):
        return torch.stack(foreach_norm(tensors, 2.0, dtype=wide))
    amaxes = largest(tensors).to(wide)
    units = torch.where(amaxes > 0.0, amaxes, 1.0)
    parts = [torch.linalg.vector_norm(t.to(wide) / unit) for t, unit in zip(tensors, units, strict=True)]
    return torch.stack(parts) * units


@torch.no_grad()
def multiply_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply in place; a tensor `factor` may lie on another device."""
    for (device, dtype), indices in _alike(tensors).items():
        number: Any = factor
        narrow = torch.float64 if dtype is torch.float64 else torch.float32
        if isinstance(factor, Tensor):
            number = factor.to(device, narrow)
        elif dtype in HALF_DTYPES:  # or it is rounded to the half type
            number = torch.full((), factor, dtype=torch.float32, device=device)
        foreach_mul_(_at(tensors, indices), number)


def unscale_(tensors: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> dict[torch.device, Tensor]:
    """Multiply by `inv_scale` in place and check for inf and NaN, with PyTorch's own kernel where it has one.

    Returns:
        For each device a 0-dim float32 tensor, above 0 if a gradient there was not finite.
    """
    flags: dict[torch.device, Tensor] = {}
    for (device, dtype), indices in _alike(tensors).items():
        flag = flags.setdefault(device, found_inf if device == found_inf.device else found_inf.to(device))
        group, inverse = _at(tensors, indices), inv_scale.to(device)
        if dtype in KERNEL_DTYPES or device.type == "cpu":
            try:
                amp_unscale_(group, flag, inverse)
                continue
            except NotImplementedError:  # some backends have no such kernel; nothing has moved
                pass
        amaxes = torch.stack(foreach_norm(group, math.inf))
        flag.copy_(torch.maximum(flag, amaxes.isfinite().all().logical_not().to(flag.dtype)))
        foreach_mul_(group, inverse)
    return flags


class Stamp(NamedTuple):
    """A tensor as it was at one moment: which object, not kept alive, and how often it was written to.

    PyTorch does not count writes through `.data` or NumPy, or by a collective.

    Attributes:
        tensor: a weak reference.
        version: autograd's version counter; None for an inference tensor, which has none.
    """

    tensor: weakref.ref[Tensor]
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> Stamp:
        """Return the stamp of a tensor as it is now."""
        return cls(weakref.ref(tensor), None if tensor.is_inference() else tensor._version)

    def fits(self, tensor: Tensor | None) -> bool:
        """Return whether this is still the same tensor, and nobody has written to it since."""
        same = tensor is not None and self.tensor() is tensor
        return same and (self.version is None or tensor._version == self.version)  # type: ignore[union-attr]


def note_writing(tensors: Sequence[Tensor]) -> None:
    """Count writes of PyTorch's kernels that do not count themselves, for autograd and for `Stamp`."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


@torch.no_grad()
def clamp_(tensors: Iterable[Tensor], bound: float | Tensor) -> None:
    """Clip every entry to [-bound, bound] in place."""
    for tensor in tensors:
        if isinstance(bound, Tensor):
            limit: Any = bound.to(tensor.device, tensor.dtype)
        else:
            limit = min(bound, torch.finfo(tensor.dtype).max)
        tensor.clamp_(-limit, limit)


def _gather_unusual(parameters: list[Tensor]) -> Gradients:
    """Return gradients of which some are sparse, complex or distributed."""
    tensors, pieces, meshes = [], [], []
    for parameter in parameters:
        gradient: Any = parameter.grad
        if hasattr(gradient, "device_mesh"):
            gradient = _summed(parameter, gradient)
            pieces.append(_pieces(gradient))
            meshes.append(gradient.device_mesh)
            with torch.no_grad():  # so that it waits for communication
                gradient = gradient.to_local()
        else:
            pieces.append(1)
        tensors.append(_dense(parameter, gradient))
    meshes = _outermost(meshes)
    ranks = max([mesh.size() for mesh in meshes], default=1)  # those without a piece of their own have copies
    return _once(Gradients(parameters, tensors, [n / ranks for n in pieces] if meshes else None, meshes))


def _outermost(meshes: list[Any]) -> list[Any]:
    """Return the mesh whose ranks are those of all the others and more; without one, all that differ.

    Many have the same ranks: FSDP2 makes a mesh for every module it shards.
    """
    different = list(dict.fromkeys(meshes))
    if len(different) < 2:
        return different
    widest = max(different, key=lambda mesh: mesh.size())
    ranks = set(widest.mesh.flatten().tolist())
    nested = all(ranks.issuperset(mesh.mesh.flatten().tolist()) for mesh in different)
    return [widest] if nested else different


@torch.no_grad()
def _summed(parameter: Any, gradient: Any) -> Any:
    """Return a DTensor whose local numbers are entries of the gradient, not terms of a sum over ranks."""
    if any([placement.is_partial() for placement in gradient.placements]):
        pairs = zip(gradient.placements, parameter.placements, strict=True)
        placements = [wanted if found.is_partial() else found for found, wanted in pairs]
        parameter.grad = gradient = gradient.redistribute(placements=placements)
    return gradient


def _pieces(gradient: Any) -> int:
    """Return into how many pieces a DTensor is cut."""
    mesh = gradient.device_mesh  # whose shape cannot be iterated over in code that PyTorch 2.10 compiles
    cut = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return math.prod([mesh.size(axis) for axis in cut])


def _dense(parameter: Tensor, gradient: Tensor) -> Tensor:
    if gradient.layout is torch.sparse_coo:
        if not gradient.is_coalesced():  # the sum of two entries can overflow, and has another norm
            parameter.grad = gradient = gradient.coalesce()
        gradient = gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _once(gradients: Gradients) -> Gradients:
    """Drop tensors that share the memory of an earlier one."""
    tensors = gradients.tensors
    if torch.compiler.is_compiling() or len(set(map(Tensor.data_ptr, tensors))) == len(tensors):
        return gradients
    places = {(t.data_ptr() or id(t), t.numel()): i for i, t in reversed(list(enumerate(tensors)))}
    if len(places) == len(tensors):
        return gradients
    return replace(gradients.only(sorted(places.values())), aliased=True)


def _alike(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Return the positions of the tensors of each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    if torch.compiler.is_compiling() or not tensors:
        for index, tensor in enumerate(tensors):
            groups[tensor.device, tensor.dtype].append(index)
    elif len(set(map(_dtype, tensors))) == len(set(map(Tensor.get_device, tensors))) == 1:  # all of one kind
        groups[tensors[0].device, tensors[0].dtype] = list(range(len(tensors)))
    else:  # in C++
        for key, (_, indices) in group_tensors([list(tensors)], with_indices=True).items():
            groups[key] = indices
    return groups


def _at(tensors: Sequence[Tensor], indices: list[int]) -> list[Tensor]:
    return list(tensors) if len(indices) == len(tensors) else [tensors[i] for i in indices]


def _suits_dot(tensor: Tensor) -> bool:
    return (
        tensor.numel() >= DOT_FROM and tensor.is_cpu and tensor.dtype in DOT_DTYPES and tensor.is_contiguous()
    )


def _squares_fit(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device's widest dtype holds sums of squares of whatever a dtype holds."""
    return math.sqrt(torch.finfo(widest(device)).max) > torch.finfo(dtype).max * 2.0**30


def _limits(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest number that each of some tensors that are alike can hold."""
    limit = torch.finfo(tensors[0].dtype).max
    return torch.full((len(tensors),), limit, dtype=widest(tensors[0].device), device=tensors[0].device)
