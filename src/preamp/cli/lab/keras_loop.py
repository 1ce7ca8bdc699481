"""The training loop in Keras 3, as a user of `preamp.keras` would write it on each of its backends.

The network, the loss and the optimizer are the same on all three. The step is what differs: JAX jits a pure
function, PyTorch runs backward, TensorFlow records a tape in a graph. `KERAS_BACKEND` says which one runs.

Casting down and up again rehearses low precision; the gradients are rounded at the same places. Natively,
Keras's own policies such as "mixed_float16" do the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from preamp.arrays.load_order import before_keras
from preamp.cli.lab import ADAM_EPSILON, KERAS_BACKENDS, ZEROS_EVERY, Precision
from preamp.cli.lab.problem import Problem, share_of_zeros
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

# Takes inputs and targets; returns the loss, the gradients, scaled or not, with kernels at even places, the
# peak of these, scaled, and what there is to raise once the step is recorded.
TrainStep: TypeAlias = Callable[
    [NDArray[Any], NDArray[Any]], tuple[Any, list[Any], Any, ScaleExhausted | None]
]

LOSSES: dict[str, Callable[[], Any]] = {
    "squared": keras.losses.MeanSquaredError,
    "cross_entropy": partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True),
}


class LowPrecisionDense(keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """A dense layer that stores operands, products and their gradients in a low precision.

    Args:
        units: how many outputs it has.
        stored: the precision, such as "float16".
        **settings: those of `keras.layers.Dense`.
    """

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


class KerasLoop:
    """One training of one problem. The arguments are those of `preamp.cli.lab.runs.Loop`."""

    def __init__(
        self,
        problem: Problem,
        precision: Precision,
        policy: Policy[Any] | None,
        seed: int,
        *,
        emulate: bool = True,
    ) -> None:
        self.problem, self.seed = problem, seed
        self.scaled = policy is not None
        with keras.device("cpu"):
            self.model = _network(problem, precision, emulate)
            self.model.set_weights(list(_first_weights(problem, seed)))
            self.optimizer = keras.optimizers.Adam(problem.learning_rate, epsilon=ADAM_EPSILON)
            if policy is not None:
                self.optimizer = LossScaleOptimizer(self.optimizer, policy=policy)
            self.optimizer.build(self.model.trainable_variables)
        self.train_step = STEPS[keras.backend.backend()](self.model, self.optimizer, LOSSES[problem.loss]())

    def steps(self) -> Iterator[Step]:
        """Train, yielding one `Step` after each update."""
        inputs = self.problem.table.train
        targets = inputs if self.problem.loss == "squared" else self.problem.table.train_labels
        for index, rows in enumerate(self.problem.batches(self.seed)):
            start = time.perf_counter()
            with keras.device("cpu"):
                loss, gradients, peak, gives_up = self.train_step(inputs[rows], targets[rows])
                zeros = share_of_zeros(gradients[::2]) if index % ZEROS_EVERY == 0 else None
            step = self.optimizer.last_step if self.scaled else None
            step = step or Step(index, 1.0, finite=True, skipped=False)
            step = step._replace(loss=float(loss), peak=float(peak), zeros=zeros)
            yield step._replace(seconds=time.perf_counter() - start)
            if gives_up:
                raise gives_up
            if step.skipped:
                self.optimizer.check_exhausted()

    def outputs(self) -> NDArray[np.float32]:
        """Return what the network answers on the test rows, in the precision it was trained in."""
        with keras.device("cpu"):
            rows = self.problem.table.test
            answers = self.model.predict(rows, batch_size=len(rows), verbose=0)
            return np.asarray(answers, np.float32)


def _network(problem: Problem, precision: Precision, emulate: bool) -> Any:
    """Return the layers, all of whose arithmetic is in float32 or in the precision."""
    make = partial(keras.layers.Dense, dtype="float32" if precision == "float32" else f"mixed_{precision}")
    if emulate and precision != "float32":
        make = partial(LowPrecisionDense, stored=precision, dtype="float32")
    make = partial(make, kernel_initializer="zeros")  # to be set: drawing them takes JAX seconds
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

    def scaled_loss(weights: Any, rest: Any, state: Any, inputs: Any, targets: Any) -> Any:
        answers, _ = model.stateless_call(weights, rest, inputs, training=True)
        loss = loss_of(targets, answers)
        if isinstance(optimizer, LossScaleOptimizer):
            return optimizer.stateless_scale_loss(state, loss), loss
        return loss, loss

    @jax.jit
    def update(weights: Any, rest: Any, state: Any, inputs: Any, targets: Any) -> Any:
        differentiated = jax.value_and_grad(scaled_loss, has_aux=True)
        (_, loss), gradients = differentiated(weights, rest, state, inputs, targets)
        return *optimizer.stateless_apply(state, gradients, weights), loss, gradients, _peak(gradients)

    def step(inputs: Any, targets: Any) -> Any:
        parts = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        values = [[variable.value for variable in part] for part in parts]
        weights, state, loss, gradients, peak = update(*values, inputs, targets)
        for variable, value in zip([*parts[0], *parts[2]], [*weights, *state], strict=True):
            variable.assign(value)
        return loss, gradients, peak, None

    return step


def _torch_step(model: Any, optimizer: Any, loss_of: Any) -> TrainStep:
    """Return a step that runs backward and applies what it left at the weights."""
    import torch

    torch.set_num_threads(1)  # layers this small are slower on two
    weights = model.trainable_variables

    def step(inputs: Any, targets: Any) -> Any:
        loss = loss_of(torch.from_numpy(targets), model(torch.from_numpy(inputs), training=True))
        model.zero_grad()
        optimizer.scale_loss(loss).backward()
        gradients = [weight.value.grad for weight in weights]
        peak = _peak(gradients)
        try:
            optimizer.apply(gradients, weights)
        except ScaleExhausted as reason:
            return loss.detach(), gradients, peak, reason
        return loss.detach(), gradients, peak, None

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

    # The last batch of an epoch is shorter. Nothing here is for AutoGraph, which takes seconds to see that.
    graph = tf.function(step, reduce_retracing=True, autograph=False)
    return lambda inputs, targets: (*graph(tf.constant(inputs), tf.constant(targets)), None)


STEPS: dict[str, Callable[[Any, Any, Any], TrainStep]] = {
    "jax": _jax_step,
    "torch": _torch_step,
    "tensorflow": _tensorflow_step,
}


LOOP = KerasLoop
