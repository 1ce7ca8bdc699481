"""What `Headroom` flushes in small training runs, compared with other loss-scaling rules. Shares, not times.

Run: python benchmarks/policies.py [--quick]. Reports; asserts nothing. `policy_tables.py` is longer.

A share below one in a million counts as one in a million.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from policy_problems import PROBLEMS
from policy_trainings import OURS, RULES, Cell, Job, Outcome, cells, run
from rows import Area, Options, Row, main
from timing import spread

STEPS, SEEDS, LEAST = 500, 3, 1e-6
DIVISORS = (1, 4096)


def jobs(options: Options) -> list[Job]:
    """Return all trainings, those of one cell and rule next to each other."""
    if options.quick:
        return [Job(cells(PROBLEMS, (1,))[0], rule, seed, STEPS) for rule in RULES for seed in range(2)]
    chosen = cells(PROBLEMS, DIVISORS)
    return [Job(cell, rule, seed, STEPS) for cell in chosen for rule in RULES for seed in range(SEEDS)]


def rows_of(cell: Cell, found: dict[str, list[Outcome]], steps: int) -> Iterator[Row]:
    """Yield a row for each other rule, with what it skips: that is the price of flushing less."""
    ours = found.pop(OURS)
    flushed = 100.0 * Outcome.mean(ours).flushed
    for rule, theirs in found.items():
        ratios = spread(share(a) / share(b) for a, b in zip(ours, theirs, strict=True))
        skipped = [f"{1e3 * Outcome.mean(outcomes).late:.1f}" for outcomes in (theirs, ours)]
        against = f"{rule}: skips {skipped[0]} steps in 1000 where {OURS} skips {skipped[1]}"
        what = f"gradients flushed: {cell}, {steps} steps"
        yield Area("policies").row(what, against, ratios, flushed, "%")


def share(outcome: Outcome) -> float:
    return max(outcome.flushed, LEAST)


def measure(options: Options) -> Iterator[Row]:
    """Yield the rows of every cell. The spread is that of the seeds."""
    todo = jobs(options)
    outcomes = run(todo, processes=len(os.sched_getaffinity(0)))
    for cell in dict.fromkeys(job.cell for job in todo):
        of_cell = [job for job in todo if job.cell == cell]
        found = {rule: [outcomes[job] for job in of_cell if job.rule == rule] for rule in RULES}
        yield from rows_of(cell, found, todo[0].steps)


if __name__ == "__main__":
    main(measure, __doc__)
