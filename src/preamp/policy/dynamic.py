"""The usual rule: back off on overflow, grow after enough clean steps."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias, get_args

from preamp.checks import one_of, whole
from preamp.errors import InexactScale, PolicyError
from preamp.policy.base import Reading, Scalar, State, Where, choose, setting
from preamp.policy.bounded import Compat, Moving

Event: TypeAlias = Literal["clean", "growth", "backoff"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Dynamic(Moving[State]):
    """Back off on overflow, grow after `growth_interval` clean steps.

    With the defaults the scale never reaches 0, inf or NaN and every scale is a power of two, so
    that scaling and unscaling are exact. The floor is float16's smallest normal number.

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
    hysteresis_reset: tuple[Event, ...] = setting(
        ("clean",),
        "the events that reset the count of overflows. "
        '"clean": only overflows in a row count, and once `hysteresis` is used up every further overflow in '
        'that row backs off. "backoff": each backoff takes `hysteresis` overflows. "growth" alone: overflows '
        "add up until the scale next grows.",
    )
    max_consecutive_overflows: int | None = setting(
        None, "raise `ScaleExhausted` after more than this many overflows in a row."
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
        if "clean" in self.hysteresis_reset:
            return State(scale, good, 0.0)
        return State(scale, good, self._cleared_by("growth", grows, state.bad, where))

    def _after_overflow(self, state: State, where: Where) -> State:
        # good = 0, bad += 1; if bad >= hysteresis: scale *= backoff_factor.
        bad = state.bad + 1.0
        backs_off = bad >= self.hysteresis
        scale = self._settled(where(backs_off, self._down(state.scale, where), state.scale), where)
        return State(scale, 0.0, self._cleared_by("backoff", backs_off, bad, where))

    def _cleared_by(self, event: Event, happens: Scalar, bad: Scalar, where: Where) -> Scalar:
        return where(happens, 0.0, bad) if event in self.hysteresis_reset else bad

    @property
    def gives_up(self) -> bool:
        return self.at_floor == "raise" or self.max_consecutive_overflows is not None

    def exhausted(self, state: State, after: State, reading: Reading, where: Where = choose) -> Scalar:
        if not self.gives_up:
            return False
        stuck: Scalar = False
        if self.at_floor == "raise":
            stuck = self._is_stuck(state.bad + 1.0 >= self.hysteresis, state.scale, after.scale)
        if self.max_consecutive_overflows is not None:
            stuck = stuck | (after.bad > self.max_consecutive_overflows)
        return where(reading.finite, False, stuck)

    def overflows_left(self, state: State) -> int:
        """Return how many more overflows, without a reset of their count, make the scale back off."""
        return int(max(self.hysteresis - state.bad, 1))

    def _remedy(self) -> str:
        if self.max_consecutive_overflows is None:
            return super()._remedy()
        higher = "a higher max_consecutive_overflows"
        return f"{super()._remedy()} and {higher}" if self.at_floor == "raise" else higher

    def __post_init__(self) -> None:
        if not isinstance(self.hysteresis_reset, tuple):
            raise PolicyError(
                f"hysteresis_reset={self.hysteresis_reset!r} is not a tuple of events. "
                "Write hysteresis_reset=('clean',)."
            )
        for event in self.hysteresis_reset:
            one_of("hysteresis_reset", event, get_args(Event))
        whole("hysteresis", self.hysteresis, least=1, instead="hysteresis=1 to back off on every overflow")
        if self.max_consecutive_overflows is not None:
            whole(
                "max_consecutive_overflows",
                self.max_consecutive_overflows,
                least=1,
                instead="None for no limit",
            )
            if self.hysteresis_reset != ("clean",):
                raise PolicyError(
                    f"max_consecutive_overflows needs overflows to be counted in a row, but "
                    f"hysteresis_reset={self.hysteresis_reset!r}. Write hysteresis_reset=('clean',)."
                )
        super().__post_init__()
