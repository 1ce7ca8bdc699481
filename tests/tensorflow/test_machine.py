"""The same decisions as tf_keras's own wrapper, and as any policy on plain floats."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Compat, Dynamic, Static, Tolerant, dialects
from tests.strategies import quietly

from .kinds import Peer, each_kind, inner, numbers, of_tf_keras, play, rules, wrapped

few = settings(max_examples=10, deadline=None)
scripts = st.text("01", min_size=1, max_size=12)


@of_tf_keras
@few
@given(
    script=scripts,
    name=st.sampled_from(["SGD", "Adam"]),
    arguments=st.fixed_dictionaries(
        {},
        optional={
            "initial_scale": st.integers(0, 20).map(lambda n: 2.0**n),
            "dynamic_growth_steps": st.integers(1, 4),
        },
    ),
)
def test_scale_counter_iterations_and_weights_are_those_of_tf_keras(
    kind: str, script: str, name: str, arguments: dict[str, Any]
) -> None:
    from preamp.tensorflow import LossScaleOptimizer

    def run(wrapper: Any) -> list[Any]:
        variable = tf.Variable([1.0, 2.0])
        optimizer = wrapper(inner(kind, name), **arguments)
        slots = lambda: [x.numpy().tolist() for x in [variable, *optimizer.inner_optimizer.variables()]]  # noqa: E731
        return play(optimizer, script, variable, lambda: (numbers(optimizer), slots()))

    assert run(LossScaleOptimizer) == run(Peer)


POLICIES = [
    Dynamic(
        init_scale=8.0,
        growth_interval=2,
        hysteresis=2,
        hysteresis_reset="growth",
        compat=Compat(growth_delay=1),
    ),
    quietly(Dynamic, init_scale=1000.0, growth_interval=1, growth_factor=1.5, backoff_factor=0.7),
    quietly(Tolerant, init_scale=8.0, growth_interval=2, tolerance=0.3),
    dialects.DEEPSPEED(init_scale=8.0, scale_window=2, raise_error_at_min_scale=False),
]
SCRIPT = "0010110001100010111000"


@each_kind
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_any_policy(kind: str, policy: Any) -> None:
    optimizer = wrapped(kind, policy=policy)
    assert optimizer.policy is policy
    seen = play(optimizer, SCRIPT, tf.Variable([1.0, 2.0]), lambda: numbers(optimizer))
    assert seen == rules(policy, SCRIPT)
    assert len({scale for scale, _ in seen}) > 2


@each_kind
def test_a_first_scale_below_one_is_the_floor(kind: str) -> None:
    optimizer = wrapped(kind, initial_scale=0.5, dynamic_growth_steps=2)
    seen = play(optimizer, "11001", tf.Variable([1.0, 2.0]), lambda: numbers(optimizer)[0])
    assert seen == [0.5, 0.5, 0.5, 1.0, 0.5]


@each_kind
def test_a_fixed_scale_stays_and_still_skips(kind: str) -> None:
    optimizer, variable = wrapped(kind, dynamic=False, initial_scale=128.0), tf.Variable([1.0, 2.0])
    seen = play(optimizer, "010", variable, lambda: (float(optimizer.loss_scale), variable.numpy().tolist()))
    assert seen == [(128.0, [0.5, 2.5]), (128.0, [0.5, 2.5]), (128.0, [-1.0, 3.0])]
    assert (optimizer.dynamic, optimizer.dynamic_counter, optimizer.dynamic_growth_steps) == (
        False,
        None,
        None,
    )
    assert optimizer.initial_scale == 128.0
    assert optimizer.policy == Static(128.0)
    assert optimizer.skipped_steps == 1


@of_tf_keras
def test_a_skipped_step_of_tf_keras_counts(kind: str) -> None:
    optimizer = wrapped(kind)
    play(optimizer, "0110", tf.Variable([1.0, 2.0]))
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == 4


def test_a_skipped_step_of_keras_does_not() -> None:
    optimizer = wrapped("keras")
    play(optimizer, "0110", tf.Variable([1.0, 2.0]))
    assert int(optimizer.iterations) == int(optimizer.inner_optimizer.iterations) == 2
