"""The finding about steps that a guard skipped, with advice that fits this guard."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST, OFTEN, Finding
from preamp.doctor.history import first_of
from preamp.doctor.scale import NEARLY_ALL
from preamp.errors import PolicyError
from preamp.guards import RULES, Guard, NormLimit, SpikeGuard
from preamp.guards.systems import GuardDialect, NormThreshold, Rolling
from preamp.record.formatting import of_steps
from preamp.scaling import Spike

LONG_RUN: Final = 10
"""So many spikes in a row are a new level of the loss rather than bad batches."""

WIDER: Final = 4 / 3
"""The factor by which to raise a limit that is in standard deviations: 6 becomes 8."""

DAMAGED: Final = "the weights were damaged before: return to an earlier checkpoint"
CAUSES: Final = {"loss": "loss", "grad_norm": "gradient norm"}


def spikes(record: Record) -> Finding | None:
    """Find steps that a guard skipped: many of them, many in a row, or only some."""
    count, share = len(record.spikes), len(record.spikes) / max(len(record), 1)
    if not count:
        return None
    places = sorted(record.spikes)
    start, length = _longest_run(places)
    sentence = (
        f"The guard skipped {of_steps(count, len(record))} because of the {_causes(record)}; "
        f"longest run: {length:,}; steps {first_of(record, places)}."
    )
    steps = record.numbers_of(places)
    numbers = {"spikes": count, "share": share, "longest_run": length}
    if length >= LONG_RUN:
        is_last = start + length == len(record)
        return Finding(
            kind="a long run of spikes",
            severity="problem" if is_last else "warning",
            sentence=f"{sentence} That run began at step {record.index[start]:,}"
            f"{', and the trace ends during that run' if is_last else ''}.",
            advice=_advice_on_a_run(record, range(start, start + length)),
            numbers=numbers,
            steps=steps,
        )
    is_often, is_always = share >= OFTEN and count >= FEWEST, share >= NEARLY_ALL and count >= LONG_RUN
    return Finding(
        kind="many spikes" if is_often else "spikes",
        severity="problem" if is_always else "warning" if is_often else "note",
        sentence=sentence,
        advice=_advice_on_many(record) if is_often else "",
        numbers=numbers,
        steps=steps,
    )


def _are_mostly_lost(spikes: Sequence[Spike]) -> bool:
    """Return whether most values are inf or NaN, which no limit lets through."""
    return sum(math.isfinite(spike.value) for spike in spikes) < len(spikes) / 2


def _advice_on_many(record: Record) -> str:
    found = list(record.spikes.values())
    finite = [spike for spike in found if math.isfinite(spike.value)]
    if _are_mostly_lost(found):
        return "Most of these values are inf or NaN: look at the data and the forward pass."
    return (
        "Look at the data of these steps and at the learning rate. If they are ordinary, "
        f"{_raise(record, finite, len(record))}."
    )


def _causes(record: Record) -> str:
    of = Counter[str](spike.of for spike in record.spikes.values())
    if len(of) == 1:
        return CAUSES[next(iter(of))]
    return " and the ".join(f"{word} ({of[name]:,})" for name, word in CAUSES.items())


def _longest_run(places: list[int]) -> tuple[int, int]:
    """Return the first place and the length of the longest run of successive places."""
    best = (places[0], 0)
    start = before = places[0]
    for place in places:
        start = place if place > before + 1 else start
        best = max(best, (start, place - start + 1), key=lambda run: run[1])
        before = place
    return best


def _advice_on_a_run(record: Record, places: range) -> str:
    guard, run = _recorded_guard(record), [record.spikes[place] for place in places]
    if sum(math.isnan(spike.limit) for spike in run) > len(run) / 2:
        return (
            "A NaN entered the statistics of the guard, which skips every step until the NaN has left them. "
            "SpikeGuard keeps NaN out of its statistics."
        )
    is_first = record.index[places.start] == 0
    if _are_mostly_lost(run):
        earlier = "" if is_first else ", or return to an earlier checkpoint"
        return f"These values are inf or NaN: look at the data and the forward pass{earlier}."
    value = CAUSES[run[0].of]
    otherwise = "look at the data and the learning rate" if is_first else DAMAGED
    if isinstance(guard, SpikeGuard):
        return f"If the {value} stays high because the data changed, lower `patience`. If not, {otherwise}."
    if guard is None and record.guard is None and not _is_fixed(record, run[0].of):
        return (
            f"If the {value} stays high because the data changed, let the guard accept that sooner (for "
            f"SpikeGuard: lower `patience`). If not, {otherwise}."
        )
    return f"If these steps are ordinary, {_raise(record, run, len(run))}. If not, {otherwise}."


def _raise(record: Record, skipped: Sequence[Spike], steps: int) -> str:
    """Return the advice to raise the guard's limit, with its argument if the trace says which guard it is.

    Args:
        record: the run.
        skipped: the spikes that were ordinary steps.
        steps: how many steps there were while these were skipped.
    """
    guard = _recorded_guard(record)
    of = Counter[str](spike.of for spike in skipped).most_common(1)[0][0]
    own = [spike for spike in skipped if spike.of == of]
    higher = _higher_limit(own, steps)
    if guard is not None:
        argument = _with_higher_limit(guard, higher)
        return f"raise the limit of the guard{argument and f': {argument}'}"
    is_fixed = higher is not None and _is_fixed(record, of)
    if record.guard is not None:  # one that a user wrote
        return f"raise the limit of the guard{f' from {own[0].limit:g} to {higher:g}' if is_fixed else ''}"
    fixed = f"for one with a fixed limit: from {own[0].limit:g} to {higher:g}; " if is_fixed else ""
    return f"raise the limit of the guard ({fixed}for SpikeGuard: sigmas={_wider(SpikeGuard.sigmas)})"


def _is_fixed(record: Record, of: str) -> bool:
    """Return whether the guard's limit is a constant.

    Within one run the limits of most guards are the same, as skipped steps do not change them; only a fixed
    one skips the first step.
    """
    found = {place: spike.limit for place, spike in record.spikes.items() if spike.of == of}
    is_one_run = max(found) - min(found) < len(found)
    return len(set(found.values())) == 1 and (not is_one_run or 0 in found)


def _higher_limit(spikes: Sequence[Spike], steps: int) -> float | None:
    """Return a limit of two digits that 99 % of the steps are below; None if all are NaN or inf."""
    values = sorted((spike.value for spike in spikes if math.isfinite(spike.value)), reverse=True)
    if not values:
        return None
    value = values[min(int(OFTEN * steps), len(values) - 1)]
    unit = 10.0 ** (math.floor(math.log10(abs(value) or 1.0)) - 1)
    return float(f"{(math.floor(value / unit) + 1) * unit:.2g}")


def _with_higher_limit(guard: Guard[Any], higher: float | None) -> str:
    """Return what to write for a guard, or an argument of a dialect, to raise its limit; "" if unknown."""
    if isinstance(guard, GuardDialect):
        guard = guard.guard
    if isinstance(guard, SpikeGuard):
        return repr(replace(guard, sigmas=_wider(guard.sigmas))).removeprefix("guards.")
    if isinstance(guard, Rolling):
        name = "sigma_factor" if guard.two_sided or not guard.unbiased else "scaling_factor"
        return f"{name}={_wider(guard.factor)}"
    if higher is None:
        return ""
    if isinstance(guard, NormLimit):
        return f"NormLimit(threshold={higher})"
    return f"grad_norm_skip_threshold={higher}" if isinstance(guard, NormThreshold) else ""


def _wider(limit: float) -> float:
    return float(f"{WIDER * limit:.3g}")


def _recorded_guard(record: Record) -> Guard[Any] | None:
    """Return the guard whose `repr` the trace holds; None for an unknown one."""
    try:
        node = ast.parse(str(record.guard).removeprefix("guards."), mode="eval").body
        if isinstance(node, ast.Name):
            dialect = RULES.get(node.id)
            return dialect if isinstance(dialect, GuardDialect) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RULES:
            settings = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
            return RULES[node.func.id](*map(ast.literal_eval, node.args), **settings)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, PolicyError):
        pass
    return None
