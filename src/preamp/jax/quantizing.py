"""What a quantized array stands for, in JAX."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from preamp.recipes import Quant, arithmetic

__all__ = ["quantize"]

_MAGNITUDE = 0x7FFFFFFF


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _floats(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _first_bytes(x: Array, count: int) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)[:count].astype(jnp.float32)


def _amax(x: Array, axes: tuple[int, ...]) -> Array:
    """Return the largest magnitude by its bits: of floats, XLA's maximum drops NaN on CPUs."""
    return _floats(jnp.max(_bits(x) & _MAGNITUDE, axes, keepdims=True))


def _divided(numerator: Array | float, x: Array | float) -> Array:
    """Return a quotient that XLA neither makes a product with a reciprocal nor joins with another one."""
    numerator, x = jnp.broadcast_arrays(jnp.asarray(numerator, jnp.float32), jnp.asarray(x, jnp.float32))
    above, below = lax.optimization_barrier((numerator, x))
    quotient: Array = above / below
    return quotient


ARRAYS: Any = SimpleNamespace(
    where=jnp.where,
    clip_=jnp.clip,
    floor_=jnp.floor,
    copysign=jnp.copysign,
    isnan=jnp.isnan,
    isfinite=jnp.isfinite,
    bits=_bits,
    floats=_floats,
    divided=_divided,
    total=lambda bits: jnp.sum(bits, dtype=jnp.int32),
    known_=lambda x, number: jnp.where(jnp.isnan(x), number, x),
    places=lambda x, count: lax.iota(jnp.int32, count),
    bytes=_first_bytes,
    joined=jnp.concatenate,
    amax=_amax,
    padded=lambda x, rows, columns: jnp.pad(x, ((0, rows), (0, columns))),
    rotated=lambda x, matrix: (
        jnp.matmul(x, jnp.array(matrix), precision="highest").astype(jnp.bfloat16).astype(jnp.float32)
    ),
)


def quantize(x: Array, quant: Quant, axis: int = -1, draw: int = 0) -> Array:
    """Return what an array stands for that is quantized.

    Args:
        x: a floating-point array. Its axes but one are taken for one, from the first to the last.
        quant: how it is quantized. One with a history takes the scale of this array.
        axis: the axis that a product sums over, along which blocks lie.
        draw: of stochastic rounding, which depends on this number and on x alone.

    Returns:
        A float32 array of the same shape.
    """
    moved = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
    matrix = moved.reshape(-1, moved.shape[-1])
    return jnp.moveaxis(arithmetic.quantized(ARRAYS, matrix, quant, draw).reshape(moved.shape), -1, axis)
