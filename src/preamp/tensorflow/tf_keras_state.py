"""The state of a loss scale in the place where tf_keras expects its own.

tf_keras's LossScaleOptimizer has an object that holds the scale and checks the gradients, and asks it whether
to apply them. Here that object follows a policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf
from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs  # tf_keras exports only a facade

from preamp.arrays.tensorflow import (
    Gradient,
    check_eager,
    finite_and_norm,
    peak,
    unconverted,
)
from preamp.errors import PolicyError
from preamp.guards import Guard
from preamp.guards.base import map_state
from preamp.guards.skips import SkipsInARow
from preamp.policy import Policy, Static, choose
from preamp.scaling import (
    GuardRecord,
    Measured,
    ScalerState,
    Step,
    advance,
    judge,
    raise_if_exhausted,
    start,
    to_step,
    with_rules,
)
from preamp.systems.arguments import check_counts
from preamp.systems.variables import (
    GUARD_NAMES,
    NAMES,
    KnownState,
    checkpoint_key,
    guard_leaves,
    has_guard,
    resumed_guard,
    warn_if_other_guard,
    warn_of_dropped_guard,
)
from preamp.tensorflow.tf_keras_buffers import Buffers

# The advice for a scale outside the policy's bounds: tf_keras has no way to set one.
REMEDY = "load the model without its optimizer"

# The names of the variables of a policy's state in checkpoints: tf_keras's own where it has one.
POLICY_NAMES = {"scale": "current_loss_scale", "good": "good_steps"}
DTYPES = {"good": tf.int64, "steps": tf.int64, "skipped_steps": tf.int64, "finite": tf.bool}
GUARD_DTYPES = {"taken": tf.bool, "loss_fits": tf.bool}

# A sum of no losses. Adding 0.0 makes it 0.0, so that a loss of 0.0 is not taken for none; one of -0.0 is.
# An array, because TensorFlow keeps Python's numbers: it takes -0.0 for the 0.0 that it was given before.
NONE = np.array(-0.0, np.float32)
# Added for a loss that is not a single real number. Sums with it stay below half of it, and finite.
UNKNOWN = -(2.0**100)

Number: TypeAlias = "float | tf.Tensor"
T = TypeVar("T")


class LossScaleState(theirs._DynamicLossScaleState):
    """The variables of one loss scale.

    Args:
        policy: the rule in force.
        buffers: the buffers of the model, to check after a skipped step.
        guard: the rule that skips spikes, if there is one.

    Attributes:
        policy: the rule in force.
        guard: the rule that skips spikes, if there is one.
        losses: the loss of a step.
        counter: an int64 variable: the policy's count of clean steps.
    """

    def __init__(
        self, policy: Policy[Any], buffers: Buffers | None = None, guard: Guard[Any] | None = None
    ) -> None:
        tf.__internal__.tracking.Trackable.__init__(self)
        self.policy, self.guard = policy, guard
        self.losses = Losses(guard if guard is not None and "loss" in guard.uses else None)
        self._buffers = buffers
        first = start(policy, takes_norm=True, guard=guard)
        self._known = KnownState(first.policy_state, REMEDY)
        self._weights: dict[Any, tf.Variable] = {}
        self._policy_variables = {
            name: self._variable(POLICY_NAMES.get(name, name), DTYPES.get(name, tf.float32), value)
            for name, value in first.policy_state._asdict().items()
            if not (name == "scale" and isinstance(policy, Static))  # a constant: no checkpoint may move it
        }
        self._counter = self._policy_variables["good"]
        # By the fields of `ScalerState`.
        self._record = {
            name: self._variable(NAMES.get(name, name), DTYPES.get(name, tf.float32), 0)
            for name, value in first._asdict().items()
            if name not in ("policy_state", "guard") and value is not None
        }
        self._guard_record: dict[str, tf.Variable] = {}  # by the fields of `GuardRecord`
        self._guard_leaves: dict[str, tf.Variable] = {}  # the guard's own state, scalars and vectors
        self._skips = None if guard is None else SkipsInARow(guard)
        if first.guard is not None:
            self._guard_record = {
                field: self._variable(name, GUARD_DTYPES.get(field, tf.float32), getattr(first.guard, field))
                for field, name in GUARD_NAMES.items()
            }
            self._guard_leaves = {
                name: self._variable(name, tf.float32, value)
                for name, value in guard_leaves(first.guard.state).items()
            }
            # An object of its own in checkpoints, so that another guard's state can be told from this one's.
            self._tracked_guard = tf.__internal__.tracking.AutoTrackable()
            for name, variable in self._guard_leaves.items():
                self._tracked_guard._track_trackable(variable, name)

    def _variable(self, name: str, dtype: tf.DType, value: float | tuple[float, ...]) -> tf.Variable:
        initial = np.asarray(value, dtype.as_numpy_dtype)
        return self._add_weight(name=name, dtype=dtype, initial_value=initial)

    def _trackable_children(self, save_type: str = "checkpoint", **options: object) -> dict[str, Any]:
        children: dict[str, Any] = super()._trackable_children(save_type, **options)
        if save_type == "checkpoint":
            if self.guard is not None:
                children = {name: one for name, one in children.items() if name not in self._guard_leaves}
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
        if isinstance(self.policy, Static):
            return tf.constant(self.policy.scale, tf.float32)
        return self._policy_variables["scale"]

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
        scale = tf.convert_to_tensor(self.current_loss_scale)  # once, before it is written
        measured = self._measured(tf.nest.flatten(grads), scale)
        if tf.executing_eagerly():  # tf_keras reads it next, to decide: the rest is for Python to compute
            on_host = Measured(*[None if value is None else value.numpy().item() for value in measured])
            return self._update_on_host(on_host)
        before = self._tensors(scale)
        judged, taken = None, measured.finite
        if self.guard is not None:
            judged = judge(self.guard, self._guard_state(tf.convert_to_tensor), measured, tf.where)
            taken = judged.taken
        after, _ = advance(self.policy, before, measured, tf.where, judged)
        return tf.group(*self._write(after, taken)), taken

    def _update_on_host(self, measured: Measured[float]) -> tuple[tf.Operation, bool]:
        before = self._numbers()._replace(steps=0, skipped_steps=0)
        self._known.check(self.policy, before.policy_state)
        judged, taken = None, measured.finite
        if self.guard is not None:
            guard_state = self._guard_state(lambda variable: _on_host(tf.convert_to_tensor(variable)))
            judged = judge(self.guard, guard_state, measured)
            taken = bool(judged.taken)
        after, gave_up = advance(self.policy, before, measured, choose, judged)
        written = self._write(after, taken)
        self._known.state = after.policy_state
        if self._skips is not None:
            self._skips.note(taken, measured.finite, "tensorflow", "tf_keras")
        if gave_up:
            raise self.policy.exhaustion_from(before.policy_state)
        return tf.group(*written), taken

    def check_exhausted(self) -> None:
        """Raise if the policy gave up in a graph, which cannot raise, until a state is loaded.

        Raises:
            ScaleExhausted: with the scale at which it first gave up.
        """
        if self.policy.gives_up:
            raise_if_exhausted(self.policy, self._numbers())

    def numbers(self) -> dict[str, Any]:
        """Return the values of the variables, copied to the host, for `restore`. Vectors are lists.

        That the policy gave up is left out: training that resumes may recover.
        """
        check_eager()
        named = {NAMES.get(name, name): variable for name, variable in self._record.items()}
        of_guard = {GUARD_NAMES[field]: variable for field, variable in self._guard_record.items()}
        values = _values({**self._policy_variables, **named, **of_guard})
        # JSON has no inf and NaN, which a norm can be.
        finite = {n: x for n, x in values.items() if not n.startswith("exhausted") and math.isfinite(x)}
        leaves = {
            name: tf.convert_to_tensor(one).numpy().tolist() for name, one in self._guard_leaves.items()
        }
        return {**finite, **leaves}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the variables to the result of `numbers`, perhaps of another policy or guard.

        Raises:
            PolicyError: for numbers that training cannot resume from. Then nothing is changed.

        Warns:
            UserWarning: for a scale outside the policy's bounds, which is kept.
        """
        check_counts(saved, ["steps", "skipped_steps"])
        self._write_policy(self._known.resume(self.policy, saved))
        for name, variable in self._record.items():
            missing = math.nan if name == "grad_norm" else 0
            variable.assign(variable.dtype.as_numpy_dtype(saved.get(NAMES.get(name, name), missing)))
        first = start(self.policy, guard=self.guard).guard
        for field, variable in self._guard_record.items():
            value = saved.get(GUARD_NAMES[field], getattr(first, field))
            variable.assign(variable.dtype.as_numpy_dtype(value))
        if self.guard is not None:
            for name, value in resumed_guard(self.guard, saved).items():
                self._guard_leaves[name].assign(np.asarray(value, np.float32))
        elif has_guard(saved):
            warn_of_dropped_guard()
        self.losses.forget()
        if self._buffers is not None:
            self._buffers.keep_finite()

    def step(self) -> Step | None:
        """Return the record of the last step, copied to the host; None before the first."""
        state = self._numbers()
        self._known.check(self.policy, state.policy_state)
        if not state.steps:
            return None
        loss = self.losses.read(int(state.steps))
        if state.finite or self._buffers is None:
            step = to_step(state, loss=loss, framework="tensorflow")
        else:
            buffers, restored = self._buffers.ruined(), self._buffers.restored()
            step = to_step(state, loss=loss, buffers=buffers, restored=restored, framework="tensorflow")
        return with_rules(step, self.policy, self.guard)

    def skipped(self) -> int:
        """Return how many steps have been skipped, copied to the host."""
        return int(self._numbers().skipped_steps)

    def _measured(self, grads: Sequence[Gradient | None], scale: tf.Tensor) -> Measured[tf.Tensor]:
        """Measure unscaled gradients. The peak is that of the scaled ones."""
        largest = peak(grads) * scale if self.policy.needs_peak else None
        finite, norm = _finite_and_norm(grads, agrees=self.guard is not None)
        return Measured(finite, scale, norm, largest, self.losses.of_step())

    def _tensors(self, scale: tf.Tensor) -> ScalerState[Any, tf.Tensor]:
        """Return the state in a graph, for a scale that has been read."""
        policy_variables = {**self._policy_variables, "scale": scale}
        return self._state(
            {name: tf.cast(tf.convert_to_tensor(v), tf.float32) for name, v in policy_variables.items()},
            # `advance` uses nothing of the last step's record but `exhausted_*`, if the policy can give up.
            {
                name: tf.convert_to_tensor(v) if name.startswith("exhausted") and self.policy.gives_up else v
                for name, v in self._record.items()
            },
        )._replace(steps=0, skipped_steps=0)  # so that those after a step are its increments

    def _guard_state(self, value_of: Callable[[tf.Variable], Any]) -> Any:
        """Return the guard's state, with a function applied to its variables."""
        assert self.guard is not None  # asked only with a guard
        variables = iter(self._guard_leaves.values())
        return map_state(lambda _: value_of(next(variables)), self.guard.start())

    def _numbers(self) -> ScalerState[Any, float]:
        """Return the state, read from its device."""
        check_eager()
        policy_variables = {**self._policy_variables, "scale": self.current_loss_scale}
        numbers = {name: float(value) for name, value in _values(policy_variables).items()}
        record = GuardRecord(None, **_values(self._guard_record)) if self._guard_record else None
        return self._state(numbers, _values(self._record))._replace(guard=record)

    def _state(self, policy_values: Mapping[str, T], record: Mapping[str, T]) -> ScalerState[Any, T]:
        policy_state = type(self._known.state)(**policy_values)
        missing = {"peak": None} if "peak" not in record else {}
        return ScalerState(policy_state=policy_state, **missing, **record)  # type: ignore[arg-type]

    def _write(self, after: ScalerState[Any, Number], taken: bool | tf.Tensor) -> list[tf.Operation]:
        """Write a state whose counts are the increments of a step.

        Args:
            after: the state.
            taken: whether the step is taken.
        """
        written = self._write_policy(after.policy_state)
        for name, variable in self._record.items():
            value = getattr(after, name)
            if name in ("steps", "skipped_steps"):
                written.append(variable.assign_add(_cast(value, variable.dtype)))
            elif self.policy.gives_up or not name.startswith("exhausted"):
                written.append(variable.assign(_cast(value, variable.dtype)))
        if after.guard is not None:
            written += [
                variable.assign(_cast(getattr(after.guard, field), variable.dtype))
                for field, variable in self._guard_record.items()
            ]
            leaves = guard_leaves(after.guard.state)
            written += [self._guard_leaves[name].assign(value) for name, value in leaves.items()]
        self.losses.end_step(self._record["steps"])
        if self._buffers is not None:
            self._buffers.end_step(taken)
        return written

    def _write_policy(self, state: NamedTuple) -> list[tf.Operation]:
        values = state._asdict()
        return [v.assign(_cast(values[name], v.dtype)) for name, v in self._policy_variables.items()]


class Losses:
    """The unscaled sum of the losses that were scaled since the last update.

    If each is scaled once, it is the loss whose gradients the update applies. Over several replicas it is
    summed, as the gradients are. It is not known if one of the losses is not a single real number, nor in
    TensorFlow 1 graphs, which run no assignment that nothing depends on.

    Args:
        guard: the guard that uses the loss, if there is one.

    Attributes:
        variables: scalars, by name. An exported function needs them; a checkpoint does not.
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
        if loss.shape.num_elements() != 1 or not loss.dtype.is_floating:
            if self._guard is not None:
                raise PolicyError(
                    f"{self._guard!r} uses the loss, and this one has shape {loss.shape} and dtype "
                    f"{loss.dtype.name}, and is not a floating-point scalar. Write "
                    "opt.get_scaled_loss(tf.reduce_mean(loss)); or "
                    'guard=SpikeGuard(watch="grad_norm"), which needs no loss.'
                )
            loss = tf.constant(UNKNOWN)
        self._was_added = True
        number = tf.cast(loss, tf.float32)
        if number.shape.rank:
            number = tf.reshape(number, ())
        self.variables["losses"].assign_add(number, read_value=False)

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
            if not (tf.executing_eagerly() and _is_none(float(total))):
                return total
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
            losses.assign(NONE, read_value=False)

    def forget(self) -> None:
        """Forget all losses, because another training begins."""
        for name, variable in self.variables.items():
            variable.assign(0 if name == "steps" else NONE)

    def read(self, steps: int) -> float | None:
        """Return the loss of the last step; None if it is not known.

        Args:
            steps: how many there have been.
        """
        if not self.variables or int(tf.convert_to_tensor(self.variables["steps"])) != steps:
            return None
        loss = float(tf.convert_to_tensor(self.variables["losses_of_step"]))
        return None if _is_none(loss) or -math.inf < loss < UNKNOWN / 2 else loss

    def _can_write(self) -> bool:
        return bool(self.variables) and (tf.executing_eagerly() or tf.inside_function())


def _is_none(loss: float) -> bool:
    return loss == 0.0 and math.copysign(1.0, loss) < 0.0


def _on_host(value: tf.Tensor) -> float | tuple[float, ...]:
    """Return a scalar as a number, a vector as a tuple."""
    numbers = value.numpy().tolist()
    return tuple(numbers) if isinstance(numbers, list) else numbers


def _summed_over_replicas(name: str) -> tf.Variable:
    """Return a variable that each replica adds to, and that is read as the sum."""
    return tf.Variable(
        NONE,
        name=name,
        dtype=tf.float32,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _finite_and_norm(
    grads: Sequence[Gradient | None], *, agrees: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return whether the gradients of all replicas are finite, and their global L2 norm.

    tf_keras passes the sum over replicas, which is the same on all of them. If it was told not to sum, the
    norm is that of the first replica or, where they must agree on it, the mean over replicas.

    Args:
        grads: unscaled gradients; in a cross-replica context those of each replica.
        agrees: whether all replicas need the same norm, because a guard decides by it.
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
    overflows, norm = measured(grads)
    if agrees:
        sums = replica.all_reduce(total, tf.stack([overflows, norm]))
        return tf.equal(sums[0], 0.0), sums[1] / float(replica.num_replicas_in_sync)
    return tf.equal(replica.all_reduce(total, overflows), 0.0), norm


def _cast(value: Number | bool, dtype: tf.DType) -> Number:
    """Return a tensor or a number in a dtype."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else dtype.as_numpy_dtype(value)


def _values(variables: Mapping[str, tf.Variable | tf.Tensor]) -> dict[str, float]:
    """Return the values of scalar variables as plain numbers: those of one replica."""
    return {name: tf.convert_to_tensor(variable).numpy().item() for name, variable in variables.items()}
