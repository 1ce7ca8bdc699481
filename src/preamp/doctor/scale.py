"""Findings that are measured on the loss scale itself: its start, its moves, what it leaves unused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median, median_low
from typing import Any, Final, TypeAlias

from preamp.doctor.evidence import Record, Skip
from preamp.doctor.finding import FEWEST, OFTEN, RARE, Finding, Severity
from preamp.doctor.history import LATEST, SHORT, hardly_fell, number
from preamp.doctor.snapshots import (
    first_parameter,
    lost_words,
    needs_no_scale,
    saves_something,
)
from preamp.policy import Dynamic, Static, Tolerant
from preamp.record.exponents import exponent_of
from preamp.record.formatting import of_steps, percent, power, powers
from preamp.systems.dialects import Dialect

FARTHEST_BACKOFF: Final = 2.0**-4
LEAST_STEPS: Final = 10
NEARLY_ALL: Final = 0.8
"""The share of skipped steps from which on a run makes no progress."""
SHORTEST_INTERVAL: Final = 100
MUCH: Final = 12
"""Powers of two of unused headroom at which digits are lost: the entries of a gradient span some 20, and the
normal numbers of float16 span 30."""
FIRST_TRY: Final = 2.0**16

Remedy: TypeAlias = tuple[str, Mapping[str, Any]]
"""Advice, in words and as settings."""


def _hysteresis(record: Record) -> int:
    """Return how many overflows the policy waits for before it backs off."""
    return int(getattr(record.policy, "hysteresis", 1))


def wrong_start(record: Record) -> Finding | None:
    """Find a first scale that had to be lowered many times."""
    if len(set(record.scales[: record.opening])) < FEWEST or len(record.settled) < LEAST_STEPS:
        return None  # few different scales: the policy waits for several overflows
    first, found = record.scales[0], record.scales[record.opening]
    smaller = (
        ""
        if found >= 1.0
        else " Or make the loss smaller, as with a mean instead of a sum: below 1 the "
        "gradients overflow even without a scale."
    )
    return Finding(
        kind="wrong start" if found >= 1.0 else "gradient overflow",
        severity="warning" if record.opening >= LEAST_STEPS else "note",
        sentence=f"The first {record.opening:,} steps were skipped, while the scale fell from "
        f"{power(first)} to {power(found)}.",
        advice=f"Start there.{smaller}",
        steps=record.numbers_of(range(record.opening)),
        numbers={"skipped": record.opening, "first_scale": first, "found_scale": found},
        settings={"init_scale": found},
    )


def oscillating(record: Record) -> Finding | None:
    """Find a scale that grows again and again to where it has just failed."""
    undone = record.skips_after("growth")
    share, interval = record.rate(len(undone)), round(record.interval)
    if len(undone) < FEWEST or share < OFTEN:
        return None
    return Finding(
        kind="oscillating",
        severity="warning",
        sentence=f"{of_steps(len(undone), len(record.settled))} were skipped because the scale "
        f"had just grown: every {interval:,} clean steps it tries a scale that has failed before.",
        advice=f"Wait longer{_or_a_ceiling(undone)}.",
        steps=record.numbers_of(skip.place for skip in undone),
        numbers={"skipped": len(undone), "share": share, "growth_interval": interval},
        settings={
            "growth_interval": Dynamic.growth_interval,
            **_at_once(record),
            **_nearer_start(record, undone),
        },
    )


def _at_once(record: Record) -> Mapping[str, Any]:
    """Return the settings that make a policy back off at the first overflow, if it does not."""
    if isinstance(record.policy, Tolerant):
        return {"tolerance": 1 / RARE}
    return {"hysteresis": 1} if _hysteresis(record) > 1 else {}


def _or_a_ceiling(undone: Sequence[Skip]) -> str:
    levels = Counter(skip.after for skip in undone)
    (level, count), *_ = levels.most_common(1)
    is_one = count > 0.8 * len(undone)
    return f", or set a ceiling, max_scale={level:g}: the scale always falls back to that" if is_one else ""


def _nearer_start(record: Record, undone: Sequence[Skip]) -> Mapping[str, Any]:
    """Return the level that the scale reached as the first scale, if longer intervals would not reach it."""
    if not len(undone):
        return {}
    level = sorted(skip.after for skip in undone)[len(undone) // 10]
    is_far = exponent_of(level) - exponent_of(record.scales[0]) >= FEWEST
    return {"init_scale": level} if is_far and not record.fell_early(level) else {}


def dragged(record: Record) -> Finding | None:
    """Find single overflows that keep the scale far below what the other steps allow."""
    falls = sum(skip.after < skip.scale for skip in record.skips_after("sudden"))
    if falls < FEWEST or record.rate(len(record.skips)) > 10 * OFTEN or not _stays_low(record):
        return None
    high, low = max(record.of(record.settled)), min(record.scales)
    return Finding(
        kind="dragged down",
        severity="note" if record.usual_headroom is None else "warning",
        sentence=f"{falls:,} single steps overflowed at scales that had worked before, and lowered the "
        f"scale from {power(high)} to {power(low)}{_too_far(record)}.",
        advice="Back off only at the second overflow in a row. Also look at the data of these steps.",
        steps=record.numbers_of(skip.place for skip in record.skips_after("sudden")),
        numbers={"skipped": falls, "lowest_scale": low, "headroom": record.usual_headroom or 0},
        settings={"hysteresis": 2, **_longer(record)},
    )


def _stays_low(record: Record) -> bool:
    """Return whether the scale is far below what most steps allow, or else below what has worked."""
    if record.usual_headroom is not None:
        return record.usual_headroom >= FEWEST
    pairs = zip(record.skipped, record.scales, strict=False)
    highest = max(scale for skipped, scale in pairs if not skipped)
    return exponent_of(highest) - exponent_of(record.scales[-1]) >= FEWEST


def _too_far(record: Record) -> str:
    if record.usual_headroom is None:
        return " (or all gradients have grown, which cannot be seen without recorded amaxes)"
    return f", though most steps would allow a scale {record.usual_headroom:.0f} powers of two higher"


def slow(record: Record) -> Finding | None:
    """Find a policy that waits for so many overflows that most of them change nothing."""
    hysteresis, skipped = _hysteresis(record), record.skipped.count(1)
    share = skipped / max(len(record), 1)
    pairs = zip(record.skipped, pairwise(record.scales), strict=True)
    lowered = sum(after < before for was_skipped, (before, after) in pairs if was_skipped)
    if hysteresis <= 2 or share < OFTEN or skipped < FEWEST or lowered > skipped / 2:
        return None
    return Finding(
        kind="slow to back off",
        severity="warning",
        sentence=f"{of_steps(skipped, len(record))} were skipped and only "
        f"{lowered:,} of them lowered the scale: with hysteresis={hysteresis} the policy waits for that "
        "many.",
        advice="Back off at every overflow.",
        numbers={"skipped": skipped, "share": share, "lowered": lowered},
        settings={"hysteresis": 1, **_longer(record), **_nearer_start(record, record.skips)},
    )


def too_high(record: Record) -> Finding | None:
    """Find skipped steps that no other rule explains."""
    share = record.rate(len(record.skips))
    if len(record.skips) < FEWEST or share < OFTEN:
        return None
    advice, settings = _lower(record)
    return Finding(
        kind="too high",
        severity="warning",
        sentence=f"{of_steps(len(record.skips), len(record.settled))} were skipped, at scales "
        f"of {power(min(skip.scale for skip in record.skips))} and above.{first_parameter(record)}",
        advice=advice,
        verdict="cause" if settings else "unknown",
        steps=record.numbers_of(skip.place for skip in record.skips),
        numbers={"skipped": len(record.skips), "share": share},
        settings=settings,
    )


def _longer(record: Record) -> Mapping[str, Any]:
    return {"growth_interval": Dynamic.growth_interval} if record.interval < RARE else {}


def _lower(record: Record) -> Remedy:
    longer = _longer(record)
    if isinstance(record.policy, Static):
        return "Use a dynamic scale.", {"init_scale": record.policy.scale}
    if isinstance(record.policy, Tolerant):
        tolerated = percent(record.policy.tolerance)
        return f"The policy tolerates up to {tolerated}. Tolerate less.", {
            "tolerance": 1 / RARE,
            **longer,
            **_nearer_start(record, record.skips),
        }
    if longer and len(record.skips) < 3 * record.growths:
        return "The scale grows too soon. Wait longer.", longer
    return "Why, the record cannot tell: look at the data of these steps, and at the learning rate.", {}


def lost_scale(record: Record) -> Finding | None:
    """Find a scale that jumped up between two steps, as after a restart without the saved scale."""
    if record.resumed_at_start and record.opening >= FEWEST:
        return Finding(
            kind="lost scale",
            severity="warning",
            sentence=f"The record restarts at step {record.index[0]:,}, and the first "
            f"{record.opening:,} steps were skipped while the scale fell from {power(record.scales[0])} to "
            f"{power(record.scales[record.opening])}: the run was resumed without its saved scale.",
            advice=record.code.save_scale,
            steps=record.numbers_of(range(record.opening)),
            numbers={"skipped": record.opening},
        )
    new = record.new_scale
    for place in range(1, len(record)):
        before, scale = new[place - 1], record.scales[place]
        if before is None or scale < 4 * before or not record.skipped[place]:
            continue
        streak = record.skipped.find(0, place)
        skips = (len(record) if streak < 0 else streak) - place
        if skips < 2:
            continue
        return Finding(
            kind="lost scale",
            severity="warning",
            sentence=f"Between steps {record.index[place - 1]:,} and {record.index[place]:,} the scale "
            f"jumped from {power(before)} to {power(scale)}, and {skips:,} steps were skipped until it was "
            "back: the run was resumed without its saved scale.",
            advice=record.code.save_scale,
            steps=record.numbers_of(range(place, place + skips)),
            numbers={"before": before, "scale": scale, "skipped": skips},
        )
    return None


def backs_off_too_far(record: Record) -> Finding | None:
    """Find single overflows that each lower the scale by many powers of two."""
    rule = record.policy.policy if isinstance(record.policy, Dialect) else record.policy
    factor = getattr(rule, "backoff_factor", None)
    if rule is not None and (factor is None or factor > FARTHEST_BACKOFF):
        return None
    falls = [scale / after for scale, after in pairwise(record.scales) if after < scale]
    if (
        not falls
        or median(falls) * FARTHEST_BACKOFF < 1.0
        or (record.headroom is not None and record.headroom < FEWEST)
    ):
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
    about = record.trace.about
    if any(scale != 1.0 for scale in record.scales) or any(record.skipped):
        return None
    is_constant, precision = isinstance(record.policy, Static), about.get("precision", record.band.name)
    if record.policy is not None and (not is_constant or not _is_wasted(record)):
        return None
    is_stated = "precision" in about and (is_constant or about.get("policy", "") is None)
    may_be = record.snapshots and (is_constant or "policy" not in about)
    if precision != record.band.name or not (is_stated or may_be) or needs_no_scale(record.band):
        return None
    zeros, settings = median(record.zeros.finite() or [0.0]), _higher_start(record)
    if "scale" in settings:  # a constant scale of 1 was not chosen on purpose
        settings = {"init_scale": settings["scale"]}
    rows = [row for snapshot in record.snapshots for row in snapshot.rows]
    is_known = "precision" in about or any(row.dtype != "float32" for row in rows) or hardly_fell(record)
    return Finding(
        kind="not scaled" if is_known else "not measured",
        severity=_severity(zeros, saves_something(record.snapshot)) if is_known else "note",
        sentence=f"The loss was not scaled in {record.band.name} (the scale was 1){_headroom_words(record)}"
        + (f", and {percent(zeros)} of the gradient entries are exactly zero." if zeros else ".")
        + lost_words(record.snapshot, _advised(settings)),
        advice="Use a loss scale."
        if is_known
        else f"If the model computes in {record.band.name}, use a loss scale. If not, say so: "
        f'{record.code.trace}(precision="float32").',
        numbers={"zeros": zeros},
        settings=settings or {"init_scale": FIRST_TRY},
    )


def _severity(zeros: float, saves: bool | None) -> Severity:
    return "problem" if zeros >= OFTEN or saves else "warning" if saves is None else "note"


def _waste(record: Record) -> Severity:
    """Return how bad unused headroom is: a warning if using it would save many entries."""
    if not record.headroom or _has_converged(record):
        return "note"
    return "warning" if record.headroom >= MUCH else "note"


def _has_converged(record: Record) -> bool:
    """Return whether hardly any loss is left: gradients are small then, and losing digits matters little."""
    losses = record.loss.finite()
    return len(losses) >= SHORT and abs(median(losses[-LATEST:])) <= OFTEN * abs(median(losses[:LATEST]))


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


def too_low(record: Record) -> Finding | None:
    """Find a scale far below what the gradients allow."""
    if record.headroom is None:
        return _loss_below_normal(record)
    if not _is_wasted(record):
        return None
    usual, settings = median_low(record.of(record.late)), _higher_start(record)
    return Finding(
        kind="too low",
        severity=_waste(record),
        sentence=f"At {power(usual)}, the scale is {powers(record.headroom)} below "
        f"{power(_scale(exponent_of(usual) + record.headroom))}, the highest that all late steps "
        f"allow.{lost_words(record.snapshot, _advised(settings))}",
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
