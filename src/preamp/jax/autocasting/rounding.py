"""Round float32 to a low precision without leaving float32, forward and backward, for `emulate=True`.

A cast down and up again would not do: compilers that may use excess precision remove such a pair.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from preamp.jax.jaxprs import Aval

FLOAT32_EXPONENT_BITS = 8

ROUNDED = Primitive("rounded")
"""The primitive behind `rounded`: one operand, the low precision as its parameter `dtype`.
`backward` says whether cotangents are rounded as well, as they are unless the value was cast from float32."""


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Return what casting to a low precision and back gives, bit for bit, without leaving float32.

    Its derivative is that of a linear function: tangents and cotangents are rounded to the same precision, as
    they are when a low-precision value is stored.

    Args:
        x: a float32 array of any shape.
        dtype: float16, bfloat16, float8_e4m3fn or float8_e5m2.

    Returns:
        A float32 array of the same shape. Beyond the range of the dtype it is infinite; NaN in float8_e4m3fn.
    """
    return ROUNDED.bind(x, dtype=np.dtype(dtype), backward=True)  # type: ignore[no-any-return]


def _rounded(x: Array, *, dtype: np.dtype[Any], backward: bool) -> Array:
    """Round in ways that no compiler drops: mantissas by `reduce_precision`, subnormals to whole steps."""
    low = jnp.finfo(dtype)
    normal = lax.reduce_precision(x, FLOAT32_EXPONENT_BITS, low.nmant)
    if low.nexp == FLOAT32_EXPONENT_BITS:
        return normal
    magnitude, step = lax.abs(normal), float(low.smallest_subnormal)
    subnormal = step * lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN)
    beyond = normal * float(np.float32(np.inf).astype(dtype))
    within = lax.select(magnitude > float(low.max), beyond, normal)
    return lax.select(magnitude < float(low.tiny), subnormal, within)


def _unchanged(aval: Aval, *, dtype: np.dtype[Any], backward: bool) -> Aval:
    return aval


def _transposed(cotangent: Array, *, dtype: np.dtype[Any], backward: bool) -> list[Array]:
    return [rounded(cotangent, dtype) if backward else cotangent]


ROUNDED.def_impl(jax.jit(_rounded, static_argnames=("dtype", "backward")))
ROUNDED.def_abstract_eval(_unchanged)
mlir.register_lowering(ROUNDED, mlir.lower_fun(_rounded, multiple_results=False))
ad.deflinear(ROUNDED, _transposed)
batching.defvectorized(ROUNDED)
