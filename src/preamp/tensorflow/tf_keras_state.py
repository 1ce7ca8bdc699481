"""The state of a loss scale in the place where tf_keras expects its own.

tf_keras's LossScaleOptimizer has an object that holds the scale and checks the gradients, and asks it whether
to apply them. Here that object follows a policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs  # tf_keras exports only a facade

from preamp.arrays.tensorflow import Gradient, amax, check_eager, finite_and_norm, unconverted
from preamp.errors import PolicyError
from preamp.guards import Guard
from preamp.keras_shared.variables import GUARD, Number, StateVariables, checkpoint_key, warn_if_other_guard
from preamp.policy import Policy, Static, choose
from preamp.scaling import Measured, ScalerState, Step, raise_if_exhausted, to_step, with_rules
from preamp.tensorflow.tf_keras_buffers import LayerBuffers

# The advice for a scale outside the policy's bounds: tf_keras has no way to set one.
REMEDY = "load the model without its optimizer"

# By the names in files: tf_keras's own in checkpoints, where it has one, and dtypes other than float32.
IN_CHECKPOINTS = {"scale": "current_loss_scale", "good": "good_steps"}
INTEGERS = dict.fromkeys(("good", "steps", "skipped_steps"), tf.int64)
DTYPES = {**INTEGERS, **dict.fromkeys(("last_finite", "last_taken", "last_loss_fits"), tf.bool)}

NO_LOSSES = np.zeros(3, np.float32)


class LossScaleState(theirs._DynamicLossScaleState):
    """The variables of one loss scale.

    Args:
        policy: the rule in force.
        buffers: the buffers of the model, to check after a skipped step.
        guard: the rule that skips spikes, if there is one.

    Attributes:
        policy: the rule in force.
        guard: the rule that skips spikes, if there is one.
        variables: the state.
        losses: the loss of a step.
        counter: an int64 variable: the policy's count of clean steps.
    """

    def __init__(
        self, policy: Policy[Any], buffers: LayerBuffers | None = None, guard: Guard[Any] | None = None
    ) -> None:
        tf.__internal__.tracking.Trackable.__init__(self)
        self.policy, self.guard = policy, guard
        self.losses = LossSum(guard if guard is not None and "loss" in guard.uses else None)
        self._buffers = buffers
        self._weights: dict[Any, tf.Variable] = {}
        self.variables: StateVariables[Any, tf.Variable] = StateVariables(
            policy, guard, self._variable, _read, _write, _add, names={}, remedy=REMEDY
        )
        self._counter = self.variables.state.policy_state.good
        # An object of its own in checkpoints, so that another guard's state can be told from this one's.
        self._tracked_guard = tf.__internal__.tracking.AutoTrackable()
        for name, variable in self.variables.guard_leaves.items():
            self._tracked_guard._track_trackable(variable, name)

    def _variable(self, name: str, value: Number) -> tf.Variable | Number:
        if name == "scale" and isinstance(self.policy, Static):
            return value  # a constant: no checkpoint may move it
        dtype = DTYPES.get(name, tf.float32)
        initial = np.asarray(value, dtype.as_numpy_dtype)
        return self._add_weight(name=IN_CHECKPOINTS.get(name, name), dtype=dtype, initial_value=initial)

    def _trackable_children(self, save_type: str = "checkpoint", **options: object) -> dict[str, Any]:
        children: dict[str, Any] = super()._trackable_children(save_type, **options)
        if save_type == "checkpoint":
            if self.guard is not None:
                leaves = self.variables.guard_leaves
                children = {name: one for name, one in children.items() if name not in leaves}
                children[checkpoint_key(self.guard)] = self._tracked_guard
            return children
        buffers = {} if self._buffers is None else self._buffers.tracked()
        return {**children, **{f"loss_{name}": one for name, one in self.losses.variables.items()}, **buffers}

    def _lookup_dependency(self, name: str, *cached: Any, **options: Any) -> Any:
        found = super()._lookup_dependency(name, *cached, **options)
        if found is None:
            warn_if_other_guard(self.guard, name)
        return found

    def begin(self) -> None:
        """Make the copies of the model's buffers, before the first step is applied."""
        if self._buffers is not None:
            with tf.init_scope():
                self._buffers.begin()

    @property
    def current_loss_scale(self) -> tf.Tensor | tf.Variable:
        """The scale, a float32 scalar variable or constant."""
        scale = self.variables.state.policy_state.scale
        return tf.constant(scale) if isinstance(scale, float) else scale

    def update(self, grads: object) -> tuple[tf.Operation, bool | tf.Tensor]:
        """Advance the policy by one step.

        Args:
            grads: unscaled gradients, maybe nested; in a cross-replica context those of each replica.

        Returns:
            The op that advances the policy, and whether to take the step.

        Raises:
            ScaleExhausted: eagerly, if the policy gives up on this step.
            PolicyError: for a guard that uses the loss, if none was scaled.
        """
        # tf_keras reads the decision next, where it can: then the rest is for Python to compute.
        eager = tf.executing_eagerly()
        where = choose if eager else tf.where
        state = {path: _on_host(one) for path, one in self.variables.used.items()} if eager else None
        before = self.variables.before_step(state)
        measured = self._measured(tf.nest.flatten(grads), before.policy_state.scale)
        if eager:
            measured = Measured(*[None if value is None else _on_host(value) for value in measured])
        judged = self.variables.judge(before, measured, where)
        taken = measured.finite if judged is None else judged.taken
        try:
            written = self.variables.advance(before, measured, judged, where)
        finally:  # a step on which the policy gives up has been one
            self.losses.end_step(self.variables.state.steps)
            if self._buffers is not None:
                self._buffers.end_step(taken)
        return tf.group(*written), taken

    def check_exhausted(self) -> None:
        """Raise if the policy gave up in a graph, which cannot raise, until a state is loaded.

        Raises:
            ScaleExhausted: with the scale at which it first gave up.
        """
        raise_if_exhausted(self.policy, self._state())

    def numbers(self) -> dict[str, Any]:
        """Return the values of the variables, copied to the host, for `restore`. Vectors are lists.

        That the policy gave up is left out: training that resumes may recover.
        """
        check_eager()
        found: dict[str, Any] = {}
        for path, variable in self.variables.variables.items():
            if isinstance(variable, float):
                continue  # a fixed scale is not saved
            value = tf.convert_to_tensor(variable).numpy().tolist()
            # JSON has no inf and NaN, which a norm can be.
            if path.startswith(GUARD) or (math.isfinite(value) and not path.startswith("exhausted")):
                found[self.variables.names[path]] = value
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the variables to the result of `numbers`, perhaps of another policy or guard.

        Raises:
            PolicyError: for numbers that training cannot resume from. Then nothing is changed.

        Warns:
            UserWarning: for a scale outside the policy's bounds, which is kept.
        """
        self.variables.load(saved)
        self.losses.forget()
        if self._buffers is not None:
            self._buffers.keep_finite()

    def step(self) -> Step | None:
        """Return the record of the last step, copied to the host; None before the first."""
        state = self._state()
        if not state.steps:
            return None
        loss = self.losses.read(state.steps)
        if state.finite or self._buffers is None:
            step = to_step(state, loss=loss, framework="tensorflow")
        else:
            buffers, restored = self._buffers.ruined(), self._buffers.restored()
            step = to_step(state, loss=loss, buffers=buffers, restored=restored, framework="tensorflow")
        return with_rules(step, self.policy, self.guard)

    def skipped(self) -> int:
        """Return how many steps have been skipped, copied to the host."""
        return int(self._state().skipped_steps)

    def _state(self) -> ScalerState[Any, float]:
        """Return the state, copied to the host."""
        check_eager()
        return self.variables.state_of([_on_host(variable) for variable in self.variables.scalars.values()])

    def _measured(self, grads: Sequence[Gradient | None], scale: tf.Tensor | float) -> Measured[tf.Tensor]:
        """Measure unscaled gradients. The amax is that of the scaled ones."""
        largest = amax(grads) * scale if self.policy.needs_amax else None
        finite, norm = _finite_and_norm(grads)
        return Measured(finite, scale, norm, largest, self.losses.of_step())


def _read(variable: tf.Variable | float) -> tf.Tensor:
    """Return a value in a graph, in the dtype that policies compute with."""
    return tf.cast(tf.convert_to_tensor(variable), tf.float32)


def _write(variable: tf.Variable | float, value: tf.Tensor | Number) -> tf.Operation:
    """Set a variable; leave a constant as it is."""
    return tf.no_op() if isinstance(variable, float) else variable.assign(_cast(value, variable.dtype))


def _add(variable: tf.Variable, value: tf.Tensor | Number) -> tf.Operation:
    return variable.assign_add(_cast(value, variable.dtype))


def _cast(value: tf.Tensor | Number, dtype: tf.DType) -> Any:
    return tf.cast(value, dtype) if tf.is_tensor(value) else np.asarray(value, dtype.as_numpy_dtype)


def _on_host(value: tf.Variable | tf.Tensor | float) -> Any:
    """Return a scalar as a number, a vector as a tuple: those of one replica."""
    numbers = tf.convert_to_tensor(value).numpy().tolist()
    return tuple(numbers) if isinstance(numbers, list) else numbers


class LossSum:
    """The unscaled sum of the losses that were scaled since the last update.

    If each is scaled once, it is the loss whose gradients the update applies. Over several replicas it is
    summed, as the gradients are. It is not known if one of the losses is not a single real number, nor in
    TensorFlow 1 graphs, which run no assignment that nothing depends on.

    Args:
        guard: the guard that uses the loss, if there is one.

    Attributes:
        variables: by name, vectors of the sum of the losses, of how many there are, and of how many of them
            are not known; and how many steps there were. An exported function needs them; a checkpoint does
            not.
    """

    def __init__(self, guard: Guard[Any] | None = None) -> None:
        self._guard, self._was_added = guard, False
        self.variables: dict[str, tf.Variable] = {}
        if tf.executing_eagerly():
            self.variables = {name: _summed_over_replicas(name) for name in ("losses", "losses_of_step")}
            # Which step that was: a checkpoint restores the number of steps, and not the loss of the last.
            self.variables["steps"] = tf.Variable(0, name="steps_of_loss", dtype=tf.int64, trainable=False)

    @unconverted
    def add(self, loss: tf.Tensor) -> None:
        """Add a loss that is about to be scaled. Nothing is read."""
        if not self._can_write() or tf.distribute.in_cross_replica_context():
            return  # in a cross-replica context no gradients can be applied either
        is_known = loss.shape.num_elements() == 1 and loss.dtype.is_floating
        if not is_known and self._guard is not None:
            raise PolicyError(
                f"{self._guard!r} uses the loss, and this one has shape {loss.shape} and dtype "
                f"{loss.dtype.name}, and is not a floating-point scalar. Write "
                "opt.get_scaled_loss(tf.reduce_mean(loss)); or "
                'guard=SpikeGuard(watch="grad_norm"), which needs no loss.'
            )
        self._was_added = True
        number = tf.cast(loss, tf.float32) if is_known else tf.constant(math.nan)
        if number.shape.rank:
            number = tf.reshape(number, ())
        self.variables["losses"].assign_add(tf.stack([number, 1.0, float(not is_known)]), read_value=False)

    def of_step(self) -> tf.Tensor | None:
        """Return the sum before the step ends, over all replicas; None if no guard uses it.

        Raises:
            PolicyError: if a guard uses the loss, and none was scaled.
        """
        if self._guard is None:
            return None
        if self._was_added and self._can_write():
            total = tf.convert_to_tensor(self.variables["losses"])
            if not tf.distribute.in_cross_replica_context():
                replica = tf.distribute.get_replica_context()
                if replica.num_replicas_in_sync > 1:
                    total = replica.all_reduce(tf.distribute.ReduceOp.SUM, total)
            if not tf.executing_eagerly() or float(total[1]):
                return total[0]
        raise PolicyError(
            f"{self._guard!r} uses the loss, and none was scaled since the last step. Write loss = "
            "opt.get_scaled_loss(loss) for each step, or opt.minimize(loss_fn, variables); or write "
            'guard=SpikeGuard(watch="grad_norm").'
        )

    def end_step(self, steps: tf.Variable) -> None:
        """Keep the sum as the loss of the step that ends, and start a new one.

        Args:
            steps: how many there have been.
        """
        if self._can_write():
            losses = self.variables["losses"]
            self.variables["losses_of_step"].assign(tf.convert_to_tensor(losses), read_value=False)
            self.variables["steps"].assign(tf.convert_to_tensor(steps), read_value=False)
            losses.assign(NO_LOSSES, read_value=False)

    def forget(self) -> None:
        """Forget all losses, because another training begins."""
        for variable in self.variables.values():
            variable.assign(tf.zeros_like(variable))

    def read(self, steps: int) -> float | None:
        """Return the loss of the last step; None if it is not known.

        Args:
            steps: how many there have been.
        """
        if not self.variables or int(tf.convert_to_tensor(self.variables["steps"])) != steps:
            return None
        loss, count, unknown = tf.convert_to_tensor(self.variables["losses_of_step"]).numpy().tolist()
        return loss if count and not unknown else None

    def _can_write(self) -> bool:
        return bool(self.variables) and (tf.executing_eagerly() or tf.inside_function())


def _summed_over_replicas(name: str) -> tf.Variable:
    """Return a variable that each replica adds to, and that is read as the sum."""
    return tf.Variable(
        NO_LOSSES,
        name=name,
        dtype=tf.float32,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _finite_and_norm(grads: Sequence[Gradient | None]) -> tuple[tf.Tensor, tf.Tensor]:
    """Return whether the gradients of all replicas are finite, and their global L2 norm.

    tf_keras passes the sum over replicas, which is the same on all of them. If it was told not to sum, the
    norm is the mean over replicas, because all of them must decide alike; that of the first where tf_keras
    decides for all.

    Args:
        grads: unscaled gradients; in a cross-replica context those of each replica.
    """

    def measured(grads: Sequence[Gradient | None]) -> tuple[tf.Tensor, tf.Tensor]:
        finite, norm, _ = finite_and_norm(grads)
        return tf.where(finite, 0.0, 1.0), norm

    total = tf.distribute.ReduceOp.SUM
    if tf.distribute.in_cross_replica_context():
        strategy = tf.distribute.get_strategy()
        overflows, norms = strategy.extended.call_for_each_replica(measured, args=(grads,))
        norm = strategy.experimental_local_results(norms)[0]
        return tf.equal(strategy.reduce(total, overflows, axis=None), 0.0), norm
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return finite_and_norm(grads)[:2]
    sums = replica.all_reduce(total, tf.stack(measured(grads)))
    return tf.equal(sums[0], 0.0), sums[1] / float(replica.num_replicas_in_sync)
