"""Findings about skipped steps: a scale that starts too high, oscillates, is dragged down, or was lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any, Final, TypeAlias

from preamp.doctor.backward import first_parameter
from preamp.doctor.evidence import Record, Skips
from preamp.doctor.finding import FEWEST, OFTEN, RARE, Finding
from preamp.policy import Dynamic, Static, Tolerant
from preamp.record.exponents import exponent_of
from preamp.record.formatting import of_steps, percent, power, powers
from preamp.systems.dialects import Dialect

RECENT: Final = 100
FARTHEST_BACKOFF: Final = 2.0**-4
LEAST_STEPS: Final = 10
NEARLY_ALL: Final = 0.8
"""The share of skipped steps from which on a run makes no progress."""

Remedy: TypeAlias = tuple[str, Mapping[str, Any]]
"""Advice, in words and as settings."""


def skips_nearly_all(record: Record) -> Finding | None:
    """Find a run that skips nearly every step at its end."""
    last = (record.settled or range(len(record)))[-RECENT:]
    skipped = [place for place in last if record.skipped[place]]
    waits = record.summary.longest_streak < _hysteresis(record)  # never had enough overflows to back off
    if len(skipped) < max(LEAST_STEPS, NEARLY_ALL * len(last)) or waits:
        return None
    lowest = min(record.scales[place] for place in skipped)
    advice, settings = _remedy(record, skipped)
    return Finding(
        kind="skipping almost every step",
        severity="problem",
        sentence=f"{len(skipped):,} of the last {len(last):,} steps were skipped, at scales down to "
        f"{power(lowest)}: the training makes no progress.{first_parameter(record)}",
        advice=advice,
        numbers={"skipped": len(skipped), "steps": len(last), "lowest_scale": lowest},
        settings=settings,
    )


def _hysteresis(record: Record) -> int:
    """Return how many overflows the policy waits for before it backs off."""
    return int(getattr(record.policy, "hysteresis", 1))


def _remedy(record: Record, skipped: list[int]) -> Remedy:
    losses = [loss for place in skipped if (loss := record.loss[place]) is not None]
    if losses and sum(map(math.isfinite, losses)) < len(losses) / 2:
        return (
            "The loss itself is inf or NaN, which no scale changes. Look at the data and the forward pass.",
            {},
        )
    scale, floor = record.scales[skipped[-1]], record.band.normal
    is_constant = len({record.scales[place] for place in skipped[-LEAST_STEPS:]}) == 1
    if is_constant and isinstance(record.policy, Static) and scale > 1.0:
        return "This scale is too high. Use a dynamic one.", {"init_scale": scale}
    if is_constant and scale > floor:
        return (
            f"Lower the floor. If steps are still skipped at {power(floor)}, look for NaN.",
            {"min_scale": floor},
        )
    if not is_constant and scale > 1.0:
        return "The scale is still falling. Start lower.", {"init_scale": min(scale, Dynamic.init_scale)}
    unknown = f" To find the cause, record the loss of each step{record.code.and_snapshots}."
    return (
        "At such a low scale finite gradients do not overflow: something is NaN. Look for it in the data, "
        f"the loss and the forward pass.{'' if losses else unknown}",
        {},
    )


def wrong_start(record: Record) -> Finding | None:
    """Find a first scale that had to be lowered many times."""
    if len(set(record.scales[: record.opening])) < FEWEST or len(record.settled) < LEAST_STEPS:
        return None  # few different scales: the policy waits for several overflows
    first, found = record.scales[0], record.scales[record.opening]
    return Finding(
        kind="wrong start",
        severity="warning" if record.opening / len(record) >= OFTEN else "note",
        sentence=f"The first {record.opening:,} steps were skipped, while the scale fell from "
        f"{power(first)} to {power(found)}.",
        advice="Start there.",
        numbers={"skipped": record.opening, "first_scale": first, "found_scale": found},
        settings={"init_scale": found},
    )


def oscillating(record: Record) -> Finding | None:
    """Find a scale that grows again and again to where it has just failed."""
    undone = record.skips.of("growth")
    share, interval = record.rate(len(undone)), round(record.interval)
    if len(undone) < FEWEST or share < OFTEN:
        return None
    return Finding(
        kind="oscillating",
        severity="warning",
        sentence=f"{of_steps(len(undone), len(record.settled))} were skipped because the scale "
        f"had just grown: every {interval:,} clean steps it tries a scale that has failed before.",
        advice=f"Wait longer{_or_a_ceiling(undone)}.",
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


def _or_a_ceiling(undone: Skips) -> str:
    levels = Counter(skip.after for skip in undone)
    (level, count), *_ = levels.most_common(1)
    is_one = count > 0.8 * len(undone)
    return f", or set a ceiling, max_scale={level:g}: the scale always falls back to that" if is_one else ""


def _nearer_start(record: Record, undone: Skips) -> Mapping[str, Any]:
    """Return the level that the scale reached as the first scale, if longer intervals would not reach it."""
    if not len(undone):
        return {}
    level = sorted(skip.after for skip in undone)[len(undone) // 10]
    is_far = exponent_of(level) - exponent_of(record.scales[0]) >= FEWEST
    return {"init_scale": level} if is_far and not record.fell_early(level) else {}


def dragged(record: Record) -> Finding | None:
    """Find single overflows that keep the scale far below what the other steps allow."""
    falls = sum(skip.after < skip.scale for skip in record.skips.of("sudden"))
    if falls < FEWEST or record.rate(len(record.skips)) > 10 * OFTEN or not _stays_low(record):
        return None
    high, low = max(record.of(record.settled)), min(record.scales)
    return Finding(
        kind="dragged down",
        severity="note" if record.usual_headroom is None else "warning",
        sentence=f"{falls:,} single steps overflowed at scales that had worked before, and lowered the "
        f"scale from {power(high)} to {power(low)}{_too_far(record)}.",
        advice="Back off only at the second overflow in a row. Also look at the data of these steps.",
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
    return "These steps overflow at any scale: look at their data, and at the learning rate.", {}


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
