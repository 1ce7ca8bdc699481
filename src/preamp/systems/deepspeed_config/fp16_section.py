"""Convert the section `fp16` to a policy and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from preamp.errors import ConfigError
from preamp.policy import Dynamic, Policy, Static
from preamp.systems.deepspeed_config.keys import FP16, read_section
from preamp.systems.dialects import DEEPSPEED

POWER, LARGEST_POWER = 16, 127


def policy_of(fp16: Mapping[str, Any]) -> Policy[Any]:
    """Return the policy of the section `fp16`."""
    if fp16["loss_scale"]:
        return Static(fp16["loss_scale"])
    initial, least = _initial_scale(fp16), fp16["min_loss_scale"]
    if least > initial:
        raise ConfigError(
            f"fp16.min_loss_scale: {least:g} is above the initial scale {initial:g}, which an overflow would "
            f'raise. Write "min_loss_scale": {initial:g} or a higher "initial_scale_power".'
        )
    return DEEPSPEED(
        init_scale=initial,
        scale_window=fp16["loss_scale_window"],
        min_scale=least,
        hysteresis=fp16["hysteresis"],
        consecutive_hysteresis=fp16["consecutive_hysteresis"],
        raise_error_at_min_scale=fp16["raise_error_at_min_scale"],
    )


def _initial_scale(fp16: Mapping[str, Any]) -> float:
    power, scale = fp16["initial_scale_power"], fp16["init_scale"]
    by_power = 2.0 ** (POWER if power is None else power)
    if power is not None and scale not in (None, by_power):
        raise ConfigError(
            f"fp16.initial_scale_power: {power} and fp16.init_scale: {scale:g} differ. "
            'Write "initial_scale_power" alone.'
        )
    return by_power if scale is None else float(scale)


def section_of(policy: Policy[Any] | None) -> dict[str, Any]:
    """Return the section `fp16` for a policy."""
    if isinstance(policy, Static):
        return {"loss_scale": policy.scale}
    if not isinstance(policy, Dynamic):
        raise ConfigError(
            f"DeepSpeed's configuration cannot express policy={policy!r} for float16. "
            "Write policy=dialects.DEEPSPEED, or Static(1.0) not to scale."
        )
    section = _nearest(policy)
    nearest: Any = policy_of(read_section("fp16", section, FP16))
    names = [one.name for one in fields(Dynamic) if getattr(policy, one.name) != getattr(nearest, one.name)]
    if names:
        differing = ", ".join(f"{name}={getattr(policy, name)!r}" for name in names)
        raise ConfigError(
            f"DeepSpeed's configuration cannot express {differing}. Write policy=dialects.DEEPSPEED("
            f"init_scale={nearest.init_scale!r}, scale_window={nearest.growth_interval}, "
            f"min_scale={nearest.min_scale!r}, hysteresis={nearest.hysteresis}, "
            f"consecutive_hysteresis={section['consecutive_hysteresis']}), the nearest one."
        )
    return section


def _nearest(policy: Dynamic) -> dict[str, Any]:
    """Return the nearest section: whole numbers, and the first scale a power of two."""
    power = min(max(round(math.log2(policy.init_scale)), 0), LARGEST_POWER)
    return {
        "loss_scale": 0,
        "initial_scale_power": power,
        "loss_scale_window": policy.growth_interval,
        "hysteresis": policy.hysteresis,
        "consecutive_hysteresis": policy.hysteresis_reset == "clean",
        "min_loss_scale": min(max(round(policy.min_scale or 1.0), 1), 2**power),
    }
