"""Find where a run failed, and what its loss and gradients did before."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST

MOSTLY: Final = 0.9
"""A run has failed from the step on after which this share of steps is bad."""
LEAST_FAILED: Final = 10
LEAST_NOT_FINITE: Final = 3
"""Fewer steps are enough where the loss is inf or NaN, because people stop such a run."""
LATEST: Final = 5
TENFOLD: Final = 9.0  # of `Rise.ratio`
TWOFOLD: Final = 1.0
FELL: Final = 0.9  # times the first loss
SHORT: Final = 50  # with fewer steps than these, losses prove nothing


class Failure(NamedTuple):
    """The last part of a run that never recovered.

    Attributes:
        start: the place of its first step.
        losses: how many of its steps have a loss.
        not_finite: how many of these losses are inf or NaN.
        loss_lost: whether the loss itself was inf or NaN; None where too few losses are known.
    """

    start: int
    losses: int
    not_finite: int
    loss_lost: bool | None


class Rise(NamedTuple):
    """Numbers that grew.

    Attributes:
        base: where they began.
        amax: where they ended.
    """

    base: float
    amax: float

    @property
    def ratio(self) -> float:
        """The increase divided by the base: 9 for ten times as much."""
        return (self.amax - self.base) / abs(self.base) if self.base else math.inf


def failure(record: Record) -> Failure | None:
    """Return the last part of a run in which nearly every step is bad; None for a run that did not fail."""
    size, loss = len(record), record.loss
    bad, lost = bytearray(size), False
    for place, skipped in enumerate(record.skipped):
        # A loss that is unknown after one that was lost, as in the rest of an epoch of Keras on JAX, is lost
        # too, until a step is taken.
        lost = not math.isfinite(loss.values[place]) if loss.known[place] else lost and bool(skipped)
        bad[place] = 2 if lost else 1 if skipped else 0
    start = _start(bad, 1)
    if 2 * bad.count(2, start) >= size - start:  # do not count steps skipped before that to find the scale
        start = _start(bad, 2)
    losses, finite = loss.count(start), len(loss.finite(start))
    if size - start < LEAST_FAILED and losses - finite < LEAST_NOT_FINITE:
        return None
    not_finite = losses - finite
    # Keras on JAX does not know the losses after one that was lost.
    is_known = losses > 0 and (not_finite == 0 or size - start - losses <= finite)
    loss_lost = True if losses and 2 * not_finite >= losses else False if is_known else None
    return Failure(start, losses, not_finite, loss_lost)


def _start(bad: bytearray, least: int) -> int:
    """Return the place from which on nearly all marks are at least this high; the end if there is none."""
    size = start = len(bad)
    count = 0
    for place in range(size - 1, -1, -1):
        if bad[place] >= least:
            count += 1
            if count >= MOSTLY * (size - place):
                start = place
        elif count < (size - place) / 2:
            break
    return start


def rise(values: Sequence[float]) -> Rise | None:
    """Return how far numbers grew toward their end; None if they did not."""
    if len(values) < 2:
        return None
    before = values[: -min(LATEST, len(values) - 1)]
    base, amax = min(values[0], median(before)), max(values[-LATEST:])
    return Rise(base, amax) if amax > base else None


def lost_places(record: Record) -> Sequence[int]:
    """Return the places of all steps whose loss is inf or NaN."""
    loss = record.loss
    return array(
        "q",
        (place for place, known in enumerate(loss.known) if known and not math.isfinite(loss.values[place])),
    )


def period_of(places: Sequence[int]) -> int:
    """Return the common divisor of the distances between some places; 0 if it is small or places are few."""
    if len(places) < FEWEST:
        return 0
    common = math.gcd(*(after - before for before, after in pairwise(places)))
    return common if common >= 2 * FEWEST else 0


def hardly_fell(record: Record) -> tuple[float, float] | None:
    """Return where a loss began and ended that never fell by a tenth; None if it did, or for a short run."""
    losses = record.loss.finite()
    if len(losses) < SHORT or record.opening > len(record) / 2:
        return None
    levels = [median(losses[n : n + LATEST]) for n in range(0, len(losses) - LATEST + 1, LATEST)]
    first, late = levels[0], median(losses[-(len(losses) // 4) :])
    return (first, late) if first > 0.0 and min(levels) >= FELL * first else None


def first_of(record: Record, places: Sequence[int]) -> str:
    """Return the numbers of the first five of some steps for a sentence."""
    more = ", ..." if len(places) > LATEST else ""
    return ", ".join(f"{record.index[place]:,}" for place in places[:LATEST]) + more


def words_of(record: Record, places: Sequence[int]) -> str:
    """Return some steps for a sentence: how many, and the first five."""
    steps = "1 step" if len(places) == 1 else f"{len(places):,} steps"
    period = period_of(places)
    again = f", always a multiple of {period:,} steps apart" if period else ""
    return f"in {steps} ({first_of(record, places)}){again}"


def number(value: float) -> str:
    """Format a number for a sentence."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"
