"""How far a trainer's log-probabilities are from those of the sampler that drew the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from preamp.checks import shown
from preamp.errors import UsageError
from preamp.record.mismatch import Mismatch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def mismatch(
    logp_trainer: Array | NDArray[np.floating],
    logp_sampler: Array | NDArray[np.floating],
    mask: Array | NDArray[np.generic] | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Mismatch[Array]:
    """Measure how far the trainer's probabilities are from the sampler's, on tokens that the sampler drew.

    In reinforcement learning of language models one program samples (vLLM, SGLang) and another trains, with
    the same weights and other kernels. Their different rounding makes training off-policy.

    It works under `jit`, `vmap` and `grad`; no gradient flows. Under `jit` sharded arrays are measured as a
    whole; inside `shard_map` each device measures its own tokens.

    Args:
        logp_trainer: log-probabilities of the sampled tokens in the trainer's model, with the weights that
            the sampler had. Any shape and floating dtype; dtypes narrower than float32 are widened to it.
        logp_sampler: log-probabilities of the same tokens in the same order, from the sampler, at the same
            temperature and of the same shape.
        mask: of the same shape, True or above 0 for the tokens to count: the generated ones, without prompt
            and padding. Elsewhere the log-probabilities may be anything, even NaN.
        clip_low: a ratio below 1 - clip_low counts as clipped.
        clip_high: a ratio above 1 + clip_high counts as clipped.

    Returns:
        Scalar arrays. A `Mismatch` is a pytree, so a compiled step can return it.

    Raises:
        UsageError: for anything but floating arrays, for shapes that differ, and for a limit out of range.

    >>> measured = mismatch(jnp.array([-1.0, -2.25]), jnp.array([-1.0, -2.0]))
    >>> print(f"{measured.k1:.3f} {measured.k3:.4f} {measured.max_ratio:.2f} {measured.clipped:.2f}")
    0.125 0.0144 1.00 0.50
    """
    trainer, sampler = _widened("logp_trainer", logp_trainer), _widened("logp_sampler", logp_sampler)
    if trainer.dtype != sampler.dtype:
        trainer, sampler = trainer.astype(jnp.float64), sampler.astype(jnp.float64)
    if mask is None:
        counts = jnp.ones(trainer.shape, bool)
    elif isinstance(mask, Array | np.ndarray):
        counts = jnp.asarray(mask)
        counts = counts if counts.dtype == bool else counts > 0
    else:
        raise UsageError(f"mask={shown(mask)} is not an array. Write mask=jnp.asarray(mask).")
    return Mismatch.of_log_probs(jnp, trainer, sampler, counts, clip_low=clip_low, clip_high=clip_high)


def _widened(name: str, values: object) -> Array:
    """Return log-probabilities as constants for `grad`, in float32 unless they are wider."""
    if not isinstance(values, Array | np.ndarray):
        raise UsageError(f"{name}={shown(values)} is not an array. Write {name}=jnp.asarray({name}).")
    array = lax.stop_gradient(jnp.asarray(values))
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise UsageError(
            f"{name} has the dtype {array.dtype}: log-probabilities are floats. Are these the tokens? Write "
            f"{name}=jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]."
        )
    return array if array.dtype == jnp.float64 else array.astype(jnp.float32)
