"""The usual rule over a floor that rises during training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import NamedTuple

from preamp.checks import ROUND, assign, is_number, warn_if_inexact, whole
from preamp.errors import PolicyError
from preamp.policy.base import Reading, Scalar, Where, choose, setting
from preamp.policy.bounded import Moving


class FloorState(NamedTuple):
    """`State` plus `age`: all steps so far. A float32 counts exactly to 2**24."""

    scale: Scalar
    good: Scalar
    bad: Scalar
    age: Scalar


@dataclass(frozen=True, kw_only=True, repr=False)
class FloorSchedule(Moving[FloorState]):
    """`Dynamic` with a floor that rises during training (Mellempudi et al. 2019, arXiv 1905.12334).

    Late in training a single overflow means little, and must not lower the scale to where gradients vanish.
    When a floor comes into force, the scale is lifted to it, and backoffs stop there. Only more than
    `patience` overflows in a row lower it further, down to `min_scale`, so that a floor that is too high
    cannot stall training.

    >>> policy = FloorSchedule(init_scale=8, floors=((0, 4.0), (3, 32.0)))
    >>> state = policy.start()
    >>> for finite in (False, False, True, False):
    ...     state = policy.step(state, Reading(finite))
    ...     print(state.scale)
    4.0
    4.0
    32.0
    32.0
    """

    floors: tuple[tuple[int, float], ...] = setting(
        ((0, 1.0), (40_000, 8192.0)),
        "a step and the floor from then on; repeat the flag for each. Steps (below 2**24) and floors rise.",
    )
    patience: int = setting(
        16,
        "overflows in a row at which a floor still holds. Counted anew once the scale has grown back to it.",
    )

    def start(self) -> FloorState:
        return FloorState(self.init_scale, 0.0, 0.0, 0.0)

    def advance(self, state: FloorState, reading: Reading, where: Where = choose) -> FloorState:
        after = super().advance(state, reading, where)
        scale, *others = after
        return FloorState(self._lifted(scale, after.age, where), *others)

    def _after_clean_step(self, state: FloorState, where: Where) -> FloorState:
        _, scale, good = self._grown_if_due(state.scale, state.good + 1.0, where)
        return FloorState(scale, good, 0.0, state.age + 1.0)

    def _after_overflow(self, state: FloorState, where: Where) -> FloorState:
        bad = state.bad + 1.0
        return FloorState(self._lowered(state, bad, where), 0.0, bad, state.age + 1.0)

    def _lowered(self, state: FloorState, bad: Scalar, where: Where) -> Scalar:
        """Return the scale after a backoff that stops at the floors in force below it."""
        lowered = self._down(state.scale, where)
        for step, floor in self.floors:
            holds = where(state.age >= step, where(state.scale >= floor, bad <= self.patience, False), False)
            lowered = where(holds, where(lowered < floor, floor, lowered), lowered)
        return lowered

    def _lifted(self, scale: Scalar, age: Scalar, where: Where) -> Scalar:
        """Return the scale, lifted to a floor that comes into force with the next step."""
        for step, floor in self.floors:
            scale = where(age == step, where(scale < floor, floor, scale), scale)
        return scale

    def __post_init__(self) -> None:
        whole("patience", self.patience, least=1, instead="patience=16")
        self._check_floors()
        super().__post_init__()
        rounded = ROUND[self.compat.scale_dtype]
        assign(self, floors=tuple((int(step), rounded(float(floor))) for step, floor in self.floors))
        self._check_floors()  # again: two floors may be equal in float32
        self._check_range()
        for _, floor in self.floors:
            warn_if_inexact("floors", floor)

    def _check_floors(self) -> None:
        are_pairs = isinstance(self.floors, tuple) and self.floors and all(map(_is_pair, self.floors))
        if not (are_pairs and all(map(_rises, zip(*self.floors, strict=True)))):
            raise PolicyError(
                f"floors={self.floors!r} is not a tuple of pairs of a step and a floor that both increase, "
                "with steps below 2**24, up to which a float32 can count, and floors above 0. "
                "Write floors=((0, 1.0), (40_000, 8192.0))."
            )

    def _check_range(self) -> None:
        low, high = self.min_scale or 0.0, self.max_scale or math.inf
        (first, lowest), highest = self.floors[0], self.floors[-1][1]
        if lowest < low or highest > high:
            limit = f"min_scale={lowest!r}" if lowest < low else f"max_scale={highest!r}"
            raise PolicyError(
                f"floors={self.floors!r} are outside min_scale={low!r} and max_scale={high!r}. "
                f"Write {limit} as well."
            )
        if first == 0 and self.init_scale < lowest:
            raise PolicyError(
                f"init_scale={self.init_scale!r} is below the first of floors={self.floors!r}. "
                f"Write init_scale={lowest!r}."
            )


def _is_pair(pair: object) -> bool:
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(is_number, pair))):
        return False
    step, floor = pair
    return isinstance(step, Integral) and 0 <= int(step) < 2**24 and floor > 0


def _rises(values: tuple[float, ...]) -> bool:
    return all(low < high for low, high in pairwise(values))
