"""A scale that never moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preamp.checks import assign, positive, to_float32, warn_if_inexact
from preamp.policy.base import Policy, Reading, State, Where, choose, setting


@dataclass(frozen=True, repr=False)
class Static(Policy[State]):
    """One scale throughout. Steps that overflow are still skipped.

    A state with another scale, such as one that another policy saved, has this policy's own after one step.

    >>> policy = Static(128)
    >>> policy.step(policy.start(), Reading(finite=False)).scale
    128.0
    """

    scale: float = setting(2.0**16, "what the loss is multiplied by. Kept in float32.")

    def __post_init__(self) -> None:
        positive("scale", self.scale, "Static(scale=2.0**16)")
        assign(self, scale=to_float32(float(self.scale)))
        positive("scale", self.scale, "Static(scale=2.0**16)")  # again: in float32 1e39 is inf
        warn_if_inexact("scale", self.scale)

    def start(self) -> State:
        return State(self.scale, 0.0, 0.0)

    def restore(self, saved: Mapping[str, Any]) -> State:
        """Return the state that saved numbers describe, at this policy's own scale."""
        return Policy.restore(self, saved)._replace(scale=self.scale)

    def advance(self, state: State, reading: Reading, where: Where = choose) -> State:
        is_own = state.scale == self.scale  # with NaN it is not
        return State(
            where(is_own, state.scale, self.scale),  # not self.scale alone: the type is the framework's
            good=where(reading.finite, state.good + 1.0, 0.0),
            bad=where(reading.finite, 0.0, state.bad + 1.0),
        )
