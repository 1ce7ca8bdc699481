"""The amax that policies use, on every backend."""

from __future__ import annotations

from functools import cache

import keras
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preamp import Dynamic, Headroom
from preamp.keras import LossScaleOptimizer
from tests.seeing import Remembering, amax_of, scales_after

from .driving import INF, Run, array, each_backend, each_way, with_jax

POLICY = Remembering()
COUNT = 8

entries = st.lists(st.floats(-6e4, 6e4, width=16), min_size=COUNT, max_size=COUNT)


@cache
def run_of(way: str) -> Run:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25), policy=POLICY)
    run = Run(optimizer, np.ones((2, 3)), np.ones(2), np.ones((0, 2)), way=way)
    optimizer.scale_loss(1.0)
    return run


def remembered(run: Run) -> list[float]:
    state = run.optimizer._scaler.state.policy_state
    return [float(array(variable)) for variable in (state.scale, state.amax)]


@each_backend
@each_way
@settings(max_examples=15, deadline=None)
@given(entries=entries)
@example(entries=[0.0] * COUNT)
def test_the_peak_is_that_of_all_scaled_gradients(way: str, entries: list[float]) -> None:
    run = run_of(way)
    gradients = np.array(entries[:6]).reshape(2, 3), np.array(entries[6:]), np.zeros((0, 2))
    run.apply(*gradients)
    amax = amax_of(gradient.astype("float32") for gradient in gradients)
    assert remembered(run)[1:] == [amax]
    assert run.optimizer.last_step.amax == amax


def test_a_peak_that_is_not_needed_is_no_variable() -> None:
    run, blind = (
        Run(LossScaleOptimizer(keras.optimizers.SGD(0.25), policy=policy), np.ones(2)).optimizer
        for policy in (POLICY, Dynamic())
    )
    assert {v.name for v in run.variables} - {v.name for v in blind.variables} == {"amax", "last_peak"}


def test_what_keras_overwrites_with_its_gradient_is_no_gradient() -> None:
    run = Run(LossScaleOptimizer(keras.optimizers.SGD(0.25), policy=POLICY), np.ones(2), np.ones(1))
    run.variables[1].overwrite_with_gradient = True
    run.step([1.0, -0.5], [100.0])
    assert remembered(run)[1:] == [4.0]


@with_jax
@each_way
def test_headroom_moves_as_on_floats(way: str) -> None:
    policy = Headroom(init_scale=2.0**30, margin=1)
    run = Run(LossScaleOptimizer(keras.optimizers.SGD(2.0**-10), policy=policy), np.ones(4), way=way)
    steps = []
    for gradient in np.random.default_rng(0).lognormal(-6.0, 1.5, (24, 4)).astype("float32"):
        run.step(np.where(gradient * run.scale > 65504.0, INF, gradient))
        steps.append(run.optimizer.last_step)
    assert [step.new_scale for step in steps] == scales_after(policy, steps)
    assert {step.skipped for step in steps} == {True, False}
