"""Validation of a LossScaleOptimizer's arguments, the same in every framework."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from preamp.checks import FLOAT32_MAX, is_number, level_of_caller, not_subnormal, positive, shown, whole
from preamp.errors import PolicyError
from preamp.policy import Policy
from preamp.systems.dialects import Dialect

INITIAL_SCALE = 2.0**15
INTERVAL = 2000
LONGEST = 2**24  # a float32 counter counts no further

# The arguments that every optimizer of Keras implements, with the values that mean "not given".
UNUSED: dict[str, Any] = {
    "weight_decay": None,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "gradient_accumulation_steps": None,
}


def given_policy(policy: Policy[Any], instead: Mapping[str, tuple[Any, Any]]) -> Policy[Any]:
    """Return the policy that was given, or the policy of a dialect.

    Args:
        policy: what the user gave.
        instead: the other arguments that describe a rule, each with its default.
    """
    if not isinstance(policy, Policy):
        raise PolicyError(f"policy={shown(policy)} is not a policy. Write {_policy_like(policy)}.")
    for name, (value, default) in instead.items():
        if value != default:
            raise PolicyError(
                f"policy={policy!r} and {name}={value!r} are both given. Write {name} in the policy."
            )
    return policy.policy if isinstance(policy, Dialect) else policy


def _policy_like(given: object) -> str:
    """Return what to write instead of something that is not a policy."""
    if is_number(given) and given > 0.0:
        scale = float(given)
        return (
            f"policy=Static({scale!r}) for a fixed scale, or policy=Dynamic(init_scale={scale!r}) to start "
            "at it"
        )
    if isinstance(given, type) and issubclass(given, Policy):
        return f"policy={given.__name__}()"
    return "policy=Dynamic() or policy=dialects.TORCH"


def refuse_unknown(unknown: Mapping[str, object], error: type[PolicyError] = PolicyError) -> None:
    """Refuse arguments that a LossScaleOptimizer does not have, all of them in one error, as Keras does."""
    if unknown:
        raise error(
            f"LossScaleOptimizer does not support arguments: `{'`, `'.join(unknown)}`. Write settings of the "
            "update in the inner optimizer, as in Adam(beta_1=0.8), and leave out the others."
        )


def as_whole(value: object) -> Any:
    """Return a float without a fraction, such as 2.0, as an int; anything else unchanged."""
    return int(value) if is_number(value) and value == int(value) else value


def check_scale(initial_scale: Any, dynamic_growth_steps: Any) -> None:
    """Refuse an invalid first scale or interval."""
    positive("initial_scale", initial_scale, "initial_scale=2.0**15")
    not_subnormal("initial_scale", initial_scale)
    if initial_scale > FLOAT32_MAX:
        raise PolicyError(
            f"initial_scale={shown(initial_scale)} is inf in float32, the dtype of the loss scale. "
            "Write initial_scale=2.0**15."
        )
    whole("dynamic_growth_steps", dynamic_growth_steps, least=1, instead="dynamic_growth_steps=2000")


def check_counted(dynamic_growth_steps: int, instead: str) -> None:
    """Refuse an interval that a float32 counter of clean steps never reaches."""
    if dynamic_growth_steps > LONGEST:
        raise PolicyError(
            f"dynamic_growth_steps={dynamic_growth_steps!r} is more than 2**24, the most that the counter "
            f"can hold. Write {instead} for a scale that does not move."
        )


def check_resumed(policy: Policy[Any], saved: Mapping[str, Any], instead: str) -> Any:
    """Return the policy's state for saved numbers, checked; warn of a scale that is out of bounds."""
    state = policy.restore(saved)
    warn_if_out_of_bounds(policy, state.scale, instead)
    return state


def check_counts(saved: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse saved counts of steps that are not whole numbers of at least 0."""
    for name in names:
        if name in saved:
            whole(name, as_whole(saved[name]), least=0, instead=f"{name}=0")


def is_out_of_bounds(policy: object, scale: float) -> bool:
    """Return whether a scale is below the floor or above the ceiling of a policy."""
    return _bound_crossed(policy, scale) is not None


def warn_if_out_of_bounds(policy: object, scale: float, instead: str, *, of: str = "checkpoint") -> None:
    """Warn of a scale to resume from that is below the floor or above the ceiling of the policy.

    Args:
        policy: the rule; one without bounds allows any scale.
        scale: the scale to resume from.
        instead: what to write to start inside the bounds, with `{bound}` in place of the number.
        of: where the scale comes from.
    """
    crossed = _bound_crossed(policy, scale)
    if crossed is None:
        return
    side, name, bound = crossed
    kind = type(policy).__name__
    warnings.warn(
        f"the {of}'s loss scale {scale!r} is {side} {name}={bound!r} of {kind}. Training resumes at that "
        "scale, and the bound applies again once the policy has moved it back. "
        f"Write policy={kind}({name}={scale!r}) to allow it, or {instead.format(bound=bound)} "
        "to start inside.",
        UserWarning,
        stacklevel=level_of_caller("keras", "tensorflow", "tf_keras", "jax"),
    )


def _bound_crossed(policy: object, scale: float) -> tuple[str, str, float] | None:
    """Return the side, the name and the value of the bound that a scale crosses; None inside.

    With `Compat(bounds="moves")` the first scale may be outside; then scales up to that one are allowed.
    """
    floor, ceiling = getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)
    first = getattr(policy, "init_scale", scale)
    if floor is not None and scale < min(floor, first):
        return "below", "min_scale", floor
    if ceiling is not None and scale > max(ceiling, first):
        return "above", "max_scale", ceiling
    return None


def check_limits(**limits: float | None) -> None:
    """Refuse invalid limits, decays and factors, and two ways to clip at once."""
    for name, value in limits.items():
        if value is None:
            continue
        if name != "weight_decay":
            positive(name, value, f"{name}=1.0, or None")
        elif not (is_number(value) and value >= 0.0):
            raise PolicyError(
                f"weight_decay={shown(value)} is not a finite number of at least 0. "
                "Write weight_decay=0.004, or None for no decay."
            )
    clips = {name: value for name, value in limits.items() if name.startswith(("clip", "global_clip"))}
    given = [f"{name}={value!r}" for name, value in clips.items() if value is not None]
    if len(given) > 1:
        raise PolicyError(f"{' and '.join(given)} are both given. Write only one of them.")


def check_averaging(
    ema_momentum: object,
    ema_overwrite_frequency: object,
    gradient_accumulation_steps: object,
) -> None:
    """Refuse a momentum outside 0 to 1, and counts that are not whole numbers above 0."""
    if not (is_number(ema_momentum) and 0.0 <= ema_momentum <= 1.0):
        raise PolicyError(f"ema_momentum={ema_momentum!r} is not in [0, 1]. Write ema_momentum=0.99.")
    for name, value, least in (
        ("ema_overwrite_frequency", ema_overwrite_frequency, 1),
        ("gradient_accumulation_steps", gradient_accumulation_steps, 2),
    ):
        if value is not None:
            whole(name, value, least=least, instead=f"{name}=None")
