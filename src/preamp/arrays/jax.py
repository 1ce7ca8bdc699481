"""JAX: how large an array's entries are, and scalars on the host.

This room measures single arrays and reads scalars, for preamp.jax and for Keras on JAX. It refuses to know
what for, and what other devices have.

Each measure is one pass over memory: XLA on a CPU makes one of several reductions only where they are written
as one, and is then slower. What compares entries or counts integers would be three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from preamp.errors import UsageError


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


def to_host(scalars: Sequence[Any]) -> list[Any]:
    """Read scalars to the host, all of them at once.

    Raises:
        UsageError: inside a function that JAX transforms.
    """
    if any(isinstance(scalar, jax.core.Tracer) for scalar in scalars):
        raise UsageError(
            "what a step came to is read to the host, which no function can do while JAX transforms it. "
            "Ask for it outside, after the step."
        )
    values: list[Any] = jax.device_get(list(scalars))
    return values
