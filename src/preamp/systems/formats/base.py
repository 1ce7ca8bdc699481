"""What every format is, and numbers as they are found in checkpoints.

A number is whatever `float` takes, so that no framework is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from preamp.checks import shown
from preamp.errors import CheckpointError, PolicyError
from preamp.policy import Compat, Dynamic, Moving, Policy, State


class Format(ABC):
    """How one system saves its loss scale.

    Attributes:
        entries: the names by which its saved state is known.
        has_static: whether it saves scales that never move, too.
    """

    entries: ClassVar[tuple[str, ...]]
    has_static: ClassVar[bool] = False

    def find(self, saved: object) -> Mapping[str, Any] | None:
        """Return the entries, from as deep as the system itself nests them; None if they are not there."""
        named = entries_of(saved)
        return named if all(name in named for name in self.entries) else None

    def policy(self, saved: Mapping[str, Any], rest: Policy[Any]) -> Policy[Any]:
        """Return the policy that was saved; what the format does not carry is as in `rest`."""
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
        """Return the settings of a `Moving` policy that were saved, all but those of its `compat`."""
        return {}

    def compat(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the policy's `compat` that were saved."""
        return {}

    @abstractmethod
    def state(self, saved: Mapping[str, Any], policy: object) -> Any:
        """Return the state of `policy` that was saved."""

    @abstractmethod
    def save(self, state: object, policy: object) -> dict[str, Any]:
        """Return the entries that make the system resume from a state of `policy`."""

    def remembered(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return what our own adapter saves beside the system's entries: what other rules remember."""
        return {}

    def with_remembered(self, saved: dict[str, Any], remembered: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return entries with what `remembered` of this format returned; None if it cannot hold them."""
        return None


class Counting(Format):
    """Systems that save the scale and how many clean steps in a row there were: their first two entries."""

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
    """Return what was saved by name, also if it is an object: then its attributes."""
    named = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    return named if isinstance(named, Mapping) else {}


def number(saved: Mapping[str, Any], name: str) -> float:
    """Return an entry as a float, whichever framework's scalar it is.

    Raises:
        CheckpointError: if it is missing, or is none.
    """
    value = _entry(saved, name)
    try:
        if hasattr(value, "item"):  # arrays of one element, which not every framework lets be floats
            value = value.item()
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise CheckpointError(
            f"the saved {name}={shown(value)} is not one number. Write one, such as 1.0."
        ) from None


def count(saved: Mapping[str, Any], name: str) -> int:
    """Return an entry that counts.

    Raises:
        CheckpointError: if it is missing, or not a whole number.
    """
    value = number(saved, name)
    if not value.is_integer():  # nor is inf or NaN
        raise CheckpointError(
            f"the saved {name}={value!r} is not a whole number. Write 0 to start counting again."
        )
    return int(value)


def flag(saved: Mapping[str, Any], name: str) -> bool:
    """Return an entry that is True or False.

    Raises:
        CheckpointError: if it is missing, or neither.
    """
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


def numbers(saved: object, *, without: str = "") -> dict[str, float]:
    """Return all entries as numbers, except for one.

    Raises:
        CheckpointError: if one of them is none.
    """
    named = entries_of(saved)
    return {name: number(named, name) for name in named if name != without}


def compat_of(policy: Policy[Any]) -> Compat:
    """Return how a rule imitates a system; the defaults for a rule that never does."""
    return policy.compat if isinstance(policy, Moving) else Compat()


def backoff_factor(policy: Any) -> float:
    """Return what an overflow multiplies the scale by, also for a policy that divides."""
    divisor = compat_of(policy).backoff_divisor
    return 1.0 / divisor if divisor else float(policy.backoff_factor)


def hysteresis(policy: object) -> int:
    """Return how many overflows a backoff takes."""
    return int(getattr(policy, "hysteresis", 1))


def overflows_left(policy: Any, state: Any) -> int:
    """Return how many of them are missing."""
    return policy.overflows_left(state) if isinstance(policy, Dynamic) else 1


def _entry(saved: Mapping[str, Any], name: str) -> Any:
    if name not in saved:
        raise CheckpointError(f"the saved loss scale has no entry {name}.")
    return saved[name]
