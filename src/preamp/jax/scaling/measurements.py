"""Measure scaled gradients: whether they are finite, their norm, and what the policy needs."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from preamp.arrays.jax import global_norm, gradient_stats
from preamp.jax import axes
from preamp.policy import Policy
from preamp.scaling import Measured


def measure(
    policy: Policy[Any] | None, gradients: list[Array], scale: Array, names: tuple[Hashable, ...] = ()
) -> Measured[Array]:
    """Return what one step's gradients are like, on all devices of the step.

    They count as finite if their unscaled norm is finite, so a scale of 0 or NaN counts as an overflow.

    Args:
        policy: what it needs is measured besides the norm, each in one more pass over the gradients. None:
            nothing.
        gradients: floating or complex, still scaled. Of complex ones the real and the imaginary parts are
            entries.
        scale: the scale that was in the loss, a float32 scalar.
        names: axes along which devices hold other gradients of the same step.

    Returns:
        The norm is a float64 if any gradient is, else a float32.
    """
    add, maximum = partial(axes.sum_over, names), partial(axes.max_over, names)
    norm = global_norm(gradients, add)
    norm = norm * (1.0 / scale.astype(norm.dtype))
    stats = (
        gradient_stats(policy.needs, policy.edge, gradients, add, maximum) if policy and policy.needs else {}
    )
    return Measured(jnp.isfinite(norm), scale, norm, **stats)
