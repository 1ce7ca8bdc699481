"""The usual rule: back off on overflow, grow after enough clean steps."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args

from preamp.checks import ROUND, assign, between, one_of, positive, to_float32, warn_if_inexact, whole
from preamp.errors import InexactScale, PolicyError
from preamp.policy.base import Policy, Reading, State, Where, choose

Event: TypeAlias = Literal["clean", "growth", "backoff"]
AtFloor: TypeAlias = Literal["hold", "raise", "raise_on_arrival"]
AtCeiling: TypeAlias = Literal["clamp", "refuse"]
Bounds: TypeAlias = Literal["strict", "moves", "always"]
Dtype: TypeAlias = Literal["float32", "float64"]
S = TypeVar("S", bound=Any)


@dataclass(frozen=True, kw_only=True, repr=False)
class Moving(Policy[S]):
    """How the scale moves, whatever decides when: the half that `Dynamic` and `Tolerant` share.

    Args:
        init_scale: the scale of the first step.
        growth_factor: what a growth multiplies the scale by. Above 1.
        backoff_factor: what a backoff multiplies the scale by. Between 0 and 1.
        growth_interval: clean steps in a row before the scale grows.
        min_scale: the floor. None: no floor, so that the scale can reach 0.
        max_scale: the ceiling. None: no ceiling, so that the scale can reach inf.
        at_floor: "hold" stays at the floor. "raise" raises `ScaleExhausted` when a backoff is due there;
            "raise_on_arrival" as soon as an overflow leaves the scale at the floor.
        at_ceiling: "clamp" grows up to the ceiling; "refuse" does not grow beyond it at all.
        bounds: "strict" refuses an `init_scale` outside floor and ceiling, and a scale set outside
            them by hand stays there until a move brings it back. In other systems it jumps: with
            "moves" on the next backoff or growth, with "always" after every step.
        backoff_divisor: divide by this instead of multiplying by `backoff_factor`: not the same
            in the last bit unless it is a power of two.
        growth_delay: clean steps that are not counted, after the start and after every overflow.
        scale_dtype: the precision in which the scale is kept, as for the original of a dialect.
        factor_dtype: the precision of the two factors. float32 scalars of a framework reproduce
            float64 factors only if these are exact in float32.

    Numbers are rounded to their dtype when the policy is made: a `growth_factor` of 1.1 reads back
    as 1.10000002384.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = 2.0**-14
    max_scale: float | None = 2.0**32
    at_floor: AtFloor = "hold"
    at_ceiling: AtCeiling = "clamp"
    bounds: Bounds = "strict"
    backoff_divisor: float | None = None
    growth_delay: int = 0
    scale_dtype: Dtype = "float32"
    factor_dtype: Dtype = "float32"

    def _grows(self, good: Any) -> Any:
        return good - self.growth_delay >= self.growth_interval

    def _up(self, scale: Any, where: Where) -> Any:
        up = self._stored(scale * self.growth_factor)
        if self.max_scale is None:
            return up
        ceiling: Any = self.max_scale
        if self.bounds == "strict":  # a scale set above the ceiling by hand stays, it does not jump down
            ceiling = where(scale > ceiling, scale, ceiling)
        return where(up > ceiling, scale if self.at_ceiling == "refuse" else ceiling, up)

    def _down(self, scale: Any, where: Where) -> Any:
        exact = scale / self.backoff_divisor if self.backoff_divisor else scale * self.backoff_factor
        down = self._stored(exact)
        if self.min_scale is None:
            return down
        floor: Any = self.min_scale
        if self.bounds == "strict":
            floor = where(scale < floor, scale, floor)
        return where(down < floor, floor, down)

    def _bounded(self, scale: Any, where: Where) -> Any:
        if self.min_scale is not None:
            scale = where(scale < self.min_scale, self.min_scale, scale)
        if self.max_scale is not None:
            scale = where(scale > self.max_scale, self.max_scale, scale)
        return scale

    def _stored(self, scale: Any) -> Any:
        """Round as the storage would. Arrays of a framework already are in their storage."""
        if self.scale_dtype == "float64" or not isinstance(scale, float):
            return scale
        return to_float32(scale)

    def _stuck(self, fires: Any, scale: Any, after: Any) -> Any:
        """Return whether an overflow leaves the scale at a floor where the policy gives up."""
        if self.at_floor == "raise":
            return fires & (scale <= self.min_scale if self.bounds == "strict" else scale == self.min_scale)
        return self.at_floor == "raise_on_arrival" and after <= self.min_scale

    @property
    def gives_up(self) -> bool:
        return self.at_floor != "hold"

    def exhausted(self, state: S, after: S, reading: Reading, where: Where = choose) -> Any:
        if self.at_floor == "hold":
            return False
        return where(reading.finite, False, self._stuck(True, state.scale, after.scale))

    def _remedy(self) -> str:
        return "at_floor='hold' or a lower min_scale"

    def __post_init__(self) -> None:
        self._check_numbers()
        self._round_to_dtypes()
        self._check_numbers()  # again: in float32 1e39 is inf, 1e-46 is 0 and 1 + 1e-9 is 1
        self._check_bounds()
        backoff = "backoff_factor" if self.backoff_divisor is None else "backoff_divisor"
        for name in ("init_scale", "growth_factor", backoff, "min_scale"):
            warn_if_inexact(name, getattr(self, name))
        if self.at_ceiling == "clamp":
            warn_if_inexact("max_scale", self.max_scale)

    def _check_numbers(self) -> None:
        one_of("at_floor", self.at_floor, get_args(AtFloor))
        one_of("at_ceiling", self.at_ceiling, get_args(AtCeiling))
        one_of("bounds", self.bounds, get_args(Bounds))
        one_of("scale_dtype", self.scale_dtype, get_args(Dtype))
        one_of("factor_dtype", self.factor_dtype, get_args(Dtype))
        whole("growth_interval", self.growth_interval, least=1, instead="growth_interval=2000")
        whole("growth_delay", self.growth_delay, least=0, instead="growth_delay=0")
        between("growth_factor", self.growth_factor, 1.0, math.inf, instead="growth_factor=2.0")
        between("backoff_factor", self.backoff_factor, 0.0, 1.0, instead="backoff_factor=0.5")
        if self.backoff_divisor is not None:
            between("backoff_divisor", self.backoff_divisor, 1.0, math.inf, instead="backoff_divisor=2.0")
        positive("init_scale", self.init_scale, "init_scale=2.0**16")
        for name in ("min_scale", "max_scale"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name), f"{name}=None for no limit")

    def _round_to_dtypes(self) -> None:
        scale, factor = ROUND[self.scale_dtype], ROUND[self.factor_dtype]
        assign(
            self,
            init_scale=scale(float(self.init_scale)),
            min_scale=None if self.min_scale is None else scale(float(self.min_scale)),
            max_scale=None if self.max_scale is None else scale(float(self.max_scale)),
            growth_factor=factor(float(self.growth_factor)),
            backoff_factor=factor(float(self.backoff_factor)),
            backoff_divisor=None if self.backoff_divisor is None else factor(float(self.backoff_divisor)),
        )

    def _check_bounds(self) -> None:
        low, high = self.min_scale or 0.0, self.max_scale or math.inf
        if low > high:
            raise PolicyError(
                f"min_scale={low!r} is above max_scale={high!r}: no scale lies between them. "
                f"Write min_scale={high!r}, max_scale={low!r}, or None for no limit."
            )
        if self.bounds == "strict" and not low <= self.init_scale <= high:
            limit = "min_scale" if self.init_scale < low else "max_scale"
            raise PolicyError(
                f"init_scale={self.init_scale!r} lies outside min_scale={low!r} and "
                f"max_scale={high!r}. Write {limit}={self.init_scale!r} as well, or start inside."
            )
        if self.at_floor != "hold" and self.min_scale is None:
            raise PolicyError(f"at_floor={self.at_floor!r} needs a floor. Write min_scale=1.0 as well.")


@dataclass(frozen=True, kw_only=True, repr=False)
class Dynamic(Moving[State]):
    """Back off on overflow, grow after `growth_interval` clean steps.

    With the defaults the scale never reaches 0, inf or NaN and every scale is a power of two, so
    that scaling and unscaling are exact. The floor is float16's smallest normal number.

    Args:
        hysteresis: overflows it takes to back off. 1: every overflow does.
        hysteresis_reset: the events after which overflows are counted from zero again. "clean":
            only overflows in a row count, and once `hysteresis` is used up every further overflow
            in that row backs off. "backoff": each backoff takes `hysteresis` overflows. "growth"
            alone: overflows add up until the scale next grows.
        max_consecutive_overflows: raise `ScaleExhausted` after more than this many overflows in a row.

    The other arguments are those of `Moving`.

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

    hysteresis: int = 1
    hysteresis_reset: tuple[Event, ...] = ("clean",)
    max_consecutive_overflows: int | None = None

    @classmethod
    def holding(cls, init_scale: float, **settings: Any) -> Self:
        """Return the rule with our default bounds, widened to hold a first scale outside them."""
        narrow = cls(init_scale=init_scale, bounds="moves", **settings)
        low, high = narrow.min_scale or 0.0, narrow.max_scale or math.inf
        with warnings.catch_warnings(action="ignore", category=InexactScale):  # said already
            return replace(
                narrow,
                min_scale=min(low, narrow.init_scale),
                max_scale=max(high, narrow.init_scale),
                bounds="strict",
            )

    def start(self) -> State:
        return State(self.init_scale, 0.0, 0.0)

    def advance(self, state: State, reading: Reading, where: Where = choose) -> State:
        scale, good, bad = state.scale, state.good + 1.0, state.bad + 1.0

        # On an overflow: good = 0, bad += 1; if bad >= hysteresis: scale *= backoff_factor.
        fires = bad >= self.hysteresis
        lowered = where(fires, self._down(scale, where), scale)
        bad_if_overflow = where(fires, 0.0, bad) if "backoff" in self.hysteresis_reset else bad

        # On a clean step: good += 1, bad = 0; if good >= growth_interval: scale *= growth_factor, good = 0.
        grows = self._grows(good)
        raised = where(grows, self._up(scale, where), scale)
        good_if_clean = where(grows, float(self.growth_delay), good)
        bad_if_clean = where(grows, 0.0, state.bad) if "growth" in self.hysteresis_reset else state.bad
        if "clean" in self.hysteresis_reset:
            bad_if_clean = 0.0

        moved = where(reading.finite, raised, lowered)
        return State(
            scale=self._bounded(moved, where) if self.bounds == "always" else moved,
            good=where(reading.finite, good_if_clean, 0.0),
            bad=where(reading.finite, bad_if_clean, bad_if_overflow),
        )

    @property
    def gives_up(self) -> bool:
        return self.at_floor != "hold" or self.max_consecutive_overflows is not None

    def exhausted(self, state: State, after: State, reading: Reading, where: Where = choose) -> Any:
        if not self.gives_up:
            return False
        stuck = self._stuck(state.bad + 1.0 >= self.hysteresis, state.scale, after.scale)
        if self.max_consecutive_overflows is not None:
            stuck = stuck | (after.bad > self.max_consecutive_overflows)
        return where(reading.finite, False, stuck)

    def overflows_left(self, state: State) -> int:
        """Return how many overflows it takes from here, none of them cleared, until the scale backs off."""
        return int(max(self.hysteresis - state.bad, 1))

    def _remedy(self) -> str:
        if self.max_consecutive_overflows is None:
            return Moving._remedy(self)
        return "a higher max_consecutive_overflows"

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
        Moving.__post_init__(self)
