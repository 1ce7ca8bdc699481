"""What one optimizer's step came to, and the `Step` that tells of it.

Numbers may still lie on a device; they are read when the `Step` is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from preamp.trace import Step

__all__ = ["Outcome", "step_of"]


@dataclass(slots=True)
class Outcome:
    """What one optimizer's step came to.

    Attributes:
        scale: the scale that was in the loss.
        finite: whether all gradients on all ranks were finite.
        norm: global L2 norm of the gradients before clipping, where it was taken, times `divisor`.
        divisor: what the gradients were multiplied by when the norm was taken.
        culprits: names the parameters whose gradients on this rank are not finite.
    """

    scale: float | Tensor
    finite: bool | Tensor
    norm: float | Tensor | None = None
    divisor: float | Tensor = 1.0
    culprits: Callable[[], tuple[str, ...]] = tuple

    def read(self) -> Outcome:
        """Return the same with every number read to the host."""
        finite = bool(self.finite)
        norm = None if self.norm is None or not finite else float(self.norm) / float(self.divisor)
        named = () if finite else self.culprits()
        return Outcome(float(self.scale), finite, norm, 1.0, lambda: named)


def step_of(outcomes: Sequence[Outcome], index: int | Tensor, new_scale: float | Tensor | None) -> Step:
    """Return the `Step` of one or several optimizers. Reads what lies on a device."""
    read = [outcome.read() for outcome in outcomes]
    finite = all(outcome.finite for outcome in read)
    norms = [outcome.norm for outcome in read if isinstance(outcome.norm, float)]
    return Step(
        int(index),
        float(read[0].scale),
        finite,
        skipped=not finite,
        new_scale=None if new_scale is None else float(new_scale),
        grad_norm=math.hypot(*norms) if len(norms) == len(read) else None,
        culprits=tuple(name for outcome in read for name in outcome.culprits()),
    )
