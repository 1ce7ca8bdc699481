"""Training with `compile` and `fit`, and in loops of one's own, by the library that the optimizer is of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from preamp import Dynamic, ScaleExhausted
from preamp.tensorflow import LossScaleOptimizer

from .kinds import Peer, each_kind_trained, inner, numbers, of_tf_keras_trained, wrapped

LIBRARIES = {"legacy": tf_keras, "tf_keras": tf_keras, "keras": keras}
INF = float("inf")


@contextmanager
def policy_of(library: Any, name: str) -> Iterator[None]:
    """Set the global dtype policy, which is what `Model.compile` looks at."""
    mixed = library.mixed_precision
    before = mixed.dtype_policy() if library is keras else mixed.global_policy()
    change = mixed.set_dtype_policy if library is keras else mixed.set_global_policy
    change(name)
    try:
        yield
    finally:
        change(before)


def model_of(kind: str, optimizer: Any, **arguments: Any) -> Any:
    library = LIBRARIES[kind]
    library.utils.set_random_seed(0)
    layers = library.layers
    model = library.Sequential(
        [layers.Input((3,)), layers.Dense(4, "relu"), layers.Dense(2, dtype="float32")]
    )
    model.compile(optimizer, library.losses.MeanSquaredError(), **arguments)
    return model


def data(count: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 3)).astype("float32")
    return x, np.stack([x.sum(1), x[:, 0]], axis=1)


def fit(model: Any, **arguments: Any) -> Any:
    x, y = data()
    return model.fit(x, y, batch_size=4, verbose=0, shuffle=False, **arguments).history["loss"]


@of_tf_keras_trained
def test_fit_takes_the_steps_of_the_bare_optimizer(kind: str) -> None:
    """To the last bit: scaling by a power of two rounds nothing."""
    bare = model_of(kind, inner(kind, "SGD", 0.125, momentum=0.5))
    model = model_of(kind, LossScaleOptimizer(inner(kind, "SGD", 0.125, momentum=0.5)))
    losses = fit(model, epochs=3)
    assert losses == fit(bare, epochs=3)
    assert losses[-1] < losses[0] / 2
    for ours, theirs in zip(model.get_weights(), bare.get_weights(), strict=True):
        assert np.array_equal(ours, theirs)
    assert numbers(model.optimizer) == (2.0**15, 12.0)
    assert model.optimizer.skipped_steps == 0


@of_tf_keras_trained
def test_fit_under_mixed_float16_is_that_of_tf_keras(kind: str) -> None:
    seen = []
    for wrapper in (LossScaleOptimizer, Peer):
        with policy_of(tf_keras, "mixed_float16"):
            model = model_of(kind, wrapper(inner(kind, "Adam", 0.05), dynamic_growth_steps=4))
            losses = fit(model, epochs=12)
        seen.append((losses, numbers(model.optimizer), [w.tolist() for w in model.get_weights()]))
    assert seen[0] == seen[1]


@each_kind_trained
def test_170_bad_batches_and_a_good_one_leave_finite_weights(kind: str) -> None:
    model = model_of(kind, wrapped(kind))
    x, y = data(4)
    bad, before = np.full_like(y, np.nan), model.get_weights()
    model.train_on_batch(x, bad)
    assert (float(model.optimizer.loss_scale), model.optimizer.skipped_steps) == (2.0**14, 1)
    for _ in range(169):
        model.train_on_batch(x, bad)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
    assert float(model.optimizer.loss_scale) == 1.0
    model.train_on_batch(x, y)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert not np.array_equal(model.get_weights()[0], before[0])
    assert model.optimizer.skipped_steps == 170


@of_tf_keras_trained
def test_callbacks_set_the_learning_rate(kind: str) -> None:
    callbacks = LIBRARIES[kind].callbacks
    model = model_of(kind, LossScaleOptimizer(inner(kind, "SGD", 0.5)))
    seen: list[float] = []
    rate = lambda: float(tf.convert_to_tensor(model.optimizer.inner_optimizer.learning_rate))  # noqa: E731
    fit(
        model,
        epochs=3,
        callbacks=[
            callbacks.LearningRateScheduler(lambda epoch, _: 2.0 ** -(epoch + 2)),
            callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(rate())),
        ],
    )
    assert seen == [0.25, 0.125, 0.0625]
    plateau = callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    fit(model, epochs=3, callbacks=[plateau])
    assert rate() == 0.0625 / 4


@of_tf_keras_trained
def test_a_loop_with_a_tape_takes_the_steps_of_fit(kind: str) -> None:
    fitted, looped = (model_of(kind, wrapped(kind)) for _ in range(2))
    optimizer, x, y = looped.optimizer, *data()

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(looped(x, training=True) - y))
            scaled = optimizer.get_scaled_loss(loss)
        grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, looped.trainable_variables))
        optimizer.apply_gradients(zip(grads, looped.trainable_variables, strict=True))

    train = tf.function(step)
    for i in range(0, 16, 4):
        train(tf.constant(x[i : i + 4]), tf.constant(y[i : i + 4]))
    fit(fitted)
    for ours, theirs in zip(looped.get_weights(), fitted.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert numbers(optimizer) == numbers(fitted.optimizer)


def test_fit_and_a_loop_take_turns_with_keras() -> None:
    """Keras's `fit` hands over scaled gradients, a loop of tf.keras unscaled ones."""
    model = model_of("keras", wrapped("keras", initial_scale=1024.0))
    bare = model_of("keras", inner("keras"))
    x, y = data(4)
    for _ in range(2):
        for each in (model, bare):
            each.train_on_batch(x, y)
        loss = lambda: tf.reduce_mean(tf.square(model(x) - y))  # noqa: E731
        model.optimizer.minimize(loss, model.trainable_variables)
        with tf.GradientTape() as tape:
            loss_of_bare = tf.reduce_mean(tf.square(bare(x) - y))
        grads = tape.gradient(loss_of_bare, bare.trainable_variables)
        bare.optimizer.apply_gradients(zip(grads, bare.trainable_variables, strict=True))
    for ours, theirs in zip(model.get_weights(), bare.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert model.optimizer.last_step.index == 3


@of_tf_keras_trained
def test_a_policy_that_gives_up_is_asked_by_a_callback(kind: str) -> None:
    policy = Dynamic(init_scale=4.0, min_scale=2.0, at_floor="raise")
    model = model_of(kind, wrapped(kind, policy=policy))
    x, y = data(4)
    check = LIBRARIES[kind].callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: model.optimizer.check_exhausted()
    )
    model.fit(x, np.full_like(y, INF), verbose=0, callbacks=[check])
    with pytest.raises(ScaleExhausted, match="scale of 2"):
        model.fit(x, np.full_like(y, INF), verbose=0, callbacks=[check])
