"""The state of a loss scale where tf_keras looks for one.

tf_keras's LossScaleOptimizer asks an object of its own for the scale, and has it look at the gradients before
it decides. This room is that object, with a policy for a rule. It refuses to know which optimizer asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs  # tf_keras exports only a facade

from preamp.errors import UsageError
from preamp.policy import Policy, Reading, Static
from preamp.tensorflow.arithmetic import agreed
from preamp.trace import Step

__all__ = ["LossScaleState", "theirs"]

# tf_keras's names in checkpoints for what a policy's state holds.
NAMES = {"scale": "current_loss_scale", "good": "good_steps"}


class LossScaleState(theirs._DynamicLossScaleState):
    """The variables of one loss scale.

    Args:
        policy: the rule in force.

    Attributes:
        policy: the rule in force.
        counter: an int64 variable: the policy's count of clean steps.
    """

    def __init__(self, policy: Policy[Any]) -> None:
        tf.__internal__.tracking.Trackable.__init__(self)
        self.policy = policy
        self._weights: dict[Any, Any] = {}
        self._parts = {name: self._part(name, value) for name, value in policy.start()._asdict().items()}
        self._counter = self._parts["good"]
        # Steps, skipped steps, the last step's scale, whether it was finite, and at how many overflows the
        # policy gave up. One vector is one write; float64 counts far enough.
        self._record = self._add_weight(name="record", dtype=tf.float64, initial_value=[0.0] * 5)

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
            The op that does it, and whether the gradients are finite, a scalar.

        Raises:
            Starved: eagerly, if the policy gives up.
        """
        reading = Reading(agreed(tf.nest.flatten(grads)))
        before = self._state()
        after = self.policy.advance(before, reading, tf.where)
        gives_up = self.policy.starved(before, after, reading, tf.where)
        overflows = tf.where(gives_up, tf.maximum(after.bad, 1.0), 0.0)
        written = tf.group(*self._write(after), self._note(reading.finite, before.scale, overflows))
        if tf.executing_eagerly() and self.policy.gives_up():
            self.check_starved()
        return written, reading.finite

    def check_starved(self) -> None:
        """Raise `Starved` if the policy has given up."""
        _, _, scale, _, overflows = self._read()
        if overflows:
            raise self.policy.starvation(scale, int(overflows))

    def numbers(self) -> dict[str, Any]:
        """Return the values of all variables, read from their device, for `restore`."""
        numbers = {name: float(part) for name, part in self._parts.items() if part is not None}
        return {**numbers, "record": self._read()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the variables to what `numbers` returned, maybe of another policy's.

        Raises:
            PolicyError: for numbers that are no state to go on from.
        """
        self._write(self.policy.restore(saved))
        self._record.assign(saved["record"])

    def step(self) -> Step | None:
        """Return what the last step came to, read from its device; None before the first."""
        steps, _, scale, finite, _ = self._read()
        if not steps:
            return None
        after = float(self.current_loss_scale)
        return Step(int(steps) - 1, scale, finite=bool(finite), skipped=not finite, new_scale=after)

    def skipped(self) -> int:
        """Return how many steps were skipped, read from their device."""
        return int(self._read()[1])

    def _state(self) -> Any:
        """Return the values of now: a variable itself would be read again after it was written."""
        parts = {**self._parts, "scale": self.current_loss_scale}
        values = {name: tf.cast(tf.identity(part), tf.float32) for name, part in parts.items()}
        return type(self.policy.start())(**values)

    def _write(self, state: Any) -> list[Any]:
        pairs = zip(self._parts.values(), state, strict=True)
        return [part.assign(tf.cast(value, part.dtype)) for part, value in pairs if part is not None]

    def _note(self, finite: Any, scale: Any, overflows: Any) -> Any:
        """Write the record of a step. In a graph, that the policy gave up stays noted."""
        steps, skipped, _, _, earlier = tf.unstack(self._record)
        clean, scale, overflows = (tf.cast(x, tf.float64) for x in (finite, scale, overflows))
        if not tf.executing_eagerly():
            overflows = tf.where(earlier > 0.0, earlier, overflows)
        return self._record.assign([steps + 1.0, skipped + 1.0 - clean, scale, clean, overflows])

    def _read(self) -> list[float]:
        if not tf.executing_eagerly():
            raise UsageError(
                "what a step came to is read from its device, which no graph can do while it is traced. "
                "Ask for it outside tf.function, after the step."
            )
        numbers: list[float] = self._record.numpy().tolist()
        return numbers
