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
from preamp.errors import CastingError, UsageError
from preamp.recipes import Recipe
from preamp.torch.autocasting import operators
from preamp.torch.blaming.blame import BlamedStep


def tune(
    loss_fn: Callable[..., Tensor],
    *args: Any,
    model: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    recipe: Recipe | None = None,
    casting: Casting | None = None,
    loss_scale: float | None = None,
    seed: int = 0,
    target: float | Literal["seeds"] | None = None,
    rehearsals: int = tuning.MOST,
    whole_layers: bool = False,
) -> Tuning:
    """Find the table that keeps as little as possible in float32 for errors that are small enough.

    It runs `blame` with a table, adds rules for the rows that lose most for their cost in product FLOPs, runs
    it again, and in the end leaves out what is not needed. With a recipe, the table keeps layers, or single
    products of layers, in the recipe's high precision.

    Args:
        loss_fn: as of `blame`.
        args: what it is called with.
        model: the model. Rules of modules name paths in it; without, there are only rules of operators.
        dtype: the low precision, as of `blame`.
        recipe: as of `blame`.
        casting: the table to begin with; None for autocast's.
        loss_scale: as of `blame`.
        seed: as of `blame`.
        target: the predicted relative error of the loss and of the gradients to stay below. "seeds" takes
            what the float32 gradients of two random seeds differ in, through dropout masks or the batch that
            the function draws. None takes 8 unit roundoffs of the low precision, 3e-2 in bfloat16 and 4e-3 in
            float16: twice what sound steps have. With a recipe it is 2 unit roundoffs of its forward pass:
            0.125 in FP8 and 0.5 in NVFP4.
        rehearsals: how often to run the step at most.
        whole_layers: with a recipe, keep all products of a layer high, or none, because most libraries have
            no setting for single ones.

    Returns:
        The table, for `autocast(casting=...)`, and what it keeps in float32, or high, and why. `export`
        returns the lines to write for it in other libraries.

    Raises:
        PolicyError: for a target that is not positive and for a number of rehearsals below 1.
        UsageError, CastingError: as of `blame`.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    >>> found = tune(lambda x: (1e6 * model(x)).mean(), torch.ones(4, 8), model=model, dtype=torch.float16)
    >>> found.casting
    casting.DEFAULT
    """
    whole("rehearsals", rehearsals, least=1, instead="rehearsals=20")
    step = BlamedStep(loss_fn, args, model, dtype, recipe, loss_scale, seed)
    if recipe is not None and model is None:
        raise UsageError("The rules of a recipe name layers of a model. Write model=model.")
    if target is None:
        target = tuning.enough(recipe) if recipe else tuning.ENOUGH * torch.finfo(step.dtype).eps / 2
    elif target == "seeds":
        target = step.noise()
    else:
        positive("target", target, 'target=0.01, or target="seeds"')
    return tuning.tune(
        step.run,
        casting,
        _can_be_named,
        with_modules=model is not None,
        recipe=recipe,
        whole_layers=whole_layers,
        target=target,
        most=rehearsals,
    )


def _can_be_named(operator: str) -> bool:
    try:
        operators.overloads(operator)
    except CastingError:
        return False
    return True
