"""The part of a training loop that is the same in PyTorch and JAX."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preamp.cli.lab import Precision
from preamp.cli.lab.problem import Problem, share_of_zeros
from preamp.errors import ScaleExhausted
from preamp.policy import Policy
from preamp.scaling import Step

ZEROS_EVERY = 10  # steps from one count of the gradient entries that are zero to the next


class Trained(NamedTuple):
    """One training step.

    Attributes:
        loss: the loss, not scaled, as something that `float` takes.
        gradients: of the weights, as arrays that NumPy can read.
        amax: the largest finite magnitude among the weights' gradients of the scaled loss.
        error: what to raise once the step is recorded.
    """

    loss: Any
    gradients: list[Any]
    amax: Any
    error: ScaleExhausted | None = None


class Loop(ABC):
    """One training of one problem.

    Attributes:
        lens: takes snapshots of some steps, once its `on_snapshot` is set.

    Args:
        problem: what to train.
        precision: the dtype in which values and gradients are stored.
        policy: the rule for the loss scale; None does not scale.
        seed: of the first weights and of the order of the rows.
        emulate: whether to compute in float32 and round to the precision; False computes in the precision.
    """

    lens: Any

    def __init__(
        self,
        problem: Problem,
        precision: Precision,
        policy: Policy[Any] | None,
        seed: int,
        *,
        emulate: bool = True,
    ) -> None:
        self.problem, self.precision, self.policy, self.seed = problem, precision, policy, seed
        self.emulate = emulate
        self.skipped = False  # the step before

    @abstractmethod
    def train_on(self, rows: NDArray[np.int64], index: int) -> Trained:
        """Train on some rows of the table: step number `index`."""

    @abstractmethod
    def outputs(self) -> NDArray[np.float32]:
        """Return the network's outputs for the test rows, in the precision it was trained in."""

    @abstractmethod
    def last_step(self) -> Step | None:
        """Return the record of the last step; it is read only where the loss is scaled."""

    def steps(self) -> Iterator[Step]:
        """Train, yielding one `Step` after each update."""
        for index, rows in enumerate(self.problem.batches(self.seed)):
            start = time.perf_counter()
            loss, gradients, amax, error = self.train_on(rows, index)
            zeros = share_of_zeros(gradients) if index % ZEROS_EVERY == 0 else None
            step = self.last_step() if self.policy is not None else None
            step = step or Step(index, 1.0, finite=True, skipped=False)
            step = step._replace(loss=float(loss), amax=float(amax), zeros=zeros)
            yield step._replace(seconds=time.perf_counter() - start)
            self.skipped = step.skipped
            if error:
                raise error
