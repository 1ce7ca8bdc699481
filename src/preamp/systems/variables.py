"""A scaler's state in variables, as over Keras and tf_keras: their names, and checks of loaded values.

Keras, tf_keras and `tf.train.Checkpoint` save such variables like any other, and anything can be loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from preamp.checks import level_of_caller
from preamp.errors import PolicyError
from preamp.guards import Guard
from preamp.guards.base import leaves_of
from preamp.policy import Policy
from preamp.systems.arguments import check_resumed, is_out_of_bounds, warn_if_out_of_bounds
from preamp.systems.formats.keras import nested_guard

# By the fields of `ScalerState` and of `GuardRecord`. Other fields have their own names.
NAMES = {"finite": "last_finite", "grad_norm": "last_grad_norm", "peak": "last_peak"}
GUARD_NAMES = {
    "taken": "last_taken",
    "loss": "last_loss",
    "loss_fits": "last_loss_fits",
    "limit": "last_limit",
}

S = TypeVar("S", bound=Any)  # a policy's state, a NamedTuple of floats


class KnownState(Generic[S]):
    """The policy's state that is known to be valid, to notice when the variables have other values.

    Args:
        state: the first one.
        remedy: what to write to start inside the policy's bounds, with `{bound}` in place of the number.

    Attributes:
        state: the last state that was computed, loaded or checked.
    """

    def __init__(self, state: S, remedy: str) -> None:
        self.state, self._remedy = state, remedy
        self._is_outside = False

    def resume(self, policy: Policy[S], saved: Mapping[str, Any]) -> S:
        """Return the state for saved numbers. Those that are missing start again.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.
            UserWarning: a warning, for a scale outside the policy's bounds.
        """
        self.state = check_resumed(policy, saved, self._remedy)
        self._is_outside = is_out_of_bounds(policy, self.state.scale)  # the user has been warned
        return self.state

    def check(self, policy: Policy[S], values: Sequence[float]) -> None:
        """Check values that were restored past `resume`, as `tf.train.Checkpoint` and `Variable.assign` do.

        Args:
            policy: the rule.
            values: the fields of the state.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.
            UserWarning: a warning, once, for a scale outside the policy's bounds.
        """
        state = type(self.state)(*values)
        if state == self.state:
            return
        scale = policy.restore(state._asdict()).scale
        was_outside, self._is_outside = self._is_outside, is_out_of_bounds(policy, scale)
        if self._is_outside and not was_outside:
            warn_if_out_of_bounds(policy, scale, self._remedy, of="optimizer")
        self.state = state


def guard_leaves(state: Any) -> dict[str, Any]:
    """Return the numbers and vectors of a guard's state, by the names that variables and files have."""
    return {f"guard.{name}": leaf for name, leaf in leaves_of(state)}


def resumed_guard(guard: Guard[Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the guard's state for what was saved, by the names of `guard_leaves`.

    Without a guard's state among it the guard starts; so it does, with a warning, if it is another guard's.

    Args:
        guard: the rule.
        saved: by name, vectors as lists; other names are left out.
    """
    start, state = guard.start(), nested_guard(saved)
    if not state:
        return guard_leaves(start)
    try:
        return guard_leaves(guard.restore(state))
    except PolicyError:
        warnings.warn(
            f"{guard!r} starts again: the saved state belongs to another guard, or to the same with another "
            "window.",
            stacklevel=level_of_caller("keras", "tensorflow", "tf_keras"),
        )
        return guard_leaves(start)
