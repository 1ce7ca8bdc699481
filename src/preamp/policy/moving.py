"""The base class of policies that multiply the scale by factors, between a floor and a ceiling.

`Compat` has the settings with which it imitates other systems.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from preamp.checks import (
    ROUND,
    assign,
    between,
    one_of,
    positive,
    shown,
    to_float32,
    warn_if_inexact,
    whole,
)
from preamp.errors import PolicyError
from preamp.policy.base import Policy, Reading, Scalar, Where, changed_settings, choose, setting

AtFloor: TypeAlias = Literal["hold", "raise"]
AtCeiling: TypeAlias = Literal["clamp", "refuse"]
Bounds: TypeAlias = Literal["strict", "moves"]
Dtype: TypeAlias = Literal["float32", "float64"]
S = TypeVar("S", bound=Any)


@dataclass(frozen=True, kw_only=True, repr=False)
class Compat:
    """Settings that imitate other systems. `preamp.dialects` uses them; a new run does not need them.

    Args:
        at_ceiling: "clamp" grows up to the ceiling; "refuse" does not grow beyond it at all.
        bounds: "strict" refuses an `init_scale` outside floor and ceiling, and a scale set outside
            them by the user stays there until a growth or backoff brings it back. With "moves", as in other
            systems, it jumps inside on the next backoff or growth.
        backoff_divisor: divide by this instead of multiplying by `backoff_factor`: unless it is a power
            of two, the last bit may differ.
        growth_delay: clean steps that are not counted, after the start and after every overflow.
        scale_dtype: the precision in which the scale is kept.
        factor_dtype: the precision of the factors. float32 scalars of a framework reproduce float64
            factors only if these are exact in float32.

    >>> from preamp import Dynamic
    >>> Dynamic(compat=Compat(growth_delay=1))
    Dynamic(compat=Compat(growth_delay=1))
    """

    at_ceiling: AtCeiling = "clamp"
    bounds: Bounds = "strict"
    backoff_divisor: float | None = None
    growth_delay: int = 0
    scale_dtype: Dtype = "float32"
    factor_dtype: Dtype = "float32"

    def __repr__(self) -> str:
        """Show the settings that differ from their defaults."""
        return changed_settings(self)

    def __post_init__(self) -> None:
        one_of("at_ceiling", self.at_ceiling, get_args(AtCeiling))
        one_of("bounds", self.bounds, get_args(Bounds))
        one_of("scale_dtype", self.scale_dtype, get_args(Dtype))
        one_of("factor_dtype", self.factor_dtype, get_args(Dtype))
        whole("growth_delay", self.growth_delay, least=0, instead="growth_delay=0")
        if self.backoff_divisor is not None:
            between("backoff_divisor", self.backoff_divisor, 1.0, math.inf, instead="backoff_divisor=2.0")
            assign(self, backoff_divisor=ROUND[self.factor_dtype](float(self.backoff_divisor)))
            between("backoff_divisor", self.backoff_divisor, 1.0, math.inf, instead="backoff_divisor=2.0")
            warn_if_inexact("backoff_divisor", self.backoff_divisor)


@dataclass(frozen=True, kw_only=True, repr=False)
class Moving(Policy[S]):
    """A scale that grows after `growth_interval` clean steps. When it backs off is up to the subclass.

    A subclass has `_after_clean_step` and `_after_overflow`. Settings are rounded to float32: a factor of 1.1
    becomes 1.10000002384.
    """

    init_scale: float = setting(2.0**16, "the scale of the first step.")
    growth_factor: float = setting(2.0, "what a growth multiplies the scale by. Above 1.")
    backoff_factor: float = setting(0.5, "what a backoff multiplies the scale by. Between 0 and 1.")
    min_scale: float | None = setting(2.0**-14, "the floor. None: no floor, so that the scale can reach 0.")
    max_scale: float | None = setting(
        2.0**32, "the ceiling. None: no ceiling, so that the scale can reach inf."
    )
    at_floor: AtFloor = setting(
        "hold", 'when a backoff is due at the floor: stay there, or "raise" `ScaleExhausted`.'
    )
    growth_interval: int = setting(2000, "clean steps in a row before the scale grows.")
    compat: Compat = setting(Compat(), "settings that imitate another system.")

    def advance(self, state: S, reading: Reading, where: Where = choose) -> S:
        if where is choose:  # Python numbers: only one of the two is needed
            after = self._after_clean_step if reading.finite else self._after_overflow
            return after(state, where)
        clean, overflow = self._after_clean_step(state, where), self._after_overflow(state, where)
        merged: S = type(state)(*[where(reading.finite, a, b) for a, b in zip(clean, overflow, strict=True)])
        return merged

    @abstractmethod
    def _after_clean_step(self, state: S, where: Where) -> S:
        """Return the state after a step whose gradients were finite."""

    @abstractmethod
    def _after_overflow(self, state: S, where: Where) -> S:
        """Return the state after a step that overflowed."""

    @property
    def gives_up(self) -> bool:
        return self.at_floor == "raise"

    def exhausted(self, state: S, reading: Reading, where: Where = choose) -> Scalar:
        if self.at_floor == "hold":
            return False
        # Below the floor, with bounds that are not strict, a backoff lifts the scale to it: one more to try.
        strict, scale = self.compat.bounds == "strict", state.scale
        is_lowest = scale <= self.min_scale if strict else scale == self.min_scale
        return where(reading.finite, False, self._backs_off(state) & is_lowest)

    def _backs_off(self, state: S) -> Scalar:
        """Return whether an overflow backs off."""
        return True

    def _grown_if_due(self, scale: Scalar, good: Scalar, where: Where) -> tuple[Scalar, Scalar, Scalar]:
        """Return whether the scale grows after `good` clean steps; the scale and the clean steps after it."""
        grows = good - self.compat.growth_delay >= self.growth_interval
        if grows is False:  # Python numbers, on nearly every step
            return grows, scale, good
        grown, uncounted = where(grows, self._up(scale, where), scale), float(self.compat.growth_delay)
        return grows, grown, where(grows, uncounted, good)

    def _up(self, scale: Scalar, where: Where) -> Scalar:
        """Return the scale after a growth. With strict bounds, one that was set above the ceiling stays."""
        up, ceiling = self._stored(scale * self.growth_factor), self.max_scale
        if ceiling is None:
            return up
        if self.compat.at_ceiling == "refuse":
            return where(up > ceiling, scale, up)
        end = where(scale > ceiling, scale, ceiling) if self.compat.bounds == "strict" else ceiling
        return where(up > ceiling, end, up)

    def _down(self, scale: Scalar, where: Where) -> Scalar:
        """Return the scale after a backoff. With strict bounds, one that was set below the floor stays."""
        divisor, floor = self.compat.backoff_divisor, self.min_scale
        down = self._stored(scale / divisor if divisor else scale * self.backoff_factor)
        if floor is None:
            return down
        end = where(scale < floor, scale, floor) if self.compat.bounds == "strict" else floor
        return where(down < floor, end, down)

    def _stored(self, scale: Scalar) -> Scalar:
        """Round a Python float to float32. Arrays already have the dtype in which they are stored."""
        is_rounded = isinstance(scale, float) and self.compat.scale_dtype == "float32"
        return to_float32(scale) if is_rounded else scale

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "compat": asdict(self.compat)}

    def _remedy(self) -> str:
        return "at_floor='hold' or a lower min_scale"

    def __post_init__(self) -> None:
        if isinstance(self.compat, Mapping):  # as `get_config` returns it
            assign(self, compat=Compat(**self.compat))
        if not isinstance(self.compat, Compat):
            raise PolicyError(
                f"compat={shown(self.compat)} is not a Compat. Write compat=Compat(), or a dialect."
            )
        self._check_numbers()
        self._round()
        self._check_numbers()  # again: in float32 1e39 is inf, 1e-46 is 0 and 1 + 1e-9 is 1
        self._check_bounds()
        unused = {
            "backoff_factor": self.compat.backoff_divisor is not None,
            "max_scale": self.compat.at_ceiling == "refuse",
        }
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            if not unused.get(name):
                warn_if_inexact(name, getattr(self, name))

    def _check_numbers(self) -> None:
        whole("growth_interval", self.growth_interval, least=1, instead="growth_interval=2000")
        one_of("at_floor", self.at_floor, get_args(AtFloor))
        between("growth_factor", self.growth_factor, 1.0, math.inf, instead="growth_factor=2.0")
        between("backoff_factor", self.backoff_factor, 0.0, 1.0, instead="backoff_factor=0.5")
        positive("init_scale", self.init_scale, "init_scale=2.0**16")
        for name in ("min_scale", "max_scale"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name), f"{name}=None for no limit")

    def _round(self) -> None:
        """Round the scales and the factors."""
        scale, factor = ROUND[self.compat.scale_dtype], ROUND[self.compat.factor_dtype]
        assign(
            self,
            init_scale=scale(float(self.init_scale)),
            min_scale=None if self.min_scale is None else scale(float(self.min_scale)),
            max_scale=None if self.max_scale is None else scale(float(self.max_scale)),
            growth_factor=factor(float(self.growth_factor)),
            backoff_factor=factor(float(self.backoff_factor)),
        )

    def _check_bounds(self) -> None:
        low, high = self.min_scale or 0.0, self.max_scale or math.inf
        if low > high:
            raise PolicyError(
                f"min_scale={low!r} is above max_scale={high!r}: no scale is between them. "
                f"Write min_scale={high!r}, max_scale={low!r}, or None for no limit."
            )
        if not (self.compat.bounds != "strict" or low <= self.init_scale <= high):
            limit = "min_scale" if self.init_scale < low else "max_scale"
            raise PolicyError(
                f"init_scale={self.init_scale!r} is outside min_scale={low!r} and "
                f"max_scale={high!r}. Write {limit}={self.init_scale!r} as well, or start inside."
            )
        if self.at_floor != "hold" and self.min_scale is None:
            raise PolicyError(f"at_floor={self.at_floor!r} needs a floor. Write min_scale=1.0 as well.")
