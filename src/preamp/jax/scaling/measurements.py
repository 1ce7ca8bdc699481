"""Measure a step: whether its gradients are finite, their norm, what the policy needs, the mean loss."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from preamp.arrays import LARGEST_NORM
from preamp.arrays.jax import Size, amax, global_norm, size_of
from preamp.jax import axes
from preamp.jax.scaling.states import PendingState
from preamp.scaling import Measured

MOST_SCALE = 2.0**126


def measure(
    gradients: list[Array],
    scale: Array,
    loss: Array,
    names: tuple[Hashable, ...] = (),
    *,
    needs_amax: bool,
) -> tuple[Measured[Array], Size]:
    """Measure the gradients and the loss of one step, over all devices of the step.

    The gradients are finite if all entries are, and stay so when unscaled: a scale of 0 or NaN counts as an
    overflow, and so does one whose inverse is subnormal, which XLA flushes to 0.

    Args:
        gradients: floating or complex, still scaled. The real and imaginary parts of a complex one are
            separate entries.
        scale: the scale that the loss was multiplied by, a float32 scalar.
        loss: the unscaled loss, a float32 scalar.
        names: axes along which devices hold different gradients of the same step.
        needs_amax: whether to measure the amax, in one more pass over the gradients.

    Returns:
        The reading, and what clips. The norm is float64 if any gradient is, else float32. The loss is the
        mean over the devices that take the same step, so that a guard decides the same on all of them; it is
        a copy.
    """
    add, maximum = partial(axes.sum_over, names), partial(axes.max_over, names)
    if names and not axes.tracked(names):
        norm, loss = _norm_and_mean(gradients, loss, names)
    else:
        norm = global_norm(gradients, add)
    size = size_of(gradients, scale, norm, add, lambda amaxes: maximum([amaxes]))
    size = size._replace(finite=size.finite & (scale <= MOST_SCALE))
    largest = amax(gradients, maximum) if needs_amax else None
    # `shard_map` knows the other axes along which the loss differs, and the step does not.
    apart = tuple(sorted(axes.varying(loss) - axes.varying(size.finite), key=str))  # in one order everywhere
    loss = lax.pmean(loss, apart) if apart else loss + 0.0
    return Measured(size.finite, scale, size.norm, largest, loss), size


def measure_again(gradients: list[Array], pending: PendingState, loss: Array) -> tuple[Measured[Array], Size]:
    """Measure unscaled gradients once more, which other code may have changed since the backward pass.

    Where squares overflow now and did so then, the norm and the verdict from then count: another pass would
    tell only whether other code has made an entry inf.
    """
    norm = global_norm(gradients)
    unit, ratio = pending.unit.astype(norm.dtype), pending.ratio.astype(norm.dtype)
    overflows = (norm > LARGEST_NORM) & (unit * ratio > LARGEST_NORM)
    finite = pending.finite & (overflows | jnp.isfinite(norm))
    unit, ratio = jnp.where(overflows, unit, 1.0), jnp.where(overflows, ratio, norm)
    norm = jnp.where(overflows, unit * ratio, norm)
    size = Size(finite, norm, jnp.zeros(0), unit, ratio)
    return Measured(finite, pending.state.policy_state.scale, norm, pending.amax, loss + 0.0), size


def _norm_and_mean(gradients: list[Array], loss: Array, names: tuple[Hashable, ...]) -> tuple[Array, Array]:
    """Return the norm of all devices' gradients and the mean of their losses, in one reduction."""
    mean = loss

    def add(totals: Sequence[Array]) -> Array:
        nonlocal mean
        squares = sum(totals[1:], totals[0])
        both = jnp.stack([squares, (loss / lax.psum(1, names)).astype(squares.dtype)])
        total: Array
        total, averaged = lax.psum(both, names)
        mean = averaged.astype(loss.dtype)
        return total

    return global_norm(gradients, add), mean
