"""The policy of the section `fp16`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preamp.errors import ConfigError
from preamp.policy import Policy, Static
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
