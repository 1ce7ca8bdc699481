"""The class of LossScaleOptimizer for each kind of inner optimizer, imported when one is created."""

from __future__ import annotations

from typing import assert_never

from preamp.tensorflow.optimizer import Kind, LossScaleOptimizer


def class_for(kind: Kind) -> type[LossScaleOptimizer]:
    """Return the class for one kind of inner optimizer, importing only the library that it needs."""
    if kind == "legacy":
        from preamp.tensorflow import tf_keras_legacy

        return tf_keras_legacy.LossScaleOptimizer
    if kind == "tf_keras":
        from preamp.tensorflow import tf_keras_optimizers

        return tf_keras_optimizers.LossScaleOptimizer
    if kind == "keras":
        from preamp.tensorflow import keras_optimizers

        return keras_optimizers.LossScaleOptimizer
    assert_never(kind)


LossScaleOptimizer._class_for = staticmethod(class_for)
