"""LossScaleOptimizer over `tf_keras.optimizers`.

This room is tf_keras's class for them on a preamp policy, with what that class leaves undone:
hyperparameters, methods that act on the inner optimizer, and `.keras` files that hold its state once.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

from preamp.tensorflow.hyperparameters import Hyperparameters
from preamp.tensorflow.optimizer import check_tape
from preamp.tensorflow.tf_keras_shared import OverTfKeras
from preamp.tensorflow.tf_keras_state import theirs

__all__ = ["LossScaleOptimizer"]


@tf_keras.saving.register_keras_serializable("preamp")
class LossScaleOptimizer(Hyperparameters, OverTfKeras, theirs.LossScaleOptimizerV3):
    """What `preamp.tensorflow.LossScaleOptimizer` makes of an optimizer of tf_keras."""

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Return unscaled gradients with their variables.

        Args:
            loss: a callable that returns the loss, or the loss itself, of `tape`.
            var_list: a variable, several, or a callable that returns them.
            tape: the tape that has watched a loss that is no callable.

        Raises:
            UsageError: for a loss that is no callable, without a tape.
        """
        check_tape(loss, tape)
        variables = var_list if callable(var_list) else tf.nest.flatten(var_list)
        pairs: list[tuple[Any, Any]] = self._theirs().compute_gradients(loss, variables, tape)
        return pairs

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Exclude variables from the inner optimizer's weight decay, before it is built."""
        self._optimizer.exclude_from_weight_decay(*args, **kwargs)

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Return the gradients' sums over all replicas."""
        return self._optimizer.aggregate_gradients(grads_and_vars)

    def set_weights(self, weights: Any) -> None:
        """Set the inner optimizer's variables."""
        self._optimizer.set_weights(weights)

    def save_own_variables(self, store: Any) -> None:
        """Write the state of the scale; tf_keras writes the inner optimizer beside it, once."""
        for name, value in self._loss_scale.numbers().items():
            store[name] = value

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote."""
        self._loss_scale.restore({name: store[name][()] for name in store.keys()})  # noqa: SIM118  # no mapping
