"""A scaler's state in variables, as with Keras and tf_keras: their names, and checks of loaded values.

Keras, tf_keras and `tf.train.Checkpoint` save such variables like any other, and may load anything into them.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from preamp.checks import level_of_caller
from preamp.errors import CheckpointError, PolicyError
from preamp.guards import Guard
from preamp.guards.base import leaves_of
from preamp.policy import Policy
from preamp.systems.arguments import check_resumed, is_out_of_bounds, warn_if_out_of_bounds

# By the fields of `ScalerState` and of `GuardRecord`. Other fields have their own names.
NAMES = {"finite": "last_finite", "grad_norm": "last_grad_norm", "peak": "last_peak"}
GUARD_NAMES = {
    "taken": "last_taken",
    "loss": "last_loss",
    "loss_fits": "last_loss_fits",
    "limit": "last_limit",
}
TRACKED_GUARD = "guard_"  # begins the name of the object that has a guard's state in a `tf.train.Checkpoint`
OTHER_GUARD = (
    "the saved state belongs to another guard, or to the same guard with another window. To resume from it "
    "write guard= as in the run that saved it."
)

S = TypeVar("S", bound=Any)  # a policy's state, a NamedTuple of floats


class KnownState(Generic[S]):
    """The last policy state that is known to be valid, to notice when the variables have other values.

    Args:
        state: the first state.
        remedy: what to write to start inside the policy's bounds, with `{bound}` in place of the number.

    Attributes:
        state: the last state that was computed, loaded or checked.
    """

    def __init__(self, state: S, remedy: str) -> None:
        self.state, self._remedy = state, remedy
        self._is_outside = False

    def resume(self, policy: Policy[S], saved: Mapping[str, Any]) -> S:
        """Return the state for saved numbers. Missing numbers start again.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.

        Warns:
            UserWarning: for a scale outside the policy's bounds.
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

        Warns:
            UserWarning: once, for a scale outside the policy's bounds.
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


def checkpoint_key(guard: Guard[Any]) -> str:
    """Return the name that the state of a guard has in a `tf.train.Checkpoint`.

    TensorFlow restores variables by name, and fails if the shape differs. So the name depends on the names
    and lengths in the state: no part of the state of another guard is restored into this one's.
    """
    lengths = [(name, len(leaf) if isinstance(leaf, tuple) else 0) for name, leaf in leaves_of(guard.start())]
    return f"{TRACKED_GUARD}{zlib.crc32(repr(lengths).encode()):08x}"


def warn_if_other_guard(guard: Guard[Any] | None, name: str) -> None:
    """Warn if a name in a `tf.train.Checkpoint` is that of a guard's state which is not restored.

    Args:
        guard: the rule, if there is one.
        name: any name in the checkpoint; others are ignored.
    """
    if not name.startswith(TRACKED_GUARD):
        return
    if guard is None:
        warn_of_dropped_guard()
    elif name != checkpoint_key(guard):
        warnings.warn(
            f"The state of {guard!r} is not restored: {OTHER_GUARD}",
            stacklevel=level_of_caller("keras", "tensorflow", "tf_keras"),
        )


def has_guard(saved: Mapping[str, Any]) -> bool:
    """Return whether an optimizer with a guard saved these values, which are by name."""
    return GUARD_NAMES["taken"] in saved or bool(_nested_guard(saved))


def warn_of_dropped_guard() -> None:
    """Warn that a guard's state is not loaded, because there is no guard."""
    warnings.warn(
        "The checkpoint holds the state of a guard, and this optimizer has none: spikes are not skipped. "
        "Write LossScaleOptimizer(..., guard=SpikeGuard()), with the guard that was saved, and load again.",
        stacklevel=level_of_caller("keras", "tensorflow", "tf_keras"),
    )


def resumed_guard(guard: Guard[Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the guard's state for what was saved, by the names of `guard_leaves`.

    If the saved values include no guard's state, or with a warning that of another guard, the guard starts
    anew.

    Args:
        guard: the rule.
        saved: values by name, vectors as lists; other names are ignored.
    """
    start, state = guard.start(), _nested_guard(saved)
    if not state:
        return guard_leaves(start)
    try:
        return guard_leaves(guard.restore(state))
    except PolicyError:
        warnings.warn(
            f"{guard!r} starts again: {OTHER_GUARD}",
            stacklevel=level_of_caller("keras", "tensorflow", "tf_keras"),
        )
        return guard_leaves(start)


def _nested_guard(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a guard's state for variables by name, such as "guard.loss.level"; empty if there are none."""
    state: dict[str, Any] = {}
    for name, value in saved.items():
        parts = str(name).split(".")
        if parts[0] == "guard" and len(parts) > 1:
            inside: Any = state
            for part in parts[1:-1]:
                inside = inside.setdefault(part, {})
                if not isinstance(inside, dict):
                    raise CheckpointError(
                        f"the saved {name} is inside a number. Leave it out to start again."
                    )
            inside[parts[-1]] = value
    return state
