"""What the state machine costs on the host, compared with a rule written by hand. Plain Python.

Run: python benchmarks/core.py [--quick]. Reports; asserts nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rows import Area, Options, Row, main

from preamp import Dynamic, Policy, Reading, Tolerant, dialects, simulate

STEPS = 20_000
BY_HAND = "growth and backoff by hand"

POLICIES: dict[str, Policy[Any]] = {
    "Dynamic": Dynamic(),
    "Tolerant": Tolerant(),
    "dialects.TORCH": dialects.TORCH,
    "dialects.MEGATRON": dialects.MEGATRON,
}


class ByHand:
    """What a training script without a library would contain: no bounds, no record."""

    def __init__(self) -> None:
        self.scale, self.good = 65536.0, 0

    def step(self, finite: bool) -> None:
        if not finite:
            self.scale, self.good = self.scale / 2.0, 0
            return
        self.good += 1
        if self.good == 2000:
            self.scale, self.good = self.scale * 2.0, 0


def by_hand(overflows: list[bool]) -> None:
    rule = ByHand()
    for overflow in overflows:
        rule.step(not overflow)


def stepped(policy: Policy[Any], overflows: list[bool]) -> None:
    """Advance a policy as an adapter does."""
    state = policy.start()
    for overflow in overflows:
        state = policy.step(state, Reading(finite=not overflow))


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each policy: a step in training, and a step in a simulation, which keeps a record."""
    area = Area("core")
    rng = random.Random(0)
    overflows = [rng.random() < 0.001 for _ in range(100 if options.quick else STEPS)]
    ways: dict[str, Callable[[Policy[Any]], object]] = {
        "a step of": lambda policy: stepped(policy, overflows),
        "simulate, a step of": lambda policy: simulate(policy, overflows),
    }
    for way, run in ways.items():
        works = {name: partial(run, policy) for name, policy in POLICIES.items()}
        times = options.interleaved({**works, BY_HAND: partial(by_hand, overflows)})
        for name in POLICIES:
            yield from area.timed(
                f"{way} {name}", times, name, floors=[BY_HAND], unit="µs", calls=len(overflows)
            )


if __name__ == "__main__":
    main(measure, __doc__)
