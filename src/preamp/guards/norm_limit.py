"""A guard with one number: the largest norm that gradients may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from preamp.checks import FLOAT32_MAX, FLOAT32_TINY, between, positive
from preamp.guards.base import Guard, Verdict
from preamp.policy.base import Reading, Where, choose, setting


class NoState(NamedTuple):
    """The state of a guard that remembers nothing."""


@dataclass(frozen=True, repr=False)
class NormLimit(Guard[NoState]):
    """Skip a step whose gradients' global L2 norm is above a threshold, or NaN.

    >>> guard = NormLimit(5.0)
    >>> guard.takes(guard.start(), Reading(finite=True, grad_norm=5.5))
    False
    """

    uses: ClassVar[frozenset[str]] = frozenset(["grad_norm"])

    threshold: float = setting(
        10.0, "the largest norm with which a step is taken. Of the unscaled gradients."
    )

    def __post_init__(self) -> None:
        positive("threshold", self.threshold, "NormLimit(threshold=10.0)")
        between("threshold", self.threshold, FLOAT32_TINY, FLOAT32_MAX, instead="NormLimit(threshold=10.0)")

    def start(self) -> NoState:
        return NoState()

    def judge(self, state: NoState, reading: Reading, where: Where = choose) -> Verdict:
        self.require(reading)
        if reading.grad_norm is None:
            return Verdict(reading.finite, None, self.threshold)
        return Verdict(reading.grad_norm <= self.threshold, None, self.threshold)

    def advance(self, state: NoState, reading: Reading, where: Where = choose) -> NoState:
        return state
