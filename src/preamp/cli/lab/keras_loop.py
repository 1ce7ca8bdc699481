"""The training loop in Keras 3, as a user of `preamp.keras` would write it on each of its backends.

The network, the loss and the optimizer are the same on all three. The step is what differs: JAX jits a pure
function, PyTorch runs backward, TensorFlow records a tape in a graph. `KERAS_BACKEND` says which one runs.

Casting down and up again emulates low precision; the gradients are rounded at the same places. Natively,
Keras's own policies such as "mixed_float16" do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from preamp.arrays.load_order import before_keras
from preamp.cli.lab import ADAM_EPSILON, KERAS_BACKENDS, Precision
from preamp.cli.lab.loop import Loop, Trained
from preamp.cli.lab.problem import Problem
from preamp.errors import PreampError, ScaleExhausted
from preamp.policy import Policy
from preamp.scaling import Step

try:
    before_keras()
    import keras
except ValueError as error:  # a backend that Keras does not know
    raise PreampError(f"{error}. Set KERAS_BACKEND to one of {', '.join(KERAS_BACKENDS)}.") from error
else:
    if keras.backend.backend() not in KERAS_BACKENDS:
        raise PreampError(
            f"Keras cannot train on {keras.backend.backend()}. "
            f"Set KERAS_BACKEND to one of {', '.join(KERAS_BACKENDS)}."
        )

from preamp.keras import LossScaleOptimizer

# Takes inputs and targets. Of the gradients, those of kernels are at even places.
TrainStep: TypeAlias = Callable[[NDArray[Any], NDArray[Any]], Trained]

LOSSES: dict[str, Callable[[], Any]] = {
    "squared": keras.losses.MeanSquaredError,
    "cross_entropy": partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True),
}


class LowPrecisionDense(keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """A dense layer that stores operands, products and their gradients in a precision such as "float16"."""

    def __init__(self, units: int, stored: str, **settings: Any) -> None:
        super().__init__(units, **settings)
        self.stored = stored

    def call(self, inputs: Any) -> Any:
        """Return the activations, in float32."""
        kernel, bias = self._rounded(self.kernel), self._rounded(self.bias)
        products = keras.ops.matmul(self._rounded(inputs), kernel)
        return self.activation(self._rounded(products + bias))

    def _rounded(self, values: Any) -> Any:
        return keras.ops.cast(keras.ops.cast(values, self.stored), "float32")


class KerasLoop(Loop):
    """One training of one problem."""

    def __init__(
        self, problem: Problem, precision: Precision, policy: Policy[Any] | None, seed: int, **settings: bool
    ) -> None:
        super().__init__(problem, precision, policy, seed, **settings)
        with keras.device("cpu"):
            self.model = _network(problem, precision, self.emulate)
            self.model.set_weights(list(_first_weights(problem, seed)))
            self.optimizer = keras.optimizers.Adam(problem.learning_rate, epsilon=ADAM_EPSILON)
            if policy is not None:
                self.optimizer = LossScaleOptimizer(self.optimizer, policy=policy)
            self.optimizer.build(self.model.trainable_variables)
        self.train_step = STEPS[keras.backend.backend()](self.model, self.optimizer, LOSSES[problem.loss]())

    def train_on(self, rows: NDArray[np.int64], index: int) -> Trained:
        table = self.problem.table
        targets = table.train if self.problem.loss == "squared" else table.train_labels
        with keras.device("cpu"):
            step = self.train_step(table.train[rows], targets[rows])
        return step._replace(gradients=step.gradients[::2])

    def last_step(self) -> Step | None:
        return self.optimizer.last_step  # type: ignore[no-any-return]

    def check_exhausted(self) -> None:
        self.optimizer.check_exhausted()

    def outputs(self) -> NDArray[np.float32]:
        with keras.device("cpu"):
            rows = self.problem.table.test
            answers = self.model.predict(rows, batch_size=len(rows), verbose=0)
            return np.asarray(answers, np.float32)


def _network(problem: Problem, precision: Precision, emulate: bool) -> Any:
    """Return the layers, which compute in float32 or in the precision."""
    make = partial(keras.layers.Dense, dtype="float32" if precision == "float32" else f"mixed_{precision}")
    if emulate and precision != "float32":
        make = partial(LowPrecisionDense, stored=precision, dtype="float32")
    make = partial(make, kernel_initializer="zeros")  # replaced below: drawing them takes JAX seconds
    *hidden, last = problem.sizes[1:]
    layers = [make(units, activation="sigmoid") for units in hidden]
    answer = make(last, activation="sigmoid" if problem.loss == "squared" else None)
    return keras.Sequential([keras.Input((problem.sizes[0],)), *layers, answer])


def _first_weights(problem: Problem, seed: int) -> Iterator[NDArray[np.float32]]:
    for weight in problem.initial_weights(seed):
        yield weight.T
        yield np.zeros(len(weight), np.float32)


def _peak(gradients: list[Any]) -> Any:
    """Return the largest finite magnitude among the gradients of kernels."""
    entries = keras.ops.concatenate([keras.ops.reshape(gradient, [-1]) for gradient in gradients[::2]])
    return keras.ops.max(keras.ops.where(keras.ops.isfinite(entries), keras.ops.abs(entries), 0.0))


def _jax_step(model: Any, optimizer: Any, loss_of: Any) -> TrainStep:
    """Return a step that is a pure function of all variables, compiled."""
    import jax

    Arrays: TypeAlias = list[jax.Array]

    def scaled_loss(
        weights: Arrays, rest: Arrays, state: Arrays, inputs: jax.Array, targets: jax.Array
    ) -> Any:
        answers, _ = model.stateless_call(weights, rest, inputs, training=True)
        loss = loss_of(targets, answers)
        if isinstance(optimizer, LossScaleOptimizer):
            return optimizer.stateless_scale_loss(state, loss), loss
        return loss, loss

    @jax.jit
    def update(weights: Arrays, rest: Arrays, state: Arrays, inputs: jax.Array, targets: jax.Array) -> Any:
        differentiated = jax.value_and_grad(scaled_loss, has_aux=True)
        (_, loss), gradients = differentiated(weights, rest, state, inputs, targets)
        return *optimizer.stateless_apply(state, gradients, weights), loss, gradients, _peak(gradients)

    def step(inputs: NDArray[Any], targets: NDArray[Any]) -> Trained:
        parts = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        values = [[variable.value for variable in part] for part in parts]
        weights, state, loss, gradients, peak = update(*values, inputs, targets)
        for variable, value in zip([*parts[0], *parts[2]], [*weights, *state], strict=True):
            variable.assign(value)
        return Trained(loss, gradients, peak)

    return step


def _torch_step(model: Any, optimizer: Any, loss_of: Any) -> TrainStep:
    """Return a step that runs backward and applies the gradients."""
    import torch

    torch.set_num_threads(1)  # layers this small are slower on two
    weights = model.trainable_variables

    def step(inputs: NDArray[Any], targets: NDArray[Any]) -> Trained:
        loss = loss_of(torch.from_numpy(targets), model(torch.from_numpy(inputs), training=True))
        model.zero_grad()
        optimizer.scale_loss(loss).backward()
        gradients = [weight.value.grad for weight in weights]
        peak = _peak(gradients)
        try:
            optimizer.apply(gradients, weights)
        except ScaleExhausted as error:
            return Trained(loss.detach(), gradients, peak, error)
        return Trained(loss.detach(), gradients, peak)

    return step


def _tensorflow_step(model: Any, optimizer: Any, loss_of: Any) -> TrainStep:
    """Return a step that records a tape, as a graph."""
    import tensorflow as tf

    weights = model.trainable_variables

    def step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(inputs, training=True))
            scaled_loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, weights)
        optimizer.apply(gradients, weights)
        return loss, gradients, _peak(gradients)

    # The last batch of an epoch is shorter. AutoGraph has nothing to rewrite and takes seconds to find out.
    graph = tf.function(step, reduce_retracing=True, autograph=False)
    return lambda inputs, targets: Trained(*graph(tf.constant(inputs), tf.constant(targets)))


STEPS: dict[str, Callable[[Any, Any, Any], TrainStep]] = {
    "jax": _jax_step,
    "torch": _torch_step,
    "tensorflow": _tensorflow_step,
}


LOOP = KerasLoop
