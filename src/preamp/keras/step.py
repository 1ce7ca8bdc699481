"""One step: unscale the gradients, check them, update or skip, advance the scale.

How a step is taken inside a compiled program, and the arithmetic, differ between Keras's backends: `Backend`
is what `on_jax`, `on_tensorflow` and `on_torch` provide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import keras

from preamp.errors import UsageError
from preamp.keras.scaler_variables import ScalerVariables

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G")  # a gradient: a tensor, or a sparse one of the backend
T = TypeVar("T")  # a tensor, most of them scalars


OVERWRITTEN = "overwrite_with_gradient"  # true of variables that are overwritten with their "gradients"


class Unscaled(NamedTuple, Generic[G, T]):
    """Gradients divided by the loss scale.

    Attributes:
        gradients: in the order in which they were given.
        finite: a boolean scalar: whether all of them are.
        norm: their global L2 norm, a float32 scalar. It is inf where float32 cannot hold the squares, which
            add up to more than 3e38, and NaN where it is not known. Undefined after an overflow.
    """

    gradients: list[G]
    finite: T
    norm: T


class Backend(Protocol[G, T]):
    """What a module for one of Keras's backends provides. Scalars are float32, unless it says otherwise."""

    def untraced(self, function: F, /) -> F:
        """Return a function that the backend's compiler calls, and does not convert itself."""

    def take_traced(self, step: ScaledStep[G, T], /) -> bool:
        """Take a step inside the program that is being compiled; return False where there is none.

        Raises:
            UsageError: where that cannot work.
        """

    def update(
        self, inner: keras.Optimizer, gradients: Sequence[G | None], variables: Sequence[keras.Variable], /
    ) -> None:
        """Have the inner optimizer update the variables. Sparse gradients it cannot apply become dense."""

    def unscale(
        self, gradients: Sequence[G], variables: Sequence[keras.Variable], scale: T | None, /
    ) -> Unscaled[G, T]:
        """Return gradients divided by the scale, half types as float32; with None, as they are.

        Sparse ones stay sparse: their stored entries are divided and checked.
        """

    def all_finite(self, gradients: Sequence[G], /) -> T:
        """Return whether the gradients, one at least, are finite: a boolean scalar."""

    def gradient_stats(
        self, needs: Collection[str], edge: float | T, gradients: Sequence[G], /
    ) -> dict[str, T]:
        """Return the "peak" of gradients and the "share" from the edge on, as far as needed.

        Of a sparse gradient the stored entries count.
        """

    def read(self, scalars: Sequence[T], /) -> list[float]:
        """Read scalars of any dtype to the host, all of them at once.

        Raises:
            UsageError: inside a program that is being compiled.
        """

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
    """The scaled gradients of one step, and what they are to update.

    Attributes:
        backend: the module for Keras's backend.
        inner: the optimizer that updates.
        scaler: the state of the loss scale.
        gradients: one for each variable; None for one without.
        variables: what to update.
        scale: what the gradients are to be divided by; None if they have been divided.
    """

    backend: Backend[G, T]
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
            finite = finite & self.backend.all_finite(overwriting)  # type: ignore[operator]
        return Unscaled(result, finite, unscaled.norm)

    def gradient_stats(self) -> Mapping[str, T]:
        """Return what the policy needs to know of the scaled gradients, by the fields of `Reading`."""
        policy = self.scaler.policy
        if not policy.needs:
            return {}
        gradients = [
            gradient
            for gradient, variable in zip(self.gradients, self.variables, strict=True)
            if gradient is not None and not getattr(variable, OVERWRITTEN, False)
        ]
        if self.scale is not None:
            return self.backend.gradient_stats(policy.needs, policy.edge, gradients)
        scale = self.scaler.state.policy_state.scale.value  # what has been divided is measured as it was
        stats = self.backend.gradient_stats(policy.needs, policy.edge / scale, gradients)
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
        numbers = self.backend.read([unscaled.finite, unscaled.norm, *stats.values(), *state_values])
        finite, norm = bool(numbers[0]), numbers[1]
        state = numbers[2 + len(stats) :]
        scaler.check(state)
        if finite and self.scale is not None and state[0] < 1.0:  # dividing by it can overflow
            present = [gradient for gradient in unscaled.gradients if gradient is not None]
            finite = bool(self.backend.read([self.backend.all_finite(present)])[0])
        if finite:
            self.backend.update(self.inner, unscaled.gradients, self.variables)
        measured = dict(zip(stats, numbers[2:], strict=False)) if stats else {}
        scaler.advance_on_host(state, finite, norm, measured, self.backend.write)
