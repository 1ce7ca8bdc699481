"""The formats of DeepSpeed: with ZeRO the loss scaler object, at stage 0 its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from preamp.policy import Policy, State, Static
from preamp.systems.formats.base import (
    Format,
    GuardState,
    count,
    entries_of,
    flag,
    guard_state,
    hysteresis,
    number,
    numbers,
    overflows_left,
)

OURS, BESIDE = "preamp_state", "beside"  # the state of a rule DeepSpeed lacks, and the counts it is valid for
GUARD = "preamp_guard"  # the state of a guard
COUNTS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeed(Format):
    """The base of DeepSpeed's formats: counters of all steps, and constant scales."""

    has_static = True
    dynamic: ClassVar[str]  # the name of the entry that says whether the scale is dynamic

    def policy(self, saved: Mapping[str, Any], rest: Policy[Any]) -> Policy[Any]:
        if not flag(saved, self.dynamic):
            return Static(number(saved, "cur_scale"))
        return Format.policy(self, saved, rest)

    def settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        interval, factor = {"growth_interval": count(saved, "scale_window")}, number(saved, "scale_factor")
        return interval if factor == 2.0 else {**interval, "growth_factor": factor}

    def compat(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        factor = number(saved, "scale_factor")
        if factor == 2.0 or not factor > 1.0:  # the latter is refused as a growth_factor
            return {}
        return {"backoff_divisor": factor, "factor_dtype": "float64"}

    def state(self, saved: Mapping[str, Any], policy: Any) -> State:
        scale = number(saved, "cur_scale")
        if isinstance(policy, Static):
            return State(scale, 0.0, 0.0)
        clean = count(saved, "cur_iter") - count(saved, "last_overflow_iter") - 1
        delay = policy.compat.growth_delay
        counted = clean - delay
        good = clean if counted < 0 else counted % policy.growth_interval + delay
        return State(scale, float(good), float(self.bad(saved)))

    def bad(self, saved: Mapping[str, Any]) -> int:
        """Return the overflows that count towards the next backoff."""
        return 0

    def save(self, state: Any, policy: Any) -> dict[str, Any]:
        if isinstance(policy, Static):
            return {"cur_scale": state.scale, self.dynamic: False}
        clean = int(state.good)
        return {
            "cur_scale": state.scale,
            "cur_iter": max(clean, 0),
            "last_overflow_iter": max(clean, 0) - clean - 1,
            "scale_factor": policy.growth_factor,
            "scale_window": policy.growth_interval,
            self.dynamic: True,
        }


class DeepSpeedZero(DeepSpeed):
    """The attributes of LossScaler and DynamicLossScaler; ZeRO saves the object, as "loss_scaler"."""

    entries = ("cur_scale", "dynamic")
    dynamic = "dynamic"
    setting_names = (
        "scale_factor",
        "scale_window",
        "min_scale",
        "delayed_shift",
        "consecutive_hysteresis",
        "raise_error_at_min_scale",
    )

    def find(self, saved: object) -> Mapping[str, Any] | None:
        return Format.find(self, entries_of(saved).get("loss_scaler", saved))

    def settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        floor = number(saved, "min_scale") or None  # no scale is below 0
        return {
            **DeepSpeed.settings(self, saved),
            "min_scale": floor,
            "hysteresis": count(saved, "delayed_shift"),
            "hysteresis_reset": ("clean",) if flag(saved, "consecutive_hysteresis") else ("growth",),
            "at_floor": "raise" if floor and flag(saved, "raise_error_at_min_scale") else "hold",
        }

    def bad(self, saved: Mapping[str, Any]) -> int:
        patience = count(saved, "delayed_shift")
        return patience - count(saved, "cur_hysteresis") if patience > 1 else 0

    def remembered(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return numbers(saved.get(OURS), without=(BESIDE,))

    def with_remembered(self, saved: dict[str, Any], remembered: Mapping[str, Any]) -> dict[str, Any] | None:
        beside = {name: saved[name] for name in COUNTS if name in saved}
        return {**saved, OURS: {BESIDE: beside, **remembered}}

    def guards(self, saved: Mapping[str, Any]) -> list[GuardState]:
        return [guard_state(saved[GUARD])] if GUARD in saved else []

    def with_guards(self, saved: Mapping[str, Any], guards: list[GuardState]) -> dict[str, Any] | None:
        return {**saved, GUARD: guards[0]} if len(guards) == 1 else None

    def save(self, state: Any, policy: Any) -> dict[str, Any]:
        common = DeepSpeed.save(self, state, policy)
        if isinstance(policy, Static):
            return common
        return {
            **common,
            "min_scale": policy.min_scale or 0.0,
            "delayed_shift": hysteresis(policy),
            "cur_hysteresis": overflows_left(policy, state),
            "consecutive_hysteresis": "clean" in getattr(policy, "hysteresis_reset", ()),
            "raise_error_at_min_scale": policy.at_floor == "raise",
        }


class DeepSpeedStage0(DeepSpeed):
    """`state_dict()` of the fused and unfused FP16 optimizers, without the floor; preamp adds an entry."""

    entries = ("cur_scale", "cur_iter", "dynamic_loss_scale")
    dynamic = "dynamic_loss_scale"

    def settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        ours = entries_of(saved.get("preamp"))
        counted = {"hysteresis": count(ours, "delayed_shift")} if "delayed_shift" in ours else {}
        return {**DeepSpeed.settings(self, saved), **counted}

    def bad(self, saved: Mapping[str, Any]) -> int:
        ours = entries_of(saved.get("preamp"))
        counts = "delayed_shift" in ours
        return count(ours, "delayed_shift") - count(ours, "cur_hysteresis") if counts else 0

    def remembered(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return numbers(entries_of(saved.get("preamp")).get(OURS), without=(BESIDE,))

    def guards(self, saved: Mapping[str, Any]) -> list[GuardState]:
        ours = entries_of(saved.get("preamp"))
        return [guard_state(ours[GUARD])] if GUARD in ours else []

    def with_guards(self, saved: Mapping[str, Any], guards: list[GuardState]) -> dict[str, Any] | None:
        if len(guards) != 1:
            return None
        return {**saved, "preamp": {**entries_of(saved.get("preamp")), GUARD: guards[0]}}

    def save(self, state: object, policy: object) -> dict[str, Any]:
        return {"cur_iter": 0, **DeepSpeed.save(self, state, policy)}
