"""Arithmetic on JAX arrays: the functions of `Arrays`, and what the optax adapter needs besides.

On a CPU, XLA spends another pass over memory on a division (it is not fused into what reads the result), on
`isfinite` of every entry, and on the square of a product. These functions avoid all three, but for `unscale`,
which divides as Keras does, and where squares do not fit. Each statistic takes one pass; several reductions
in one are slower.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import layout

from preamp.arrays import LARGEST_NORM, LEAST_NORM, Unscaled
from preamp.errors import UsageError

if TYPE_CHECKING:
    from jax.experimental.sparse import JAXSparse
    from jax.typing import DTypeLike

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
    size = size_of(wide, scale, global_norm(wide))
    return Unscaled(unscaled, size.finite, size.norm, size.amaxes)


def times(array: Gradient, factor: Array) -> Gradient:
    """Return an array, maybe a BCOO, times a scalar."""
    (values,) = _stored([array])
    return _replaced(array, values * factor)


def row_by_row(array: Gradient) -> Gradient:
    """Return an array that lies row by row in memory, as weights do, inside a program for one CPU.

    XLA for CPUs keeps a gradient of a half type in the order of the transposed product that it comes from,
    and copies it for the norm and once more for the update. This has it written in order to begin with. With
    several devices the array stays as it is: of one that is divided among them XLA would gather the parts.
    Before JAX 0.7, where there was no `Format`, `Layout` was something else; there the array is copied.
    """
    is_alone = jax.default_backend() == "cpu" and jax.device_count() == 1
    if not (is_alone and isinstance(array, jax.core.Tracer) and hasattr(layout, "Format")):
        return array
    return cast(Array, layout.with_layout_constraint(array, layout.Layout(tuple(range(array.ndim)))))


def all_finite(arrays: Sequence[Gradient]) -> Array:
    """Return whether all entries are finite."""
    finite = [jnp.isfinite(_amaxes([array], array.dtype)) for array in arrays]
    return jnp.all(jnp.concatenate([jnp.ones(1, bool), *finite]))


class Size(NamedTuple):
    """How large gradients are.

    Attributes:
        finite: whether all entries are finite, scaled and unscaled.
        norm: the global L2 norm of the unscaled gradients, inf beyond the range of its dtype.
        amaxes: the largest unscaled magnitude of each array, of complex ones of real and imaginary parts; 0
            where a plain sum of squares has given the norm.
        unit: a number by which scaled entries can be divided before they are squared; 1 where squares fit.
        ratio: the norm of the scaled gradients / unit.
    """

    finite: Array
    norm: Array
    amaxes: Array
    unit: Array
    ratio: Array

    def clip(self, max_norm: float, inverse: Array) -> tuple[Array, Array]:
        """Return two factors that unscale and clip to a norm: one alone could underflow, as 1 / 3e38 does.

        Args:
            max_norm: the norm.
            inverse: 1 / scale.
        """
        root, exceeds = jnp.sqrt(self.unit), self.norm > max_norm
        clip = max_norm / jnp.where(exceeds, self.ratio * root, max_norm)
        return jnp.where(exceeds, 1.0 / root, inverse), clip


def size_of(
    arrays: Sequence[Gradient],
    scale: Array,
    norm: Array,
    add: Callable[[list[Array]], Array | int] = sum,
    maximum: Callable[[Array], Array] = lambda amaxes: amaxes,
) -> Size:
    """Return how large gradients are. Only where their squares do not fit it takes one more pass.

    Args:
        arrays: floating or complex, still scaled.
        scale: the loss scale that is in them.
        norm: from `global_norm` of them, with the same `add`.
        add: as for `global_norm`.
        maximum: returns the largest of such vectors, perhaps with those of other devices.
    """
    inverse = 1.0 / scale.astype(norm.dtype)
    unscaled = norm * inverse
    fits = (jnp.minimum(norm, unscaled) >= LEAST_NORM) & (jnp.maximum(norm, unscaled) <= LARGEST_NORM)

    def by_squares() -> Size:
        # True, zeros and 1, which vary between devices where the norm does: the branches must agree on that.
        return Size(norm == norm, unscaled, jnp.zeros(len(arrays), norm.dtype) * norm, norm / norm, norm)

    def by_largest() -> Size:
        return _size_by_largest(arrays, scale, norm, add, maximum)

    if isinstance(fits, jax.core.Tracer):
        size: Size = lax.cond(fits, by_squares, by_largest)
        return size
    return by_squares() if fits else by_largest()


def _size_by_largest(
    arrays: Sequence[Gradient],
    scale: Array,
    norm: Array,
    add: Callable[[list[Array]], Array | int],
    maximum: Callable[[Array], Array],
) -> Size:
    """Return what `size_of` does, with entries that are divided by a unit before they are squared.

    The norm whose squares did not fit says which unit: the squares of all entries that count fit then, so
    that their sum is finite if and only if all entries are. XLA drops the amaxes where nothing uses them.
    """
    tiny, exact = jnp.finfo(norm.dtype).tiny, scale.astype(norm.dtype)
    # Of squares that overflow, the sum may be inf or NaN.
    unit = jnp.clip(jnp.where(jnp.isnan(norm), jnp.inf, norm), tiny**0.5, tiny ** (-2 / 3))
    unit = jnp.clip(unit / exact, tiny, 1.0 / tiny)  # of unscaled entries; its inverse is not 0
    # Two factors: entries overflow in the first product if they overflow when they are unscaled.
    factors = 1.0 / jnp.minimum(scale, 1.0), 1.0 / (jnp.maximum(exact, 1.0) * unit)
    stored, parts = [], []
    for array in _stored(arrays):
        # Without a barrier XLA folds the squares of constants, which overflow; and it writes to memory the
        # factors that several arrays of one shape share, once for each entry.
        array, grow, shrink = lax.optimization_barrier((array, *factors))
        stored.append(array)
        parts += [
            (part * grow.astype(part.dtype)).astype(norm.dtype) * shrink for part in _real_parts([array])
        ]
    ratio = global_norm(parts, add)
    amaxes = maximum(_amaxes(stored, norm.dtype)) / exact
    return Size(jnp.isfinite(ratio), unit * ratio, amaxes, unit * exact, ratio)


def global_norm(arrays: Iterable[Gradient], add: Callable[[list[Array]], Array | int] = sum) -> Array:
    """Return the L2 norm of all entries together: a float64 if any array is, else a float32.

    Args:
        arrays: complex ones as well.
        add: adds up the sums of squares of the arrays, perhaps with those of other devices.
    """
    totals = [_sum_of_squares(_wide(array)) for array in _stored(arrays)]
    dtype = np.result_type(np.float32, *[total.dtype for total in totals])
    return jnp.sqrt(add([jnp.zeros((), dtype), *[total.astype(dtype) for total in totals]]))


def amax(arrays: Iterable[Gradient], maximum: Callable[[list[Array]], Array] | None = None) -> Array:
    """Return the largest magnitude, a float32 scalar.

    Args:
        arrays: of complex ones the real and the imaginary parts count.
        maximum: returns the largest of these numbers, perhaps with those of other devices.
    """
    amaxes = [_largest(part) for part in _real_parts(arrays)]
    return maximum(amaxes) if maximum else reduce(jnp.maximum, amaxes, jnp.zeros((), jnp.float32))


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


def _amaxes(arrays: Iterable[Gradient], dtype: DTypeLike) -> Array:
    """Return the largest magnitude of each array, in one vector."""
    amaxes = [jnp.zeros(0, dtype)]
    for array in arrays:
        parts = [jnp.max(jnp.abs(part), initial=0.0) for part in _real_parts([array])]
        amaxes.append(reduce(jnp.maximum, parts).astype(dtype)[None])
    return jnp.concatenate(amaxes)


def _sum_of_squares(array: Array) -> Array:
    if jnp.iscomplexobj(array):
        return _sum_of_squares(array.real) + _sum_of_squares(array.imag)
    return jnp.sum(array * array)


def _largest(array: Array) -> Array:
    magnitude = jnp.max(jnp.abs(array), initial=0.0)
    return jnp.minimum(magnitude, np.finfo(np.float32).max).astype(jnp.float32)


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
