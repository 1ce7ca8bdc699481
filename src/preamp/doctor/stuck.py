"""A run whose weights do not change, or hardly do, and its signs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from preamp.doctor.evidence import Column, Record
from preamp.doctor.finding import FEWEST
from preamp.doctor.history import SHORT
from preamp.doctor.signs import Sign
from preamp.doctor.snapshots import module_name, needs_no_scale, saves_something
from preamp.record.exponents import exponent_of
from preamp.record.snapshots import Snapshot, SnapshotRow, module_of

MOSTLY: Final = 0.9
LEAST_CLIPPED: Final = 2.0**10  # at such a scale, nobody would choose a bound this small on purpose
SMALLEST_BOUND, LARGEST_BOUND = 0.01, 100.0  # that people clip at
ALIKE: Final = 1.002
"""Norms that were clipped differ by less than this factor: by the rounding of float16 entries."""
VARIES: Final = 0.01
LEAST_STEPS: Final = 10  # between snapshots whose weights are compared
LEAST_WEIGHTS: Final = 16  # of which one shows an update


class Stuck:
    """What a record shows of a run whose weights may not change.

    Attributes:
        record: the run.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.gradients_zero = self._gradients_zero()
        self.moved = self._moved()
        self.bound = clipping_bound(record)
        self.dead = dead_outputs(record)
        self.still = still_weights(record)

    def __bool__(self) -> bool:
        still = self.still is not None and bool(self.still.always or self.still.late)
        return bool(self.gradients_zero or self.moved is not None or self.bound or self.dead or still)

    def _gradients_zero(self) -> bool | None:
        """Whether nearly all gradients are exactly zero where the loss is not."""
        record = self.record
        zero, known = max(_zeros(record, record.amax), _zeros(record, record.grad_norm))
        losses = [loss for place in record.late if (loss := record.loss[place]) is not None]
        if losses and 2 * losses.count(0.0) > len(losses):
            return None
        return zero >= MOSTLY * known if known else self._seen_zero()

    def _seen_zero(self) -> bool | None:
        """Whether all gradients are zero in the last two snapshots."""
        late = [[row for row in one.rows if row.what == "gradient"] for one in self.record.sound[-2:]]
        return all(_is_zero(row) for rows in late for row in rows) if len(late) == 2 and all(late) else None

    def _moved(self) -> int | None:
        """Return the place from which on losses repeat exactly, as over epochs; None if they do not."""
        losses = self.record.loss.finite()
        tail = max(len(losses) // 4, SHORT // 2)
        if len(losses) < 2 * SHORT or len(losses) < len(self.record):
            return None
        late = set(losses[-tail:])
        if late == {0.0} or not late <= set(losses[-2 * tail : -tail]):
            return None
        return next((n + 1 for n in reversed(range(len(losses))) if losses[n] not in late), 0)


def _zeros(record: Record, column: Column) -> tuple[int, int]:
    """Return in how many of the late steps that were taken a column is 0, and in how many it is known."""
    values = [column[place] for place in record.late if not record.skipped[place]]
    return values.count(0.0), sum(value is not None for value in values)


def clipping_bound(record: Record) -> float | None:
    """Return what norm times scale is in nearly all steps, as after clipping scaled gradients, or None.

    While loss and scale are constant, nothing else changes either.
    """
    steps = zip(record.grad_norm.values, record.grad_norm.known, record.scales, strict=False)
    clipped = ((norm, scale) for norm, known, scale in steps if known and scale >= LEAST_CLIPPED)
    scaled = [norm * scale for norm, scale in clipped if math.isfinite(norm)]
    losses = record.loss.finite()
    if len(scaled) < SHORT:
        return None
    low, bound, high = _tenths(scaled)
    least, _, most = _tenths(losses) if losses else (0.0, 0.0, 1.0)
    first, _, last = _tenths(record.scales)
    changes = first < last or most - least > VARIES * max(abs(least), abs(most))
    return bound if changes and low >= SMALLEST_BOUND and high <= min(LARGEST_BOUND, ALIKE * low) else None


def _tenths(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the numbers that 10%, 50% and 90% of some numbers are below."""
    ordered = sorted(values)
    low, middle, high = (ordered[len(ordered) * tenth // 10] for tenth in (1, 5, 9))
    return low, middle, high


class Still(NamedTuple):
    """Modules with gradients whose weights are exactly the same in several snapshots.

    Attributes:
        always: the names of those that never changed.
        late: whether none of all modules changed between the last two snapshots.
        some: whether another module did change.
    """

    always: tuple[str, ...]
    late: bool
    some: bool


def still_weights(record: Record) -> Still | None:
    """Return which weights do not move; None where snapshots do not show it."""
    seen = list({one.index: one for one in record.sound if one.weights}.values())  # of several passes one
    if len(seen) < 2 or seen[-1].index - seen[0].index < LEAST_STEPS:
        return None
    first, *rest = [{row.name: row for row in one.weights} for one in seen]
    gradients = {row.name for row in seen[-1].rows if row.what == "gradient" and row.histogram.nonzero}
    moving = [
        name for name, row in first.items() if name in gradients and row.histogram.total >= LEAST_WEIGHTS
    ]
    if not moving:
        return None
    before = rest[-2] if len(rest) > 1 else first
    always = tuple(name for name in moving if all(one.get(name) == first[name] for one in rest))
    late = all(before.get(name) == rest[-1].get(name) for name in moving)
    return Still(always, late, some=len(always) < len(moving))


class Dead(NamedTuple):
    """A module whose units are dead.

    Attributes:
        words: what shows it.
        name: of the module.
        always: whether it was so from the first snapshot on.
    """

    words: str
    name: str
    always: bool


def dead_outputs(record: Record) -> Dead | None:
    """Find a module whose outputs have become zero, so that the modules before it get no gradient."""
    clean = [one for one in record.snapshots if not any(r.histogram.nonfinite for r in one.rows)]
    if len(clean) < 2:
        return None
    zeros = [[row for row in one.rows if _is_zero(row)] for one in (clean[0], *clean[-2:])]
    outputs = [dict.fromkeys(row.name for row in rows if row.what == "activation") for rows in zeros]
    names = [name for name in outputs[2] if name in outputs[1]]
    if not names or not all(any(row.direction == "backward" for row in rows) for rows in zeros[1:]):
        return _fed_with_zeros(clean)
    always = names[0] in outputs[0]
    return Dead(f"all outputs of {module_name(names[0])} are exactly zero {_since(always)}", names[0], always)


def _since(always: bool) -> str:
    return "from the first snapshot on" if always else "in the last snapshots"


def _is_zero(row: SnapshotRow) -> bool:
    return row.histogram.zeros > 0 and row.histogram.zeros == row.histogram.total


def _fed_with_zeros(clean: Sequence[Snapshot]) -> Dead | None:
    """Find units that died between two modules, from the gradients of single parameters.

    The gradient of a bias is a sum of output gradients; that of a weight has the input as a factor. So if
    only the weight's is zero, the input was all zeros. The module that the zeros come from gets no gradient.
    """
    found = [_by_parameter(snapshot) for snapshot in clean]
    (dead, fed), (dead_before, fed_before) = found[-1], found[-2]
    modules, given = sorted(dead & dead_before), sorted(fed & fed_before)
    if not modules or not given:
        return None
    always = all(one[0] >= set(modules) for one in found)
    words = (
        f"the gradients of all parameters of {module_name(modules[0])} are exactly zero {_since(always)}, "
        f"and "
        f"the input of {module_name(given[0])} is all zeros"
    )
    return Dead(words, "", always)


def _by_parameter(snapshot: Snapshot) -> tuple[set[str], set[str]]:
    """Return the modules whose gradients are all zero, and those where only the smallest's is not.

    Both are empty where gradients are so small that zeros may come from a low scale, and for snapshots of a
    PyTorch lens, which have one row for all parameters of a module.
    """
    modules: dict[str, list[SnapshotRow]] = {}
    for row in snapshot.rows:
        if row.what == "gradient" and row.nans is None:
            modules.setdefault(module_of(row.name), []).append(row)
    several = {name: rows for name, rows in modules.items() if len(rows) > 1}
    alive = [row.histogram.low for rows in modules.values() for row in rows if row.histogram.nonzero]
    if not alive or min(alive) <= exponent_of(snapshot.band.normal):
        return set(), set()
    dead = {name for name, rows in several.items() if all(map(_is_zero, rows))}
    fed = {name for name, rows in several.items() if _is_bias_alone(rows)}
    return dead, fed


def _is_bias_alone(rows: Sequence[SnapshotRow]) -> bool:
    """Return whether only the smallest parameter of a module gets a gradient."""
    bias, *others = sorted(rows, key=lambda row: row.histogram.total)
    return not _is_zero(bias) and all(map(_is_zero, others))


def _to_gain(stuck: Stuck) -> bool | None:
    """Whether the scale is far below what the gradients allow, and some are lost because of it."""
    record = stuck.record
    saves = False if needs_no_scale(record.band) else saves_something(record.snapshot)
    return saves and (record.headroom is None or record.headroom >= FEWEST)


def _large_loss(stuck: Stuck) -> bool | None:
    """Whether the scaled loss is too large for gradients to round to zero.

    Even the derivatives of a mean over 2**24 outputs are representable in float16 at a scaled loss of 1.
    """
    record = stuck.record
    losses = [abs(loss) * record.scales[n] for n in record.settled if (loss := record.loss[n]) is not None]
    return median(losses) >= 1.0 if losses else None


def _elsewhere(stuck: Stuck) -> bool | None:
    """Whether the gradients of the model are not zero, though the optimizer's are."""
    snapshot = stuck.record.snapshot
    rows = [] if snapshot is None else [row for row in snapshot.rows if row.what == "gradient"]
    if not rows or not stuck.gradients_zero:
        return None
    return any(row.histogram.nonzero for row in rows)


def _dead(stuck: Stuck) -> bool | None:
    if stuck.dead:
        return True
    late = stuck.record.sound[-1:]  # units that are dead pass no gradient, also where a lens sees no outputs
    rows = [row for one in late for row in one.rows if row.what == "gradient"]
    return False if rows and all(row.histogram.nonzero for row in rows) else None


SIGNS: Final = {
    "gradients zero": Sign(
        lambda stuck: stuck.gradients_zero,
        "nearly all gradients are exactly zero",
        "gradients are not zero",
        "norms",
    ),
    "repeats": Sign(
        lambda stuck: stuck.moved == 0,
        "losses repeat from the beginning",
        "losses do not repeat",
    ),
    "stopped": Sign(
        lambda stuck: bool(stuck.moved),
        "losses repeat from some step on",
        usual=0.2,
    ),
    "bound": Sign(
        lambda stuck: bool(stuck.bound) if stuck.record.grad_norm.count() else None,
        "gradient norm times scale is constant",
        "the norm does not follow the scale",
        "norms",
        0.05,
    ),
    "some still": Sign(
        lambda stuck: stuck.still and bool(stuck.still.always and stuck.still.some),
        "some weights with gradients never changed",
        source="lens",
        usual=0.05,
    ),
    "all still": Sign(
        lambda stuck: stuck.still and not stuck.still.some,
        "no weight ever changed",
        "weights changed",
        "lens",
        0.05,
    ),
    "still at last": Sign(
        lambda stuck: stuck.still and (stuck.still.late and not stuck.still.always),
        "weights changed, and later no more",
        "weights changed to the end",
        "lens",
        0.05,
    ),
    "scale to gain": Sign(
        _to_gain, "a higher scale would save gradients", "a higher scale would save nothing", "lens"
    ),
    "scaled loss large": Sign(
        _large_loss, "the scaled loss is too large for gradients to round to zero", "the scaled loss is small"
    ),
    "gradients elsewhere": Sign(
        _elsewhere,
        "the gradients of the model are not zero",
        "the model has no other gradients",
        "lens",
        0.1,
    ),
    "dead outputs": Sign(
        _dead, "outputs of a module are all zero", "no module gives only zeros", "lens", 0.05
    ),
}
