"""Precisions, the values that have one, and the equations that ask for one.

A precision is the dtype of an array that autocast may cast.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from preamp.jax.jaxprs import Aval, Equation, is_array, numbers_of

Precision: TypeAlias = np.dtype[Any]

FLOAT32: Precision = np.dtype(np.float32)
LOWS: tuple[Precision, ...] = (np.dtype(np.float16), np.dtype(jnp.bfloat16))
_CASTABLE = frozenset((FLOAT32, *LOWS))


class Value(NamedTuple):
    """What a variable of the old program is in the new one.

    Attributes:
        atom: the operand.
        precision: its dtype; None for what is never cast: integers, float64, keys, tokens.
        scalar: the number, if it is a literal in the program.
        weak: whether it is a scalar that does not widen the other operand.
        weight: whether it is a weight, cast or moved.
    """

    atom: Any
    precision: Precision | None
    scalar: float | None = None
    weak: bool = False
    weight: bool = False


def precision_of(aval: Aval) -> Precision | None:
    """Return the precision of an array that autocast may cast, None for anything else."""
    return aval.dtype if is_array(aval) and aval.dtype in _CASTABLE else None


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
    if asked is None or np.dtype(asked) == low:
        return False
    if equation.primitive.name != "dot_general":
        return True
    operands = {atom.aval.dtype for atom in numbers_of(equation) if precision_of(atom.aval)}
    implied = operands if len(operands) == 1 else {FLOAT32}
    return np.dtype(asked) not in implied


def has_explicit_precision(equation: Equation) -> bool:
    """Return whether `precision` asks for more than the default, for one operand at least.

    It is resolved when JAX traces: what `jax.default_matmul_precision` sets stands here as well.
    """
    precision = equation.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(isinstance(each, _PRECISIONS) and each not in _NO_PRECISION for each in asked)
