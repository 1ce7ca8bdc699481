"""What a policy asks to see of scaled gradients: their peak, and the share of them near the top.

This room measures what `Policy.needs` names, on all devices of a step, and nothing else. It refuses to know
what a policy makes of it, and whether gradients are finite (`gradients`). Each is a pass over the gradients.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp

from preamp.arrays.jax import count_from, largest
from preamp.jax import axes
from preamp.jax.scaling.gradients import inexact_leaves, wide
from preamp.policy import Policy, Reading


def reading_of(policy: Policy[Any], scaled: Any, finite: Any, names: tuple[Hashable, ...] = ()) -> Reading:
    """Return what a policy is told of a step: float32 scalars beside a boolean one.

    Args:
        policy: it says what to measure.
        scaled: the gradients, any tree. Of complex ones the real and the imaginary parts are entries.
        finite: whether they are, on all devices.
        names: axes along which devices hold other gradients of the same step.
    """
    leaves = [part for leaf in inexact_leaves(wide(scaled)) for part in _parts(leaf)]
    return Reading(
        finite,
        peak=_peak(leaves, names) if "peak" in policy.needs else None,
        share=_share(leaves, policy.edge, names) if "share" in policy.needs else None,
    )


def _parts(leaf: Any) -> list[Any]:
    return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def _peak(leaves: list[Any], names: tuple[Hashable, ...]) -> Any:
    """Return the largest magnitude."""
    return axes.max_over(names, [largest(leaf) for leaf in leaves])


def _share(leaves: list[Any], edge: float, names: tuple[Hashable, ...]) -> Any:
    """Return the part of all entries whose magnitude is the edge or more."""
    pairs = [jnp.stack([count_from(edge, leaf), jnp.float32(leaf.size)]) for leaf in leaves]
    count, size = axes.sum_over(names, [jnp.zeros(2), *pairs])
    return count / jnp.maximum(size, 1.0)
