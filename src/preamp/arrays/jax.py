"""Arithmetic on JAX arrays: the functions of `Arrays`, and what the optax adapter needs besides.

On a CPU, XLA spends another pass over memory on a division (it is not fused into what reads the result), on
`isfinite` of every entry, and on the square of a product. These functions avoid all three, but for `unscale`,
which divides as Keras does. Each statistic takes one pass; several reductions in one are slower, and
comparing entries or counting integers would take three.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from preamp.arrays import Unscaled
from preamp.errors import UsageError

if TYPE_CHECKING:
    from jax.experimental.sparse import JAXSparse

T = TypeVar("T")
Gradient: TypeAlias = "Array | JAXSparse"


def is_inexact(value: object) -> bool:
    """Return whether a value is floating or complex: an array, or a Python number."""
    return bool(jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.inexact))


def widen(value: T) -> T | Array:
    """Return a float array narrower than float32 as float32; integers, keys and other values as they are."""
    return _wide(cast(Array, value)) if is_inexact(value) else value


def _wide(array: Array) -> Array:
    array = jnp.asarray(array)  # a Python number, perhaps
    short = jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32
    return array.astype(jnp.float32) if short else array


def multiply(arrays: Iterable[Array], factor: Array | float) -> list[Array]:
    """Return floating and complex arrays times a real scalar, float32 where they were narrower."""
    products, factor = [], jnp.asarray(factor)
    for array in map(_wide, arrays):
        real = factor.astype(jnp.finfo(array.dtype).dtype)
        is_complex = jnp.iscomplexobj(array)
        products.append(lax.complex(array.real * real, array.imag * real) if is_complex else array * real)
    return products


def multiply_by_inverse(arrays: Iterable[Array], scale: Array) -> list[Array]:
    """Return floating and complex arrays times 1 / scale, float32 where they were narrower.

    A step that is one program is faster than with `unscale`: what reads the products computes them.
    """
    arrays = list(map(_wide, arrays))
    dtype = np.result_type(np.float32, *[jnp.finfo(array.dtype).dtype for array in arrays])
    return multiply(arrays, 1.0 / scale.astype(dtype))


def unscale(arrays: Sequence[Gradient], scale: Array) -> Unscaled[Gradient, Array]:
    """Unscale as Keras does, by division: the inverse of 2**127 is subnormal, which XLA flushes to 0.

    Raises:
        UsageError: for a sparse array that is not a BCOO.
    """
    wide = list(map(_wide, _stored(arrays)))
    unscaled = [_replaced(array, values / scale) for array, values in zip(arrays, wide, strict=True)]
    inverse = 1.0 / scale
    norm = global_norm(wide) * inverse
    if isinstance(norm, jax.core.Tracer):
        # One pass: a norm that is finite shows that all entries are. One that is not may have overflowed.
        finite = lax.cond(jnp.isfinite(norm), lambda: jnp.bool_(True), lambda: _is_sum_finite(wide, inverse))
    else:
        finite = _is_sum_finite(wide, inverse)
    return Unscaled(unscaled, finite, norm)


def all_finite(arrays: Sequence[Gradient]) -> Array:
    """Return whether the sum of all entries is finite: it is not where an entry is not."""
    return _is_sum_finite(map(_wide, _stored(arrays)), 1.0)


def global_norm(arrays: Iterable[Gradient], add: Callable[[list[Array]], Array | int] = sum) -> Array:
    """Return the L2 norm of all entries together: a float64 if any array is, else a float32.

    Args:
        arrays: complex ones as well.
        add: adds up the sums of squares of the arrays, perhaps with those of other devices.
    """
    totals = [_sum_of_squares(_wide(array)) for array in _stored(arrays)]
    dtype = np.result_type(np.float32, *[total.dtype for total in totals])
    return jnp.sqrt(add([jnp.zeros((), dtype), *[total.astype(dtype) for total in totals]]))


def peak(arrays: Iterable[Gradient], maximum: Callable[[list[Array]], Array] | None = None) -> Array:
    """Return the largest magnitude, a float32 scalar.

    Args:
        arrays: of complex ones the real and the imaginary parts count.
        maximum: returns the largest of these numbers, perhaps with those of other devices.
    """
    peaks = [_largest(part) for part in _real_parts(arrays)]
    return maximum(peaks) if maximum else reduce(jnp.maximum, peaks, jnp.zeros((), jnp.float32))


def count_from(edge: float, arrays: Iterable[Gradient]) -> Array:
    """Return how many entries have a magnitude of the edge or more, a float32 scalar.

    Args:
        edge: above 0.
        arrays: of complex ones the real and the imaginary parts count.
    """
    return sum(_counts(edge, _real_parts(arrays)), jnp.zeros(()))


def gradient_stats(
    needs: Collection[str],
    edge: float,
    arrays: Sequence[Gradient],
    add: Callable[[list[Array]], Array | int] = sum,
    maximum: Callable[[list[Array]], Array] | None = None,
) -> dict[str, Array]:
    """Return the "peak" of gradients and the "share" from the edge on, as far as needed.

    Args:
        needs: "peak", "share", both or neither. Each takes a pass.
        edge: the magnitude from which entries count.
        arrays: of complex ones the real and the imaginary parts are entries.
        add: adds up numbers of the arrays, perhaps with those of other devices.
        maximum: returns the largest of such numbers.
    """
    stats = {"peak": peak(arrays, maximum)} if "peak" in needs else {}
    if "share" in needs:
        parts = _real_parts(arrays)
        pairs = zip(_counts(edge, parts), parts, strict=True)  # both are added up at once
        total = add([jnp.zeros(2), *[jnp.stack([count, jnp.float32(part.size)]) for count, part in pairs]])
        count, size = cast(Array, total)
        stats["share"] = count / jnp.maximum(size, 1.0)
    return stats


def read(scalars: Sequence[Array]) -> list[float]:
    """Copy scalars to the host as floats, all of them at once.

    Raises:
        UsageError: inside a function that JAX transforms.
    """
    if any(isinstance(scalar, jax.core.Tracer) for scalar in scalars):
        raise UsageError(
            "the result of a step has no value yet inside a function that JAX transforms. "
            "Ask for it outside, after the step."
        )
    return [float(value) for value in jax.device_get(list(scalars))]


def _is_sum_finite(arrays: Iterable[Array], factor: Array | float) -> Array:
    """Return whether the sum of all entries times a factor is finite."""
    return jnp.isfinite(sum([_total(array, factor) for array in arrays], jnp.zeros(())))


def _total(array: Array, factor: Array | float) -> Array:
    """Return the sum of an array's entries times a factor.

    It is a product with a vector, which XLA on a CPU computes four times as fast as a sum.
    """
    if not array.size:
        return jnp.zeros(())
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    return jnp.dot(rows, jnp.full(rows.shape[1], factor, rows.dtype)).sum()


def _sum_of_squares(array: Array) -> Array:
    if jnp.iscomplexobj(array):
        return _sum_of_squares(array.real) + _sum_of_squares(array.imag)
    return jnp.sum(array * array)


def _largest(array: Array) -> Array:
    magnitude = jnp.max(jnp.abs(array), initial=0.0)
    return jnp.minimum(magnitude, np.finfo(np.float32).max).astype(jnp.float32)


def _counts(edge: float, parts: Iterable[Array]) -> list[Array]:
    """Return for each array how many entries have a magnitude of the edge or more."""
    counts = []
    for part in parts:
        below = np.nextafter(part.dtype.type(edge), part.dtype.type(0.0))
        # Without the barrier XLA stores the magnitudes, to compute the peak from them as well.
        magnitude = jnp.abs(lax.optimization_barrier(part))
        counts.append(jnp.sum(jnp.sign(jnp.maximum(magnitude, below) - below)).astype(jnp.float32))
    return counts


def _real_parts(arrays: Iterable[Gradient]) -> list[Array]:
    """Return arrays as float32 or wider, with the real and the imaginary part in place of a complex one."""
    parts: list[Array] = []
    for array in _stored(arrays):
        wide = _wide(array)
        parts += [wide.real, wide.imag] if jnp.iscomplexobj(wide) else [wide]
    return parts


def _stored(arrays: Iterable[Gradient]) -> Iterable[Array]:
    """Return each array's entries: those that a sparse one stores, or the array."""
    sparse = sys.modules.get("jax.experimental.sparse")  # takes long to load, and has been if one is sparse
    if sparse is None:
        return cast("Iterable[Array]", arrays)
    return [cast(Array, array.data if isinstance(array, sparse.JAXSparse) else array) for array in arrays]


def _replaced(array: Gradient, values: Array) -> Gradient:
    """Return an array with other entries in the same places."""
    if isinstance(array, Array):
        return values
    from jax.experimental.sparse import BCOO

    if not isinstance(array, BCOO):
        raise UsageError(
            f"a gradient is a {type(array).__name__}, which Keras's optimizers cannot apply: of JAX's "
            "sparse arrays they take BCOO. Write gradient.to_bcoo(), or gradient.todense()."
        )
    return BCOO(
        (values, array.indices),
        shape=array.shape,
        indices_sorted=array.indices_sorted,
        unique_indices=array.unique_indices,
    )
