"""Extreme gradients and scales: steps are taken, measured and clipped as in float64, eager or in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from preamp.tensorflow import LossScaleOptimizer
from tests.extremes import EXTREMES, Extreme, off_by

from .kinds import each_kind_trained, inner

ROWS = [row for row in EXTREMES if row.dtype != "float64"]
WAYS = [(lambda f: f, {}), (lambda f: f, {"clipnorm": 1.0}), (tf.function, {"global_clipnorm": 1.0})]
pytestmark = pytest.mark.filterwarnings("ignore:.*without get_scaled_loss:UserWarning")


def stepped(kind: str, row: Extreme, compile: Callable[[Any], Any], **limit: float) -> tuple[Any, list[Any]]:
    """Return the optimizer after a step from zeros with a learning rate of 1, and what was subtracted."""
    made = LossScaleOptimizer(inner(kind, "SGD", 1.0, **limit), dynamic=False, initial_scale=row.scale)
    variables = [tf.Variable(tf.zeros(leaf.shape)) for leaf in row.leaves]

    def train(*given: Any) -> None:
        made.apply_gradients(zip(made.get_unscaled_gradients(list(given)), variables, strict=True))

    if kind != "legacy":
        made.build(variables)
    compile(train)(*[tf.constant(leaf, row.dtype) for leaf in row.leaves])
    return made, [-variable.numpy().astype(np.float64) for variable in variables]


@each_kind_trained
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("compile", "limit"), WAYS, ids=["eager", "eager-clipnorm", "function-global_clipnorm"]
)
def test_extreme_gradients_are_applied_as_float64_would(
    kind: str, row: Extreme, compile: Callable[[Any], Any], limit: dict[str, float]
) -> None:
    optimizer, moved = stepped(kind, row, compile, **limit)
    finite = row.finite(row.dtype)  # which unscaled gradients keep
    record = optimizer.last_step
    assert (record.finite, record.skipped) == (finite, not finite)
    if not finite:
        assert not any(one.any() for one in moved)
        return
    stored = np.float16 if row.dtype == "float16" else np.float32
    unscaled = [leaf.astype(np.float64) / row.scale for leaf in row.leaves]
    rounded = row._replace(scale=1.0, leaves=tuple(one.astype(stored).astype(np.float64) for one in unscaled))
    assert record.grad_norm == pytest.approx(rounded.norm(), rel=1e-5, abs=1e-37)
    if "clipnorm" in limit:  # each leaf is a row of its own
        pairs = zip(rounded.leaves, moved, strict=True)
        parts = [(rounded._replace(leaves=(leaf,)), [one]) for leaf, one in pairs]
    else:
        parts = [(rounded, moved)]
    for part, apart in parts:
        assert off_by(part, 1.0 if limit else None, apart) < (1e-2 if row.dtype == "bfloat16" else 1e-5)
