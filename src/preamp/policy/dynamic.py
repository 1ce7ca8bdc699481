"""The usual rule: back off on overflow, grow after enough clean steps."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias, get_args

from preamp.checks import one_of, whole
from preamp.errors import InexactScale
from preamp.policy.base import Scalar, State, Where, setting
from preamp.policy.moving import Compat, Moving

Event: TypeAlias = Literal["clean", "growth"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Dynamic(Moving[State]):
    """Back off on overflow, grow after `growth_interval` clean steps.

    With the defaults the scale never reaches 0, inf or NaN and every scale is a power of two, so
    that scaling and unscaling are exact. The floor is float16's smallest normal number.

    >>> from preamp import Reading
    >>> policy = Dynamic(init_scale=8, growth_interval=2)
    >>> state = policy.start()
    >>> for finite in (True, True, False, True, True):
    ...     state = policy.step(state, Reading(finite))
    ...     print(state)
    State(scale=8.0, good=1.0, bad=0.0)
    State(scale=16.0, good=0.0, bad=0.0)
    State(scale=8.0, good=0.0, bad=1.0)
    State(scale=8.0, good=1.0, bad=0.0)
    State(scale=16.0, good=0.0, bad=0.0)
    """

    hysteresis: int = setting(1, "overflows it takes to back off. 1: every overflow does.")
    hysteresis_reset: Event = setting(
        "clean",
        "what resets the count of overflows. "
        '"clean": a clean step, so only overflows in a row count, and once `hysteresis` is used up every '
        'further overflow in that row backs off. "growth": overflows add up until the scale next grows.',
    )

    @classmethod
    def holding(cls, init_scale: float, *, compat: Compat | None = None, **settings: Any) -> Self:
        """Return the rule with our default bounds, widened to hold a first scale outside them."""
        wanted = compat or Compat()
        narrow = cls(init_scale=init_scale, compat=replace(wanted, bounds="moves"), **settings)
        low, high = narrow.min_scale or 0.0, narrow.max_scale or math.inf
        with warnings.catch_warnings(action="ignore", category=InexactScale):  # said already
            return replace(
                narrow,
                min_scale=min(low, narrow.init_scale),
                max_scale=max(high, narrow.init_scale),
                compat=wanted,
            )

    def start(self) -> State:
        return State(self.init_scale, 0.0, 0.0)

    def _after_clean_step(self, state: State, where: Where) -> State:
        # good += 1, bad = 0; if good >= growth_interval: scale *= growth_factor, good = 0.
        grows, scale, good = self._grown_if_due(state.scale, state.good + 1.0, where)
        bad = 0.0 if self.hysteresis_reset == "clean" else where(grows, 0.0, state.bad)
        return State(scale, good, bad)

    def _after_overflow(self, state: State, where: Where) -> State:
        # good = 0, bad += 1; if bad >= hysteresis: scale *= backoff_factor.
        scale = where(self._backs_off(state), self._down(state.scale, where), state.scale)
        return State(scale, 0.0, state.bad + 1.0)

    def _backs_off(self, state: State) -> Scalar:
        return state.bad >= self.hysteresis - 1.0

    def overflows_left(self, state: State) -> int:
        """Return how many more overflows, without a reset of their count, make the scale back off."""
        return int(max(self.hysteresis - state.bad, 1))

    def __post_init__(self) -> None:
        one_of("hysteresis_reset", self.hysteresis_reset, get_args(Event))
        whole("hysteresis", self.hysteresis, least=1, instead="hysteresis=1 to back off on every overflow")
        super().__post_init__()
