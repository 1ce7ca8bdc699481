"""The base classes of formats, and the conversion of numbers in checkpoints.

A number is anything that `float` takes, so that no framework is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

from preamp.checks import shown
from preamp.errors import CheckpointError, PolicyError
from preamp.policy import Compat, Dynamic, Moving, Policy, State

GuardState: TypeAlias = "dict[str, float | list[float] | GuardState]"


class Format(ABC):
    """How one system saves its loss scale.

    Attributes:
        entries: the names that identify its saved state.
        has_static: whether it also saves constant scales.
    """

    entries: ClassVar[tuple[str, ...]]
    has_static: ClassVar[bool] = False

    def find(self, saved: object) -> Mapping[str, Any] | None:
        """Return the entries, even where the system nests them; None if they are missing."""
        named = entries_of(saved)
        return named if all(name in named for name in self.entries) else None

    def policy(self, saved: Mapping[str, Any], rest: Policy[Any]) -> Policy[Any]:
        """Return the policy that was saved; settings that the format does not hold are those of `rest`."""
        settings, compat = self.settings(saved), self.compat(saved)
        unknown = [name for name in settings if not hasattr(rest, name)]
        if unknown:
            raise PolicyError(
                f"policy={rest!r} has no {unknown[0]}, which was saved. Write one of this dialect, or none."
            )
        if compat and isinstance(rest, Moving):
            settings["compat"] = replace(rest.compat, **compat)
        return replace(rest, **settings)

    def settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a `Moving` policy that were saved, except those of its `compat`."""
        return {}

    def compat(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the policy's `compat` that were saved."""
        return {}

    @abstractmethod
    def state(self, saved: Mapping[str, Any], policy: object) -> Any:
        """Return the state of `policy` that was saved."""

    @abstractmethod
    def save(self, state: object, policy: object) -> dict[str, Any]:
        """Return the entries from which the system resumes at a state of `policy`."""

    def remembered(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return what preamp saves besides the system's entries: the memory of other rules."""
        return {}

    def with_remembered(self, saved: dict[str, Any], remembered: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return entries together with what `remembered` returned; None if the format cannot hold both."""
        return None

    def guards(self, saved: Mapping[str, Any]) -> list[GuardState]:
        """Return the states of the guard that preamp saves besides: one, or one for each optimizer."""
        return []

    def with_guards(self, saved: Mapping[str, Any], guards: list[GuardState]) -> dict[str, Any] | None:
        """Return entries together with what `guards` returned; None if the format cannot hold both."""
        return None


class Counting(Format):
    """Systems whose first two entries are the scale and the number of clean steps in a row."""

    def state(self, saved: Mapping[str, Any], policy: object) -> State:
        scale, good = self.entries[:2]
        return State(number(saved, scale), float(count(saved, good)), float(self.bad(saved, policy)))

    def bad(self, saved: Mapping[str, Any], policy: object) -> int:
        """Return the overflows that count towards the next backoff."""
        return 0

    def save(self, state: Any, policy: Any) -> dict[str, Any]:
        scale, good = self.entries[:2]
        return {scale: state.scale, good: int(state.good)}


def entries_of(saved: object) -> Mapping[str, Any]:
    """Return what was saved by name; for an object, its attributes."""
    named = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    return named if isinstance(named, Mapping) else {}


def number(saved: Mapping[str, Any], name: str) -> float:
    """Return an entry, which may be a scalar of any framework, as a float."""
    value = _entry(saved, name)
    try:
        if hasattr(value, "item"):  # an array of one element, which not every framework converts to a float
            value = value.item()
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise CheckpointError(
            f"the saved {name}={shown(value)} is not one number. Write one, such as 1.0."
        ) from None


def count(saved: Mapping[str, Any], name: str) -> int:
    """Return an entry that is a count."""
    value = number(saved, name)
    if not value.is_integer():  # nor is inf or NaN
        raise CheckpointError(
            f"the saved {name}={value!r} is not a whole number. Write 0 to start counting again."
        )
    return int(value)


def flag(saved: Mapping[str, Any], name: str) -> bool:
    """Return an entry that is True or False."""
    value = _entry(saved, name)
    try:
        known = value in (True, False)
    except (TypeError, ValueError, RuntimeError):  # an array of several
        known = False
    if not known:
        raise CheckpointError(
            f"the saved {name}={shown(value)} is neither True nor False. Write one of them."
        )
    return bool(value)


def numbers(saved: object, *, without: Collection[str] = ()) -> dict[str, float]:
    """Return all entries as numbers, except for some."""
    named = entries_of(saved)
    return {name: number(named, name) for name in named if name not in without}


def guard_state(saved: object) -> GuardState:
    """Return a guard's saved state in Python numbers. Only the guard knows which names it has."""
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"the saved {shown(saved)} is not a guard's state. Leave it out to start again."
        )
    state: GuardState = {}
    for name, part in saved.items():
        if isinstance(part, Mapping):
            state[name] = guard_state(part)
        elif isinstance(part, list | tuple) or getattr(part, "shape", ()) != ():
            state[name] = [number({name: one}, name) for one in part]
        else:
            state[name] = number(saved, name)
    return state


def compat_of(policy: Policy[Any]) -> Compat:
    """Return the `compat` of a policy, or the default for one without it."""
    return policy.compat if isinstance(policy, Moving) else Compat()


def backoff_factor(policy: Any) -> float:
    """Return the factor of a backoff, also for a policy that divides."""
    divisor = compat_of(policy).backoff_divisor
    return 1.0 / divisor if divisor else float(policy.backoff_factor)


def hysteresis(policy: object) -> int:
    """Return how many overflows a backoff takes."""
    return int(getattr(policy, "hysteresis", 1))


def overflows_left(policy: Any, state: Any) -> int:
    """Return how many overflows are left until a backoff."""
    return policy.overflows_left(state) if isinstance(policy, Dynamic) else 1


def _entry(saved: Mapping[str, Any], name: str) -> Any:
    if name not in saved:
        raise CheckpointError(f"the saved loss scale has no entry {name}.")
    return saved[name]
