"""`tune`: a small set of modules and operators to keep in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from preamp.autocasting.tables import Casting
from preamp.blaming import tuning
from preamp.blaming.tuning import Tuning
from preamp.checks import positive, whole
from preamp.errors import CastingError
from preamp.torch.autocasting import operators
from preamp.torch.blaming.blame import BlamedStep


def tune(
    loss_fn: Callable[..., Tensor],
    *args: Any,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.bfloat16,
    casting: Casting | None = None,
    loss_scale: float | None = None,
    seed: int = 0,
    target: float | Literal["seeds"] | None = None,
    rehearsals: int = tuning.MOST,
) -> Tuning:
    """Find the table that keeps as little as possible in float32 for errors that are small enough.

    It runs `blame` with a table, adds rules for the rows that lose most for their cost in product FLOPs, runs
    it again, and in the end leaves out what is not needed.

    Args:
        loss_fn: as of `blame`.
        args: what it is called with.
        model: the model. Rules of modules name paths in it; without, there are only rules of operators.
        dtype: the low precision, as of `blame`.
        casting: the table to begin with; None for autocast's.
        loss_scale: as of `blame`.
        seed: as of `blame`.
        target: the predicted relative error of the loss and of the gradients to stay below. "seeds" takes
            what the float32 gradients of two random seeds differ in, through dropout masks or the batch that
            the function draws. None takes 8 unit roundoffs of the low precision, 3e-2 in bfloat16 and 4e-3 in
            float16: twice what sound steps have.
        rehearsals: how often to run the step at most.

    Returns:
        The table, for `autocast(casting=...)`, and what it keeps in float32 and why.

    Raises:
        PolicyError: for a target that is not positive and for a number of rehearsals below 1.
        UsageError, CastingError: as of `blame`.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    >>> found = tune(lambda x: (1e6 * model(x)).mean(), torch.ones(4, 8), model=model, dtype=torch.float16)
    >>> found.casting
    casting.DEFAULT
    """
    whole("rehearsals", rehearsals, least=1, instead="rehearsals=20")
    step = BlamedStep(loss_fn, args, model, dtype, None, loss_scale, seed)
    if target is None:
        target = tuning.ENOUGH * torch.finfo(dtype).eps / 2
    elif target == "seeds":
        target = step.noise()
    else:
        positive("target", target, 'target=0.01, or target="seeds"')
    return tuning.tune(
        step.run, casting, _can_be_named, with_modules=model is not None, target=target, most=rehearsals
    )


def _can_be_named(operator: str) -> bool:
    try:
        operators.overloads(operator)
    except CastingError:
        return False
    return True
