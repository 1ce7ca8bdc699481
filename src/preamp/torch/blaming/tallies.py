"""The numbers of a row while a step runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from preamp.blaming.blame import BlameRow, Direction, ProductOf
from preamp.torch.blaming.calls import part_of

TINY = 1e-38
PART = 2**15  # values that are summed in float64 at a time, in a CPU's cache
SUMS = ("squares", "total", "loss_change")  # of a tally, from which its row has effects


class Place(NamedTuple):
    """What identifies a row."""

    module: str
    operator: str
    source: str
    direction: Direction
    product: ProductOf = ""


@dataclass
class Tally:
    """The numbers of one row so far; those of the same names are what `BlameRow` says.

    Attributes:
        squares: the sum of the squares of what each value changes the gradients by, in the direction of the
            noise; not divided by their norm.
        total: the sum of the same, with signs.
        loss_change: the predicted change of the loss.
    """

    index: int
    inputs: str
    runs: str
    limit: float
    calls: int = 0
    local_error: float = 0.0
    squares: float = 0.0
    total: float = 0.0
    loss_change: float = 0.0
    values: int = 0
    lost: int = 0
    lost_share: float = 0.0
    overflowed: int = 0
    amax: float = 0.0
    flops: int = 0
    breaks: str = ""

    def add(self, errors: Errors, own: float = 1.0, inherited: float = 0.0, scale: float = 1.0) -> None:
        """Add what one tensor differs in.

        Args:
            errors: from float32's.
            own: the part of the error that is not inherited.
            inherited: the share of the norm that was lost before.
            scale: what gradients are multiplied by in low precision.
        """
        self.local_error = max(self.local_error, own * errors.relative)
        self.values += errors.values
        self.lost += errors.lost
        self.lost_share = max(self.lost_share, errors.lost_share - inherited)
        self.overflowed += errors.overflowed
        self.amax = max(self.amax, errors.amax * scale)

    def add_effect(self, *factors: Tensor, scale: float = 1.0) -> None:
        """Add what each value of a tensor changes the gradients by, in the direction of the noise.

        Args:
            factors: of one shape; their product, times `scale`, is the change.
            scale: a number.
        """
        for parts in _parts(*factors):
            changes = functools.reduce(torch.mul, parts) * scale
            self.squares += norm_of(changes) ** 2
            self.total += sum_of(changes)

    def effect(self) -> float:
        """Return what the gradients change by, as a norm.

        Roundings are independent, so their squares add up. Errors of one sign add up themselves, and then
        their sum in the direction of the noise is much larger; of independent ones it is less than twice the
        root of their squares in 95 % of all directions.
        """
        return max(math.sqrt(self.squares), abs(self.total) / 2)

    def row(self, place: Place, norm: float, loss: float) -> BlameRow:
        """Return the row.

        Args:
            place: what identifies it.
            norm: the norm of the gradients.
            loss: the size of the loss.
        """
        same = {name: value for name, value in vars(self).items() if name not in SUMS}
        return BlameRow(
            **place._asdict(),
            **same,
            part=part_of(place.operator),
            effect=math.inf if self.overflowed or self.breaks else self.effect() / max(norm, TINY),
            loss_effect=self.loss_change / max(loss, TINY),
        )


@dataclass(frozen=True)
class Errors:
    """How a tensor in low precision differs from the one in float32.

    Attributes:
        delta: low minus float32, 0 where either is not finite; None if the two are equal.
        reference: the float32 tensor.
        bad: where low is not finite, but should be; None if it is nowhere.
        repaired: what low is replaced by where it is bad.
        relative: the 2-norm of `delta`, divided by that of the float32 tensor.
        lost_share: the part of the float32 tensor's norm in values that are zero in low precision.
    """

    delta: Tensor | None
    reference: Tensor
    bad: Tensor | None
    repaired: Tensor
    relative: float
    values: int
    lost: int
    lost_share: float
    overflowed: int
    amax: float

    @classmethod
    def between(cls, low: Tensor, reference: Tensor, limit: float, exact: Tensor | None = None) -> Errors:
        """Return how two tensors of one shape differ.

        Args:
            low: in float32 or float64, or complex.
            reference: what float32 gives for the very same inputs, in the same dtype.
            limit: the largest number of the low precision, which stands for what has overflowed.
            exact: the tensor in the step in float32, where it is known. Where it is finite, low should be,
                too: a logarithm of what was lost to zero is not finite in float32 either, and no overflow.
        """
        amax, highest = amax_of(reference), amax_of(low)
        bad, repaired, known, delta = None, low, reference, low - reference
        if not math.isfinite(amax) or not math.isfinite(highest):
            finite = reference.isfinite()
            wrong, instead = ~low.isfinite() & finite, reference
            if exact is not None:
                wrong = ~low.isfinite() & (finite | exact.isfinite())
                instead = torch.where(finite, reference, exact)
            if not low.is_complex():
                largest = min(limit, torch.finfo(instead.dtype).max)  # divided by a small scale, it is larger
                instead = instead.clamp(-largest, largest)
            bad = wrong if wrong.any() else None
            repaired = torch.where(wrong, instead, low)
            known = torch.where(finite, reference, 0.0)
            delta = torch.where(finite & repaired.isfinite(), repaired - reference, 0.0)
            amax = amax_of(known)
        error, norm, lost, gone = norm_of(delta), norm_of(known), 0, 0.0
        if low.count_nonzero() < low.numel():
            is_lost = (low == 0) & (known != 0)
            lost = int(is_lost.sum())
            gone = norm_of(known[is_lost]) if lost else 0.0
        return cls(
            delta if error else None,
            reference if bad is None else reference.clone(),  # which may be written into
            bad,
            repaired,
            error / max(norm, TINY),
            reference.numel(),
            lost,
            gone / max(norm, TINY),
            0 if bad is None else int((bad & finite).sum()),
            amax,
        )


def amax_of(x: Tensor) -> float:
    """Return the largest magnitude, NaN where there is one; 0 of no values."""
    if not x.numel():
        return 0.0
    if x.is_complex():
        return x.abs().max().item()
    return max(abs(end.item()) for end in torch.aminmax(x))


def norm_of(x: Tensor) -> float:
    """Return the 2-norm of what is finite, computed in float64."""
    return math.hypot(*(_finite(part, torch.linalg.vector_norm) for (part,) in _parts(x)))


def sum_of(x: Tensor) -> float:
    """Return the sum of what is finite, of its real part, computed in float64."""
    return math.fsum(_finite(part, torch.sum) for (part,) in _parts(x))


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one shape into parts on a CPU, where a sum in float64 makes a copy."""
    size = PART if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    return zip(*(torch.split(tensor.reshape(-1), size) for tensor in tensors), strict=True)


def _finite(x: Tensor, reduce: Callable[..., Tensor]) -> float:
    dtype = torch.complex128 if x.is_complex() else torch.float64
    value = float(reduce(x, dtype=dtype).real)
    return (
        value if math.isfinite(value) else float(reduce(torch.where(x.isfinite(), x, 0.0), dtype=dtype).real)
    )
