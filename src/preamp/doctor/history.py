"""How a run went: from where on it failed, what the loss and the gradients did before, what overflowed first.

The functions here gather evidence from a record. What it means is for `causes` to say.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Final, Literal, NamedTuple

from preamp.doctor.record import Record
from preamp.exponents import exponent_of
from preamp.looks import Look, LookRow

__all__ = ["FEW_UPDATES", "Failure", "Origin", "Rise", "failure", "is_lost", "origin", "rise", "update_count"]

MOSTLY: Final = 0.9
"""From this share of bad steps on, a run has failed."""
LEAST_FAILED: Final = 10
LEAST_NOT_FINITE: Final = 3
"""So few steps are enough where the loss is inf or NaN: people stop such a run."""
NEAR: Final = 3
"""Powers of two from the largest number of a format within which values are about to overflow."""
ENOUGH: Final = 8
"""So many finite values show how large the others were."""
LATEST: Final = 5
FEW_UPDATES: Final = 4
"""A forward pass that worked and fails after fewer updates than this was broken by the updates."""

What = Literal["overflow", "NaN", "unknown"]


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


class Origin(NamedTuple):
    """Where the first inf or NaN was in the steps that failed.

    Attributes:
        row: the row of the module, as it was seen.
        look: what was seen on that step.
        what: "overflow": the other values come close to the largest of the format; "NaN": they do not, so an
            operation made it; "unknown": nothing finite was left.
        is_first: whether no module comes before it in forward.
        is_steady: whether the modules before it put out values as large as on earlier steps.
    """

    row: LookRow
    look: Look
    what: What
    is_first: bool
    is_steady: bool


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


def origin(record: Record, failed: Failure) -> Origin | None:
    """Return where the first inf or NaN was in the looks at steps that failed; None without such looks."""
    first = record.index[failed.start]
    looks = [look for look in record.looks if look.index >= first and look.first_overflow]
    normal = [look for look in record.looks if not look.first_overflow]
    if failed.is_forward:  # what came first, of the steps whose loss was lost
        looks = [look for look in looks if is_lost(record, look)][:1]
    if not looks:
        return None
    expected = {row.name for look in normal for row in look.path if row.what == "activation"}
    rows = [(look, row) for look in looks if (row := _first(look, expected, failed.is_backward))]
    if not rows:
        return None
    (name, what), _ = Counter((row.name, row.what) for _, row in rows).most_common(1)[0]
    same = [(look, row) for look, row in rows if (row.name, row.what) == (name, what)]
    # Forward does not depend on the scale, and of gradients the lowest scale is the least to blame.
    look, row = same[0] if what == "activation" else min(same, key=lambda pair: pair[0].scale)
    earlier = [one for one in normal if one.index < look.index]
    known = earlier[-1] if earlier else None
    outputs = [one.name for one in look.rows if one.what == "activation"]
    return Origin(
        row,
        look,
        _what(look, row, known),
        is_first=what == "activation" and outputs[0] == name,
        is_steady=_is_steady(look, row, known),
    )


def is_lost(record: Record, look: Look) -> bool:
    """Return whether the loss of the step of a look was inf or NaN."""
    place = bisect_left(record.index, look.index)
    loss = record.loss[place] if place < len(record) else None
    return loss is not None and not math.isfinite(loss)


def _first(look: Look, expected: set[str], only_backward: bool) -> LookRow | None:
    """Return the first row that is not finite, but for outputs that hold infinities on purpose."""
    for row in look.path:
        if row.what != "activation" or not (only_backward or row.name in expected):
            return row
    return None


def _what(look: Look, row: LookRow, known: Look | None) -> What:
    top = exponent_of(look.band.largest) - NEAR
    peak = row.histogram.peak_exponent
    if peak is not None and (peak >= top or row.histogram.nonzero >= ENOUGH):
        return "overflow" if peak >= top else "NaN"
    before = _same(known, row)
    if before is not None and before.histogram.peak_exponent is not None:
        shift = 0 if row.what == "activation" or known is None else _apart(look, known)
        return "overflow" if before.histogram.peak_exponent + shift >= top else "unknown"
    return "unknown"


def _apart(look: Look, known: Look) -> int:
    return exponent_of(look.scale) - exponent_of(known.scale)


def _same(look: Look | None, row: LookRow) -> LookRow | None:
    rows = look.rows if look else ()
    return next((one for one in rows if (one.name, one.what) == (row.name, row.what)), None)


def _is_steady(look: Look, row: LookRow, known: Look | None) -> bool:
    """Return whether the outputs before a row are as large as they were; False where there is none before."""
    compared = 0
    for one in look.rows:
        if one.what != "activation" or one is row:
            break
        before = _same(known, one)
        peaks = one.histogram.peak_exponent, before.histogram.peak_exponent if before else None
        if peaks[0] is not None and peaks[1] is not None:
            if peaks[0] - peaks[1] > NEAR:
                return False
            compared += 1
    return compared > 0
