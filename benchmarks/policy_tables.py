"""Which rule flushes the fewest gradients, and at what price: the tables of recorded/policies.md.

Run: python benchmarks/policy_tables.py --processes 2. Reports; asserts nothing. `policies.py` is shorter.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from policy_problems import PROBLEMS
from policy_trainings import OURS, RULES, Cell, Job, Outcome, cells, run

STEPS, SEEDS = 1100, 5
DIVISORS = (1, 4096)
SWEEP = (0, *range(12, 31, 2))  # powers of two; 0 does not scale
HOPELESS = 0.5  # a constant scale that skips more steps than this trains nothing worth comparing
QUIET = 1e-3
Results = dict[tuple[Cell, str | int], Outcome]


def jobs(cells: list[Cell], seeds: int) -> list[Job]:
    """Return all trainings. A constant scale on a divided loss is not run: it equals a smaller one."""
    rules = [(cell, rule) for cell in cells for rule in RULES]
    sweep = [(cell, power) for cell in cells if cell.divisor == 1 for power in SWEEP]
    return [Job(cell, rule, seed, STEPS) for seed in range(seeds) for cell, rule in [*sweep, *rules]]


def means(outcomes: dict[Job, Outcome]) -> Results:
    """Return the mean over the seeds of every cell and rule."""
    groups: dict[tuple[Cell, str | int], list[Outcome]] = {}
    for job, one in outcomes.items():
        groups.setdefault((job.cell, job.rule), []).append(one)
    return {key: Outcome.mean(group) for key, group in groups.items()}


def of_cell(results: Results, cell: Cell) -> dict[str, Outcome]:
    """Return the outcomes of a cell by rule, including the best constant scale and the best quiet one."""
    plain = cell._replace(divisor=1)
    constants = {
        f"{power + cell.divisor.bit_length() - 1}": results[plain, power] for power in SWEEP
    }  # fmt: skip
    found = {rule: results[cell, rule] for rule in RULES}
    trains = {name: one for name, one in constants.items() if one.late <= HOPELESS}
    quiet = {name: one for name, one in constants.items() if one.late <= QUIET}
    for heading, choice in (("best constant", trains), ("best quiet constant", quiet)):
        power = min(choice, key=lambda name: choice[name].flushed)
        found[f"{heading}|{power}"] = choice[power]
    return found


def print_tables(results: Results, cells: list[Cell]) -> None:
    """Print the tables as Markdown."""
    found = {cell: of_cell(results, cell) for cell in cells}
    show: list[tuple[str, Callable[[str, Outcome], str]]] = [
        (
            "Flushed gradient entries, percent (skipped steps in 1000 after step 50)",
            lambda name, one: f"{one.flushed * 100:.2g} ({one.late * 1000:.1f}){_power(name)}",
        ),
        (
            "Steps until the scale is reached, and skipped steps in all",
            lambda _, one: f"{one.reached:.0f}, {one.skipped:.0f}",
        ),
        ("Test accuracy, percent", lambda _, one: f"{one.accuracy * 100:.1f}"),
    ]  # fmt: skip
    for title, text in show:
        names = [name.split("|")[0] for name in next(iter(found.values()))]
        print(f"\n{title}\n\n| | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
        for cell, row in found.items():
            print(f"| {cell} | {' | '.join(text(name, one) for name, one in row.items())} |")
    print_verdict(found)


def _power(name: str) -> str:
    return f" at 2^{name.split('|')[1]}" if "|" in name else ""


def print_verdict(found: dict[Cell, dict[str, Outcome]]) -> None:
    """Print what Headroom flushes, divided by the best other rule and by the best of the quiet ones."""
    print(f"\n{OURS}'s flushed entries over those of the best other rule\n")
    print("| | of all | of those with <= 1 skipped step in 1000 |\n| --- | --- | --- |")
    for cell, row in found.items():
        others = {name: one for name, one in row.items() if name != OURS and one.late <= HOPELESS}
        quiet = {name: one for name, one in others.items() if one.late <= QUIET}
        print(f"| {cell} | {_ratio(row[OURS], others)} | {_ratio(row[OURS], quiet)} |")


def _ratio(ours: Outcome, others: dict[str, Outcome]) -> str:
    name = min(others, key=lambda name: others[name].flushed)
    return f"{ours.flushed / others[name].flushed:.2f} ({name.split('|')[0]}{_power(name)})"


def main() -> None:
    """Run all trainings and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--problem", choices=PROBLEMS, action="append")
    parser.add_argument(
        "--kept", type=Path, help="a file of outcomes: trainings that it holds are not run again"
    )
    arguments = parser.parse_args()
    chosen = cells(arguments.problem or PROBLEMS, DIVISORS)
    start = time.perf_counter()
    results = means(run(jobs(chosen, arguments.seeds), arguments.processes, arguments.kept))
    print(
        f"torch {torch.__version__}, {platform.machine()}; {STEPS} steps, means of {arguments.seeds} seeds; "
        f"{(time.perf_counter() - start) / 60:.0f} minutes in {arguments.processes} processes"
    )
    print_tables(results, chosen)


if __name__ == "__main__":
    main()
