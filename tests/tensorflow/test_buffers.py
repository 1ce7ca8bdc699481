"""The forward pass of a step that is skipped writes moving statistics and counts: named, or put back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from preamp import PolicyError
from preamp.guards import SpikeGuard
from preamp.tensorflow import LossScaleOptimizer
from tests.combinations import combinations

from .kinds import inner, of_tf_keras_trained
from .test_distributed import strategy

__all__ = ["strategy"]

BATCH, BAD, STEPS = 4, 2, 5
NAMES = ("norm/moving_mean", "norm/moving_variance")
WAYS = ["fit", "fit eagerly", "loop", "loop eagerly"]
KINDS = ["legacy", "tf_keras"]


def model_of() -> Any:
    """Return a model whose first layer computes in float16, where 1e6 overflows."""
    tf_keras.utils.set_random_seed(0)
    layers = tf_keras.layers
    return tf_keras.Sequential(
        [
            layers.Input((3,)),
            layers.Dense(4, dtype="mixed_float16", name="half"),
            layers.BatchNormalization(momentum=0.5, name="norm"),
            layers.Dense(1, dtype="float32"),
        ]
    )


def batches() -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(STEPS, BATCH, 3)).astype("float32")
    inputs[BAD] *= 1e6
    return [(x, draw.normal(size=(BATCH, 1)).astype("float32")) for x in inputs]


def statistics(model: Any) -> list[list[float]]:
    norm = model.get_layer("norm")
    return [tf.convert_to_tensor(v).numpy().tolist() for v in (norm.moving_mean, norm.moving_variance)]


def train(
    model: Any,
    optimizer: Any,
    way: str,
    on: list[tuple[Any, Any]] | None = None,
    note: Callable[[Any], None] | None = None,
) -> list[tuple[Any, list[list[float]]]]:
    """Return the record of each step, and the moving statistics after it.

    Args:
        model: to be trained.
        optimizer: of the model.
        way: one of `WAYS`.
        on: other batches than `batches`.
        note: called with each record, instead of keeping it.
    """
    seen: list[tuple[Any, list[list[float]]]] = []
    note = note or (lambda step: seen.append((step, statistics(model))))
    if way.startswith("fit"):
        model.compile(optimizer, "mse", run_eagerly="eagerly" in way)
        for x, y in on or batches():
            model.fit(x, y, batch_size=BATCH, verbose=0)
            note(optimizer.last_step)
        return seen

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    take = step if "eagerly" in way else tf.function(step)
    for x, y in on or batches():
        take(tf.constant(x), tf.constant(y))
        note(optimizer.last_step)
    return seen


def wrapped(kind: str, **arguments: Any) -> LossScaleOptimizer:
    return LossScaleOptimizer(inner(kind, "SGD", 0.01), initial_scale=16.0, **arguments)


@combinations([("tf_keras", "loop eagerly")], kind=KINDS, way=WAYS)
def test_a_skipped_step_names_what_its_forward_pass_has_ruined(kind: str, way: str) -> None:
    model = model_of()
    seen = train(model, wrapped(kind, model=model), way)
    assert [step.skipped for step, _ in seen] == [False, False, True, False, False]
    assert [step.buffers for step, _ in seen] == [(), (), NAMES, (), ()]
    assert not any(step.restored for step, _ in seen)
    assert not np.isfinite(seen[-1][1]).all()


@combinations([("tf_keras", way) for way in ("fit", "loop eagerly")], kind=KINDS, way=WAYS)
def test_what_was_ruined_is_put_back(kind: str, way: str) -> None:
    """Training is as if the batch had not been there."""
    model = model_of()
    seen = train(model, wrapped(kind, model=model, restore_buffers=True), way)
    assert [step.buffers for step, _ in seen] == [(), (), NAMES, (), ()]
    assert [step.restored for step, _ in seen] == [(), (), NAMES, (), ()]
    assert seen[BAD][1] == seen[BAD - 1][1]
    assert seen[BAD + 1][1] != seen[BAD][1]
    assert np.isfinite(seen[-1][1]).all()
    assert np.isfinite(model.predict(batches()[0][0], verbose=0)).all()


@combinations([("tf_keras", "loop")], kind=KINDS, way=WAYS)
def test_without_an_overflow_nothing_differs(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.tensorflow.test_buffers.BAD", slice(0, 0))
    records = []
    for settings in ({}, {"restore_buffers": True}, None):
        model = model_of()
        optimizer = wrapped(kind) if settings is None else wrapped(kind, model=model, **settings)
        records.append(train(model, optimizer, way))
    assert records[0] == records[1] == records[2]


class Counts(tf_keras.layers.Layer):
    """Has variables that are not floats: how many batches it was trained on, and whether that is odd."""

    def build(self, shape: Any) -> None:
        whole = {"initializer": "zeros", "trainable": False}
        self.count = self.add_weight(shape=(), dtype="int64", name="count", **whole)
        self.odd = self.add_weight(shape=(), dtype="bool", name="odd", **whole)

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.count.assign_add(1)
            self.odd.assign(self.count % 2 == 1)
        return x


@combinations(
    [("tf_keras", "loop", "spike"), ("tf_keras", "loop eagerly", "gradients")],
    kind=KINDS,
    way=WAYS,
    reason=["forward", "gradients", "spike"],
)
def test_every_skipped_step_leaves_all_as_before(kind: str, way: str, reason: str) -> None:
    norm, counts = tf_keras.layers.BatchNormalization(momentum=0.5, name="norm"), Counts()
    tf_keras.utils.set_random_seed(0)
    model = tf_keras.Sequential([tf_keras.layers.Input((3,)), norm, counts, tf_keras.layers.Dense(1)])
    guard = SpikeGuard(watch="loss", warmup=2)
    optimizer = wrapped(kind, model=model, restore_buffers=True, guard=guard)
    seen = []

    def note(step: Any) -> None:
        variables = (norm.moving_mean, norm.moving_variance, counts.count, counts.odd)
        seen.append((step, [tf.convert_to_tensor(v).numpy().tolist() for v in variables]))

    note(None)
    bad = {"forward": (np.inf, 1.0), "gradients": (1.0, np.inf), "spike": (1.0, 1e4)}[reason]
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(BATCH, 3)).astype("float32"), np.ones((BATCH, 1), "float32")
    train_on = [(x * (i + 1) * bad[0], y * bad[1]) if i == BAD else (x * (i + 1), y) for i in range(STEPS)]
    train(model, optimizer, way, train_on, note)
    for place, ((_, before), (step, after)) in enumerate(pairwise(seen)):
        assert step.skipped == (place == BAD)
        assert [a == b for a, b in zip(before, after, strict=True)] == [step.skipped] * 4
    step = seen[BAD + 1][0]
    assert step.reason == ("spike" if reason == "spike" else "overflow")
    assert step.buffers == (NAMES if reason == "forward" else ())
    assert seen[-1][1][2] == STEPS - 1


@of_tf_keras_trained
def test_without_copies_what_the_forward_pass_wrote_stays(kind: str) -> None:
    model = model_of()
    optimizer = wrapped(kind, model=model)
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = batches()[0]
    model.fit(x, y * np.inf, batch_size=BATCH, verbose=0)
    assert optimizer.last_step.skipped
    assert optimizer.last_step.buffers == ()
    assert statistics(model) != statistics(model_of())


@of_tf_keras_trained
@pytest.mark.parametrize("eager", [False, True])
def test_the_first_step_of_a_model_that_was_loaded_goes_back_to_what_was_loaded(
    kind: str, eager: bool, tmp_path: Path
) -> None:
    trained = model_of()
    train(trained, wrapped(kind, model=trained, restore_buffers=True), "loop")
    trained.save_weights(tmp_path / "weights.weights.h5")
    model = model_of()
    if eager:
        model.load_weights(tmp_path / "weights.weights.h5")
    optimizer = wrapped(kind, model=model, restore_buffers=True)
    if not eager:  # before the first step is traced, it may be loaded later, too
        model.load_weights(tmp_path / "weights.weights.h5")
    model.compile(optimizer, "mse", run_eagerly=eager)
    model.fit(*batches()[BAD], batch_size=BATCH, verbose=0)
    assert optimizer.last_step.buffers == NAMES
    assert statistics(model) == statistics(trained)


@of_tf_keras_trained
def test_replicas_put_back_their_own(kind: str, strategy: Any) -> None:
    with strategy.scope():
        model = model_of()
        optimizer = wrapped(kind, model=model, restore_buffers=True)
        model.compile(optimizer, "mse")
    norm, seen = model.get_layer("norm"), []
    for x, y in batches():
        model.train_on_batch(x, y)
        parts = strategy.experimental_local_results(norm.moving_mean)
        seen.append([part.numpy().tolist() for part in parts])
    assert optimizer.skipped_steps == 1
    assert np.isfinite(seen).all()
    assert seen[0][0] != seen[0][1]
    assert seen[BAD] == seen[BAD - 1]
    assert seen[BAD + 1] != seen[BAD]


@of_tf_keras_trained
@pytest.mark.parametrize("names", [NAMES, ()], ids=["with statistics", "without"])
def test_a_model_that_is_built_by_its_first_batch(kind: str, names: tuple[str, ...]) -> None:
    layers = tf_keras.layers
    some = [layers.Dense(4, dtype="mixed_float16"), *[layers.BatchNormalization(name="norm")] * bool(names)]
    model = tf_keras.Sequential([*some, layers.Dense(1)])
    optimizer, seen = wrapped(kind, model=model, restore_buffers=True), []
    train(model, optimizer, "loop eagerly", note=seen.append)
    assert [(step.skipped, step.buffers) for step in seen if step.skipped] == [(True, names)]
    assert np.isfinite(model.predict(batches()[0][0], verbose=0)).all()


@of_tf_keras_trained
def test_what_cannot_work_is_refused(kind: str) -> None:
    for settings, said in (
        ({"model": 3}, "model=3 is not a tf_keras.Model"),
        ({"restore_buffers": True}, "Write model=model, too"),
        ({"model": model_of(), "restore_buffers": "no"}, "Write restore_buffers=True"),
    ):
        with pytest.raises(PolicyError, match=said):
            wrapped(kind, **settings)


def test_over_keras_3_the_callback_is_named() -> None:
    with pytest.raises(PolicyError, match=r"preamp\.keras\.TraceCallback\(restore_buffers=True\)"):
        LossScaleOptimizer(keras.optimizers.SGD(), model=model_of())
