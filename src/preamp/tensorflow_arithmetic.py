"""TensorFlow: multiply a loss, divide gradients, find a number that is not finite.

This room computes, for optimizers of Keras 3 and of tf_keras. It refuses to know who owns the scale and what
follows from an overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["agreed", "are_finite", "as_stored", "divided", "multiplied", "values_of", "widened"]


def multiplied(loss: Any, scale: Any) -> Any:
    """Return loss * scale, in float32 if the loss is of a half type: there 2**17 is inf."""
    loss = widened(tf.convert_to_tensor(loss))
    return loss * tf.cast(scale, loss.dtype)


def divided(gradients: Iterable[Any], scale: Any) -> list[Any]:
    """Return gradients / scale, in float32 if they are of a half type: there 1 / 2**25 is 0.

    Dividing is exact where a reciprocal is not: that of 2**127 is subnormal, which devices flush to 0.

    Args:
        gradients: tensors or `IndexedSlices`; None stays None.
        scale: a float32 scalar.
    """
    return [None if gradient is None else _divided(gradient, scale) for gradient in gradients]


def as_stored(gradient: Any, variable: Any) -> Any:
    """Return a gradient in its variable's dtype, which optimizers ask for."""
    dtype = tf.as_dtype(variable.dtype)  # Keras has names for dtypes
    if gradient is None or gradient.dtype == dtype:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return _with_values(gradient, tf.cast(gradient.values, dtype))
    return tf.cast(gradient, dtype)


def are_finite(gradients: Sequence[Any]) -> Any:
    """Return whether all gradients are finite; of none, yes."""
    values = [values_of(gradient) for gradient in gradients if gradient is not None]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])


def values_of(gradient: Any) -> Any:
    """Return a gradient's entries: those of `IndexedSlices`, or the tensor."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def widened(gradient: Any) -> Any:
    """Return a gradient of a half type in float32, any other as it is."""
    if gradient.dtype not in (tf.float16, tf.bfloat16):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return _with_values(gradient, tf.cast(gradient.values, tf.float32))
    return tf.cast(gradient, tf.float32)


def agreed(gradients: Sequence[Any]) -> Any:
    """Return whether the gradients of all replicas are finite.

    In a cross-replica context they are what each replica has; elsewhere one replica's own.
    """
    if tf.distribute.in_cross_replica_context():
        strategy = tf.distribute.get_strategy()
        overflows = strategy.extended.call_for_each_replica(_overflows, args=(gradients,))
        return tf.equal(strategy.reduce(tf.distribute.ReduceOp.SUM, overflows, axis=None), 0.0)
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return are_finite(gradients)
    return tf.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, _overflows(gradients)), 0.0)


def _overflows(gradients: Sequence[Any]) -> Any:
    return tf.where(are_finite(gradients), 0.0, 1.0)


def _divided(gradient: Any, scale: Any) -> Any:
    gradient = widened(gradient)
    quotient = values_of(gradient) / tf.cast(scale, gradient.dtype)
    return _with_values(gradient, quotient) if isinstance(gradient, tf.IndexedSlices) else quotient


def _with_values(slices: Any, values: Any) -> Any:
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)
