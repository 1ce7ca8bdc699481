"""The steps that a run lost to inf or NaN, and their signs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import cached_property
from statistics import median, quantiles
from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST
from preamp.doctor.first_nonfinite import (
    Origin,
    What,
    given_far_larger,
    grown,
    lost_snapshots,
    most_common_origin,
    origin_of,
)
from preamp.doctor.history import (
    LATEST,
    SHORT,
    TENFOLD,
    TWOFOLD,
    Failure,
    failure,
    lost_places,
    period_of,
    rise,
)
from preamp.doctor.signs import Signs
from preamp.doctor.snapshots import is_in_order, needs_no_scale
from preamp.policy import Static
from preamp.record.exponents import exponent_of

FEW_UPDATES: Final = 4
EXTREME: Final = 1000.0
"""A loss this many times the usual one comes from unusual data, since a skipped step keeps the weights."""
FAR_ABOVE: Final = 16.0  # of gradients, compared with the largest norm of all other steps
LARGEST: Final = 2.0**24  # no gradient is larger, where no norm is known
SPAN: Final = 2.0**8  # from the lowest to the highest scale of steps whose overflow no scale explains
MOSTLY: Final = 0.9
AROUND: Final = 20
SUDDEN: Final = 5.0  # times the usual loss
RARELY: Final = 50
SATURATED: Final = 3
"""The exponent of a logit from which on its sigmoid is 1 in float16."""


class Lost:
    """The steps that a run lost to numbers which a lower scale does not cure.

    Attributes:
        places: of the steps, in order; empty if there are none.
        end: the last part of the run, if no step worked from there on.
        record: the run.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.end: Failure | None = failure(record)
        self.places: Sequence[int] = self._places()

    def _places(self) -> Sequence[int]:
        record, end = self.record, self.end
        if end is not None and not end.is_forward and _waits(record):
            self.end = end = None
        if end is not None:
            return range(end.start, len(record))
        if lost := sorted({*lost_places(record), *record.lost_spikes}):
            return lost
        if len(alone := _alone(record)) >= FEWEST:
            return alone
        sudden = array("q", (skip.place for skip in record.skips.of("sudden")))
        if period_of(sudden) >= 2 * FEWEST and not record.loss.count():
            return sudden
        if max(record.loss.count(), record.grad_norm.count()) < SHORT:
            return ()
        return _not_by_scale(record)

    @cached_property
    def loss_lost(self) -> bool | None:
        """Whether the loss of most of these steps is inf or NaN."""
        if self.end is not None:
            return self.end.is_forward or (False if self.end.is_backward else None)
        known = [self.record.lost_spikes.get(n, self.record.loss[n]) for n in self.places]
        losses = [loss for loss in known if loss is not None]
        if 2 * len(losses) < len(known):  # Keras on JAX does not know those after one that was lost
            return None
        return 2 * sum(not math.isfinite(loss) for loss in losses) > len(losses)

    @cached_property
    def origin(self) -> Origin | None:
        """Where the first inf or NaN was, in snapshots of such steps; None without any."""
        record, end = self.record, self.end
        if not self.places:
            return None
        if end is not None and self.loss_lost:  # only the first that shows it: later more may be lost
            source = None
            for snapshot in lost_snapshots(record, end.start):
                source = origin_of(record, snapshot)
                if source.stage != "other pass":
                    break
            return source
        if self.loss_lost:
            return most_common_origin(origin_of(record, one) for one in lost_snapshots(record))
        mine = {record.index[place] for place in self.places}
        found = [one for one in record.snapshots if one.index in mine and not record.is_lost(one)]
        return most_common_origin(origin_of(record, one) for one in found)


def _waits(record: Record) -> bool:
    """Return whether there were never as many overflows in a row as the policy waits for."""
    return record.summary.longest_streak < int(getattr(record.policy, "hysteresis", 1))


def _alone(record: Record) -> Sequence[int]:
    """Return skipped steps whose own loss is far larger than usual, while that of the next step is not.

    A skipped step does not change the weights, so it was the batch.
    """
    losses = record.loss
    usual = [abs(losses.values[n]) for n in record.settled if losses.known[n] and not record.skipped[n]]
    if len(record.skips) < FEWEST or len(usual) < SHORT:
        return ()
    bound = max(EXTREME * median(usual), record.band.largest)  # a smaller loss may have a larger weight
    far = [skip.place for skip in record.skips if abs(losses[skip.place] or 0.0) > bound]
    return [n for n in far if n + 1 < len(record) and abs(losses[n + 1] or 0.0) <= bound / EXTREME**0.5]


def _not_by_scale(record: Record) -> Sequence[int]:
    """Return the skipped steps at whose scale only gradients far larger than all recorded ones overflow."""
    if needs_no_scale(record.band):
        return [skip.place for skip in record.skips]
    if _is_close(record):
        return ()
    norms, largest = record.grad_norm.finite(), record.band.largest
    needed = FAR_ABOVE * max(norms) if norms else LARGEST
    certain = [
        skip.place
        for skip in record.skips
        if skip.cause != "growth"
        and largest / skip.scale >= needed
        and abs(record.loss[skip.place] or 0.0) * skip.scale <= largest
    ]
    if _stand_out(record, certain):
        return ()
    others = [skip for skip in record.skips if skip.cause != "growth"]
    if certain and len(others) > FEWEST:  # lower scales did not help
        scales = [skip.scale for skip in others]
        if max(scales) >= SPAN * min(scales):
            return [skip.place for skip in others]
    return certain if len(certain) >= FEWEST else ()


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


def _is_close(record: Record) -> bool:
    """Return whether gradients between modules came close to overflow in most steps that were taken."""
    best = [(one.best_scale(margin=0), one.scale) for one in record.sound]
    headrooms = [exponent_of(highest) - exponent_of(scale) for highest, scale in best if highest]
    return bool(headrooms) and median(headrooms) < FEWEST


SIGNS: Final = Signs()


@SIGNS.add("to the end", "no step worked from there on", "steps in between worked")
def _to_the_end(lost: Lost) -> bool:
    return lost.end is not None


@SIGNS.add("no update before", "no step had been taken before", "steps had been taken before", usual=0.3)
def _from_the_start(lost: Lost) -> bool | None:
    return None if _is_merged(lost.record) else not _updates(lost)


@SIGNS.add("few updates", "it began within three updates", "many updates had worked before", usual=0.08)
def _few_updates(lost: Lost) -> bool | None:
    if _is_merged(lost.record):
        return None
    return lost.end is not None and 0 < _updates(lost) < FEW_UPDATES


def _is_merged(record: Record) -> bool:
    """Return whether a step has several optimizers, of which some may step where others skip."""
    return any(name.startswith("optimizers[") for name in record.culprits)


def _updates(lost: Lost) -> int:
    return lost.record.skipped.count(0, 0, lost.places[0])


@SIGNS.add("all at once", "it began for all batches at once", "single steps had failed before")
def _all_at_once(lost: Lost) -> bool | None:
    record, end = lost.record, lost.end
    if end is None or _updates(lost) < FEW_UPDATES:
        return None
    if lost.loss_lost:
        return not any(place < end.start for place in lost_places(record)) and end.not_finite == end.losses
    return all(record.skipped[end.start :])


@SIGNS.add("rare", "it happened to hardly any step", usual=0.1)
def _rare(lost: Lost) -> bool | None:
    return (lost.end is None and len(lost.places) <= len(lost.record) / RARELY) or None


@SIGNS.add("in rhythm", "it happens every so many steps, as once in each epoch", usual=0.1)
def _in_rhythm(lost: Lost) -> bool | None:
    return (lost.end is None and period_of(lost.places) > 0) or None


@SIGNS.add("skipped", "these steps were skipped", "no step was skipped")
def _skipped(lost: Lost) -> bool:
    return any(lost.record.skipped[n] for n in lost.places)


# The loss and the gradient norm


@SIGNS.add("loss lost", "the loss itself is inf or NaN", "the loss is finite")
def _loss_lost(lost: Lost) -> bool | None:
    return lost.loss_lost


@SIGNS.add("inf", "the loss was inf", "the loss was NaN and never inf")
def _is_inf(lost: Lost) -> bool | None:
    if not lost.loss_lost:
        return None
    record = lost.record
    values = [record.lost_spikes.get(n, record.loss[n]) for n in lost.places]
    return any(value is not None and math.isinf(value) for value in values)


@SIGNS.add(
    "rose", "loss or gradient norm had risen tenfold before", "nothing had risen before", "norms", usual=0.2
)
def _rose(lost: Lost) -> bool | None:
    if not _updates(lost):
        return None
    losses, norms = _before(lost, "loss"), _before(lost, "grad_norm")
    loss, norm = rise(losses), rise(norms)
    grew = loss is not None and loss.ratio >= TENFOLD
    if grew or (norm is not None and norm.ratio >= TENFOLD and (loss is None or loss.ratio >= TWOFOLD)):
        return True
    return False if max(len(losses), len(norms)) > LATEST else None


@SIGNS.add("fell", "the loss had fallen by half before", "the loss had not fallen before")
def _fell(lost: Lost) -> bool | None:
    losses = _before(lost, "loss")
    return min(losses) < losses[0] / 2 if len(losses) > LATEST and _updates(lost) else None


def _before(lost: Lost, column: str) -> Sequence[float]:
    """Return the finite numbers of a column before the steps; all of a run that never recovered."""
    stop = None if lost.end is not None else lost.places[0]
    values: Sequence[float] = getattr(lost.record, column).finite(0, stop)
    return values


@SIGNS.add(
    "began otherwise",
    "the loss of the first of these steps was lost or far off, and no other",
    "the first of these steps was like the others",
    usual=0.05,
)
def _began_otherwise(lost: Lost) -> bool | None:
    losses, places = lost.record.loss, lost.places
    if lost.end is None or len(places) < LATEST or lost.loss_lost is not False or losses[places[0]] is None:
        return None
    rest = [abs(loss) for n in places[1:] if (loss := losses[n]) is not None and math.isfinite(loss)]
    first = abs(losses.values[places[0]])
    return bool(rest) and not first <= SUDDEN * max(median(rest), 1e-30)


@SIGNS.add(
    "loss far off",
    "their loss alone is far larger than usual",
    "the loss of these steps is as usual",
    usual=0.05,
)
def _far_off(lost: Lost) -> bool | None:
    if lost.end is not None or not lost.record.loss.count():
        return None
    alone = _alone(lost.record)
    return len(alone) >= FEWEST and 2 * len(alone) >= len(lost.places)


# The scale


@SIGNS.add("any scale", "it happens at every scale", "it stops at a lower scale")
def _any_scale(lost: Lost) -> bool | None:
    record = lost.record
    if lost.loss_lost:
        return None
    if needs_no_scale(record.band) or min(record.scales[n] for n in lost.places) <= record.band.normal:
        return True
    return True if lost.end is None and len(_not_by_scale(record)) >= FEWEST else None


@SIGNS.add("fixed", "the scale could not fall", "the scale could fall", usual=0.2)
def _is_fixed(lost: Lost) -> bool | None:
    record = lost.record
    scales = [record.scales[n] for n in lost.places[-2 * LATEST :]]
    if not any(record.skipped) or min(scales) <= record.band.normal:
        return None
    if isinstance(record.policy, Static) or max(scales) <= (getattr(record.policy, "min_scale", None) or 0.0):
        return True
    waits = int(getattr(record.policy, "hysteresis", 1))
    return len(scales) >= 2 * LATEST > waits and len(set(scales)) == 1


@SIGNS.add("worked before", "steps had worked at such a scale", "no step had worked at such a scale")
def _worked_before(lost: Lost) -> bool:
    record = lost.record
    taken = [record.scales[n] for n in range(lost.places[0]) if not record.skipped[n]]
    return bool(taken) and max(taken) >= min(record.scales[n] for n in lost.places)


@SIGNS.add(
    "carried",
    "the gradients still contain an earlier, higher scale",
    "the gradients have the current scale",
    usual=0.02,
)
def _carried(lost: Lost) -> bool | None:
    record, end = lost.record, lost.end
    if end is None or end.start + 1 >= len(record):
        return None
    new, scales = record.new_scale, record.scales
    pairs = [(new[place - 1], scales[place]) for place in range(end.start + 1, len(record))]
    lowered = [scale for new_scale, scale in pairs if new_scale is not None and new_scale < scale]
    return len(lowered) >= FEWEST and len(lowered) >= MOSTLY * len(pairs)


# Names


@SIGNS.add("named", "parameters of this rank are named", "no parameter of this rank is named", "names")
def _named(lost: Lost) -> bool | None:
    record = lost.record
    if lost.loss_lost is not False or not _skipped(lost):
        return None
    if record.culprits_from(lost.places[0]):
        return True
    known = record.culprits or (record.trace.framework is not None and record.code.records["names"])
    return False if known else None


@SIGNS.add("buffers", "buffers hold inf or NaN after a skipped step", source="names", usual=0.2)
def _buffers(lost: Lost) -> bool | None:
    return bool(lost.record.buffers) or None


# Snapshots


@SIGNS.add("inputs bad", "the inputs hold inf or NaN", "the inputs are finite", "lens")
def _inputs_bad(lost: Lost) -> bool | None:
    source = lost.origin
    if source is None or source.stage == "data":
        return source and True
    return False if source.snapshot.inputs or (source.in_forward and not source.is_first) else None


@SIGNS.add("inputs large", "the inputs are far larger than usual", "the inputs are as large as usual", "lens")
def _inputs_large(lost: Lost) -> bool | None:
    source = lost.origin
    if source is None or not source.snapshot.inputs:
        return None
    return given_far_larger(lost.record, source.snapshot) is not None


@SIGNS.add("weights bad", "weights hold inf or NaN", "all weights are finite", "lens")
def _weights_bad(lost: Lost) -> bool | None:
    source = lost.origin
    if source is None or source.stage == "weights":
        return source and True
    return False if source.snapshot.weights else None


@SIGNS.add("weights grew", "the weights grew many times over", "no weight grew", "lens")
def _weights_grew(lost: Lost) -> bool | None:
    source, record = lost.origin, lost.record
    if source is None or record.snapshots[0] is source.snapshot:
        return None
    first, last = record.snapshots[0], source.snapshot
    weights, outputs = grown(first, last, "weight"), grown(first, last, "activation")
    if not weights or max(weights) < 1:
        return False if weights else None
    most = bool(outputs) and median(outputs) >= FEWEST
    return True if median(weights) >= FEWEST or (most and max(weights) >= 2) else None


@SIGNS.add("module overflow", "a module overflows in forward", "no module overflows in forward", "lens")
def _module_overflow(lost: Lost) -> bool | None:
    return _in_module(lost, "overflow")


@SIGNS.add("module NaN", "a module makes NaN of small, finite values", "no module makes NaN of them", "lens")
def _module_nan(lost: Lost) -> bool | None:
    return _in_module(lost, "NaN")


def _in_module(lost: Lost, what: What) -> bool | None:
    source = lost.origin
    if source is None or _inputs_large(lost):  # what is computed from such inputs overflows
        return None
    row = source.row
    if not source.in_forward or row is None:
        return False if _has(lost, "forward") else None
    found = source.what
    if found == "unknown" and (
        _is_inf(lost) or (row.nans is not None and row.nans < row.histogram.nonfinite)
    ):
        found = "overflow"
    if found == "unknown" or (found == "NaN" and not _is_made_there(source)):
        return None
    return found == what


def _is_made_there(source: Origin) -> bool:
    """Return whether NaN arose where it was found, and not in what the snapshot does not show."""
    row, snapshot = source.row, source.snapshot
    hides = source.is_first and not snapshot.inputs
    return row is not None and is_in_order(row) and bool(snapshot.weights) and not hides


def _has(lost: Lost, direction: str) -> bool:
    """Return whether the snapshot shows values of a pass at all."""
    source = lost.origin
    return source is not None and any(row.direction == direction for row in source.snapshot.rows)


@SIGNS.add(
    "outputs finite",
    "all outputs of modules are finite, and the loss is not",
    "an output or a gradient is not finite",
    "lens",
)
def _outputs_finite(lost: Lost) -> bool | None:
    return _is_stage(lost, "loss")


@SIGNS.add(
    "outputs saturate",
    "the outputs are so large that probabilities become 0 or 1",
    "the outputs are no larger than before",
    "lens",
)
def _saturated(lost: Lost) -> bool | None:
    """Whether they may be probabilities of 0 or 1, whose logarithm is inf; other losses grow to overflow."""
    source = lost.origin
    outputs = [] if source is None else [row for row in source.snapshot.rows if row.what == "activation"]
    if source is None or not outputs or source.stage != "loss":
        return None
    amax = outputs[-1].histogram.amax_exponent
    return amax is not None and amax >= SATURATED


@SIGNS.add(
    "gradient overflow", "a gradient overflows in backward", "no gradient overflows in backward", "lens"
)
def _gradient_overflow(lost: Lost) -> bool | None:
    return _in_gradient(lost, "overflow")


@SIGNS.add(
    "gradient NaN", "a gradient is NaN or inf among small ones", "no gradient is NaN among them", "lens"
)
def _gradient_nan(lost: Lost) -> bool | None:
    return _in_gradient(lost, "NaN")


def _in_gradient(lost: Lost, what: What) -> bool | None:
    source = lost.origin
    if source is None or _inputs_large(lost) or _may_be_of_loss(lost):
        return None
    if source.stage != "backward":
        return False if source.in_forward or _has(lost, "backward") else None
    return None if source.what == "unknown" else source.what == what


@SIGNS.add(
    "pass sound",
    "all of the pass that was recorded is finite",
    "the recorded pass is not finite itself",
    "lens",
)
def _pass_sound(lost: Lost) -> bool | None:
    return _is_stage(lost, "elsewhere", "other pass")


def _may_be_of_loss(lost: Lost) -> bool:
    """Return whether gradients are not finite, and a loss that nobody recorded may be the reason."""
    return lost.loss_lost is None and lost.origin is not None and lost.origin.stage == "backward"


def _is_stage(lost: Lost, *stages: str) -> bool | None:
    if (
        lost.origin is None
        or _may_be_of_loss(lost)
        or not _has(lost, "forward" if lost.loss_lost else "backward")
    ):
        return None
    return lost.origin.stage in stages
