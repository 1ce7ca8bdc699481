"""preamp for JAX: autocast, and loss scaling inside the compiled step."""

from preamp.errors import MissingExtra

try:
    import jax as _jax
    import optax as _optax
except ImportError as error:
    raise MissingExtra.of(error, "preamp[jax]") from error
else:  # in JAX 0.5 an array's type does not say along which axes of a mesh it varies
    MissingExtra.refuse_older("jax", _jax.__version__, "0.6")
    MissingExtra.refuse_older("optax", _optax.__version__, "0.2.8")

from preamp.jax.autocasting.counting import casts
from preamp.jax.autocasting.delayed import recipe_state
from preamp.jax.autocasting.transform import autocast
from preamp.jax.blaming.step import blame
from preamp.jax.blaming.tune import tune
from preamp.jax.histograms import exponent_histogram, flow_slot, snapshot, watch
from preamp.jax.machine import check
from preamp.jax.quantizing import quantize
from preamp.jax.sampler_mismatch import mismatch
from preamp.jax.scaling import exporting as _exporting
from preamp.jax.scaling.differentiation import accumulate, value_and_grad, zero_grads
from preamp.jax.scaling.states import (
    LossScaledState,
    PendingState,
    check_exhausted,
    last_step,
    restart_guard,
    restart_loss_scale,
)
from preamp.jax.scaling.train_step import apply_gradients, step
from preamp.jax.scaling.transformation import loss_scaled
from preamp.jax.trees import FlowSlot, RecipeScales, all_finite

_exporting.register()

__all__ = [
    "FlowSlot",
    "LossScaledState",
    "PendingState",
    "RecipeScales",
    "accumulate",
    "all_finite",
    "apply_gradients",
    "autocast",
    "blame",
    "casts",
    "check",
    "check_exhausted",
    "exponent_histogram",
    "flow_slot",
    "last_step",
    "loss_scaled",
    "mismatch",
    "quantize",
    "recipe_state",
    "restart_guard",
    "restart_loss_scale",
    "snapshot",
    "step",
    "tune",
    "value_and_grad",
    "watch",
    "zero_grads",
]
