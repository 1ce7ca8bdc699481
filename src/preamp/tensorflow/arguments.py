"""The arguments of tf.keras's LossScaleOptimizer as a policy, and the errors it documents.

This room refuses what cannot work, in tf_keras's words where it has some. It refuses to know optimizers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from preamp.checks import warn_if_inexact
from preamp.errors import PolicyError
from preamp.policy import Dynamic, Policy
from preamp.systems.arguments import INITIAL_SCALE, INTERVAL, as_whole, check_scale, given_policy
from preamp.systems.dialects import TF_KERAS


class ArgumentTypeError(PolicyError, TypeError):
    """An argument of a type that cannot work: tf_keras raises TypeError, its document says ValueError."""


def rule(
    dynamic: Any, initial_scale: Any, dynamic_growth_steps: Any, policy: Policy[Any] | None
) -> Policy[Any]:
    """Return the policy that the arguments ask for: tf_keras's, if nothing else.

    Its floor of 1 becomes the first scale where that is below 1, so that no overflow raises it.

    Raises:
        PolicyError: for arguments that cannot work, alone or together.
    """
    if not isinstance(dynamic, bool):
        raise ArgumentTypeError(
            f'"dynamic" argument to LossScaleOptimizer.__init__ must be a bool, but got: {dynamic!r}. '
            "Write dynamic=True, or dynamic=False, initial_scale=2.0**15 for a fixed scale."
        )
    dynamic_growth_steps = as_whole(dynamic_growth_steps)
    if policy is not None:
        given = {"initial_scale": initial_scale, "dynamic_growth_steps": dynamic_growth_steps}
        return given_policy(policy, {"dynamic": (dynamic, True), **{k: (v, None) for k, v in given.items()}})
    _check_together(dynamic, initial_scale, dynamic_growth_steps)
    check_scale(
        INITIAL_SCALE if initial_scale is None else initial_scale,
        INTERVAL if dynamic_growth_steps is None else dynamic_growth_steps,
    )
    warn_if_inexact("initial_scale", initial_scale)
    made = TF_KERAS(dynamic=dynamic, initial_scale=initial_scale, dynamic_growth_steps=dynamic_growth_steps)
    if isinstance(made, Dynamic) and made.init_scale < 1.0:
        return replace(made, min_scale=made.init_scale)
    return made


def check_buffers(model: Any, restore_buffers: Any) -> None:
    """Refuse buffers to be restored of no model, and a `restore_buffers` that is not a bool.

    Raises:
        PolicyError: naming what was given.
    """
    if not isinstance(restore_buffers, bool):
        raise PolicyError(
            f"restore_buffers={restore_buffers!r} is neither True nor False. Write restore_buffers=True."
        )
    if restore_buffers and model is None:
        raise PolicyError(
            "restore_buffers=True needs the model whose buffers they are. Write model=model, too."
        )


def _check_together(dynamic: bool, initial_scale: Any, dynamic_growth_steps: Any) -> None:
    if not dynamic and initial_scale is None:
        raise PolicyError(
            '"initial_scale" must be specified if "dynamic" is False. '
            "Write dynamic=False, initial_scale=2.0**15."
        )
    if not dynamic and dynamic_growth_steps is not None:
        raise PolicyError(
            f'"dynamic_growth_steps" must be None if "dynamic" is False, but got: {dynamic_growth_steps}. '
            "A fixed scale does not grow: leave it out."
        )
