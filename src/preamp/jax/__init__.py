"""preamp for JAX: autocast, and loss scaling inside the compiled step.

This room decides what a primitive computes in, and where in a compiled step an update is left out. It refuses
to know when a scale moves: the policy does. docs/architecture.md says what each file decides.
"""

from preamp.errors import MissingExtra

try:
    import jax as _jax  # noqa: F401  # only to say what is missing
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise MissingExtra.of(error, "preamp[jax]") from error

from preamp.jax.autocasting.census import casts
from preamp.jax.autocasting.transform import autocast
from preamp.jax.differentiation import scaled_value_and_grad, value_and_grad
from preamp.jax.exponents import exponent_histogram, flow_slot, look, watch
from preamp.jax.gradients import all_finite
from preamp.jax.loss_scale import LossScale
from preamp.jax.stepping import apply_gradients, step
from preamp.jax.transformation import LossScaledState, check_starved, last_step, loss_scaled

__all__ = [
    "LossScale",
    "LossScaledState",
    "all_finite",
    "apply_gradients",
    "autocast",
    "casts",
    "check_starved",
    "exponent_histogram",
    "flow_slot",
    "last_step",
    "look",
    "loss_scaled",
    "scaled_value_and_grad",
    "step",
    "value_and_grad",
    "watch",
]
