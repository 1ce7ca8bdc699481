"""What one result of a step loses against float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Lost(NamedTuple):
    """What a result lost; numbers on the device.

    Attributes:
        error: the 2-norm of the difference from float32.
        size: the 2-norm in float32.
        count: the number of values that are zero, but not in float32.
        count_size: the 2-norm of those in float32.
        amax: the largest magnitude in float32.
        delta: the difference, in bfloat16 where it would be float32; None if it is zero everywhere.
    """

    error: Any
    size: Any
    count: Any
    count_size: Any
    amax: Any
    delta: Any


def what_is_lost(low: Array, exact: Array) -> Lost:
    """Compare a result with float32, where both are finite.

    Args:
        low: the result in the program.
        exact: the same in float32.
    """
    lost: Lost = _lost(low, exact)
    return lost if lost.error else lost._replace(delta=None)


@jax.jit
def _lost(low: Array, exact: Array) -> Lost:
    low = low.astype(exact.dtype)
    usable = jnp.isfinite(low) & jnp.isfinite(exact)
    low, exact = jnp.where(usable, low, 0), jnp.where(usable, exact, 0)
    amax = jnp.max(jnp.abs(exact), initial=0.0)
    size = jnp.where(amax > 0, amax, 1)  # so that squares neither overflow nor underflow
    delta, gone = low - exact, (low == 0) & (exact != 0)
    terms = [
        jnp.square(jnp.abs(delta / size)),
        jnp.square(jnp.abs(exact / size)),
        gone.astype(amax.dtype),
        jnp.square(jnp.where(gone, jnp.abs(exact / size), 0)),
    ]
    squares = _sums(terms)
    return Lost(
        error=size * jnp.sqrt(squares[0]),
        size=size * jnp.sqrt(squares[1]),
        count=squares[2],
        count_size=size * jnp.sqrt(squares[3]),
        amax=amax,
        delta=delta.astype(jnp.bfloat16) if delta.dtype == jnp.float32 else delta,
    )


@jax.jit
def changes(delta: Array, gradient: Array, loss: Array) -> Sequence[Array]:
    """Return what a difference changes: the gradients, as a 2-norm, and the loss.

    Args:
        delta: the difference.
        gradient: the sensitivity of the gradients to it.
        loss: that of the loss.
    """
    squares = _sums([jnp.square(jnp.abs(delta * gradient)), delta * loss])
    return jnp.sqrt(squares[0]), squares[1]


@jax.jit
def repaired(low: Any, exact: Any, limit: Any) -> tuple[Any, Any, Any]:
    """Return a result without overflows, the number of them, and the largest magnitude in float32.

    Args:
        low: the result in the program.
        exact: the same in float32.
        limit: what overflows become.
    """
    overflowed = ~jnp.isfinite(low) & jnp.isfinite(exact)
    largest = (jnp.sign(exact) * limit).astype(low.dtype)
    amax = jnp.max(jnp.where(overflowed, jnp.abs(exact), 0), initial=0.0)
    return jnp.where(overflowed, largest, low), jnp.sum(overflowed), amax


def _sums(terms: Sequence[Array]) -> Sequence[Array]:
    """Return the sums of arrays of one shape, all in one pass: it compiles faster than one for each.

    The last axis is summed first: added to one total, the small terms of a large array would be lost.
    """
    rows = [jnp.real(term).reshape(-1, *term.shape[-1:]) for term in terms]
    zeros = [jnp.zeros((), each.dtype) for each in rows]
    for axis in reversed(range(rows[0].ndim)):
        rows = list(lax.reduce(tuple(rows), tuple(zeros), _added, (axis,)))
    return rows


def _added(some: Sequence[Array], others: Sequence[Array]) -> Sequence[Array]:
    return tuple(a + b for a, b in zip(some, others, strict=True))
