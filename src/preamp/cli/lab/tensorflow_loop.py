"""The training loop in TensorFlow: a tape in a graph, as a user of `preamp.tensorflow` would write it.

Low precision is emulated as in `keras_loop`. TensorFlow's own float16 products take forty times as long on
a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from preamp.arrays.load_order import before_keras
from preamp.cli.lab import ADAM_EPSILON, Precision
from preamp.cli.lab.loop import Loop, Trained
from preamp.cli.lab.problem import Problem
from preamp.errors import PreampError
from preamp.policy import Policy
from preamp.scaling import Step

before_keras()
import keras  # noqa: E402

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    from preamp.tensorflow import LossScaleOptimizer
else:  # TensorFlow takes seconds to load
    raise PreampError(
        f"KERAS_BACKEND={keras.backend.backend()}, but the optimizers of tf.keras are Keras's. "
        "Set it to tensorflow, or unset it."
    )


class TensorFlowLoop(Loop):
    """One training of one problem."""

    def __init__(
        self, problem: Problem, precision: Precision, policy: Policy[Any] | None, seed: int, **settings: bool
    ) -> None:
        super().__init__(problem, precision, policy, seed, **settings)
        self.stored = tf.as_dtype(precision)
        self.computed = tf.float32 if self.emulate else self.stored
        with tf.device("CPU"):
            self.weights = [tf.Variable(weight.T) for weight in problem.initial_weights(seed)]
            self.biases = [tf.Variable(tf.zeros(weight.shape[1])) for weight in self.weights]
            self.optimizer = keras.optimizers.Adam(problem.learning_rate, epsilon=ADAM_EPSILON)
            if policy is not None:
                self.optimizer = LossScaleOptimizer(self.optimizer, policy=policy)
            self.optimizer.build([*self.weights, *self.biases])
        rows = tf.TensorSpec([None, problem.sizes[0]], tf.float32)  # the last batch of an epoch is shorter
        labels = tf.TensorSpec([None], tf.int64)
        # There is nothing for AutoGraph to rewrite, and it takes seconds to find that out.
        self.train_step = tf.function(self._train_step, input_signature=[rows, labels], autograph=False)

    def train_on(self, rows: NDArray[np.int64], index: int) -> Trained:
        table = self.problem.table
        with tf.device("CPU"):
            return Trained(*self.train_step(table.train[rows], table.train_labels[rows]))

    def last_step(self) -> Step | None:
        return self.optimizer.last_step  # type: ignore[no-any-return]

    def check_exhausted(self) -> None:
        self.optimizer.check_exhausted()

    def outputs(self) -> NDArray[np.float32]:
        with tf.device("CPU"):
            return tf.cast(self._forward(self.problem.table.test), tf.float32).numpy()  # type: ignore[no-any-return]

    def _train_step(
        self, inputs: tf.Tensor, labels: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], tf.Tensor]:
        """Return the loss, the weights' gradients of the scaled loss, and their peak."""
        variables = [*self.weights, *self.biases]
        with tf.GradientTape() as tape:
            loss = self._loss(inputs, labels)
            scaled_loss = self.optimizer.get_scaled_loss(loss) if self.policy is not None else loss
        scaled = gradients = tape.gradient(scaled_loss, variables)
        if self.policy is not None:
            gradients = self.optimizer.get_unscaled_gradients(scaled)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        of_weights = scaled[: len(self.weights)]
        return loss, of_weights, _peak(of_weights)

    def _forward(self, values: tf.Tensor) -> tf.Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            products = tf.matmul(self._rounded(values), self._rounded(weight))
            values = self._rounded(products + self._rounded(bias))
            if weight is not self.weights[-1] or self.problem.loss == "squared":
                values = tf.sigmoid(values)
        return values

    def _rounded(self, values: tf.Tensor) -> tf.Tensor:
        """Round values to the precision in which they are stored."""
        return tf.cast(tf.cast(values, self.stored), self.computed)

    def _loss(self, inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        outputs = tf.cast(self._forward(inputs), tf.float32)
        if self.problem.loss == "squared":
            return tf.reduce_mean(tf.math.squared_difference(outputs, inputs))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))


def _peak(gradients: list[tf.Tensor]) -> tf.Tensor:
    """Return the largest finite magnitude."""
    entries = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
    return tf.reduce_max(tf.where(tf.math.is_finite(entries), tf.abs(entries), 0.0))


LOOP = TensorFlowLoop
