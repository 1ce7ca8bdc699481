"""The forward pass of a step that is skipped writes moving statistics and counts: named, or put back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from preamp import PolicyError, Trace
from preamp.guards import SpikeGuard
from preamp.keras import LossScaleOptimizer, TraceCallback

from .driving import BACKEND, INF, array, close, each_backend, same, with_jax
from .test_training import adam, usual

ROWS, BATCH, BAD = 16, 4, 2
PATHS = ("norm/moving_mean", "norm/moving_variance")


def data(bad: int | None = BAD) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 3)).astype("float32"), draw.normal(size=(ROWS, 1)).astype("float32")
    if bad is not None:
        x[bad * BATCH] = INF
    return x, y


def model_of(optimizer: Any = None, **arguments: Any) -> Any:
    keras.utils.set_random_seed(0)
    frozen = keras.layers.Dense(4, name="frozen", trainable=False)
    norm = keras.layers.BatchNormalization(momentum=0.5, name="norm")
    layers = [frozen, keras.layers.Dropout(0.25), norm, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), keras.Sequential(layers, name="inside")])
    model.compile(optimizer or LossScaleOptimizer(adam()), "mse", **arguments)
    return model


def fit(model: Any, bad: int | None = BAD, **arguments: Any) -> Any:
    return fit_on(model, *data(bad), **arguments)


def fit_on(model: Any, x: np.ndarray, y: np.ndarray, **arguments: Any) -> Any:
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **arguments)


def statistics(model: Any) -> list[np.ndarray]:
    norm = model.layers[-1].get_layer("norm")
    return [array(norm.moving_mean), array(norm.moving_variance)]


@with_jax
@usual
def test_what_a_forward_pass_has_spoiled_is_named(jit_compile: bool, tmp_path: Path) -> None:
    model, path = model_of(jit_compile=jit_compile), tmp_path / "trace.jsonl"
    with pytest.warns(
        UserWarning, match=r"inf or NaN in .*norm/moving_mean, .*norm/moving_variance: .*restore_buff"
    ):
        fit(model, callbacks=[TraceCallback(path)])
    assert not all(np.isfinite(value).all() for value in statistics(model))
    steps = list(Trace.read(path))
    assert [step.skipped for step in steps] == [False, False, True, False]
    named = [tuple("/".join(path.split("/")[-2:]) for path in step.buffers) for step in steps]
    assert named == [(), (), PATHS, ()]
    assert not any(step.restored for step in steps)


@each_backend
@usual
def test_what_a_forward_pass_has_spoiled_is_put_back(jit_compile: bool) -> None:
    """Training goes as if the batch had not been there."""
    model, seen = model_of(jit_compile=jit_compile), []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            seen.append(statistics(self.model))

    callback = TraceCallback(restore_buffers=True)
    with warnings.catch_warnings(action="error", category=UserWarning):
        fit(model, epochs=2, callbacks=[callback, Watch()])
    assert all(np.isfinite(value).all() for value in statistics(model))
    assert [bool(step.buffers) for step in callback.trace] == [False, False, True, False] * 2
    assert [step.restored for step in callback.trace] == [step.buffers for step in callback.trace]
    assert np.isfinite(array(model.predict(data(None)[0], verbose=0))).all()
    assert same(seen[BAD], seen[BAD - 1])
    assert not same(seen[BAD + 1], seen[BAD])


class Counts(keras.layers.Layer):
    """Has variables that are not floats: how many batches it was trained on, and whether that is odd."""

    def build(self, shape: Any) -> None:
        whole = {"initializer": "zeros", "trainable": False}
        self.count = self.add_weight(shape=(), dtype="int32", name="count", **whole)
        self.odd = self.add_weight(shape=(), dtype="bool", name="odd", **whole)

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.count.assign(self.count + 1)
            self.odd.assign(self.count % 2 == 1)
        return x


@pytest.mark.parametrize(
    ("reason", "at"),
    [("forward pass", 0), ("forward pass", BAD), ("gradients", 0), ("spike", BAD)],
)
@with_jax
@usual
def test_every_skipped_step_leaves_all_as_before(jit_compile: bool, reason: str, at: int) -> None:
    keras.utils.set_random_seed(0)
    norm, counts = keras.layers.BatchNormalization(momentum=0.5, name="norm"), Counts()
    model = keras.Sequential([keras.Input((3,)), norm, counts, keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(adam(), guard=SpikeGuard(watch="loss", warmup=2))
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    x, y = data(at if reason == "forward pass" else None)
    if reason != "forward pass":
        y[at * BATCH] = INF if reason == "gradients" else 1e4
    seen = []

    class Watch(keras.callbacks.Callback):
        def values(self) -> list[np.ndarray]:
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            return [array(v) for v in (norm.moving_mean, norm.moving_variance, counts.count, counts.odd)]

        def on_train_begin(self, logs: Any = None) -> None:
            seen.append(self.values())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(self.values())

    callback = TraceCallback(restore_buffers=True)
    with warnings.catch_warnings(action="error", category=UserWarning):
        fit_on(model, x, y, callbacks=[callback, Watch()])
    skipped = [step.skipped for step in callback.trace]
    assert skipped == [place == at for place in range(ROWS // BATCH)]
    assert callback.trace[at].reason == ("spike" if reason == "spike" else "overflow")
    paths = tuple("/".join(path.split("/")[-2:]) for path in callback.trace[at].buffers)
    assert paths == (PATHS if reason == "forward pass" else ())
    for before, after, is_skipped in zip(seen[:-1], seen[1:], skipped, strict=True):
        assert [same([a], [b]) for a, b in zip(before, after, strict=True)] == [is_skipped] * 4
    assert int(seen[-1][2]) == ROWS // BATCH - 1


@with_jax
def test_without_an_overflow_nothing_differs() -> None:
    values = []
    for callbacks in ([], [TraceCallback()], [TraceCallback(restore_buffers=True)]):
        model = model_of()
        with warnings.catch_warnings(action="error", category=UserWarning):
            fit(model, None, callbacks=callbacks)
        values.append([array(variable) for variable in model.variables])
    assert close(values[0], values[1])
    assert close(values[0], values[2])


def test_what_was_spoiled_before_is_not_hidden() -> None:
    model = model_of()
    fit(model)
    with pytest.warns(UserWarning, match=r"They already were before this step\. Load earlier weights"):
        fit(model, callbacks=[TraceCallback(restore_buffers=True)])


def test_frozen_weights_are_not_copied() -> None:
    callback = TraceCallback(restore_buffers=True)
    fit(model_of(), None, callbacks=[callback])
    assert len(callback._buffers._kept) == 2


def test_a_model_without_such_variables() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(adam()), "mse")
    callback = TraceCallback(restore_buffers=True)
    with warnings.catch_warnings(action="error", category=UserWarning):
        fit(model, callbacks=[callback])
    assert [step.skipped for step in callback.trace] == [False, False, True, False]


@with_jax
@pytest.mark.parametrize("steps", [1] if BACKEND == "torch" else [2])  # Keras allows 1 on torch
def test_a_skip_is_noticed_among_several_steps_of_one_execution(steps: int) -> None:
    model = model_of(steps_per_execution=steps)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(model, callbacks=[TraceCallback()])
    assert any("left inf or NaN in" in str(one.message) for one in told)


@with_jax
@pytest.mark.skipif(BACKEND == "torch", reason="Keras allows 1 step on torch")
def test_of_several_steps_of_one_execution_the_finite_ones_stay() -> None:
    """Others of these steps were taken. What is not finite gets the values from before all of them."""
    for spoils_forward in (True, False):
        model = model_of(steps_per_execution=2)
        x, y = data(0 if spoils_forward else None)
        y[0] = INF
        before = statistics(model)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            fit_on(model, x[: 2 * BATCH], y[: 2 * BATCH], callbacks=[TraceCallback(restore_buffers=True)])
        assert model.optimizer.skipped_steps == 1
        assert same(statistics(model), before) == spoils_forward


@pytest.mark.parametrize("value", ["no", 1, None])
def test_whether_to_restore_is_a_bool(value: Any) -> None:
    with pytest.raises(PolicyError, match=r"restore_buffers=.* Write restore_buffers=True"):
        TraceCallback(restore_buffers=value)
