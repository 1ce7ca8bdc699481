"""Findings about unused headroom: no scale, or one that is too low, never grew or is at its ceiling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median, median_low
from typing import Any, Final

from preamp.doctor.evidence import Column, Record
from preamp.doctor.finding import FEWEST, OFTEN, Finding, Severity
from preamp.doctor.history import LATEST, SHORT, number
from preamp.doctor.snapshots import lost, lost_words, needs_no_scale, saves_something
from preamp.policy import Static
from preamp.record.exponents import exponent_of
from preamp.record.formatting import percent, power, powers

SHORTEST_INTERVAL: Final = 100
MANY: Final = 1 / 10
MUCH: Final = 12
"""Powers of two of unused headroom at which digits are lost: the entries of a gradient span some 20, and the
normal numbers of float16 span 30."""
FIRST_TRY, HIGHEST_TRY = 2.0**16, 2.0**32


def not_scaled(record: Record) -> Finding | None:
    """Find a low precision with little range and no loss scale."""
    about = record.trace.about
    if any(scale != 1.0 for scale in record.scales) or any(record.skipped):
        return None
    is_constant, precision = isinstance(record.policy, Static), about.get("precision", record.band.name)
    if record.policy is not None and (not is_constant or not _is_wasted(record) or vanished(record)):
        return None
    is_stated = "precision" in about and (is_constant or about.get("policy", "") is None)
    may_be = record.snapshots and (is_constant or "policy" not in about)
    if precision != record.band.name or not (is_stated or may_be) or needs_no_scale(record.band):
        return None
    zeros, settings = median(record.zeros.finite() or [0.0]), _higher_start(record)
    if "scale" in settings:  # of a constant 1, which is no choice of a rule
        settings = {"init_scale": settings["scale"]}
    return Finding(
        kind="not scaled",
        severity=_severity(zeros, saves_something(record.snapshot)),
        sentence=f"The loss was not scaled in {record.band.name} (the scale was 1){_headroom_words(record)}"
        + (f", and {percent(zeros)} of the gradient entries are exactly zero." if zeros else ".")
        + lost_words(record.snapshot, _advised(settings)),
        advice="Use a loss scale.",
        numbers={"zeros": zeros},
        settings=settings or {"init_scale": FIRST_TRY},
    )


def _severity(zeros: float, saves: bool | None) -> Severity:
    return "problem" if zeros >= OFTEN or saves else "warning" if saves is None else "note"


def vanished(record: Record) -> Finding | None:
    """Find gradients that are all zero."""
    zero, known = max(_zeros(record, record.amax), _zeros(record, record.grad_norm))
    scale = record.scales[-1]
    if not known or zero < 0.9 * known or _has_no_loss(record):
        return None
    if not _zeros(record, record.amax)[1] and (record.headroom or 0) >= FEWEST:
        return None  # the snapshots show how much higher the scale could be
    if record.snapshot and any(
        row.what == "gradient" and row.histogram.nonzero for row in record.snapshot.rows
    ):
        return None  # the model's gradients are not zero
    if is_cut_off(record):
        return None
    first = "scale" if isinstance(record.policy, Static) else "init_scale"
    is_low = scale < HIGHEST_TRY
    return Finding(
        kind="vanished",
        severity="problem",
        sentence=f"At {power(scale)}, all gradients were zero in {zero:,} of the last {known:,} steps.",
        advice="Start high: every step that overflows lowers the scale."
        if is_low
        else "Check that the loss depends on the parameters.",
        numbers={"steps": zero, "scale": scale},
        settings={first: HIGHEST_TRY} if is_low else {},
    )


def is_cut_off(record: Record) -> bool:
    """Return whether all gradients were zero in every step, though the scaled loss is too large for that.

    Even the derivatives of a mean over 2**24 outputs are representable in float16 at a scaled loss of 1.
    """
    norms = max(record.amax.finite(), record.grad_norm.finite(), key=len)
    if len(norms) < SHORT or any(record.amax.finite()) or any(record.grad_norm.finite()):
        return False
    losses = [abs(loss) * record.scales[n] for n in record.settled if (loss := record.loss[n]) is not None]
    if not losses or median(losses) < 1.0:
        return False
    rows = [row for snapshot in record.snapshots for row in snapshot.rows if row.direction == "backward"]
    return not any(row.histogram.nonzero or row.histogram.nonfinite for row in rows)


def _zeros(record: Record, column: Column) -> tuple[int, int]:
    """Return in how many of the late steps that were taken a column is 0, and in how many it is known."""
    values = [column[place] for place in record.late if not record.skipped[place]]
    return values.count(0.0), sum(value is not None for value in values)


def _has_no_loss(record: Record) -> bool:
    """Return whether most late losses are exactly 0, so that gradients of 0 are right."""
    losses = [loss for place in record.late if (loss := record.loss[place]) is not None]
    return bool(losses) and 2 * losses.count(0.0) > len(losses)


def _waste(record: Record) -> Severity:
    """Return how bad unused headroom is: a warning if using it would save many entries."""
    if not record.headroom or _has_converged(record):
        return "note"
    return "warning" if record.headroom >= MUCH or _saved(record, record.headroom) >= MANY else "note"


def _has_converged(record: Record) -> bool:
    """Return whether hardly any loss is left: gradients are small then, and losing digits matters little."""
    losses = record.loss.finite()
    return len(losses) >= SHORT and abs(median(losses[-LATEST:])) <= OFTEN * abs(median(losses[:LATEST]))


def _saved(record: Record, powers_higher: int) -> float:
    """Return the median share of entries that a higher scale would save in late snapshots; 0 without any."""
    first = record.index[record.late.start] if record.late else 0
    snapshots = [snapshot for snapshot in record.sound if snapshot.index >= first] or [
        snapshot for snapshot in (record.snapshot,) if snapshot
    ]
    pairs = [(lost(k), lost(k, _scale(exponent_of(k.scale) + powers_higher))) for k in snapshots]
    saved = [now.flushed + now.subnormal - then.flushed - then.subnormal for now, then in pairs]
    return median(saved) if saved else 0.0


def is_far_too_low(record: Record) -> bool:
    """Return whether the scale is so far below what the gradients allow that some of them are lost."""
    return (record.headroom or 0) >= MUCH and _is_wasted(record)


def at_ceiling(record: Record) -> Finding | None:
    """Find a scale that is kept from growing."""
    settings = _higher_start(record)
    ceiling = float(getattr(record.policy, "max_scale", None) or math.inf)
    held = record.of(record.late).count(ceiling)
    if not held or held < len(record.late) / 2 or record.fell_early(ceiling) or not _is_wasted(record):
        return None
    return Finding(
        kind="at the ceiling",
        severity=_waste(record),
        sentence=f"The scale was at max_scale={ceiling:g} in {held:,} of the last "
        f"{len(record.late):,} steps{_headroom_words(record)}."
        f"{lost_words(record.snapshot, _advised(settings))}",
        advice="Raise the ceiling.",
        numbers={"scale": ceiling, "steps": held, "headroom": record.headroom or 0},
        settings={**settings, "max_scale": _higher(record, ceiling)},
    )


def never_grew(record: Record) -> Finding | None:
    """Find a run that is too short for the scale to grow once."""
    interval = getattr(record.policy, "growth_interval", 0) if record.policy else math.inf
    is_scaled = any(scale != 1.0 for scale in record.scales)
    has_moved = record.growths or len(record.skips) or record.opening
    if record.policy is None and record.headroom is not None:
        return None  # it may be a long interval or a low ceiling: `too_low` reports it
    if has_moved or not is_scaled or interval <= len(record.settled):
        return None
    if not _is_wasted(record):
        return None
    settings = _higher_start(record)
    tries = {"growth_interval": max(SHORTEST_INTERVAL, len(record) // 20)}
    is_long = len(record) > 2 * SHORTEST_INTERVAL
    return Finding(
        kind="never grew",
        severity=_waste(record),
        sentence=f"The scale stayed at {power(record.scales[-1])}{_too_short(record, interval)}"
        f"{_headroom_words(record)}.{lost_words(record.snapshot, _advised(settings))}",
        advice=_higher_words(settings, record.scales[-1])
        if record.headroom
        else "Whether it could be higher is unknown. Let it grow sooner and see.",
        numbers={"steps": len(record.settled), "headroom": record.headroom or 0},
        settings=settings or (tries if is_long else {}),
    )


def _too_short(record: Record, interval: float) -> str:
    steps = len(record.settled)
    if math.isinf(interval):  # the record names no rule
        return f" in all {steps:,} steps" if steps > 1 else " in the only step"
    return f": it would grow after {interval:,} clean steps, and the run has {steps:,}"


def too_low(record: Record) -> Finding | None:
    """Find a scale far below what the gradients allow."""
    if record.headroom is None:
        return _below_one(record) or _loss_below_normal(record)
    if not _is_wasted(record):
        return None
    usual, settings = median_low(record.of(record.late)), _higher_start(record)
    return Finding(
        kind="too low",
        severity=_waste(record),
        sentence=f"At {power(usual)}, the scale is {powers(record.headroom)} below "
        f"{power(_scale(exponent_of(usual) + record.headroom))}, the highest that all late steps allow."
        f"{lost_words(record.snapshot, _advised(settings))}",
        advice=_higher_words(settings, usual),
        numbers={"headroom": record.headroom, "scale": usual},
        settings=settings,
    )


def _higher_words(settings: Mapping[str, Any], now: float) -> str:
    """Return the advice that goes with the settings of a higher scale."""
    start = settings.get("scale") or settings.get("init_scale")
    if start is not None and start > now:
        # As `_higher_start` computes them.
        which = "all steps" if "scale" in settings else "the first steps"
        return f"Start higher, at {power(start)}: one power of two, as a margin, below what {which} allow."
    lower = "start lower and " if start is not None else ""
    return f"The gradients shrink: {lower}let the scale grow sooner, or follow their amaxes with Headroom()."


def _below_one(record: Record) -> Finding | None:
    """Find a scale below 1, which makes gradients smaller, although nothing overflowed."""
    highest = max(record.scales)
    if highest >= 1.0 or needs_no_scale(record.band) or any(record.skipped):
        return None
    return Finding(
        kind="too low",
        severity="warning",
        sentence=f"The scale is {power(highest)}, below 1, and no step overflowed: it makes gradients "
        f"smaller, so that more of them round to zero in {record.band.name}.",
        advice="Start higher.",
        numbers={"scale": highest},
        settings={"init_scale": FIRST_TRY},
    )


def _loss_below_normal(record: Record) -> Finding | None:
    """Find a loss that is too small from the start, even when it is scaled, and did not fall.

    Gradients in backward begin with the scale times derivatives of the loss, which are rarely larger than the
    loss of an untrained model. A loss that is small because it fell proves nothing.
    """
    losses, norms = record.loss.finite(), record.grad_norm.finite()
    if needs_no_scale(record.band) or any(record.skipped) or len(losses) < SHORT:
        return None
    first, last = median(map(abs, losses[:LATEST])), median(map(abs, losses[-LATEST:]))
    largest, highest = max([first, *norms]), max(record.scales)
    if not 0.0 < largest * highest < record.band.normal or 2 * last < first:
        return None
    return Finding(
        kind="too low",
        severity="warning",
        sentence=f"The loss began at {number(first)} and has not fallen by half. Times a scale of at most "
        f"{power(highest)}, it is below {record.band.name}'s smallest normal number, "
        f"{power(record.band.normal)}: most gradients lose digits there, or round to zero.",
        advice="Start higher. A model that computes in float32 throughout needs no scale: write "
        f'{record.code.trace}(precision="float32") then.',
        numbers={"loss": first, "scale": highest},
        settings={"init_scale": FIRST_TRY},
    )


def _is_wasted(record: Record) -> bool:
    """Return whether there is or may be much unused headroom, and something may be lost because of it."""
    is_much = record.headroom is None or record.headroom >= FEWEST
    return is_much and not needs_no_scale(record.band) and saves_something(record.snapshot) is not False


def _headroom_words(record: Record) -> str:
    return "" if record.headroom is None else f", {powers(record.headroom)} of headroom unused"


def _higher(record: Record, ceiling: float) -> float:
    highest = record.highest_scale(record.late)
    return _scale(exponent_of(ceiling) + 8 if highest is None else highest)


def _scale(exponent: int) -> float:
    """Return the power of two, or the nearest that a float32 can hold."""
    return math.ldexp(1.0, min(max(exponent, -126), 127))


def _higher_start(record: Record) -> Mapping[str, Any]:
    """Return the settings of a scale that starts with one power of two of headroom and follows gradients."""
    early = record.highest_scale(record.settled[: max(20, len(record.settled) // 20)])
    late = record.highest_scale(record.late)
    if early is None or late is None:
        return {}
    climb, first = late - early, _scale(early - 1)
    start = record.scales[0]
    if first <= start and not record.skipped[0] and climb >= FEWEST:
        # The run began at such a scale and that worked: gradients that shrink need a scale that grows.
        return _climbing(record, climb, late)
    if isinstance(record.policy, Static) and abs(climb) < FEWEST:
        lowest = _scale(min(early, late) - 1)
        return {"scale": lowest} if lowest > record.policy.scale else {}
    return {"init_scale": first, **(_climbing(record, climb, late) if climb >= FEWEST else {})}


def _advised(settings: Mapping[str, Any]) -> float | None:
    """Return the scale that some settings lead to in the second half of a run, where they set one."""
    return settings.get("max_scale") or settings.get("scale") or settings.get("init_scale")


def _climbing(record: Record, climb: int, late: int) -> Mapping[str, Any]:
    """Return an interval short enough for gradients that shrink, and a ceiling that is high enough."""
    interval = max(SHORTEST_INTERVAL, len(record) // (2 * climb))
    ceiling, needed = getattr(record.policy, "max_scale", math.inf), _scale(late)
    sooner = {"growth_interval": interval} if interval < record.interval else {}
    return {**sooner, **({"max_scale": needed} if ceiling and ceiling < needed else {})}
