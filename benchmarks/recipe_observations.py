"""What is published about MXFP8 and NVFP4 training, on a small language model on a CPU.

Run: python benchmarks/recipe_observations.py [--seeds 3] [--steps 300]

Two tables: the relative error of one step's gradients, each weighted by the size of its weight, and the loss
at the end of a training, above bfloat16's with the same seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import fmean

import torch
from recipe_cases import Step, error, language

from preamp import casting, recipes
from preamp.autocasting.tables import Casting
from preamp.recipes import Recipe
from preamp.recipes.values import changed
from preamp.torch import autocast

BLOCKS = 4
FIRST_AND_LAST = casting.DEFAULT.module("layers.0", "high").module(f"layers.{BLOCKS - 1}", "high")
FIRST_AND_LAST = FIRST_AND_LAST.module("head", "high")
VARIATIONS: dict[str, tuple[Recipe, Casting | None]] = {
    "MXFP8": (recipes.MXFP8, None),
    "MXFP8, gradients in e5m2": (recipes.MXFP8_E5M2_GRADIENTS, None),
    "MXFP8, scales rounded down": (changed(recipes.MXFP8, owner="torchao", exponent="floor"), None),
    "NVFP4": (recipes.NVFP4, None),
    "NVFP4, fprop high": (recipes.NVFP4.without("fprop"), None),
    "NVFP4, dgrad and wgrad high": (recipes.NVFP4.without("dgrad", "wgrad"), None),
    "NVFP4, gradients rounded to nearest": (changed(recipes.NVFP4, stochastic=False), None),
    "NVFP4 without the Hadamard transform": (changed(recipes.NVFP4, hadamard=False), None),
    "NVFP4, first and last block and head high": (recipes.NVFP4, FIRST_AND_LAST),
}
TRAINED = (
    "MXFP8",
    "MXFP8, gradients in e5m2",
    "NVFP4",
    "NVFP4, fprop high",
    "NVFP4, first and last block and head high",
)


def loss_after(seed: int, steps: int, recipe: Recipe | None, table: Casting | None) -> float:
    """Return the mean loss of the last tenth of a training that begins with 30 steps in float32."""
    step, batch = language(seed, blocks=BLOCKS, returns_batch=True)
    optimizer = torch.optim.AdamW(step.model.parameters(), 1e-3)
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        step.inputs, step.targets = batch()
        optimizer.zero_grad()
        dtype = None if recipe else torch.bfloat16
        with autocast("cpu", dtype, emulate=True, recipe=recipe, casting=table, model=step.model):
            loss = step.loss()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return fmean(losses[-max(1, steps // 10) :])


def show(rows: Iterable[tuple[str, list[float]]], heading: str, percent: bool) -> None:
    """Print a row for each variation, with the values of its seeds."""
    print(f"\n{heading}")
    for name, values in rows:
        shown = ", ".join(f"{value:+.2%}" if percent else f"{value:.4f}" for value in values)
        print(f"  {name:44}{shown}", flush=True)


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    steps: list[Step] = [language(seed, blocks=BLOCKS) for seed in range(arguments.seeds)]
    show(
        ((name, [error(step, *how) for step in steps]) for name, how in VARIATIONS.items()),
        "Error of one step's gradients",
        percent=False,
    )
    high = [loss_after(seed, arguments.steps, None, None) for seed in range(arguments.seeds)]

    def above(name: str) -> list[float]:
        losses = [loss_after(seed, arguments.steps, *VARIATIONS[name]) for seed in range(arguments.seeds)]
        return [loss / base - 1 for loss, base in zip(losses, high, strict=True)]

    show(((name, above(name)) for name in TRAINED), "Loss above bfloat16's", percent=True)


if __name__ == "__main__":
    main()
