"""Findings that are measured on the loss scale itself: its start, its moves, what it leaves unused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median, median_low
from typing import Any, Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST, OFTEN, RARE, Finding, Severity
from preamp.doctor.history import LATEST, SHORT, hardly_fell, number
from preamp.doctor.snapshots import lost_words, needs_no_scale, saves_something
from preamp.policy import Dynamic, Static, Tolerant
from preamp.record.exponents import exponent_of
from preamp.record.formatting import of_steps, percent, power, powers
from preamp.systems.dialects import Dialect

LEAST_STEPS: Final = 10
SHORTEST_INTERVAL: Final = 100
MUCH: Final = 12
"""Powers of two of unused headroom at which digits are lost: the entries of a gradient span some 20, and the
normal numbers of float16 span 30."""
FAR: Final = 2.0**FEWEST
FIRST_TRY: Final = 2.0**16


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
    for place in range(len(record)):
        scale, before = record.scales[place], record.new_scale[place - 1] if place else None
        is_jump = record.resumed_at_start if place == 0 else before is not None and scale >= 4 * before
        if not is_jump or not record.skipped[place]:
            continue
        taken = record.skipped.find(0, place)
        skips = (len(record) if taken < 0 else taken) - place
        if skips < (FEWEST if place == 0 else 2):
            continue
        origin = "" if before is None else f" from {power(before)}"
        return Finding(
            kind="lost scale",
            severity="warning",
            sentence=f"At step {record.index[place]:,} the scale jumped{origin} to {power(scale)}, and "
            f"{skips:,} steps were skipped until it was back: the run was resumed without its saved scale.",
            advice=record.code.save_scale,
            steps=record.numbers_of(range(place, place + skips)),
            numbers={"scale": scale, "skipped": skips},
        )
    return None


def often_skipped(record: Record) -> Finding | None:
    """Find steps that are skipped again and again, and the first reason that explains enough of them."""
    for kind, places, least, why, advice, settings in _reasons(record):
        if len(places) >= least:
            # Without amaxes, all gradients may have grown since the scale was higher.
            is_guess = kind == "dragged down" and record.usual_headroom is None
            return Finding(
                kind=kind,
                severity="note" if is_guess else "warning",
                sentence=f"{of_steps(len(places), len(record))} were skipped{why}.",
                advice=advice,
                verdict="cause" if settings else "unknown",
                steps=record.numbers_of(places),
                numbers={"skipped": len(places), "share": len(places) / len(record)},
                settings=settings,
            )
    return None


def _reasons(record: Record) -> Iterator[tuple[str, list[int], float, str, str, Mapping[str, Any]]]:
    """Yield findings: the kind, its steps and how many are too many, the reason, advice and settings."""
    policy, skips, hysteresis = record.policy, record.skips, getattr(record.policy, "hysteresis", 1)
    longer: Mapping[str, Any] = {"growth_interval": Dynamic.growth_interval} if record.interval < RARE else {}
    # Back off at the first overflow, grow after many steps, and start where this takes too long to reach.
    reached = sorted(skip.after for skip in skips)[len(skips) // 10 :]
    calmer = {
        **longer,
        **({"hysteresis": 1} if hysteresis > 1 else {}),
        **({"tolerance": 1 / RARE} if isinstance(policy, Tolerant) else {}),
        **({"init_scale": reached[0]} if reached and reached[0] >= FAR * record.scales[0] else {}),
    }

    often = max(FEWEST, OFTEN * len(record.settled))

    places = [place for place, skipped in enumerate(record.skipped) if skipped]
    falls = [before / after for before, after in pairwise(record.scales) if after < before]
    rule = policy.policy if isinstance(policy, Dialect) else policy
    is_low = record.headroom is None or record.headroom >= FEWEST
    is_far = rule is None or getattr(rule, "backoff_factor", 1.0) <= 1 / FAR
    if is_low and is_far and falls and median(falls) >= FAR:
        fall = powers(exponent_of(median(falls)))
        why = f"; each overflow lowered the scale by {fall}, and it takes as many growths to recover"
        yield "backs off too far", places, 1, why, "Halve it instead.", {"backoff_factor": 0.5}
    if hysteresis > 2 and 2 * len(falls) <= len(places):
        why = f", and only {len(falls):,} of them lowered the scale, because of hysteresis={hysteresis}"
        yield "slow to back off", places, often, why, "Back off at every overflow.", calmer

    places = [skip.place for skip in skips if skip.cause == "growth"]
    every = f"every {record.interval:,.0f} clean steps it tries a scale that has failed before"
    why = f" because the scale had just grown: {every}"
    yield "oscillating", places, often, why, "Wait longer, or set a ceiling, max_scale.", calmer

    places = [skip.place for skip in skips if skip.cause == "sudden" and skip.after < skip.scale]
    pairs, headroom = zip(record.skipped, record.scales, strict=False), record.usual_headroom
    worked = max((scale for was_skipped, scale in pairs if not was_skipped), default=0.0)
    is_low = worked >= FAR * record.scales[-1] if headroom is None else headroom >= FEWEST
    if is_low and record.rate(len(skips)) <= 10 * OFTEN:
        moved = f"lowered the scale from {power(worked)} to {power(min(record.scales))}"
        why = f": single steps overflowed at scales that had worked before, and {moved}"
        look = f" (record {record.code.these_steps})" if record.code.these_steps else ""
        advice = (
            f"Look at the data and the derivatives of these steps first{look}. If they are ordinary, back "
            "off only at the second overflow in a row."
        )
        yield "dragged down", places, FEWEST, why, advice, {"hysteresis": 2, **longer}

    advice = "Why, the record cannot tell: look at the data of these steps, and at the learning rate."
    settings: Mapping[str, Any] = {}
    if isinstance(policy, Static):
        advice, settings = "Use a dynamic scale.", {"init_scale": policy.scale}
    elif isinstance(policy, Tolerant):
        advice, settings = f"The policy tolerates up to {percent(policy.tolerance)}. Tolerate less.", calmer
    elif longer and len(skips) < 3 * record.growths:
        advice, settings = "Wait longer before the scale grows.", longer
    why = f", at scales of {power(min((skip.scale for skip in skips), default=0.0))} and above"
    yield "too high", [skip.place for skip in skips], often, why, advice, settings


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
        + lost_words(record.snapshot),
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
    is_held = 2 * scales.count(ceiling or 0.0) >= len(scales)
    losses = [*map(abs, record.loss.finite())]
    # Gradients are small where hardly any loss is left, and losing digits matters little then.
    has_converged = len(losses) >= SHORT and median(losses[-LATEST:]) <= OFTEN * median(losses[:LATEST])
    if has_converged:
        return None
    start = settings.get("scale") or settings.get("init_scale") or 0.0
    advice = "The gradients shrink: let the scale grow sooner, or follow their amaxes with Headroom()."
    if is_held:
        advice, settings = "Raise the ceiling.", {**settings, "max_scale": highest}
    elif start > usual:
        these = "all steps" if "scale" in settings else "the first steps"
        advice = f"Start higher, at {power(start)}: one power of two, as a margin, below what {these} allow."
    return Finding(
        kind="at the ceiling" if is_held else "too low",
        severity="warning" if record.headroom >= MUCH else "note",
        sentence=f"At {power(usual)}{', its max_scale' if is_held else ''}, the scale is "
        f"{powers(record.headroom)} below {power(highest)}, the highest that all late steps allow."
        f"{lost_words(record.snapshot, settings.get('max_scale') or start or None)}",
        advice=advice,
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
        f"{power(highest)}, it is below {record.band.name}'s smallest normal number: most gradients lose "
        "digits there, or round to zero.",
        advice=if_low(record),
        numbers={"loss": first, "scale": highest},
        settings={"init_scale": FIRST_TRY} if highest < FIRST_TRY else {},
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
