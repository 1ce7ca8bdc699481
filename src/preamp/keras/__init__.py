"""preamp for Keras 3: `from preamp.keras import LossScaleOptimizer` is the only line to change."""

from preamp.errors import MissingExtra
from preamp.load_order import before_keras

try:
    before_keras()
    import keras
except ImportError as error:
    backend = str(error.name).partition(".")[0]
    if backend in ("jax", "tensorflow", "torch"):  # Keras is installed, its backend is not
        other = "torch" if backend == "jax" else "jax"
        raise MissingExtra(
            f"Keras is set to compute with {backend}, which is not installed. Run: pip install {backend}, or "
            f"write before Keras is imported: os.environ['KERAS_BACKEND'] = {other!r}"
        ) from error
    if backend != "openvino":
        raise MissingExtra.of(error, "preamp[keras]") from error
else:
    MissingExtra.refuse_older("keras", keras.__version__, "3.10")
    backend = keras.backend.backend()
if backend not in ("jax", "tensorflow", "torch"):
    raise MissingExtra(
        f"Keras computes with {backend} here, which has no gradients: it can predict but not train. Write "
        "before Keras is imported: os.environ['KERAS_BACKEND'] = 'jax', or 'tensorflow' or 'torch'"
    )

from preamp.keras.loss_scale_optimizer import LossScaleOptimizer
from preamp.keras.trace_callback import TraceCallback

__all__ = ["LossScaleOptimizer", "TraceCallback"]
