"""The base class of all guards, what they decide, and functions for their states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from preamp.checks import is_number
from preamp.errors import PolicyError
from preamp.policy.base import Reading, Scalar, Where, changed_settings, choose, describe_settings

S = TypeVar("S", bound=Any)


class Verdict(NamedTuple):
    """What a guard decides about one step.

    Attributes:
        taken: True (or a boolean scalar) if the step is to be taken.
        loss_limit: the limit that the loss is compared with; None if the guard does not look at it, inf where
            any loss will do.
        grad_norm_limit: the same for the norm of the gradients.
        loss_fits: whether the loss is within its limit. If True on a skipped step, the norm
            exceeded its limit.
    """

    taken: Scalar
    loss_limit: Scalar = None
    grad_norm_limit: Scalar = None
    loss_fits: Scalar = True

    def also(self, name: str, fits: Scalar, limit: Scalar) -> Verdict:
        """Return the verdict with the limit of one more value.

        Args:
            name: "loss" or "grad_norm".
            fits: whether the value is within its limit.
            limit: the limit that it was compared with.
        """
        if name == "loss":
            return Verdict(self.taken & fits, limit, self.grad_norm_limit, fits)
        return Verdict(self.taken & fits, self.loss_limit, limit, self.loss_fits)


@dataclass(frozen=True, eq=False, repr=False)
class Guard(ABC, Generic[S]):
    """A rule that skips steps. The guard holds the settings, its state what changes from step to step.

    A new guard is a subclass: a frozen dataclass with `start`, `judge` and `advance`. Its state is a
    NamedTuple of floats, of tuples of floats (vectors), or of further such NamedTuples. Adapters keep it as
    scalars and vectors of their framework, so its structure is the same for all states of one guard.

    `judge` and `advance` run in compiled programs too, so they decide with `where`, `&` and `|`, not with
    `if`, `and` and `or`.

    A step that overflowed is skipped whatever the guard says. `advance` receives it too, with a loss that may
    not be finite and no `grad_norm`, and decides what to remember of it.

    Attributes:
        uses: the fields of a `Reading` that the rule uses besides `finite`: `loss`, `grad_norm`, or both.
        remembers_overflows: whether `advance` changes the state after a step that overflowed.
    """

    uses: ClassVar[frozenset[str]] = frozenset(["loss", "grad_norm"])
    remembers_overflows: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Add an "Args" section with every described setting to the docstring."""
        super().__init_subclass__()
        describe_settings(cls)

    def __repr__(self) -> str:
        """Show the settings that differ from their defaults."""
        return f"guards.{changed_settings(self)}"

    def get_config(self) -> dict[str, Any]:
        """Return the settings by name, as Keras requires of a class that is registered with it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @abstractmethod
    def start(self) -> S:
        """Return the state before the first step, as Python floats."""

    @abstractmethod
    def judge(self, state: S, reading: Reading, where: Where = choose) -> Verdict:
        """Return whether a step is taken. Pure: works on whatever `where` works on.

        Args:
            state: the state before the step.
            reading: what was measured in it; `loss` or `grad_norm` is None where it is not known.
            where: the framework's ``where(condition, yes, no)``.
        """

    @abstractmethod
    def advance(self, state: S, reading: Reading, where: Where = choose) -> S:
        """Return the state after a step, taken or not. Pure, with the arguments of `judge`."""

    def decide(self, state: S, reading: Reading, where: Where = choose) -> tuple[Verdict, S]:
        """Return the results of `judge` and `advance`. Computing both together can take less work."""
        return self.judge(state, reading, where), self.advance(state, reading, where)

    @property
    def idle(self) -> str | None:
        """Why the guard can never skip a step, and what to write instead; None if it can."""
        return None

    def takes(self, state: S, reading: Reading, where: Where = choose) -> Scalar:
        """Return whether a step is taken."""
        return self.judge(state, reading, where).taken

    def require(self, reading: Reading) -> None:
        """Raise for a step that has none of the values that the rule uses.

        Raises:
            PolicyError: if it was not measured, unless a Python False says that the step overflowed.
        """
        # The compiler of PyTorch 2.6 cannot iterate over a frozenset.
        loss = reading.loss if "loss" in self.uses else None
        norm = reading.grad_norm if "grad_norm" in self.uses else None
        if reading.finite is not False and loss is None and norm is None:
            needed = " or ".join(sorted(self.uses))
            raise PolicyError(
                f"{self!r} needs the {needed} of the step, and this reading has none. "
                f"Write Reading(finite, {sorted(self.uses)[0]}=...)."
            )

    def restore(self, saved: Any) -> S:
        """Return the state that a checkpoint holds, as `dump_state` made it.

        Args:
            saved: mappings of names to numbers, lists of numbers, and further mappings.

        Raises:
            PolicyError: for what is not a state of this guard.
        """
        state: S = _restored(self.start(), saved, self)
        return state


def map_state(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Return a state of the same structure with a function applied to its numbers and vectors.

    Args:
        function: of a float or a tuple of floats, or of what a framework has in their place.
        state: nested NamedTuples.
        others: states of the same structure, for further arguments.
    """
    if hasattr(state, "_fields"):
        parts = zip(state, *others, strict=True)
        return type(state)(*[map_state(function, *part) for part in parts])
    return function(state, *others)


def leaves_of(state: Any) -> list[tuple[str, Any]]:
    """Return the numbers and vectors of a state with their dotted names."""
    found: list[tuple[str, Any]] = []
    for name, value in state._asdict().items():
        if hasattr(value, "_fields"):
            found += [(f"{name}.{inner}", leaf) for inner, leaf in leaves_of(value)]
        else:
            found.append((name, value))
    return found


def dump_state(state: Any) -> dict[str, Any]:
    """Return a state in Python numbers as a checkpoint holds it: by name, vectors as lists."""
    return {
        name: dump_state(value)
        if hasattr(value, "_fields")
        else list(value)
        if isinstance(value, tuple)
        else value
        for name, value in state._asdict().items()
    }


def _restored(like: Any, saved: Any, guard: Guard[Any]) -> Any:
    if hasattr(like, "_fields"):
        if isinstance(saved, Mapping) and set(saved) == set(like._fields):
            return type(like)(*[_restored(getattr(like, name), saved[name], guard) for name in like._fields])
    elif isinstance(like, tuple):
        if isinstance(saved, list | tuple) and len(saved) == len(like) and all(map(_is_float, saved)):
            return tuple(map(float, saved))
    elif _is_float(saved):
        return float(saved)
    raise PolicyError(
        f"the saved state is not one of {guard!r}: it was saved by another guard, or with another window."
    )


def _is_float(value: object) -> bool:
    return is_number(value) or isinstance(value, float)  # NaN and inf may be in a window
