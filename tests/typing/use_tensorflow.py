"""A user's code on TensorFlow, whose own names have no types."""

from typing import Any, assert_type

from preamp import Dynamic, Policy, Step
from preamp.tensorflow import LossScaleOptimizer


def train(inner: Any, tape: Any, loss: Any, variables: list[Any]) -> Step | None:
    optimizer = LossScaleOptimizer(inner, dynamic=True, initial_scale=2.0**10, dynamic_growth_steps=7)
    with tape:
        scaled = optimizer.get_scaled_loss(loss)
    gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, variables))
    assert_type(gradients, list[Any])
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    assert_type(LossScaleOptimizer(inner, policy=Dynamic()).policy, Policy[Any])
    LossScaleOptimizer(inner, model=variables, restore_buffers=True)
    assert_type(optimizer.dynamic, bool)
    assert_type(optimizer.initial_scale, float)
    assert_type(optimizer.dynamic_growth_steps, int | None)
    optimizer.learning_rate = 0.1
    return optimizer.last_step


def mistakes(inner: Any) -> None:
    LossScaleOptimizer()  # type: ignore[call-arg]
    LossScaleOptimizer(inner, "yes")  # type: ignore[arg-type]
    LossScaleOptimizer(inner, initial_scale="big")  # type: ignore[arg-type]
    LossScaleOptimizer(inner, policy=3)  # type: ignore[arg-type]
    LossScaleOptimizer(inner, restore_buffers="yes")  # type: ignore[arg-type]
    LossScaleOptimizer(inner, clipnorm=1.0)  # type: ignore[call-arg]
    LossScaleOptimizer(inner).get_scaled_loss()  # type: ignore[call-arg]
