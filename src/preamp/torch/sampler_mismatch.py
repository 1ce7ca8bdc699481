"""How far a trainer's log-probabilities are from those of the sampler that drew the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from preamp.checks import shown
from preamp.errors import UsageError
from preamp.record.mismatch import Mismatch


def mismatch(
    logp_trainer: Tensor,
    logp_sampler: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Mismatch[Tensor]:
    """Measure how far the trainer's probabilities are from the sampler's, on tokens that the sampler drew.

    In reinforcement learning of language models one program samples (vLLM, SGLang) and another trains, with
    the same weights and other kernels. Their different rounding makes training off-policy.

    Nothing is read on the host, no gradient flows, and it compiles with `fullgraph=True`. The result is the
    same under `autocast`. Each rank measures its own tokens; gather the log-probabilities to measure all.

    Args:
        logp_trainer: log-probabilities of the sampled tokens in the trainer's model, with the weights that
            the sampler had. Any shape and floating dtype; narrower than float32 is computed in float32.
        logp_sampler: log-probabilities of the same tokens in the same order, from the sampler, at the same
            temperature. Of the same shape.
        mask: of the same shape, True or above 0 for the tokens to count: the generated ones, without prompt
            and padding. Elsewhere log-probabilities may be anything, NaN as well.
        clip_low: a ratio below 1 - clip_low counts as clipped. verl's `clip_ratio_low`.
        clip_high: a ratio above 1 + clip_high counts as clipped. verl's `clip_ratio_high`.

    Returns:
        0-dim tensors.

    Raises:
        UsageError: for what is not a floating tensor, for shapes or devices that differ, and for a limit out
            of range.

    >>> measured = mismatch(torch.tensor([-1.0, -2.25]), torch.tensor([-1.0, -2.0]))
    >>> print(f"{measured.k1:.3f} {measured.k3:.4f} {measured.max_ratio:.2f} {measured.clipped:.2f}")
    0.125 0.0144 1.00 0.50
    """
    trainer = _widened("logp_trainer", logp_trainer)
    sampler = _widened("logp_sampler", logp_sampler)
    _check_device("logp_sampler", sampler, trainer)
    if trainer.dtype != sampler.dtype:
        trainer, sampler = trainer.double(), sampler.double()
    if mask is None:
        counts = torch.ones_like(trainer, dtype=torch.bool)
    elif isinstance(mask, Tensor):
        _check_device("mask", mask, trainer)
        counts = mask > 0
    else:
        raise UsageError(f"mask={shown(mask)} is not a tensor. Write mask=torch.as_tensor(mask).")
    return Mismatch.of_log_probs(torch, trainer, sampler, counts, clip_low=clip_low, clip_high=clip_high)


def _widened(name: str, values: object) -> Tensor:
    """Return log-probabilities without their graph, in float32 unless they are wider."""
    if not isinstance(values, Tensor):
        raise UsageError(f"{name}={shown(values)} is not a tensor. Write {name}=torch.as_tensor({name}).")
    if not values.is_floating_point():
        raise UsageError(
            f"{name} has the dtype {values.dtype}: log-probabilities are floats. Are these the tokens? Write "
            f"{name}=logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]."
        )
    values = values.detach()
    return values if values.dtype == torch.float64 else values.float()


def _check_device(name: str, values: Tensor, trainer: Tensor) -> None:
    if values.device != trainer.device:
        raise UsageError(
            f"{name} is on {values.device} and logp_trainer on {trainer.device}. "
            f"Write {name}.to(logp_trainer.device)."
        )
