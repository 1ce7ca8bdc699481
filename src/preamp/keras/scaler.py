"""The variables of a loss scale, and one step with it.

A step unscales the gradients, checks them, updates or skips, and advances the scale. How that is done inside
a compiled program differs between Keras's backends: `Backend` is what `on_jax`, `on_tensorflow` and
`on_torch` provide. Arithmetic on gradients is that of `preamp.arrays`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import keras
import numpy as np

from preamp.arrays import Arrays, Unscaled
from preamp.checks import level_of_caller
from preamp.errors import PolicyError, UsageError
from preamp.policy import Policy, Where
from preamp.scaling import Measured, ScalerState, advance, start
from preamp.systems.arguments import check_counts, check_resumed, is_out_of_bounds, warn_if_out_of_bounds

# The advice for a scale outside the policy's bounds.
REMEDY = "optimizer.dynamic_scale.assign({bound!r}) after loading"

# The names of the variables, also in files. Those of a policy's state are Keras's own where it has one.
POLICY_NAMES = {
    "scale": "dynamic_scale",
    "good": "step_counter",
    "bad": "overflow_counter",
    "age": "age_counter",
}
NAMES = {"finite": "last_finite", "grad_norm": "last_grad_norm", "peak": "last_peak"}
COUNTS = ("steps", "skipped_steps")

OVERWRITTEN = "overwrite_with_gradient"  # true of variables that are overwritten with their "gradients"

S = TypeVar("S", bound=Any)  # the policy's own state, a NamedTuple
G = TypeVar("G")  # a gradient: a tensor, or a sparse one of the backend
T = TypeVar("T")  # a scalar of the backend, or a number
F = TypeVar("F", bound=Callable[..., Any])


class ScalerVariables(Generic[S]):
    """The Keras variables that hold a `ScalerState`: saved, traced and distributed like any other.

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
        # `advance` uses nothing of the last step's record but `exhausted_*`, if the policy can give up.
        first, last = len(self.state.policy_state), len(self.floats) - (2 if self.policy.gives_up else 0)
        # The sum is a copy: TensorFlow may read the variable's own memory, which is about to be written.
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
            numbers: the values of `floats`.
            finite: as in `advance`.
            grad_norm: as in `advance`, a number.
            stats: as in `advance`, numbers.
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
            numbers: the values of `floats` or of `variables`.

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
        """Return the policy's state for numbers by variable name. Numbers that are missing start again.

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
        return state._replace(steps=int(steps), skipped_steps=int(skipped_steps))

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
        """Count a step. `_state_of` starts the counts at 0, so that a step's counts are its increments."""
        self.state.steps.assign_add(after.steps)
        if not (isinstance(after.skipped_steps, int) and after.skipped_steps == 0):
            self.state.skipped_steps.assign_add(after.skipped_steps)


def _floats(state: ScalerState[S, T]) -> list[Any]:
    """Return the values for `ScalerVariables.floats`."""
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
    """Return the saved state of a loss scale, by the names of `ScalerVariables`; None if there is none.

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


class Backend(Protocol[G, T]):
    """What a module for one of Keras's backends provides."""

    def untraced(self, function: F, /) -> F:
        """Return a function that the backend's compiler calls, and does not convert itself."""

    def take_traced(self, step: ScaledStep[G, T], /) -> bool:
        """Take a step inside the program that is being compiled; return False where there is none.

        Raises:
            UsageError: where the scale or the variables would become constants of the program.
        """

    def update(
        self, inner: keras.Optimizer, gradients: Sequence[G | None], variables: Sequence[keras.Variable], /
    ) -> None:
        """Have the inner optimizer update the variables. Sparse gradients it cannot apply become dense."""

    def unscale(
        self, gradients: Sequence[G], variables: Sequence[keras.Variable], scale: T | None, /
    ) -> Unscaled[G, T]:
        """Unscale as `Arrays` does. With a scale of None the gradients have been divided already."""

    def write(self, values: Sequence[tuple[keras.Variable, float]], /) -> None:
        """Set scalar variables to numbers."""

    def known_scalar(self, value: object, /) -> T | None:
        """Return a scalar that can be read later; None for one that is being traced, and anything else."""

    def becomes_constant(self, value: T, /) -> bool:
        """Return whether a value that is read now would be a constant of the program being compiled."""

    def stateless_inputs(self, tensors: Sequence[T], /) -> list[T]:
        """Return tensors that Keras may write to, with the values of the given ones."""


@dataclass(slots=True)
class ScaledStep(Generic[G, T]):
    """The scaled gradients of one step, and the variables to update.

    Attributes:
        backend: the module for Keras's backend.
        arrays: the arithmetic on its tensors.
        inner: the optimizer that updates.
        scaler: the state of the loss scale.
        gradients: one for each variable; None for one without.
        variables: to be updated.
        scale: the divisor of the gradients; None if they have been divided.
    """

    backend: Backend[G, T]
    arrays: Arrays[G, T]
    inner: keras.Optimizer
    scaler: ScalerVariables[Any]
    gradients: Sequence[G | None]
    variables: Sequence[keras.Variable]
    scale: T | None

    def unscaled(self) -> Unscaled[G | None, T]:
        """Return unscaled gradients.

        A variable that Keras overwrites with its gradient, as float8 statistics are, gets it as it is.

        Raises:
            UsageError: if the inner optimizer would divide them again.
            ValueError: as Keras, if all gradients are None.
        """
        twice = self.inner.loss_scale_factor
        if twice is not None:
            raise UsageError(
                f"inner_optimizer.loss_scale_factor={twice!r} was set after it was wrapped: gradients would "
                "be divided twice. Write inner_optimizer.loss_scale_factor = None."
            )
        places: list[int] = []
        given: list[G] = []
        variables: list[keras.Variable] = []
        overwriting: list[G] = []
        for place, gradient in enumerate(self.gradients):
            if gradient is None:
                continue
            variable = self.variables[place]
            if getattr(variable, OVERWRITTEN, False):
                overwriting.append(gradient)
            else:
                places.append(place)
                given.append(gradient)
                variables.append(variable)
        if not given and not overwriting:
            raise ValueError(
                "all gradients are None. Compute the loss from these variables, where gradients are recorded."
            )
        unscaled = self.backend.unscale(given, variables, self.scale)
        result, finite = list(self.gradients), unscaled.finite
        for place, quotient in zip(places, unscaled.gradients, strict=True):
            result[place] = quotient
        if overwriting:
            finite = finite & self.arrays.all_finite(overwriting)  # type: ignore[operator]
        return Unscaled(result, finite, unscaled.norm)

    def gradient_stats(self) -> Mapping[str, T]:
        """Return the statistics of the scaled gradients that the policy needs, by the fields of `Reading`."""
        policy = self.scaler.policy
        if not policy.needs:
            return {}
        gradients = [
            gradient
            for gradient, variable in zip(self.gradients, self.variables, strict=True)
            if gradient is not None and not getattr(variable, OVERWRITTEN, False)
        ]
        if self.scale is not None:
            return self.arrays.gradient_stats(policy.needs, policy.edge, gradients)
        # The gradients are already divided, so the edge is too. Only on TensorFlow, where it can be a tensor.
        scale = self.scaler.state.policy_state.scale.value
        stats = self.arrays.gradient_stats(policy.needs, policy.edge / scale, gradients)
        return {name: value * scale if name == "peak" else value for name, value in stats.items()}

    def take_on_host(self) -> None:
        """Take the step where numbers can be read: one read, then Python decides.

        Raises:
            ScaleExhausted: if the policy gives up on this step.
        """
        scaler = self.scaler
        stats = self.gradient_stats()  # before they are unscaled in place
        unscaled = self.unscaled()
        state_values = [variable.value for variable in scaler.floats]
        numbers = self.arrays.read([unscaled.finite, unscaled.norm, *stats.values(), *state_values])
        finite, norm = bool(numbers[0]), numbers[1]
        state = numbers[2 + len(stats) :]
        scaler.check(state)
        if finite and self.scale is not None and state[0] < 1.0:  # dividing by it can overflow
            present = [gradient for gradient in unscaled.gradients if gradient is not None]
            finite = bool(self.arrays.read([self.arrays.all_finite(present)])[0])
        if finite:
            self.backend.update(self.inner, unscaled.gradients, self.variables)
        measured = dict(zip(stats, numbers[2:], strict=False)) if stats else {}
        scaler.advance_on_host(state, finite, norm, measured, self.backend.write)
