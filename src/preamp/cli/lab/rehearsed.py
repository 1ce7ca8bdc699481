"""Train a user's step in recipes, from the same start and batches: `preamp rehearse MODULE:FUNCTION`.

Each run is a process of its own, as for `preamp check --model`. The first seed's run of each recipe ends with
a search for the layers to keep high, at the weights that it arrived at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from preamp.autocasting.tables import Casting
from preamp.cli.lab.compared import ITSELF, PrecisionRun, run_in_process
from preamp.errors import CastingError, PreampError
from preamp.recipes.values import CONSTANTS, named

HIGH = "bfloat16"


def named_recipes(names: Sequence[str]) -> list[str]:
    """Return the names of recipes as `preamp.recipes` has them; "all" is all of them.

    Raises:
        PreampError: for a name that is unknown.
    """
    wanted = [part for name in names for part in name.split(",")]
    try:
        found = [each for name in wanted for each in (CONSTANTS if name == "all" else [named(name).name])]
    except CastingError as error:
        raise PreampError(f"--recipes: {error}") from error
    return list(dict.fromkeys(found))


def rehearse(
    target: str,
    recipes: Sequence[str],
    steps: int,
    seeds: int,
    casting: Casting | None,
    show: Callable[[str], None],
) -> list[PrecisionRun]:
    """Train in bfloat16 and in recipes, with each seed.

    Args:
        target: "MODULE:FUNCTION", called without arguments; it trains a step and returns the loss.
        recipes: their names.
        steps: how often to call it.
        seeds: how many runs there are of each.
        casting: the layers to keep high; None for none.
        show: is told which run begins.

    Raises:
        PreampError: if the function cannot run in bfloat16.
    """
    table = None if casting is None else casting.to_dict()
    plain = None if casting is None else casting.without_recipes().to_dict()
    runs: list[PrecisionRun] = []
    for seed in range(seeds):
        for recipe in ("", *recipes):
            run = PrecisionRun(
                HIGH,
                emulate=True,
                finds_model=True,
                casting=table if recipe else plain,
                label=recipe or HIGH,
                recipe=recipe,
                seed=seed,
                tunes=bool(recipe) and seed == 0,
            )
            show(f"{run.name}, seed {seed}")
            runs.append(run_in_process(run, target, "torch", "", steps))
            if not recipe and (runs[-1].refused or runs[-1].problem):
                reason = runs[-1].refused or f"{target} fails in {HIGH}: {runs[-1].problem}. "
                raise PreampError(reason if runs[-1].refused else reason + (runs[-1].advice or ITSELF))
    return runs


def table(runs: Sequence[PrecisionRun]) -> list[dict[str, str]]:
    """Return a row for each recipe: its last losses, and how far they are from bfloat16's, seed by seed."""
    return [_row(group, runs) for group in _grouped(runs)]


def _row(group: Sequence[PrecisionRun], runs: Sequence[PrecisionRun]) -> dict[str, str]:
    first = group[0]
    found = first.tuned
    return {
        "run": first.name,
        "last losses": f"{fmean(run.last_losses for run in group):.6g}",
        f"to {HIGH}": "-" if not first.recipe else _range([_distance(run, runs) for run in group]),
        "gradient error": f"{found['gradient_error']:.3f}" if found else "-",
        "kept high": str(len(found["kept"])) if found else "-",
    }


def sentences(runs: Sequence[PrecisionRun]) -> Iterator[str]:
    """Yield what the table cannot say: problems, the worst products, and what else has been found."""
    for group in _grouped(runs):
        first = group[0]
        for run in group:
            if run.refused or run.problem:
                what = run.refused or f"{run.problem}. {run.advice}".rstrip()
                yield f"{run.name}, seed {run.seed}: {what}"
        if found := first.tuned:
            worst = ", ".join(found["worst"]) or "nothing"
            yield f"{first.name} loses most in {worst}, in shares of the gradients."
            yield from found["lines"]
            if not found["solved"]:
                yield found["summary"]


def results(runs: Sequence[PrecisionRun]) -> dict[str, Any]:
    """Return everything for JSON: losses by seed, distances, and what was found of each recipe."""
    return {
        group[0].name: {
            "losses": [run.losses for run in group],
            "problems": [run.refused or run.problem for run in group],
            "last": [run.last_losses for run in group],
            f"to_{HIGH}": [_distance(run, runs) for run in group],
            "found": group[0].tuned,
        }
        for group in _grouped(runs)
    }


def _distance(run: PrecisionRun, runs: Sequence[PrecisionRun]) -> float:
    """Return how far the last losses are above those of bfloat16 with the same seed, relative to them."""
    other = next(each for each in runs if each.seed == run.seed and not each.recipe)
    return (run.last_losses - other.last_losses) / max(abs(other.last_losses), 1e-30)


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:+.2%}" if len(values) == 1 else f"{low:+.2%} to {high:+.2%}"


def _grouped(runs: Sequence[PrecisionRun]) -> list[list[PrecisionRun]]:
    """Return the runs of each recipe, by seed."""
    found: dict[str, list[PrecisionRun]] = {}
    for run in runs:
        found.setdefault(run.name, []).append(run)
    return list(found.values())
