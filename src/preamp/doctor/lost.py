"""The steps that a run lost to inf or NaN, and their signs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from statistics import median, quantiles
from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST
from preamp.doctor.first_nonfinite import (
    Origin,
    given_far_larger,
    grown,
    origin_of,
)
from preamp.doctor.history import (
    LATEST,
    SHORT,
    TENFOLD,
    Failure,
    failure,
    lost_places,
    period_of,
    rise,
)
from preamp.doctor.signs import Sign
from preamp.doctor.snapshots import is_in_order, needs_no_scale
from preamp.policy import Static

FEW_UPDATES: Final = 4
FAR_ABOVE: Final = 16.0  # of gradients, compared with the largest norm of all other steps
LARGEST: Final = 2.0**24  # no gradient is larger, where no norm is known
MOSTLY: Final = 0.9
AROUND: Final = 20
RARELY: Final = 50
SATURATED: Final = 3
"""The exponent of a logit from which on its sigmoid is 1 in float16."""


class Lost:
    """The steps that a run lost to numbers which a lower scale does not cure.

    Attributes:
        places: of the steps, in order; empty if there are none.
        end: the last part of the run, if no step worked from there on.
        updates: how many steps were taken before; None if a step has several optimizers, of which some may
            step where others skip.
        record: the run.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.end: Failure | None = failure(record)
        self.places: Sequence[int] = self._places()
        is_merged = any(name.startswith("optimizers[") for name in record.culprits)
        before = record.skipped[: self.places[0]] if self.places else b""
        self.updates: int | None = None if is_merged else before.count(0)

    def _places(self) -> Sequence[int]:
        record, end = self.record, self.end
        waits = int(getattr(record.policy, "hysteresis", 1))
        if end is not None and not end.loss_lost and record.summary.longest_streak < waits:
            self.end = end = None  # the scale had no reason to fall
        if end is not None:
            return range(end.start, len(record))
        if lost := sorted({*lost_places(record), *record.lost_spikes}):
            return lost
        if max(record.loss.count(), record.grad_norm.count()) < SHORT:
            return ()
        return _not_by_scale(record)

    def losses(self) -> Sequence[float]:
        """Return the losses of these steps that are known."""
        record = self.record
        known = (record.lost_spikes.get(n, record.loss[n]) for n in self.places)
        return [loss for loss in known if loss is not None]

    @cached_property
    def loss_lost(self) -> bool | None:
        """Whether the loss of most of these steps is inf or NaN."""
        if self.end is not None:
            return self.end.loss_lost
        losses = self.losses()
        if 2 * len(losses) < len(self.places):  # Keras on JAX does not know those after one that was lost
            return None
        return 2 * sum(not math.isfinite(loss) for loss in losses) > len(losses)

    @cached_property
    def origin(self) -> Origin | None:
        """Where the first inf or NaN was, in snapshots of such steps; None without any.

        Where the loss is lost, the first snapshot tells most: more and more is lost after it. Where it is
        not, the last one does, at the lowest scale. If the recorded pass was sound, another may not be, and
        inputs that only some of the last steps of a run had do not explain why it never recovered.
        """
        record, is_lost = self.record, bool(self.loss_lost)
        mine = {record.index[place] for place in self.places}
        seen = [one for one in record.snapshots if one.index in mine and record.is_lost(one) == is_lost]
        found = [origin_of(record, one) for one in (seen if is_lost else reversed(seen))]
        told = [one for one in found if one.stage != "other pass"] or found
        if self.end is not None:
            told = [
                one for one in told if one.stage != "data" and not given_far_larger(record, one.snapshot)
            ] or told
        return told[0] if told else None

    @cached_property
    def parts(self) -> frozenset[str]:
        """In which parts of a step the first inf or NaN may be: one, if snapshots show it, or several."""
        source = self.origin
        if source is None:
            return ALL_PARTS
        if source.stage in ("data", "weights"):
            return frozenset({INPUTS if source.stage == "data" else WEIGHTS})
        snapshot, directions = source.snapshot, {row.direction for row in source.snapshot.rows}
        hidden = set() if snapshot.inputs or (source.in_forward and not source.is_first) else {INPUTS}
        if not snapshot.weights:
            hidden.add(WEIGHTS)
        if source.in_forward:
            found = self._in_module(source)
            found |= hidden if NAN in found else set()
        elif source.stage == "backward":
            what = {"overflow": {GRADIENT_OVERFLOW}, "NaN": {GRADIENT_NAN}}
            found = what.get(source.what, {GRADIENT_OVERFLOW, GRADIENT_NAN})
            if self.loss_lost is None:  # nobody recorded it, and it may be why
                found = {LOSS, ELSEWHERE, GRADIENT_OVERFLOW, GRADIENT_NAN}
        else:
            found = {LOSS if source.stage == "loss" else ELSEWHERE}
        if "forward" not in directions:
            found = found | hidden | {OVERFLOW, NAN, LOSS}
        if "backward" not in directions and not self.loss_lost:
            found = found | {GRADIENT_OVERFLOW, GRADIENT_NAN, ELSEWHERE}
        if self._inputs_large:  # what is computed from such inputs overflows
            found = found | {OVERFLOW, NAN, GRADIENT_OVERFLOW, GRADIENT_NAN}
        return frozenset(found)

    @cached_property
    def _inputs_large(self) -> bool | None:
        source = self.origin
        if source is None or not source.snapshot.inputs:
            return None
        return given_far_larger(self.record, source.snapshot) is not None

    def _in_module(self, source: Origin) -> set[str]:
        """Return what a module may have done whose output is the first that is not finite."""
        if source.what == "overflow" or (source.what == "unknown" and self.has_inf):
            return {OVERFLOW}
        # Between modules, NaN may be what is left of an overflow, as after a softmax.
        row = source.row
        is_told = source.stage == "module" and source.what == "NaN" and row is not None and is_in_order(row)
        return {NAN} if is_told else {OVERFLOW, NAN}

    @property
    def has_inf(self) -> bool | None:
        """Whether the loss was inf in any of these steps."""
        return any(map(math.isinf, self.losses())) if self.loss_lost else None


def _not_by_scale(record: Record) -> Sequence[int]:
    """Return the skipped steps that no scale explains.

    At their scale only gradients far larger than all recorded ones overflow, or snapshots show NaN in
    backward where nothing overflowed.
    """
    if needs_no_scale(record.band):
        return [skip.place for skip in record.skips]
    norms, largest = record.grad_norm.finite(), record.band.largest
    needed = FAR_ABOVE * max(norms) if norms else LARGEST
    others = [skip for skip in record.skips if skip.cause != "growth"]
    certain = [
        skip
        for skip in others
        if largest / skip.scale >= needed and abs(record.loss[skip.place] or 0.0) * skip.scale <= largest
    ]
    found = [origin_of(record, one) for one in record.snapshots if record.has_skipped(one)]
    rows = [one.row for one in found if one.stage == "backward" and one.what != "overflow"]
    nans = sum(bool(row and row.nans) for row in rows)
    chosen = others if 0 < len(found) <= 2 * nans else certain if len(certain) >= FEWEST else []
    places = [skip.place for skip in chosen]
    return () if _stand_out(record, places) else places


def _stand_out(record: Record, places: Sequence[int]) -> bool:
    """Return whether nearly all of some steps have a loss twice as large as most of the steps around them.

    Their gradients may be as much larger.
    """
    high, known = 0, 0
    for place in places:
        around = record.loss.finite(max(0, place - AROUND), place + AROUND + 1)
        most = quantiles(around, n=4)[-1] if len(around) > 1 else math.inf
        known += record.loss[place] is not None
        high += (record.loss[place] or 0.0) > most + abs(most)
    return known > 0 and high >= MOSTLY * known


def _all_at_once(lost: Lost) -> bool | None:
    record, end = lost.record, lost.end
    if end is None or (lost.updates or 0) < FEW_UPDATES:
        return None
    if lost.loss_lost:
        return not any(place < end.start for place in lost_places(record)) and end.not_finite == end.losses
    return all(record.skipped[end.start :])


def _rose(lost: Lost) -> bool | None:
    """Whether the loss or the gradient norm had risen tenfold before."""
    if not lost.updates:
        return None
    stop = None if lost.end is not None else lost.places[0]
    losses, norms = lost.record.loss.finite(0, stop), lost.record.grad_norm.finite(0, stop)
    loss, norm = rise(losses), rise(norms)
    grew = loss is not None and loss.ratio >= TENFOLD
    if grew or (norm is not None and norm.ratio >= TENFOLD):
        return True
    return False if max(len(losses), len(norms)) > LATEST else None


def _began_otherwise(lost: Lost) -> bool | None:
    if lost.end is None or len(lost.places) < LATEST or lost.loss_lost is not False:
        return None
    first = lost.record.loss[lost.places[0]]
    return None if first is None else not math.isfinite(first)


def _any_scale(lost: Lost) -> bool | None:
    record = lost.record
    if lost.loss_lost:
        return None
    if needs_no_scale(record.band) or min(record.scales[n] for n in lost.places) <= record.band.normal:
        return True
    return True if lost.end is None and _not_by_scale(record) else None


def _is_fixed(lost: Lost) -> bool | None:
    """Whether the scale could not fall."""
    record = lost.record
    scales = [record.scales[n] for n in lost.places[-2 * LATEST :]]
    if not any(record.skipped) or min(scales) <= record.band.normal:
        return None
    if isinstance(record.policy, Static) or max(scales) <= (getattr(record.policy, "min_scale", None) or 0.0):
        return True
    return len(scales) >= 2 * LATEST and len(set(scales)) == 1


def _worked_before(lost: Lost) -> bool:
    record = lost.record
    taken = [record.scales[n] for n in range(lost.places[0]) if not record.skipped[n]]
    return bool(taken) and max(taken) >= min(record.scales[n] for n in lost.places)


def _carried(lost: Lost) -> bool | None:
    """Whether steps were at a scale that had been lowered before."""
    record, end = lost.record, lost.end
    if end is None or end.start + 1 >= len(record):
        return None
    new, scales = record.new_scale, record.scales
    pairs = [(new[place - 1], scales[place]) for place in range(end.start + 1, len(record))]
    lowered = [scale for new_scale, scale in pairs if new_scale is not None and new_scale < scale]
    return len(lowered) >= FEWEST and len(lowered) >= MOSTLY * len(pairs)


def _skipped(lost: Lost) -> bool:
    return any(lost.record.skipped[n] for n in lost.places)


def _named(lost: Lost) -> bool | None:
    record = lost.record
    if lost.loss_lost is not False or not _skipped(lost):
        return None
    if record.culprits_from(lost.places[0]):
        return True
    known = record.culprits or (record.trace.framework is not None and record.code.records["names"])
    return False if known else None


def _inputs_odd(lost: Lost) -> bool | None:
    source = lost.origin
    if source is None or source.stage in ("data", "other pass"):
        return True if source and source.stage == "data" else None
    return lost._inputs_large


def _weights_grew(lost: Lost) -> bool | None:
    source, first = lost.origin, lost.record.snapshots[:1]
    if source is None or first[0] is source.snapshot:
        return None
    weights = grown(first[0], source.snapshot, "weight")
    if not weights or max(weights) < 1:
        return False if weights else None
    return median(weights) >= FEWEST or None


def _saturated(lost: Lost) -> bool | None:
    """Whether outputs may be probabilities of 0 or 1, whose logarithm is inf; other losses overflow."""
    source = lost.origin
    outputs = [] if source is None else [row for row in source.snapshot.rows if row.what == "activation"]
    if source is None or not outputs or source.stage != "loss":
        return None
    amax = outputs[-1].histogram.amax_exponent
    return amax is not None and amax >= SATURATED


INPUTS, WEIGHTS, OVERFLOW, NAN = "inputs bad", "weights bad", "module overflow", "module NaN"
LOSS, GRADIENT_OVERFLOW, GRADIENT_NAN = "outputs finite", "gradient overflow", "gradient NaN"
ELSEWHERE: Final = "pass sound"
PARTS: Final = {
    INPUTS: ("the inputs hold inf or NaN", "the inputs are finite"),
    WEIGHTS: ("weights hold inf or NaN", "all weights are finite"),
    OVERFLOW: ("a module overflows in forward", "no module overflows in forward"),
    NAN: ("a module makes NaN of small, finite values", "no module makes NaN of finite values"),
    LOSS: (
        "all outputs of modules are finite, and the loss is not",
        "an output or a gradient is not finite",
    ),
    GRADIENT_OVERFLOW: ("a gradient overflows in backward", "no gradient overflows in backward"),
    GRADIENT_NAN: ("a gradient is NaN or inf among small ones", "no gradient is NaN among them"),
    ELSEWHERE: ("all of the pass that was recorded is finite", "the recorded pass is not finite itself"),
}
"""Where the first inf or NaN of a step is. Snapshots show at most one of these signs."""
ALL_PARTS: Final = frozenset(PARTS)


def _of_part(name: str) -> Sign:
    def test(lost: Lost) -> bool | None:
        if name not in lost.parts:
            return False
        return True if len(lost.parts) == 1 else None

    return Sign(test, *PARTS[name], "lens")


SIGNS: Final = {
    "to the end": Sign(
        lambda lost: lost.end is not None, "no step worked from there on", "steps in between worked"
    ),
    "no update before": Sign(
        lambda lost: None if lost.updates is None else not lost.updates,
        "no step had been taken before",
        "steps had been taken before",
        usual=0.3,
    ),
    "few updates": Sign(
        lambda lost: None if lost.updates is None else bool(lost.end) and 0 < lost.updates < FEW_UPDATES,
        "it began within three updates",
        "many updates had worked before",
        usual=0.08,
    ),
    "all at once": Sign(_all_at_once, "it began for all batches at once", "single steps had failed before"),
    "rare": Sign(
        lambda lost: (lost.end is None and len(lost.places) <= len(lost.record) / RARELY) or None,
        "it happened in few steps",
        usual=0.1,
    ),
    "in rhythm": Sign(
        lambda lost: (lost.end is None and period_of(lost.places) > 0) or None,
        "it happens every so many steps, as once in each epoch",
        usual=0.1,
    ),
    "skipped": Sign(_skipped, "these steps were skipped", "no step was skipped"),
    "loss lost": Sign(lambda lost: lost.loss_lost, "the loss itself is inf or NaN", "the loss is finite"),
    "inf": Sign(lambda lost: lost.has_inf, "the loss was inf", "the loss was NaN and never inf"),
    "rose": Sign(
        _rose, "loss or gradient norm had risen tenfold before", "nothing had risen before", "norms", 0.2
    ),
    "began otherwise": Sign(
        _began_otherwise,
        "the loss of the first of these steps was lost, and no other",
        "the first of these steps was like the others",
        usual=0.05,
    ),
    "any scale": Sign(_any_scale, "it happens at every scale", "it stops at a lower scale"),
    "fixed": Sign(_is_fixed, "the scale could not fall", "the scale could fall", usual=0.2),
    "worked before": Sign(
        _worked_before, "steps had worked at such a scale", "no step had worked at such a scale"
    ),
    "carried": Sign(
        _carried,
        "the gradients still contain an earlier, higher scale",
        "the gradients have the current scale",
        usual=0.02,
    ),
    "named": Sign(
        _named, "gradients of this rank have inf or NaN", "no gradient of this rank has them", "names"
    ),
    "buffers": Sign(
        lambda lost: bool(lost.record.buffers) or None,
        "buffers hold inf or NaN after a skipped step",
        source="names",
        usual=0.2,
    ),
    "inputs odd": Sign(
        _inputs_odd,
        "the inputs are not finite, or far larger than usual",
        "the inputs are as large as usual",
        "lens",
    ),
    "weights grew": Sign(_weights_grew, "the weights grew many times over", "no weight grew", "lens"),
    "outputs saturate": Sign(
        _saturated,
        "the outputs are so large that probabilities become 0 or 1",
        "the outputs are not saturated",
        "lens",
    ),
} | {name: _of_part(name) for name in PARTS}
