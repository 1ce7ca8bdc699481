"""Keras on JAX: under `jit` a conditional around the update, elsewhere a decision on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse
from keras.src.backend.common.stateless_scope import in_stateless_scope  # Keras exports the scope alone

from preamp.arrays import Unscaled
from preamp.arrays import jax as arrays
from preamp.arrays.jax import Gradient
from preamp.errors import UsageError
from preamp.keras.scaler import APPLY_IN_JIT, ScaledStep
from preamp.keras_shared.variables import Number
from preamp.scaling import Measured

F = TypeVar("F", bound=Callable[..., object])


def untraced(function: F) -> F:
    return function


def take_traced(step: ScaledStep[Gradient, jax.Array]) -> bool:
    """Update in one branch of a `cond` and not in the other.

    The gradients are unscaled in the branch, where XLA fuses the division with the update. Outside it only
    the check and the norm of `unscaled` are used, and XLA drops the rest.

    Raises:
        UsageError: under `jit` outside a `StatelessScope`, where variables would be left with tracers.
    """
    leaves = jax.tree_util.tree_leaves([step.scale, *step.gradients])  # a sparse gradient is several
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if not is_traced and not _is_compiled():
        return False
    assert step.scale is not None  # only `preamp.tensorflow` divides beforehand
    if becomes_constant(step.scale) or not in_stateless_scope():
        raise UsageError(APPLY_IN_JIT)
    step.gradients = [None if one is None else arrays.row_by_row(one) for one in step.gradients]
    mutable = _mutable(step.inner)
    before = [variable.value for variable in mutable]

    def take() -> list[jax.Array]:
        gradients = step.unscaled().gradients
        if step.inner_clips:
            pairs = zip(gradients, step.divisors(amaxes), strict=True)
            gradients = [
                one if one is None or by is None else arrays.times(one, 1.0 / by) for one, by in pairs
            ]
        return _updated(step.inner, gradients, step.variables, before)

    _, finite, norm, amaxes = step.unscaled()
    # A loss of another trace, or one that was computed outside, belongs to another step.
    loss = step.loss_where(_trace_of(step.loss) is _trace_of(step.scale))
    state = step.scaler.before_step()
    measured = Measured(finite, state.policy_state.scale, norm, step.amax(), loss)
    judged = step.scaler.judge(state, measured, _where)
    after = jax.lax.cond(finite if judged is None else judged.taken, take, lambda: before)
    for variable, value in zip(mutable, after, strict=True):
        variable.assign(value)
    step.scaler.advance(state, measured, judged, _where)
    return True


def _trace_of(value: object) -> object:
    """Return the trace that a tracer belongs to; None for an array."""
    return getattr(value, "_trace", None)


def _where(condition: jax.Array, yes: jax.Array | float, no: jax.Array | float) -> jax.Array:
    """Choose, and never return a weakly typed scalar, for which the next step would be compiled again."""
    chosen = jnp.where(condition, yes, no)
    return chosen.astype(chosen.dtype)


def update(
    inner: keras.Optimizer, gradients: Sequence[Gradient | None], variables: Sequence[keras.Variable]
) -> None:
    if not any(isinstance(gradient, JAXSparse) for gradient in gradients):
        inner.apply(gradients, variables)
        return
    mutable = _mutable(inner)
    after = _updated(inner, gradients, variables, [variable.value for variable in mutable])
    for variable, value in zip(mutable, after, strict=True):
        variable.assign(value)


def _mutable(inner: keras.Optimizer) -> list[keras.Variable]:
    """Return the variables that an update may change."""
    return [*inner._trainable_variables, *inner.variables]


def _updated(
    inner: keras.Optimizer,
    gradients: Sequence[Gradient | None],
    variables: Sequence[keras.Variable],
    before: list[jax.Array],
) -> list[jax.Array]:
    """Return the values of `_mutable` after an update, for those before it. Nothing is written.

    Whether an optimizer can apply a sparse gradient depends on its class, on how it clips and accumulates, on
    the release of Keras and, under `jit`, on `unique_indices`. So it is tried: failing changes nothing.
    """

    def updated(gradients: Sequence[Gradient | None]) -> list[jax.Array]:
        with keras.StatelessScope(state_mapping=list(zip(mutable, before, strict=True))) as scope:
            inner.apply(gradients, variables)
        return [scope.get_current_value(variable) for variable in mutable]

    mutable = _mutable(inner)
    try:
        return updated(gradients)
    except (NotImplementedError, TypeError, ValueError):
        if not any(isinstance(gradient, JAXSparse) for gradient in gradients):
            raise
    return updated([g.todense() if isinstance(g, JAXSparse) else g for g in gradients])


def unscale(
    gradients: Sequence[Gradient], variables: Sequence[keras.Variable], scale: jax.Array | None
) -> Unscaled[Gradient, jax.Array]:
    assert scale is not None  # only `preamp.tensorflow` divides beforehand
    return arrays.unscale(gradients, scale)


def write(variable: keras.Variable, value: jax.Array | Number) -> None:
    variable.assign(value if isinstance(value, jax.Array) else np.asarray(value, variable.dtype))


def scalar(value: object) -> jax.Array | None:
    """Return the scalar without the derivatives that it carries inside `jax.grad`.

    What remains belongs to the trace around `jax.grad`, where gradients are applied.
    """
    while isinstance(value, jax.core.Tracer) and hasattr(value, "primal"):
        value = value.primal
    if not isinstance(value, jax.Array | float) or jnp.ndim(value) != 0:
        return None
    return value if isinstance(value, jax.core.Tracer) else jnp.asarray(value)


def is_concrete(value: jax.Array | None) -> bool:
    return not isinstance(value, jax.core.Tracer)


def replica() -> int:
    return 0  # a program is for all devices


def becomes_constant(value: jax.Array) -> bool:
    return not isinstance(value, jax.core.Tracer) and _is_compiled()


def stateless_inputs(tensors: Sequence[jax.Array]) -> list[jax.Array]:
    return list(tensors)  # arrays are never written to


def _is_compiled() -> bool:
    """Return whether this code is being compiled.

    Under `jit` even a sum of constants is traced; under `grad` and `vmap` alone it is computed.
    """
    return isinstance(jnp.zeros(()) + 0.0, jax.core.Tracer)
