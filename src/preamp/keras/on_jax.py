"""Keras on JAX: under `jit` one conditional around the update, elsewhere a decision on the host.

This room multiplies and reads arrays. It refuses to know policies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.experimental.sparse import BCOO, JAXSparse
from keras.src.backend.common.stateless_scope import in_stateless_scope  # Keras exports the scope alone

from preamp.arrays.jax import count_from, largest, to_host
from preamp.errors import UsageError
from preamp.policy import Reading


def apply(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> None:
    """Update the variables or skip.

    Raises:
        UsageError: under `jit` outside a `StatelessScope`, where variables would be left with tracers.
    """
    arrays = jax.tree_util.tree_leaves([scale.value, *gradients])  # a sparse gradient is several
    mapped = any(isinstance(array, jax.core.Tracer) for array in arrays)
    if not mapped and not _is_compiled():
        optimizer._step_on_host(gradients, variables, scale.value)
        return
    if bakes(scale.value) or not in_stateless_scope():
        raise UsageError(
            "apply inside jit or vmap would leave tracers in the optimizer's variables, and its scale would "
            "be a constant. Write stateless_apply(optimizer_variables, grads, trainable_variables), with "
            "optimizer_variables an argument and a result of the function that is compiled."
        )
    _apply_traced(optimizer, gradients, variables, scale.value)


def _apply_traced(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> None:
    """Update in one branch of a `cond`, nothing in the other; XLA fuses unscaling with what comes after."""
    inner = optimizer.inner_optimizer
    mutable = _mutable(inner)
    before = [variable.value for variable in mutable]

    def take() -> list[Any]:
        unscaled, _ = optimizer._unscaled(gradients, variables, scale)
        return _updated(inner, unscaled, variables, before)

    _, finite = optimizer._unscaled(gradients, variables, scale)
    after = jax.lax.cond(finite, take, lambda: before)
    for variable, value in zip(mutable, after, strict=True):
        variable.assign(value)
    seen = optimizer._seen(gradients, variables, scale)
    optimizer._ledger.advance(Reading(finite, **seen), _where)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    """Choose. Of two Python numbers no weakly typed one: for it the next step would be compiled anew."""
    chosen = jnp.where(condition, yes, no)
    return chosen.astype(chosen.dtype)


def update(inner: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Have the inner optimizer update the variables, with what it cannot apply sparse made dense."""
    if not any(isinstance(gradient, JAXSparse) for gradient in gradients):
        inner.apply(gradients, variables)
        return
    mutable = _mutable(inner)
    after = _updated(inner, gradients, variables, [variable.value for variable in mutable])
    for variable, value in zip(mutable, after, strict=True):
        variable.assign(value)


def _mutable(inner: Any) -> list[Any]:
    """Return what an update may change."""
    return [*inner._trainable_variables, *inner.variables]


def _updated(inner: Any, gradients: Sequence[Any], variables: Sequence[Any], before: list[Any]) -> list[Any]:
    """Return the values of `_mutable` after an update, for those before it. Nothing is written.

    Whether an optimizer can apply a sparse gradient depends on its class, on how it clips and accumulates,
    under `jit` on `unique_indices` as well, and on the release of Keras. Nothing is lost by trying.
    """

    def updated(gradients: Sequence[Any]) -> list[Any]:
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


def unscale(gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> tuple[list[Any], Any]:
    """Return gradients divided by the scale, half types as float32, and whether all are finite.

    A sparse gradient stays sparse: its stored entries are divided and checked.

    Raises:
        UsageError: for a sparse format that Keras's optimizers cannot apply.
    """
    unscaled = [_with_values(gradient, _wide(_values_of(gradient)) / scale) for gradient in gradients]
    totals = [_total(_values_of(gradient), 1.0 / scale) for gradient in gradients]
    return unscaled, jnp.isfinite(jnp.stack(totals).sum())


def _values_of(gradient: Any) -> Any:
    """Return a gradient's entries: those that a sparse one stores, or the array."""
    return gradient.data if isinstance(gradient, JAXSparse) else gradient


def _with_values(gradient: Any, values: Any) -> Any:
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


def _wide(values: Any) -> Any:
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def seen(sees: Collection[str], edge: float, gradients: Sequence[Any]) -> dict[str, Any]:
    """Return the peak of gradients, and the share from the edge on, as far as asked: float32 scalars.

    Of a sparse gradient the stored entries count.
    """
    wide, found = [_wide(_values_of(gradient)) for gradient in gradients], {}
    if "peak" in sees:
        found["peak"] = jnp.stack([jnp.zeros(()), *map(largest, wide)]).max()
    if "share" in sees:
        counts = jnp.stack([jnp.zeros(()), *[count_from(edge, gradient) for gradient in wide]])
        found["share"] = counts.sum() / max(sum(gradient.size for gradient in wide), 1)
    return found


def are_finite(tensors: Sequence[Any]) -> Any:
    """Return whether all arrays are finite, and so are their sums: a sum keeps what is not."""
    return jnp.isfinite(jnp.stack([_total(_values_of(tensor), 1.0) for tensor in tensors]).sum())


def _total(tensor: Any, factor: Any) -> Any:
    """Return the sum of an array's entries times a factor.

    As a product with a vector, which on a CPU XLA computes four times as fast as a sum.
    """
    if not tensor.size:
        return jnp.zeros(())
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1).astype(jnp.float32)
    return jnp.dot(rows, jnp.full(rows.shape[1], factor, jnp.float32)).sum()


def read(scalars: Sequence[Any]) -> list[float]:
    """Read scalars, all of them at once.

    Raises:
        UsageError: in a function that is being transformed.
    """
    return [float(value) for value in to_host(scalars)]


def known_scalar(value: Any) -> Any:
    """Return a scalar that can be read later; None for what is being traced, and for what is no scalar."""
    known = isinstance(value, jax.Array | float) and not isinstance(value, jax.core.Tracer)
    return jnp.asarray(value) if known and jnp.ndim(value) == 0 and not _is_compiled() else None


def write(variable: Any, value: float) -> None:
    """Set a scalar variable to a number."""
    variable.assign(value)


def bakes(value: Any) -> bool:
    """Return whether a value read now would be a constant of a compiled program."""
    return not isinstance(value, jax.core.Tracer) and _is_compiled()


def stateless_inputs(tensors: Sequence[Any]) -> list[Any]:
    """Return what may be handed to Keras: arrays are never written to."""
    return list(tensors)


def _is_compiled() -> bool:
    """Return whether what is computed now becomes part of a compiled program.

    Under `jit` even a sum of constants is traced; under `grad` and `vmap` alone it is computed.
    """
    return isinstance(jnp.zeros(()) + 0.0, jax.core.Tracer)
