"""The base of policies that multiply the scale by factors, between a floor and a ceiling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from preamp.checks import assign, between, one_of, positive, to_float32, warn_if_inexact
from preamp.errors import PolicyError
from preamp.policy.base import Policy, Reading, Scalar, Where, choose, setting

AtFloor: TypeAlias = Literal["hold", "raise"]
S = TypeVar("S", bound=Any)


@dataclass(frozen=True, kw_only=True, repr=False)
class Bounded(Policy[S]):
    """A scale that grows by one factor and backs off by another, between a floor and a ceiling.

    The subclass decides when. Settings are rounded to float32: a factor of 1.1 becomes 1.10000002384.
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

    def _up(self, scale: Scalar, where: Where) -> Scalar:
        """Return the scale after a growth."""
        up = self._stored(scale * self.growth_factor)
        if self.max_scale is None:
            return up
        return where(up > self.max_scale, self._ceiling(scale, where), up)

    def _down(self, scale: Scalar, where: Where) -> Scalar:
        """Return the scale after a backoff."""
        down = self._stored(self._backed_off(scale))
        if self.min_scale is None:
            return down
        return where(down < self.min_scale, self._floor(scale, where), down)

    def _backed_off(self, scale: Scalar) -> Scalar:
        return scale * self.backoff_factor

    def _ceiling(self, scale: Scalar, where: Where) -> Scalar:
        """Return where a growth from `scale` ends. A scale that was set above the ceiling stays there."""
        return where(scale > self.max_scale, scale, self.max_scale)

    def _floor(self, scale: Scalar, where: Where) -> Scalar:
        """Return where a backoff from `scale` ends. A scale that was set below the floor stays there."""
        return where(scale < self.min_scale, scale, self.min_scale)

    def _clamped(self, scale: Scalar, where: Where) -> Scalar:
        if self.min_scale is not None:
            scale = where(scale < self.min_scale, self.min_scale, scale)
        if self.max_scale is not None:
            scale = where(scale > self.max_scale, self.max_scale, scale)
        return scale

    def _stored(self, scale: Scalar) -> Scalar:
        """Round a Python float to float32. Arrays already have the dtype in which they are stored."""
        return to_float32(scale) if isinstance(scale, float) else scale

    @property
    def gives_up(self) -> bool:
        return self.at_floor == "raise"

    def exhausted(self, state: S, after: S, reading: Reading, where: Where = choose) -> Scalar:
        if self.at_floor == "hold":
            return False
        return where(reading.finite, False, self._is_stuck(True, state.scale, after.scale))

    def _is_stuck(self, backs_off: Scalar, scale: Scalar, after: Scalar) -> Scalar:
        """Return whether an overflow at `scale`, which leads to `after`, leaves no lower scale to try."""
        return backs_off & (scale <= self.min_scale)

    def _remedy(self) -> str:
        return "at_floor='hold' or a lower min_scale"

    def __post_init__(self) -> None:
        self._check_numbers()
        self._round()
        self._check_numbers()  # again: in float32 1e39 is inf, 1e-46 is 0 and 1 + 1e-9 is 1
        self._check_bounds()
        for name in self._inexact_if_no_power_of_two():
            warn_if_inexact(name, getattr(self, name))

    def _check_numbers(self) -> None:
        one_of("at_floor", self.at_floor, get_args(AtFloor))
        between("growth_factor", self.growth_factor, 1.0, math.inf, instead="growth_factor=2.0")
        between("backoff_factor", self.backoff_factor, 0.0, 1.0, instead="backoff_factor=0.5")
        positive("init_scale", self.init_scale, "init_scale=2.0**16")
        for name in ("min_scale", "max_scale"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name), f"{name}=None for no limit")

    def _round(
        self, scale: Callable[[float], float] = to_float32, factor: Callable[[float], float] = to_float32
    ) -> None:
        """Round the scales and the factors."""
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
        if not (self._may_start_outside() or low <= self.init_scale <= high):
            limit = "min_scale" if self.init_scale < low else "max_scale"
            raise PolicyError(
                f"init_scale={self.init_scale!r} is outside min_scale={low!r} and "
                f"max_scale={high!r}. Write {limit}={self.init_scale!r} as well, or start inside."
            )
        if self.at_floor != "hold" and self.min_scale is None:
            raise PolicyError(f"at_floor={self.at_floor!r} needs a floor. Write min_scale=1.0 as well.")

    def _may_start_outside(self) -> bool:
        return False

    def _inexact_if_no_power_of_two(self) -> tuple[str, ...]:
        """Return the names of the settings that determine the scale."""
        return ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
