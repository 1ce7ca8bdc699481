"""The kinds of optimizers to wrap, tf_keras's own wrapper beside ours, and how to drive either."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from preamp import Policy
from preamp.tensorflow import LossScaleOptimizer

KINDS = {"legacy": tf_keras.optimizers.legacy, "tf_keras": tf_keras.optimizers, "keras": keras.optimizers}
Peer: Any = tf_keras.mixed_precision.LossScaleOptimizer

each_kind = pytest.mark.parametrize("kind", KINDS)
of_tf_keras = pytest.mark.parametrize("kind", ["legacy", "tf_keras"])

# Where whole trainings run, the older optimizers have to wait for `make test-slow`.
_LEGACY = pytest.param("legacy", marks=pytest.mark.slow)
each_kind_trained = pytest.mark.parametrize("kind", [_LEGACY, "tf_keras", "keras"])
of_tf_keras_trained = pytest.mark.parametrize("kind", [_LEGACY, "tf_keras"])


def inner(kind: str, name: str = "SGD", *args: Any, **settings: Any) -> Any:
    """Return an optimizer to wrap."""
    return getattr(KINDS[kind], name)(*(args or (0.5,)), **settings)


def wrapped(kind: str, *args: Any, **settings: Any) -> LossScaleOptimizer:
    """Return SGD with a step size of 0.5, wrapped."""
    return LossScaleOptimizer(inner(kind), *args, **settings)


def gradients(optimizer: Any, values: Iterable[float], variable: Any) -> Any:
    """Return the unscaled gradient that a loss with these derivatives has."""
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.reduce_sum(variable * tf.constant(list(values), variable.dtype)))
    return optimizer.get_unscaled_gradients([tape.gradient(loss, variable)])


def step(optimizer: Any, values: Iterable[float], variable: Any) -> None:
    """Take a step with such a gradient."""
    optimizer.apply_gradients(zip(gradients(optimizer, values, variable), [variable], strict=True))


def play(optimizer: Any, script: str, variable: Any, each: Callable[[], Any] = lambda: None) -> list[Any]:
    """Take a step for each mark, "1" with an overflow; return what `each` returns after each."""
    seen = []
    for i, mark in enumerate(script):
        step(optimizer, [float("inf") if mark == "1" else i + 1.0, -1.0], variable)
        seen.append(each())
    return seen


def numbers(optimizer: Any) -> tuple[float, float]:
    """Return scale and counter."""
    counter = optimizer.dynamic_counter
    return float(optimizer.loss_scale), -1.0 if counter is None else float(tf.convert_to_tensor(counter))


def rules(policy: Policy[Any], script: str) -> list[tuple[float, float]]:
    """Return the scale and counter that a policy has after each step."""
    from tests.strategies import play as play_policy

    return [(state.scale, state.good) for state in play_policy(policy, script)[1:]]
