"""Findings about the backward pass: a derivative that is inf or NaN, another pass, exploding gradients."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST, Finding
from preamp.doctor.first_nonfinite import Origin, origin_of
from preamp.doctor.history import SHORT, Extent, Failure, number, sentence_of
from preamp.doctor.snapshots import is_in_order, module_name, needs_no_scale
from preamp.policy import Static
from preamp.record.exponents import exponent_of
from preamp.record.formatting import of_steps, power, two_to

NORM_WINDOW, SPIKE_OF_NORM = 20, 30.0
FAR_BEYOND_FIRST: Final = 10.0
"""Times the first norms: where the loss is nearly 0, norms are small and one batch may be like the first."""
EXPLODED: Final = 10
"""Gradients explode if the largest one in backward is this many powers of two above the first."""
FAR_ABOVE: Final = 16.0  # of gradients, compared with the largest norm of all other steps
LARGEST: Final = 2.0**24  # no gradient is larger, where no norm is known
SPAN: Final = 2.0**8  # from the lowest to the highest scale of steps whose overflow no scale explains
USUAL: Final = 10.0  # of losses, compared with their median
MOSTLY: Final = 0.9


def in_backward(record: Record, end: Failure, source: Origin | None) -> Finding | None:
    """Find gradients that are not finite at any scale; None where the scale may be the cause."""
    at_any = end.lowest <= record.band.normal or needs_no_scale(record.band)
    if source is not None and source.what == "overflow":
        return _overflows_at_any(record, end, source) if at_any else None
    if not at_any and (source is None or source.what != "NaN"):
        return None
    if source is None and _is_huge(record, end):
        return _overflows_at_any(record, end, None)
    high = max(record.scales[end.start : len(record)])
    scales = f", at every scale from {power(high)} to {power(end.lowest)}" if high > end.lowest else ""
    loss = (
        "The loss is finite and the gradients are not" if end.is_backward else "The gradients are not finite"
    )
    return Extent.of_failure(record, end).finding(
        "NaN in backward",
        f"{loss}{scales} {Extent.of_failure(record, end).words}: this is not an overflow; the "
        f"derivative of an operation is inf or NaN.{_where_in_backward(record, source)}",
        _derivatives(record) + _otherwise(record, end, source),
    )


def _otherwise(record: Record, end: Failure, source: Origin | None) -> str:
    """Return what else may be the cause, depending on what was not recorded."""
    if not end.is_backward:
        return " If the loss itself is inf or NaN, look at the data and the loss function."
    if source is None and end.start > record.opening:
        return (
            " If the gradients of a single pass are finite, the inf or NaN is left over from an earlier "
            f"step: {record.code.clear}."
        )
    return ""


def _derivatives(record: Record) -> str:
    """Return the advice for a derivative that is inf or NaN."""
    return (
        f"Look for sqrt, norm, log or a power at 0, a division by zero, or {record.code.where} over a branch "
        "that is NaN (its gradient is NaN even where it is not chosen). Add an epsilon to the argument, or "
        "clamp it."
    )


def _is_huge(record: Record, end: Failure) -> bool:
    """Return whether the scaled loss overflows the low dtype even at the lowest scale."""
    losses = record.loss.finite(end.start)
    return bool(losses) and median(map(abs, losses)) * end.lowest > record.band.largest


def _overflows_at_any(record: Record, end: Failure, source: Origin | None) -> Finding:
    return Extent.of_failure(record, end).finding(
        "gradient overflow",
        f"The loss is finite, and in backward the gradients overflow {record.band.name} even at a "
        f"scale of {power(end.lowest)}.{_where_in_backward(record, source)}",
        SMALLER_LOSS,
    )


SMALLER_LOSS: Final = (
    "Make the loss smaller: a mean instead of a sum over the batch, and targets and inputs of about 1. If "
    "the gradients grow from layer to layer, or from time step to time step, they explode: smaller initial "
    "weights, normalization."
)


def unnoticed(record: Record) -> Finding | None:
    """Find inf or NaN among small gradients in most snapshots, whether or not the steps were skipped.

    The rest of the backward pass may drop them, so that the gradients of the parameters are finite.
    """
    origins = [origin_of(record, snapshot) for snapshot in record.snapshots]
    found = [one.row for one in origins if one.row is not None and _is_derivative(one)]
    if len(found) < 2 or 2 * len(found) < len(origins):
        return None
    row = found[-1]
    return Finding(
        kind="NaN in backward",
        severity="warning",
        sentence=f"In {len(found):,} of {len(origins):,} snapshots, the gradient of the output of "
        f"{module_name(row.name)} is the first in backward with inf or NaN, while its other values are far "
        "from overflowing: the derivative of an operation is inf or NaN. Where steps were taken, the rest of "
        "the backward pass dropped these values.",
        advice=_derivatives(record),
        numbers={"snapshots": len(found)},
    )


def _is_derivative(one: Origin) -> bool:
    """Return whether a gradient holds NaN, or inf that no scale explains, among small values."""
    row = one.row
    is_small = one.stage == "backward" and one.what == "NaN" and row is not None and row.what == "flow"
    return is_small and (bool(row and row.nans) or one.snapshot.scale <= 1.0)


def not_of_this_pass(record: Record, end: Failure) -> Finding | None:
    """Find skipped steps whose own gradients are finite: the others come from another pass or rank."""
    first = record.index[end.start]
    snapshots = [snapshot for snapshot in record.snapshots if snapshot.index >= first]
    if not any(row.what == "gradient" for snapshot in snapshots for row in snapshot.rows):
        return None
    here = bool(record.culprits_from(end.start)) or _is_carried(record, end)
    carried = f" They still contain an earlier scale, which has since been lowered to {power(end.lowest)}."
    return Extent.of_failure(record, end).finding(
        "gradients not cleared" if here else "another rank",
        f"Steps are skipped {Extent.of_failure(record, end).words}, but the gradients of a single "
        "pass are finite: "
        + (
            f"an inf from an earlier step was never cleared.{first_parameter(record) or carried}"
            if here
            else "the gradients of another rank, or of an earlier step, are not."
            if not record.culprits
            else "no parameter of this rank is named in these steps, so another rank most likely has the "
            "inf or NaN."
        ),
        sentence_of(record.code.clear_sums if here else record.code.clear)
        + (
            " With several ranks, inf may also come from another one through the all-reduce: look at their "
            "records. "
            if here
            else " With several ranks, look at their records. "
        )
        + "If your loop accumulates gradients itself, initialize them with zeros: multiplying inf by 0 gives "
        "NaN.",
    )


def _is_carried(record: Record, end: Failure) -> bool:
    """Return whether gradients kept an older scale while the policy lowered it, as those of old passes do."""
    new, scales = record.new_scale, record.scales
    pairs = [(new[place - 1], scales[place]) for place in range(end.start + 1, len(record))]
    lowered = [scale for new_scale, scale in pairs if new_scale is not None and new_scale < scale]
    return len(lowered) >= FEWEST and len(lowered) >= MOSTLY * len(pairs)


def _where_in_backward(record: Record, source: Origin | None) -> str:
    if source is not None and source.row is not None:
        where = "gradient of the output" if source.row.what == "flow" else "gradient of the parameters"
        held = "is the first with" if is_in_order(source.row) else "holds"
        return f" In backward, the {where} of {module_name(source.row.name)} {held} inf or NaN."
    return first_parameter(record)


def first_parameter(record: Record) -> str:
    """Name the parameter whose gradient was most often the first with inf or NaN, as far as that is known."""
    for name, count in record.first_culprits.most_common(1):
        return (
            f" In backward, {name} was the first parameter with inf or NaN in {count:,} of "
            f"{record.first_culprits.total():,} skipped steps."
        )
    names = ", ".join(name for name, _ in record.culprits.most_common(3))
    return f" In backward, inf or NaN reached {names}; the order is not known." if names else ""


def exploding(record: Record) -> Finding | None:
    """Find gradients that are sometimes very much larger than just before."""
    norms = record.grad_norm.finite()
    spikes, highest = _spikes(norms)
    if spikes < FEWEST or highest < FAR_BEYOND_FIRST * median(norms[:NORM_WINDOW]):
        return _growing_backward(record)
    return Finding(
        kind="exploding gradients",
        severity="warning",
        sentence=f"The gradient norm jumped to more than {SPIKE_OF_NORM:.0f} times that of the steps before "
        f"it {spikes:,} times, up to {number(highest)}: the gradients explode from time to time.",
        advice=f"Clip them ({record.code.clip}). In a recurrent network, use fewer time steps or smaller "
        "recurrent weights.",
        numbers={"steps": spikes, "highest": highest},
    )


def _growing_backward(record: Record) -> Finding | None:
    """Find gradients that grow from module to module in backward, in a run that lowered its scale."""
    clean = [snapshot for snapshot in record.snapshots if snapshot.first_overflow is None]
    if not clean or max(record.opening, len(record.skips)) < FEWEST:
        return None
    snapshot = clean[-1]
    flows = [
        (row.histogram.amax_exponent, row.name)
        for row in snapshot.rows
        if row.what == "flow" and is_in_order(row)
    ]
    known = [(amax, name) for amax, name in flows if amax is not None]
    if not known:
        return None
    (start, last), (most, first) = known[0], max(known)
    if most - start < EXPLODED:
        return None
    return Finding(
        kind="exploding gradients",
        severity="warning",
        sentence=f"In backward, the gradients grow {two_to(most - start)}-fold from {module_name(last)} to "
        f"{module_name(first)}: they explode.",
        advice="Use smaller initial weights, normalization, or fewer time steps, and clip "
        f"({record.code.clip}).",
        numbers={"powers": most - start},
    )


def _spikes(norms: Sequence[float]) -> tuple[int, float]:
    """Return the number of norms far above the median of those just before them, and the largest of them."""
    window: list[float] = []
    count, highest, was_high = 0, 0.0, False
    for place, norm in enumerate(norms):
        if len(window) == NORM_WINDOW:
            is_high = norm > SPIKE_OF_NORM * window[NORM_WINDOW // 2] > 0.0
            if is_high and not was_high:
                count += 1
            if is_high:
                highest = max(highest, norm)
            was_high = is_high
            del window[bisect_left(window, norms[place - NORM_WINDOW])]
        insort(window, norm)
    return count, highest


def too_large(record: Record) -> Finding | None:
    """Find gradients that overflow although the loss is scaled down."""
    if not record.late or isinstance(record.policy, Static) or not (record.opening or len(record.skips)):
        return None
    usual, found = median(record.of(record.late)), record.scales[record.opening]
    needed = record.usual_headroom < FEWEST if record.usual_headroom is not None else found < 1.0
    if usual >= 1.0 or not needed:
        return None
    return Finding(
        kind="gradient overflow",
        severity="warning",
        sentence=f"The scale had to fall to {power(usual)}, below 1: in backward the gradients overflow "
        f"{record.band.name} even without a scale.{first_parameter(record)}",
        advice=SMALLER_LOSS,
        numbers={"scale": usual},
    )


def sporadic_nan(record: Record) -> Finding | None:
    """Find single steps whose loss is finite and gradients are not, at scales that cannot be the reason.

    At their scale only gradients many times larger than all recorded ones overflow. Steps with unusual losses
    do not count: their gradients may be that large.
    """
    losses = record.loss.finite()
    if len(losses) < SHORT:
        return None
    bound = USUAL * abs(median(losses))
    alike = [
        skip.place
        for skip in record.skips
        if skip.cause != "growth"
        and (loss := record.loss[skip.place]) is not None
        and abs(loss) <= bound  # not inf or NaN either
    ]
    certain = set(not_by_scale(record))
    places = [place for place in alike if place in certain]
    if places and _stand_out(record, places):
        return None
    if certain and len(alike) > FEWEST and _span(record, alike) >= SPAN:  # lower scales did not help
        places = alike
    if len(places) < FEWEST:
        return None
    lowest, *_, highest = sorted(record.scales[place] for place in places)
    return Finding(
        kind="NaN in backward",
        severity="warning",
        sentence=f"{of_steps(len(places), len(record))} were skipped at scales from {power(highest)} down to "
        f"{power(lowest)}, where only gradients many times larger than all others overflow, and their loss "
        "was like that of other steps: this is not an overflow; the derivative of an operation is inf or NaN "
        f"for some batches.{first_parameter(record)}",
        advice=_derivatives(record),
        numbers={"steps": len(places), "highest_scale": highest},
    )


def _stand_out(record: Record, places: Sequence[int]) -> bool:
    """Return whether nearly all of some steps have a loss twice as large as most of the steps around them."""
    high = 0
    for place in places:
        around = record.loss.finite(max(0, place - NORM_WINDOW), place + NORM_WINDOW + 1)
        most = quantiles(around, n=4)[-1] if len(around) > 1 else math.inf
        high += (record.loss[place] or 0.0) > most + abs(most)
    return high >= MOSTLY * len(places)


def _span(record: Record, places: Sequence[int]) -> float:
    """Return the highest scale of some steps divided by the lowest."""
    scales = [record.scales[place] for place in places]
    return max(scales) / min(scales)


def not_by_scale(record: Record) -> list[int]:
    """Return the skipped steps at whose scale only gradients far larger than all recorded ones overflow."""
    if _is_close(record):
        return []
    norms, largest = record.grad_norm.finite(), record.band.largest
    needed = FAR_ABOVE * max(norms) if norms else LARGEST
    return [
        skip.place
        for skip in record.skips
        if skip.cause != "growth"
        and largest / skip.scale >= needed
        and abs(record.loss[skip.place] or 0.0) * skip.scale <= largest
    ]


def _is_close(record: Record) -> bool:
    """Return whether gradients between modules came close to overflow in most steps that were taken."""
    best = [
        (snapshot.best_scale(margin=0), snapshot.scale)
        for snapshot in record.snapshots
        if not any(row.histogram.nonfinite for row in snapshot.rows if row.direction == "backward")
    ]
    headrooms = [exponent_of(highest) - exponent_of(scale) for highest, scale in best if highest]
    return bool(headrooms) and median(headrooms) < FEWEST
