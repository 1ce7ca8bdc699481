"""Findings that are measured on the loss scale itself: its start, its moves, what it leaves unused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from statistics import median, median_low
from typing import Any, Final

from preamp.doctor.evidence import Record, Skips
from preamp.doctor.finding import FEWEST, OFTEN, RARE, Finding, Severity
from preamp.doctor.history import LATEST, SHORT, hardly_fell, number
from preamp.doctor.snapshots import lost_words, needs_no_scale, saves_something
from preamp.policy import Dynamic, Static, Tolerant
from preamp.record.exponents import exponent_of
from preamp.record.formatting import of_steps, percent, power, powers
from preamp.systems.dialects import Dialect

FARTHEST_BACKOFF: Final = 2.0**-4
LEAST_STEPS: Final = 10
MANY: Final = 1 / 10
"""A share of skipped steps that single overflows do not reach."""
SHORTEST_INTERVAL: Final = 100
MUCH: Final = 12
"""Powers of two of unused headroom at which digits are lost: the entries of a gradient span some 20, and the
normal numbers of float16 span 30."""
FIRST_TRY: Final = 2.0**16

# Skipped steps


def wrong_start(record: Record) -> Finding | None:
    """Find a first scale that had to be lowered many times."""
    if len(set(record.scales[: record.opening])) < FEWEST or len(record.settled) < LEAST_STEPS:
        return None  # few different scales: the policy waits for several overflows
    first, found = record.scales[0], record.scales[record.opening]
    smaller = "" if found >= 1.0 else " Or make the loss smaller, as with a mean instead of a sum."
    return Finding(
        kind="gradient overflow" if smaller else "wrong start",
        severity="warning" if record.opening >= LEAST_STEPS else "note",
        sentence=f"The first {record.opening:,} steps were skipped, while the scale fell from "
        f"{power(first)} to {power(found)}.",
        advice=f"Start there.{smaller}",
        steps=record.numbers_of(range(record.opening)),
        numbers={"skipped": record.opening, "first_scale": first, "found_scale": found},
        settings={"init_scale": found},
    )


def lost_scale(record: Record) -> Finding | None:
    """Find a scale that jumped up between two steps, as after a restart without the saved scale."""
    for place, before in _jumps(record):
        taken = record.skipped.find(0, place)
        skips = (len(record) if taken < 0 else taken) - place
        if skips >= (FEWEST if place == 0 else 2):
            origin = "" if before is None else f" from {power(before)}"
            return Finding(
                kind="lost scale",
                severity="warning",
                sentence=f"At step {record.index[place]:,} the scale jumped{origin} to "
                f"{power(record.scales[place])}, and {skips:,} steps were skipped until it was back: the run "
                "was resumed without its saved scale.",
                advice=record.code.save_scale,
                steps=record.numbers_of(range(place, place + skips)),
                numbers={"scale": record.scales[place], "skipped": skips},
            )
    return None


def _jumps(record: Record) -> Iterator[tuple[int, float | None]]:
    """Yield skipped steps whose scale is not what the step before had set, each with that."""
    if record.resumed_at_start:
        yield 0, None
    for place in range(1, len(record)):
        before = record.new_scale[place - 1]
        if before is not None and record.scales[place] >= 4 * before and record.skipped[place]:
            yield place, before


def slow(record: Record) -> Finding | None:
    """Find a policy that waits for so many overflows that most of them change nothing."""
    hysteresis = getattr(record.policy, "hysteresis", 1)
    places = [place for place, skipped in enumerate(record.skipped) if skipped]
    lowered = sum(record.scales[place + 1] < record.scales[place] for place in places)
    if hysteresis <= 2 or not _are_many(record, places) or 2 * lowered > len(places):
        return None
    why = f", and only {lowered:,} of them lowered the scale, because of hysteresis={hysteresis}."
    advice = "Back off at every overflow."
    return _skipped(record, "slow to back off", places, why, advice, _calmer(record, record.skips))


def oscillating(record: Record) -> Finding | None:
    """Find a scale that grows again and again to where it has just failed."""
    undone = record.skips.of("growth")
    if not _are_many(record, undone):
        return None
    why = (
        f" because the scale had just grown: every {record.interval:,.0f} clean steps it tries a scale that "
        "has failed before."
    )
    advice = "Wait longer, or set a ceiling, max_scale."
    return _skipped(record, "oscillating", _places(undone), why, advice, _calmer(record, undone))


def dragged(record: Record) -> Finding | None:
    """Find single overflows that keep the scale far below what the other steps allow."""
    sudden, unused = record.skips.of("sudden"), record.usual_headroom
    if sum(skip.after < skip.scale for skip in sudden) < FEWEST or record.rate(len(record.skips)) > MANY:
        return None
    if unused is None:
        worked = (scale for skipped, scale in zip(record.skipped, record.scales, strict=False) if not skipped)
        unused = exponent_of(max(worked)) - exponent_of(record.scales[-1])
    if unused < FEWEST:
        return None
    why = (
        ": single steps overflowed at scales that had worked before, and lowered the scale from "
        f"{power(max(record.of(record.settled)))} to {power(min(record.scales))}."
    )
    advice = "Back off only at the second overflow in a row. Also look at the data of these steps."
    settings = {"hysteresis": 2, **_longer(record)}
    return _skipped(record, "dragged down", _places(sudden), why, advice, settings)


def too_high(record: Record) -> Finding | None:
    """Find skipped steps that no other rule explains."""
    skips, longer = record.skips, _longer(record)
    if not _are_many(record, skips):
        return None
    settings: Mapping[str, Any] = {}
    advice = "Why, the record cannot tell: look at the data of these steps, and at the learning rate."
    if isinstance(record.policy, Static):
        advice, settings = "Use a dynamic scale.", {"init_scale": record.policy.scale}
    elif isinstance(record.policy, Tolerant):
        advice = f"The policy tolerates up to {percent(record.policy.tolerance)}. Tolerate less."
        settings = _calmer(record, skips)
    elif longer and len(skips) < 3 * record.growths:
        advice, settings = "The scale grows too soon. Wait longer.", longer
    lowest = power(min(skip.scale for skip in skips))
    why = f", at scales of {lowest} and above."
    return _skipped(record, "too high", _places(skips), why, advice, settings)


def _skipped(
    record: Record, kind: str, places: Sequence[int], why: str, advice: str, settings: Mapping[str, Any]
) -> Finding:
    return Finding(
        kind=kind,
        severity="warning",
        sentence=f"{of_steps(len(places), len(record))} were skipped{why}",
        advice=advice,
        verdict="cause" if settings else "unknown",
        steps=record.numbers_of(places),
        numbers={"skipped": len(places), "share": len(places) / len(record)},
        settings=settings,
    )


def _places(skips: Skips) -> list[int]:
    return [skip.place for skip in skips]


def _are_many(record: Record, skips: Sized) -> bool:
    return len(skips) >= max(FEWEST, OFTEN * len(record.settled))


def _longer(record: Record) -> Mapping[str, Any]:
    return {"growth_interval": Dynamic.growth_interval} if record.interval < RARE else {}


def _calmer(record: Record, skips: Skips) -> Mapping[str, Any]:
    """Return the settings of a policy that backs off at the first overflow, and grows after many steps."""
    settings = dict(_longer(record))
    if isinstance(record.policy, Tolerant):
        settings["tolerance"] = 1 / RARE
    elif getattr(record.policy, "hysteresis", 1) > 1:
        settings["hysteresis"] = 1
    reached = sorted(skip.after for skip in skips)
    level = reached[len(reached) // 10] if reached else 0.0
    if level >= 2.0**FEWEST * record.scales[0]:  # where the scale would not come with longer intervals
        settings["init_scale"] = level
    return settings


def backs_off_too_far(record: Record) -> Finding | None:
    """Find single overflows that each lower the scale by many powers of two."""
    rule = record.policy.policy if isinstance(record.policy, Dialect) else record.policy
    if rule is not None and getattr(rule, "backoff_factor", 1.0) > FARTHEST_BACKOFF:
        return None
    falls = [scale / after for scale, after in pairwise(record.scales) if after < scale]
    if not falls or median(falls) * FARTHEST_BACKOFF < 1.0:
        return None
    fall = exponent_of(median(falls))
    return Finding(
        kind="backs off too far",
        severity="warning",
        sentence=f"Each overflow lowered the scale by {powers(fall)}, and it takes as many growths to "
        "recover.",
        advice="Halve it instead.",
        numbers={"powers": fall, "times": len(falls)},
        settings={"backoff_factor": 0.5},
    )


# Unused headroom


def not_scaled(record: Record) -> Finding | None:
    """Find a low precision with little range and no loss scale."""
    about, band, is_constant = record.trace.about, record.band, isinstance(record.policy, Static)
    if any(scale != 1.0 for scale in record.scales) or any(record.skipped) or not _is_wasted(record):
        return None
    is_scaled = record.policy or record.trace.policy or about.get("policy")
    is_low = about["precision"] == band.name if "precision" in about else bool(record.snapshots)
    if not is_low or (is_scaled and not is_constant):
        return None
    zeros, start = median(record.zeros.finite() or [0.0]), dict(_higher_start(record))
    saves = saves_something(record.snapshot)
    severity: Severity = "problem" if zeros >= OFTEN or saves else "warning" if saves is None else "note"
    rows = [row for snapshot in record.snapshots for row in snapshot.rows]
    is_known = "precision" in about or any(row.dtype != "float32" for row in rows) or hardly_fell(record)
    return Finding(
        kind="not scaled" if is_known else "not measured",
        severity=severity if is_known else "note",
        sentence=f"The loss was not scaled in {band.name} (the scale was 1)"
        + (f", {powers(record.headroom)} of headroom unused" if record.headroom else "")
        + (f", and {percent(zeros)} of the gradient entries are exactly zero." if zeros else ".")
        + lost_words(record.snapshot, _advised(start)),
        advice="Use a loss scale." if is_known else if_low(record),
        numbers={"zeros": zeros},
        settings={"init_scale": start.pop("scale", FIRST_TRY), **start},
    )


def if_low(record: Record) -> str:
    """Return the advice for a run that was not scaled and may have computed in float32."""
    return (
        f"If the model computes in {record.band.name}, use a higher loss scale. If not, say so: "
        f'{record.code.trace}(precision="float32").'
    )


def too_low(record: Record) -> Finding | None:
    """Find a scale far below what the gradients allow, perhaps because its ceiling keeps it there."""
    if record.headroom is None:
        return _loss_below_normal(record)
    if not _is_wasted(record):
        return None
    scales, settings = record.of(record.late), _higher_start(record)
    usual, highest = median_low(scales), _scale(exponent_of(median_low(scales)) + record.headroom)
    ceiling = getattr(record.policy, "max_scale", None)
    is_held = 2 * scales.count(ceiling or 0.0) >= len(scales) and not record.fell_early(usual)
    if is_held:
        settings = {**settings, "max_scale": highest}
    losses = record.loss.finite()
    # Gradients are small where hardly any loss is left, and losing digits matters little then.
    has_converged = len(losses) >= SHORT and abs(median(losses[-LATEST:])) <= OFTEN * abs(
        median(losses[:LATEST])
    )
    is_much = record.headroom >= MUCH and not has_converged
    return Finding(
        kind="at the ceiling" if is_held else "too low",
        severity="warning" if is_much else "note",
        sentence=f"At {power(usual)}{', its max_scale' if is_held else ''}, the scale is "
        f"{powers(record.headroom)} below {power(highest)}, the highest that all late steps allow."
        f"{lost_words(record.snapshot, _advised(settings))}",
        advice="Raise the ceiling." if is_held else _higher_words(settings, usual),
        numbers={"headroom": record.headroom, "scale": usual},
        settings=settings,
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
        advice=if_low(record),
        numbers={"loss": first, "scale": highest},
        settings={"init_scale": FIRST_TRY},
    )


def _is_wasted(record: Record) -> bool:
    """Return whether there is or may be much unused headroom, and something may be lost because of it."""
    is_much = record.headroom is None or record.headroom >= FEWEST
    return is_much and not needs_no_scale(record.band) and saves_something(record.snapshot) is not False


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
    if isinstance(record.policy, Static) and abs(climb) < FEWEST:
        lowest = _scale(min(early, late) - 1)
        return {"scale": lowest} if lowest > record.policy.scale else {}
    if climb < FEWEST:
        return {"init_scale": first}
    # Gradients that shrink need a scale that grows sooner, or higher. If the run began at such a scale and
    # that worked, this is all that it needs.
    interval = max(SHORTEST_INTERVAL, len(record) // (2 * climb))
    ceiling, needed = getattr(record.policy, "max_scale", None) or math.inf, _scale(late)
    return {
        **({} if first <= record.scales[0] and not record.skipped[0] else {"init_scale": first}),
        **({"growth_interval": interval} if interval < record.interval else {}),
        **({"max_scale": needed} if ceiling < needed else {}),
    }


def _higher_words(settings: Mapping[str, Any], now: float) -> str:
    """Return the advice that goes with the settings of `_higher_start`."""
    start = settings.get("scale") or settings.get("init_scale")
    if start is not None and start > now:
        return f"Start higher, at {power(start)}: one power of two, as a margin, below what they allow."
    return "The gradients shrink: let the scale grow sooner, or follow their amaxes with Headroom()."


def _advised(settings: Mapping[str, Any]) -> float | None:
    """Return the scale that some settings lead to in the second half of a run, where they set one."""
    return settings.get("max_scale") or settings.get("scale") or settings.get("init_scale")
