"""Extreme gradients and scales: a step is taken, measured and clipped as in float64, eagerly and compiled."""

from __future__ import annotations

from functools import cache

import keras
import numpy as np
import pytest

from preamp import Dynamic
from preamp.keras import LossScaleOptimizer
from tests.extremes import EXTREMES, Extreme, off_by

from .driving import WAYS, Run, each_backend, each_way, tensor

# Without clipping, with Keras's clipping of each gradient, and of all.
LIMITS = [
    pytest.param(WAYS[0], {}, marks=each_backend),
    (WAYS[0], {"clipnorm": 1.0}),
    pytest.param(WAYS[1], {"global_clipnorm": 1.0}, marks=each_backend),
]
ROWS = [row for row in EXTREMES if row.dtype != "float64"]  # Keras has no float64 in its layers
ZEROS = [np.zeros(leaf.shape, "float32") for leaf in ROWS[0].leaves]


# The scale of each row is assigned, so that rows of one dtype share a compiled step.
ANY_SCALE = Dynamic(init_scale=1.0, min_scale=2.0**-126, max_scale=2.0**127)


@cache
def made(way: str, limits: tuple[tuple[str, float], ...]) -> Run:
    return Run(
        LossScaleOptimizer(keras.optimizers.SGD(1.0, **dict(limits)), policy=ANY_SCALE), *ZEROS, way=way
    )


def stepped(run: Run, row: Extreme) -> list[np.ndarray]:
    """Take a step from zeros with a learning rate of 1; return what was subtracted."""
    for variable, zeros in zip(run.variables, ZEROS, strict=True):
        variable.assign(zeros)
    run.optimizer.dynamic_scale.assign(row.scale)
    run.optimizer.scale_loss(0.0)  # or it warns that no loss was scaled
    run._apply([tensor(leaf, row.dtype) for leaf in row.leaves])
    return [-weight.astype(np.float64) for weight in run.weights()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize(("way", "limit"), LIMITS)
def test_extreme_gradients_are_applied_as_float64_would(
    row: Extreme, way: str, limit: dict[str, float]
) -> None:
    run = made(way, tuple(limit.items()))
    moved = stepped(run, row)
    record = run.optimizer.last_step
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
@each_way
def test_each_of_several_optimizers_clips_its_own_extreme_gradients(way: str) -> None:
    row = next(row for row in ROWS if row.name == "norm overflows")
    inner = keras.optimizers.MultiOptimizer(
        lambda variable: matrices if len(variable.shape) == 2 else vectors
    )
    matrices, vectors = keras.optimizers.SGD(1.0, global_clipnorm=1.0), keras.optimizers.SGD(1e-37)
    run = Run(LossScaleOptimizer(inner, policy=ANY_SCALE), *ZEROS, way=way)
    moved = stepped(run, row)
    assert off_by(row._replace(leaves=row.leaves[1:2]), 1.0, moved[1:2]) < 1e-5
    assert moved[2][0] == pytest.approx(row.leaves[2][0] * 1e-37, rel=1e-4)
