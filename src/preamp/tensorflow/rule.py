"""The arguments of tf.keras's LossScaleOptimizer as a policy, and the errors it documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from preamp.checks import warn_if_inexact
from preamp.errors import PolicyError
from preamp.keras_shared.arguments import INITIAL_SCALE, INTERVAL, check_scale
from preamp.policy import Dynamic, Policy
from preamp.systems.arguments import as_whole, given_policy
from preamp.systems.dialects import TF_KERAS


class ArgumentTypeError(PolicyError, TypeError):
    """An argument of a wrong type. tf_keras raises TypeError but documents ValueError."""


def rule(
    dynamic: object,
    initial_scale: float | None,
    dynamic_growth_steps: float | None,
    policy: Policy[Any] | None,
) -> Policy[Any]:
    """Return the policy that the arguments ask for. Without any it is tf_keras's rule.

    Its floor is 1, or the first scale if that is below 1, so that an overflow cannot raise the scale.

    Raises:
        PolicyError: for invalid arguments, and for arguments that contradict each other.
    """
    if not isinstance(dynamic, bool):
        raise ArgumentTypeError(
            f'"dynamic" argument to LossScaleOptimizer.__init__ must be a bool, but got: {dynamic!r}. '
            "Write dynamic=True, or dynamic=False, initial_scale=2.0**15 for a fixed scale."
        )
    steps = as_whole(dynamic_growth_steps)
    if policy is not None:
        given = {"initial_scale": initial_scale, "dynamic_growth_steps": steps}
        return given_policy(policy, {"dynamic": (dynamic, True), **{k: (v, None) for k, v in given.items()}})
    _check_together(dynamic, initial_scale, steps)
    first = INITIAL_SCALE if initial_scale is None else initial_scale
    check_scale(first, INTERVAL if steps is None else steps, f"dynamic=False, initial_scale={first!r}")
    warn_if_inexact("initial_scale", initial_scale)
    made = TF_KERAS(dynamic=dynamic, initial_scale=initial_scale, dynamic_growth_steps=steps)
    if isinstance(made, Dynamic) and made.init_scale < 1.0:
        return replace(made, min_scale=made.init_scale)
    return made


def check_buffers(model: object, restore_buffers: object) -> None:
    """Check `restore_buffers`.

    Raises:
        PolicyError: if it is not a bool, or True without a model.
    """
    if not isinstance(restore_buffers, bool):
        raise PolicyError(
            f"restore_buffers={restore_buffers!r} is neither True nor False. Write restore_buffers=True."
        )
    if restore_buffers and model is None:
        raise PolicyError(
            "restore_buffers=True needs the model that has the buffers. Write model=model, too."
        )


def _check_together(dynamic: bool, initial_scale: float | None, dynamic_growth_steps: float | None) -> None:
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
