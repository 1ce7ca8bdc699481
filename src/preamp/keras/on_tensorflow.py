"""Keras on TensorFlow: in a graph one `cond` around the update, eagerly a decision on the host."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from preamp.arrays import Unscaled
from preamp.arrays import tensorflow as arrays
from preamp.arrays.tensorflow import Gradient, unconverted
from preamp.errors import PolicyError
from preamp.keras.scaler import ScaledStep, ScalerVariables

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
    replica = tf.distribute.get_replica_context()
    if tf.executing_eagerly() and replica.num_replicas_in_sync == 1:
        return False
    if replica.num_replicas_in_sync > 1 and step.needs_norm:
        raise PolicyError(
            f"{step.scaler.guard!r} uses the norm of the gradients, which is not known with several "
            'replicas because Keras sums their gradients later. Write guard=SpikeGuard(watch="loss").'
        )
    loss = step.loss_where(tf.executing_eagerly() or _is_within(step.loss))
    peak = step.peak()
    gradients, finite, norm, peaks = step.unscaled()
    if peaks is not None and step.inner_clips:
        gradients = _clippable(step, gradients, peaks)
    finite, loss = _agreed(replica, finite, loss)
    found = {"finite": finite, "grad_norm": norm, "peak": peak, "loss": loss}
    measured = {name: value for name, value in found.items() if value is not None}
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        _update_or_skip(step.scaler, measured, lambda: update(step.inner, gradients, step.variables))
    else:
        arguments = (step.inner, step.scaler, measured, gradients, step.variables)
        replica.merge_call(_in_cross_replica_context, args=arguments)
    return True


def _clippable(
    step: ScaledStep[Gradient, tf.Tensor], gradients: list[Gradient | None], peaks: tf.Tensor
) -> list[Gradient | None]:
    """Return gradients that the inner optimizer can clip."""

    def divided() -> list[Gradient | None]:
        pairs = zip(gradients, step.divisors(peaks), strict=True)
        return [one if by is None else arrays.divide([one], by)[0] for one, by in pairs]

    clippable: list[Gradient | None] = tf.cond(tf.reduce_any(peaks > 0.0), divided, lambda: gradients)
    return clippable


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
        strategy: the strategy of the replicas.
        inner: the optimizer that updates.
        scaler: the state of the loss scale.
        measured: the measurements, the same on each replica.
        gradients: the unscaled gradients of all replicas.
        variables: the variables to update.
    """
    local = {name: strategy.experimental_local_results(value)[0] for name, value in measured.items()}

    def update() -> None:
        strategy.extended.call_for_each_replica(inner.apply, args=(gradients, variables))

    _update_or_skip(scaler, local, update)


def _update_or_skip(
    scaler: ScalerVariables[Any], measured: dict[str, tf.Tensor], update: Callable[[], None]
) -> None:
    """Advance inside each branch, where `finite` is constant, so that half of the rule drops out."""
    read = scaler.measured(**measured)
    judged = scaler.judge(read, _where)

    def take() -> tf.Tensor:
        update()
        taken = None if judged is None else judged._replace(taken=True)
        scaler.advance(read._replace(finite=True), _where, taken)
        return tf.constant(True)

    def skip() -> tf.Tensor:
        skipped = None if judged is None else judged._replace(taken=False)
        scaler.advance(read if skipped else read._replace(finite=False), _where, skipped)
        return tf.constant(False)

    tf.cond(read.finite if judged is None else judged.taken, take, skip)


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
    """Unscale the gradients of one replica. They count as finite if the sum over all replicas will be.

    The norm of that sum is not known then: the inner optimizer computes the sum.
    """
    divisor = None if scale is None else tf.convert_to_tensor(scale)
    unscaled = arrays.unscale(gradients, divisor)
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    if replicas == 1:
        return unscaled
    assert unscaled.peaks is not None
    fits = tf.reduce_all(tf.math.is_finite(unscaled.peaks * float(replicas)))
    finite = tf.logical_and(unscaled.finite, fits)
    return Unscaled(unscaled.gradients, finite, tf.constant(math.nan))


def write(values: Sequence[tuple[keras.Variable, float | tuple[float, ...]]]) -> None:
    for variable, value in values:
        variable.assign(value)


def tracked(variables: Mapping[str, keras.Variable]) -> tf.__internal__.tracking.AutoTrackable:
    """Return an object of which a `tf.train.Checkpoint` saves these variables by name."""
    parent = tf.__internal__.tracking.AutoTrackable()
    for name, variable in variables.items():
        parent._track_trackable(variable, name)
    return parent


def known_scalar(value: object) -> tf.Tensor | None:
    if not tf.executing_eagerly() or not (tf.is_tensor(value) or isinstance(value, float)):
        return None
    return tf.convert_to_tensor(value) if len(getattr(value, "shape", ())) == 0 else None


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


def has_value(variable: keras.Variable) -> bool:
    return True


def becomes_constant(value: tf.Tensor) -> bool:
    return False  # graphs read variables


def stateless_inputs(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(tensors)
