"""preamp for TensorFlow: `from preamp.tensorflow import LossScaleOptimizer` is the only line to change."""

import sys
from typing import assert_never

from preamp.arrays.load_order import before_tensorflow
from preamp.errors import MissingExtra

try:
    before_tensorflow()
    import tensorflow as _tensorflow
except ImportError as error:
    raise MissingExtra.of(error, "preamp[tensorflow]") from error
else:
    MissingExtra.refuse_older("tensorflow", _tensorflow.__version__, "2.18")

from preamp.tensorflow.optimizer import Kind, LossScaleOptimizer

if "tf_keras" in sys.modules:  # its older file formats find a class only when it is registered
    import preamp.tensorflow.tf_keras_legacy  # noqa: F401  # which imports that of newer optimizers


def _class_for(kind: Kind) -> type[LossScaleOptimizer]:
    """Return the class for inner optimizers of one kind. Libraries that are not used are not imported."""
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


LossScaleOptimizer._class_for = staticmethod(_class_for)

__all__ = ["LossScaleOptimizer"]
