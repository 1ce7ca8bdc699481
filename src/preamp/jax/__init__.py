"""preamp for JAX: loss scaling, and what to do with scaled gradients.

| file | decides |
| --- | --- |
| `autocasting/` | which operator runs in which precision |
| `loss_scale.py` | a policy and its state as one tree |
| `differentiation.py` | how the scale enters: as the seed of the derivative |
| `transformation.py` | when the inner optimizer runs, and what is remembered: an optax transformation |
| `stepping.py` | a whole step in one conditional |
| `gradients.py` | arithmetic on trees of gradients |
| `exponents.py` | histograms of exponents, and looks made of them |
| `readings.py` | what a policy asks to see of gradients |
| `tails.py` | what gradients end in, and may wait |
| `axes.py` | what devices combine |
"""

from preamp.errors import MissingExtra

try:
    import jax as _jax  # noqa: F401  # only to say what is missing
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise MissingExtra(f"{error.name} is missing. Run: pip install 'preamp[jax]'") from error

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
