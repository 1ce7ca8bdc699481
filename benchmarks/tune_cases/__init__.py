"""Eight small trainings that low precision spoils, which `preamp.torch.tune` has to save.

Run: python benchmarks/tune_cases/run.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Batch", "Loss", "Problem"]

Batch = tuple[Tensor, ...]
Loss = Callable[[Batch], Tensor]

EVALUATION_SEED = 1_000_003


@dataclass(frozen=True)
class Problem:
    """What to train.

    Attributes:
        name: a short name.
        about: what makes it hard, in a few words.
        build: makes the model and its loss function, given a seed that decides the weights.
        data: draws a number of rows with a generator. The rule to be learned is the same for all generators.
        rows: the number of rows in a batch.
        evaluated: the number of rows in the evaluation batch.
        learning_rate: AdamW's.
        steps: how many.
        epsilon: AdamW's.
    """

    name: str
    about: str
    build: Callable[[int], tuple[nn.Module, Loss]]
    data: Callable[[torch.Generator, int], Batch]
    rows: int
    evaluated: int
    learning_rate: float
    steps: int
    epsilon: float = 1e-8

    def batches(self, seed: int, steps: int) -> list[Batch]:
        """Return the batches of a run."""
        generator = torch.Generator().manual_seed(seed)
        return [self.data(generator, self.rows) for _ in range(steps)]

    def evaluation(self) -> Batch:
        """Return the batch on which every run is evaluated."""
        return self.data(torch.Generator().manual_seed(EVALUATION_SEED), self.evaluated)
