"""`tune`: a small set of modules and primitives to keep in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from preamp.autocasting import tables
from preamp.autocasting.tables import Casting
from preamp.blaming import tuning
from preamp.blaming.blame import Blame
from preamp.blaming.tuning import Tuning
from preamp.checks import positive, whole
from preamp.jax.autocasting.names import CAST
from preamp.jax.autocasting.transform import region
from preamp.jax.blaming.step import rehearsed
from preamp.jax.jaxprs import PRIMITIVES
from preamp.recipes import Recipe


def tune(
    loss_fn: Callable[..., object],
    params: Any,
    *args: Any,
    dtype: Any = jnp.bfloat16,
    recipe: Recipe | None = None,
    casting: Casting | None = None,
    loss_scale: float | None = None,
    target: float | None = None,
    rehearsals: int = tuning.MOST,
    whole_layers: bool = False,
    **kwargs: Any,
) -> Tuning:
    """Find the table that keeps as little as possible in float32 for errors that are small enough.

    It runs `blame` with a table, adds rules for the rows that lose most for their cost in products, runs it
    again, and in the end leaves out what is not needed. With a recipe, the table keeps layers, or single
    products of layers, in the recipe's high precision.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.random.normal(jax.random.key(0), (16, 16))
    >>> found = tune(lambda w, x: jnp.mean((x @ w) ** 2), x, x, dtype=jnp.float16)
    >>> found.solved, found.casting
    (True, casting.DEFAULT)

    Args:
        loss_fn: as of `blame`.
        params: as of `blame`.
        args: the other arguments of `loss_fn`.
        dtype: the low precision, as of `blame`.
        recipe: as of `blame`. Its rules name modules of Flax or Equinox.
        casting: the table to begin with; None for autocast's.
        loss_scale: as of `blame`.
        target: the predicted relative error of the loss and of the gradients to stay below. None takes 8 unit
            roundoffs of the low precision, 3e-2 in bfloat16 and 4e-3 in float16; with a recipe 2 of its
            forward pass, 0.125 in FP8 and 0.5 in NVFP4.
        rehearsals: how often to run the step at most.
        whole_layers: with a recipe, keep all products of a layer high, or none, because most libraries have
            no setting for single ones.
        kwargs: the keyword arguments of `loss_fn`.

    Returns:
        The table, for `autocast(casting=...)`, and what it keeps in float32, or high, and why. `export`
        returns the lines to write for it in other libraries.

    Raises:
        PolicyError: for a target that is not positive and for a number of rehearsals below 1.
        UsageError, CastingError: as of `blame`.
    """
    whole("rehearsals", rehearsals, least=1, instead="rehearsals=20")
    if target is None and recipe is not None:
        target = tuning.enough(recipe)
    elif target is None:
        target = tuning.ENOUGH * float(jnp.finfo(region(dtype, casting, emulate=True).dtype).eps) / 2
    else:
        positive("target", target, "target=0.01")

    def rehearse(table: Casting) -> Blame:
        settings: Any = {"dtype": dtype, "recipe": recipe, "casting": table, "loss_scale": loss_scale}
        return rehearsed(loss_fn, params, args, kwargs, **settings)[0]

    return tuning.tune(
        rehearse,
        casting,
        _can_be_named,
        recipe=recipe,
        whole_layers=whole_layers,
        target=target,
        most=rehearsals,
    )


def _can_be_named(operator: str) -> bool:
    return operator != CAST and (operator in PRIMITIVES or operator in tables.JAX.rules)
