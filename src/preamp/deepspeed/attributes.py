"""The attributes of DeepSpeed's DynamicLossScaler: to a policy and its state, and settings back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from preamp.checks import shown
from preamp.errors import CheckpointError
from preamp.policy import Dynamic, Moving, Policy, State, Static
from preamp.systems.dialects import DEEPSPEED

SETTINGS = (
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "consecutive_hysteresis",
    "raise_error_at_min_scale",
)
COUNTS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
RECORD, BESIDE = "preamp_state", "beside"  # the state of a rule DeepSpeed lacks; the counts it is valid for
GUARD = "preamp_guard"  # the state of a guard


def policy_of(saved: Mapping[str, Any]) -> Any:
    """Return DeepSpeed's rule with the settings in a scaler's attributes."""
    policy: Any = DEEPSPEED.policy
    factor, floor = _number(saved, "scale_factor"), _number(saved, "min_scale") or None  # none is below 0
    compat = policy.compat
    if factor != 2.0 and factor > 1.0:  # at most 1 is refused as a growth_factor
        compat = replace(compat, backoff_divisor=factor, factor_dtype="float64")
    return replace(
        policy,
        growth_factor=factor,
        growth_interval=_count(saved, "scale_window"),
        min_scale=floor,
        hysteresis=_count(saved, "delayed_shift"),
        hysteresis_reset="clean" if _flag(saved, "consecutive_hysteresis") else "growth",
        at_floor="raise" if floor and _flag(saved, "raise_error_at_min_scale") else "hold",
        compat=compat,
    )


def settings_of(policy: Policy[Any]) -> dict[str, Any]:
    """Return the settings of the nearest rule that DeepSpeed has, under its names."""
    if isinstance(policy, Static):
        return {"dynamic": False}
    rule: Any = policy if isinstance(policy, Moving) else DEEPSPEED.policy
    return {
        "dynamic": True,
        "scale_factor": rule.growth_factor,
        "scale_window": rule.growth_interval,
        "min_scale": rule.min_scale or 0.0,
        "delayed_shift": getattr(rule, "hysteresis", 1),
        "consecutive_hysteresis": getattr(rule, "hysteresis_reset", None) == "clean",
        "raise_error_at_min_scale": rule.at_floor == "raise",
    }


def state_of(saved: Mapping[str, Any], policy: Dynamic) -> State:
    """Return the state that a scaler's attributes describe."""
    clean = _count(saved, "cur_iter") - _count(saved, "last_overflow_iter") - 1
    delay, patience = policy.compat.growth_delay, _count(saved, "delayed_shift")
    counted = clean - delay
    good = clean if counted < 0 else counted % policy.growth_interval + delay
    bad = patience - _count(saved, "cur_hysteresis") if patience > 1 else 0
    return State(_number(saved, "cur_scale"), float(good), float(bad))


def _number(saved: Mapping[str, Any], name: str) -> float:
    """Return an attribute as a float."""
    value = saved[name]
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise CheckpointError(
            f"the saved {name}={shown(value)} is not one number. Write one, such as 1.0."
        ) from None


def _count(saved: Mapping[str, Any], name: str) -> int:
    value = _number(saved, name)
    if not value.is_integer():  # nor is inf or NaN
        raise CheckpointError(
            f"the saved {name}={value!r} is not a whole number. Write 0 to start counting again."
        )
    return int(value)


def _flag(saved: Mapping[str, Any], name: str) -> bool:
    value = saved[name]
    try:
        known = value in (True, False)
    except (TypeError, ValueError, RuntimeError):  # an array of several
        known = False
    if not known:
        raise CheckpointError(
            f"the saved {name}={shown(value)} is neither True nor False. Write one of them."
        )
    return bool(value)
