"""What to train: rows, layer sizes and a recipe, the same in every framework's loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from preamp.cli.lab import Task
from preamp.cli.lab.data import Table


@dataclass(frozen=True)
class Problem:
    """A chain of dense layers with sigmoids between them, and how to train it.

    Attributes:
        task: the name of the problem.
        table: the rows.
        sizes: units of every layer, the input first.
        gain: the first weights of a layer with `in` inputs are drawn from N(0, gain**2 / in).
        loss: "squared" compares the sigmoid of the last layer with the inputs, mean over all values;
            "cross_entropy" compares the last layer with the labels.
        learning_rate: Adam's.
        batch_size: rows per step.
        epochs: passes over the training rows.
        most_steps: where the last pass ends early; None for a whole number of passes.
    """

    task: Task
    table: Table
    sizes: tuple[int, ...]
    gain: float
    loss: Literal["squared", "cross_entropy"]
    learning_rate: float
    batch_size: int
    epochs: int
    most_steps: int | None = None

    @property
    def steps(self) -> int:
        """The number of training steps."""
        steps = self.epochs * self._steps_per_epoch
        return steps if self.most_steps is None else min(steps, self.most_steps)

    def with_steps(self, steps: int) -> Problem:
        """Return the same problem, trained for this many steps."""
        return replace(self, epochs=-(-steps // self._steps_per_epoch), most_steps=steps)

    @property
    def _steps_per_epoch(self) -> int:
        return -(-len(self.table.train) // self.batch_size)

    def initial_weights(self, seed: int) -> list[NDArray[np.float32]]:
        """Return one weight per layer, of shape (out, in)."""
        rng = np.random.default_rng(seed)
        pairs = zip(self.sizes, self.sizes[1:], strict=False)
        return [
            (self.gain * rng.standard_normal((high, low)) / low**0.5).astype(np.float32)
            for low, high in pairs
        ]

    def batches(self, seed: int) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of every step: each epoch has every row once, in an order of its own."""
        yield from islice(self._batches(seed), self.steps)

    def _batches(self, seed: int) -> Iterator[NDArray[np.int64]]:
        rng = np.random.default_rng(seed + 1)
        for _ in range(self.epochs):
            order = rng.permutation(len(self.table.train))
            for start in range(0, len(order), self.batch_size):
                yield order[start : start + self.batch_size]

    def score(self, outputs: NDArray[np.float32]) -> tuple[float, float | None]:
        """Return test error and, for labels, accuracy, for the outputs on the test rows.

        The error is the mean squared error of reconstructed rows, or the share of wrong labels.
        """
        if self.loss == "squared":
            return float(np.mean((outputs - self.table.test) ** 2)), None
        accuracy = float(np.mean(outputs.argmax(axis=1) == self.table.test_labels))
        return 1.0 - accuracy, accuracy


def share_of_zeros(gradients: Iterable[Any]) -> float:
    """Return the share of entries that are exactly zero, of arrays that NumPy can read."""
    arrays = list(map(np.asarray, gradients))
    return 1.0 - sum(int(np.count_nonzero(array)) for array in arrays) / sum(array.size for array in arrays)


def autoencoder(table: Table, epochs: int | None = None) -> Problem:
    """Return the default problem: reconstructing the rows of a table from 16 numbers.

    Every sigmoid multiplies the gradient by at most 1/4, and there are eight: the first layers get gradients
    of about 1e-8, below float16's smallest number. Without scaling these are exactly zero, the layers keep
    their initial weights, and the network reconstructs every digit as the same average blot.
    """
    columns = table.train.shape[1]
    return Problem(
        task="autoencoder",
        table=table,
        sizes=(columns, 128, 64, 32, 16, 32, 64, 128, columns),
        gain=1.0,
        loss="squared",
        learning_rate=3e-3,
        batch_size=128,
        epochs=250 if epochs is None else epochs,
    )


def classify(table: Table, epochs: int | None = None) -> Problem:
    """Return the problem of predicting the label of each row of a table."""
    return Problem(
        task="classify",
        table=table,
        # Eight layers of sigmoids are what it takes for float16 to fail without scaling.
        sizes=(table.train.shape[1], *(64,) * 7, table.classes),
        gain=3**-0.5,  # the variance of PyTorch's own initial weights
        loss="cross_entropy",
        learning_rate=3e-3,
        batch_size=100,
        epochs=120 if epochs is None else epochs,
    )
