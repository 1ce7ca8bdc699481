"""What an optimizer has to remember: the policy's state, and what the last step came to.

This room keeps both in variables, so that they are saved, traced and distributed like any other. It refuses
to know how gradients are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from preamp.policy import Policy, Reading, Where
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
    def floats(self) -> list[Any]:
        """The variables that `after` moves."""
        return [*self.state, self.used, self.finite, self.starved]

    @property
    def variables(self) -> list[Any]:
        """All variables."""
        return [*self.floats, self.steps, self.skipped]

    def after(self, values: Sequence[Any], finite: Any, where: Where) -> list[Any]:
        """Return the values of `floats` after a step.

        Args:
            values: those before it: numbers, or scalars of a framework.
            finite: whether the step's gradients were.
            where: ``where(condition, yes, no)`` for such values.
        """
        count = len(self.state)
        state, starved = type(self.state)(*values[:count]), values[-1]
        reading = Reading(finite)
        after = self.policy.advance(state, reading, where)
        gives_up = self.policy.starved(state, after, reading, where)
        return [*after, state.scale, where(finite, 1.0, 0.0), where(gives_up, 1.0, starved)]

    def advance(self, finite: Any, where: Where) -> None:
        """Move all variables on, in a program that is being compiled."""
        values = self.after([variable.value + 0.0 for variable in self.floats], finite, where)
        for variable, value in zip(self.floats, values, strict=True):
            variable.assign(value)
        self.steps.assign(self.steps.value + 1)
        self.skipped.assign(where(finite, self.skipped.value, self.skipped.value + 1))

    def raise_if_starved(self, numbers: Sequence[float]) -> None:
        """Raise what a compiled step could not, for the values of `variables`.

        Raises:
            Starved: if the policy was told to give up and has.
        """
        count = len(self.state)
        used, _, starved = numbers[count : count + 3]
        if starved:
            overflows = int(numbers[self.state._fields.index("bad")])
            raise self.policy.starvation(used, max(1, overflows))

    def step(self, numbers: Sequence[float]) -> Step | None:
        """Return the step that the values of `variables` describe, None before the first."""
        count = len(self.state)
        used, finite, _, steps, _ = numbers[count:]
        if not steps:
            return None
        return Step(
            index=int(steps) - 1,
            scale=used,
            finite=bool(finite),
            skipped=not finite,
            new_scale=numbers[self.state._fields.index("scale")],
        )
