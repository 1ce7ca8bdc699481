"""What an optimizer has to remember: the policy's state, and what the last step came to.

This room keeps both in variables, so that they are saved, traced and distributed like any other. It refuses
to know how gradients are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from preamp.policy import Policy, Reading, Where, choose
from preamp.trace import Step

__all__ = ["Ledger"]

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
        starved: float32; 1.0 once the policy has given up in a compiled step.
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
        self.starved = make("starved", 0.0, "float32")
        self.steps = make("steps", 0, "int")
        self.skipped = make("skipped_steps", 0, "int")

    @property
    def moving(self) -> list[Any]:
        """The variables that `after` moves, float32."""
        return [*self.state, self.used, self.finite]

    @property
    def variables(self) -> list[Any]:
        """All variables."""
        return [*self.moving, self.starved, self.steps, self.skipped]

    def after(self, values: Sequence[Any], finite: Any, where: Where) -> tuple[list[Any], Any]:
        """Return the values of `moving` after a step, and whether the policy gives up.

        Args:
            values: those before it: numbers, or scalars of a framework.
            finite: whether the step's gradients were.
            where: ``where(condition, yes, no)`` for such values.
        """
        state = type(self.state)(*values[: len(self.state)])
        reading = Reading(finite)
        after = self.policy.advance(state, reading, where)
        gives_up: Any = False
        if self.policy.gives_up():
            gives_up = self.policy.starved(state, after, reading, where)
            after = type(state)(*[where(gives_up, a, b) for a, b in zip(state, after, strict=True)])
        return [*after, state.scale, where(finite, 1.0, 0.0)], gives_up

    def advance(self, finite: Any, where: Where) -> None:
        """Move all variables on, in a program that is being compiled."""
        values, gives_up = self.after([variable.value + 0.0 for variable in self.moving], finite, where)
        for variable, value in zip(self.moving, values, strict=True):
            variable.assign(value)
        if gives_up is not False:
            self.starved.assign(where(gives_up, 1.0, self.starved.value + 0.0))
        self.steps.assign(self.steps.value + 1)
        if finite is not True:
            self.skipped.assign(where(finite, self.skipped.value + 0, self.skipped.value + 1))

    def advance_on_host(
        self, numbers: Sequence[float], finite: bool, write: Callable[[Any, float], None]
    ) -> None:
        """Move all variables on, for the numbers that `moving` had.

        Raises:
            Starved: if the policy was told to give up and does.
        """
        after, gives_up = self.after(numbers, finite, choose)
        for variable, old, new in zip(self.moving, numbers, after, strict=True):
            if new != old:
                write(variable, new)
        self.steps.assign_add(1)
        if not finite:
            self.skipped.assign_add(1)
        if gives_up:
            raise self._starvation(after)

    def raise_if_starved(self, numbers: Sequence[float]) -> None:
        """Raise what a compiled step could not, for the values of `variables`.

        Raises:
            Starved: if the policy was told to give up and has.
        """
        if numbers[len(self.moving)]:
            raise self._starvation(numbers)

    def step(self, numbers: Sequence[float]) -> Step | None:
        """Return the step that the values of `variables` describe, None before the first."""
        used, finite, _, steps, _ = numbers[len(self.state) :]
        if not steps:
            return None
        return Step(
            index=int(steps) - 1,
            scale=used,
            finite=bool(finite),
            skipped=not finite,
            new_scale=numbers[self.state._fields.index("scale")],
        )

    def _starvation(self, numbers: Sequence[float]) -> Exception:
        overflows = int(numbers[self.state._fields.index("bad")]) + 1
        return self.policy.starvation(numbers[len(self.state)], overflows)
