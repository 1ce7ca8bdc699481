"""Which guard misses the fewest spikes, and how many ordinary steps it skips: the tables of docs/guards.md.

Run: python benchmarks/guard_tables.py [--seeds 20] [--first-seed 2000] [--processes 2]. It asserts nothing.

SpikeGuard's constants were chosen on seeds 1000 to 1005.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random
from typing import Any, NamedTuple

from preamp import Reading, Static, guards, processes, simulate


@dataclass(frozen=True, kw_only=True)
class PlateauLoss(processes.Losses):
    """Little noise; a step is higher with chance `rate`, as for a longer or rarer text."""

    noise: float = 0.003
    rate: float = 0.02

    def disturbed(self, step: int, reading: Reading, rng: Random) -> Reading:
        is_higher, share = rng.random() < self.rate, rng.uniform(1.02, 1.06)
        if not is_higher:
            return reading
        return Reading(True, loss=share * reading.loss, grad_norm=1.5 * reading.grad_norm)


@dataclass(frozen=True, kw_only=True)
class ShiftingLoss(processes.Losses):
    """In every second stretch of `every` steps the loss is `shift` times as high, the norm `shift**2`."""

    shift: float = 1.15
    every: int = 500

    def level(self, step: int) -> float:
        return self.loss * (self.shift if step // self.every % 2 else 1.0)

    def norm_level(self, step: int) -> float:
        return self.shift**2 if step // self.every % 2 else 1.0


@dataclass(frozen=True, kw_only=True)
class HeavyTailedNorms(processes.Losses):
    """The norms have a power law: P(norm > x) = x**-tail for x >= 1."""

    tail: float = 4.0

    def norm_excess(self, rng: Random) -> float:
        return rng.expovariate(1.0) / self.tail


@dataclass(frozen=True, kw_only=True)
class WideningLoss(processes.Losses):
    """The noise of the loss grows by `factor` and shrinks again, in `period` steps."""

    factor: float = 5.0
    period: float = 1000.0

    def width(self, step: int) -> float:
        return float(self.noise * self.factor ** math.sin(math.pi * step / self.period) ** 2)


PROCESSES: dict[str, type[processes.Losses]] = {
    "resting": processes.RestingLoss,
    "falling": processes.FallingLoss,
    "plateau": PlateauLoss,
    "runs of six": processes.SpikeRuns,
    "shifts": ShiftingLoss,
    "NaN": processes.NaNLoss,
    "heavy tails": HeavyTailedNorms,
    "widening": WideningLoss,
}
GUARDS: dict[str, guards.Guard[Any]] = {
    "SpikeGuard()": guards.SpikeGuard(),
    "OLMO": guards.OLMO,
    "LEVANTER": guards.LEVANTER,
    "MAXTEXT": guards.MAXTEXT,
    "MEGATRON_NORM(3.0)": guards.MEGATRON_NORM(3.0),
}
FIRST_SEED, SEEDS = 2000, 20


class Total(NamedTuple):
    """The outcomes of one guard on one process, over all seeds."""

    spikes: int
    missed: int
    false_alarms: int
    longest_run: int


Job = tuple[str, str, int]  # guard, process and seed
Results = dict[tuple[str, str], Total]  # by guard and process


def played(job: Job) -> Total:
    """Return the outcome of a guard on a process with a seed."""
    guard, process, seed = job
    losses = PROCESSES[process](seed=seed)
    done = losses.outcome(simulate(Static(1.0), losses, guard=GUARDS[guard]))
    return Total(done.spikes, done.missed, done.false_alarms, done.longest_run)


def results(seeds: range, workers: int) -> Results:
    """Return the outcomes of all guards on all processes."""
    jobs = [(guard, process, seed) for guard in GUARDS for process in PROCESSES for seed in seeds]
    with get_context("spawn").Pool(workers) as pool:
        return summed(jobs, pool.map(played, jobs, chunksize=len(seeds)))


def summed(jobs: Iterable[Job], outcomes: Iterable[Total]) -> Results:
    """Return the sums over the seeds, and the longest run of any."""
    found: Results = {}
    for (guard, process, _), one in zip(jobs, outcomes, strict=True):
        before = found.get((guard, process), Total(0, 0, 0, 0))
        sums = [a + b for a, b in zip(before[:3], one[:3], strict=True)]
        found[guard, process] = Total(*sums, max(before.longest_run, one.longest_run))
    return found


def table(found: Results, heading: str, show: Callable[[Total], int]) -> Iterator[str]:
    """Yield a table in Markdown. Numbers below SpikeGuard's are in bold."""
    ours = next(iter(GUARDS))
    yield f"| {heading} | " + " | ".join(PROCESSES) + " |"
    yield "| --- |" + " --- |" * len(PROCESSES)
    for guard in GUARDS:
        values = [(show(found[guard, process]), show(found[ours, process])) for process in PROCESSES]
        cells = [f"**{value:,}**" if value < least else f"{value:,}" for value, least in values]
        yield f"| `{guard}` | " + " | ".join(cells) + " |"


def tables(found: Results) -> str:
    """Return all tables."""
    ours = next(iter(GUARDS))
    spikes = " | ".join(f"{found[ours, process].spikes:,}" for process in PROCESSES)
    missed = list(table(found, "missed spikes", lambda total: total.missed))
    missed.insert(2, f"| planted | {spikes} |")
    alarms = table(found, "false alarms", lambda total: total.false_alarms)
    longest = table(found, "longest run of skips", lambda total: total.longest_run)
    return "\n\n".join("\n".join(lines) for lines in (missed, alarms, longest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    began = time.perf_counter()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    print(tables(results(seeds, options.processes)))
    print(f"\n{options.seeds} seeds, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
