"""How a run went: from where on it failed, and what the loss and the gradients did before.

The functions here gather evidence from the steps of a record. What it means is for `causes` to say.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST, Severity

MOSTLY: Final = 0.9
"""From this share of bad steps on, a run has failed."""
LEAST_FAILED: Final = 10
LEAST_NOT_FINITE: Final = 3
"""So few steps are enough where the loss is inf or NaN: people stop such a run."""
LATEST: Final = 5
FEW_UPDATES: Final = 4
"""A forward pass that worked and fails after fewer updates than this was broken by the updates."""
TENFOLD: Final = 9.0  # of `Rise.ratio`
TWOFOLD: Final = 1.0
SHORT: Final = 50  # steps below which loss values say little


class Failure(NamedTuple):
    """The last part of a run that never recovered.

    Attributes:
        start: the place of its first step.
        losses: how many of its steps have a loss.
        not_finite: how many of these losses are inf or NaN.
        inf: how many of these losses are inf.
        lowest: the lowest scale of its steps.
        skips: how many of its steps were skipped.
    """

    start: int
    losses: int
    not_finite: int
    inf: int
    lowest: float
    skips: int

    @property
    def is_forward(self) -> bool:
        """Whether the loss itself was inf or NaN."""
        return self.losses > 0 and self.not_finite >= self.losses / 2

    @property
    def is_backward(self) -> bool:
        """Whether the loss was finite."""
        return self.losses > 0 and not self.is_forward


class Rise(NamedTuple):
    """Numbers that grew.

    Attributes:
        base: where they began.
        peak: where they ended.
    """

    base: float
    peak: float

    @property
    def ratio(self) -> float:
        """How many times the base was added to it: 9 for ten times as much."""
        return (self.peak - self.base) / abs(self.base) if self.base else math.inf


def failure(record: Record) -> Failure | None:
    """Return the last part of a run in which nearly every step is bad; None for a run that did not fail."""
    size, loss = len(record), record.loss
    bad = bytearray(size)
    for place, skipped in enumerate(record.skipped):
        lost = loss.known[place] and not math.isfinite(loss.values[place])
        bad[place] = 2 if lost else 1 if skipped else 0
    start = _start(bad, 1)
    if 2 * bad.count(2, start) >= size - start:  # steps skipped to find the scale are another matter
        start = _start(bad, 2)
    part = bad[start:]
    enough = len(part) >= LEAST_FAILED or part.count(2) >= LEAST_NOT_FINITE
    if not enough:
        return None
    return Failure(
        start,
        losses=loss.count(start),
        not_finite=part.count(2),
        inf=sum(map(math.isinf, loss.values[start:])),
        lowest=min(record.scales[start:size]),
        skips=sum(record.skipped[start:]),
    )


def _start(bad: bytearray, least: int) -> int:
    """Return from where on nearly all marks are at least so high; the number of marks for nowhere."""
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


def update_count(record: Record, stop: int) -> int:
    """Return how many of the steps before a place were taken."""
    return record.skipped.count(0, 0, stop)


def rise(values: Sequence[float]) -> Rise | None:
    """Return how far numbers grew toward their end; None where the end is not their largest part."""
    if len(values) < 2:
        return None
    before = values[: -min(LATEST, len(values) - 1)]
    peak, late = max(values[-LATEST:]), median(values[-max(len(values) // 3, 1) :])
    base = min(values[0], median(before))
    if peak < max(before) / 2:  # one large number is not a rise
        peak, base = late, values[0]
    return Rise(base, peak) if peak > base else None


def lost_places(record: Record) -> Sequence[int]:
    """Return the places of all steps whose loss is inf or NaN."""
    loss = record.loss
    return array(
        "q",
        (place for place, known in enumerate(loss.known) if known and not math.isfinite(loss.values[place])),
    )


def lost_before(record: Record, end: Failure) -> bool:
    """Return whether some steps before the failure had a loss that was not finite."""
    values, known = record.loss.values[: end.start], record.loss.known
    return any(known[place] and not math.isfinite(value) for place, value in enumerate(values))


def period_of(places: Sequence[int]) -> int:
    """Return what all distances between some places are multiples of, or 0 for fewer than four."""
    if len(places) < FEWEST:
        return 0
    common = math.gcd(*(after - before for before, after in pairwise(places)))
    return common if common >= 2 * FEWEST else 0


def counts(end: Failure) -> dict[str, float]:
    """Return the numbers of a failure, by name."""
    return {"start": end.start, "skipped": end.skips, "lowest_scale": end.lowest}


class Extent(NamedTuple):
    """Which steps of a run are lost to one cause.

    Attributes:
        said: which they are, in words, such as "from step 41 on".
        severity: "problem" for the rest of a run, "warning" for single steps.
        numbers: what the words say, by name.
    """

    said: str
    severity: Severity
    numbers: Mapping[str, float]

    @classmethod
    def of_failure(cls, record: Record, end: Failure) -> Extent:
        """Return that of the last part of a run."""
        said = "in every step" if end.start == 0 else f"from step {record.index[end.start]:,} on"
        return cls(said, "problem", counts(end))

    @classmethod
    def of_steps(cls, record: Record, places: Sequence[int]) -> Extent:
        """Return that of single steps."""
        some = ", ".join(f"{record.index[place]:,}" for place in places[:5])
        more = ", ..." if len(places) > 5 else ""
        steps = "1 step" if len(places) == 1 else f"{len(places):,} steps"
        period = period_of(places)
        return cls(f"in {steps} ({some}{more})", "warning", {"steps": len(places), "period": period})


def number(value: float) -> str:
    """Return a number to read in a sentence."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"
