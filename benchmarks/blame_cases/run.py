"""How often blame names the fault that was planted in a training step, and nobody where none was.

Run: python benchmarks/blame_cases/run.py [--framework jax] [--seeds 1] [--only SUBSTRING] [--json FILE]
     [--harm]

A fault is found if a row of the result names it, `Case.guilty`: the first row, one of the first three, or one
that blame calls guilty. Two simpler ways to order the same rows are beside it: by the error that an operator
makes itself, and where infinity first appears. With `--harm` blame is not run, and the table shows what each
fault does to the loss and the gradient.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The package's modules import each other by its name, so the imports after this line cannot come before it.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from blame_cases import Case, Harm, Healthy, harm  # noqa: E402

TOP = 3
SHOWN = 3  # rows that are shown of a result that missed
COLUMNS = {
    "first": "first",
    "top": f"in first {TOP}",
    "guilty": "guilty",
    "local_first": "by own error: first",
    "local_top": f"in first {TOP}",
    "infinity": "first infinity",
}


@dataclass(frozen=True)
class Outcome:
    """What blame said of one fault.

    Attributes:
        case: the name of the case.
        kind: its kind.
        seed: of its step.
        first: whether the first row names the fault.
        top: whether one of the first three does.
        guilty: whether one of those that are called guilty does.
        local_first: `first` with the rows ordered by their own error.
        local_top: `top` with the rows ordered by their own error.
        infinity: whether the row where infinity first appears names it.
        named: the first rows, or the error that blame raised.
        seconds: how long it took.
    """

    case: str
    kind: str
    seed: int
    first: bool
    top: bool
    guilty: bool
    local_first: bool
    local_top: bool
    infinity: bool
    named: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Acquittal:
    """What blame said of one healthy step.

    Attributes:
        name: of the step.
        seed: of the step.
        clean: whether nothing is guilty.
        named: what is, or the error that blame raised.
        seconds: how long it took.
    """

    name: str
    seed: int
    clean: bool
    named: tuple[str, ...]
    seconds: float


def main() -> None:
    """Run the cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--framework", choices=["torch", "jax"], default="torch", help="whose cases to run")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds each case has")
    parser.add_argument("--only", default="", help="part of the name or kind of the cases to run")
    parser.add_argument("--json", type=Path, help="where to write the outcomes")
    parser.add_argument("--harm", action="store_true", help="show what the faults do")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of gradients in float16 that underflow, which is the point
    all_cases, all_healthy = bench(options.framework)
    cases = [case for case in all_cases if options.only in f"{case.kind}: {case.name}"]
    healthy = [each for each in all_healthy if options.only in f"healthy: {each.name}"]
    seeds = range(options.seeds)
    if options.harm:
        written: object = _print_harm(cases, healthy, seeds)
    else:
        pairs = [(case, seed) for case in cases for seed in seeds]
        hurting = [(case, seed) for case, seed in pairs if harm(case, seed).hurts]
        print(f"{len(hurting)} of {len(pairs)} faults hurt with their seeds and count.\n")
        outcomes = [judge(case, seed) for case, seed in hurting]
        acquittals = [acquit(each, seed) for each in healthy for seed in seeds]
        _print_outcomes(outcomes, acquittals)
        written = {
            "faults": [asdict(outcome) for outcome in outcomes],
            "healthy": [asdict(acquittal) for acquittal in acquittals],
        }
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n")


def bench(framework: str) -> tuple[Sequence[Case], Sequence[Healthy]]:
    """Return the faults and the healthy steps of a framework."""
    if framework == "torch":
        import torch

        from blame_cases.faults import CASES
        from blame_cases.healthy import HEALTHY

        torch.set_num_threads(1)
        return CASES, HEALTHY
    # XLA leaves out casts to low precision, unless it is told before it starts. Compiling takes the longest.
    flags = "--xla_allow_excess_precision=false --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    from blame_cases import jax_faults

    return jax_faults.CASES, jax_faults.HEALTHY


def judge(case: Case, seed: int) -> Outcome:
    """Run blame on a fault and compare."""
    step, start = case.build(seed), time.perf_counter()
    try:
        result = step.blame()
    except Exception as error:  # a miss, and no reason to stop
        result = None
        named: tuple[str, ...] = (_shown_error(error),)
    seconds = time.perf_counter() - start
    rows = [] if result is None else list(result.rows)
    guilty = [] if result is None else list(result.guilty)
    local = sorted(rows, key=lambda row: math.inf if math.isnan(row.local_error) else row.local_error)[::-1]
    infinite = sorted((row for row in rows if row.overflowed), key=lambda row: row.index)
    return Outcome(
        case.name,
        case.kind,
        seed,
        first=any(map(case.guilty, rows[:1])),
        top=any(map(case.guilty, rows[:TOP])),
        guilty=any(map(case.guilty, guilty)),
        local_first=any(map(case.guilty, local[:1])),
        local_top=any(map(case.guilty, local[:TOP])),
        infinity=any(map(case.guilty, infinite[:1])),
        named=named if result is None else tuple(map(_shown, rows[:SHOWN])),
        seconds=seconds,
    )


def acquit(each: Healthy, seed: int) -> Acquittal:
    """Run blame on a healthy step."""
    step, start = each.build(seed), time.perf_counter()
    try:
        named = tuple(map(_shown, list(step.blame().guilty)[:SHOWN]))
    except Exception as error:  # a miss, and no reason to stop
        named = (_shown_error(error),)
    return Acquittal(each.name, seed, not named, named, time.perf_counter() - start)


def _shown(row: Any) -> str:
    return (
        f"{row.operator} {row.direction} in {row.module} (effect {row.effect:.2g}, own error "
        f"{row.local_error:.2g})"
    )


def _shown_error(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def _print_outcomes(outcomes: Sequence[Outcome], acquittals: Sequence[Acquittal]) -> None:
    if outcomes:
        kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
        table = [["kind", "faults", *COLUMNS.values()]]
        for kind in (*kinds, ""):
            of_kind = [outcome for outcome in outcomes if kind in ("", outcome.kind)]
            shares = [_share(getattr(outcome, field) for outcome in of_kind) for field in COLUMNS]
            table.append([kind or "all", str(len(of_kind)), *shares])
        _print_table(table)
    if acquittals:
        share = _share(acquittal.clean for acquittal in acquittals)
        print(f"\n{len(acquittals)} healthy steps: nothing guilty in {share}.")
    missed = [outcome for outcome in outcomes if not (outcome.first and outcome.guilty)]
    if missed:
        print("\nNot first, or not guilty:")
    for outcome in missed:
        where = "in the first three" if outcome.top else "missed"
        verdict = "guilty" if outcome.guilty else "not guilty"
        place = "first" if outcome.first else where
        print(f"{outcome.kind}: {outcome.case}, seed {outcome.seed}: {place}, {verdict}. First rows:")
        _print_named(outcome.named)
    accused = [acquittal for acquittal in acquittals if not acquittal.clean]
    if accused:
        print("\nHealthy, and called guilty:")
    for acquittal in accused:
        print(f"{acquittal.name}, seed {acquittal.seed}:")
        _print_named(acquittal.named)
    times = [outcome.seconds for outcome in outcomes] + [acquittal.seconds for acquittal in acquittals]
    if times:
        print(f"\nA step took {statistics.median(times):.2f} s, at most {max(times):.2f} s.")


def _print_named(named: tuple[str, ...]) -> None:
    for name in named or ("nothing",):
        print(f"    {name}")


def _share(found: Iterable[bool]) -> str:
    values = list(found)
    return f"{100 * sum(values) / len(values):.0f} %"


def _print_harm(
    cases: Sequence[Case], healthy: Sequence[Healthy], seeds: Sequence[int]
) -> dict[str, list[dict[str, Any]]]:
    """Print what the faults do, and how far healthy steps are from float32; return it for a file."""
    table = [["fault", "seed", "factor", "loss", "without", "gradient", "without", "lost", "hurts"]]
    factors: dict[str, list[float]] = {}
    lost: dict[str, list[float]] = {}
    hurting: dict[str, int] = {}
    written: list[dict[str, Any]] = []
    for case in cases:
        for seed in seeds:
            harmed = harm(case, seed)
            factors.setdefault(case.kind, []).append(harmed.factor)
            hurting[case.kind] = hurting.get(case.kind, 0) + harmed.hurts
            lost.setdefault(case.kind, []).append(harmed.fault.lost)
            table.append([f"{case.kind}: {case.name}", str(seed), *_harm_cells(harmed)])
            written.append({"case": case.name, "kind": case.kind, "seed": seed, **_as_json(harmed)})
    _print_table(table)
    print()
    summary = [["kind", "faults", "hurt", "smallest factor", "median factor", "median lost"]]
    for kind, values in factors.items():
        numbers = [f"{min(values):.3g}", f"{statistics.median(values):.3g}"]
        summary.append(
            [kind, str(len(values)), str(hurting[kind]), *numbers, f"{statistics.median(lost[kind]):.0%}"]
        )
    _print_table(summary)
    print()
    table = [["healthy step", "seed", "loss", "gradient", "lost"]]
    sound: list[dict[str, Any]] = []
    for each in healthy:
        for seed in seeds:
            errors = each.build(seed).errors(seed)
            cells = [f"{errors.loss:.1e}", f"{errors.gradient:.1e}", f"{errors.lost:.0%}"]
            table.append([each.name, str(seed), *cells])
            sound.append({"name": each.name, "seed": seed, **errors._asdict()})
    _print_table(table)
    return {"faults": written, "healthy": sound}


def _harm_cells(harmed: Harm) -> list[str]:
    fault, sound = harmed.fault, harmed.sound
    numbers = (fault.loss, sound.loss, fault.gradient, sound.gradient)
    return [
        f"{harmed.factor:.3g}",
        *(f"{number:.1e}" for number in numbers),
        f"{fault.lost:.0%}",
        "yes" if harmed.hurts else "NO",
    ]


def _as_json(harmed: Harm) -> dict[str, Any]:
    return {
        "factor": harmed.factor,
        "hurts": harmed.hurts,
        "fault": harmed.fault._asdict(),
        "sound": harmed.sound._asdict(),
    }


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    if len(rows) < 2:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


if __name__ == "__main__":
    main()
