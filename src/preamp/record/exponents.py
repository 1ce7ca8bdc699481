"""Histograms of binary exponents, and how well their values fit into a narrow floating-point format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from preamp.checks import FLOAT32_MAX, FLOAT32_TINY, assign
from preamp.errors import TraceError

__all__ = ["BANDS", "FIELDS", "Band", "ExponentHistogram", "exponent_of"]

FARTHEST = 4096  # float64 ends at 2**-1074 and 2**1023; beyond these, values are multiplied by a scale
FARTHEST_RECORDED = 2048  # of what a file holds, so that it can be shifted by any scale
MOST = 2**63
FIELDS = 256  # the exponent fields of a float32: zeros and subnormals first, inf and NaN last
BIAS = 127


class Band(NamedTuple):
    """The range of a floating-point format.

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

    The exponent of a value is floor(log2(abs(value))). What the methods return about a format is exact except
    for values in the same power of two as one of its limits, which the histogram cannot tell apart.

    Args:
        low: the exponent of the first bin.
        counts: values per exponent low, low + 1, ... Bins without values at either end are dropped.
        zeros: values that are exactly 0; where a framework counted, also those smaller than 2**-126, the
            smallest normal float32.
        nonfinite: values that are inf or NaN; where a framework counted, also those too large for a float32.

    Raises:
        TraceError: for counts that are not whole numbers of at least 0, or exponents that no value has.

    >>> histogram = ExponentHistogram(-26, (3, 0, 1), zeros=4)
    >>> float16 = BANDS["float16"]
    >>> histogram.total, histogram.flushed(float16), histogram.flushed(float16, shift=1)
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
        """The number of all values, including zeros and those that are not finite."""
        return self.nonzero + self.zeros + self.nonfinite

    @property
    def nonzero(self) -> int:
        """The number of finite values other than 0."""
        return sum(self.counts)

    @property
    def amax_exponent(self) -> int | None:
        """The exponent of the largest finite value; None where all are 0 or not finite."""
        return self.low + len(self.counts) - 1 if self.counts else None

    def shifted(self, powers: int) -> ExponentHistogram:
        """Return the histogram of the same values times 2**powers, without rounding."""
        return ExponentHistogram(self.low + powers, self.counts, self.zeros, self.nonfinite)

    def share_below(self, exponent: int) -> float:
        """Return the share of the finite nonzero values that is smaller than 2**exponent, from 0 to 1."""
        below = sum(self.counts[: max(exponent - self.low, 0)])
        return below / self.nonzero if self.counts else 0.0

    def flushed(self, band: Band, shift: int = 0) -> float:
        """Return the share of the finite nonzero values that rounds to 0 in a format.

        This is 0 for values that were in that format when they were counted: `zeros` has what was flushed.

        Args:
            band: the format.
            shift: values are multiplied by 2**shift first.
        """
        return self.share_below(exponent_of(band.smallest) - 1 - shift)

    def subnormal(self, band: Band, shift: int = 0) -> float:
        """Return the share of the finite nonzero values that becomes subnormal, with fewer digits.

        Args:
            band: the format.
            shift: values are multiplied by 2**shift first.
        """
        return self.share_below(exponent_of(band.normal) - shift) - self.flushed(band, shift)

    def headroom(self, band: Band, shift: int = 0) -> int | None:
        """Return how many times all values can be doubled before the largest overflows a format.

        Negative if it overflows already; None where all are 0 or not finite.

        Args:
            band: the format.
            shift: values are multiplied by 2**shift first.
        """
        amax = self.amax_exponent
        return None if amax is None else exponent_of(band.largest) - amax - shift

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
        """Return an object of JSON."""
        return {
            "low": self.low,
            "counts": list(self.counts),
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ExponentHistogram:
        """Return the histogram from the object that `to_json` made of it.

        Raises:
            TraceError: for anything else.
        """
        values = {name: entry.get(name) for name in ("low", "counts", "zeros", "nonfinite")}
        if not isinstance(values["counts"], list):
            raise TraceError(f"counts is {values['counts']!r:.60}, not a list")
        histogram = cls(**{**values, "counts": tuple(values["counts"])})  # type: ignore[arg-type]  # it checks
        if not -FARTHEST_RECORDED <= histogram.low <= FARTHEST_RECORDED - len(histogram.counts):
            raise TraceError(f"low is {histogram.low}, which is not the exponent of any recorded number")
        return histogram


def _check(histogram: ExponentHistogram) -> None:
    numbers = (histogram.zeros, histogram.nonfinite, *histogram.counts)
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) >= MOST:
        wrong = next(n for n in numbers if type(n) is not int or not 0 <= n < MOST)
        raise TraceError(f"a count is {wrong!r:.60}, not a whole number of at least 0")
    if type(histogram.low) is not int or not -FARTHEST <= histogram.low <= FARTHEST - len(histogram.counts):
        raise TraceError(f"low is {histogram.low!r:.60}, which is not the exponent of any number")
