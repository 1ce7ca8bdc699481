"""Precisions, and values that have one: what is known of an operand while a program is rewritten."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from preamp.jax.jaxprs import is_array


class Precision(NamedTuple):
    """What numbers an array holds.

    Attributes:
        dtype: what it is stored in.
        rounded: the dtype its numbers are rounded to, where that is emulated.
    """

    dtype: np.dtype[Any]
    rounded: np.dtype[Any] | None = None

    @property
    def name(self) -> np.dtype[Any]:
        """The dtype whose numbers these are."""
        return self.rounded or self.dtype

    def holds(self, number: float) -> bool:
        """Tell whether a number is neither too large for this precision nor too small."""
        with np.errstate(all="ignore"):
            stored = float(np.float32(number).astype(self.name))
        return not np.isfinite(number) or number == 0 or (bool(np.isfinite(stored)) and stored != 0)


class Value(NamedTuple):
    """What a variable of the old program is in the new one.

    Attributes:
        atom: the operand.
        precision: what numbers it holds; None for what is never cast: integers, float64, keys, tokens.
        scalar: the number, where it is written in the program.
        weak: a scalar that does not widen what it meets.
    """

    atom: Any
    precision: Precision | None
    scalar: float | None = None
    weak: bool = False


FLOAT32 = Precision(np.dtype(np.float32))
_CAST = {dtype: Precision(dtype) for dtype in map(np.dtype, (np.float32, np.float16, jnp.bfloat16))}


def precision_of(aval: Any) -> Precision | None:
    """Return the precision of an array that autocast may cast, None for anything else."""
    return _CAST.get(aval.dtype) if is_array(aval) else None
