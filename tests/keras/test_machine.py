"""How the scale moves: as stock Keras moves it, as any policy says, and never out of bounds."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preamp import Policy, ScaleExhausted, Static, Tolerant, dialects
from preamp.keras import LossScaleOptimizer
from tests.strategies import dynamics, play, tolerants

from .driving import BACKEND, INF, Run, Stock, close, each_backend, each_way, same, tensor, with_jax

# No scale of these is subnormal: XLA and TensorFlow flush subnormal numbers to 0.
EXACT = {
    "scale_dtype": "float32",
    "factor_dtype": "float32",
    "min_scale": 2.0**-40,
    "init_scale": 1024.0,
    "max_scale": 2.0**40,
}
FLOOR, CEILING = 2.0**-14, 2.0**32

scripts = st.text("01", min_size=1, max_size=24)
few = settings(deadline=None, max_examples=10)


def momentum() -> Any:
    return keras.optimizers.SGD(0.25, momentum=0.5)


@cache
def beside(growth: int, way: str) -> tuple[Run, Run, list[Any]]:
    """Return ours and the stock optimizer, compiled once, and what each started from."""
    runs = [
        Run(make(momentum(), 2.0**15, growth), np.ones((2, 2)), np.zeros(3), way=way)
        for make in (LossScaleOptimizer, Stock)
    ]
    return runs[0], runs[1], [run.everything() for run in runs]


@each_backend
@each_way
@few
@given(growth=st.sampled_from([1, 2, 5]), script=scripts)
@example(growth=5, script="0000010000010000")
@example(growth=1, script="1" * 24)
def test_as_stock_keras_while_that_stays_in_bounds(way: str, growth: int, script: str) -> None:
    run, stock, starts = beside(growth, way)
    for each, start in zip((run, stock), starts, strict=True):
        each.restore(start)
    for _ in zip(run.steps(script), stock.steps(script), strict=True):
        if not FLOOR <= stock.scale <= CEILING:
            return
        assert (run.scale, run.counter, run.iterations) == (stock.scale, stock.counter, stock.iterations)
        assert same(run.weights(), stock.weights())
    assert same(run.inner(), stock.inner())


@pytest.mark.parametrize("inner", [pytest.param("Adam", marks=each_backend), "RMSprop", "Lion", "Ftrl"])
def test_every_inner_optimizer_moves_as_under_stock_keras(inner: str) -> None:
    runs = [
        Run(make(getattr(keras.optimizers, inner)(0.125), 2.0**10, 2), np.ones((2, 2)), way="compiled")
        for make in (LossScaleOptimizer, Stock)
    ]
    for run in runs:
        run.walk("0010001")
    assert runs[0].scale == runs[1].scale
    equal = close if BACKEND == "jax" else same  # XLA fuses the two programs differently
    assert equal(*(run.trained() for run in runs))


def scales_of(policy: Policy[Any], script: str) -> tuple[list[float], bool]:
    """Return the scale before each step and after the last, and whether the policy gave up."""
    states = play(policy, script)
    return [state.scale for state in states], len(states) <= len(script)


def check(policy: Policy[Any], script: str, way: str = "eager") -> None:
    """Walk a script under a policy, eagerly: the scales are those of the policy on floats."""
    expected, gives_up = scales_of(policy, script)
    run = Run(LossScaleOptimizer(momentum(), policy=policy), np.ones(2), way=way)
    scales = [run.scale]
    try:
        scales.extend(run.scale for _ in run.steps(script))
    except ScaleExhausted:
        assert gives_up
        assert run.scale == expected[-1] == scales[-1]
    else:
        assert not gives_up
    assert scales == expected


@few
@given(policy=dynamics(**EXACT) | tolerants(**EXACT), script=scripts)
def test_any_policy_moves_as_on_floats(policy: Policy[Any], script: str) -> None:
    check(policy, script)


@pytest.mark.parametrize(
    "policy",
    [
        Tolerant(init_scale=64.0, tolerance=0.25, growth_interval=3),
        dialects.DEEPSPEED(scale_window=2, raise_error_at_min_scale=False),
        Static(8.0),
    ],
    ids=repr,
)
@with_jax
def test_policies_move_in_compiled_steps_as_on_floats(policy: Policy[Any]) -> None:
    check(policy, "000010110001000011", way="compiled")


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**40])
def test_the_bounds_hold_the_initial_scale(scale: float) -> None:
    run = Run(LossScaleOptimizer(momentum(), scale, 1), np.ones(2))
    scales = [scale, *(run.scale for _ in run.steps("110000"))]
    assert min(scales) == min(scale, scale / 4 if scale > 1 else scale)
    assert max(scales) == (scale if scale > 1 else scale * 16)


@each_backend
@each_way
@pytest.mark.parametrize(("bad", "where"), [(INF, 0), (-INF, 1), (float("nan"), 2)])
def test_one_number_anywhere_skips_the_step(way: str, bad: float, where: int) -> None:
    run = Run(LossScaleOptimizer(momentum()), np.ones((2, 2)), np.ones(()), np.ones(5), way=way).walk("0")
    before = run.trained()
    gradients = run.gradients(1)
    gradients[where] = np.where(
        np.arange(gradients[where].size).reshape(gradients[where].shape) == 0, bad, 1.0
    )
    run.step(*gradients)
    assert same(run.trained(), before)
    assert run.scale == 2.0**14


def test_gradients_that_are_missing_are_left_out() -> None:
    runs = [
        Run(optimizer, np.ones(2), np.ones(3)) for optimizer in (LossScaleOptimizer(momentum()), momentum())
    ]
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        for run in runs:
            run.step(np.ones(2), None)
    assert close(*(run.trained() for run in runs))
    before = runs[0].trained()
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        runs[0].step(None, np.full(3, INF))
    assert same(runs[0].trained(), before)
    assert runs[0].optimizer.loss_scale == 2.0**14


@each_backend
@each_way
def test_a_variable_that_its_gradient_overwrites_gets_it_as_it_is(way: str) -> None:
    """As the statistics of float8 layers are: not gradients at all, so not divided, but looked at."""
    run = Run(LossScaleOptimizer(momentum()), np.ones(2), np.ones(()), way=way)
    run.variables[1].overwrite_with_gradient = True
    scaled = run.optimizer.scale_loss(tensor([4.0, 0.0]))
    run.apply(scaled, 5.0)
    assert [w.tolist() for w in run.weights()] == [[0.0, 1.0], 5.0]
    run.apply(scaled, INF)
    assert [w.tolist() for w in run.weights()] == [[0.0, 1.0], 5.0]
    assert run.scale == 2.0**14


@with_jax
@each_way
def test_one_of_several_such_values_skips_the_step(way: str) -> None:
    run = Run(LossScaleOptimizer(momentum()), np.ones(2), np.ones(()), np.ones(()), way=way)
    for variable in run.variables[1:]:
        variable.overwrite_with_gradient = True
    run.apply(run.optimizer.scale_loss(tensor([4.0, 0.0])), 5.0, INF)
    assert [w.tolist() for w in run.weights()] == [[1.0, 1.0], 1.0, 1.0]
    assert run.scale == 2.0**14


@each_backend
@each_way
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_the_record_has_the_norm_of_unscaled_gradients_before_clipping(way: str, dtype: str) -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25, global_clipnorm=1.0), 1024.0)
    starts = np.ones(2), np.ones((1, 1)), np.ones(()), np.ones(1)
    run = Run(optimizer, *starts, way=way)
    run.variables[3].overwrite_with_gradient = True  # which is no gradient
    optimizer.scale_loss(1.0)
    scaled = [tensor([3.0 * 1024, 4.0 * 1024], dtype), tensor([[12.0 * 1024]], dtype)]
    run._apply([*scaled, None, tensor([7.0])])
    assert optimizer.last_step.grad_norm == 13.0
    run._apply([scaled[0], tensor([[INF]], dtype), None, tensor([7.0])])
    assert optimizer.last_step.grad_norm is None
    run._apply([tensor([0.0, 0.0], dtype), None, None, tensor([7.0])])
    assert optimizer.last_step.grad_norm == 0.0
