"""preamp for TensorFlow: `from preamp.tensorflow import LossScaleOptimizer` is the only line to change."""

import sys

from preamp.errors import MissingExtra
from preamp.load_order import before_tensorflow

try:
    before_tensorflow()
    import tensorflow as _tensorflow
except ImportError as error:
    raise MissingExtra.of(error, "preamp[tensorflow]") from error
else:
    MissingExtra.refuse_older("tensorflow", _tensorflow.__version__, "2.18")

import preamp.tensorflow.kinds  # which class is for which inner optimizer
from preamp.tensorflow.optimizer import LossScaleOptimizer

if "tf_keras" in sys.modules:  # its older file formats find a class only when it is registered
    import preamp.tensorflow.tf_keras_legacy  # noqa: F401  # which imports that of newer optimizers

__all__ = ["LossScaleOptimizer"]
