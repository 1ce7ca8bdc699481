"""Values by their binary exponent, and what of them a narrow format can hold.

This room counts powers of two. It refuses to know which framework computed the values and whose they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from preamp.checks import FLOAT32_MAX, FLOAT32_TINY, assign
from preamp.errors import TraceError

__all__ = ["BANDS", "FIELDS", "Band", "ExponentHistogram", "exponent_of"]

FARTHEST = 4096  # float64 ends at 2**-1074 and 2**1023; the rest is room for scales
SEEN = 2048  # what was recorded is no farther, so that it can be shifted by any scale
MOST = 2**63
FIELDS = 256  # the exponent fields of a float32: zeros and subnormals first, inf and NaN last
BIAS = 127


class Band(NamedTuple):
    """What a floating-point format can hold.

    Attributes:
        name: the format's name, such as "float16".
        largest: its largest finite value.
        normal: its smallest normal value; below, digits are lost one by one.
        smallest: its smallest value above 0; half of it and less rounds to 0.
    """

    name: str
    largest: float
    normal: float
    smallest: float


BANDS = {
    band.name: band
    for band in (
        Band("float16", 65504.0, 2.0**-14, 2.0**-24),
        Band("bfloat16", (2.0 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133),
        Band("float8_e5m2", 57344.0, 2.0**-14, 2.0**-16),
        Band("float8_e4m3fn", 448.0, 2.0**-6, 2.0**-9),
        Band("float32", FLOAT32_MAX, FLOAT32_TINY, 2.0**-149),
    )
}


def exponent_of(value: float) -> int:
    """Return floor(log2(abs(value))) of a finite value other than 0.

    >>> exponent_of(1.0), exponent_of(65504.0), exponent_of(-0.75)
    (0, 15, -1)
    """
    return math.frexp(value)[1] - 1


@dataclass(frozen=True)
class ExponentHistogram:
    """How many values there are of each power of two.

    The exponent of a value is floor(log2(abs(value))). What is said of a format is exact but for values in
    the same power of two as a border of it: those are not told apart.

    Args:
        low: the exponent of the first bin.
        counts: values per exponent low, low + 1, ... Bins without values at either end are dropped.
        zeros: values that are exactly 0; as frameworks count, also what is smaller than 2**-126, the smallest
            normal float32.
        nonfinite: values that are inf or NaN; as frameworks count, also what is too large for a float32.

    Raises:
        TraceError: for counts that are not whole numbers from 0, or exponents that no value has.

    >>> seen = ExponentHistogram(-26, (3, 0, 1), zeros=4)
    >>> seen.total, seen.flushed(BANDS["float16"]), seen.flushed(BANDS["float16"], shift=1)
    (8, 0.75, 0.0)
    """

    low: int = 0
    counts: tuple[int, ...] = ()
    zeros: int = 0
    nonfinite: int = 0

    def __post_init__(self) -> None:
        _check(self)
        places = range(len(self.counts))
        first = next(filter(self.counts.__getitem__, places), len(self.counts))
        last = next(filter(self.counts.__getitem__, reversed(places)), -1)
        assign(self, low=self.low + first if self.counts[first:] else 0, counts=self.counts[first : last + 1])

    @classmethod
    def of_fields(cls, counts: Sequence[int]) -> ExponentHistogram:
        """Return the histogram of values that were counted by their exponent field as a float32.

        Args:
            counts: one for each of the 256 fields.
        """
        first = next(filter(counts.__getitem__, range(1, FIELDS - 1)), 1)
        last = next(filter(counts.__getitem__, range(FIELDS - 2, 0, -1)), 0)
        return cls(first - BIAS, tuple(counts[first : last + 1]), zeros=counts[0], nonfinite=counts[-1])

    @property
    def total(self) -> int:
        """All values, zeros and those that are not finite among them."""
        return self.nonzero + self.zeros + self.nonfinite

    @property
    def nonzero(self) -> int:
        """Finite values other than 0."""
        return sum(self.counts)

    @property
    def peak_exponent(self) -> int | None:
        """The exponent of the largest finite value; None where all are 0 or not finite."""
        return self.low + len(self.counts) - 1 if self.counts else None

    def shifted(self, powers: int) -> ExponentHistogram:
        """Return the histogram of the same values times 2**powers, without rounding."""
        return ExponentHistogram(self.low + powers, self.counts, self.zeros, self.nonfinite)

    def share_below(self, exponent: int) -> float:
        """Return which part of the finite values other than 0 is smaller than 2**exponent, from 0 to 1."""
        below = sum(self.counts[: max(exponent - self.low, 0)])
        return below / self.nonzero if self.counts else 0.0

    def flushed(self, band: Band, shift: int = 0) -> float:
        """Return which part of the finite values other than 0 rounds to 0 in a format.

        Values that were read from that very format say nothing here: what was flushed of them is in `zeros`.

        Args:
            band: the format.
            shift: values are multiplied by 2**shift first.
        """
        return self.share_below(exponent_of(band.smallest) - 1 - shift)

    def subnormal(self, band: Band, shift: int = 0) -> float:
        """Return which part of the finite values other than 0 is left with fewer digits than normal.

        Args:
            band: the format.
            shift: values are multiplied by 2**shift first.
        """
        return self.share_below(exponent_of(band.normal) - shift) - self.flushed(band, shift)

    def headroom(self, band: Band, shift: int = 0) -> int | None:
        """Return how many times all values can be doubled before the largest has left a format.

        Negative if it has left already; None where all are 0 or not finite.

        Args:
            band: the format.
            shift: values are multiplied by 2**shift first.
        """
        peak = self.peak_exponent
        return None if peak is None else exponent_of(band.largest) - peak - shift

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        """Return the histogram of the values of both."""
        if not (self.counts and other.counts):
            low, counts = (self.low, self.counts) if self.counts else (other.low, other.counts)
        else:
            low = min(self.low, other.low)
            padded = [(0,) * (one.low - low) + one.counts for one in (self, other)]
            counts = tuple(a + b for a, b in zip_longest(*padded, fillvalue=0))
        return ExponentHistogram(low, counts, self.zeros + other.zeros, self.nonfinite + other.nonfinite)

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {
            "low": self.low,
            "counts": list(self.counts),
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ExponentHistogram:
        """Return the histogram that `to_json` described.

        Raises:
            TraceError: for what describes none.
        """
        values = {name: entry.get(name) for name in ("low", "counts", "zeros", "nonfinite")}
        if not isinstance(values["counts"], list):
            raise TraceError(f"counts is {values['counts']!r:.60}, not a list")
        seen = cls(**{**values, "counts": tuple(values["counts"])})  # type: ignore[arg-type]  # it checks
        if not -SEEN <= seen.low <= SEEN - len(seen.counts):
            raise TraceError(f"low is {seen.low}, the exponent of no number that was seen")
        return seen


def _check(histogram: ExponentHistogram) -> None:
    numbers = (histogram.zeros, histogram.nonfinite, *histogram.counts)
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) >= MOST:
        wrong = next(n for n in numbers if type(n) is not int or not 0 <= n < MOST)
        raise TraceError(f"a count is {wrong!r:.60}, not a whole number from 0 on")
    if type(histogram.low) is not int or not -FARTHEST <= histogram.low <= FARTHEST - len(histogram.counts):
        raise TraceError(f"low is {histogram.low!r:.60}, the exponent of no number")
