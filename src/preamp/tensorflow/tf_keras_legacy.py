"""LossScaleOptimizer over `tf_keras.optimizers.legacy`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs

from preamp.tensorflow.optimizer import Loss, Pair, Variables, check_graph, check_tape, flat_variables
from preamp.tensorflow.tf_keras_optimizers import OverTfKeras


@tf_keras.saving.register_keras_serializable("preamp", "LegacyLossScaleOptimizer")
class LossScaleOptimizer(OverTfKeras, theirs.LossScaleOptimizer):
    """`preamp.tensorflow.LossScaleOptimizer` over a legacy optimizer of tf_keras."""

    KIND = "legacy"

    def _compute_gradients(
        self,
        loss: Loss,
        var_list: Variables,
        grad_loss: tf.Tensor | None = None,
        tape: tf.GradientTape | None = None,
    ) -> list[Pair]:
        check_tape(loss, tape)
        if not callable(var_list):
            flat_variables("var_list", var_list)
        pairs: list[Pair] = self._theirs()._compute_gradients(loss, var_list, grad_loss, tape)
        return pairs

    def get_gradients(self, loss: Loss, params: Variables) -> list[Any]:
        """Return unscaled gradients of a loss in a graph, as tf_keras's legacy optimizers compute them."""
        check_graph()
        flat_variables("params", params)
        gradients: list[Any] = self._theirs().get_gradients(loss, params)
        return gradients
