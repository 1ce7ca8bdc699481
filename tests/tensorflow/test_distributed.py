"""Replicas: an overflow on any of them skips the step on all, and the scale moves once per step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from preamp import UsageError
from preamp.tensorflow import LossScaleOptimizer
from tests.combinations import combinations

from .kinds import KINDS, Peer, each_kind_trained, inner, numbers, of_tf_keras_trained, rules

INF = float("inf")
SCRIPT = ["00", "01", "10", "11", "00", "00", "01"]
ANY = "0111001"
ARGUMENTS = {"initial_scale": 64.0, "dynamic_growth_steps": 2}


@pytest.fixture(scope="module")
def strategy() -> Any:
    """Return a strategy of two replicas."""
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    mirrored = tf.distribute.MirroredStrategy(
        [name.removeprefix("/device:") for name in names], tf.distribute.ReductionToOneDevice()
    )
    assert mirrored.num_replicas_in_sync == 2
    return mirrored


def per_replica(strategy: Any, values: list[float]) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def trainer(strategy: Any, wrapper: Any, variable: Any, **arguments: Any) -> Any:
    """Return a compiled step that takes each replica's derivative."""

    def one(value: Any) -> None:
        with tf.GradientTape() as tape:
            loss = wrapper.get_scaled_loss(tf.reduce_sum(variable) * value)
        (gradient,) = wrapper.get_unscaled_gradients(tape.gradient(loss, [variable]))
        wrapper.apply_gradients([(gradient, variable)], **arguments)

    return tf.function(lambda value: strategy.run(one, args=(value,)), autograph=False)  # it wraps errors


def run(strategy: Any, make: Any, script: list[str], **arguments: Any) -> list[Any]:
    """Return scale, counter and the variable on every replica, after each step."""
    with strategy.scope():
        variable, wrapper = tf.Variable([1.0, 2.0]), make()
    step = trainer(strategy, wrapper, variable, **arguments)
    seen = []
    for i, marks in enumerate(script):
        step(per_replica(strategy, [INF if mark == "1" else i + 1.0 for mark in marks]))
        local = strategy.experimental_local_results(variable)
        seen.append((numbers(wrapper), [copy.numpy().tolist() for copy in local]))
    return seen


@each_kind_trained
def test_an_overflow_on_either_replica_skips_on_both(kind: str, strategy: Any) -> None:
    with strategy.scope():
        optimizer = LossScaleOptimizer(inner(kind), **ARGUMENTS)
    seen = run(strategy, lambda: optimizer, SCRIPT)
    assert [state for state, _ in seen] == rules(optimizer.policy, ANY)
    assert optimizer.skipped_steps == ANY.count("1")
    assert optimizer.last_step.index == len(SCRIPT) - 1
    before = [1.0, 2.0]
    for mark, (_, (first, second)) in zip(ANY, seen, strict=True):
        assert first == second
        assert (first == before) == (mark == "1")
        before = first


@of_tf_keras_trained
def test_replicas_agree_as_those_of_tf_keras(kind: str, strategy: Any) -> None:
    ours = run(strategy, lambda: LossScaleOptimizer(inner(kind), **ARGUMENTS), SCRIPT)
    assert ours == run(strategy, lambda: Peer(inner(kind), **ARGUMENTS), SCRIPT)


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("legacy", {"experimental_aggregate_gradients": False}),
        ("tf_keras", {"skip_gradients_aggregation": True}),
    ],
)
def test_gradients_that_are_not_summed_are_agreed_on_all_the_same(
    kind: str, argument: Any, strategy: Any
) -> None:
    seen = run(strategy, lambda: LossScaleOptimizer(inner(kind), **ARGUMENTS), SCRIPT, **argument)
    with strategy.scope():
        assert [state for state, _ in seen] == rules(LossScaleOptimizer(inner(kind), **ARGUMENTS).policy, ANY)
    assert np.isfinite(seen[-1][1]).all()
    theirs = run(strategy, lambda: Peer(inner(kind), **ARGUMENTS), SCRIPT[:2], **argument)
    assert not np.isfinite(theirs[-1][1]).all()  # it looks at the first replica alone


@each_kind_trained
def test_a_sum_that_overflows_skips(kind: str, strategy: Any) -> None:
    with strategy.scope():
        optimizer = LossScaleOptimizer(inner(kind), initial_scale=1.0)
        variable = tf.Variable([1.0, 2.0])
    trainer(strategy, optimizer, variable)(per_replica(strategy, [3e38, 3e38]))
    assert optimizer.skipped_steps == 1
    assert variable.numpy().tolist() == [1.0, 2.0]


def model_of(kind: str, strategy: Any, optimizer: Any) -> Any:
    library = keras if kind == "keras" else tf_keras
    library.utils.set_random_seed(0)
    with strategy.scope():
        model = library.Sequential([library.layers.Input((3,)), library.layers.Dense(2)])
        model.compile(optimizer(), library.losses.MeanSquaredError())
    return model


@combinations([("tf_keras", 3)], kind=KINDS, row=[0, 3])
def test_fit_skips_an_overflow_of_either_replica(kind: str, row: int, strategy: Any) -> None:
    model = model_of(kind, strategy, lambda: LossScaleOptimizer(inner(kind), **ARGUMENTS))
    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
    before = model.get_weights()
    spoiled = y.copy()
    spoiled[row] = INF
    model.fit(x, spoiled, batch_size=4, verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
    assert numbers(model.optimizer) == (32.0, 0.0)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert numbers(model.optimizer) == (64.0, 0.0)
    assert model.optimizer.skipped_steps == 1
    assert not np.array_equal(model.get_weights()[0], before[0])


@each_kind_trained
def test_what_replicas_share_is_saved_and_restored(kind: str, strategy: Any, tmp_path: Any) -> None:
    with strategy.scope():
        optimizer = LossScaleOptimizer(inner(kind), **ARGUMENTS)
        again = LossScaleOptimizer(inner(kind), **ARGUMENTS)
    run(strategy, lambda: optimizer, ["01", "00"])
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "at")
    tf.train.Checkpoint(optimizer=again).restore(path).expect_partial()
    assert numbers(again) == numbers(optimizer) == (32.0, 1.0)
    assert again.last_step == optimizer.last_step._replace(loss=None)
    assert type(optimizer).from_config(optimizer.get_config()).initial_scale == 64.0


def test_gradients_come_from_one_replica(strategy: Any) -> None:
    for kind in KINDS:
        with strategy.scope():
            optimizer, variable = LossScaleOptimizer(inner(kind)), tf.Variable(1.0)
            optimizer.get_unscaled_gradients([optimizer.get_scaled_loss(tf.constant(1.0))])
            with pytest.raises(ValueError, match="must be called in a replica context"):
                optimizer.apply_gradients([(tf.constant(1.0), variable)])


def test_keras_sums_whatever_it_is_told(strategy: Any) -> None:
    for argument in ({"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}):
        with pytest.raises(UsageError, match="Keras's optimizers sum"):
            run(strategy, lambda: LossScaleOptimizer(inner("keras")), ["00"], **argument)
