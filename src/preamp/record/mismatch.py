"""How far the probabilities that a trainer computes are from those of the sampler that drew the tokens."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from preamp.checks import is_number, shown
from preamp.errors import UsageError

__all__ = ["Mismatch"]

T = TypeVar("T")
Values: TypeAlias = Any  # an array of any framework: no type that Python knows has the operators of all
SMALL = 0.25  # below, a difference of logarithms is taken as a series
HIGHEST = 0.01  # of a log-probability: 0, and some room for rounding in low precision


class Mismatch(NamedTuple, Generic[T]):
    """The mismatch between a trainer and a sampler, measured on tokens that the sampler drew.

    Every field is a scalar array of the framework, on the arrays' device and not copied to the host:
    integers for `tokens` and `invalid`, else float32, or float64 where log-probabilities are. The ratio of a
    token is p_trainer / p_sampler, its importance weight. Everything but the counts is NaN where `tokens` is
    0. To average means over several batches, weight them by `tokens`.

    Attributes:
        tokens: how many tokens the other numbers are about.
        invalid: tokens of the mask that are left out because a log-probability is NaN, infinite or above
            0.01. If it is not 0, a model has overflowed, padding is not masked, logits or probabilities were
            passed, or the trainer gives a sampled token the probability 0, and then the KL divergence is
            infinite.
        k1: KL(sampler || trainer) per token, estimated as the mean of -log(ratio). Unbiased; may be negative.
        k3: the same, estimated as the mean of ratio - 1 - log(ratio). Unbiased, never negative, and of less
            variance where the two are close. It is computed without cancellation, also for ratios near 1.
        mean_ratio: the mean of the ratios, 1 in expectation.
        min_ratio: the smallest ratio.
        max_ratio: the largest ratio, inf where it overflows.
        clipped: the share of tokens whose ratio is below 1 - clip_low or above 1 + clip_high, which PPO's
            objective clips if the sign of the advantage allows it.
        effective_share: the effective sample size of the ratios as weights, (sum of w)^2 / sum of w^2,
            divided by `tokens`: 1 if all are equal.
        mean_abs_diff: the mean distance between the two log-probabilities of a token.
        max_abs_diff: the largest distance between them, which is the largest absolute log-ratio.
        mean_prob_diff: the mean distance between the two probabilities of a token.
        max_prob_diff: the largest of these distances.

    Sources: k1 and k3 are those of Schulman, "Approximating KL Divergence" (2020); the effective sample size
    is Kish's, "Survey Sampling" (1965).
    """

    tokens: T
    invalid: T
    k1: T
    k3: T
    mean_ratio: T
    min_ratio: T
    max_ratio: T
    clipped: T
    effective_share: T
    mean_abs_diff: T
    max_abs_diff: T
    mean_prob_diff: T
    max_prob_diff: T

    @classmethod
    def of_log_probs(
        cls,
        xp: ModuleType,
        trainer: Values,
        sampler: Values,
        mask: Values,
        *,
        clip_low: float,
        clip_high: float,
    ) -> Mismatch[Any]:
        """Return the mismatch of two arrays of log-probabilities, computed with a framework's functions.

        `preamp.torch.mismatch` and `preamp.jax.mismatch` call it.

        Args:
            xp: the module with the functions: `torch`, `jax.numpy` or `numpy`.
            trainer: log-probabilities of any shape, float32 or float64.
            sampler: likewise, of the same shape and dtype.
            mask: booleans of the same shape, True for the tokens to measure.
            clip_low: see `Mismatch.clipped`.
            clip_high: likewise.

        Raises:
            UsageError: for shapes that differ, and for a limit that is out of range.
        """
        _check_shape("logp_sampler", sampler, trainer)
        _check_shape("mask", mask, trainer)
        _check_limit("clip_low", clip_low, 1.0)
        _check_limit("clip_high", clip_high, math.inf)
        difference = trainer - sampler
        valid = xp.isfinite(difference) & (trainer <= HIGHEST) & (sampler <= HIGHEST)
        counted = valid & mask
        tokens = xp.sum(counted)
        count = xp.asarray(tokens, dtype=difference.dtype)  # JAX's strict promotion divides by no integer

        def mean(values: Values) -> Values:
            return xp.sum(xp.where(counted, values, 0.0)) / count

        def largest(values: Values) -> Values:
            if 0 in values.shape:  # of which no framework takes a maximum
                return mean(values)
            return xp.where(tokens > 0, xp.max(xp.where(counted, values, -math.inf)), math.nan)

        log_ratio = xp.where(counted, difference, 0.0)
        ratio, distance = xp.exp(log_ratio), xp.abs(log_ratio)
        outside = (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)
        highest = largest(log_ratio)
        weight = xp.exp(log_ratio - highest)  # at most 1, so that no square overflows
        gap = xp.abs(xp.exp(trainer) - xp.exp(sampler))
        return cls(
            tokens=tokens,
            invalid=xp.sum(mask) - tokens,
            k1=-mean(log_ratio),
            k3=mean(_k3(xp, log_ratio)),
            mean_ratio=mean(ratio),
            min_ratio=xp.exp(-largest(-log_ratio)),
            max_ratio=xp.exp(highest),
            clipped=mean(xp.where(outside, 1.0, 0.0 * log_ratio)),
            effective_share=mean(weight) ** 2 / mean(weight * weight),
            mean_abs_diff=mean(distance),
            max_abs_diff=largest(distance),
            mean_prob_diff=mean(gap),
            max_prob_diff=largest(gap),
        )


def _k3(xp: ModuleType, x: Values) -> Values:
    """Return exp(x) - 1 - x.

    In float32 the subtraction leaves nothing of it where x is 1e-7, as it is between two float32 models, so
    for small x its Taylor series is summed.
    """
    series = 1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * (1.0 + x / 7.0))))
    return xp.where(xp.abs(x) < SMALL, 0.5 * x * x * series, xp.expm1(x) - x)


def _check_shape(name: str, values: Values, trainer: Values) -> None:
    """Refuse another shape, which the frameworks would broadcast: [4] and [4, 1] to [4, 4]."""
    found, wanted = tuple(values.shape), tuple(trainer.shape)
    if found != wanted:
        raise UsageError(
            f"{name} has the shape {list(found)} and logp_trainer {list(wanted)}, but an entry has to be "
            "about the same token in both. If the order is the same, "
            f"write {name}.reshape(logp_trainer.shape)."
        )


def _check_limit(name: str, value: object, most: float) -> None:
    if not (is_number(value) and 0.0 < value <= most):
        bounds = "above 0" if math.isinf(most) else f"above 0 and at most {most:g}"
        raise UsageError(f"{name}={shown(value)} must be a number {bounds}. Write {name}=0.2, as in PPO.")
