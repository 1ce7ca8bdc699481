"""What playing gradients through ten rules takes. Reports; asserts nothing.

Run: python benchmarks/simulate.py [--steps 100000] [--rounds 3]

Processor time of one thread, drawing the gradients included; the total is the median of the rounds' totals.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from preamp import (
    Dynamic,
    FloorSchedule,
    Headroom,
    Histogram,
    LogMax,
    Policy,
    Static,
    Tolerant,
    dialects,
    processes,
    simulate,
)

RULES: dict[str, Policy[Any]] = {
    "Static": Static(2.0**20),
    "Dynamic": Dynamic(),
    "Tolerant": Tolerant(),
    "FloorSchedule": FloorSchedule(),
    "LogMax": LogMax(),
    "Histogram": Histogram(),
    "Headroom": Headroom(),
    "TORCH": dialects.TORCH,
    "DEEPSPEED": dialects.DEEPSPEED,
    "MEGATRON": dialects.MEGATRON,
}
KINDS = (processes.Stationary, processes.Drifting, processes.Spiky, processes.HeavyTailed)


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time that a call takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def one_round(kind: type[processes.Drawn], steps: int) -> dict[str, float]:
    """Return the seconds of every rule, and of drawing."""
    process = kind(steps=steps)
    taken = {"drawing": seconds(lambda: list(process))}
    for name, rule in RULES.items():
        taken[name] = seconds(lambda rule=rule: simulate(rule, process))
    return taken


def main() -> None:
    """Print a line for every process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(
        f"Python {platform.python_version()}, {platform.machine()}; {given.steps:,} steps, {len(RULES)} rules"
    )
    for kind in KINDS:
        rounds = [one_round(kind, given.steps) for _ in range(given.rounds)]
        total = statistics.median(sum(one.values()) for one in rounds)
        parts = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        print(f"{kind.__name__:12} {total:5.2f} s: " + ", ".join(f"{n} {t:.2f}" for n, t in parts.items()))


if __name__ == "__main__":
    main()
