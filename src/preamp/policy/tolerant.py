"""A rule that accepts a share of overflows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from preamp.checks import is_number
from preamp.errors import PolicyError
from preamp.policy.base import Reading, Where, choose
from preamp.policy.dynamic import Moving


class TolerantState(NamedTuple):
    """`State` plus `age`: the steps, clean or not, since the scale last moved."""

    scale: Any
    good: Any
    bad: Any
    age: Any


@dataclass(frozen=True, kw_only=True, repr=False)
class Tolerant(Moving[TolerantState]):
    """Back off only when overflows are more frequent than `tolerance` (fairseq's rule).

    The rate is overflows since the last backoff, over all steps since the scale last moved.

    Args:
        tolerance: the share of overflowing steps that is accepted, from 0 (none) up to 1.

    The other arguments are those of `Moving`.

    >>> policy = Tolerant(init_scale=8, tolerance=0.5)
    >>> state = policy.start()
    >>> for finite in (True, True, False, False):
    ...     state = policy.step(state, Reading(finite))
    ...     print(state.scale)
    8.0
    8.0
    8.0
    4.0
    """

    tolerance: float = 0.05

    def start(self) -> TolerantState:
        return TolerantState(self.init_scale, 0.0, 0.0, 0.0)

    def advance(self, state: TolerantState, reading: Reading, where: Where = choose) -> TolerantState:
        scale, good, bad, age = state.scale, state.good + 1.0, state.bad + 1.0, state.age + 1.0
        fires = bad / age >= self.tolerance
        grows = self._grows(good)
        raised = where(grows, self._up(scale, where), scale)
        lowered = where(fires, self._down(scale, where), scale)
        moved = where(reading.finite, raised, lowered)
        return TolerantState(
            scale=self._bounded(moved, where) if self.bounds == "always" else moved,
            good=where(reading.finite, where(grows, float(self.growth_delay), good), 0.0),
            bad=where(reading.finite, state.bad, where(fires, 0.0, bad)),
            age=where(where(reading.finite, grows, fires), 0.0, age),
        )

    def exhausted(
        self, state: TolerantState, after: TolerantState, reading: Reading, where: Where = choose
    ) -> Any:
        if self.at_floor == "hold":
            return False
        fires = (state.bad + 1.0) / (state.age + 1.0) >= self.tolerance
        return where(reading.finite, False, self._stuck(fires, state.scale, after.scale))

    def __post_init__(self) -> None:
        if not (is_number(self.tolerance) and 0.0 <= self.tolerance <= 1.0):
            raise PolicyError(
                f"tolerance={self.tolerance!r} is not a share of steps between 0 and 1. "
                "Write tolerance=0.05 to accept one overflow in twenty steps."
            )
        Moving.__post_init__(self)
