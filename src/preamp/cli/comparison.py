"""`preamp simulate`: policies or guards on the same steps, compared in a table, sentences and a report."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from preamp import __version__
from preamp.cli.terminal import Row, print_lines, print_open, print_table, read_trace
from preamp.errors import PreampError, TraceError
from preamp.guards import Guard
from preamp.policy import Policy
from preamp.record.exponents import BANDS
from preamp.record.formatting import percent, power, sparkline
from preamp.record.trace import Trace
from preamp.simulation.processes import (
    Drawn,
    Drifting,
    FallingLoss,
    HeavyTailed,
    Losses,
    NaNLoss,
    Process,
    Recorded,
    RestingLoss,
    SpikeRuns,
    Spiky,
    Stationary,
    longest_skipped_run,
)
from preamp.simulation.simulate import simulate

ProcessName: TypeAlias = Literal["stationary", "drifting", "spiky", "heavy-tailed"]
PROCESSES: dict[str, type[Drawn]] = {
    "stationary": Stationary,
    "drifting": Drifting,
    "spiky": Spiky,
    "heavy-tailed": HeavyTailed,
}
LossesName: TypeAlias = Literal[
    "resting-loss",
    "falling-loss",
    "spike-runs",
    "nan-loss",
]
SomeName: TypeAlias = Literal[ProcessName, LossesName]
LOSSES: dict[str, type[Losses]] = {
    "resting-loss": RestingLoss,
    "falling-loss": FallingLoss,
    "spike-runs": SpikeRuns,
    "nan-loss": NaNLoss,
}
MEANING = {
    True: "Missed: planted spikes that the guard took. False alarms: ordinary steps that it skipped.",
    False: "Spikes: steps that did not overflow and that the guard skipped.",
}
RANDOM_STEPS, RANDOM_RATE = 20_000, 0.0005


@dataclass(frozen=True)
class Played:
    """Steps to play through policies.

    Attributes:
        steps: gradients, or which steps overflow.
        source: where they are from, as the end of a sentence.
    """

    steps: Process | list[bool]
    source: str


def recorded(path: Path, dtype: str | None) -> Played:
    """Return a recorded run: its gradients if they were recorded, or else which steps overflowed."""
    trace = read_trace(path)
    precision = str(trace.about.get("precision"))
    low = dtype or (precision if precision in BANDS and precision != "float32" else "float16")
    try:
        return Played(Recorded(trace, dtype=low), f"recorded in {path}")
    except TraceError:
        source = f"recorded in {path}, without amaxes, so the same steps overflow at every scale"
        return Played([not finite for finite in trace.column("finite")], source)


def random_overflows(steps: int | None, rate: float | None, seed: int | None) -> Played:
    """Return steps that overflow at random, whatever the scale."""
    chance = RANDOM_RATE if rate is None else rate
    rng = random.Random(seed or 0)
    overflows = [rng.random() < chance for _ in range(steps or RANDOM_STEPS)]
    return Played(overflows, f"drawn at random, each step with a chance of {chance:g}")


def process(name: SomeName, **settings: Any) -> Played:
    """Return a process of `preamp.processes`; settings that are None keep their defaults."""
    drawn = PROCESSES[name](**{key: value for key, value in settings.items() if value is not None})
    return Played(drawn, f"drawn from {drawn!r}")


def losses(path: Path | None, name: str | None, **settings: Any) -> tuple[Losses | Trace, str]:
    """Return losses and norms to play through guards, recorded or drawn, and where they are from.

    Args:
        path: a recorded run.
        name: a process of `LOSSES`.
        settings: of the process; those that are None keep their defaults.
    """
    if path is not None:
        trace = read_trace(path)
        if all(step.loss is None and step.grad_norm is None for step in trace):
            raise PreampError(
                f"{path} has neither losses nor norms, which a guard needs. Write --process resting-loss, or "
                "record a run with max_norm=, which measures the norm."
            )
        return trace, f"recorded in {path}"
    if name not in LOSSES:
        said = f"--process {name} has neither losses nor norms" if name else "A guard needs losses or norms"
        raise PreampError(f"{said}. Write --trace FILE, or --process {' or '.join(LOSSES)}.")
    drawn = LOSSES[name](**{key: value for key, value in settings.items() if value is not None})
    return drawn, f"drawn from {drawn!r}"


def compare_guards(
    guards: Mapping[str, Guard[Any]],
    rules: Mapping[str, Policy[Any]],
    played: tuple[Losses | Trace, str],
    path: Path,
    idle: Sequence[str] = (),
) -> None:
    """Play losses through guards, print the results and write the report.

    Args:
        guards: by name.
        rules: the policy for the scale, by name.
        played: what `losses` returned.
        path: of the report.
        idle: sentences about guards that can never skip a step.
    """
    from preamp.report import Curve, write_report

    if len(rules) > 1:
        raise PreampError(f"--guard requires exactly one --policy (got {len(rules)}). Write one.")
    (policy,) = rules.values()
    steps, source = played
    for name, guard in guards.items():
        if isinstance(steps, Trace) and (lacking := _lacking(guard, steps)):
            raise PreampError(
                f"{name} needs the {lacking} of every step that did not overflow, and some steps of this "
                "trace do not have it. Record the loss of each step, or the norm with max_norm=."
            )
    traces = {name: simulate(policy, steps, guard=guard) for name, guard in guards.items()}
    rows = [_guard_row(name, trace, steps) for name, trace in traces.items()]
    said = [*idle, *stops(traces.items())]
    print_table(rows)
    print_lines(said)
    write_report(
        path,
        title="The same losses, different guards",
        lead=[
            f"{len(list(steps)):,} steps: {source}.",
            MEANING[isinstance(steps, Losses)],
            *said,
        ],
        curves=[Curve(name, trace) for name, trace in traces.items()],
        table=rows,
        footer=footer([f"policy: {policy!r}", *(f"{name}: {guard!r}" for name, guard in guards.items())]),
    )
    print_open(path)


def _lacking(guard: Guard[Any], trace: Trace) -> str:
    """Return which values the guard uses and no clean step of the trace has; "" if none is missing."""
    columns = [trace.column(name) for name in sorted(guard.uses)]
    for finite, *values in zip(trace.column("finite"), *columns, strict=True):
        if finite and all(value is None for value in values):
            return " or ".join(sorted(guard.uses))
    return ""


def _guard_row(name: str, trace: Trace, steps: Losses | Trace) -> Row:
    summary = trace.summary()
    row = {"run": name, "steps": f"{summary.steps:,}", "skipped": f"{summary.skipped:,}"}
    if isinstance(steps, Losses):
        done = steps.outcome(trace)
        row |= {
            "planted": f"{done.spikes:,}",
            "missed": f"{done.missed:,}",
            "false alarms": f"{done.false_alarms:,}",
        }
    else:
        row["spikes"] = f"{summary.spikes:,}"
    return row | {"longest run": f"{longest_skipped_run(trace):,}"}


def compare(rules: Mapping[str, Policy[Any]], played: Played, path: Path) -> None:
    """Play steps through policies, print the results and write the report."""
    from preamp.report import Curve, write_report

    steps = played.steps
    _refuse_without_amaxes(rules, steps)
    traces = {name: simulate(rule, steps) for name, rule in rules.items()}
    rows = [_row(name, one, steps) for name, one in traces.items()]
    trends = [{"trend": sparkline(one)} for one in traces.values()]
    said = [*_best(steps), *stops(traces.items())]
    print_table([row | trend for row, trend in zip(rows, trends, strict=True)])
    print_lines(said)
    write_report(
        path,
        title=f"The same {'gradients' if isinstance(steps, Process) else 'overflows'}, different policies",
        lead=[*_lead(played), *said],
        curves=[Curve(name, one) for name, one in traces.items()],
        table=rows,
        footer=footer(f"{name}: {rule!r}" for name, rule in rules.items()),
    )
    print_open(path)


def _refuse_without_amaxes(rules: Mapping[str, Policy[Any]], steps: Process | list[bool]) -> None:
    needing = [name for name, rule in rules.items() if rule.needs_amax]
    if needing and not isinstance(steps, Process):
        raise PreampError(
            f"{needing[0]} needs the size of the gradients, which is not known for these steps. "
            "Write --process stationary, --policy dynamic, or --trace of a run with amaxes, which "
            "docs/policies.md shows how to record."
        )


def _lead(played: Played) -> list[str]:
    steps = played.steps
    count = f"{len(list(steps)):,} steps"
    if not isinstance(steps, Process):
        return [f"{count}, {sum(steps):,} of which overflow: {played.source}."]
    meaning = (
        f"Flushed: entries that were rounded to 0 in {steps.dtype}, the mean over the applied steps. "
        "To best: steps until the scale was within a factor 2 of the best."
    )
    return [f"{count}: {played.source}.", meaning]


def _best(steps: Process | list[bool]) -> list[str]:
    if not isinstance(steps, Process):
        return []
    return [f"Best constant scale: {power(steps.best_scale)} (it skips at most 1 step in 1000)."]


def _row(name: str, trace: Trace, steps: Process | list[bool]) -> Row:
    if not isinstance(steps, Process):
        return scale_row(name, trace)
    done = steps.outcome(trace)
    return {
        "run": name,
        "steps": f"{done.steps:,}",
        "skipped": f"{done.skipped:,}",
        "flushed": "-" if done.flushed is None else percent(done.flushed),
        "to best": "-" if done.reached is None else f"{done.reached:,}",
        "final": power(done.final_scale),
    }


def scale_row(name: str, trace: Trace) -> Row:
    """Return a summary of a trace's scale as a row of a table."""
    summary = trace.summary()
    return {
        "run": name,
        "steps": f"{summary.steps:,}",
        "skipped": f"{summary.skipped:,}",
        "streak": f"{summary.longest_streak}",
        "lowest": power(summary.min_scale),
        "highest": power(summary.max_scale),
        "final": power(summary.final_scale),
    }


def stops(traces: Iterable[tuple[str, Trace]]) -> list[str]:
    """Say which traces ended early, and why."""
    return [f"{name} stopped: {trace.stopped}" for name, trace in traces if trace.stopped]


def spikes(traces: Iterable[tuple[str, Trace]]) -> list[str]:
    """Say how many steps guards skipped."""
    said = []
    for name, trace in traces:
        found = [spike.value for spike in trace.column("spike") if spike is not None]
        lost = sum(not math.isfinite(value) for value in found)
        if found:
            steps = f"{len(found):,} step{'' if len(found) == 1 else 's'}"
            why = "a loss that was inf or NaN" if lost == len(found) else "a spike"
            part = f", {lost:,} of them with a loss that was inf or NaN" if 0 < lost < len(found) else ""
            said.append(f"{name}: a guard skipped {steps} because of {why}{part}.")
    return said


def events(traces: Iterable[tuple[str, Trace]]) -> list[str]:
    """Say which traces were resumed or stopped, and where ranks disagree."""
    traces = list(traces)
    resumed = [
        f"{name} was resumed from an older checkpoint, at step {', '.join(map(str, trace.resumed))}. "
        "Its steps after that checkpoint are not counted."
        for name, trace in traces
        if trace.resumed
    ]
    ranks = [f"{name}: {said}." for name, trace in traces for said in trace.disagreements]
    return resumed + ranks + stops(traces)


def footer(lines: Iterable[str]) -> str:
    """Return a report's small print."""
    return f"preamp {__version__}. " + ". ".join(dict.fromkeys(lines))
