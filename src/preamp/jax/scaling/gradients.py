"""Arithmetic on trees of gradients: how large they are together, are they finite, what they are unscaled.

This room multiplies and sums. It refuses to know policies and optimizers. Leaves that are neither floating
nor complex (integers, `float0`, keys) pass through.

What it avoids costs a pass over memory in XLA on a CPU: a division is not fused into what reads it,
`isfinite` of every entry is stored before it is reduced, and so is the square of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from preamp.jax import axes
from preamp.jax.scaling.flow_slots import is_flow_slot


class Seen(NamedTuple):
    """What one pass over scaled gradients tells.

    Attributes:
        finite: boolean scalar; whether all gradients are finite, and their norm is.
        norm: global L2 norm of the unscaled gradients; a float64 if any gradient is, else a float32.
        inverse: what unscales, of the norm's dtype.
    """

    finite: Any
    norm: Any
    inverse: Any


def all_finite(tree: Any) -> Any:
    """Return whether all entries are finite: a boolean scalar.

    Entries whose squares add up to more than their dtype holds (float32 for shorter ones, so that they are
    beyond 1e19) count as infinite.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"w": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])}))
    False
    """
    return jnp.isfinite(_sum_of_squares(tree, ()))


def look(gradients: Any, scale: Any, names: tuple[Hashable, ...] = ()) -> Seen:
    """Return what one pass over scaled gradients tells.

    Args:
        gradients: any tree; float16 and bfloat16 are summed as float32.
        scale: what they are scaled by, a float32 scalar.
        names: axes along which devices hold other gradients of the same step.
    """
    total = _sum_of_squares(gradients, names)
    inverse = 1.0 / scale.astype(total.dtype)
    norm = jnp.sqrt(total) * inverse  # NaN for a scale of 0, where gradients are lost
    return Seen(jnp.isfinite(norm), norm, inverse)


def multiplied(tree: Any, factor: Any) -> Any:
    """Return a tree times a scalar: float16 and bfloat16 become float32, other dtypes stay."""
    return each(lambda leaf: _times(leaf, factor), tree)


def wide(tree: Any) -> Any:
    """Return a tree whose float16, bfloat16 and shorter leaves are float32."""
    return each(_wide, tree)


def like(tree: Any, reference: Any) -> Any:
    """Return a tree in the dtypes of another."""
    return jax.tree.map(_like, tree, reference)


def each(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the floating and complex leaves of a tree; counts of `watch` stay as they are."""
    return jax.tree.map(lambda leaf: function(leaf) if is_inexact(leaf) else leaf, tree, is_leaf=is_flow_slot)


def inexact_leaves(tree: Any) -> list[Any]:
    """Return the floating and complex leaves of a tree, without counts of `watch`."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_flow_slot) if is_inexact(leaf)]


def is_inexact(leaf: Any) -> bool:
    """Return whether a leaf is floating or complex."""
    return not is_flow_slot(leaf) and bool(jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact))


def _wide(leaf: Any) -> Any:
    array = jnp.asarray(leaf)
    short = jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32
    return array.astype(jnp.float32) if short else array


def _like(leaf: Any, reference: Any) -> Any:
    dtype = jnp.asarray(reference).dtype
    array = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)  # line searches return Python numbers
    return array if array.dtype == dtype else array.astype(dtype)


def _times(leaf: Any, factor: Any) -> Any:
    array = _wide(leaf)
    factor = factor.astype(jnp.finfo(array.dtype).dtype)
    if jnp.iscomplexobj(array):
        return lax.complex(array.real * factor, array.imag * factor)
    return array * factor


def _sum_of_squares(tree: Any, names: tuple[Hashable, ...]) -> Any:
    """Return the sum of squared magnitudes in a tree: float64 if any leaf is, else float32."""
    totals = [_total(_wide(leaf)) for leaf in inexact_leaves(tree)]
    dtype = np.result_type(np.float32, *[total.dtype for total in totals])
    return axes.sum_over(names, [jnp.zeros((), dtype), *[total.astype(dtype) for total in totals]])


def _total(array: Any) -> Any:
    if jnp.iscomplexobj(array):
        return _total(array.real) + _total(array.imag)
    return jnp.sum(array * array)
