"""A policy that remembers what it was shown, and what that should be; exponents counted one by one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from preamp import ExponentHistogram, Policy, Reading, Step
from preamp.policy import Where, choose

__all__ = ["Remembered", "Remembering", "amax_of", "counted", "scales_after"]


class Remembered(NamedTuple):
    """The scale, clean steps, and what the last of them was shown."""

    scale: Any
    good: Any
    amax: Any


@dataclass(frozen=True, repr=False)
class Remembering(Policy[Remembered]):
    """Halves the scale after an overflow, and keeps the last reading that says something."""

    init_scale: float = 4.0

    needs_amax = True

    def start(self) -> Remembered:
        return Remembered(self.init_scale, 0.0, 0.0)

    def advance(self, state: Remembered, reading: Reading, where: Where = choose) -> Remembered:
        return Remembered(
            where(reading.finite, state.scale, state.scale * 0.5),
            where(reading.finite, state.good + 1.0, state.good),
            where(reading.finite, self.amax_in(reading), state.amax),
        )


def scales_after(policy: Policy[Any], steps: Iterable[Step]) -> list[float]:
    """Return the scale after each step, of a policy on floats that is shown the amaxes that were recorded."""
    state, scales = policy.start(), []
    for step in steps:
        state = policy.step(state, Reading(step.finite, step.amax))
        scales.append(state.scale)
    return scales


def amax_of(arrays: Iterable[Any]) -> float:
    """Return the largest magnitude of real entries, and of the real and imaginary parts of complex ones."""
    parts = [
        part
        for array in map(np.asarray, arrays)
        for part in (array.real, array.imag)[: 1 + np.iscomplexobj(array)]
    ]
    return max(float(np.abs(part.astype("float64")).max(initial=0.0)) for part in parts)


def counted(values: Any, *, least: float = 2.0**-126, most: float = 2.0**128) -> ExponentHistogram:
    """Count one by one what frameworks are to count."""
    numbers = [abs(float(value)) for value in values]
    bins = Counter(math.frexp(x)[1] - 1 for x in numbers if least <= x < most)
    low, high = min(bins, default=0), max(bins, default=-1)
    return ExponentHistogram(
        low,
        tuple(bins[e] for e in range(low, high + 1)),
        zeros=sum(x < least for x in numbers),
        nonfinite=sum(not x < most for x in numbers),
    )
