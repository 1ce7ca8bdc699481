"""The Keras variables that hold a `ScalerState`: saved, traced and distributed like any other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import keras
import numpy as np

from preamp.checks import level_of_caller
from preamp.errors import PolicyError
from preamp.policy import Policy, Where
from preamp.scaling import Measured, ScalerState, advance, start
from preamp.systems.arguments import check_counts, check_resumed, is_out_of_bounds, warn_if_out_of_bounds

# What to write to start inside the policy's bounds.
REMEDY = "optimizer.dynamic_scale.assign({bound!r}) after loading"

# The names of the variables, in files as well: those of Keras for what a policy's state has.
POLICY_NAMES = {
    "scale": "dynamic_scale",
    "good": "step_counter",
    "bad": "overflow_counter",
    "age": "age_counter",
}
NAMES = {"finite": "last_finite", "grad_norm": "last_grad_norm", "peak": "last_peak"}
COUNTS = ("steps", "skipped_steps")

S = TypeVar("S", bound=Any)  # the policy's own state, a NamedTuple
T = TypeVar("T")  # a scalar of the backend, or a number


class ScalerVariables(Generic[S]):
    """The variables of one loss scale.

    Args:
        policy: the rule in force.
        make: makes a scalar variable of (name, first value, dtype).

    Attributes:
        policy: the rule in force. Another one with the same kind of state may be put in its place.
        state: the variables, in the place of the numbers that they hold. `steps` and `skipped_steps` are
            integers, the others float32.
        floats: the float32 ones, in the order of the state's fields.
        variables: all of them.
    """

    def __init__(self, policy: Policy[S], make: Callable[[str, float, str], keras.Variable]) -> None:
        first = start(policy, takes_norm=True)
        self.policy = policy
        policy_variables = [
            make(POLICY_NAMES.get(name, name), value, "float32")
            for name, value in first.policy_state._asdict().items()
        ]
        others = {
            name: None if value is None else make(NAMES.get(name, name), value, "float32")
            for name, value in first._asdict().items()
            if name not in ("policy_state", *COUNTS)
        }
        steps, skipped_steps = (make(name, 0, "int") for name in COUNTS)
        self.state: ScalerState[Any, keras.Variable] = ScalerState(
            type(first.policy_state)(*policy_variables),
            **others,
            steps=steps,
            skipped_steps=skipped_steps,
        )
        self.floats = [*policy_variables, *(variable for variable in others.values() if variable is not None)]
        self.variables = [*self.floats, steps, skipped_steps]
        self._checked: tuple[float, ...] = tuple(first.policy_state)  # values that are known to be valid
        self._is_outside = False

    def advance(self, finite: T | bool, grad_norm: T, stats: Mapping[str, T], where: Where) -> None:
        """Advance the state in a program that is being compiled.

        Args:
            finite: whether the gradients are finite.
            grad_norm: global L2 norm of the unscaled gradients.
            stats: the `peak` and `share` of the scaled ones, as far as the policy needs them.
            where: the backend's ``where(condition, yes, no)``.
        """
        # Of the record of the last step a policy needs to know whether it gave up, if it does that.
        first, last = len(self.state.policy_state), len(self.floats) - (2 if self.policy.gives_up else 0)
        # The sum is a copy: what TensorFlow reads is the variable's memory, which is about to be written.
        before = [
            variable.value + 0.0 if place < first or place >= last else None
            for place, variable in enumerate(self.floats)
        ]
        state = self._state_of(before)
        measured = Measured(finite, state.policy_state.scale, grad_norm, **stats)
        after, _ = advance(self.policy, state, measured, where)
        after = after._replace(finite=where(finite, 1.0, 0.0))
        for variable, old, new in zip(self.floats, before, _floats(after), strict=True):
            if new is not old:
                variable.assign(new)
        self._count(after)

    def advance_on_host(
        self,
        numbers: Sequence[float],
        finite: bool,
        grad_norm: float,
        stats: Mapping[str, float],
        write: Callable[[Sequence[tuple[keras.Variable, float]]], None],
    ) -> None:
        """Advance the state where its numbers have been read.

        Args:
            numbers: what `floats` hold.
            finite: as in `advance`, like the next two.
            grad_norm: a number.
            stats: numbers.
            write: sets variables to numbers.

        Raises:
            ScaleExhausted: if the policy gives up on this step.
        """
        state = self._state_of(numbers)
        measured = Measured(finite, state.policy_state.scale, grad_norm, **stats)
        after, gave_up = advance(self.policy, state, measured)
        self._checked = tuple(after.policy_state)
        changes = zip(self.floats, numbers, _floats(after), strict=True)
        write([(variable, new) for variable, old, new in changes if new != old])
        self._count(after)
        if gave_up:
            raise self.policy.exhaustion_from(state.policy_state)

    def check(self, numbers: Sequence[float]) -> None:
        """Check a state that was restored past `load`, as `tf.train.Checkpoint` and `Variable.assign` do.

        Args:
            numbers: what `floats` or `variables` hold.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.
            UserWarning: a warning, once, for a scale outside the policy's bounds.
        """
        fields = self.state.policy_state._fields
        values = tuple(numbers[: len(fields)])
        if values == self._checked:
            return
        restored = self.policy.restore(dict(zip(fields, values, strict=True)))
        was_outside, self._is_outside = self._is_outside, is_out_of_bounds(self.policy, restored.scale)
        if self._is_outside and not was_outside:
            warn_if_out_of_bounds(self.policy, restored.scale, REMEDY, of="optimizer")
        self._checked = values

    def checked_state(self, saved: Mapping[str, float]) -> S:
        """Return the policy's state for numbers by the names of the variables; what is missing starts again.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.
            UserWarning: a warning, for a scale outside the policy's bounds.
        """
        check_counts(saved, [self.state.steps.name, self.state.skipped_steps.name])
        pairs = self.state.policy_state._asdict().items()
        found = {name: saved[variable.name] for name, variable in pairs if variable.name in saved}
        state: S = check_resumed(self.policy, found, REMEDY)
        self._is_outside = is_out_of_bounds(self.policy, state.scale)  # the user has been warned
        return state

    def load(self, saved: Mapping[str, float]) -> None:
        """Set the variables to saved numbers, by name; warn of a state that training cannot resume from.

        That a policy gave up is not loaded: the training that begins here may do better.
        """
        try:
            state = self.checked_state(saved)
        except PolicyError as problem:
            state, saved = self.policy.start(), {}
            warnings.warn(
                f"the loss scale starts again, at {state.scale}, and not where the file has it: {problem}",
                stacklevel=level_of_caller("keras", "tensorflow"),
            )
        for variable, value in zip(self.state.policy_state, state, strict=True):
            variable.assign(value)
        self._checked = tuple(state)
        for variable in self.variables[len(state) :]:
            if variable.name.startswith("exhausted"):
                variable.assign(0.0)
            elif variable.name in saved:
                variable.assign(saved[variable.name])

    def state_of(self, numbers: Sequence[float]) -> ScalerState[S, float]:
        """Return the state for the numbers that `variables` hold.

        Raises:
            PolicyError: as `check`.
        """
        self.check(numbers)
        *floats, steps, skipped_steps = numbers
        state = self._state_of(floats)
        is_unknown = state.grad_norm is not None and math.isnan(state.grad_norm)
        grad_norm = None if is_unknown else state.grad_norm
        return state._replace(grad_norm=grad_norm, steps=int(steps), skipped_steps=int(skipped_steps))

    def _state_of(self, values: Sequence[T]) -> ScalerState[S, T]:
        """Return the state for the values of `floats`. Its counts are 0."""
        count = len(self.state.policy_state)
        last_scale, finite, grad_norm, *peak, exhausted_scale, overflows = values[count:]
        policy_state = type(self.state.policy_state)(*values[:count])
        return ScalerState(
            policy_state,
            last_scale,
            finite,
            grad_norm,
            peak[0] if peak else None,
            exhausted_scale,
            overflows,
            steps=0,
            skipped_steps=0,
        )

    def _count(self, after: ScalerState[S, T]) -> None:
        """Count a step: `_state_of` has counts of 0, so that those after a step are what it adds."""
        self.state.steps.assign_add(after.steps)
        if not (isinstance(after.skipped_steps, int) and after.skipped_steps == 0):
            self.state.skipped_steps.assign_add(after.skipped_steps)


def _floats(state: ScalerState[S, T]) -> list[Any]:
    """Return what `ScalerVariables.floats` are to hold."""
    peaks = [] if state.peak is None else [state.peak]
    return [
        *state.policy_state,
        state.last_scale,
        state.finite,
        state.grad_norm,
        *peaks,
        state.exhausted_scale,
        state.exhausted_overflows,
    ]


def saved_state(store: Mapping[str, Any]) -> dict[str, float] | None:
    """Return what a file says of a loss scale, by the names of `ScalerVariables`; None if nothing.

    Args:
        store: the optimizer's own variables in a file: names or numbers to arrays.
    """
    names = set(store.keys())
    if "dynamic_scale" in names:
        return {name: float(np.asarray(store[name])) for name in names if not name.isdecimal()}
    if not {"2", "3"} <= names:
        return None
    # Keras numbers them: iteration, learning rate, counter, scale, then the inner optimizer's.
    counter, scale = np.asarray(store["2"]), np.asarray(store["3"])
    if counter.shape or scale.shape or counter.dtype.kind not in "iu":
        return None
    return {"step_counter": float(counter), "dynamic_scale": float(scale)}
