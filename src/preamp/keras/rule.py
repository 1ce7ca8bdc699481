"""The arguments of Keras's LossScaleOptimizer as a policy."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from preamp.checks import level_of_caller, not_subnormal, positive, shown, warn_if_inexact
from preamp.errors import InexactScale, PolicyError
from preamp.keras_shared.arguments import INITIAL_SCALE, INTERVAL, check_scale
from preamp.policy import Dynamic, Policy, Static
from preamp.systems.arguments import as_whole, given_policy


def rule(
    inner: keras.Optimizer,
    initial_scale: float | None,
    steps: float | None,
    policy: Policy[Any] | None,
    factor: float | None,
) -> Policy[Any]:
    """Return the policy that the arguments describe.

    Args:
        inner: the optimizer to wrap. Its own `loss_scale_factor` is used unless an argument contradicts it,
            which a warning reports.
        initial_scale: the scale of the first step; None is the default.
        steps: finite steps before the scale grows; None is the default.
        policy: a rule in place of all of these.
        factor: a fixed scale, or None if the scale moves.

    Raises:
        PolicyError: for invalid arguments, and for arguments that contradict each other.
    """
    scale = INITIAL_SCALE if initial_scale is None else initial_scale
    steps = INTERVAL if steps is None else as_whole(steps)
    if isinstance(initial_scale, bool):
        raise PolicyError(
            f"initial_scale={initial_scale!r} is not a scale; in tf.keras the second argument was dynamic. "
            "Write loss_scale_factor=2.0**15 for a fixed scale, or initial_scale=2.0**15 for the first scale."
        )
    check_scale(scale, steps, f"loss_scale_factor={scale!r}")
    moving = {"initial_scale": (scale, INITIAL_SCALE), "dynamic_growth_steps": (steps, INTERVAL)}
    given = {name: value for name, (value, default) in moving.items() if value != default}
    made: Policy[Any]
    if policy is not None:
        made = given_policy(policy, {**moving, "loss_scale_factor": (factor, None)})
        given = {"policy": policy}
    elif factor is not None:
        made = _fixed(factor, given)
        given = {"loss_scale_factor": factor}
    elif given or inner.loss_scale_factor is None:
        warn_if_inexact("initial_scale", scale)
        with warnings.catch_warnings(action="ignore", category=InexactScale):  # said just now
            made = Dynamic.holding(scale, growth_interval=steps)
    else:
        made = _fixed(inner.loss_scale_factor, {})
    agree = isinstance(made, Static) and made.scale == inner.loss_scale_factor
    if given and inner.loss_scale_factor is not None and not agree:
        first, value = next(iter(given.items()))
        kind = type(inner).__name__
        warnings.warn(
            f"{first}={value!r} is used, and {kind}(loss_scale_factor={inner.loss_scale_factor!r}) is not: "
            f"gradients are divided by one scale. Write {kind}(...) without it.",
            stacklevel=level_of_caller("keras"),
        )
    return made


def _fixed(factor: float, moving: Mapping[str, Any]) -> Policy[Any]:
    """Return the policy of a fixed scale.

    Args:
        factor: the scale.
        moving: the given arguments that only apply to a scale that moves.

    Raises:
        PolicyError: for an invalid factor, or one together with such an argument.
    """
    positive("loss_scale_factor", factor, "loss_scale_factor=2.0**15, or None for a scale that moves")
    not_subnormal("loss_scale_factor", factor)
    for name, value in moving.items():
        raise PolicyError(
            f"loss_scale_factor={factor!r} fixes the scale, and {name}={value!r} moves it. "
            "Write only one of them."
        )
    return Static(factor)


def check_config(config: object, kind: type) -> None:
    """Check a configuration: `get_config` of a LossScaleOptimizer returns one.

    Args:
        config: the configuration.
        kind: the class to create from it.

    Raises:
        PolicyError: if it is not a mapping, lacks the inner optimizer, or has an unknown entry.
    """
    entries = config if isinstance(config, Mapping) else {}
    if not entries.get("inner_optimizer") or set(entries) - _arguments(kind):
        raise PolicyError(
            f"{shown(config)} is not the configuration of a LossScaleOptimizer, which has an inner_optimizer "
            "and arguments. Write optimizer.get_config() to get one."
        )


def _arguments(kind: type) -> set[str]:
    """Return the names of a class's arguments: with `**settings`, of its base's as well."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters
        others = [name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD]
        names.update(set(parameters) - set(others))
        if not others or parameters[others[0]].annotation == "Never":  # which are refused
            break
    return names
