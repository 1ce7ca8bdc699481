"""Keras on TensorFlow: in a graph one `cond` around the update, eagerly a decision on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from preamp.arrays import Unscaled
from preamp.arrays import tensorflow as arrays
from preamp.arrays.tensorflow import Gradient, unconverted
from preamp.keras.scaler import ScaledStep, ScalerVariables

untraced = unconverted


def take_traced(step: ScaledStep[Gradient, tf.Tensor]) -> bool:
    """Update the variables or skip, on all replicas alike.

    Raises:
        ValueError: outside a replica context, where the gradients are not one replica's.
    """
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "apply must be called in a replica context, where the gradients are one replica's. "
            "Write strategy.run(train_step, args=(batch,)) and call apply in train_step."
        )
    replica = tf.distribute.get_replica_context()
    if tf.executing_eagerly() and replica.num_replicas_in_sync == 1:
        return False
    stats = step.gradient_stats()
    gradients, finite, norm = step.unscaled()
    measured = {"finite": finite, "norm": norm, **stats}
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        _update_or_skip(step.scaler, measured, lambda: update(step.inner, gradients, step.variables))
    else:
        arguments = (step.inner, step.scaler, measured, gradients, step.variables)
        replica.merge_call(_in_cross_replica_context, args=arguments)
    return True


def _in_cross_replica_context(
    strategy: tf.distribute.Strategy,
    inner: keras.Optimizer,
    scaler: ScalerVariables[Any],
    measured: dict[str, tf.Tensor],
    gradients: Sequence[Gradient | None],
    variables: Sequence[keras.Variable],
) -> None:
    """Decide once for all replicas: TensorFlow allows no collective inside a replica's `cond`.

    Args:
        strategy: that of the replicas.
        inner: the optimizer that updates.
        scaler: the state of the loss scale.
        measured: on each replica the same.
        gradients: unscaled, of all of them.
        variables: to be updated.
    """
    local = {name: strategy.experimental_local_results(value)[0] for name, value in measured.items()}

    def update() -> None:
        strategy.extended.call_for_each_replica(inner.apply, args=(gradients, variables))

    _update_or_skip(scaler, local, update)


def _update_or_skip(
    scaler: ScalerVariables[Any], measured: dict[str, tf.Tensor], update: Callable[[], None]
) -> None:
    """Advance in each branch, not after both: there `finite` is constant, and half of the rule drops out."""
    stats = dict(measured)
    finite, norm = stats.pop("finite"), stats.pop("norm")

    def take() -> tf.Tensor:
        update()
        scaler.advance(True, norm, stats, _where)
        return tf.constant(True)

    def skip() -> tf.Tensor:
        scaler.advance(False, norm, stats, _where)
        return tf.constant(False)

    tf.cond(finite, take, skip)


def _where(condition: bool | tf.Tensor, yes: float | tf.Tensor, no: float | tf.Tensor) -> float | tf.Tensor:
    if isinstance(condition, bool):
        return yes if condition else no
    return tf.where(condition, yes, no)


def update(
    inner: keras.Optimizer, gradients: Sequence[Gradient | None], variables: Sequence[keras.Variable]
) -> None:
    inner.apply(gradients, variables)  # all of Keras's apply `IndexedSlices`


def unscale(
    gradients: Sequence[Gradient], variables: Sequence[keras.Variable], scale: tf.Tensor | None
) -> Unscaled[Gradient, tf.Tensor]:
    """Unscale gradients; with several replicas they are finite if their sum over replicas is as well.

    The norm of that sum is not known then: the inner optimizer computes the sum.
    """
    divisor = None if scale is None else tf.convert_to_tensor(scale)
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return arrays.unscale(gradients, divisor)
    unscaled = arrays.divide(gradients, divisor)
    mine = arrays.sum_is_finite(unscaled, times=float(replica.num_replicas_in_sync))
    overflows = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(mine), tf.float32))
    return Unscaled(unscaled, tf.equal(overflows, 0.0), tf.constant(math.nan))


def write(values: Sequence[tuple[keras.Variable, float]]) -> None:
    for variable, value in values:
        variable.assign(value)


def known_scalar(value: object) -> tf.Tensor | None:
    if not tf.executing_eagerly() or not (tf.is_tensor(value) or isinstance(value, float)):
        return None
    return tf.convert_to_tensor(value) if len(getattr(value, "shape", ())) == 0 else None


def becomes_constant(value: tf.Tensor) -> bool:
    return False  # graphs read variables


def stateless_inputs(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(tensors)
