"""The base of policies that grow after enough clean steps, and the settings that imitate other systems."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from preamp.checks import ROUND, assign, between, one_of, shown, warn_if_inexact, whole
from preamp.errors import PolicyError
from preamp.policy.base import Reading, Scalar, Where, changed_settings, choose, setting
from preamp.policy.bounded import Bounded

AtCeiling: TypeAlias = Literal["clamp", "refuse"]
Bounds: TypeAlias = Literal["strict", "moves", "always"]
Dtype: TypeAlias = Literal["float32", "float64"]
S = TypeVar("S", bound=Any)


@dataclass(frozen=True, kw_only=True, repr=False)
class Compat:
    """Settings that imitate other systems. `preamp.dialects` uses them; a new training does not need them.

    Args:
        at_ceiling: "clamp" grows up to the ceiling; "refuse" does not grow beyond it at all.
        bounds: "strict" refuses an `init_scale` outside floor and ceiling, and a scale set outside
            them by the user stays there until a growth or backoff brings it back. In other systems it jumps:
            with "moves" on the next backoff or growth, with "always" after every step.
        backoff_divisor: divide by this instead of multiplying by `backoff_factor`: unless it is a power
            of two, the last bit may differ.
        growth_delay: clean steps that are not counted, after the start and after every overflow.
        raise_on_arrival: with `at_floor="raise"`, raise as soon as an overflow leaves the scale at the floor.
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
    raise_on_arrival: bool = False
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
        if not isinstance(self.raise_on_arrival, bool):
            raise PolicyError(
                f"raise_on_arrival={shown(self.raise_on_arrival)} is not True or False. Write one of them."
            )
        if self.backoff_divisor is not None:
            between("backoff_divisor", self.backoff_divisor, 1.0, math.inf, instead="backoff_divisor=2.0")
            assign(self, backoff_divisor=ROUND[self.factor_dtype](float(self.backoff_divisor)))
            between("backoff_divisor", self.backoff_divisor, 1.0, math.inf, instead="backoff_divisor=2.0")
            warn_if_inexact("backoff_divisor", self.backoff_divisor)


@dataclass(frozen=True, kw_only=True, repr=False)
class Moving(Bounded[S]):
    """A scale that grows after `growth_interval` clean steps. When it backs off is up to the subclass.

    A subclass has `_after_clean_step` and `_after_overflow`.
    """

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

    def _grown_if_due(self, scale: Scalar, good: Scalar, where: Where) -> tuple[Scalar, Scalar, Scalar]:
        """Return whether the scale grows after `good` clean steps; the scale and the clean steps after it."""
        grows = self._grows(good)
        if grows is False:  # Python numbers, on nearly every step
            return grows, self._settled(scale, where), good
        grown = self._settled(where(grows, self._up(scale, where), scale), where)
        return grows, grown, where(grows, float(self.compat.growth_delay), good)

    def _grows(self, good: Scalar) -> Scalar:
        return good - self.compat.growth_delay >= self.growth_interval

    def _settled(self, scale: Scalar, where: Where) -> Scalar:
        """Return the scale at the end of a step: with `bounds="always"` it is inside them."""
        return self._clamped(scale, where) if self.compat.bounds == "always" else scale

    def _backed_off(self, scale: Scalar) -> Scalar:
        divisor = self.compat.backoff_divisor
        return scale / divisor if divisor else scale * self.backoff_factor

    def _ceiling(self, scale: Scalar, where: Where) -> Scalar:
        if self.compat.at_ceiling == "refuse":
            return scale
        return Bounded._ceiling(self, scale, where) if self.compat.bounds == "strict" else self.max_scale

    def _floor(self, scale: Scalar, where: Where) -> Scalar:
        return Bounded._floor(self, scale, where) if self.compat.bounds == "strict" else self.min_scale

    def _stored(self, scale: Scalar) -> Scalar:
        return scale if self.compat.scale_dtype == "float64" else Bounded._stored(self, scale)

    def _is_stuck(self, backs_off: Scalar, scale: Scalar, after: Scalar) -> Scalar:
        if self.compat.raise_on_arrival:
            return after <= self.min_scale
        # Below the floor, with bounds that are not strict, a backoff lifts the scale to it: one more to try.
        return backs_off & (
            scale <= self.min_scale if self.compat.bounds == "strict" else scale == self.min_scale
        )

    def get_config(self) -> dict[str, Any]:
        return {**Bounded.get_config(self), "compat": asdict(self.compat)}

    def __post_init__(self) -> None:
        if isinstance(self.compat, Mapping):  # as `get_config` returns it
            assign(self, compat=Compat(**self.compat))
        if not isinstance(self.compat, Compat):
            raise PolicyError(
                f"compat={shown(self.compat)} is not a Compat. Write compat=Compat(), or a dialect."
            )
        Bounded.__post_init__(self)

    def _check_numbers(self) -> None:
        whole("growth_interval", self.growth_interval, least=1, instead="growth_interval=2000")
        Bounded._check_numbers(self)

    def _round(self, *_: Any) -> None:
        Bounded._round(self, ROUND[self.compat.scale_dtype], ROUND[self.compat.factor_dtype])

    def _may_start_outside(self) -> bool:
        return self.compat.bounds != "strict"

    def _inexact_if_no_power_of_two(self) -> tuple[str, ...]:
        unused = (
            "backoff_factor" if self.compat.backoff_divisor else "",
            "max_scale" if self.compat.at_ceiling == "refuse" else "",
        )
        return tuple(name for name in Bounded._inexact_if_no_power_of_two(self) if name not in unused)
