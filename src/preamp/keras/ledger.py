"""What an optimizer has to remember: the policy's state, and what the last step came to.

This room keeps both in variables, so that they are saved, traced and distributed like any other. It refuses
to know how gradients are looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from preamp.checks import level_of_caller
from preamp.errors import PolicyError
from preamp.policy import Policy, Reading, Where, choose
from preamp.scaling import Step
from preamp.systems.arguments import check_counts, check_resumed, is_out_of_bounds, warn_if_out_of_bounds

# What to write to start inside the policy's bounds.
INSIDE = "optimizer.dynamic_scale.assign({bound!r}) after loading"

# Keras's names for what a policy's state holds.
NAMES = {"scale": "dynamic_scale", "good": "step_counter", "bad": "overflow_counter", "age": "age_counter"}


class Ledger:
    """The variables of one loss scale.

    Args:
        policy: the rule in force.
        make: makes a scalar variable of (name, first value, dtype).

    Attributes:
        policy: the rule in force. Another one with the same kind of state may be put in its place.
        state: the policy's state, float32 variables.
        used: float32; the scale that was in the last loss.
        finite: float32; 1.0 if the last gradients were finite.
        exhausted: float32; at how many overflows the policy gave up, 0.0 if it has not. A compiled step,
            which cannot raise, leaves it there.
        peaks: one float32 variable, the peak that the policy was shown last; none if it does not ask for it.
        steps: integer; steps taken or skipped.
        skipped: integer; steps skipped.
    """

    def __init__(self, policy: Policy[Any], make: Callable[[str, float, str], Any]) -> None:
        start = policy.start()
        self.policy = policy
        variables = [
            make(NAMES.get(field, field), value, "float32") for field, value in start._asdict().items()
        ]
        self.state = type(start)(*variables)
        self.used = make("last_scale", start.scale, "float32")
        self.finite = make("last_finite", 1.0, "float32")
        self.peaks = [make("last_peak", 0.0, "float32")] if "peak" in policy.needs else []
        self.exhausted = make("exhausted", 0.0, "float32")
        self.steps = make("steps", 0, "int")
        self._checked: tuple[float, ...] = tuple(start)  # values of `state` that are known to be right
        self._is_outside = False
        self.skipped = make("skipped_steps", 0, "int")

    @property
    def moving(self) -> list[Any]:
        """The variables that `after` moves, float32."""
        return [*self.state, self.used, self.finite, *self.peaks, self.exhausted]

    @property
    def variables(self) -> list[Any]:
        """All variables."""
        return [*self.moving, self.steps, self.skipped]

    def after(self, values: Sequence[Any], reading: Reading, where: Where) -> list[Any]:
        """Return the values of `moving` after a step.

        Args:
            values: those before it: numbers, or scalars of a framework.
            reading: what was seen in the step's gradients.
            where: ``where(condition, yes, no)`` for such values.
        """
        state = type(self.state)(*values[: len(self.state)])
        after, exhausted = self.policy.advance_or_stay(state, values[-1], reading, where)
        peaks = [where(reading.finite, reading.peak, 0.0) for _ in self.peaks]
        return [*after, state.scale, where(reading.finite, 1.0, 0.0), *peaks, exhausted]

    def advance(self, reading: Reading, where: Where) -> None:
        """Move all variables on, in a program that is being compiled."""
        # The sum is a copy: what TensorFlow reads is the variable's memory, which is about to be written.
        before = [variable.value + 0.0 for variable in self.moving]
        after = self.after(before, reading, where)
        for variable, old, new in zip(self.moving, before, after, strict=True):
            if new is not old:
                variable.assign(new)
        self.steps.assign_add(1)
        if reading.finite is not True:
            self.skipped.assign(where(reading.finite, self.skipped.value + 0, self.skipped.value + 1))

    def advance_on_host(
        self, numbers: Sequence[float], reading: Reading, write: Callable[[Any, float], None]
    ) -> None:
        """Move all variables on, for the numbers that `moving` had and a reading of plain numbers.

        Raises:
            ScaleExhausted: if the policy was told to give up and does.
        """
        after = self.after([*numbers[:-1], 0.0], reading, choose)
        self._checked = tuple(after[: len(self.state)])
        for variable, old, new in zip(self.moving, numbers, after, strict=True):
            if new != old:
                write(variable, new)
        self.steps.assign_add(1)
        if not reading.finite:
            self.skipped.assign_add(1)
        self.raise_if_exhausted(after)

    def check(self, numbers: Sequence[float]) -> None:
        """Check a state that was restored past `load`, as `tf.train.Checkpoint` and `Variable.assign` do.

        Args:
            numbers: the values of `moving` or `variables`.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.
            UserWarning: a warning, once, for a scale outside the policy's bounds.
        """
        state = tuple(numbers[: len(self.state)])
        if state == self._checked:
            return
        restored = self.policy.restore(dict(zip(self.state._fields, state, strict=True)))
        was_outside, self._is_outside = self._is_outside, is_out_of_bounds(self.policy, restored.scale)
        if self._is_outside and not was_outside:
            warn_if_out_of_bounds(self.policy, restored.scale, INSIDE, of="optimizer")
        self._checked = state

    def raise_if_exhausted(self, numbers: Sequence[float]) -> None:
        """Raise what a compiled step could not, for the values of `moving` or `variables`.

        Raises:
            ScaleExhausted: if the policy was told to give up and has.
        """
        overflows = numbers[len(self.moving) - 1]
        if overflows and self.policy.gives_up:
            raise self.policy.exhaustion(numbers[len(self.state)], int(overflows))

    def state_of(self, saved: Mapping[str, float]) -> Any:
        """Return the policy's state for numbers by the names of the variables. What they lack starts afresh.

        Raises:
            PolicyError: for a scale or count that training cannot resume from.
            UserWarning: a warning, for a scale outside the policy's bounds.
        """
        check_counts(saved, [self.steps.name, self.skipped.name])
        pairs = zip(self.state._fields, self.state, strict=True)
        state = check_resumed(self.policy, {f: saved[v.name] for f, v in pairs if v.name in saved}, INSIDE)
        self._is_outside = is_out_of_bounds(self.policy, state.scale)  # that has been said
        return state

    def load(self, saved: Mapping[str, float]) -> None:
        """Set the variables to saved numbers, by name; warn of a state that training cannot resume from.

        That a policy gave up is not gone on with.
        """
        try:
            state = self.state_of(saved)
        except PolicyError as problem:
            state, saved = self.policy.start(), {}
            warnings.warn(
                f"the loss scale starts anew, at {state.scale}, and not where the file has it: {problem}",
                stacklevel=level_of_caller("keras", "tensorflow"),
            )
        for variable, value in zip(self.state, state, strict=True):
            variable.assign(value)
        self._checked = tuple(state)
        for variable in (self.used, self.finite, *self.peaks, self.steps, self.skipped):
            if variable.name in saved:
                variable.assign(saved[variable.name])
        self.exhausted.assign(0.0)

    def step(self, numbers: Sequence[float]) -> Step | None:
        """Return the step that the values of `variables` describe, None before the first.

        Raises:
            PolicyError: as `check`.
        """
        self.check(numbers)
        used, finite, *peaks, _, steps, _ = numbers[len(self.state) :]
        if not steps:
            return None
        return Step(
            index=int(steps) - 1,
            scale=used,
            finite=bool(finite),
            skipped=not finite,
            new_scale=numbers[self.state._fields.index("scale")],
            peak=peaks[0] if peaks and finite else None,
        )


def saved_state(store: Any) -> dict[str, float] | None:
    """Return what a file says of a loss scale, by the names of a ledger's variables; None if nothing.

    Args:
        store: the optimizer's own variables in a file: names or numbers to arrays.
    """
    names = set(store.keys())
    if "dynamic_scale" in names:
        return {name: float(np.asarray(store[name])) for name in names if not name.isdecimal()}
    if not {"2", "3"} <= names:
        return None
    # Keras numbers them: iteration, learning rate, counter, scale, then the inner optimizer's.
    counter, scale = np.asarray(store["2"]), np.asarray(store["3"])
    if counter.shape or scale.shape or counter.dtype.kind not in "iu":
        return None
    return {"step_counter": float(counter), "dynamic_scale": float(scale)}
