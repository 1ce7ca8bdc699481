"""One step with a loss scale, and what a backend has to provide for it.

A step unscales the gradients, checks them, updates or skips, and advances the scale. How that is done inside
a compiled program differs between Keras's backends: `on_jax`, `on_tensorflow` and `on_torch` implement
`Backend`. `preamp.arrays` has the arithmetic on gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import keras
import numpy as np
from keras.src.backend.common.stateless_scope import in_stateless_scope  # Keras exports the scope alone

from preamp.arrays import LARGEST_NORM, LEAST_NORM, Arrays, Unscaled
from preamp.checks import FLOAT32_MAX
from preamp.errors import PolicyError, UsageError
from preamp.keras.inner import optimizer_of, optimizers_in
from preamp.keras_shared.variables import COUNTS, Number, StateVariables
from preamp.scaling import Measured

# What is wrong with `apply` where JAX compiles it.
APPLY_IN_JIT = (
    "apply inside jit or vmap would leave tracers in the optimizer's variables, and its scale would be a "
    "constant. Write stateless_apply(optimizer_variables, grads, trainable_variables), with "
    "optimizer_variables an argument and a result of the function that is compiled."
)

OVERWRITTEN = "overwrite_with_gradient"  # true of variables that are overwritten with their "gradients"

G = TypeVar("G")  # a gradient: a tensor, or a sparse one of the backend
T = TypeVar("T")  # a scalar of the backend, or a number
F = TypeVar("F", bound=Callable[..., Any])


class NotedLosses:
    """The loss that was scaled last on each replica, until its step."""

    def __init__(self) -> None:
        self._losses: dict[int, tuple[Any, str]] = {}

    def note(self, replica: int, loss: object, scalar: object) -> None:
        """Remember a loss.

        Args:
            replica: whose loss it is.
            loss: as it was given.
            scalar: the same as a scalar of the backend; None if it is not one, or not to be kept.
        """
        shape = getattr(loss, "shape", ())
        with suppress(TypeError, ValueError):  # TensorFlow may not know how many dimensions there are
            shape = tuple(shape)
        what = f"has shape {shape} and type {type(loss).__name__}, and is not a floating-point scalar"
        self._losses[replica] = scalar, f"the loss that was scaled last {what}"

    def take(self, replica: int) -> tuple[Any, str]:
        """Return the loss and forget it. If it is None, the text says why."""
        return self._losses.pop(replica, (None, "no loss was scaled since the last step"))


def has_value(variable: keras.Variable) -> bool:
    """Return whether a variable has one: on JAX `fit` hands values to its `train_step` as arguments."""
    return in_stateless_scope() or variable._value is not None or variable._initializer is not None


def saved_state(store: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the saved state of a loss scale, by the names of `StateVariables`; None if there is none.

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

    def write(self, variable: keras.Variable, value: T | Number, /) -> None:
        """Set a variable to a tensor, a scalar one to a number, a vector to a tuple of them."""

    def scalar(self, value: object, /) -> T | None:
        """Return a scalar that `apply` of the same step can use, traced or not; None for anything else."""

    def is_concrete(self, value: T | None, /) -> bool:
        """Return whether a result of `scalar` can be read."""

    def replica(self) -> int:
        """Return a number for the replica whose code this is."""

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
        loss: the loss that was scaled for this step.
        no_loss: the reason if there is none.
        scale_loss: the code that scales a loss, for messages.
    """

    backend: Backend[G, T]
    arrays: Arrays[G, T]
    inner: keras.Optimizer
    scaler: StateVariables[Any, keras.Variable]
    gradients: Sequence[G | None]
    variables: Sequence[keras.Variable]
    scale: T | None
    loss: T | None
    no_loss: str
    scale_loss: str

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
        return Unscaled(result, finite, unscaled.norm, unscaled.amaxes)

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

    def divisors(self, amaxes: T | None) -> list[T | None]:
        """Return by what to divide gradients that are too large for an inner optimizer to square and clip.

        It turns them into zeros or NaN: their norm is inf. Divided, they are still above its limit, so that
        it clips them to it, and their direction is the same.

        Args:
            amaxes: the largest magnitude of each unscaled gradient, or 0, as in `Unscaled`.

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
            largest = keras.ops.max(keras.ops.take(amaxes, numbers, axis=0))
            times = keras.ops.minimum(largest / limit, 2.0**126)  # has an inverse in float32
            for number in numbers:
                found[self._divided[number]] = keras.ops.where(
                    largest > limit, times, keras.ops.ones_like(times)
                )
        return found

    def amax(self) -> T | None:
        """Return the largest magnitude among the scaled gradients; None if the policy does not need it."""
        if not self.scaler.policy.needs_amax:
            return None
        amax: T = self.arrays.amax([cast(G, self.gradients[place]) for place in self._divided])
        # `preamp.tensorflow` divides beforehand, and has no scale here.
        return amax if self.scale is not None else amax * self.scaler.state.policy_state.scale.value

    def take_on_host(self) -> None:
        """Take the step where numbers can be read: one read, then Python decides.

        Raises:
            ScaleExhausted: if the policy gives up on this step.
        """
        scaler = self.scaler
        loss = self.loss_where(self.backend.is_concrete(self.loss))
        amax = self.amax()  # before they are unscaled in place
        unscaled = self.unscaled()
        stats = {name: one for name, one in (("amax", amax), ("loss", loss)) if one is not None}
        scalars = {path: one.value for path, one in scaler.scalars.items() if path not in COUNTS}
        numbers = self.arrays.read([unscaled.finite, unscaled.norm, *stats.values(), *scalars.values()])
        finite, norm = bool(numbers[0]), numbers[1]
        state: dict[str, Number] = dict(zip(scalars, numbers[2 + len(stats) :], strict=True))
        vectors = {p: one.value for p, one in scaler.variables.items() if p not in scaler.scalars}
        state |= {path: tuple(keras.ops.convert_to_numpy(one).tolist()) for path, one in vectors.items()}
        before = scaler.before_step(state)
        gradients = unscaled.gradients
        if finite and not LEAST_NORM <= norm <= LARGEST_NORM:
            finite, norm, gradients = self._measured_again(gradients, norm)
        found = dict(zip(stats, numbers[2:], strict=False))
        measured = Measured(finite, before.policy_state.scale, norm, **found)
        judged = scaler.judge(before, measured)
        if finite if judged is None else judged.taken:
            self.backend.update(self.inner, gradients, self.variables)
        scaler.advance(before, measured, judged)

    def _measured_again(self, gradients: list[G | None], norm: float) -> tuple[bool, float, list[G | None]]:
        """Return whether gradients whose squares do not fit are finite, their norm, and what to apply.

        Args:
            gradients: unscaled.
            norm: of their plain squares, which says by which unit to divide them: then the squares fit.
        """
        arrays, result = self.arrays, list(gradients)
        present = [cast(G, gradients[place]) for place in self._divided]
        unit = min(max(norm, 2.0**-63), 2.0**84)
        divisor = keras.ops.convert_to_tensor(unit, "float32")
        every = [gradient for gradient in gradients if gradient is not None]
        finite, ratio = arrays.read([arrays.all_finite(every), arrays.unscale(present, divisor).norm])
        if finite and self.inner_clips:
            amaxes = keras.ops.stack([arrays.amax([gradient]) for gradient in present])
            for place, by in enumerate(self.divisors(amaxes)):
                if by is not None:
                    (result[place],) = arrays.unscale([cast(G, result[place])], by).gradients
        norm = unit * ratio
        return bool(finite), norm if norm <= FLOAT32_MAX else math.inf, result
