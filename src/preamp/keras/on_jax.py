"""Keras on JAX: under `jit` one conditional around the update, elsewhere a decision on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import keras
from jax.experimental.sparse import BCOO, JAXSparse
from keras.src.backend.common.stateless_scope import in_stateless_scope  # Keras exports the scope alone

from preamp.arrays.jax import count_from, largest, to_host
from preamp.errors import UsageError
from preamp.keras.step import ScaledStep, Unscaled

F = TypeVar("F", bound=Callable[..., object])
Gradient: TypeAlias = jax.Array | JAXSparse


def untraced(function: F) -> F:
    return function


def take_traced(step: ScaledStep[Gradient, jax.Array]) -> bool:
    """Update in one branch of a `cond`, nothing in the other; XLA fuses unscaling with what comes after.

    Raises:
        UsageError: under `jit` outside a `StatelessScope`, where variables would be left with tracers.
    """
    arrays = jax.tree_util.tree_leaves([step.scale, *step.gradients])  # a sparse gradient is several
    is_mapped = any(isinstance(array, jax.core.Tracer) for array in arrays)
    if not is_mapped and not _is_compiled():
        return False
    if step.scale is None or becomes_constant(step.scale) or not in_stateless_scope():
        raise UsageError(
            "apply inside jit or vmap would leave tracers in the optimizer's variables, and its scale would "
            "be a constant. Write stateless_apply(optimizer_variables, grads, trainable_variables), with "
            "optimizer_variables an argument and a result of the function that is compiled."
        )
    mutable = _mutable(step.inner)
    before = [variable.value for variable in mutable]

    def take() -> list[jax.Array]:
        return _updated(step.inner, step.unscaled().gradients, step.variables, before)

    _, finite, norm = step.unscaled()
    after = jax.lax.cond(finite, take, lambda: before)
    for variable, value in zip(mutable, after, strict=True):
        variable.assign(value)
    step.scaler.advance(finite, norm, step.gradient_stats(), _where)
    return True


def _where(condition: jax.Array, yes: jax.Array | float, no: jax.Array | float) -> jax.Array:
    """Choose. Of two Python numbers no weakly typed one: for it the next step would be compiled again."""
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
    """Return what an update may change."""
    return [*inner._trainable_variables, *inner.variables]


def _updated(
    inner: keras.Optimizer,
    gradients: Sequence[Gradient | None],
    variables: Sequence[keras.Variable],
    before: list[jax.Array],
) -> list[jax.Array]:
    """Return the values of `_mutable` after an update, for those before it. Nothing is written.

    Whether an optimizer can apply a sparse gradient depends on its class, on how it clips and accumulates,
    under `jit` on `unique_indices` as well, and on the release of Keras. Nothing is lost by trying.
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
    """Unscale gradients.

    Raises:
        UsageError: for a sparse format that Keras's optimizers cannot apply.
    """
    assert scale is not None  # only `preamp.tensorflow` unscales beforehand
    values = [_wide(_values_of(gradient)) for gradient in gradients]
    unscaled = [
        _with_values(gradient, value / scale) for gradient, value in zip(gradients, values, strict=True)
    ]
    inverse = 1.0 / scale
    finite = jnp.isfinite(_sum([_total(value, inverse) for value in values]))
    norm = jnp.sqrt(_sum([jnp.sum(value * value) for value in values])) * inverse
    return Unscaled(unscaled, finite, norm)


def _values_of(gradient: Gradient) -> jax.Array:
    """Return a gradient's entries: those that a sparse one stores, or the array."""
    return gradient.data if isinstance(gradient, JAXSparse) else gradient


def _with_values(gradient: Gradient, values: jax.Array) -> Gradient:
    """Return a gradient with other entries in the same places."""
    if not isinstance(gradient, JAXSparse):
        return values
    if not isinstance(gradient, BCOO):
        raise UsageError(
            f"a gradient is a {type(gradient).__name__}, which Keras's optimizers cannot apply: of JAX's "
            "sparse arrays they take BCOO. Write gradient.to_bcoo(), or gradient.todense()."
        )
    return BCOO(
        (values, gradient.indices),
        shape=gradient.shape,
        indices_sorted=gradient.indices_sorted,
        unique_indices=gradient.unique_indices,
    )


def _wide(values: jax.Array) -> jax.Array:
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def all_finite(gradients: Sequence[Gradient]) -> jax.Array:
    """Return whether all arrays are finite, and so are their sums: a sum keeps what is not."""
    return jnp.isfinite(_sum([_total(_values_of(gradient), 1.0) for gradient in gradients]))


def _total(tensor: jax.Array, factor: jax.Array | float) -> jax.Array:
    """Return the sum of an array's entries times a factor.

    As a product with a vector, which on a CPU XLA computes four times as fast as a sum.
    """
    if not tensor.size:
        return jnp.zeros(())
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1).astype(jnp.float32)
    return jnp.dot(rows, jnp.full(rows.shape[1], factor, jnp.float32)).sum()


def _sum(scalars: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.zeros(()), *scalars]).sum(dtype=jnp.float32)


def gradient_stats(
    needs: Collection[str], edge: float | jax.Array, gradients: Sequence[Gradient]
) -> dict[str, jax.Array]:
    wide, stats = [_wide(_values_of(gradient)) for gradient in gradients], {}
    if "peak" in needs:
        stats["peak"] = jnp.stack([jnp.zeros(()), *map(largest, wide)]).max()
    if "share" in needs:
        count = _sum([count_from(float(edge), gradient) for gradient in wide])
        stats["share"] = count / max(sum(gradient.size for gradient in wide), 1)
    return stats


def read(scalars: Sequence[jax.Array]) -> list[float]:
    return [float(value) for value in to_host(scalars)]


def write(values: Sequence[tuple[keras.Variable, float]]) -> None:
    for variable, value in values:
        variable.assign(value)


def known_scalar(value: object) -> jax.Array | None:
    if not isinstance(value, jax.Array | float) or isinstance(value, jax.core.Tracer):
        return None
    return jnp.asarray(value) if jnp.ndim(value) == 0 and not _is_compiled() else None


def becomes_constant(value: jax.Array) -> bool:
    return not isinstance(value, jax.core.Tracer) and _is_compiled()


def stateless_inputs(tensors: Sequence[jax.Array]) -> list[jax.Array]:
    return list(tensors)  # arrays are never written to


def _is_compiled() -> bool:
    """Return whether what is computed now becomes part of a compiled program.

    Under `jit` even a sum of constants is traced; under `grad` and `vmap` alone it is computed.
    """
    return isinstance(jnp.zeros(()) + 0.0, jax.core.Tracer)
