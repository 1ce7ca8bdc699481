"""Shared by the machines that call optimizers and scalers in any order: call counts, expected errors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

__all__ = ["CALLS", "Calling", "drive", "drive_long"]

CALLS: Counter[str] = Counter()
STEPS = 50
LONG = int(os.environ.get("PREAMP_CALLS", "25000"))


class Calling(RuleBasedStateMachine):
    """A machine that counts its calls."""

    def everything(self) -> Any:
        """Return all that a refused call must leave as it is, as something to compare."""
        raise NotImplementedError

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something and count it."""
        CALLS[type(self).__name__] += 1
        return function(*args, **kwargs)

    def refused(self, errors: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException:
        """Call what must be refused; nothing may have changed."""
        before = self.everything()
        with pytest.raises(errors) as refusal:
            self.call(function, *args, **kwargs)
        assert str(refusal.value).strip()
        assert self.everything() == before
        return refusal.value


def drive(machine: type[Calling], examples: int, steps: int = STEPS) -> None:
    """Let a machine walk some sequences of calls."""
    how = settings(
        deadline=None,
        report_multiple_bugs=False,
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=how)


def drive_long(machine: type[Calling], calls: int = LONG) -> None:
    """Let a machine make many calls, and say how many it made."""
    name, before = machine.__name__, CALLS[machine.__name__]
    while CALLS[name] - before < calls:
        drive(machine, calls // STEPS)
    print(f"\n{name}: {CALLS[name] - before:,} calls")
    assert CALLS[name] - before >= calls
