"""The amax that policies use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from preamp import Dynamic, Headroom, Trace
from preamp.doctor import diagnose
from preamp.guards import SpikeGuard
from preamp.tensorflow import LossScaleOptimizer
from tests.seeing import Remembering, amax_of, scales_after

from .kinds import inner
from .test_distributed import per_replica, strategy, trainer

__all__ = ["strategy"]

SCALE = 4.0
POLICY = Remembering(SCALE)
INF = float("inf")
# What is for one of tf_keras's kinds is for the other.
each_kind, of_tf_keras = (
    pytest.mark.parametrize("kind", [pytest.param("legacy", marks=pytest.mark.slow), "tf_keras", *others])
    for others in (["keras"], [])
)
SCRIPT = [
    [0.5, -0.25],
    [0.0, 0.0],
    [0.75, 0.875],
    [INF, 1.0],
    [1e-3, -100.0],
    [float("nan"), 7.0],
    [2.0, 2.0],
]


def remembered(optimizer: Any) -> list[float]:
    """Return the scale and the amax that the policy remembers."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        state = optimizer._scaler.state.policy_state._asdict()
    else:
        state = optimizer._loss_scale.variables.state.policy_state._asdict()
    return [float(tf.convert_to_tensor(state[name])) for name in ("scale", "amax")]


def stepping(optimizer: Any, variable: Any) -> Callable[[Any], None]:
    """Return what takes a step with given true gradients."""

    def take(values: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(variable * values))
        (gradient,) = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable]))
        optimizer.apply_gradients([(gradient, variable)])

    return take


@pytest.mark.parametrize(("kind", "compiled"), [("keras", False), ("tf_keras", True), ("legacy", False)])
def test_a_policy_sees_gradients_as_they_were_before_they_were_unscaled(kind: str, compiled: bool) -> None:
    optimizer, variable = LossScaleOptimizer(inner(kind), policy=POLICY), tf.Variable([1.0, 2.0])
    take = stepping(optimizer, variable)
    take = tf.function(take, autograph=False) if compiled else take
    scale, expected = SCALE, 0.0
    for values in SCRIPT:
        clean = bool(np.isfinite(values).all())
        expected = amax_of([np.float32(values) * scale]) if clean else expected
        scale = scale if clean else scale / 2
        take(tf.constant(values))
        assert remembered(optimizer) == [scale, pytest.approx(expected)]
        assert optimizer.last_step.amax == (pytest.approx(expected) if clean else None)


@pytest.mark.parametrize(("kind", "guard"), [("keras", None), ("tf_keras", SpikeGuard(patience=5))])
def test_a_trace_has_the_rules_of_the_optimizer(kind: str, guard: Any, tmp_path: Path) -> None:
    policy = Dynamic(init_scale=2.0**120, max_scale=2.0**126, growth_interval=77)
    optimizer, variable = LossScaleOptimizer(inner(kind), policy=policy, guard=guard), tf.Variable([1.0, 2.0])
    take = stepping(optimizer, variable)
    with Trace(tmp_path / "run.jsonl") as trace:
        for _ in range(60):
            take(tf.constant([1e6, 2e6]))
            trace(optimizer.last_step._replace(loss=0.5))
    for one in (trace, Trace.read(tmp_path / "run.jsonl")):
        assert (one.policy, one.guard, one.about) == (repr(policy), guard and repr(guard), {})
        found = diagnose(one)
        assert found.findings[0].kind == "wrong start"
        assert found.better() == replace(policy, init_scale=found.settings["init_scale"])


@each_kind
def test_replicas_are_seen_as_one(kind: str, strategy: Any) -> None:
    """Keras looks at each replica's gradients, tf_keras at their sum, which all replicas have."""
    with strategy.scope():
        variable, optimizer = tf.Variable([1.0, 2.0]), LossScaleOptimizer(inner(kind), policy=POLICY)
    train = trainer(strategy, optimizer, variable)
    train(per_replica(strategy, [0.5, -0.75]))
    expected = [3.0] if kind == "keras" else [1.0]
    assert remembered(optimizer) == [4.0, *expected]
    train(per_replica(strategy, [INF, 5.0]))
    assert remembered(optimizer) == [2.0, *expected]
    assert optimizer.last_step.amax is None


@of_tf_keras
def test_gradients_that_are_not_summed_are_seen_on_all_replicas(kind: str, strategy: Any) -> None:
    with strategy.scope():
        variable, optimizer = tf.Variable([1.0, 2.0]), LossScaleOptimizer(inner(kind), policy=POLICY)
    train = trainer(strategy, optimizer, variable, experimental_aggregate_gradients=False)
    train(per_replica(strategy, [0.5, -0.75]))
    assert remembered(optimizer) == [4.0, 3.0]


@of_tf_keras
def test_headroom_moves_as_on_floats(kind: str) -> None:
    policy = Headroom(init_scale=2.0**30, margin=1)
    optimizer, variable = LossScaleOptimizer(inner(kind), policy=policy), tf.Variable(tf.ones(4))
    take, steps = tf.function(stepping(optimizer, variable), autograph=False), []
    for gradient in np.random.default_rng(0).lognormal(-6.0, 1.5, (24, 4)).astype("float32"):
        take(tf.constant(np.where(gradient * float(optimizer.loss_scale) > 65504.0, INF, gradient)))
        steps.append(optimizer.last_step)
    assert [step.new_scale for step in steps] == scales_after(policy, steps)
    assert {step.skipped for step in steps} == {True, False}
