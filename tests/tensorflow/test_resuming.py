"""A scale to resume from that is out of bounds, or that nothing can resume from: never in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from preamp import Dynamic, PolicyError
from preamp.tensorflow import LossScaleOptimizer

from .kinds import inner, of_tf_keras, step

RULE = Dynamic(init_scale=8.0, min_scale=4.0, max_scale=64.0)
OUTSIDE = {1.0: r"1\.0 is below min_scale=4\.0 of Dynamic.* Write policy=Dynamic\(min_scale=1\.0\)"}
OUTSIDE[128.0] = r"128\.0 is above max_scale=64\.0 of Dynamic.* Write policy=Dynamic\(max_scale=128\.0\)"
BROKEN: dict[str, Any] = {"current_loss_scale": [float("nan"), float("inf"), 0.0, -8.0], "good_steps": [-1]}
broken = pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("legacy", "current_loss_scale", 0.0),
        *[("tf_keras", name, value) for name, values in BROKEN.items() for value in values],
    ],
)
PAIRS = list(zip(("legacy", "tf_keras"), OUTSIDE, strict=True))


def wrapped(kind: str) -> LossScaleOptimizer:
    return LossScaleOptimizer(inner(kind), policy=RULE)


def restored(kind: str, folder: Path, **numbers: float) -> LossScaleOptimizer:
    """Return an optimizer with a `tf.train.Checkpoint` in it that has these numbers."""
    before, after = wrapped(kind), wrapped(kind)
    step(before, [1.0, 1.0], tf.Variable([1.0, 2.0]))
    for name, value in numbers.items():
        before._loss_scale._weights[name, None].assign(value)
    path = tf.train.Checkpoint(optimizer=before).save(folder / "checkpoint")
    tf.train.Checkpoint(optimizer=after).restore(path)
    return after


@pytest.mark.parametrize(("kind", "scale"), PAIRS)
def test_a_checkpoint_out_of_bounds_warns_once(kind: str, scale: float, tmp_path: Path) -> None:
    variable = tf.Variable([1.0, 2.0])
    optimizer = restored(kind, tmp_path, current_loss_scale=scale)
    with pytest.warns(UserWarning, match=OUTSIDE[scale]):
        step(optimizer, [1.0, 1.0], variable)
    assert optimizer.last_step.scale == scale
    step(optimizer, [1.0, 1.0], variable)


@pytest.mark.parametrize(("kind", "scale"), PAIRS)
def test_compiled_steps_are_heard_of_when_the_record_is_read(kind: str, scale: float, tmp_path: Path) -> None:
    variable = tf.Variable([1.0, 2.0])
    optimizer = restored(kind, tmp_path, current_loss_scale=scale)
    take = tf.function(lambda: step(optimizer, [1.0, 1.0], variable), autograph=False)
    take()
    with pytest.warns(UserWarning, match=OUTSIDE[scale]):
        assert optimizer.last_step.scale == scale
    take()
    assert optimizer.last_step.index == 2


@broken
def test_what_nothing_can_resume_from_is_refused(kind: str, name: str, value: float, tmp_path: Path) -> None:
    variable = tf.Variable([1.0, 2.0])
    optimizer = restored(kind, tmp_path, **{name: value})
    with pytest.raises(PolicyError, match="Write scale="):
        step(optimizer, [1.0, 1.0], variable)
    with pytest.raises(PolicyError, match="Write scale="):
        _ = optimizer.last_step
    assert variable.numpy().tolist() == [1.0, 2.0]


@of_tf_keras
@pytest.mark.parametrize("scale", OUTSIDE)
def test_configurations_and_stores_say_so_too(kind: str, scale: float) -> None:
    config = wrapped(kind).get_config()
    config["state"]["scale"] = scale
    with pytest.warns(UserWarning, match=OUTSIDE[scale]):
        made = LossScaleOptimizer.from_config(config)
    step(made, [1.0, 1.0], tf.Variable([1.0, 2.0]))  # that has been said
    if kind == "tf_keras":
        store: dict[str, Any] = {}
        made.save_own_variables(store)
        with pytest.warns(UserWarning, match=OUTSIDE[scale]):
            wrapped(kind).load_own_variables(store)
    for name in ("steps", "skipped_steps", "good"):
        config["state"] = {**made.get_config()["state"], "scale": 8.0, name: -1}
        with pytest.raises(PolicyError, match="-1"):
            LossScaleOptimizer.from_config(config)


@of_tf_keras
def test_a_scale_in_bounds_says_nothing(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        optimizer = restored(kind, tmp_path, current_loss_scale=64.0)
        step(optimizer, [1.0, 1.0], tf.Variable([1.0, 2.0]))
        assert optimizer.last_step.scale == 64.0
