"""A warning when a guard skips step after step, which would otherwise go unnoticed."""

from __future__ import annotations

import warnings
from typing import Any

from preamp.checks import level_of_caller
from preamp.guards.base import Guard

LONG = 100  # steps in a row


class SkipsInARow:
    """Counts the steps that a guard has skipped in a row, where the host knows of each.

    Args:
        guard: the rule.
    """

    def __init__(self, guard: Guard[Any]) -> None:
        self.guard, self._count = guard, 0

    def note(self, taken: bool, finite: bool, *through: str) -> None:
        """Note a step.

        Args:
            taken: whether it was taken.
            finite: whether its gradients were finite; a step that overflowed does not count.
            through: packages between this library and the caller.

        Raises:
            UserWarning: a warning, for the last of `LONG` steps in a row.
        """
        if not finite:
            return
        self._count = 0 if taken else self._count + 1
        if self._count == LONG:
            warnings.warn(
                f"{self.guard!r} has skipped {LONG} steps in a row, and nothing was trained in them. "
                "last_step.spike says which value was beyond which limit. Raise that limit if the value is "
                "ordinary; if it is NaN or inf, fix the loss.",
                stacklevel=level_of_caller(*through),
            )
