"""Keras on TensorFlow: in a graph one `cond` around the update, eagerly a decision on the host."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from preamp.arrays import Unscaled
from preamp.arrays import tensorflow as arrays
from preamp.arrays.tensorflow import Gradient, unconverted
from preamp.errors import PolicyError
from preamp.keras.scaler import ScaledStep
from preamp.keras_shared.variables import Number, StateVariables
from preamp.scaling import Measured

untraced = unconverted


def take_traced(step: ScaledStep[Gradient, tf.Tensor]) -> bool:
    """Update the variables or skip, on all replicas alike.

    Raises:
        ValueError: outside a replica context, where the gradients are not those of one replica.
    """
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "apply must be called in a replica context, where the gradients are those of one replica. "
            "Write strategy.run(train_step, args=(batch,)) and call apply in train_step."
        )
    replica, guard = tf.distribute.get_replica_context(), step.scaler.guard
    if tf.executing_eagerly() and replica.num_replicas_in_sync == 1:
        return False
    if replica.num_replicas_in_sync > 1 and guard is not None and "grad_norm" in guard.uses:
        raise PolicyError(
            f"{guard!r} uses the norm of the gradients, which is not known with several "
            'replicas because Keras sums their gradients later. Write guard=SpikeGuard(watch="loss").'
        )
    loss = step.loss_where(tf.executing_eagerly() or _is_within(step.loss))
    amax = step.amax()
    gradients, finite, norm, amaxes = step.unscaled()
    if amaxes is not None and step.inner_clips:
        gradients = _clippable(step, gradients, amaxes)
    finite, loss = _agreed(replica, finite, loss)
    measured = Measured(finite, None, norm, amax, loss)
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        _update_or_skip(step.scaler, measured, lambda: update(step.inner, gradients, step.variables))
    else:
        arguments = (step.inner, step.scaler, measured, gradients, step.variables)
        replica.merge_call(_in_cross_replica_context, args=arguments)
    return True


def _clippable(
    step: ScaledStep[Gradient, tf.Tensor], gradients: list[Gradient | None], amaxes: tf.Tensor
) -> list[Gradient | None]:
    """Return gradients that the inner optimizer can clip."""

    def divided() -> list[Gradient | None]:
        pairs = zip(gradients, step.divisors(amaxes), strict=True)
        return [one if by is None else arrays.divide([one], by)[0] for one, by in pairs]

    clippable: list[Gradient | None] = tf.cond(tf.reduce_any(amaxes > 0.0), divided, lambda: gradients)
    return clippable


def _in_cross_replica_context(
    strategy: tf.distribute.Strategy,
    inner: keras.Optimizer,
    scaler: StateVariables[Any, keras.Variable],
    measured: Measured[tf.Tensor | None],
    gradients: Sequence[Gradient | None],
    variables: Sequence[keras.Variable],
) -> None:
    """Decide once for all replicas: TensorFlow allows no collective inside a replica's `cond`.

    Args:
        strategy: the strategy of the replicas.
        inner: the optimizer that updates.
        scaler: the state of the loss scale.
        measured: the measurements but the scale, the same on each replica.
        gradients: the unscaled gradients of all replicas.
        variables: the variables to update.
    """
    local = Measured(*[strategy.experimental_local_results(value)[0] for value in measured])

    def update() -> None:
        strategy.extended.call_for_each_replica(inner.apply, args=(gradients, variables))

    _update_or_skip(scaler, local, update)


def _update_or_skip(
    scaler: StateVariables[Any, keras.Variable],
    measured: Measured[tf.Tensor | None],
    update: Callable[[], None],
) -> None:
    """Update in one branch of a `cond`, and advance after it."""
    state = scaler.before_step()
    found = measured._replace(scale=state.policy_state.scale)
    judged = scaler.judge(state, found, tf.where)

    def take() -> tf.Tensor:
        update()
        return tf.constant(True)

    tf.cond(found.finite if judged is None else judged.taken, take, lambda: tf.constant(False))
    scaler.advance(state, found, judged, tf.where)


def _agreed(
    replica: tf.distribute.ReplicaContext, finite: tf.Tensor, loss: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Return whether the gradients of all replicas are finite, and the sum of their losses.

    The sum is the mean over the whole batch: as in `fit`, the loss of each replica is only its share of that
    mean, because the gradients are summed as well.
    """
    if replica.num_replicas_in_sync == 1:
        return finite, loss
    overflows = tf.cast(tf.logical_not(finite), tf.float32)
    if loss is None:
        return tf.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, overflows), 0.0), None
    # One vector: an all-reduce of several tensors may pack them differently on each replica.
    sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.stack([overflows, loss]))
    return tf.equal(sums[0], 0.0), sums[1]


def _is_within(tensor: tf.Tensor) -> bool:
    """Return whether a tensor belongs to the graph that is being built, or to one around it."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(tensor, "graph", None) is graph:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def update(
    inner: keras.Optimizer, gradients: Sequence[Gradient | None], variables: Sequence[keras.Variable]
) -> None:
    inner.apply(gradients, variables)  # all of Keras's apply `IndexedSlices`


def unscale(
    gradients: Sequence[Gradient], variables: Sequence[keras.Variable], scale: tf.Tensor | None
) -> Unscaled[Gradient, tf.Tensor]:
    """Unscale the gradients of one replica. They count as finite if the sum over all replicas will be.

    The norm of that sum is not known then: the inner optimizer computes the sum.
    """
    divisor = None if scale is None else tf.convert_to_tensor(scale)
    unscaled = arrays.unscale(gradients, divisor)
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    if replicas == 1:
        return unscaled
    assert unscaled.amaxes is not None
    fits = tf.reduce_all(tf.math.is_finite(unscaled.amaxes * float(replicas)))
    finite = tf.logical_and(unscaled.finite, fits)
    return Unscaled(unscaled.gradients, finite, tf.constant(math.nan))


def write(variable: keras.Variable, value: tf.Tensor | Number) -> None:
    variable.assign(value if tf.is_tensor(value) else np.asarray(value, variable.dtype))


def tracked(variables: Mapping[str, keras.Variable]) -> tf.__internal__.tracking.AutoTrackable:
    """Return an object of which a `tf.train.Checkpoint` saves these variables by name."""
    parent = tf.__internal__.tracking.AutoTrackable()
    for name, variable in variables.items():
        parent._track_trackable(variable, name)
    return parent


def scalar(value: object) -> tf.Tensor | None:
    if not (tf.is_tensor(value) or isinstance(value, float)):
        return None
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, tf.float32) if tensor.shape.rank == 0 else None


def is_concrete(value: tf.Tensor | None) -> bool:
    return not isinstance(value, tf.Tensor) or hasattr(value, "numpy")


def replica() -> int:
    # Under a strategy each replica's code runs in a thread of its own.
    return threading.get_ident()


def becomes_constant(value: tf.Tensor) -> bool:
    return False  # graphs read variables


def stateless_inputs(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(tensors)
