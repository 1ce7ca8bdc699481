"""The loss of a step over tf_keras's optimizers, kept in variables and read when `last_step` is."""

from __future__ import annotations

import math

import tensorflow as tf

from preamp.arrays.tensorflow import unconverted

# A sum of no losses: a loss of 0.0 is added to it as 0.0, so that the two can be told apart.
NONE = -0.0
# What is added for a loss that is not a number: no loss is -inf.
UNKNOWN = -math.inf


class Losses:
    """The sum of the losses that were scaled since the last update, not scaled themselves.

    That is the loss whose gradients the update applies, where each is scaled once; with several replicas
    it is the sum over them, as that of the gradients is. It is not known if one of the losses is not a
    single real number, and in graphs of TensorFlow 1, which run no assignment that nothing depends on.

    Attributes:
        variables: by name, scalars. A checkpoint does not need them, an exported function does.
    """

    def __init__(self) -> None:
        self.variables: dict[str, tf.Variable] = {}
        if tf.executing_eagerly():
            self.variables = {name: _summed_over_replicas(name) for name in ("losses", "losses_of_step")}
            # Which step that was: a checkpoint restores the number of steps, and not the loss of the last.
            self.variables["steps"] = tf.Variable(0, name="steps_of_loss", dtype=tf.int64, trainable=False)

    @unconverted
    def add(self, loss: tf.Tensor) -> None:
        """Add a loss that is about to be scaled. Nothing is read."""
        if not self._can_write() or tf.distribute.in_cross_replica_context():
            return  # in a cross-replica context no gradients can be applied either
        if loss.shape.num_elements() != 1 or not loss.dtype.is_floating:
            loss = tf.constant(UNKNOWN)
        number = tf.cast(loss, tf.float32)
        if number.shape.rank:
            number = tf.reshape(number, ())
        self.variables["losses"].assign_add(number, read_value=False)

    def end_step(self, steps: tf.Variable) -> None:
        """Keep the sum as that of the step which ends now, and begin with the next.

        Args:
            steps: how many there have been.
        """
        if self._can_write():
            losses = self.variables["losses"]
            self.variables["losses_of_step"].assign(tf.convert_to_tensor(losses), read_value=False)
            self.variables["steps"].assign(tf.convert_to_tensor(steps), read_value=False)
            losses.assign(NONE, read_value=False)

    def forget(self) -> None:
        """Forget what is kept, because what comes next is another training."""
        for name, variable in self.variables.items():
            variable.assign(0 if name == "steps" else NONE)

    def read(self, steps: int) -> float | None:
        """Return the loss of the last step; None if it is not known.

        Args:
            steps: how many there have been.
        """
        if not self.variables or int(tf.convert_to_tensor(self.variables["steps"])) != steps:
            return None
        loss = float(tf.convert_to_tensor(self.variables["losses_of_step"]))
        is_none = loss == 0.0 and math.copysign(1.0, loss) < 0.0
        return None if is_none or loss == UNKNOWN else loss

    def _can_write(self) -> bool:
        return bool(self.variables) and (tf.executing_eagerly() or tf.inside_function())


def _summed_over_replicas(name: str) -> tf.Variable:
    """Return a variable that each replica adds to, and that is read as the sum."""
    return tf.Variable(
        NONE,
        name=name,
        dtype=tf.float32,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
