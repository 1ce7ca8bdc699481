"""Find why a run failed, or lost steps, where the loss scale is not the reason.

A step goes from the data through weights, modules and the loss to the gradients, and the first of these that
is not finite is the cause. The functions here follow that order. They use snapshots of the steps that failed
where there are any, and otherwise the history of the loss and of the gradient norm.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from preamp.doctor.backward import (
    in_backward,
    not_by_scale,
    not_of_this_pass,
    sporadic_nan,
    unnoticed,
)
from preamp.doctor.batches import (
    bad_batches,
    bad_first_module,
    bad_inputs,
    bad_other_pass,
    bad_targets,
    large_inputs,
)
from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST, Finding
from preamp.doctor.first_nonfinite import (
    Origin,
    given_far_larger,
    grown,
    lost_snapshots,
    most_common_origin,
    origin_of,
)
from preamp.doctor.forward import (
    close_to_overflow,
    forward_nan,
    forward_overflow,
    in_a_term,
    in_loss,
    nearly_overflows,
    seems_in_loss,
    unknown_forward,
)
from preamp.doctor.history import (
    FEW_UPDATES,
    LATEST,
    SHORT,
    Extent,
    Failure,
    failure,
    lost_before,
    lost_places,
    number,
    period_of,
    update_count,
)
from preamp.doctor.snapshots import needs_no_scale
from preamp.doctor.updates import broken_update, diverged, diverged_in_range, not_skipped
from preamp.record.snapshots import Snapshot

SATURATED: Final = 3
"""The exponent of a logit from which on its sigmoid is 1 in float16."""
EXTREME: Final = 1000.0
"""A loss this many times the usual one comes from unusual data, since a skipped step keeps the weights."""
RECENT: Final = 100
LONE: Final = 5
"""Too few steps to tell whether they become more frequent."""


# A run that never recovered


def failed(record: Record) -> Finding | None:
    """Find why a run never recovered; None if it did, or if only the scale can be the cause."""
    end = failure(record)
    if end is None:
        return diverged_in_range(record) or _mostly_lost(record)
    source, extent = _source_of(record, end), Extent.of_failure(record, end)
    if source is not None and (found := _in_data(record, end, source, extent)):
        return found
    if found := diverged(record, end, source):
        return found
    if not end.skips and end.start:
        return not_skipped(record, end)
    if source is not None:
        return _at(record, end, source, extent)
    return _by_history(record, end, extent)


def _mostly_lost(record: Record) -> Finding | None:
    """Find why the loss of most late steps is inf or NaN, where snapshots of such steps show it."""
    late = record.loss.values[-RECENT:]
    lost = sum(not math.isfinite(value) for value in late)
    if 2 * lost < len(late) or not lost_snapshots(record):
        return None
    return replace(_lost_steps(record, lost_places(record)), severity="problem")


def _source_of(record: Record, end: Failure) -> Origin | None:
    """Return where the first inf or NaN was in the steps that failed; None without snapshots of them."""
    first = record.index[end.start]
    if end.is_forward:  # only the first that shows it: by later steps, more may be inf or NaN
        source = None
        for snapshot in lost_snapshots(record, end.start):
            source = origin_of(record, snapshot)
            if source.stage != "other pass":
                break
        return source
    snapshots = [
        snapshot for snapshot in record.snapshots if snapshot.index >= first and not record.is_lost(snapshot)
    ]
    origins = [origin_of(record, snapshot) for snapshot in snapshots]
    return most_common_origin(origins)


def _in_data(record: Record, end: Failure, source: Origin, extent: Extent) -> Finding | None:
    """Find inputs that hold inf or NaN, or values far larger than those of the steps before."""
    if source.stage == "data" and source.row is not None:
        return bad_inputs(extent, source.row)
    if source.stage == "weights" or not (end.is_forward or end.losses == 0):
        return None
    large = given_far_larger(record, source.snapshot)
    return large_inputs(extent, large, source.snapshot.low_dtype) if large is not None else None


def _at(record: Record, end: Failure, source: Origin, extent: Extent) -> Finding | None:
    """Return the finding for the first place in the step that was not finite."""
    if source.stage == "weights":
        return broken_update(record, end, source)
    if source.in_forward and not end.is_backward:
        return _in_forward(record, end, source, extent)
    if source.stage == "loss":
        if _changed_at_once(record, end, source):
            return bad_targets(extent)
        return in_loss(extent, is_inf=end.inf > 0)
    if source.stage == "other pass":
        return bad_other_pass(extent)
    if source.stage == "elsewhere" and not end.is_forward:
        return not_of_this_pass(record, end)
    if end.is_forward:
        return _by_history(record, end, extent)
    return in_backward(record, end, source)


def _changed_at_once(record: Record, end: Failure, source: Origin) -> bool:
    """Return whether every loss is inf or NaN from one step on, though outputs are no larger than before.

    Outputs that a loss function cannot handle appear for some batches first. If all batches fail at once
    while the weights do not change, the fault is in the batches.
    """
    if update_count(record, end.start) < FEW_UPDATES or lost_before(record, end) or not end.skips:
        return False
    return not _may_saturate(record, source.snapshot)


def _may_saturate(record: Record, snapshot: Snapshot) -> bool:
    """Return whether the last outputs may be probabilities of 0 or 1, whose logarithm is inf.

    The sigmoid of a logit of 8 is 1 in float16; the outputs of other losses grow before they overflow.
    """
    outputs = [row for row in snapshot.rows if row.what == "activation"]
    earlier = [one for one in record.snapshots if one.index < snapshot.index and not record.is_lost(one)]
    if not outputs or not earlier:
        return True
    amax = outputs[-1].histogram.amax_exponent
    larger = grown(earlier[0], snapshot, "activation")
    return (amax is not None and amax >= SATURATED) or (bool(larger) and max(larger) >= FEWEST)


def _in_forward(record: Record, end: Failure, source: Origin, extent: Extent) -> Finding:
    row = source.row
    assert row is not None  # a break in a module has a row
    snapshot = source.snapshot
    is_inf = end.inf > 0 or (row.nans is not None and row.nans < row.histogram.nonfinite)
    if row.name == "" and row.histogram.total == 1:  # a model that returns its loss
        return in_loss(extent, is_inf=is_inf)
    if source.what == "overflow" or (source.what == "unknown" and is_inf):
        return forward_overflow(extent, source, row)
    if snapshot.weights:  # and they are finite
        if source.what == "unknown" and not needs_no_scale(snapshot.band) and not source.is_first:
            return forward_overflow(extent, source, row)
        return forward_nan(extent, source, row)
    if source.what == "unknown" and not needs_no_scale(snapshot.band) and not source.is_first:
        return forward_overflow(extent, source, row)
    if update_count(record, end.start) and not lost_before(record, end):
        return broken_update(record, end, source)
    if source.is_first and not snapshot.inputs:
        return bad_first_module(extent, source)
    return forward_nan(extent, source, row)


def _by_history(record: Record, end: Failure, extent: Extent) -> Finding | None:
    """Return the most likely cause where no snapshot shows the first inf or NaN."""
    if not end.is_forward:
        return in_backward(record, end, None) if end.is_backward else None
    is_gradual = lost_before(record, end) or end.not_finite < end.losses
    if is_gradual and _fell(record, end):
        return seems_in_loss(extent, is_inf=end.inf > 0)
    if _is_one_term(record, end):
        return in_a_term(extent)
    if any(map(math.isinf, record.loss.values)):
        return unknown_forward(record, extent)
    if update_count(record, end.start) and not is_gradual:  # NaN in weights never goes away
        return broken_update(record, end, None)
    return _unknown_nan(extent)


def _fell(record: Record, end: Failure) -> bool:
    """Return whether the loss had fallen far before the run failed, as predictions became confident."""
    losses = record.loss.finite()
    return end.start > 0 and len(losses) > 1 and min(losses) < losses[0] / 2


def _is_one_term(record: Record, end: Failure) -> bool:
    """Return whether a negative loss became inf, and never NaN: then one of its terms overflows."""
    before = record.loss.finite(0, end.start)
    lost = [record.loss.values[place] for place in lost_places(record)]
    return len(before) >= LATEST and max(before) < 0.0 and set(lost) == {math.inf}


def _unknown_nan(extent: Extent) -> Finding:
    """Return the finding that the loss is NaN and never inf, for an unknown reason."""
    return extent.finding(
        "forward NaN",
        f"The loss is NaN {extent.words}, and was never inf: the forward pass produces NaN or "
        "overflows, or the input data hold NaN. No loss scale helps, because the loss is scaled "
        "after the forward pass.",
        f"Check the batches first: {extent.code.is_finite('x')}. If they are finite, find the first layer "
        f"whose output is not ({extent.code.find_layer}), and run it in float32, {extent.code.in_float32}.",
    )


# A step here and there


def sporadic_failures(record: Record) -> Finding | None:
    """Find what makes single steps fail at any scale."""
    if lost := sorted({*lost_places(record), *record.lost_spikes}):
        return _lost_steps(record, lost)
    if found := _extreme_batches(record) or unnoticed(record) or sporadic_nan(record):
        return found
    periodic = array("q", (skip.place for skip in record.skips.of("sudden")))
    if len(periodic) >= FEWEST and period_of(periodic) >= 2 * FEWEST and not record.loss.count():
        return bad_batches(record, periodic, "while the steps around them were fine at the same scale")
    is_measured = not record.loss.count() and record.grad_norm.count() > 0
    if is_measured and len(places := not_by_scale(record)) >= FEWEST:
        why = "gradients were not finite at scales where only gradients far larger than all others overflow"
        return bad_batches(
            record,
            places,
            why,
            also=" If they are finite, the derivative of an operation, or the loss, is inf or NaN for them. "
            f"To find out which, record the loss of each step{record.code.and_snapshots}.",
        )
    return None


def _extreme_batches(record: Record) -> Finding | None:
    """Find skipped steps whose own loss or inputs are far larger than those of all others.

    A skipped step does not change the weights, so if the next loss is normal again, it was the batch.
    """
    skipped = {record.index[skip.place] for skip in record.skips}
    given = [
        (k, row) for k in record.snapshots if k.index in skipped and (row := given_far_larger(record, k))
    ]
    sampled = sum(snapshot.index in skipped for snapshot in record.snapshots)
    if len(given) >= 2 and 2 * len(given) >= sampled:
        numbers = {snapshot.index for snapshot, _ in given}
        places = [skip.place for skip in record.skips if record.index[skip.place] in numbers]
        return large_inputs(Extent.of_steps(record, places), given[-1][1], given[-1][0].low_dtype)
    losses = record.loss
    if len(record.skips) < FEWEST:
        return None
    usual = array(
        "d", (abs(losses.values[n]) for n in record.settled if not record.skipped[n] and losses.known[n])
    )
    if len(usual) < SHORT:
        return None
    bound = max(EXTREME * median(usual), record.band.largest)  # a smaller loss may have a larger weight
    far = [s.place for s in record.skips if abs(losses[s.place] or 0.0) > bound]
    alone = [n for n in far if n + 1 < len(record) and abs(losses[n + 1] or 0.0) <= bound / EXTREME**0.5]
    others = len(record.skips) - len(record.skips.of("growth"))
    if len(alone) < FEWEST or 2 * len(alone) < others:
        return None
    why = f"the loss alone was more than {number(bound)}, and far lower again in the next step"
    return bad_batches(record, alone, why)


def _lost_steps(record: Record, lost: Sequence[int]) -> Finding:
    extent = Extent.of_steps(record, lost)
    source = most_common_origin(origin_of(record, snapshot) for snapshot in lost_snapshots(record))
    is_inf = any(math.isinf(record.lost_spikes.get(place, record.loss.values[place])) for place in lost)
    if source is not None:
        large = given_far_larger(record, source.snapshot)
        if source.stage == "data" and source.row is not None:
            return bad_inputs(extent, source.row)
        if large is not None:
            return large_inputs(extent, large, source.snapshot.low_dtype)
        if source.in_forward and source.row is not None:
            if source.snapshot.inputs or not source.is_first:
                is_overflow = source.what == "overflow" or (source.what == "unknown" and is_inf)
                return (forward_overflow if is_overflow else forward_nan)(extent, source, source.row)
            return bad_first_module(extent, source)
        if source.stage == "loss" and (is_inf or _may_saturate(record, source.snapshot)):
            return in_loss(extent, is_inf=is_inf)
        if source.stage == "other pass":
            return bad_other_pass(extent)
    elif close := close_to_overflow(record):
        return nearly_overflows(extent, close)
    if is_inf and _share_grows(record, lost):
        return seems_in_loss(extent, is_inf=True)
    return bad_batches(
        record,
        lost,
        "the loss itself was inf or NaN, which no scale can fix",
        also=" If they are finite, look for the logarithm of 0 or a sum that overflows float16 in the loss "
        "function, and for an output that overflows."
        if is_inf
        else " If they are finite, an operation turns them into NaN: a division by zero, or the root or "
        "logarithm of a value that may be zero.",
    )


def _share_grows(record: Record, lost: Sequence[int]) -> bool:
    """Return whether the loss is inf or NaN more and more often."""
    if len(lost) <= LONE or period_of(lost):
        return False
    middle = (lost[0] + len(record)) / 2
    late = sum(place >= middle for place in lost)
    return late >= 3 * (len(lost) - late)
