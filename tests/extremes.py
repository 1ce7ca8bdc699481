"""Extreme gradients and loss scales, with what a step has to make of them, computed in float64.

Every adapter is tested with these rows, so that a step is skipped in all of them or in none. It needs NumPy
alone: entries are float64 numbers that `dtype` holds exactly, and each test makes its framework's arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LARGEST = {
    "float16": 65504.0,
    "bfloat16": float(np.finfo(np.float32).max) * (2 - 2**-7) / (2 - 2**-23),
    "float32": float(np.finfo(np.float32).max),
    "float64": float(np.finfo(np.float64).max),
}


class Extreme(NamedTuple):
    """The gradients of one step.

    Attributes:
        name: the id of a test.
        dtype: of the gradients, a key of `LARGEST`.
        scale: the loss scale that is in them, a power of two.
        leaves: the entries of each gradient, still scaled. The shapes are (4,), (2, 3) and (1,).
    """

    name: str
    dtype: str
    scale: float
    leaves: tuple[np.ndarray, ...]

    def unscaled(self) -> list[np.ndarray]:
        """Return the gradients without the scale, in extended precision."""
        return [leaf.astype(np.longdouble) / self.scale for leaf in self.leaves]

    def finite(self, stored: str | None = None) -> bool:
        """Return whether all entries are finite, and stay so when unscaled.

        Args:
            stored: the dtype of unscaled gradients; None for `wide`.
        """
        limit = LARGEST[stored or self.wide]
        entries = [np.abs(leaf).max() for leaf in (*self.leaves, *self.unscaled())]
        return bool(np.isfinite(entries).all() and max(map(float, entries[len(self.leaves) :])) <= limit)

    @property
    def wide(self) -> str:
        """The dtype that is computed with: float64 or float32."""
        return "float64" if self.dtype == "float64" else "float32"

    def norm(self) -> float:
        """Return the L2 norm of the unscaled gradients, if they are finite, in float32: inf above 3.4e38."""
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(_norm(self.unscaled())))

    def clipped(self, max_norm: float) -> list[np.ndarray]:
        """Return the unscaled gradients, if they are finite, clipped to a global norm."""
        norm, gradients = _norm(self.unscaled()), self.unscaled()
        if norm > max_norm:
            gradients = [gradient / norm * np.longdouble(max_norm) for gradient in gradients]
        return [gradient.astype(np.float64) for gradient in gradients]


def off_by(row: Extreme, max_norm: float | None, gradients: list[np.ndarray]) -> float:
    """Return by how much gradients differ from those of the row, clipped, in units of the largest of these.

    What float32 has no normal numbers for counts as 0, which it is on many devices.
    """
    right = row.clipped(np.inf if max_norm is None else max_norm)
    most = max(float(np.abs(leaf).max()) for leaf in right)
    apart = max(float(np.abs(one - leaf).max()) for one, leaf in zip(gradients, right, strict=True))
    return 0.0 if apart < np.finfo(np.float32).tiny else apart / most


def _norm(gradients: list[np.ndarray]) -> np.longdouble:
    return np.sqrt(sum((np.square(g).sum() for g in gradients), np.longdouble(0)))


def _row(name: str, dtype: str, scale: float, *entries: float) -> Extreme:
    """Return a row whose 11 entries repeat the given ones, rounded to the dtype."""
    bits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype]
    mantissas, exponents = np.frexp(np.resize(entries, 11))
    flat = np.ldexp(np.round(mantissas * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponents)
    return Extreme(name, dtype, scale, (flat[:4], flat[4:10].reshape(2, 3), flat[10:]))


def _one(name: str, dtype: str, scale: float, entry: float, other: float = 1.0) -> Extreme:
    """Return a row in which only one entry, in the middle of the second gradient, is extreme."""
    return _row(name, dtype, scale, *[other] * 7, entry, *[other] * 3)


BELOW = 2.0**-20  # a scale below 1

EXTREMES = [
    _row("ordinary", "float32", 2.0**16, 3.0, -4.0, 1e4),
    _row("zeros", "float32", 2.0**16, 0.0),
    # Squares overflow float32, and the entries do not.
    _row("squares overflow", "float32", 1.0, 1e20, -1e20),
    _row("squares overflow while scaled", "float32", 2.0**16, 1e20, 3e19, -1.0),
    _row("sums overflow", "float32", 1.0, 3e38, 3e38),
    _row("norm overflows", "float32", 1.0, 3e38, -3e38),
    _row("norm overflows unscaled", "float32", 0.5, 1.5e38, -1.5e38),
    _row("largest scale", "float32", 2.0**126, 3e38, -1e38),
    _one("one entry's square overflows", "float32", 1.0, 1e30),
    _one("one entry is near the end", "float32", 1.0, -3.4e38, 0.0),
    _row("huge beside tiny", "float32", 1.0, 1e25, 1e-30, -1e-20),
    # Scales below 1: gradients that are finite can overflow when they are unscaled.
    _row("scale below 1", "float32", BELOW, 3.0, -4.0),
    _row("squares overflow unscaled", "float32", BELOW, 1e25, -3e30),
    _row("overflow unscaled", "float32", 0.25, 1e38, -1e38),
    _one("one entry overflows unscaled", "float32", BELOW, 1e33),
    _row("smallest scale", "float32", 2.0**-126, 1.0, 3.0),
    _one("smallest scale, overflow", "float32", 2.0**-126, 5.0, 1.0),
    # Squares underflow float32, and the entries do not.
    _row("squares underflow", "float32", 1.0, 1e-30, -2e-30),
    _row("squares underflow while scaled", "float32", BELOW, 1e-25, -2e-25),
    _row("squares underflow, unscaled too", "float32", 2.0**16, 1e-22),
    _one("one entry's square underflows", "float32", 1.0, 1e-25, 0.0),
    # Not finite.
    _one("inf", "float32", 2.0**16, np.inf),
    _one("-inf", "float32", 1.0, -np.inf),
    _one("nan", "float32", 1.0, np.nan),
    _one("nan beside huge", "float32", 1.0, np.nan, 1e30),
    _one("inf beside huge", "float32", BELOW, np.inf, 1e30),
    _row("inf and -inf", "float32", 1.0, np.inf, -np.inf, 1.0),
    # Half precision.
    _row("float16", "float16", 1.0, 65504.0, -60000.0),
    _row("float16, scaled", "float16", 2.0**16, 65504.0, 2.0**-24),
    _row("float16, scale below 1", "float16", 2.0**-10, 65504.0, -1.0),
    _row("float16, smallest", "float16", 1.0, 2.0**-24),
    _one("float16, inf", "float16", 1.0, np.inf),
    _one("float16, nan", "float16", 2.0**16, np.nan),
    _row("bfloat16", "bfloat16", 1.0, 1e20, -1e20),
    _row("bfloat16, norm overflows", "bfloat16", 1.0, 3e38, -2e38),
    _row("bfloat16, overflow unscaled", "bfloat16", 0.5, 3e38, 1.0),
    _row("bfloat16, tiny", "bfloat16", 1.0, 1e-30),
    _one("bfloat16, inf", "bfloat16", 2.0**16, -np.inf),
    # float64, where the framework has it. `norm` is inf where a float32 is.
    _row("float64", "float64", 1.0, 3.0, -4.0),
    _row("float64, beyond float32", "float64", 1.0, 1e60, -1e60),
    _row("float64, squares overflow", "float64", 1.0, 1e200, -1e200),
    _row("float64, squares underflow", "float64", 1.0, 1e-200),
    _row("float64, overflow unscaled", "float64", BELOW, 1e305),
    _one("float64, nan", "float64", 1.0, np.nan, 1e200),
]
