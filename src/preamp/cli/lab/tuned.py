"""Find the table that keeps as little of a user's training step in float32 as possible, and train with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from preamp.autocasting.tables import Casting
from preamp.blaming.tuning import Tuning
from preamp.cli.casting_file import read_casting
from preamp.cli.lab.blamed import loss_and_arguments, read_recipe
from preamp.cli.lab.compared import PrecisionRun, casts_of, run_in_process
from preamp.cli.lab.inspected import casting_region, find_function, model_of, name_of
from preamp.errors import MissingExtra, PreampError


def tune_function(
    target: str,
    framework: str,
    dtype: str | None,
    *,
    recipe: str | None,
    whole_layers: bool,
    casting_file: Path | None,
    loss_scale: float | None,
    error: float | None,
) -> tuple[Tuning, str]:
    """Return the table, and a call of autocast that uses it under the name `table`.

    The arguments are those of `blame_function`, the error to stay below, and whether a recipe keeps whole
    layers high.

    Raises:
        PreampError: as `blame_function`.
        MissingExtra: without the framework.
    """
    settings: dict[str, Any] = {"loss_scale": loss_scale, "target": error}
    settings["casting"] = read_casting(casting_file) if casting_file else None
    if recipe:
        settings |= {"recipe": read_recipe(recipe), "whole_layers": whole_layers}
    return (_in_torch if framework == "torch" else _in_jax)(target, dtype, settings)


def _in_torch(target: str, dtype: str | None, settings: dict[str, Any]) -> tuple[Tuning, str]:
    try:
        import torch

        from preamp.torch import tune
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[torch]") from error

    function: Callable[[], Any] = find_function(target)
    around = casting_region(dtype or "bfloat16", emulate=True, casting=settings["casting"])
    model = model_of(function, around, stops=True)
    weights = list(model.parameters())
    low = getattr(torch, dtype) if dtype else None
    found = tune(function, model=model if weights else None, dtype=low, **settings)
    device = weights[0].device.type if weights else "cpu"
    how = f"recipe=recipes.{found.recipe.name}" if found.recipe else f"dtype=torch.{found.before.dtype}"
    use = f'with autocast("{device}", {how}, casting=table'
    use += f", model={name_of(model, function)}" if found.casting.modules or found.recipe else ""
    return found, f"{use}): ..."


def _in_jax(target: str, dtype: str | None, settings: dict[str, Any]) -> tuple[Tuning, str]:
    try:
        from preamp.jax import tune
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[jax]") from error

    loss_fn, params, *arguments = loss_and_arguments(target)
    if not settings.get("recipe"):
        settings["dtype"] = dtype or "bfloat16"
    found = tune(loss_fn, params, *arguments, **settings)
    name = getattr(loss_fn, "__name__", "loss_fn")
    how = f'dtype="{found.before.dtype}"'
    if found.recipe:
        how = f"recipe=recipes.{found.recipe.name}, weights=(0,)"
    return found, f"{name} = autocast({name}, {how}, casting=table)"


def train_with(
    target: str, framework: str, tuned: Tuning, before: Casting | None, calls: int
) -> list[PrecisionRun]:
    """Call a function many times in float32, with the initial table, and with the table that was found.

    In float32, weights of the model that are in low precision are made float32 before the first call. Each
    runs in a process of its own, from the same seed. The function has to train and return its loss.

    Raises:
        PreampError: if it cannot run in float32.
    """
    low = tuned.before.dtype
    settings: dict[str, Any] = {"emulate": True, "finds_model": framework == "torch"}
    runs = [
        PrecisionRun("float32", finds_model=framework == "torch"),
        PrecisionRun(
            low,
            **settings,
            casting=None if before is None else before.to_dict(),
            label=f"{low}, table before",
        ),
        PrecisionRun(low, **settings, casting=tuned.casting.to_dict(), label=f"{low}, tuned"),
    ]
    done = [run_in_process(run, target, framework, "cpu", calls) for run in runs]
    if done[0].refused or done[0].problem:
        message = f"{target} fails in float32: {done[0].refused or done[0].problem}."
        if done[0].widened:
            message += (
                f" Weights of its model are {done[0].widened}, and were made float32 for this run, which "
                "is the reference. Write a step that works with float32 weights too, such as "
                "x.to(weight.dtype) for inputs, or leave --calls out."
            )
        raise PreampError(message)
    return done


def sentences(runs: Sequence[PrecisionRun]) -> list[str]:
    """Return what the table cannot say."""
    said = casts_of(runs[0], "torch")
    if not runs[0].widened:
        return said
    return [
        *said,
        f"Weights of the model are {runs[0].widened}. In the float32 run they were made float32, and so was "
        "what the optimizer updates; in the others they are as the program has them.",
    ]


def table(runs: Sequence[PrecisionRun]) -> list[dict[str, str]]:
    """Return the mean of the last tenth of the losses of each run, and how far it is from float32's."""
    means = [run.last_losses for run in runs]
    return [
        {
            "run": run.name,
            "first loss": f"{run.losses[0]:.6g}" if run.losses else "-",
            "last losses": f"{mean:.6g}",
            "difference": "-" if run is runs[0] else f"{(mean - means[0]) / max(abs(means[0]), 1e-30):+.2%}",
            "": run.problem,
        }
        for run, mean in zip(runs, means, strict=True)
    ]
