"""How long `simulate` takes to play gradients through seven rules, compared with drawing them. Plain Python.

Run: python benchmarks/simulate.py [--quick]. Reports; asserts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from rows import Area, Options, Row, main

from preamp import (
    Dynamic,
    Headroom,
    Policy,
    Static,
    Tolerant,
    dialects,
    processes,
    simulate,
)

STEPS = 20_000
RULES: tuple[Policy[Any], ...] = (
    Static(2.0**20),
    Dynamic(),
    Tolerant(),
    Headroom(),
    dialects.TORCH,
    dialects.DEEPSPEED,
    dialects.MEGATRON,
)
DRAWING = "drawing the gradients, which they share"
KINDS = (processes.Stationary, processes.Drifting, processes.Spiky, processes.HeavyTailed)


def play(kind: type[processes.Drawn], steps: int) -> None:
    """Draw gradients, and play them through every rule."""
    process = kind(steps=steps)
    for rule in RULES:
        simulate(rule, process)


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each process."""
    area, steps = Area("simulate"), 100 if options.quick else STEPS
    for kind in KINDS:
        works = {
            "preamp": partial(play, kind, steps),
            DRAWING: lambda kind=kind: list(kind(steps=steps)),
        }
        times = options.interleaved(works)
        what = f"{kind.__name__}, {steps:,} steps, {len(RULES)} rules"
        yield from area.timed(what, times, "preamp", floors=[DRAWING], unit="s")


if __name__ == "__main__":
    main(measure, __doc__)
