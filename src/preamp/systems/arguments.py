"""What every adapter checks: the policy that it was given, and the state that it is to resume from."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from preamp.checks import is_number, level_of_caller, shown, whole
from preamp.errors import PolicyError
from preamp.policy import Policy
from preamp.systems.dialects import Dialect


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


def as_whole(value: object) -> Any:
    """Return a float without a fraction, such as 2.0, as an int; anything else unchanged."""
    return int(value) if is_number(value) and value == int(value) else value


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
