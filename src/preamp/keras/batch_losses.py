"""The loss of each batch of `fit`.

Keras logs the mean over the epoch so far. Where a step is not compiled, the optimizer knows the loss of the
step. Elsewhere the loss is what the batch has added to the sum that this mean is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from preamp.keras.buffers import state_values

EPSILON = 2.0**-23  # of float32, which the sums are kept in
TOLERANCE = 0.01  # how much of a loss may be the rounding of the sum


class Losses:
    """The losses of the batches of one `fit`.

    Args:
        model: the model that is trained. A `train_step` of its own may have another mean named "loss".
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._before: list[Any] = []
        self._is_known = False

    def begin_batch(self, steps: object) -> None:
        """Copy the sum and the count on their device: a batch may write to the memory of what was read.

        Args:
            steps: how many steps the optimizer has counted, a scalar of the backend.
        """
        sums = self._sums()
        self._before = [value + 0 for value in [*sums, steps]] if sums else []

    def end_batch(self, known: tuple[Any, Any] | None) -> list[Any]:
        """Return the scalars to read for `loss`.

        Args:
            known: the loss of a step that the optimizer knows, and how many steps there were after it.
        """
        sums = self._sums() if self._before else []
        self._is_known = known is not None
        return [*(known or ()), *(self._before if sums else ()), *sums]

    def loss(self, numbers: Sequence[float], steps: float, mean: float | None) -> float | None:
        """Return the loss of the batch; None if it cannot be known.

        Args:
            numbers: what `end_batch` returned, read.
            steps: how many steps the optimizer has counted now.
            mean: the mean loss that Keras has logged for this batch. If it is not that of the sums, another
                callback has called `evaluate` since.
        """
        if self._is_known:
            loss, at, *numbers = numbers
            if at == steps:
                return loss
        if not numbers:
            return None
        total_before, count_before, steps_before, total, count = numbers
        rows, added = _added(count_before, count), _added(total_before, total)
        if steps - steps_before != 1 or added is None or not rows or rows < 0.0:
            return None
        is_moved = mean is not None and not np.isclose(mean, total / count, rtol=1e-4, equal_nan=True)
        return None if is_moved else added / rows

    def _sums(self) -> list[Any]:
        """Return the epoch's sum of losses, each times the rows of its batch, and its rows."""
        among = self._model.metrics_variables
        for metric in self._model.metrics:
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
                return state_values(self._model, [metric.total, metric.count], among, "metrics")
        return []


def _added(before: float, after: float) -> float | None:
    """Return what was added to a float32 sum; None if its rounding hides that."""
    if not math.isfinite(before):
        return None
    added = after - before
    if before and math.isfinite(added) and abs(added) * TOLERANCE < EPSILON * max(abs(before), abs(after)):
        return None
    return added
