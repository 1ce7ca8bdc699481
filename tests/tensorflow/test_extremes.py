"""Extreme gradients and scales: steps are taken, measured and clipped as in float64, eager or in graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from preamp import Dynamic
from preamp.tensorflow import LossScaleOptimizer
from tests.extremes import EXTREMES, Extreme, off_by

ROWS = [row for row in EXTREMES if row.dtype != "float64"]
WAYS = [(lambda f: f, {"clipnorm": 1.0}), (tf.function, {"global_clipnorm": 1.0})]
pytestmark = pytest.mark.filterwarnings("ignore:.*without get_scaled_loss:UserWarning")


# The scale of each row is loaded, so that rows of one dtype share a graph.
ANY_SCALE = Dynamic(init_scale=1.0, min_scale=2.0**-126, max_scale=2.0**127)
ZEROS = [np.zeros(leaf.shape, "float32") for leaf in ROWS[0].leaves]


@cache
def made(compile: Callable[[Any], Any], limits: tuple[tuple[str, float], ...]) -> tuple[Any, list[Any], Any]:
    """Return an optimizer, its variables, and what takes a step."""
    optimizer = LossScaleOptimizer(tf_keras.optimizers.SGD(1.0, **dict(limits)), policy=ANY_SCALE)
    variables = [tf.Variable(zeros) for zeros in ZEROS]
    optimizer.build(variables)

    def train(*given: Any) -> None:
        unscaled = optimizer.get_unscaled_gradients(list(given))
        optimizer.apply_gradients(zip(unscaled, variables, strict=True))

    return optimizer, variables, compile(train)


def stepped(row: Extreme, compile: Callable[[Any], Any], **limit: float) -> tuple[Any, list[Any]]:
    """Return the optimizer after a step from zeros with a learning rate of 1, and what was subtracted."""
    optimizer, variables, train = made(compile, tuple(limit.items()))
    for variable, zeros in zip(variables, ZEROS, strict=True):
        variable.assign(zeros)
    optimizer.save_own_variables(store := {})
    optimizer.load_own_variables({**store, "scale": np.float32(row.scale)})
    train(*[tf.constant(leaf, row.dtype) for leaf in row.leaves])
    return optimizer, [-variable.numpy().astype(np.float64) for variable in variables]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize(("compile", "limit"), WAYS, ids=["eager-clipnorm", "function-global_clipnorm"])
def test_extreme_gradients_are_applied_as_float64_would(
    row: Extreme, compile: Callable[[Any], Any], limit: dict[str, float]
) -> None:
    optimizer, moved = stepped(row, compile, **limit)
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
        assert off_by(part, 1.0, apart) < (1e-2 if row.dtype == "bfloat16" else 1e-5)
