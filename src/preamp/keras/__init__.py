"""preamp for Keras 3: `from preamp.keras import LossScaleOptimizer` is the only line to change."""

from preamp.errors import MissingExtra

try:
    import keras as _  # noqa: F401  # only to say what is missing
except ImportError as error:
    raise MissingExtra(f"{error.name} is missing. Run: pip install 'preamp[keras]'") from error

from preamp.keras.loss_scale_optimizer import LossScaleOptimizer
from preamp.keras.trace_callback import TraceCallback

__all__ = ["LossScaleOptimizer", "TraceCallback"]
