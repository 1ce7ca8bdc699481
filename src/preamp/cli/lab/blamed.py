"""Which operator of a user's training step loses accuracy. The step is found by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from preamp.autocasting.tables import Casting
from preamp.blaming.blame import Blame
from preamp.cli.casting_file import read_casting
from preamp.cli.lab.inspected import casting_region, find_function, model_of
from preamp.errors import CastingError, MissingExtra, PreampError
from preamp.recipes.values import Recipe, named


def blame_function(
    target: str,
    framework: str,
    dtype: str | None,
    *,
    recipe: str | None,
    casting_file: Path | None,
    loss_scale: float | None,
) -> Blame:
    """Return what the operators of a step lose.

    Args:
        target: "MODULE:FUNCTION", called without arguments; the module is a name or the path of a file. With
            PyTorch the function returns the loss, or calls `backward()`. With JAX it returns a loss function,
            its parameters and its other arguments.
        framework: "torch" or "jax".
        dtype: the name of the low precision, None for bfloat16.
        recipe: the name of the step's recipe; None for none.
        casting_file: the edits of the framework's table; None for none.
        loss_scale: what the loss is multiplied by; None for the scale that dynamic loss scaling would reach.

    Raises:
        PreampError: for a target that does not exist or cannot be compared, and for a file without a table.
        MissingExtra: without the framework.
    """
    table = read_casting(casting_file) if casting_file else None
    run = _in_torch if framework == "torch" else _in_jax
    try:
        return run(target, dtype, read_recipe(recipe), table, loss_scale)
    except CastingError as error:
        if casting_file is None:  # a region in the function has a table of its own
            raise
        raise PreampError(f"{casting_file}: {error}") from error


def read_recipe(name: str | None) -> Recipe | None:
    """Return the recipe that --recipe names.

    Raises:
        PreampError: if there is none of this name.
    """
    try:
        return named(name) if name else None
    except CastingError as error:
        raise PreampError(f"--recipe: {error}") from error


def _in_torch(
    target: str, dtype: str | None, recipe: Recipe | None, table: Casting | None, loss_scale: float | None
) -> Blame:
    try:
        import torch

        from preamp.torch import blame
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[torch]") from error

    function: Callable[[], Any] = find_function(target)
    around = casting_region(dtype or "bfloat16", emulate=True, casting=table)
    model = model_of(function, around, stops=True)
    if not list(model.parameters()) and not (table and table.modules):
        model = None  # the function calls no module, or those without parameters
    low = getattr(torch, dtype) if dtype else None
    return blame(function, model=model, dtype=low, recipe=recipe, casting=table, loss_scale=loss_scale)


def _in_jax(
    target: str, dtype: str | None, recipe: Recipe | None, table: Casting | None, loss_scale: float | None
) -> Blame:
    try:
        from preamp.jax import blame
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[jax]") from error

    loss_fn, params, *arguments = loss_and_arguments(target)
    settings = {"dtype": dtype or "bfloat16"} if recipe is None else {"recipe": recipe}
    return blame(loss_fn, params, *arguments, **settings, casting=table, loss_scale=loss_scale)


def loss_and_arguments(target: str) -> tuple[Any, ...]:
    """Return the loss function, the parameters and the other arguments that a function of JAX returns.

    Raises:
        PreampError: if it returns something else.
    """
    found = find_function(target)()
    if not isinstance(found, tuple) or len(found) < 2 or not callable(found[0]):
        name = target.rpartition(":")[2]
        raise PreampError(
            f"{target} does not return a loss function and its arguments. Write a function that does: "
            f"def {name}(): return loss_fn, params, batch"
        )
    return found
