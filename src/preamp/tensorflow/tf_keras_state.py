"""The state of a loss scale where tf_keras looks for one.

tf_keras's LossScaleOptimizer asks an object of its own for the scale, and has it look at the gradients before
it decides. This room is that object, with a policy for a rule. It refuses to know which optimizer asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs  # tf_keras exports only a facade

from preamp.arrays.tensorflow import agreed, seen
from preamp.errors import UsageError
from preamp.policy import Policy, Reading, Static, Where, choose
from preamp.scaling import Step
from preamp.systems.arguments import check_counts, check_resumed, is_out_of_bounds, warn_if_out_of_bounds
from preamp.tensorflow.tf_keras_buffers import Buffers
from preamp.tensorflow.tf_keras_losses import Losses

# What to write to start inside the policy's bounds: tf_keras has no way to set a scale.
INSIDE = "load the model without its optimizer"

# tf_keras's names in checkpoints for what a policy's state holds.
NAMES = {"scale": "current_loss_scale", "good": "good_steps"}

# What a step leaves to be asked for, `overflows` being those at which the policy gave up.
RECORD = {
    "steps": tf.int64,
    "skipped_steps": tf.int64,
    "last_scale": tf.float32,
    "last_finite": tf.bool,
    "overflows": tf.float32,
}


class LossScaleState(theirs._DynamicLossScaleState):
    """The variables of one loss scale.

    Args:
        policy: the rule in force.
        buffers: those of the model, to look at after a skipped step.

    Attributes:
        policy: the rule in force.
        losses: the loss of a step.
        counter: an int64 variable: the policy's count of clean steps.
    """

    def __init__(self, policy: Policy[Any], buffers: Buffers | None = None) -> None:
        tf.__internal__.tracking.Trackable.__init__(self)
        self.policy = policy
        self.losses = Losses()
        self._buffers = buffers
        self._checked: Any = policy.start()  # a state that is known to be right
        self._is_outside = False
        self._weights: dict[Any, Any] = {}
        self._parts = {name: self._part(name, value) for name, value in policy.start()._asdict().items()}
        self._counter = self._parts["good"]
        kinds = {**RECORD, "last_peak": tf.float32} if "peak" in policy.needs else RECORD
        self._record = {
            name: self._add_weight(name=name, dtype=dtype, initial_value=dtype.as_numpy_dtype(0))
            for name, dtype in kinds.items()
        }

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        children: dict[str, Any] = super()._trackable_children(save_type, **options)
        if save_type == "checkpoint":
            return children
        buffers = {} if self._buffers is None else self._buffers.tracked()
        return {**children, **{f"loss_{name}": one for name, one in self.losses.variables.items()}, **buffers}

    def begin(self) -> None:
        """Make what needs the model's variables, before the first step is applied."""
        if self._buffers is not None:
            with tf.init_scope():
                self._buffers.begin()

    def _part(self, name: str, value: float) -> Any:
        if name == "scale" and isinstance(self.policy, Static):
            return None  # a constant: no checkpoint may move it
        dtype = tf.int64 if name == "good" else tf.float32
        first = dtype.as_numpy_dtype(value)
        return self._add_weight(name=NAMES.get(name, name), dtype=dtype, initial_value=first)

    @property
    def current_loss_scale(self) -> Any:
        """The scale, a float32 scalar variable or constant."""
        scale = self._parts["scale"]
        return tf.constant(self.policy.start().scale, tf.float32) if scale is None else scale

    def update(self, grads: Any) -> tuple[Any, Any]:
        """Advance the policy by one step.

        Args:
            grads: unscaled gradients, as in `agreed`.

        Returns:
            The op that does it, and whether the gradients are finite.

        Raises:
            ScaleExhausted: eagerly, if the policy gives up.
        """
        reading, before, where = self._reading(tf.nest.flatten(grads)), self._state(), tf.where
        if tf.executing_eagerly():  # tf_keras reads it next, to decide: the rest is for Python to compute
            reading, where = _on_host(reading), choose
            self._check(before)
        after = self.policy.advance(before, reading, where)
        written = self._note(reading, before.scale, where)
        self.losses.end_step(self._record["steps"])
        if self._buffers is not None:
            self._buffers.end_step(reading.finite)
        if self.policy.gives_up:
            gives_up = self.policy.exhausted(before, after, reading, where)
            after = type(before)(*[where(gives_up, a, b) for a, b in zip(before, after, strict=True)])
            written.append(self._note_giving_up(where(gives_up, before.bad + 1.0, 0.0), where))
        written += self._write(after)
        if tf.executing_eagerly():
            self._checked = after
            self.check_exhausted()
        return tf.group(*written), reading.finite

    def check_exhausted(self) -> None:
        """Raise `ScaleExhausted` if the policy has given up."""
        if not self.policy.gives_up:
            return
        record = self._read()
        if record["overflows"]:
            raise self.policy.exhaustion(record["last_scale"], int(record["overflows"]))

    def numbers(self) -> dict[str, Any]:
        """Return the values of all variables, read from their device, for `restore`."""
        parts = {name: part for name, part in self._parts.items() if part is not None}
        return {**_values(parts), **self._read()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the variables to what `numbers` returned, maybe of another policy's.

        Raises:
            PolicyError: for numbers that training cannot resume from. Nothing was changed.
            UserWarning: a warning, for a scale outside the policy's bounds, which is kept.
        """
        check_counts(saved, ["steps", "skipped_steps"])
        state = check_resumed(self.policy, saved, INSIDE)
        self._checked, self._is_outside = state, is_out_of_bounds(self.policy, state.scale)
        self._write(state)
        for name, variable in self._record.items():
            variable.assign(variable.dtype.as_numpy_dtype(saved.get(name, 0)))
        self.losses.forget()
        if self._buffers is not None:
            self._buffers.keep_finite()

    def step(self) -> Step | None:
        """Return what the last step came to, read from its device; None before the first."""
        record = self._read()
        self._check(self._state())
        if not record["steps"]:
            return None
        finite = record["last_finite"]
        return Step(
            index=record["steps"] - 1,
            scale=record["last_scale"],
            finite=finite,
            skipped=not finite,
            new_scale=float(tf.convert_to_tensor(self.current_loss_scale)),
            loss=self.losses.read(record["steps"]),
            peak=record.get("last_peak") if finite else None,
            buffers=() if finite or self._buffers is None else self._buffers.ruined(),
        )

    def _check(self, state: Any) -> None:
        """Check a state that `tf.train.Checkpoint` has restored past `restore`.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.
            UserWarning: a warning, once, for a scale outside the policy's bounds.
        """
        if state == self._checked:
            return
        restored = self.policy.restore(state._asdict())
        was_outside, self._is_outside = self._is_outside, is_out_of_bounds(self.policy, restored.scale)
        if self._is_outside and not was_outside:
            warn_if_out_of_bounds(self.policy, restored.scale, INSIDE, of="optimizer")
        self._checked = state

    def skipped(self) -> int:
        """Return how many steps were skipped, read from their device."""
        return int(self._read()["skipped_steps"])

    def _reading(self, grads: list[Any]) -> Reading:
        """Return what is seen in unscaled gradients; a policy is shown how large they were before."""
        if not self.policy.needs:
            return Reading(agreed(grads))
        scale = tf.convert_to_tensor(self.current_loss_scale)
        found = seen(self.policy.needs, self.policy.edge / scale, grads)
        if "peak" in found:
            found["peak"] *= scale
        return Reading(agreed(grads), **found)

    def _state(self) -> Any:
        """Return the values of now: a variable itself would be read again after it was written."""
        parts = {**self._parts, "scale": self.current_loss_scale}
        if tf.executing_eagerly():
            return type(self.policy.start())(**{name: float(value) for name, value in _values(parts).items()})
        values = {name: tf.cast(tf.convert_to_tensor(part), tf.float32) for name, part in parts.items()}
        return type(self.policy.start())(**values)

    def _write(self, state: Any) -> list[Any]:
        pairs = zip(self._parts.values(), state, strict=True)
        return [part.assign(_cast(value, part.dtype)) for part, value in pairs if part is not None]

    def _note(self, reading: Reading, scale: Any, where: Where) -> list[Any]:
        """Write the record of a step."""
        record = self._record
        peaks = [name for name in record if name == "last_peak"]
        return [
            record["steps"].assign_add(1),
            record["skipped_steps"].assign_add(_cast(where(reading.finite, 0, 1), tf.int64)),
            record["last_scale"].assign(scale),
            record["last_finite"].assign(reading.finite),
            *[record[name].assign(where(reading.finite, reading.peak, 0.0)) for name in peaks],
        ]

    def _note_giving_up(self, overflows: Any, where: Where) -> Any:
        """Write at how many overflows the policy gave up, or 0. In a graph it stays noted."""
        noted = self._record["overflows"]
        if not tf.executing_eagerly():
            earlier = tf.convert_to_tensor(noted)
            overflows = where(earlier > 0.0, earlier, overflows)
        return noted.assign(overflows)

    def _read(self) -> dict[str, Any]:
        if not tf.executing_eagerly():
            raise UsageError(
                "what a step came to is read from its device, which no graph can do while it is traced. "
                "Ask for it outside tf.function, after the step."
            )
        return _values(self._record)


def _on_host(reading: Reading) -> Reading:
    """Return a reading as plain numbers."""
    return Reading(*[None if value is None else value.numpy().item() for value in reading])


def _cast(value: Any, dtype: Any) -> Any:
    """Return a tensor or a number in a dtype."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else dtype.as_numpy_dtype(value)


def _values(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of scalar variables as plain numbers: those of one replica."""
    return {name: tf.convert_to_tensor(variable).numpy().item() for name, variable in variables.items()}
