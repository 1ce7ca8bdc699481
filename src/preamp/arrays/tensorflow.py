"""Arithmetic on TensorFlow tensors: the functions of `Arrays`, and what tf_keras's optimizers need besides.

A gradient is a tensor or `tf.IndexedSlices`, of which the stored entries count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from preamp.arrays import LARGEST_NORM, LEAST_NORM, Unscaled
from preamp.checks import FLOAT32_MAX
from preamp.errors import UsageError
from preamp.load_order import before_tensorflow

before_tensorflow()
import tensorflow as tf  # noqa: E402

F = TypeVar("F", bound=Callable[..., Any])
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"
Number: TypeAlias = "float | tf.Tensor"

HALF_DTYPES = (tf.float16, tf.bfloat16)


class HasDtype(Protocol):
    """A variable of TensorFlow or Keras."""

    @property
    def dtype(self) -> Any: ...


def unconverted(function: F) -> F:
    """Keep AutoGraph from converting a function: that takes seconds, and changes nothing."""
    kept: F = tf.autograph.experimental.do_not_convert(function)
    return kept


def scaled(loss: Number, scale: tf.Tensor) -> tf.Tensor:
    """Return loss * scale, in float32 if the loss is of a half type: there 2**17 is inf."""
    loss = _wide(tf.convert_to_tensor(loss))
    return loss * tf.cast(scale, loss.dtype)


def unscale(
    gradients: Sequence[Gradient | None], scale: tf.Tensor | None
) -> Unscaled[Gradient | None, tf.Tensor]:
    """Unscale as `divide` does, and measure."""
    unscaled = divide(gradients, scale)
    return Unscaled(unscaled, *finite_and_norm(unscaled))


def divide(gradients: Sequence[Gradient | None], scale: tf.Tensor | None) -> list[Gradient | None]:
    """Return gradients / scale, in float32 if they are of a half type: there 1 / 2**25 is 0.

    Dividing is exact where a reciprocal is not: that of 2**127 is subnormal, which devices flush to 0.

    Args:
        gradients: None stays None.
        scale: a float32 scalar; None to make half types float32 and divide nothing.
    """

    def quotient(values: tf.Tensor) -> tf.Tensor:
        values = _wide(values)
        return values if scale is None else values / tf.cast(scale, values.dtype)

    return [None if gradient is None else _mapped(quotient, gradient) for gradient in gradients]


def as_stored(gradient: Gradient | None, variable: HasDtype) -> Gradient | None:
    """Return a gradient in its variable's dtype, which optimizers require, or in that of another gradient."""
    if gradient is None:
        return None
    dtype = tf.as_dtype(variable.dtype)  # Keras has names for dtypes
    if gradient.dtype == dtype:
        return gradient
    return _mapped(lambda values: tf.cast(values, dtype), gradient)


def all_finite(gradients: Sequence[Gradient | None]) -> tf.Tensor:
    """Return whether all entries of all gradients are finite. None is left out."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(values)) for values in _values(gradients)])


def finite_and_norm(gradients: Sequence[Gradient | None]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return whether all gradients are finite, and their norm: a plain one, unless squares do not fit.

    Returns:
        With them the largest magnitude of each gradient that is not None, if squares do not fit; else zeros.
    """
    plain = global_norm(gradients)
    amaxes = tf.constant([0.0] * len(_values(gradients)))
    fits = tf.logical_and(plain >= LEAST_NORM, plain <= LARGEST_NORM)
    finite, norm, amaxes = tf.cond(
        fits, lambda: (tf.constant(True), plain, amaxes), lambda: _by_largest(gradients)
    )
    return finite, norm, amaxes


def _by_largest(gradients: Sequence[Gradient | None]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return what `finite_and_norm` does, with entries divided by the largest before they are squared."""
    amaxes = [_largest(values) for values in _values(gradients)]
    # XLA may multiply by the inverse, which has to be a normal number.
    unit = tf.clip_by_value(tf.reduce_max([0.0, *amaxes]), 2.0**-126, 2.0**126)
    norm = unit * global_norm(divide(gradients, unit))
    return all_finite(gradients), norm, tf.stack(amaxes) if amaxes else tf.zeros(0)


def global_norm(gradients: Sequence[Gradient | None]) -> tf.Tensor:
    """Return the L2 norm of all gradients together, a float32 scalar; inf where squares overflow."""
    half = _sum([tf.nn.l2_loss(_wide(values)) for values in _values(gradients)])
    return tf.cast(tf.sqrt(2.0 * half), tf.float32)


def amax(gradients: Sequence[Gradient | None]) -> tf.Tensor:
    """Return the largest magnitude, a float32 scalar: 0 of nothing, float32's largest of larger ones.

    Args:
        gradients: in a cross-replica context those of each replica; elsewhere one replica's own. The amax is
            that of all replicas.
    """

    def measured(gradients: Sequence[Gradient | None]) -> tf.Tensor:
        return tf.reduce_max([0.0, *[_largest(values) for values in _values(gradients)]])

    if tf.distribute.in_cross_replica_context():
        strategy = tf.distribute.get_strategy()
        amaxes = strategy.extended.call_for_each_replica(lambda own: measured(own)[None], args=(gradients,))
        return tf.reduce_max(strategy.gather(amaxes, axis=0))
    replica, largest = tf.distribute.get_replica_context(), measured(gradients)
    if replica.num_replicas_in_sync == 1:
        return largest
    return tf.reduce_max(replica.all_gather(largest[None], axis=0))


def read(scalars: Sequence[tf.Tensor]) -> list[float]:
    """Read scalars of any dtype to the host, all of them at once.

    Raises:
        UsageError: in a graph.
    """
    check_eager()
    return [float(x) for x in tf.stack([tf.cast(scalar, tf.float64) for scalar in scalars]).numpy()]


def check_eager() -> None:
    """Check that values can be read.

    Raises:
        UsageError: in a graph.
    """
    if not tf.executing_eagerly():
        raise UsageError(
            "the result of a step has no value yet in a graph that is being traced. "
            "Ask for it outside tf.function, after the step."
        )


def _largest(values: tf.Tensor) -> tf.Tensor:
    """Return the largest magnitude without making a tensor of magnitudes; of nothing, not above 0."""
    largest = tf.maximum(tf.reduce_max(values), -tf.reduce_min(values))
    limit = min(float(largest.dtype.max), FLOAT32_MAX)
    return tf.cast(tf.minimum(largest, tf.cast(limit, largest.dtype)), tf.float32)


def _sum(scalars: list[tf.Tensor]) -> tf.Tensor:
    """Return the sum of scalars: a float64 if any of them is, else a float32."""
    if not scalars:
        return tf.constant(0.0)
    dtype = tf.float64 if any(scalar.dtype == tf.float64 for scalar in scalars) else tf.float32
    return tf.add_n([tf.cast(scalar, dtype) for scalar in scalars])


def _wide(values: tf.Tensor) -> tf.Tensor:
    """Return a tensor of a half type in float32, any other as it is."""
    return tf.cast(values, tf.float32) if values.dtype in HALF_DTYPES else values


def _values(gradients: Sequence[Gradient | None]) -> list[tf.Tensor]:
    """Return the entries of gradients: those of `IndexedSlices`, or the tensor."""
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]


def _mapped(function: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient) -> Gradient:
    """Return a gradient with a function applied to its entries, in the same places."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)
