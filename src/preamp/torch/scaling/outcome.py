"""What one optimizer's step came to, and the `Step` that tells of it.

Numbers may still lie on a device; they are read when the `Step` is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from preamp.errors import PolicyError
from preamp.policy import Policy, Reading
from preamp.scaling import Step
from preamp.torch.scaling.losses import UnreadLoss
from preamp.torch.scaling.sight import Sight, combined


@dataclass(slots=True)
class Outcome:
    """What one optimizer's step came to.

    Attributes:
        scale: the scale that was in the loss.
        finite: whether all gradients on all ranks were finite.
        norm: global L2 norm of the gradients before clipping, where it was taken, times `divisor`.
        divisor: what the gradients were multiplied by when the norm was taken.
        culprits: names the parameters whose gradients on this rank are not finite.
        sight: what all ranks have seen in the scaled gradients; None for a policy that does not see.
        skips: whether a step whose gradients are not finite is skipped; a disabled scaler takes it.
        found_inf: 0.0 if `finite`, else 1.0, where that was computed on the device.
    """

    scale: float | Tensor
    finite: bool | Tensor
    norm: float | Tensor | None = None
    divisor: float | Tensor = 1.0
    culprits: Callable[[], tuple[str, ...]] = tuple
    sight: Sight | None = None
    skips: bool = True
    found_inf: Tensor | None = None

    def read(self) -> Outcome:
        """Return the same with every number read to the host."""
        finite = bool(self.finite)
        norm = None if self.norm is None or not finite else float(self.norm) / float(self.divisor)
        named = () if finite else self.culprits()
        sight = self.sight and self.sight.read()
        return Outcome(float(self.scale), finite, norm, 1.0, lambda: named, sight, self.skips)


def reading_of(outcomes: Sequence[Outcome], policy: Policy[Any]) -> Reading:
    """Return what a policy is told of the steps of one or several optimizers.

    Raises:
        PolicyError: for a policy that uses gradient statistics, where other code has looked at the gradients.
    """
    finite = _all_true([outcome.finite for outcome in outcomes])
    if not policy.needs:
        return Reading(finite)
    sights = [outcome.sight for outcome in outcomes if outcome.sight and outcome.sight.peak is not None]
    if len(sights) < len(outcomes):
        raise PolicyError(
            f"{policy!r} needs the {' and the '.join(sorted(policy.needs))} of the gradients, but other code "
            "has looked at them and tells only whether they are finite. Write scaler.unscale_(optimizer) or "
            "scaler.step(optimizer) as they are in GradScaler, or policy=Dynamic(), which needs no more."
        )
    return Reading(finite, *combined(sights))


def step_of(
    outcomes: Sequence[Outcome],
    index: int | Tensor,
    new_scale: float | Tensor | None,
    loss: UnreadLoss | float | None = None,
    buffers: Callable[[], tuple[str, ...]] = tuple,
) -> Step:
    """Return the `Step` of one or several optimizers. Reads what lies on a device.

    Args:
        outcomes: what the steps of the optimizers came to.
        index: of the step.
        new_scale: the scale of the next step, if it is known.
        loss: the loss, not scaled.
        buffers: names the model's buffers that are not finite; called if the step was skipped.
    """
    read = [outcome.read() for outcome in outcomes]
    finite = all(outcome.finite for outcome in read)
    norms = [outcome.norm for outcome in read if isinstance(outcome.norm, float)]
    peaks = [one.sight.peak for one in read if one.sight and one.sight.peak is not None]
    return Step(
        int(index),
        float(read[0].scale),
        finite,
        skipped=any(outcome.skips and not outcome.finite for outcome in read),
        new_scale=None if new_scale is None else float(new_scale),
        loss=loss.read() if isinstance(loss, UnreadLoss) else loss,
        grad_norm=math.hypot(*norms) if len(norms) == len(read) else None,
        peak=max(peaks) if finite and len(peaks) == len(read) else None,
        culprits=tuple(name for outcome in read for name in outcome.culprits()),
        buffers=() if finite else buffers(),
    )


def _all_true(finite: list[bool | Tensor]) -> bool | Tensor:
    first, *others = sorted(finite, key=lambda one: not isinstance(one, Tensor))  # tensors first
    for one in others:
        first = first & (one.to(first.device) if isinstance(one, Tensor) else one)  # type: ignore[union-attr]
    return first
