"""Powers of two and logarithms, using only Python's operators and an injected ``where``.

Every framework gets the same bits: all factors and thresholds are powers of two, exact in float32, so that no
compiler's choice of instructions matters. Python floats take a shortcut through `math`.

Numbers are taken as float32 scalars. Below float32's smallest normal number, NaN included, they count as that
number, because some frameworks flush subnormal numbers to 0; inf counts as float32's largest number.

No sum has two constants: TensorFlow's graphs turn ``(x - x) + 1`` into ``x + (1 - x)``, which is 0 for a
large x. A ``where`` between them keeps them apart, and gives a constant the type of a scalar.
"""

from __future__ import annotations

import math

from preamp.checks import FLOAT32_MAX, FLOAT32_TINY
from preamp.policy.base import Scalar, Where

GRID = 2.0**-14  # sums of some multiples of it below 2**9 are exact in float32
_STEPS = (64, 32, 16, 8, 4, 2, 1)  # their sum is 127: from 1 they reach the largest power of a float32
_LOWEST = -126.0


def log2_near(x: Scalar, where: Where) -> Scalar:
    """Return the exponent of `x` plus its fraction, on the grid: log2 of it, or 0.09 less."""
    if type(x) is float:
        mantissa, exponent = math.frexp(x if FLOAT32_TINY < x < FLOAT32_MAX else _normal(x))
        return exponent - 1 + (2.0 * mantissa - 1.0) // GRID * GRID
    x = _normal_scalar(x, where)
    power, exponent = _floor(x, where)
    return exponent + on_grid(x / power - 1.0)


def on_grid(x: Scalar) -> Scalar:
    """Round down to a multiple of 2**-14.

    The quotient of two such multiples below 2**10 is rounded as if it were exact: float32 does not round a
    quotient up to the next multiple.
    """
    return x // GRID * GRID


def two_to(exponent: Scalar, where: Where) -> Scalar:
    """Return 2 to the `exponent` rounded down, which is finite: a power of two from 2**-126 to 2**127."""
    if type(exponent) is float:
        return math.ldexp(1.0, math.floor(min(max(exponent, _LOWEST), 127.0)))
    negative = exponent < 0.0
    power = where(negative, FLOAT32_TINY, where(negative, exponent, 1.0))
    left = where(negative, where(negative, exponent, 0.0) - _LOWEST, exponent)
    for step in _STEPS:
        fits = left >= step
        power, left = where(fits, power * 2.0**step, power), where(fits, left - step, left)
    return power


def _floor(x: Scalar, where: Where) -> tuple[Scalar, Scalar]:
    """Return the largest power of two that is not above a normal number, and its exponent."""
    small = x < 1.0
    power = where(small, FLOAT32_TINY, where(small, x, 1.0))
    exponent = where(small, _LOWEST, where(small, x, 0.0))
    for step in _STEPS:
        larger = power * 2.0**step
        fits = larger <= x
        power, exponent = where(fits, larger, power), where(fits, exponent + step, exponent)
    return power, exponent


def _normal(x: float) -> float:
    return min(x, FLOAT32_MAX) if x > FLOAT32_TINY else FLOAT32_TINY


def _normal_scalar(x: Scalar, where: Where) -> Scalar:
    return where(x > FLOAT32_TINY, where(x < FLOAT32_MAX, x, FLOAT32_MAX), FLOAT32_TINY)
