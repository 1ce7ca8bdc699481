"""Keras on TensorFlow: in a graph one `cond` around the update, eagerly a decision on the host.

This room multiplies and reads tensors, and has replicas agree. It refuses to know policies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from preamp.arrays import tensorflow as tensorflow_arithmetic
from preamp.arrays.tensorflow import divided, unconverted, values_of, widened
from preamp.errors import UsageError
from preamp.policy import Reading


@unconverted
def apply(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> None:
    """Update the variables or skip, on all replicas alike.

    Args:
        optimizer: the wrapper.
        gradients: of the variables, or None.
        variables: what to update.
        scale: the variable that the gradients are to be divided by; None if they have been.

    Raises:
        ValueError: outside a replica context, where there are no gradients of one replica.
    """
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "apply must be called in a replica context, where the gradients are one replica's. "
            "Write strategy.run(train_step, args=(batch,)) and call apply in train_step."
        )
    replica = tf.distribute.get_replica_context()
    if tf.executing_eagerly() and replica.num_replicas_in_sync == 1:
        optimizer._step_on_host(gradients, variables, scale)
        return
    seen = optimizer._seen(gradients, variables, scale)
    unscaled, finite = optimizer._unscaled(gradients, variables, scale)
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        reading = Reading(finite, **seen)
        _update_or_skip(optimizer, reading, lambda: update(optimizer.inner_optimizer, unscaled, variables))
    else:
        told = {"finite": finite, **seen}
        replica.merge_call(_in_cross_replica_context, args=(optimizer, told, unscaled, variables))


def _in_cross_replica_context(
    strategy: Any, optimizer: Any, told: dict[str, Any], gradients: Any, variables: Any
) -> None:
    """Decide once for all replicas: TensorFlow allows no collective inside a replica's `cond`."""
    reading = Reading(**{name: strategy.experimental_local_results(value)[0] for name, value in told.items()})
    inner = optimizer.inner_optimizer

    def update() -> None:
        strategy.extended.call_for_each_replica(inner.apply, args=(gradients, variables))

    _update_or_skip(optimizer, reading, update)


def _update_or_skip(optimizer: Any, reading: Reading, update: Callable[[], None]) -> None:
    """Do what a step of either kind does in a branch of its own: half of the policy then is known before."""

    def take() -> Any:
        update()
        optimizer._ledger.advance(reading._replace(finite=True), _where)
        return tf.constant(True)

    def skip() -> Any:
        optimizer._ledger.advance(reading._replace(finite=False), _where)
        return tf.constant(False)

    tf.cond(reading.finite, take, skip)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, bool):
        return yes if condition else no
    return tf.where(condition, yes, no)


def update(inner: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Have the inner optimizer update the variables. All of Keras's apply `IndexedSlices`."""
    inner.apply(gradients, variables)


def unscale(gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> tuple[list[Any], Any]:
    """Return gradients divided by the scale, and whether they are finite and so is the sum of all replicas'.

    Half types become float32. `IndexedSlices` keep their indices.
    """
    if scale is None:
        unscaled = [widened(gradient) for gradient in gradients]
    else:
        unscaled = divided(gradients, tf.convert_to_tensor(scale))
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    if replicas == 1:
        return unscaled, are_finite(unscaled)
    mine = tf.math.is_finite(_total(unscaled) * float(replicas))
    overflows = tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(mine), tf.float32)
    )
    return unscaled, tf.equal(overflows, 0.0)


def seen(sees: Collection[str], edge: Any, gradients: Sequence[Any]) -> dict[str, Any]:
    """Return what a policy looks at in the gradients of all replicas."""
    return tensorflow_arithmetic.seen(sees, edge, gradients)


def are_finite(tensors: Sequence[Any]) -> Any:
    """Return whether all tensors are finite, and so is their sum: a sum keeps what is not."""
    return tf.math.is_finite(_total(tensors))


def _total(tensors: Sequence[Any]) -> Any:
    return tf.add_n([tf.cast(tf.reduce_sum(values_of(tensor)), tf.float32) for tensor in tensors])


def read(scalars: Sequence[Any]) -> list[float]:
    """Read scalars, all of them at once.

    Raises:
        UsageError: in a graph.
    """
    if not tf.executing_eagerly():
        raise UsageError(
            "what a step came to is read to the host, which no graph can do while it is traced. "
            "Ask for it outside tf.function, after the step."
        )
    return [float(x) for x in tf.stack([tf.cast(scalar, tf.float64) for scalar in scalars]).numpy()]


def known_scalar(value: Any) -> Any:
    """Return a scalar that can be read later; None for what is being traced, and for what is no scalar."""
    if not tf.executing_eagerly() or not (tf.is_tensor(value) or isinstance(value, float)):
        return None
    return tf.convert_to_tensor(value) if len(getattr(value, "shape", ())) == 0 else None


def write(variable: Any, value: float) -> None:
    """Set a scalar variable to a number."""
    variable.assign(value)


def bakes(value: Any) -> bool:
    """Return whether a value read now would be a constant of a compiled program: graphs read variables."""
    return False


def stateless_inputs(tensors: Sequence[Any]) -> list[Any]:
    """Return what may be handed to Keras."""
    return list(tensors)
