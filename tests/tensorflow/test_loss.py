"""`Step.loss`: the sum of the losses that were scaled since the last update, of all replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from preamp.tensorflow import LossScaleOptimizer

from .kinds import each_kind, of_tf_keras, wrapped
from .test_distributed import per_replica, strategy, trainer

__all__ = ["strategy"]

INF = float("inf")
kind_and_way = pytest.mark.parametrize(
    ("kind", "compiled"), [("legacy", True), ("tf_keras", False), ("tf_keras", True)]
)


def stepping(optimizer: Any, variable: Any, compiled: bool, micro_steps: int = 1) -> Any:
    """Return what takes a step for a tensor of factors, one for each micro-step; the loss is their sum."""

    def take(factors: Any) -> None:
        total = 0.0
        for number in range(micro_steps):
            with tf.GradientTape() as tape:
                loss = optimizer.get_scaled_loss(tf.reduce_sum(variable) * 0.0 + factors[number])
            (gradient,) = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable]))
            total = total + gradient
        optimizer.apply_gradients([(total, variable)])

    return tf.function(take, autograph=False) if compiled else take


@kind_and_way
def test_the_loss_of_a_step_is_that_of_all_its_micro_steps(kind: str, compiled: bool) -> None:
    optimizer, variable = wrapped(kind), tf.Variable([1.0, 2.0])
    take = stepping(optimizer, variable, compiled, micro_steps=3)
    for factors in ([0.5, 1.0, 2.0], [3.0, 0.0, 0.25], [1.0, INF, 1.0], [1.0, 1.0, 1.0]):
        take(tf.constant(factors))
        assert optimizer.last_step.loss == sum(factors)


@kind_and_way
def test_minimize_records_it(kind: str, compiled: bool) -> None:
    optimizer, variable = wrapped(kind), tf.Variable(2.0)
    with tf.GradientTape() as tape:
        loss = variable * 3.0
    optimizer.minimize(loss, [variable], tape=tape)
    assert optimizer.last_step.loss == 6.0
    variable.assign(1.0)

    def take() -> None:
        optimizer.minimize(lambda: variable**2, [variable])

    take = tf.function(take, autograph=False) if compiled else take
    for expected in (1.0, 0.0):
        take()
        assert optimizer.last_step.loss == expected


@each_kind
def test_an_eager_loss_is_known_over_every_kind(kind: str) -> None:
    optimizer, variable = wrapped(kind), tf.Variable([1.0, 2.0])
    take = stepping(optimizer, variable, compiled=False)
    for factor in (3.0, 0.5):
        take(tf.constant([factor]))
        assert optimizer.last_step.loss == factor


@pytest.mark.parametrize(("kind", "eager"), [("tf_keras", False), ("legacy", True)])
def test_fit_records_it(kind: str, eager: bool) -> None:
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(3,))])
    optimizer = wrapped(kind)
    model.compile(optimizer, "mse", run_eagerly=eager)
    seen: list[float] = []

    class Compare(tf_keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(float(tf.reduce_mean((model(x) - y) ** 2)))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert optimizer.last_step.loss == pytest.approx(seen[-1], rel=1e-5)

    x, y = np.random.default_rng(0).normal(size=(4, 3)).astype("float32"), np.ones((4, 1), "float32")
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[Compare()])
    assert len(set(seen)) == 3


@kind_and_way
def test_what_is_not_a_number_has_no_loss(kind: str, compiled: bool) -> None:
    optimizer, variable = wrapped(kind), tf.Variable([1.0, 2.0])

    def take(factors: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(variable * factors)
        grads = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable]))
        optimizer.apply_gradients(zip(grads, [variable], strict=True))

    compiled_or_not = tf.function(take, autograph=False) if compiled else take
    compiled_or_not(tf.constant([1.0, 1.0]))
    assert optimizer.last_step.loss is None
    compiled_or_not(tf.constant(1.0))
    assert optimizer.last_step.loss is None
    stepping(optimizer, variable, compiled)(tf.constant([4.0]))
    assert optimizer.last_step.loss == 4.0


@of_tf_keras
def test_a_loss_of_a_half_type_is_summed_in_float32(kind: str) -> None:
    optimizer, variable = wrapped(kind), tf.Variable([1.0])
    take = stepping(optimizer, variable, compiled=True, micro_steps=2)
    optimizer.get_scaled_loss(tf.constant(60000.0, tf.float16))
    take(tf.constant([60000.0, 1.0]))
    assert optimizer.last_step.loss == 60000.0 + 60000.0 + 1.0


@pytest.mark.parametrize(("kind", "scoped"), [("tf_keras", True), ("legacy", False)])
def test_it_is_summed_over_replicas(kind: str, scoped: bool, strategy: Any) -> None:
    if scoped:
        with strategy.scope():
            variable, optimizer = tf.Variable([1.0, 2.0]), wrapped(kind)
    else:
        with strategy.scope():
            variable = tf.Variable([1.0, 2.0])
        optimizer = wrapped(kind)
    take = trainer(strategy, optimizer, variable)
    for values in ([1.0, 2.0], [0.5, INF], [0.25, 0.0]):
        total = float(tf.reduce_sum(strategy.experimental_local_results(variable)[0])) * sum(values)
        take(per_replica(strategy, values))
        assert optimizer.last_step.loss == pytest.approx(total, nan_ok=True)


@of_tf_keras
def test_a_restored_step_does_not_have_the_loss_of_another(kind: str, tmp_path: Path) -> None:
    optimizer, variable = wrapped(kind), tf.Variable([1.0, 2.0])
    take = stepping(optimizer, variable, compiled=False)
    take(tf.constant([1.0]))
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    take(tf.constant([2.0]))
    checkpoint.restore(path).assert_consumed()
    assert (optimizer.last_step.index, optimizer.last_step.loss) == (0, None)
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert (again.last_step.index, again.last_step.loss) == (0, None)


@of_tf_keras
def test_checkpoints_have_no_more_than_before(kind: str, tmp_path: Path) -> None:
    """Those that earlier releases wrote are restored whole."""
    path = tf.train.Checkpoint(optimizer=wrapped(kind)).save(tmp_path / "checkpoint")
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not [name for name in names if "loss" in name.replace("loss_scale", "").rsplit("optimizer")[-1]]


@of_tf_keras
def test_a_function_that_trains_can_be_exported(kind: str, tmp_path: Path) -> None:
    module = tf.Module()
    module.variable, module.optimizer = tf.Variable([1.0, 2.0]), wrapped(kind)
    take = stepping(module.optimizer, module.variable, compiled=False)
    module.train = tf.function(take, input_signature=[tf.TensorSpec([1])], autograph=False)
    module.train(tf.constant([1.0]))
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    loaded.train(tf.constant([1.0]))
