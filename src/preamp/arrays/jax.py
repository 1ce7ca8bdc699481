"""Arithmetic on JAX arrays: unscale, check that all entries are finite, measure how large they are, read.

What it avoids costs a pass over memory in XLA on a CPU: a division is not fused into what reads it,
`isfinite` of every entry is stored before it is reduced, and so is the square of a product. Each measure is
one pass: XLA makes one of several reductions only where they are written as one, and is then slower. What
compares entries or counts integers would take three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from preamp.errors import UsageError

T = TypeVar("T")


def is_inexact(value: object) -> bool:
    """Return whether a value is floating or complex: an array, or a Python number."""
    return bool(jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.inexact))


def widen(value: T) -> T | Array:
    """Return a float array shorter than float32 as float32; integers, keys and other values as they are."""
    if not is_inexact(value):
        return value
    array = jnp.asarray(value)
    short = jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32
    return array.astype(jnp.float32) if short else array


def multiply(arrays: Iterable[Array], factor: Array | float) -> list[Array]:
    """Return floating and complex arrays times a real scalar, float32 where they were shorter."""
    products, factor = [], jnp.asarray(factor)
    for array in map(widen, arrays):
        real = factor.astype(jnp.finfo(array.dtype).dtype)
        is_complex = jnp.iscomplexobj(array)
        products.append(lax.complex(array.real * real, array.imag * real) if is_complex else array * real)
    return products


def unscale(arrays: Iterable[Array], scale: Array) -> list[Array]:
    """Return floating and complex arrays divided by the loss scale, float32 where they were shorter."""
    arrays = list(map(widen, arrays))
    dtype = np.result_type(np.float32, *[jnp.finfo(array.dtype).dtype for array in arrays])
    return multiply(arrays, 1.0 / scale.astype(dtype))


def all_finite(arrays: Iterable[Array]) -> Array:
    """Return whether all entries are finite, and so is the sum of their squares: a boolean scalar."""
    return jnp.isfinite(global_norm(arrays))


def global_norm(arrays: Iterable[Array], add: Callable[[list[Array]], Array | int] = sum) -> Array:
    """Return the L2 norm of all entries together: a float64 if any array is, else a float32.

    Args:
        arrays: floating or complex; float16 and bfloat16 are summed as float32.
        add: adds up the sums of squares of the arrays, perhaps with those of other devices.
    """
    totals = [_sum_of_squares(widen(array)) for array in arrays]
    dtype = np.result_type(np.float32, *[total.dtype for total in totals])
    return jnp.sqrt(add([jnp.zeros((), dtype), *[total.astype(dtype) for total in totals]]))


def peak(arrays: Iterable[Array], maximum: Callable[[list[Array]], Array] | None = None) -> Array:
    """Return the largest magnitude of all entries, a float32 scalar: 0 of nothing, float32's largest of more.

    Args:
        arrays: floating; of complex ones the real and the imaginary parts count.
        maximum: returns the largest of these numbers, perhaps with those of other devices.
    """
    peaks = [largest(part) for part in real_parts(arrays)]
    return maximum(peaks) if maximum else reduce(jnp.maximum, peaks, jnp.zeros((), jnp.float32))


def largest(array: Array) -> Array:
    """Return the largest magnitude of one array, as `peak` does."""
    magnitude = jnp.max(jnp.abs(array), initial=0.0)
    return jnp.minimum(magnitude, np.finfo(np.float32).max).astype(jnp.float32)


def count_from(edge: float, array: Array) -> Array:
    """Return how many entries have a magnitude of the edge or more, a float32 scalar.

    Args:
        edge: above 0.
        array: float32 or float64.
    """
    below = np.nextafter(array.dtype.type(edge), array.dtype.type(0.0))
    magnitude = jnp.abs(lax.optimization_barrier(array))  # or XLA stores the magnitudes, for the peak as well
    return jnp.sum(jnp.sign(jnp.maximum(magnitude, below) - below)).astype(jnp.float32)


def real_parts(arrays: Iterable[Array]) -> list[Array]:
    """Return arrays as float32 or longer, with the real and the imaginary part in place of a complex one."""
    parts: list[Array] = []
    for array in map(widen, arrays):
        parts += [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    return parts


def read(scalars: Sequence[Array]) -> list[float]:
    """Read scalars to the host as floats, all of them at once.

    Raises:
        UsageError: inside a function that JAX transforms.
    """
    return [float(value) for value in to_host(scalars)]


def to_host(scalars: Sequence[Array]) -> list[np.ndarray]:
    """Read arrays to the host, all of them at once.

    Raises:
        UsageError: inside a function that JAX transforms.
    """
    if any(isinstance(scalar, jax.core.Tracer) for scalar in scalars):
        raise UsageError(
            "the outcome of a step is read to the host, which no function can do while JAX transforms it. "
            "Ask for it outside, after the step."
        )
    values: list[np.ndarray] = jax.device_get(list(scalars))
    return values


def _sum_of_squares(array: Array) -> Array:
    if jnp.iscomplexobj(array):
        return _sum_of_squares(array.real) + _sum_of_squares(array.imag)
    return jnp.sum(array * array)
