"""Statistics of one optimizer's scaled gradients, for policies that use them: peak and share near the top.

Ranks put together what each has seen by one sum: of ones in the bin of the peak's exponent, and of counts.
This room refuses to know what a policy makes of it, and which gradients are still scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preamp.arrays.torch import Gradients
from preamp.arrays.torch_devices import widest

LOWEST, HIGHEST = -149, 128  # float32's binary exponents: a peak is at most 2**128
BINS = HIGHEST - LOWEST + 1
WIDTH = BINS + 2


class Sight(NamedTuple):
    """What was seen in one optimizer's scaled gradients; as floats, or as 0-dim tensors that nobody reads.

    Attributes:
        peak: the largest magnitude, 0 without gradients; None where other code looked and told no peak.
        above: how many entries have the policy's `edge` as their magnitude or more; None if it does not ask.
        entries: how many there are. Of sparse gradients the stored ones count, of complex ones both parts.
        each: the peak of every gradient on this rank.
    """

    peak: Any = None
    above: Any = None
    entries: Any = 0.0
    each: Any = None

    def read(self) -> Sight:
        """Return the same with every number read to the host."""
        peak, above, entries = (None if one is None else float(one) for one in self[:3])
        return Sight(peak, above, entries, self.each)


def look(
    gradients: Gradients, edge: float | None, device: torch.device, *, read: bool, each: Tensor | None = None
) -> Sight:
    """Look at gradients as they are. Each is read once; twice where entries have to be counted.

    Args:
        gradients: of one optimizer, scaled.
        edge: the magnitude from which entries count; None not to count. The peak is measured in any case: it
            tells whether all are finite, too.
        device: where what is not read is to lie.
        read: whether the host may read. Then only gradients that reach the edge are counted.
        each: the peaks, if they are known.
    """
    entries = 0.0 if edge is None else gradients.entries()
    if not gradients.tensors:
        return Sight(0.0, None if edge is None else 0.0, entries)
    each = gradients.largest() if each is None else each
    if not read:
        above = None if edge is None else gradients.count(edge, range(len(each))).to(device)
        return Sight(each.amax().to(device), above, entries, each)
    peaks = each.tolist()
    peak = max(peaks, key=lambda one: math.inf if math.isnan(one) else one)
    if edge is None:
        return Sight(peak, None, entries, peaks)
    large = [index for index, one in enumerate(peaks) if one >= edge] if math.isfinite(peak) else []
    return Sight(peak, float(gradients.count(edge, large)) if large else 0.0, entries, peaks)


def combined(sights: Sequence[Sight]) -> tuple[Any, Any]:
    """Return the peak and the share of what several optimizers' gradients showed."""
    peak = reduce(_larger, (sight.peak for sight in sights))
    if any(sight.above is None for sight in sights):
        return peak, None
    entries = _larger(_sum(sight.entries for sight in sights), 1.0)  # without entries the share is 0
    return peak, _sum(sight.above for sight in sights) / entries


def packed(sight: Sight, device: torch.device) -> Tensor:
    """Return a sight as a tensor of shape [WIDTH] in the device's widest dtype, to be summed over ranks.

    A one in the bin of the least exponent e with peak <= 2**e, none for a peak of 0; entries at the edge or
    above; all entries.
    """
    peak, above, entries = (_wide(one, device) for one in sight[:3])
    powers = _powers(LOWEST - 1, HIGHEST, device).to(peak.dtype)
    bins = (powers[:-1] < peak) & (peak <= powers[1:])
    return torch.cat([bins.to(peak.dtype), above.view(1), entries.view(1)])


def unpacked(total: Tensor, mine: Sight) -> Sight:
    """Return what all ranks have seen.

    Args:
        total: the sum of what they packed.
        mine: what this rank has seen; what it knows nothing of stays unknown.
    """
    powers = _powers(LOWEST, HIGHEST, total.device).to(total.dtype)
    most = min(2.0**HIGHEST, torch.finfo(total.dtype).max)
    peak = torch.where(total[:BINS] > 0.0, powers, 0.0).amax().clamp(max=most)  # exact; 0 without a bin
    above = None if mine.above is None else total[BINS]
    return Sight(None if mine.peak is None else peak, above, total[BINS + 1], mine.each)


def _wide(number: Any, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, widest(device))
    dtype = widest(device)
    number = 0.0 if number is None else number
    if number > torch.finfo(dtype).max:  # 2**128, which float32 does not hold: PyTorch would raise
        number = math.inf
    return torch.full((), number, dtype=dtype, device=device)


def _powers(first: int, last: int, device: torch.device) -> Tensor:
    """Return 2**first, ..., 2**last as float32, made of their bits: 0 below 2**-149, inf above 2**127."""
    exponents = torch.arange(first, last + 1, dtype=torch.int32, device=device)
    one = torch.ones_like(exponents)
    subnormal = one.bitwise_left_shift((exponents - LOWEST).clamp(0, 22)) * (exponents >= LOWEST)
    normal = (exponents + 127).clamp(min=0).bitwise_left_shift(23)
    return torch.where(exponents < -126, subnormal, normal).view(torch.float32)


def _larger(a: Any, b: Any) -> Any:
    if isinstance(b, Tensor):
        a, b = b, a
    if not isinstance(a, Tensor):
        return max(a, b)
    return torch.maximum(a, b.to(a.device) if isinstance(b, Tensor) else torch.full_like(a, b))


def _sum(numbers: Iterable[Any]) -> Any:
    first, *others = sorted(numbers, key=lambda one: not isinstance(one, Tensor))  # tensors first
    for one in others:
        first = first + (one.to(first.device) if isinstance(one, Tensor) else one)
    return first
