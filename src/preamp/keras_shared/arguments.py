"""The arguments of Keras's and tf_keras's LossScaleOptimizer: their defaults, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preamp.checks import FLOAT32_MAX, not_subnormal, positive, shown, whole
from preamp.errors import PolicyError

INITIAL_SCALE = 2.0**15
INTERVAL = 2000
LONGEST = 2**24  # a float32 counter counts no further

# The arguments that every optimizer of Keras implements, with the values that mean "not given".
KERAS_DEFAULTS: dict[str, Any] = {
    "weight_decay": None,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "gradient_accumulation_steps": None,
}


def refuse_unknown(unknown: Mapping[str, object], error: type[PolicyError] = PolicyError) -> None:
    """Refuse arguments that a LossScaleOptimizer does not have, all of them in one error, as Keras does."""
    if unknown:
        raise error(
            f"LossScaleOptimizer does not support arguments: `{'`, `'.join(unknown)}`. Write settings of the "
            "update in the inner optimizer, as in Adam(beta_1=0.8), and leave out the others."
        )


def check_scale(initial_scale: Any, dynamic_growth_steps: Any, instead: str) -> None:
    """Refuse an invalid first scale or interval, and one that a float32 counter of steps never reaches.

    Args:
        initial_scale: the first scale.
        dynamic_growth_steps: the interval.
        instead: the arguments for a fixed scale.
    """
    positive("initial_scale", initial_scale, "initial_scale=2.0**15")
    not_subnormal("initial_scale", initial_scale)
    if initial_scale > FLOAT32_MAX:
        raise PolicyError(
            f"initial_scale={shown(initial_scale)} is inf in float32, the dtype of the loss scale. "
            "Write initial_scale=2.0**15."
        )
    whole("dynamic_growth_steps", dynamic_growth_steps, least=1, instead="dynamic_growth_steps=2000")
    if dynamic_growth_steps > LONGEST:
        raise PolicyError(
            f"dynamic_growth_steps={dynamic_growth_steps!r} is more than 2**24, the most that the counter "
            f"can hold. Write {instead} for a scale that does not move."
        )
