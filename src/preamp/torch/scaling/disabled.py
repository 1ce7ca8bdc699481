"""A step of a scaler with `enabled=False`: clipped if asked, and taken."""

from __future__ import annotations

import math
from typing import Any

import torch

from preamp.arrays.torch import Gradients, clamp_, gather, multiply_
from preamp.scaling import Measured
from preamp.torch.scaling.measure import Meter, OptimizerState
from preamp.torch.scaling.optimizers import OptimizerLike, step_after
from preamp.torch.scaling.steps import NO_CLIP, Clip


def step_disabled(
    optimizer: OptimizerLike,
    clip: Clip,
    meter: Meter,
    device: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, OptimizerState]:
    """Clip and step without a scale; return what the optimizer returns, and what was measured."""
    state = OptimizerState(measured=Measured(True, 1.0), taken=True, skips=False, stepped=True)

    @torch.no_grad()
    def clips() -> None:
        gradients, norm = gather(optimizer), None
        if clip.max_norm is not None:
            state.measured = _norm_of(gradients, meter, device)
            norm = state.measured.grad_norm
        if clip.max_value is not None:
            clamp_(gradients.tensors, clip.max_value)
            norm = norm if norm is None else _norm_of(gradients, meter, device).grad_norm
        if norm is not None and clip.max_norm != math.inf:  # which measures only
            multiply_(gradients.tensors, (clip.max_norm / norm).clamp(max=1.0))

    return step_after(optimizer, None if clip == NO_CLIP else clips, args, kwargs), state


def _norm_of(gradients: Gradients, meter: Meter, device: str) -> Measured[Any]:
    """Return the norm of gradients that are not scaled, and whether it is finite, unread.

    Args:
        gradients: of this rank; perhaps none.
        meter: of the scaler.
        device: where ranks meet that have none.
    """
    needed = meter.agreement.needed(gradients.meshes)
    norm = torch.zeros((), device=device if needed else "cpu")
    if gradients.tensors:
        norm = gradients.total_norm(gradients.norms())
    mine = Measured[Any](norm.isfinite(), 1.0, norm)
    return meter.agree(mine, gradients.meshes, norm.device, norm=True, on_host=False) if needed else mine
