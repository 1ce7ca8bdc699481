"""The settings that a wrapper forwards to the optimizer inside, and their validation.

The inner optimizer accumulates, clips, decays and averages.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import keras

from preamp.checks import is_number, positive, shown, whole
from preamp.errors import PolicyError, UsageError
from preamp.keras_shared.arguments import KERAS_DEFAULTS

# Bound here, because users replace Keras's class with this library's under Keras's name.
BaseLossScaleOptimizer = keras.optimizers.LossScaleOptimizer

MULTI_OPTIMIZERS: Any = getattr(keras.optimizers, "MultiOptimizer", ())  # since Keras 3.16

LIMITS = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm")
NEED_VARIABLES = ("use_ema", "gradient_accumulation_steps")

_wrappers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class Handed:
    """An attribute of the wrapper that is forwarded to the inner optimizer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: keras.Optimizer | None, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper.inner_optimizer, self.name)

    def __set__(self, wrapper: keras.Optimizer, value: object) -> None:
        inner = wrapper.__dict__.get("inner_optimizer")
        if inner is None:  # Keras's constructor sets defaults before there is an inner optimizer
            return
        if self.name in KERAS_DEFAULTS:
            _check(inner, {self.name: value})
        setattr(inner, self.name, value)


def optimizers_in(inner: keras.Optimizer) -> list[keras.Optimizer]:
    """Return the optimizers that update: those inside Keras's `MultiOptimizer`, or the one that is given."""
    return list(inner.optimizers) if isinstance(inner, MULTI_OPTIMIZERS) else [inner]


def optimizer_of(inner: keras.Optimizer, variable: keras.Variable) -> keras.Optimizer:
    """Return the optimizer that updates a variable."""
    if not isinstance(inner, MULTI_OPTIMIZERS):
        return inner
    return inner.optimizers[inner._var_to_optimizer_idx[inner._var_key(variable)]]


def check_inner(inner: keras.Optimizer) -> None:
    """Check that an optimizer can be wrapped.

    Raises:
        PolicyError: if it is not a Keras optimizer, already scales the loss, or is already wrapped.
    """
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise PolicyError(
            f"inner_optimizer={inner!r} is not a keras.optimizers.Optimizer. "
            "Write LossScaleOptimizer(keras.optimizers.Adam())."
        )
    if isinstance(inner, BaseLossScaleOptimizer):
        raise PolicyError(
            f"inner_optimizer={inner.name!r} already scales the loss: gradients would be unscaled twice. "
            "Write LossScaleOptimizer(keras.optimizers.Adam())."
        )
    earlier = _wrappers.get(inner)
    if earlier is not None and earlier() is not None:
        raise PolicyError(
            f"inner_optimizer={inner.name!r} is already wrapped by another LossScaleOptimizer: two scales "
            "would follow one optimizer's steps. Write a new keras.optimizers.Adam() for this one."
        )


def adopt(wrapper: keras.Optimizer, inner: keras.Optimizer) -> None:
    """Remember the wrapper of an optimizer, for as long as the wrapper exists."""
    _wrappers[inner] = weakref.ref(wrapper)


def hand_over(inner: keras.Optimizer, given: dict[str, Any]) -> None:
    """Set the wrapper's arguments on the inner optimizer.

    Args:
        inner: the optimizer. Its class's own defaults, such as AdamW's weight decay, are overridden.
        given: values by name, as in `KERAS_DEFAULTS`; defaults are not forwarded.

    Raises:
        PolicyError: for invalid values, and for values that contradict those of the inner optimizer. Then
            nothing is set.
        UsageError: for settings that need variables, if the optimizer has already been built without them.
    """
    new = {name: value for name, value in given.items() if value != KERAS_DEFAULTS[name]}
    for name, value in new.items():
        theirs = getattr(inner, name)
        if theirs not in (KERAS_DEFAULTS[name], value, _default(type(inner), name)):
            raise PolicyError(
                f"{name}={value!r} contradicts {type(inner).__name__}({name}={theirs!r}). "
                f"Write {name} in one place, or the same value in both."
            )
    _check(inner, new)
    for name, value in new.items():
        setattr(inner, name, value)


def is_hyperparameter(inner: keras.Optimizer, name: str) -> bool:
    """Return whether a name is a public setting of an optimizer, such as `beta_1` or `momentum`."""
    settings = vars(inner)
    return not name.startswith("_") and name in settings and not callable(settings[name])


def _default(kind: type, name: str) -> Any:
    """Return the default of an optimizer's argument, from the first class that names it."""
    for base in kind.__mro__:
        parameter = inspect.signature(base).parameters.get(name) if "__init__" in vars(base) else None
        if parameter is not None:
            return parameter.default
    return KERAS_DEFAULTS[name]


def _check(inner: keras.Optimizer, new: dict[str, Any]) -> None:
    """Check new settings together with those that the optimizer has."""
    unused = [
        name for name in new if new[name] != KERAS_DEFAULTS[name] and isinstance(inner, MULTI_OPTIMIZERS)
    ]
    if unused:
        raise PolicyError(
            f"{unused[0]}={new[unused[0]]!r} would have no effect: {type(inner).__name__} leaves it to the "
            f"optimizers inside. Write keras.optimizers.Adam({unused[0]}={new[unused[0]]!r}) there."
        )
    after = {name: new.get(name, getattr(inner, name)) for name in KERAS_DEFAULTS}
    limits = {name: after[name] for name in LIMITS if name in new or after[name]}
    _check_limits(limits)
    momentum = after["ema_momentum"]
    if not (is_number(momentum) and 0.0 <= momentum <= 1.0):
        raise PolicyError(f"ema_momentum={momentum!r} is not in [0, 1]. Write ema_momentum=0.99.")
    for name, least in (("ema_overwrite_frequency", 1), ("gradient_accumulation_steps", 2)):
        if after[name] is not None:
            whole(name, after[name], least=least, instead=f"{name}=None")
    if not isinstance(after["use_ema"], bool):
        raise PolicyError(f"use_ema={after['use_ema']!r} is neither True nor False. Write use_ema=True.")
    late = [name for name in NEED_VARIABLES if name in new and new[name] != getattr(inner, name)]
    if late and inner.built:
        raise UsageError(
            f"{late[0]}={new[late[0]]!r} comes too late: {inner.name!r} has already made its variables. "
            f"Write keras.optimizers.{type(inner).__name__}(..., {late[0]}={new[late[0]]!r})."
        )


def _check_limits(limits: dict[str, float | None]) -> None:
    """Refuse invalid limits, decays and factors, and two ways to clip at once."""
    for name, value in limits.items():
        if value is None:
            continue
        if name != "weight_decay":
            positive(name, value, f"{name}=1.0, or None")
        elif not (is_number(value) and value >= 0.0):
            raise PolicyError(
                f"weight_decay={shown(value)} is not a finite number of at least 0. "
                "Write weight_decay=0.004, or None for no decay."
            )
    clips = {name: value for name, value in limits.items() if name.startswith(("clip", "global_clip"))}
    given = [f"{name}={value!r}" for name, value in clips.items() if value is not None]
    if len(given) > 1:
        raise PolicyError(f"{' and '.join(given)} are both given. Write only one of them.")
