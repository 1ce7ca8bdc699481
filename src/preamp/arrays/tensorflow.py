"""TensorFlow: multiply a loss, divide gradients, find a number that is not finite.

This room computes, for optimizers of Keras 3 and of tf_keras. It refuses to know who owns the scale and what
follows from an overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from preamp.arrays.load_order import before_tensorflow

before_tensorflow()
import tensorflow as tf  # noqa: E402

F = TypeVar("F", bound=Callable[..., Any])


def unconverted(function: F) -> F:
    """Keep AutoGraph from converting a function, which takes seconds and finds nothing to convert."""
    kept: F = tf.autograph.experimental.do_not_convert(function)
    return kept


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


def seen(sees: Collection[str], edge: Any, gradients: Sequence[Any]) -> dict[str, Any]:
    """Return the peak of all replicas' gradients, and the share from the edge on: float32 scalars, as asked.

    Args:
        sees: what is asked for: "peak", "share".
        edge: a float, or a float32 scalar.
        gradients: as in `agreed`. Of `IndexedSlices` the stored entries count.
    """
    if not sees:
        return {}
    peak, count, size = tf.unstack(_gathered(sees, edge, gradients), axis=1)
    share = tf.reduce_sum(count) / tf.maximum(tf.reduce_sum(size), 1.0)
    return {name: value for name, value in (("peak", tf.reduce_max(peak)), ("share", share)) if name in sees}


def _gathered(sees: Collection[str], edge: Any, gradients: Sequence[Any]) -> Any:
    """Return what each replica has measured: of shape [replicas, 3]."""
    if tf.distribute.in_cross_replica_context():
        strategy = tf.distribute.get_strategy()
        rows = strategy.extended.call_for_each_replica(_measured, args=(sees, edge, gradients))
        return strategy.gather(rows, axis=0)
    replica, row = tf.distribute.get_replica_context(), _measured(sees, edge, gradients)
    return row if replica.num_replicas_in_sync == 1 else replica.all_gather(row, axis=0)


def _measured(sees: Collection[str], edge: Any, gradients: Sequence[Any]) -> Any:
    """Return a replica's peak, how many entries are from the edge on, and how many there are: [1, 3]."""
    values = [values_of(gradient) for gradient in gradients if gradient is not None]
    peaks = [_largest(value) for value in values] if "peak" in sees else []
    counts = [_count(value, edge) for value in values] if "share" in sees else []
    sizes = [tf.size(value, tf.float32) for value in values]
    return tf.stack([tf.reduce_max([0.0, *peaks]), tf.add_n([0.0, *counts]), tf.add_n([0.0, *sizes])])[None]


def _largest(values: Any) -> Any:
    """Return the largest magnitude without making a tensor of magnitudes; of nothing, not above 0."""
    peak = tf.maximum(tf.reduce_max(values), -tf.reduce_min(values))
    return tf.cast(tf.minimum(peak, tf.cast(peak.dtype.max, peak.dtype)), tf.float32)


def _count(values: Any, edge: Any) -> Any:
    values = widened(values)
    reach = tf.abs(values) >= tf.cast(edge, values.dtype)
    return tf.cast(tf.math.count_nonzero(reach), tf.float32)


def _overflows(gradients: Sequence[Any]) -> Any:
    return tf.where(are_finite(gradients), 0.0, 1.0)


def _divided(gradient: Any, scale: Any) -> Any:
    gradient = widened(gradient)
    quotient = values_of(gradient) / tf.cast(scale, gradient.dtype)
    return _with_values(gradient, quotient) if isinstance(gradient, tf.IndexedSlices) else quotient


def _with_values(slices: Any, values: Any) -> Any:
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)
