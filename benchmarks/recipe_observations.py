"""What is published about training in MXFP8 and NVFP4, on small language models on a CPU.

Run: python benchmarks/recipe_observations.py [--seeds 3]

The table has the relative error of one step's gradients, each weighted by the size of its weight, for each
seed. The models have four blocks of width 128, and were trained for 30 steps.
"""

from __future__ import annotations

import argparse

from recipe_cases import error, language

from preamp import casting, recipes
from preamp.autocasting.tables import Casting
from preamp.recipes import Recipe
from preamp.recipes.values import changed

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


def main() -> None:
    """Measure and print the table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, default=3)
    steps = [language(seed, blocks=BLOCKS) for seed in range(parser.parse_args().seeds)]
    for name, how in VARIATIONS.items():
        print(f"{name:44}{', '.join(f'{error(step, *how):.3f}' for step in steps)}", flush=True)


if __name__ == "__main__":
    main()
