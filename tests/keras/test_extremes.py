"""Extreme gradients and scales: a step is taken, measured and clipped as in float64, eagerly and compiled."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from preamp.keras import LossScaleOptimizer
from tests.extremes import EXTREMES, Extreme, off_by

from .driving import BACKEND, WAYS, array, tensor

# Without clipping, with Keras's clipping of each gradient, and of all.
LIMITS: list[tuple[str, dict[str, float]]] = [
    (WAYS[0], {}),
    (WAYS[0], {"clipnorm": 1.0}),
    (WAYS[-1], {"global_clipnorm": 1.0}),
]
ROWS = [row for row in EXTREMES if row.dtype != "float64"]  # Keras has no float64 in its layers


def stepped(row: Extreme, way: str, inner: Any) -> tuple[Any, list[np.ndarray]]:
    """Return the optimizer after a step from zeros with a learning rate of 1, and what was subtracted."""
    variables = [keras.Variable(np.zeros(leaf.shape, "float32")) for leaf in row.leaves]
    optimizer = LossScaleOptimizer(inner, loss_scale_factor=row.scale)
    optimizer.build(variables)
    optimizer.scale_loss(0.0)  # or it warns that no loss was scaled
    gradients = [tensor(leaf, row.dtype) for leaf in row.leaves]
    if way == "eager" or BACKEND == "torch":
        optimizer.apply(gradients, variables)
        return optimizer, [-array(variable).astype(np.float64) for variable in variables]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.function(lambda given: optimizer.apply(given, variables), autograph=False)(gradients)
        return optimizer, [-array(variable).astype(np.float64) for variable in variables]
    import jax

    after, state = jax.jit(optimizer.stateless_apply)(
        [variable.value for variable in optimizer.variables], gradients, [v.value for v in variables]
    )
    for variable, value in zip(optimizer.variables, state, strict=True):
        variable.assign(value)
    return optimizer, [-np.asarray(value, np.float64) for value in after]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize(("way", "limit"), LIMITS)
def test_extreme_gradients_are_applied_as_float64_would(
    row: Extreme, way: str, limit: dict[str, float]
) -> None:
    optimizer, moved = stepped(row, way, keras.optimizers.SGD(1.0, **limit))
    record = optimizer.last_step
    assert (record.finite, record.skipped) == (row.finite(), not row.finite())
    if not row.finite():
        assert not any(one.any() for one in moved)
        return
    assert record.grad_norm == pytest.approx(row.norm(), rel=1e-5, abs=1e-37)
    if "clipnorm" in limit:  # each leaf is a row of its own
        parts = [(row._replace(leaves=(leaf,)), [one]) for leaf, one in zip(row.leaves, moved, strict=True)]
    else:
        parts = [(row, moved)]
    for part, apart in parts:
        assert off_by(part, 1.0 if limit else None, apart) < 1e-5


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has no MultiOptimizer")
@pytest.mark.parametrize("way", WAYS)
def test_each_of_several_optimizers_clips_its_own_extreme_gradients(way: str) -> None:
    row = next(row for row in ROWS if row.name == "norm overflows")
    inner = keras.optimizers.MultiOptimizer(
        lambda variable: matrices if len(variable.shape) == 2 else vectors
    )
    matrices, vectors = keras.optimizers.SGD(1.0, global_clipnorm=1.0), keras.optimizers.SGD(1e-37)
    _, moved = stepped(row, way, inner)
    assert off_by(row._replace(leaves=row.leaves[1:2]), 1.0, moved[1:2]) < 1e-5
    assert moved[2][0] == pytest.approx(row.leaves[2][0] * 1e-37, rel=1e-4)
