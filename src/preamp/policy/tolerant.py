"""A rule that accepts a share of overflows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from preamp.checks import is_number
from preamp.errors import PolicyError
from preamp.policy.base import Scalar, Where, setting
from preamp.policy.moving import Moving


class TolerantState(NamedTuple):
    """`State` plus `age`: the steps, clean or not, since the scale last moved."""

    scale: Scalar
    good: Scalar
    bad: Scalar
    age: Scalar


@dataclass(frozen=True, kw_only=True, repr=False)
class Tolerant(Moving[TolerantState]):
    """Back off only when overflows are more frequent than `tolerance` (fairseq's rule).

    The rate is overflows since the last backoff, over all steps since the scale last moved.

    >>> from preamp import Reading
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

    tolerance: float = setting(0.05, "the share of steps that may overflow. From 0 (none) to 1.")

    def start(self) -> TolerantState:
        return TolerantState(self.init_scale, 0.0, 0.0, 0.0)

    def _after_clean_step(self, state: TolerantState, where: Where) -> TolerantState:
        grows, scale, good = self._grown_if_due(state.scale, state.good + 1.0, where)
        return TolerantState(scale, good, state.bad, where(grows, 0.0, state.age + 1.0))

    def _after_overflow(self, state: TolerantState, where: Where) -> TolerantState:
        backs_off = self._backs_off(state)
        scale = where(backs_off, self._down(state.scale, where), state.scale)
        bad, age = where(backs_off, 0.0, state.bad + 1.0), where(backs_off, 0.0, state.age + 1.0)
        return TolerantState(scale, 0.0, bad, age)

    def _backs_off(self, state: TolerantState) -> Scalar:
        return (state.bad + 1.0) / (state.age + 1.0) >= self.tolerance

    def __post_init__(self) -> None:
        if not (is_number(self.tolerance) and 0.0 <= self.tolerance <= 1.0):
            raise PolicyError(
                f"tolerance={self.tolerance!r} is not a share of steps between 0 and 1. "
                "Write tolerance=0.05 to accept one overflow in twenty steps."
            )
        super().__post_init__()
