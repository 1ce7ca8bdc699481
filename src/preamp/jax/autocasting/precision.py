"""Precisions, the values that have one, and the equations that ask for one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from preamp.jax.jaxprs import Aval, Equation, is_array, numbers_of


class Precision(NamedTuple):
    """Which numbers an array can hold.

    Attributes:
        dtype: the dtype it is stored in.
        rounded: the dtype its numbers are rounded to, if that is emulated.
    """

    dtype: np.dtype[Any]
    rounded: np.dtype[Any] | None = None

    @property
    def name(self) -> np.dtype[Any]:
        """The dtype whose numbers these are."""
        return self.rounded or self.dtype

    def holds(self, number: float) -> bool:
        """Return whether a number is neither too large for this precision nor too small.

        float8_e4m3fn has no infinity: there inf and -inf would become NaN.
        """
        with np.errstate(all="ignore"):
            stored = float(np.float32(number).astype(self.name))
        if not np.isfinite(number):
            return bool(np.isnan(number)) or stored == number
        return number == 0 or (bool(np.isfinite(stored)) and stored != 0)


class Value(NamedTuple):
    """What a variable of the old program is in the new one.

    Attributes:
        atom: the operand.
        precision: which numbers it holds; None for what is never cast: integers, float64, keys, tokens.
        scalar: the number, if it is a literal in the program.
        weak: whether it is a scalar that does not widen the other operand.
        was_float32: whether it was cast down, and not computed. Its cotangents are added in float32.
    """

    atom: Any
    precision: Precision | None
    scalar: float | None = None
    weak: bool = False
    was_float32: bool = False


FLOAT32 = Precision(np.dtype(np.float32))
_CAST = {dtype: Precision(dtype) for dtype in map(np.dtype, (np.float32, np.float16, jnp.bfloat16))}


def precision_of(aval: Aval) -> Precision | None:
    """Return the precision of an array that autocast may cast, None for anything else."""
    return _CAST.get(aval.dtype) if is_array(aval) else None


_PRECISIONS = (lax.Precision, lax.DotAlgorithm, lax.DotAlgorithmPreset)
_NO_PRECISION = (lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def cast_of(equation: Equation) -> tuple[Precision | None, Precision | None]:
    """Return what an equation casts from and to; None twice if it casts nothing."""
    if equation.primitive.name != "convert_element_type":
        return None, None
    return precision_of(equation.invars[0].aval), precision_of(equation.outvars[0].aval)


def is_explicit(equation: Equation, low: Precision) -> bool:
    """Return whether the program asks for the precision of a product or convolution.

    `jnp.matmul` and its relatives write the dtype of their operands as `preferred_element_type`, so for
    `dot_general` that dtype says nothing. No function of JAX writes one for the other primitives.
    """
    if has_explicit_precision(equation):
        return True
    asked = equation.params.get("preferred_element_type")
    if asked is None or np.dtype(asked) == low.name:
        return False
    if equation.primitive.name != "dot_general":
        return True
    operands = {atom.aval.dtype for atom in numbers_of(equation) if precision_of(atom.aval)}
    implied = operands if len(operands) == 1 else {FLOAT32.dtype}
    return np.dtype(asked) not in implied


def has_explicit_precision(equation: Equation) -> bool:
    """Return whether `precision` asks for more than the default, for one operand at least.

    It is resolved when JAX traces: what `jax.default_matmul_precision` sets stands here as well.
    """
    precision = equation.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(isinstance(each, _PRECISIONS) and each not in _NO_PRECISION for each in asked)
