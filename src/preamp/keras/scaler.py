"""The variables of a loss scale, and one step with it.

A step unscales the gradients, checks them, updates or skips, and advances the scale. How that is done inside
a compiled program differs between Keras's backends: `on_jax`, `on_tensorflow` and `on_torch` implement
`Backend`. `preamp.arrays` has the arithmetic on gradients.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import keras
import numpy as np

from preamp.arrays import LARGEST_NORM, LEAST_NORM, Arrays, Unscaled
from preamp.checks import FLOAT32_MAX, level_of_caller
from preamp.errors import PolicyError, UsageError
from preamp.guards import Guard
from preamp.guards.base import map_state
from preamp.guards.skips import SkipsInARow
from preamp.keras.inner import optimizer_of, optimizers_in
from preamp.policy import Policy, Where, choose
from preamp.scaling import GuardRecord, Measured, ScalerState, advance, judge, start
from preamp.systems.arguments import check_counts
from preamp.systems.variables import (
    GUARD_NAMES,
    NAMES,
    KnownState,
    guard_leaves,
    has_guard,
    resumed_guard,
    warn_of_dropped_guard,
)

# The advice for a scale outside the policy's bounds.
REMEDY = "optimizer.dynamic_scale.assign({bound!r}) after loading"

# The names of the variables of a policy's state, also in files: Keras's own where it has one.
POLICY_NAMES = {
    "scale": "dynamic_scale",
    "good": "step_counter",
    "bad": "overflow_counter",
    "age": "age_counter",
}
COUNTS = ("steps", "skipped_steps")

# What is wrong with `apply` where JAX compiles it.
APPLY_IN_JIT = (
    "apply inside jit or vmap would leave tracers in the optimizer's variables, and its scale would be a "
    "constant. Write stateless_apply(optimizer_variables, grads, trainable_variables), with "
    "optimizer_variables an argument and a result of the function that is compiled."
)

OVERWRITTEN = "overwrite_with_gradient"  # true of variables that are overwritten with their "gradients"

S = TypeVar("S", bound=Any)  # the policy's own state, a NamedTuple
G = TypeVar("G")  # a gradient: a tensor, or a sparse one of the backend
T = TypeVar("T")  # a scalar of the backend, or a number
F = TypeVar("F", bound=Callable[..., Any])


class NotedLosses:
    """The loss that was scaled last on each replica, until its step, for guards that use it."""

    def __init__(self) -> None:
        self._losses: dict[int, tuple[Any, object]] = {}  # the scalar, and what was given

    def note(self, replica: int, loss: object, scalar: object) -> None:
        """Remember a loss.

        Args:
            replica: whose loss it is.
            loss: as it was given.
            scalar: the same as a scalar of the backend, which may be traced; None if it is not a scalar.
        """
        self._losses[replica] = scalar, loss

    def take(self, replica: int) -> tuple[Any, str]:
        """Return the loss and forget it. If it is None, the text says why."""
        if replica not in self._losses:
            return None, "no loss was scaled since the last step"
        scalar, loss = self._losses.pop(replica)
        if scalar is not None:
            return scalar, ""
        shape = getattr(loss, "shape", ())
        with suppress(TypeError, ValueError):  # TensorFlow may not know how many dimensions there are
            shape = tuple(shape)
        what = f"has shape {shape} and type {type(loss).__name__}, and is not a floating-point scalar"
        return None, f"the loss that was scaled last {what}"


class ScalerVariables(Generic[S]):
    """The Keras variables that hold a `ScalerState`: saved, traced and distributed like any other.

    Args:
        policy: the rule in force.
        make: makes a variable from (name, first value, dtype): a scalar, or a vector if the value is a tuple.
        guard: the rule that skips spikes, if there is one.

    Attributes:
        policy: the rule in force. It may be replaced by one with the same kind of state.
        guard: the rule that skips spikes, if there is one.
        state: a `ScalerState` of variables instead of numbers. `steps` and `skipped_steps` are integers, the
            others float32.
        floats: the float32 scalars that a step's record is read from: all but the guard's own state.
        guard_leaves: by name, the variables of the guard's own state: float32 scalars and vectors.
        variables: `floats`, and the two integers.
        saved: all variables.
    """

    def __init__(
        self,
        policy: Policy[S],
        make: Callable[[str, float | tuple[float, ...], str], keras.Variable],
        guard: Guard[Any] | None = None,
    ) -> None:
        first = start(policy, takes_norm=True, guard=guard)
        self.policy, self.guard = policy, guard
        policy_variables = [
            make(POLICY_NAMES.get(name, name), value, "float32")
            for name, value in first.policy_state._asdict().items()
        ]
        others = {
            name: None if value is None else make(NAMES.get(name, name), value, "float32")
            for name, value in first._asdict().items()
            if name not in ("policy_state", "guard", *COUNTS)
        }
        record, of_record = None, []
        self.guard_leaves: dict[str, keras.Variable] = {}
        if first.guard is not None:
            of_record = [make(n, float(getattr(first.guard, f)), "float32") for f, n in GUARD_NAMES.items()]
            leaves = guard_leaves(first.guard.state)
            self.guard_leaves = {name: make(name, value, "float32") for name, value in leaves.items()}
            remaining = iter(self.guard_leaves.values())
            record = GuardRecord(map_state(lambda _: next(remaining), first.guard.state), *of_record)
        steps, skipped_steps = (make(name, 0, "int") for name in COUNTS)
        self.state: ScalerState[Any, keras.Variable] = ScalerState(
            type(first.policy_state)(*policy_variables),
            **others,
            steps=steps,
            skipped_steps=skipped_steps,
            guard=record,
        )
        present = {name: variable for name, variable in others.items() if variable is not None}
        self._measured = list(present)  # the fields of `floats` between the policy's and the guard's
        self.floats = [*policy_variables, *present.values(), *of_record]
        self.variables = [*self.floats, steps, skipped_steps]
        self.saved = [*self.variables, *self.guard_leaves.values()]
        self._known = KnownState(first.policy_state, REMEDY)
        self._skips = None if guard is None else SkipsInARow(guard)
        self._is_compiled = False

    def measured(
        self, finite: T | bool, grad_norm: T, peak: T | None = None, loss: T | None = None
    ) -> Measured[Any]:
        """Return what was measured in a step of a program that is being compiled.

        Args:
            finite: whether the gradients are finite.
            grad_norm: global L2 norm of the unscaled gradients.
            peak: the largest magnitude among the scaled gradients, if the policy needs it.
            loss: the loss, for a guard that uses it.
        """
        # The sum is a copy: TensorFlow may read the variable's own memory, which is about to be written.
        scale = self.state.policy_state.scale.value + 0.0
        return Measured(finite, scale, grad_norm, peak, loss)

    def judge(self, measured: Measured[Any], where: Where) -> GuardRecord[Any] | None:
        """Return what the guard decides in a program that is being compiled; None without a guard."""
        if self.guard is None:
            return None
        self._is_compiled = True
        return judge(self.guard, self._guard_state(lambda variable: variable.value + 0.0), measured, where)

    def note_compiled(self, taken: bool, finite: bool) -> None:
        """Note a step of a compiled program that has been read, for the warning of a guard that skips all.

        Steps that are decided on the host have been noted there.
        """
        if self._skips is not None and self._is_compiled:
            self._skips.note(taken, finite, "keras", "tensorflow", "torch")

    def advance(self, measured: Measured[Any], where: Where, judged: GuardRecord[Any] | None = None) -> None:
        """Advance the state in a program that is being compiled.

        Args:
            measured: from `measured`.
            where: the backend's ``where(condition, yes, no)``.
            judged: from `judge`.
        """
        # `advance` uses nothing of the last step's record but `exhausted_*`, if the policy can give up.
        first, gives_up = len(self.state.policy_state), self.policy.gives_up
        exhausted = [self.state.exhausted_scale, self.state.exhausted_overflows]
        is_used = [
            place < first or (gives_up and any(variable is other for other in exhausted))
            for place, variable in enumerate(self.floats)
        ]
        before = [
            variable.value + 0.0 if used else None
            for variable, used in zip(self.floats, is_used, strict=True)
        ]
        state = self._state_of(before)
        after, _ = advance(self.policy, state, measured, where, judged)
        after = after._replace(finite=where(measured.finite, 1.0, 0.0))
        if judged is not None:
            flags = {name: where(getattr(judged, name), 1.0, 0.0) for name in ("taken", "loss_fits")}
            after = after._replace(guard=judged._replace(**flags))
            for variable, new in zip(self.guard_leaves.values(), _leaves(judged.state), strict=True):
                variable.assign(new)
        for variable, old, new in zip(self.floats, before, self._floats_of(after), strict=True):
            if new is not old:
                variable.assign(new)
        self._count(after)

    def read_guard(self, numbers: Sequence[float]) -> Any:
        """Return the guard's state on the host.

        Args:
            numbers: the values of `guard_scalars`.
        """
        scalars = iter(numbers)

        def value_of(variable: keras.Variable) -> float | tuple[float, ...]:
            if not len(variable.shape):
                return next(scalars)
            return tuple(keras.ops.convert_to_numpy(variable.value).tolist())

        return self._guard_state(value_of)

    @property
    def guard_scalars(self) -> list[keras.Variable]:
        """The variables of the guard's state that are scalars."""
        return [variable for variable in self.guard_leaves.values() if not len(variable.shape)]

    def advance_on_host(
        self,
        numbers: Sequence[float],
        measured: Measured[float],
        write: Callable[[Sequence[tuple[keras.Variable, float | tuple[float, ...]]]], None],
        guard_state: Any = None,
        judged: GuardRecord[float] | None = None,
    ) -> None:
        """Advance the state on the host, where its numbers have been read.

        Args:
            numbers: the values of `floats`.
            measured: what was measured, in numbers.
            write: sets variables to numbers, and vectors to tuples.
            guard_state: from `read_guard`.
            judged: what the guard decides, if there is one.

        Raises:
            ScaleExhausted: if the policy gives up on this step.
        """
        state = self._state_of(numbers)
        after, gave_up = advance(self.policy, state, measured, choose, judged)
        self._known.state = after.policy_state
        changes = list(zip(self.floats, numbers, self._floats_of(after), strict=True))
        if after.guard is not None:
            changes += zip(
                self.guard_leaves.values(), _leaves(guard_state), _leaves(after.guard.state), strict=True
            )
        write([(variable, new) for variable, old, new in changes if new != old])
        self._count(after)
        if self._skips is not None and judged is not None:
            self._is_compiled = False
            self._skips.note(bool(judged.taken), measured.finite, "keras", "tensorflow", "torch")
        if gave_up:
            raise self.policy.exhaustion_from(state.policy_state)

    def check(self, numbers: Sequence[float]) -> None:
        """Check a state that was restored past `load`, as `tf.train.Checkpoint` and `Variable.assign` do.

        Args:
            numbers: the values of `floats` or of `variables`.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.

        Warns:
            UserWarning: once, for a scale outside the policy's bounds.
        """
        self._known.check(self.policy, numbers[: len(self.state.policy_state)])

    def checked_state(self, saved: Mapping[str, float]) -> S:
        """Return the policy's state for numbers by variable name. Missing numbers start again.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.

        Warns:
            UserWarning: for a scale outside the policy's bounds.
        """
        check_counts(saved, [self.state.steps.name, self.state.skipped_steps.name])
        pairs = self.state.policy_state._asdict().items()
        found = {name: saved[variable.name] for name, variable in pairs if variable.name in saved}
        return self._known.resume(self.policy, found)

    def load(self, saved: Mapping[str, float]) -> None:
        """Set the variables to saved numbers, by name; warn of a state that training cannot resume from.

        That a policy gave up is not loaded: the training that begins here may do better.
        """
        try:
            state = self.checked_state(saved)
        except PolicyError as problem:
            state = self._known.state = self.policy.start()
            saved = {}
            warnings.warn(
                f"the loss scale starts again at {state.scale} instead of the value in the file: {problem}",
                stacklevel=level_of_caller("keras", "tensorflow"),
            )
        for variable, value in zip(self.state.policy_state, state, strict=True):
            variable.assign(value)
        for variable in self.variables[len(state) :]:
            if variable.name.startswith("exhausted"):
                variable.assign(0.0)
            elif variable.name in saved:
                variable.assign(saved[variable.name])
        if self.guard is not None:
            first = start(self.policy, guard=self.guard).guard
            for field, name in GUARD_NAMES.items():
                getattr(self.state.guard, field).assign(saved.get(name, float(getattr(first, field))))
            for name, value in resumed_guard(self.guard, saved).items():
                self.guard_leaves[name].assign(np.asarray(value, "float32"))
        elif has_guard(saved):
            warn_of_dropped_guard()

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
        remaining = iter(values)
        policy_state = type(self.state.policy_state)(*[next(remaining) for _ in self.state.policy_state])
        record = dict.fromkeys(("grad_norm", "peak")) | {name: next(remaining) for name in self._measured}
        guard = None if self.guard is None else GuardRecord(None, *remaining)
        return ScalerState(policy_state, **record, steps=0, skipped_steps=0, guard=guard)

    def _floats_of(self, state: ScalerState[S, T]) -> list[Any]:
        """Return the values for `floats`."""
        record = [getattr(state, name) for name in self._measured]
        of_guard = [] if state.guard is None else [getattr(state.guard, field) for field in GUARD_NAMES]
        return [*state.policy_state, *record, *of_guard]

    def _guard_state(self, value_of: Callable[[keras.Variable], Any]) -> Any:
        """Return the guard's state, with a function applied to its variables."""
        assert self.state.guard is not None  # asked only with a guard
        return map_state(value_of, self.state.guard.state)

    def _count(self, after: ScalerState[S, T]) -> None:
        """Count a step. `_state_of` starts the counts at 0, so that a step's counts are its increments."""
        self.state.steps.assign_add(after.steps)
        if not (isinstance(after.skipped_steps, int) and after.skipped_steps == 0):
            self.state.skipped_steps.assign_add(after.skipped_steps)


def _leaves(guard_state: Any) -> list[Any]:
    return list(guard_leaves(guard_state).values())


def saved_state(store: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the saved state of a loss scale, by the names of `ScalerVariables`; None if there is none.

    Vectors are lists.

    Args:
        store: the optimizer's own variables in a file: names or numbers to arrays.
    """
    names = set(store.keys())
    if "dynamic_scale" in names:
        return {name: np.asarray(store[name], float).tolist() for name in names if not name.isdecimal()}
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
        """Unscale as `Arrays` does. With a scale of None the gradients have already been divided."""

    def write(self, values: Sequence[tuple[keras.Variable, float | tuple[float, ...]]], /) -> None:
        """Set scalar variables to numbers, and vectors to tuples of them."""

    def known_scalar(self, value: object, /) -> T | None:
        """Return a scalar that can be read later; None for one that is being traced, and anything else."""

    def scalar(self, value: object, /) -> T | None:
        """Return a scalar that `apply` of the same step can use, traced or not; None for anything else."""

    def is_concrete(self, value: T | None, /) -> bool:
        """Return whether a result of `scalar` can be read."""

    def replica(self) -> int:
        """Return a number for the replica whose code this is."""

    def has_value(self, variable: keras.Variable, /) -> bool:
        """Return whether a variable has a value here."""

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
        variables: the variables to update.
        scale: the divisor of the gradients; None if they have already been divided.
        loss: the loss that was scaled for this step, if the guard uses it.
        no_loss: the reason if there is none.
        scale_loss: the code that scales a loss, for messages.
    """

    backend: Backend[G, T]
    arrays: Arrays[G, T]
    inner: keras.Optimizer
    scaler: ScalerVariables[Any]
    gradients: Sequence[G | None]
    variables: Sequence[keras.Variable]
    scale: T | None
    loss: T | None = None
    no_loss: str = ""
    scale_loss: str = "optimizer.scale_loss"

    @property
    def needs_norm(self) -> bool:
        """Whether a guard decides by the norm."""
        return self.scaler.guard is not None and "grad_norm" in self.scaler.guard.uses

    def loss_where(self, is_usable: bool) -> T | None:
        """Return the loss for the guard; None if it uses none.

        Args:
            is_usable: whether the loss, if there is one, belongs to the program that this code is part of.

        Raises:
            PolicyError: if the guard uses the loss, and it is not known here.
        """
        guard = self.scaler.guard
        if guard is None or "loss" not in guard.uses:
            return None
        if self.loss is None or not is_usable:
            why, what = self.no_loss, f"{self.scale_loss}(keras.ops.mean(loss)), a scalar, in each step"
            if self.loss is not None:
                why = "the loss was scaled in another program than this one, which is compiled by itself"
                what = f"{self.scale_loss}(loss) in the function that is compiled"
            raise PolicyError(
                f"{guard!r} uses the loss, and {why}. Write {what}, before its gradients are applied; or "
                'guard=SpikeGuard(watch="grad_norm"), which needs no loss.'
            )
        return self.loss

    def unscaled(self) -> Unscaled[G | None, T]:
        """Return unscaled gradients.

        A variable that Keras overwrites with its gradient, as float8 statistics are, gets it as it is.

        Raises:
            UsageError: if the inner optimizer would divide them again.
            ValueError: as in Keras, if all gradients are None.
        """
        twice = self.inner.loss_scale_factor
        if twice is not None:
            raise UsageError(
                f"inner_optimizer.loss_scale_factor={twice!r} was set after it was wrapped: gradients would "
                "be divided twice. Write inner_optimizer.loss_scale_factor = None."
            )
        places = self._divided
        given = [cast(G, self.gradients[place]) for place in places]
        variables = [self.variables[place] for place in places]
        overwriting = [
            gradient
            for place, gradient in enumerate(self.gradients)
            if gradient is not None and place not in places
        ]
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
        return Unscaled(result, finite, unscaled.norm, unscaled.peaks)

    @property
    def _divided(self) -> list[int]:
        """The places of the gradients that are divided by the scale: not those that overwrite a variable."""
        return [
            place
            for place, (gradient, variable) in enumerate(zip(self.gradients, self.variables, strict=True))
            if gradient is not None and not getattr(variable, OVERWRITTEN, False)
        ]

    @property
    def inner_clips(self) -> bool:
        """Whether an inner optimizer clips to a norm, for which it adds up squares."""
        return any(each.clipnorm or each.global_clipnorm for each in optimizers_in(self.inner))

    def divisors(self, peaks: T | None) -> list[T | None]:
        """Return by what to divide gradients that are too large for an inner optimizer to square and clip.

        It turns them into zeros or NaN: their norm is inf. Divided, they are still above its limit, so that
        it clips them to it, and their direction is the same.

        Args:
            peaks: the largest magnitude of each unscaled gradient, or 0, as in `Unscaled`.

        Returns:
            A divisor for each of `gradients`, 1 of those that are small enough; None of those that stay.
        """
        groups: dict[Any, tuple[float, list[int]]] = {}
        for number, place in enumerate(self._divided):
            each = optimizer_of(self.inner, self.variables[place])
            if each.clipnorm or each.global_clipnorm:
                group = place if each.clipnorm else id(each)
                groups.setdefault(group, (each.clipnorm or each.global_clipnorm, []))[1].append(number)
        found: list[Any] = [None] * len(self.gradients)
        for limit, numbers in groups.values():
            largest = keras.ops.max(keras.ops.take(peaks, numbers, axis=0))
            times = keras.ops.minimum(largest / limit, 2.0**126)  # has an inverse in float32
            for number in numbers:
                found[self._divided[number]] = keras.ops.where(
                    largest > limit, times, keras.ops.ones_like(times)
                )
        return found

    def peak(self) -> T | None:
        """Return the largest magnitude among the scaled gradients; None if the policy does not need it."""
        if not self.scaler.policy.needs_peak:
            return None
        peak: T = self.arrays.peak([cast(G, self.gradients[place]) for place in self._divided])
        # `preamp.tensorflow` divides beforehand, and has no scale here.
        return peak if self.scale is not None else peak * self.scaler.state.policy_state.scale.value

    def take_on_host(self) -> None:
        """Take the step where numbers can be read: one read, then Python decides.

        Raises:
            ScaleExhausted: if the policy gives up on this step.
        """
        scaler, guard = self.scaler, self.scaler.guard
        loss = None if guard is None else self.loss_where(self.backend.is_concrete(self.loss))
        peak = self.peak()  # before they are unscaled in place
        unscaled = self.unscaled()
        stats = {name: one for name, one in (("peak", peak), ("loss", loss)) if one is not None}
        variables = scaler.floats if guard is None else [*scaler.floats, *scaler.guard_scalars]
        state_values = [variable.value for variable in variables]
        numbers = self.arrays.read([unscaled.finite, unscaled.norm, *stats.values(), *state_values])
        finite, norm = bool(numbers[0]), numbers[1]
        first, last = 2 + len(stats), 2 + len(stats) + len(scaler.floats)
        state = numbers[first:last]
        scaler.check(state)
        gradients = unscaled.gradients
        if finite and not LEAST_NORM <= norm <= LARGEST_NORM:
            finite, norm, gradients = self._measured_by_largest(gradients)
        found = dict(zip(stats, numbers[2:], strict=False))
        measured = Measured(finite, state[0], norm, **found)
        guard_state, judged, taken = None, None, finite
        if guard is not None:
            guard_state = scaler.read_guard(numbers[last:])
            judged = judge(guard, guard_state, measured)
            taken = judged.taken
        if taken:
            self.backend.update(self.inner, gradients, self.variables)
        scaler.advance_on_host(state, measured, self.backend.write, guard_state, judged)

    def _measured_by_largest(self, gradients: list[G | None]) -> tuple[bool, float, list[G | None]]:
        """Return whether gradients whose squares do not fit are finite, their norm, and what to apply.

        Args:
            gradients: unscaled.
        """
        arrays, result = self.arrays, list(gradients)
        present = [cast(G, gradients[place]) for place in self._divided]
        peaks = [arrays.peak([gradient]) for gradient in present]
        finite, *numbers = arrays.read([arrays.all_finite(present), *peaks])
        largest = min(max(numbers, default=0.0), 2.0**126)  # has an inverse in float32
        if not finite or largest < 2.0**-126:
            return bool(finite), largest, result
        divisor = keras.ops.convert_to_tensor(largest, "float32")
        norm = largest * arrays.read([arrays.unscale(present, divisor).norm])[0]
        if self.inner_clips:
            for place, by in enumerate(self.divisors(keras.ops.stack(peaks))):
                if by is not None:
                    (result[place],) = arrays.unscale([cast(G, result[place])], by).gradients
        return True, norm if norm <= FLOAT32_MAX else math.inf, result
