"""The settings that PyTorch's constructor and checkpoints have, and the policy that they make."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from preamp.checks import is_number, shown
from preamp.errors import InexactScale, PolicyError
from preamp.policy import Compat, Dynamic, Policy
from preamp.systems.arguments import given_policy

SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
MOST_STEPS = 2**63  # of an int64


def numbers_and_settings(state_dict: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint holds: the state by name, with the number of steps, and PyTorch's settings.

    Raises:
        RuntimeError: for the empty state of a disabled scaler.
        KeyError: for a missing entry.
        PolicyError: for what neither PyTorch nor this library has written.
    """
    if not isinstance(state_dict, Mapping):
        raise PolicyError(f"{shown(state_dict)} is not a state dict. Write scaler.state_dict() to get one.")
    if not state_dict:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    more = state_dict.get("preamp_state", {})
    steps: Any = more.get("steps", 0) if isinstance(more, Mapping) else None
    if not (is_number(steps) and 0 <= steps < MOST_STEPS):
        raise PolicyError(
            f"preamp_state={shown(more)} is not what a scaler saves. Leave it out to begin afresh."
        )
    scale, settings = state_dict["scale"], {name: state_dict[name] for name in SETTINGS[1:]}
    return {**more, "steps": int(steps), "scale": scale, "good": state_dict["_growth_tracker"]}, settings


def chosen_policy(policy: Policy[Any] | None, settings: dict[str, Any]) -> Policy[Any]:
    """Return the policy for a constructor's arguments: without one, PyTorch's rule between default bounds.

    Raises:
        AssertionError: as PyTorch, for factors that cannot work.
        PolicyError: for other settings that cannot work.
    """
    if policy is None:
        if settings["growth_factor"] <= 1.0:
            raise AssertionError(f"The growth factor must be > 1.0. {_fixed('growth_factor', settings)}")
        if settings["backoff_factor"] >= 1.0:
            raise AssertionError(f"The backoff factor must be < 1.0. {_fixed('backoff_factor', settings)}")
        return Dynamic.holding(**settings, compat=Compat(factor_dtype="float64"))
    return given_policy(policy, {name: (value, getattr(Dynamic, name)) for name, value in settings.items()})


def _fixed(name: str, settings: dict[str, Any]) -> str:
    """Say what to write instead of a factor that does not move the scale."""
    return (
        f"It is {shown(settings[name])}. Write {name}={getattr(Dynamic, name)!r}, or for a scale that never "
        f"changes policy=Static({shown(settings['init_scale'])})."
    )


def changed_policy(policy: Any, **settings: Any) -> Any:
    """Return the policy with other settings, without another warning of factors that round.

    Raises:
        PolicyError: for a value that cannot work.
    """
    if settings.get("backoff_factor", policy.backoff_factor) != policy.backoff_factor:
        settings["compat"] = replace(policy.compat, backoff_divisor=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactScale)
        return replace(policy, **settings)


def setting_of(policy: Policy[Any], name: str) -> Any:
    """Return a setting of a policy; of a policy without it the usual value."""
    return getattr(policy, name, getattr(Dynamic, name))


def fits_torch_checkpoint(policy: Policy[Any]) -> bool:
    """Return whether PyTorch's checkpoint holds all that the policy's state remembers."""
    return type(policy) is Dynamic and policy.hysteresis == 1  # a subclass may remember more
