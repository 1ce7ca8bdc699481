"""LossScaleOptimizer over `tf_keras.optimizers.legacy`.

This room is tf_keras's class for them on a preamp policy; hyperparameters are its `_hyper`, as documented.
"""

from __future__ import annotations

from typing import Any

import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs

from preamp.tensorflow.optimizer import check_graph, check_tape, flat_variables
from preamp.tensorflow.tf_keras_shared import OverTfKeras


@tf_keras.saving.register_keras_serializable("preamp", "LegacyLossScaleOptimizer")
class LossScaleOptimizer(OverTfKeras, theirs.LossScaleOptimizer):
    """What `preamp.tensorflow.LossScaleOptimizer` makes of a legacy optimizer."""

    KIND = "legacy"

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        check_tape(loss, tape)
        if not callable(var_list):
            flat_variables("var_list", var_list)
        return self._theirs()._compute_gradients(loss, var_list, grad_loss, tape)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return unscaled gradients of a loss in a graph, as tf_keras's legacy optimizers compute them."""
        check_graph()
        flat_variables("params", params)
        gradients: list[Any] = self._theirs().get_gradients(loss, params)
        return gradients
