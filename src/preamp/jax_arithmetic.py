"""JAX: how large an array's entries are.

This room measures single arrays, for preamp.jax and for Keras on JAX. It refuses to know what for, and what
other devices have.

Each measure is one pass over memory: XLA on a CPU makes one of several reductions only where they are written
as one, and is then slower. What compares entries or counts integers would be three.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["count_from", "largest"]


def largest(array: Any) -> Any:
    """Return the largest magnitude, a float32 scalar: 0 of nothing, float32's largest of larger ones."""
    peak = jnp.max(jnp.abs(array), initial=0.0)
    return jnp.minimum(peak, np.finfo(np.float32).max).astype(jnp.float32)


def count_from(edge: float, array: Any) -> Any:
    """Return how many entries have a magnitude of the edge or more, a float32 scalar.

    Args:
        edge: above 0.
        array: float32 or float64.
    """
    below = np.nextafter(array.dtype.type(edge), array.dtype.type(0.0))
    magnitude = jnp.abs(lax.optimization_barrier(array))  # or XLA stores the magnitudes, for the peak as well
    return jnp.sum(jnp.sign(jnp.maximum(magnitude, below) - below)).astype(jnp.float32)
