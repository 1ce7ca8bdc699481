"""A step's loss in the trace is that of its batch, whoever computes it and however the step is compiled."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest

from preamp.keras import LossScaleOptimizer, TraceCallback

from .driving import BACKEND, each_backend, record_shardings, with_jax
from .test_training import usual

ROWS, BATCH = 22, 4  # the last batch has two rows
draw = np.random.default_rng(0)
X, Y = draw.normal(size=(ROWS, 3)).astype("float32"), draw.normal(size=(ROWS, 2)).astype("float32")
WEIGHTS = draw.uniform(size=ROWS).astype("float32")
HAS_SUMS_ALONE = BACKEND != "torch"  # there every step is a step of the optimizer on the host


def model_of(jit_compile: bool, **arguments: Any) -> Any:
    """Return a model that does not change, so that its losses can be computed later."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    first = keras.layers.Dense(2, kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, [first, keras.layers.Dense(2)(first)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0))
    losses = {"loss": ["mse", "mae"], "loss_weights": [1.0, 0.5], **arguments}
    model.compile(optimizer, jit_compile=jit_compile, **losses)
    return model


def trace_of(model: Any, x: Any, y: Any, epochs: int = 1, callbacks: Any = (), **arguments: Any) -> Any:
    callback = TraceCallback()
    settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **arguments}
    model.fit(x, y, epochs=epochs, callbacks=[*callbacks, callback], **settings)
    return callback.trace


def losses_of(model: Any, x: Any, targets: list[Any], weights: Any = None) -> list[float]:
    """Return the loss of every batch by itself."""

    def alone(*batch: Any, **arguments: Any) -> float:
        model.reset_metrics()  # Keras 3.8 goes on with the mean
        return float(np.ravel(model.test_on_batch(*batch, **arguments))[0])

    places = [slice(at, at + BATCH) for at in range(0, len(x), BATCH)]
    of = [None if weights is None else [weights[place]] * len(targets) for place in places]
    return [
        alone(x[place], [y[place] for y in targets], sample_weight=each)
        for place, each in zip(places, of, strict=True)
    ]


def close(found: list[Any], expected: list[float]) -> bool:
    return bool(np.allclose(np.array(found, float), expected, rtol=1e-5, atol=0.0, equal_nan=True))


# How steps run, and whether losses are weighted. With PyTorch every step is one of the host.
HOW = [(True, False, True)] if HAS_SUMS_ALONE else [(False, False, False), (False, True, True)]


@each_backend
@pytest.mark.parametrize(("jit_compile", "run_eagerly", "is_weighted"), HOW)
def test_a_loss_is_that_of_its_batch(jit_compile: bool, run_eagerly: bool, is_weighted: bool) -> None:
    weights = WEIGHTS if is_weighted else None
    model = model_of(jit_compile, run_eagerly=run_eagerly)
    of = None if weights is None else [weights, weights]
    trace = trace_of(model, X, [Y, Y], epochs=2, sample_weight=of)
    expected = losses_of(model, X, [Y, Y], weights)
    assert close([step.loss for step in trace], [*expected, *expected])
    assert len(set(expected)) == len(expected)
    if BACKEND == "torch":
        assert trace[-1].loss == model.optimizer.last_step.loss


@with_jax
@pytest.mark.parametrize("bad", [math.nan, math.inf] if BACKEND == "torch" else [math.inf])
def test_a_loss_that_is_not_finite_is_recorded(bad: float) -> None:
    """The sum of the epoch does not recover from it. The next epoch has a new one."""
    model, y = model_of(HAS_SUMS_ALONE), Y.copy()
    y[2 * BATCH] = bad
    trace = trace_of(model, X, [y, y], epochs=2)
    expected = losses_of(model, X, [y, y])
    assert [math.isfinite(loss) for loss in expected] == [True, True, False, True, True, True]
    epochs = [[step.loss for step in trace[at : at + 6]] for at in (0, 6)]
    for losses in epochs:
        assert close(losses[:3], expected[:3])
        if HAS_SUMS_ALONE:
            assert losses[3:] == [None] * 3
        else:
            assert close(losses[3:], expected[3:])


@with_jax
@usual
def test_what_else_moves_the_sum_is_not_taken_for_the_batch(jit_compile: bool) -> None:
    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.evaluate(X, [Y, Y], verbose=0)
                record_shardings(self.model)  # without it Keras 3.10 cannot go on, with any optimizer
            if batch == 3:
                self.model.train_on_batch(X, [Y, Y])

    model = model_of(jit_compile)
    trace = trace_of(model, X, [Y, Y], callbacks=[Evaluates()], validation_data=(X, [Y, Y]))
    expected = losses_of(model, X, [Y, Y])
    found = [step.loss for step in trace]
    assert [trace[at].index for at in (2, 3)] == [2, 4]  # the fourth is that of `train_on_batch`
    of_all = float(np.ravel(model.test_on_batch(X, [Y, Y]))[0])
    if HAS_SUMS_ALONE:
        assert found[1] is found[3] is None
        assert close([found[at] for at in (0, 2, 4, 5)], [expected[at] for at in (0, 2, 4, 5)])
    else:
        assert close(found, [*expected[:3], of_all, *expected[4:]])


@with_jax
@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no steps_per_execution on PyTorch")
def test_a_loss_between_others_is_not_known() -> None:
    trace = trace_of(model_of(True, steps_per_execution=3), X, [Y, Y])
    assert [step.loss for step in trace] == [None, None]


@with_jax
@usual
def test_a_small_loss_after_a_large_one_is_right_or_not_known(jit_compile: bool) -> None:
    model, y = model_of(jit_compile), Y.copy()
    y[:BATCH] = 1e6
    losses = [step.loss for step in trace_of(model, X, [y, y])]
    expected = losses_of(model, X, [y, y])
    assert losses[0] is not None
    for loss, true in zip(losses, expected, strict=True):
        assert loss is None or np.isclose(loss, true, rtol=0.011)
    assert all((loss is None) == HAS_SUMS_ALONE for loss in losses[1:])


class Own(keras.Model):
    """A model that keeps no mean of its losses."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.mean = keras.metrics.Mean(name="another")

    @property
    def metrics(self) -> list[Any]:
        return [self.mean]


@with_jax
def test_a_model_without_a_mean_of_the_loss_has_no_losses() -> None:
    inputs = keras.Input((3,))
    model = Own(inputs, keras.layers.Dense(2)(inputs))
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0)), "mse")
    losses = [step.loss for step in trace_of(model, X, Y)]
    assert all((loss is None) == HAS_SUMS_ALONE for loss in losses)
