"""Measure a step: whether its gradients are finite, their norm, what the policy needs, the mean loss."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from preamp.arrays.jax import Size, global_norm, peak, size_of
from preamp.jax import axes
from preamp.jax.scaling.states import UNKNOWN_LOSS
from preamp.policy import Policy
from preamp.scaling import Measured


def measure(
    policy: Policy[Any] | None,
    gradients: list[Array],
    scale: Array,
    names: tuple[Hashable, ...] = (),
    loss: Array | None = None,
    loss_names: Iterable[Hashable] = (),
) -> tuple[Measured[Array], Size]:
    """Measure the gradients and the loss of one step, over all devices of the step.

    The gradients are finite if all entries are, and stay so when unscaled: a scale of 0 or NaN counts as an
    overflow.

    Args:
        policy: the peak is measured if it needs that, in one more pass over the gradients. None: it is not.
        gradients: floating or complex, still scaled. The real and imaginary parts of a complex one are
            separate entries.
        scale: the scale that the loss was multiplied by, a float32 scalar.
        names: axes along which devices hold different gradients of the same step.
        loss: the unscaled loss, a float32 scalar; `UNKNOWN_LOSS` if it is not known.
        loss_names: axes along which devices may have different losses but have the same gradients. Axes that
            JAX tracks need not be named.

    Returns:
        The reading, and what clips. The norm is float64 if any gradient is, else float32. The loss is the
        mean over the devices that take the same step, so that a guard decides the same on all of them; it is
        a copy.
    """
    add, maximum = partial(axes.sum_over, names), partial(axes.max_over, names)
    if loss is not None and names and not axes.tracked(names):
        norm, loss = _norm_and_mean(gradients, loss, names)
    else:
        norm = global_norm(gradients, add)
    size = size_of(gradients, scale, norm, add, lambda peaks: maximum([peaks]))
    largest = peak(gradients, maximum) if policy and policy.needs_peak else None
    if loss is not None:
        # `shard_map` knows the other axes along which the loss differs, and the step does not.
        apart = axes.varying(loss) - axes.varying(size.finite)
        apart |= {name for name in loss_names if name not in names and not axes.tracked([name])}
        in_order = tuple(sorted(apart, key=str))  # the same program in each process
        loss = _joined(lax.pmean(_split(loss), in_order)) if in_order else loss + 0.0
    return Measured(size.finite, scale, size.norm, largest, loss), size


def _norm_and_mean(gradients: list[Array], loss: Array, names: tuple[Hashable, ...]) -> tuple[Array, Array]:
    """Return the norm of all devices' gradients and the mean of their losses, in one reduction."""
    mean = loss

    def add(totals: Sequence[Array]) -> Array:
        nonlocal mean
        squares = sum(totals[1:], totals[0])
        parts = _split(loss) / lax.psum(1, names)
        total: Array = lax.psum(jnp.concatenate([squares[None], parts.astype(squares.dtype)]), names)
        mean = _joined(total[1:].astype(loss.dtype))
        return total[0]

    return global_norm(gradients, add), mean


def _split(loss: Array) -> Array:
    """Return a loss as two numbers whose means give the mean loss, or show that a device does not know it."""
    known = loss != UNKNOWN_LOSS
    return jnp.stack([jnp.where(known, loss, 0.0), jnp.where(known, 0.0, 1.0)])


def _joined(parts: Array) -> Array:
    return jnp.where(parts[1] > 0.0, UNKNOWN_LOSS, parts[0])
