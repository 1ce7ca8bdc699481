"""Trainings in Keras 3 on JAX, broken in one known way each or healthy, whose traces measure the doctor.

Each function takes a seed and what to record: "plain", the steps, or "snapshots", also histograms of the
weights, and in a loop of its own of the gradients. With `fault=False` the same training has no fault.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import Input, ops
from keras.layers import GRU, Activation, BatchNormalization, Conv2D, Dense, Dropout, Flatten, Layer

from preamp import Trace
from preamp.jax import exponent_histogram, snapshot
from preamp.keras import LossScaleOptimizer, TraceCallback

RUNS: dict[str, tuple[str, Callable[..., Trace]]] = {}


def run(
    slug: str = "healthy", policy: str = "mixed_float16"
) -> Callable[[Callable[..., Trace]], Callable[..., Trace]]:
    def register(function: Callable[..., Trace]) -> Callable[..., Trace]:
        @functools.wraps(function)
        def seeded(seed: int, recording: str, **settings: bool) -> Trace:
            before = keras.config.dtype_policy()
            keras.utils.clear_session()  # this also resets the policy
            keras.config.set_dtype_policy(policy)
            keras.utils.set_random_seed(seed)
            try:
                return function(seed, recording, **settings)
            finally:
                keras.config.set_dtype_policy(before)

        RUNS[function.__name__] = (slug, seeded)
        return seeded

    return register


def named(variables: Iterable[Any], values: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return values as a tree of layers and their variables."""
    tree: dict[str, dict[str, Any]] = {}
    for variable, value in zip(variables, values, strict=True):
        layer, _, name = variable.path.rpartition("/")
        tree.setdefault(layer, {})[name] = value
    return tree


def just_skipped(trace: Trace) -> bool:
    return [step.skipped for step in trace[-2:]] == [False, True]


class WeightHistograms(keras.callbacks.Callback):
    """Counts the weights before one step in 25, and before the one after a skip."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        index = len(self.trace)
        if index % 25 == 0 or just_skipped(self.trace):
            weights = self.model.trainable_variables
            counts = exponent_histogram(named(weights, [weight.value for weight in weights]))
            scale = self.model.optimizer.loss_scale
            self.trace.add_snapshot(snapshot(counts, index=index, scale=scale, what="weight"))


def fit(
    layers: list[Any],
    optimizer: Any,
    loss: Any,
    data: tuple[Any, Any],
    recording: str,
    epochs: int,
    batch_size: int = 32,
    callbacks: tuple[Any, ...] = (),
    **settings: Any,
) -> Trace:
    """Train as the quick start does; the settings are those of the LossScaleOptimizer."""
    model = keras.Sequential(layers)
    model.compile(LossScaleOptimizer(optimizer, **settings), loss=loss)
    recorder = TraceCallback(name="run")
    counting = [WeightHistograms(recorder.trace)] if recording == "snapshots" else []
    callbacks = [recorder, *counting, *callbacks]
    model.fit(*data, epochs=epochs, batch_size=batch_size, verbose=0, callbacks=callbacks)
    return recorder.trace


def loop(
    model: Any, inner: Any, loss: Any, batches: Iterable[tuple[Any, Any]], recording: str, clip: Any = None
) -> Trace:
    """Train with the documented loop on JAX; `clip` changes the gradients before they are applied."""
    optimizer = LossScaleOptimizer(inner)
    optimizer.build(model.trainable_variables)
    trace = Trace(name="run")

    def scaled_loss(weights: Any, rest: Any, state: Any, x: Any, y: Any) -> Any:
        answers, rest = model.stateless_call(weights, rest, x, training=True)
        value = loss(y, answers)
        return optimizer.stateless_scale_loss(state, value), (value, rest)

    @jax.jit
    def train_step(weights: Any, rest: Any, state: Any, x: Any, y: Any) -> Any:
        gradients, (value, rest) = jax.grad(scaled_loss, has_aux=True)(weights, rest, state, x, y)
        gradients = gradients if clip is None else clip(gradients)
        counts = exponent_histogram([weights, gradients])
        weights, state = optimizer.stateless_apply(state, gradients, weights)
        return weights, rest, state, value, counts

    variables = model.trainable_variables
    weights = [variable.value for variable in variables]
    rest = [variable.value for variable in model.non_trainable_variables]
    state = [variable.value for variable in optimizer.variables]
    for index, (x, y) in enumerate(batches):
        scale = optimizer.loss_scale
        weights, rest, state, value, counts = train_step(weights, rest, state, x, y)
        for variable, new in zip(optimizer.variables, state, strict=True):
            variable.assign(new)
        trace(optimizer.last_step._replace(loss=float(value)))
        if recording == "snapshots" and (index % 25 == 0 or just_skipped(trace)):
            for what, tree in zip(("weight", "gradient"), counts, strict=True):
                seen = snapshot(named(variables, tree), index=index, scale=scale, what=what)
                trace.add_snapshot(seen)
    return trace


def clusters(rng: np.random.Generator, rows: int, shape: tuple[int, ...], classes: int, noise: float) -> Any:
    """Return noisy points around one center per class, and their labels."""
    labels = rng.integers(classes, size=rows)
    points = rng.normal(size=(classes, *shape))[labels] + noise * rng.normal(size=(rows, *shape))
    return points.astype("float32"), labels


def waves(rng: np.random.Generator, rows: int) -> Any:
    """Return inputs and a smooth function of them."""
    x = rng.normal(size=(rows, 8)).astype("float32")
    return x, (np.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]).astype("float32")


def cross_entropy(**settings: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def linear(units: int) -> Any:
    return Dense(units, dtype="float32")


@run("learning_rate")
def decay_upwards(seed: int, recording: str, fault: bool = True) -> Trace:
    """The sign of a decay is wrong: the rate of SGD is multiplied by 2.5 instead of by 0.8 in each epoch."""
    x, y = clusters(np.random.default_rng(seed), 512, (8, 8, 1), 6, 3.0)
    block = [Conv2D(8, 3, strides=2, padding="same"), BatchNormalization(), Activation("relu")]
    layers = [Input((8, 8, 1)), *block, Conv2D(16, 3, activation="relu"), Flatten(), linear(6)]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (2.5 if fault else 0.8))
    sgd = keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True)
    return fit(layers, sgd, cross_entropy(), (x, y), recording, 10, callbacks=(schedule,))


@run("bad_batch")
def glitches(seed: int, recording: str, fault: bool = True) -> Trace:
    """In two of 480 series the meter has recorded 1e12 once."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(480, 12, 2)).astype("float32")
    y = x[:, -3:, :1].mean(1)
    x[rng.choice(480, 2, replace=False), 4, 1] = 1e12 if fault else 0.0
    layers = [Input((12, 2)), GRU(16), linear(1)]
    return fit(layers, keras.optimizers.RMSprop(3e-3), "mse", (x, y), recording, 12, global_clipnorm=1.0)


@run("bad_targets")
def log_of_zero(seed: int, recording: str, fault: bool = True) -> Trace:
    """The targets are logarithms of counts, and a few counts are zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(640, 8)).astype("float32")
    counts = np.maximum(rng.poisson(np.exp(2.5 + 0.5 * x[:, :1])), 1)
    counts[rng.choice(640, 3, replace=False)] = 0 if fault else 1
    with np.errstate(divide="ignore"):
        y = np.log(counts).astype("float32")
    layers = [Input((8,)), Dense(32, activation="gelu"), Dense(32, activation="gelu"), linear(1)]
    return fit(layers, keras.optimizers.Adam(3e-3), "mse", (x, y), recording, 10, global_clipnorm=1.0)


class LogEnergy(Layer):
    """The logarithm of the mean energy of 16 frames."""

    def call(self, inputs: Any) -> Any:
        frames = ops.reshape(inputs, (-1, 16, inputs.shape[1] // 16))
        return ops.log(ops.mean(ops.square(frames), axis=2) + 1.0)


@run("forward_overflow")
def loud_clips(seed: int, recording: str, fault: bool = True) -> Trace:
    """A layer squares samples of 16 bits in float16, which overflows above 255."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=400)
    loud = np.exp(rng.normal(2.6, 0.6, (400, 1)))
    fade = np.where(labels[:, None] == 1, np.linspace(2, 0.2, 256), np.linspace(0.2, 2, 256))
    x = np.round(loud * fade * rng.normal(size=(400, 256))).astype("float32")
    energy = LogEnergy(dtype="mixed_float16" if fault else "float32")
    layers = [Input((256,), dtype="float32"), energy, Dense(32, activation="relu"), linear(2)]
    return fit(layers, keras.optimizers.Adam(2e-3), cross_entropy(), (x, labels), recording, 12)


class PerWindow(Layer):
    """Brings every window to mean 0 and standard deviation 1."""

    def __init__(self, epsilon: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.epsilon = epsilon

    def call(self, inputs: Any) -> Any:
        centered = inputs - ops.mean(inputs, axis=1, keepdims=True)
        return centered / (ops.std(inputs, axis=1, keepdims=True) + self.epsilon)


@run("forward_nan")
def flat_windows(seed: int, recording: str, fault: bool = True) -> Trace:
    """Windows are divided by their standard deviation without an epsilon, and some are constant."""
    rng = np.random.default_rng(seed)
    t = np.arange(24)
    labels = rng.integers(3, size=600)
    x = np.sin(t * (0.3 + 0.3 * labels[:, None]) + 6 * rng.random((600, 1))) + 0.2 * rng.normal(
        size=(600, 24)
    )
    x[rng.choice(600, 4, replace=False)] = 0.5
    layers = [Input((24,)), PerWindow(0.0 if fault else 1e-3), Dense(48, activation="relu"), linear(3)]
    adam = keras.optimizers.AdamW(3e-3)
    return fit(layers, adam, cross_entropy(), (x.astype("float32"), labels), recording, 10)


@run("loss_function")
def rmsle(seed: int, recording: str, fault: bool = True) -> Trace:
    """A loss takes log(1 + prediction), and predictions of a linear layer can be below -1."""
    x, y = waves(np.random.default_rng(seed), 640)

    def loss(true: Any, predicted: Any) -> Any:
        predicted = predicted if fault else ops.softplus(predicted)
        return ops.mean(ops.square(ops.log(1.0 + predicted) - ops.log(1.0 + true)))

    layers = [Input((8,)), Dense(64, activation="relu", kernel_initializer="he_normal"), linear(1)]
    adam, counts = keras.optimizers.Adam(0.01), np.maximum(np.exp(y) - 0.9, 0.0)
    return fit(layers, adam, loss, (x, counts), recording, 16, 64, global_clipnorm=1.0)


@run("backward_nan")
def unit_length(seed: int, recording: str, fault: bool = True) -> Trace:
    """Embeddings of baskets are divided by a norm plus an epsilon; empty baskets have the zero vector."""
    rng = np.random.default_rng(seed)
    x, y = clusters(rng, 512, (12,), 4, 0.8)
    x = (x > 0.8).astype("float32")
    x[rng.choice(512, 4, replace=False)] = 0.0
    x[x.sum(1) == 0, 0] = 0.0 if fault else 1.0
    inputs = Input((12,))
    code = Dense(16, use_bias=False)(inputs)
    norm = ops.sqrt(ops.sum(ops.square(code), axis=1, keepdims=True))
    model = keras.Model(inputs, linear(4)(Dense(24, activation="tanh")(code / (norm + 1e-3))))
    rows = (rng.choice(512, 16, replace=False) for _ in range(120))
    batches = ((x[some], y[some]) for some in rows)
    return loop(model, keras.optimizers.Adagrad(0.05), cross_entropy(), batches, recording)


@run("clipped_while_scaled")
def clip_before_apply(seed: int, recording: str, fault: bool = True) -> Trace:
    """A user's own loop clips gradients to a norm of 1 before `apply` divides them by the loss scale."""
    rng = np.random.default_rng(seed)
    x, y = waves(rng, 512)
    layers = [Input((8,)), Dense(48, activation="tanh"), Dense(48, activation="tanh"), linear(1)]

    def clip(gradients: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
        return [g * jnp.minimum(1.0, 1.0 / norm) for g in gradients] if fault else gradients

    rows = (rng.choice(512, 32, replace=False) for _ in range(200))
    batches = ((x[some], y[some]) for some in rows)
    sgd, mse = keras.optimizers.SGD(0.05, momentum=0.9), keras.losses.MeanSquaredError()
    return loop(keras.Sequential(layers), sgd, mse, batches, recording, clip)


@run("scale_too_high")
def fixed_scale(seed: int, recording: str, fault: bool = True) -> Trace:
    """The scale is fixed at 2**19, and the gradients of this loss are near 1."""
    x, y = clusters(np.random.default_rng(seed), 480, (16,), 5, 1.0)
    layers = [Input((16,)), Dense(32, activation="relu"), Dense(32, activation="relu"), linear(5)]
    scale = 2.0**19 if fault else 2.0**10
    adagrad = keras.optimizers.Adagrad(0.05)
    return fit(layers, adagrad, cross_entropy(), (x, y), recording, 8, loss_scale_factor=scale)


@run("grows_too_often")
def impatient(seed: int, recording: str, fault: bool = True) -> Trace:
    """The scale grows after 3 clean steps, so that about every fourth step is lost."""
    x, y = waves(np.random.default_rng(seed), 640)
    layers = [Input((8,)), Dense(32, activation="relu"), Dense(32, activation="relu"), linear(1)]
    steps = 3 if fault else 2000
    return fit(layers, keras.optimizers.Adam(2e-3), "mse", (x, y), recording, 10, dynamic_growth_steps=steps)


@run("wrong_start")
def fine_tuning(seed: int, recording: str, fault: bool = True) -> Trace:
    """A training of 45 steps starts with a scale of 2**32."""
    x, y = clusters(np.random.default_rng(seed), 720, (20,), 8, 1.0)
    layers = [Input((20,)), Dense(64, activation="gelu"), linear(8)]
    scale = 2.0**32 if fault else 2.0**14
    adam = keras.optimizers.AdamW(2e-3)
    return fit(layers, adam, cross_entropy(), (x, y), recording, 1, 16, initial_scale=scale)


@run("dead_units")
def negative_weights(seed: int, recording: str, fault: bool = True) -> Trace:
    """Weights before a ReLU are drawn between -0.2 and 0, and pixels are positive: no unit is ever active."""
    x, y = clusters(np.random.default_rng(seed), 512, (8, 8, 1), 4, 0.5)
    pixels = 1 / (1 + np.exp(-x))
    start = keras.initializers.RandomUniform(-0.2, 0.0 if fault else 0.2)
    hidden = Dense(32, activation="relu", kernel_initializer=start)
    layers = [Input((8, 8, 1)), Flatten(), hidden, linear(4)]
    return fit(layers, keras.optimizers.SGD(0.1, momentum=0.9), cross_entropy(), (pixels, y), recording, 8)


@run("too_small_rate")
def decay_per_step(seed: int, recording: str, fault: bool = True) -> Trace:
    """A rate that should fall by a tenth in each epoch does so in each step."""
    x, y = waves(np.random.default_rng(seed), 512)
    layers = [Input((8,)), Dense(64, activation="gelu"), Dense(64, activation="gelu"), linear(1)]
    rate = keras.optimizers.schedules.ExponentialDecay(2e-3, decay_steps=1 if fault else 32, decay_rate=0.9)
    return fit(layers, keras.optimizers.Adam(rate), "mse", (x, y), recording, 12, 16)


@run()
def frozen_body(seed: int, recording: str) -> Trace:
    """Only the head is trained, on purpose, on features of a fixed random layer."""
    x, y = clusters(np.random.default_rng(seed), 640, (16,), 6, 1.0)
    body = Dense(128, activation="relu", trainable=False)
    layers = [Input((16,)), body, linear(6)]
    return fit(layers, keras.optimizers.Adam(3e-3), cross_entropy(), (x, y), recording, 10)


@run(policy="float32")
def accumulated(seed: int, recording: str) -> Trace:
    """Batches of 4 in float32 with dropout, of which four make one update: a noisy loss that falls slowly."""
    x, y = waves(np.random.default_rng(seed), 800)
    layers = [Input((8,)), Dense(48, activation="relu"), Dropout(0.2), linear(1)]
    adam = keras.optimizers.Adam(5e-3)
    return fit(layers, adam, "mse", (x, y), recording, 2, 4, gradient_accumulation_steps=4)


@run()
def smoothed_labels(seed: int, recording: str) -> Trace:
    """Label smoothing keeps the loss of a well-trained network with BatchNorm far above zero."""
    x, y = clusters(np.random.default_rng(seed), 512, (8, 8, 1), 10, 0.7)
    block = [Conv2D(12, 3, strides=2, use_bias=False), BatchNormalization(), Activation("relu")]
    layers = [Input((8, 8, 1)), *block, Flatten(), linear(10)]
    smooth = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2)
    rate = keras.optimizers.schedules.CosineDecay(0.01, 160)
    return fit(layers, keras.optimizers.Adam(rate), smooth, (x, np.eye(10)[y]), recording, 10)


class Sample(Layer):
    """Draws codes from means and log variances, and adds their divergence to the loss."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(dtype="float32", **settings)
        self.random = keras.random.SeedGenerator(0)

    def call(self, inputs: Any) -> Any:
        mean, log_var = ops.split(inputs, 2, axis=1)
        self.add_loss(0.5 * ops.mean(ops.sum(ops.exp(log_var) + mean**2 - 1 - log_var, axis=1)))
        return mean + ops.exp(0.5 * log_var) * keras.random.normal(ops.shape(mean), seed=self.random)


@run()
def summed_pixels(seed: int, recording: str) -> Trace:
    """The loss of a variational autoencoder is a sum over pixels: large, and some first steps are skipped."""
    x, _ = clusters(np.random.default_rng(seed), 512, (64,), 5, 0.3)
    encoder = [Dense(48, activation="relu"), Dense(8), Sample()]
    layers = [Input((64,)), *encoder, Dense(48, activation="relu"), linear(64)]

    def loss(true: Any, predicted: Any) -> Any:
        return ops.mean(ops.sum(ops.square(true - predicted), axis=1))

    return fit(layers, keras.optimizers.Adam(3e-3), loss, (x, x), recording, 15)
