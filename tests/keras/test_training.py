"""Training as users of Keras do it: `compile`, `fit`, `train_on_batch`, callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from preamp.keras import LossScaleOptimizer

from .driving import BACKEND, INF, array, close, dtype_policy, each_backend, same, with_jax

ROWS, BATCH = 24, 4
# Step 3 of the six in an epoch overflows: its target is inf.
OVERFLOWING = 2


def data(overflow: bool = True) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 3)).astype("float32"), draw.normal(size=(ROWS, 2)).astype("float32")
    if overflow:
        y[OVERFLOWING * BATCH] = INF
    return x, y


def model_of(optimizer: Any, **arguments: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(2, dtype="float32")]
    )
    model.compile(optimizer, "mse", **arguments)
    return model


def fit(model: Any, epochs: int = 2, *, overflow: bool = True, **arguments: Any) -> Any:
    return model.fit(
        *data(overflow), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **arguments
    ).history


def adam(**arguments: Any) -> Any:
    return keras.optimizers.Adam(0.125, **arguments)


def weights(model: Any) -> list[np.ndarray]:
    return [array(v) for v in model.trainable_variables]


# Without `jit_compile` a step is eager on JAX and on torch, and a `tf.function` on TensorFlow.
usual = pytest.mark.parametrize("jit_compile", [BACKEND == "jax"])


@each_backend
@usual
def test_fit_skips_what_overflows_and_takes_the_rest(jit_compile: bool) -> None:
    model = model_of(LossScaleOptimizer(adam()), jit_compile=jit_compile)
    fit(model)
    plain = model_of(adam(), jit_compile=jit_compile)
    x, y = data()
    for _ in range(2):
        for at in range(0, ROWS, BATCH):
            if np.isfinite(y[at : at + BATCH]).all():
                plain.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])
    assert close(weights(model), weights(plain))
    assert model.optimizer.skipped_steps == 2
    assert model.optimizer.loss_scale == 2.0**13
    assert array(model.optimizer.iterations) == 10


@each_backend
@usual
def test_compile_does_not_wrap_again(jit_compile: bool) -> None:
    with dtype_policy("mixed_float16"):
        optimizer = LossScaleOptimizer(adam(), 2.0**4, dynamic_growth_steps=4)
        model = model_of(optimizer, jit_compile=jit_compile)
        assert model.optimizer is optimizer
        before = fit(model, 1, overflow=False)["loss"][0]
        assert fit(model, 3, overflow=False)["loss"][-1] < before
    assert optimizer.loss_scale == 2.0**10  # 24 steps
    assert optimizer.inner_optimizer.variables
    assert all(np.isfinite(w).all() for w in weights(model))


@with_jax
def test_mixed_float16_learns_what_float16_alone_loses() -> None:
    """Gradients of some 1e-9 are 0 in float16; scaled they are not."""
    moved = []
    for optimizer in (LossScaleOptimizer(adam()), adam()):
        with dtype_policy("mixed_float16"):
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
            model.compile(optimizer, lambda y, p: keras.ops.mean(p * 1e-4) * 1e-4, auto_scale_loss=False)
            before = weights(model)
            fit(model, 1, overflow=False)
            moved.append(not same(before, weights(model)))
    assert moved == [True, False]


@with_jax
def test_the_loss_that_is_reported_is_not_scaled() -> None:
    ours, plain = (model_of(each) for each in (LossScaleOptimizer(adam()), adam()))
    losses = [fit(model, overflow=False)["loss"] for model in (ours, plain)]
    assert np.allclose(*losses, rtol=1e-5)
    assert np.allclose(*(model.evaluate(*data(False), verbose=0) for model in (ours, plain)), rtol=1e-5)
    assert np.allclose(*(model.predict(data(False)[0], verbose=0) for model in (ours, plain)), atol=1e-5)


def test_evaluating_moves_nothing() -> None:
    model = model_of(LossScaleOptimizer(adam()))
    model.train_on_batch(*data())
    before = [array(v) for v in model.optimizer.variables]
    model.evaluate(*data(False), verbose=0)
    model.predict(data(False)[0], verbose=0)
    assert same(before, [array(v) for v in model.optimizer.variables])


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        pytest.param({"global_clipnorm": 0.5}, marks=with_jax),
    ],
    ids="-".join,
)
@usual
def test_fit_with_arguments_on_the_wrapper(arguments: dict[str, Any], jit_compile: bool) -> None:
    ours = model_of(LossScaleOptimizer(adam(), **arguments), jit_compile=jit_compile)
    plain = model_of(adam(**arguments), jit_compile=jit_compile)
    for model in (ours, plain):
        fit(model, overflow=False)
    assert close(weights(ours), weights(plain))


@with_jax
def test_averages_are_swapped_in_to_evaluate() -> None:
    arguments = {"use_ema": True, "ema_momentum": 0.5}
    ours = model_of(LossScaleOptimizer(adam(), **arguments))
    plain = model_of(adam(**arguments))
    histories = [
        fit(
            model,
            2,
            overflow=False,
            validation_data=data(False),
            callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=False)],
        )
        for model in (ours, plain)
    ]
    assert np.allclose(histories[0]["val_loss"], histories[1]["val_loss"], rtol=1e-4)
    assert close(weights(ours), weights(plain))


def test_a_checkpoint_of_each_epoch_goes_on_from_there(tmp_path: Path) -> None:
    model = model_of(LossScaleOptimizer(adam(), dynamic_growth_steps=4))
    fit(model, 2, callbacks=[keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))])
    again = keras.models.load_model(tmp_path / "1.keras")
    assert again.optimizer.skipped_steps == 1
    fit(again, 1)
    assert same(*([array(v) for v in [*m.variables, *m.optimizer.variables]] for m in (model, again)))


@with_jax
def test_backup_and_restore_goes_on(tmp_path: Path) -> None:
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    straight, broken, resumed = (model_of(LossScaleOptimizer(adam())) for _ in range(3))
    fit(straight)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, callbacks=[backup(), Interrupt()])
    fit(resumed, callbacks=[backup()])
    assert same(weights(straight), weights(resumed))
    assert resumed.optimizer.skipped_steps == 2


@with_jax
def test_compiling_again_goes_on() -> None:
    optimizer = LossScaleOptimizer(adam())
    model = model_of(optimizer)
    fit(model, 1)
    model.compile(optimizer, keras.losses.MeanSquaredError(name="again"))
    fit(model, 1)
    assert optimizer.skipped_steps == 2
    assert array(optimizer.iterations) == 10


@with_jax
@pytest.mark.parametrize("steps", [1] if BACKEND == "torch" else [3])  # Keras allows 1 on torch
def test_steps_per_execution(steps: int) -> None:
    one, several = (
        model_of(LossScaleOptimizer(adam())),
        model_of(LossScaleOptimizer(adam()), steps_per_execution=steps),
    )
    for model in (one, several):
        fit(model)
    assert close(weights(one), weights(several))
    assert several.optimizer.skipped_steps == 2
