"""preamp for Keras 3: `from preamp.keras import LossScaleOptimizer` is the only line to change.

This room decides how Keras's arguments, files and `fit` come to a policy, on each of its backends. It
refuses to know when a scale moves: the policy does. docs/architecture.md says what each file decides.
"""

from preamp.errors import MissingExtra

try:
    import keras as _  # noqa: F401  # only to say what is missing
except ImportError as error:
    missing = str(error.name).partition(".")[0]
    if missing in ("jax", "tensorflow", "torch"):  # Keras is there, and this is to compute
        other = "torch" if missing == "jax" else "jax"
        raise MissingExtra(
            f"Keras is to compute with {missing}, which is missing. Run: pip install {missing}, or write "
            f"before Keras is imported: os.environ['KERAS_BACKEND'] = {other!r}"
        ) from error
    raise MissingExtra.of(error, "preamp[keras]") from error

from preamp.keras.loss_scale_optimizer import LossScaleOptimizer
from preamp.keras.trace_callback import TraceCallback

__all__ = ["LossScaleOptimizer", "TraceCallback"]
