"""The base class of all policies, their state, and the measurements of a step that they take."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from inspect import cleandoc
from textwrap import fill
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from preamp.checks import is_number, shown, to_float32
from preamp.errors import PolicyError, ScaleExhausted

# A Python number, or a 0-dim array of any framework: no type that Python knows has the operators of both.
Scalar: TypeAlias = Any
Where: TypeAlias = Callable[[Scalar, Scalar, Scalar], Scalar]
S = TypeVar("S", bound=Any)
T = TypeVar("T")
COUNTS = ("good", "bad", "age")
LARGEST_COUNT = 2**31  # PyTorch's growth tracker is an int32


class State(NamedTuple):
    """What a policy remembers between steps: three floats (or float scalars of any framework).

    Attributes:
        scale: what the next loss is multiplied by.
        good: clean steps since the last overflow or growth. A float32 counts exactly to 2**24.
        bad: overflows since the last event that clears them (`Dynamic.hysteresis_reset`).
    """

    scale: Scalar
    good: Scalar
    bad: Scalar


class Reading(NamedTuple):
    """What was measured in the gradients of one step, agreed on by all ranks.

    Attributes:
        finite: True (or a boolean scalar) when every gradient is finite.
        amax: the largest magnitude among the scaled gradients, 0 if all are zero; None where the policy does
            not need it. Over ranks it is rounded up to a power of two. Undefined, possibly NaN, after an
            overflow.
        loss: the loss, not scaled, the mean over ranks; None where it is not known. Used by
            guards only.
        grad_norm: global L2 norm of the unscaled gradients before clipping; None where it is not known, as
            after an overflow. Used by guards only.
    """

    finite: Scalar
    amax: Scalar = None
    loss: Scalar = None
    grad_norm: Scalar = None


def choose(condition: Scalar, yes: Scalar, no: Scalar) -> Scalar:
    """``where`` for plain Python numbers."""
    return yes if condition else no


def setting(default: T, help: str) -> T:
    """Declare a setting of a policy, with its description for the class's docstring and `preamp --help`.

    Args:
        default: the default value.
        help: what the setting does. The command line shows the first sentence.
    """
    described: T = field(default=default, metadata={"help": help})
    return described


def changed_settings(settings: Any) -> str:
    """Return a dataclass as the call that makes it, without the settings that have their defaults."""
    values = [(one.name, getattr(settings, one.name), one.default) for one in fields(settings)]
    changed = [f"{name}={value!r}" for name, value, default in values if value != default]
    return f"{type(settings).__name__}({', '.join(changed)})"


@dataclass(frozen=True, eq=False, repr=False)
class Policy(ABC, Generic[S]):
    """A rule for the loss scale. The policy holds the settings, its state what changes from step to step.

    A new policy is a subclass: a frozen dataclass with `start` and `advance`. Its settings are added to its
    docstring. Its state is a NamedTuple of floats that has the fields of `State`, perhaps among others.

    Attributes:
        needs_amax: whether the rule uses `Reading.amax`. Adapters measure it only then.
        signed: the fields of the state that may be negative.
    """

    needs_amax: ClassVar[bool] = False
    signed: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        """Add an "Args" section with every described setting to the docstring."""
        super().__init_subclass__()
        describe_settings(cls)

    def __repr__(self) -> str:
        """Show the settings that differ from their defaults."""
        return changed_settings(self)

    def get_config(self) -> dict[str, Any]:
        """Return the settings by name, as Keras requires of a class that is registered with it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @abstractmethod
    def start(self) -> S:
        """Return the state before the first step, as Python floats."""

    @abstractmethod
    def advance(self, state: S, reading: Reading, where: Where = choose) -> S:
        """Return the state after a step. Pure: works on whatever `where` works on.

        Args:
            state: the state during the step, scalars of any one framework.
            reading: what was measured in that step's gradients.
            where: the framework's ``where(condition, yes, no)``.
        """

    def amax_in(self, reading: Reading) -> Scalar:
        """Return the amax of a reading, for a rule that needs it.

        It is undefined, possibly NaN, after an overflow: let it reach the state through `where` only.

        Raises:
            PolicyError: if it was not measured, unless a Python False says that the step overflowed.
        """
        if reading.amax is None and reading.finite is not False:
            raise PolicyError(
                f"{self!r} needs the amax of the gradients, and this reading has none. "
                "Write Reading(finite, amax=...), or use a policy that only needs overflows: Dynamic()."
            )
        return 0.0 if reading.amax is None else reading.amax

    def exhausted(self, state: S, reading: Reading, where: Where = choose) -> Scalar:
        """Return whether the policy gives up on this step instead of advancing."""
        return False

    def step(self, state: S, reading: Reading) -> S:
        """`advance` on Python floats, for loops that run on the host.

        Raises:
            ScaleExhausted: if the policy gives up. `state` is still valid.
        """
        if self.exhausted(state, reading):
            raise self.exhaustion_from(state)
        return self.advance(state, reading)

    def exhaustion_from(self, state: S) -> ScaleExhausted:
        """Return the error for a policy that gave up.

        Args:
            state: before the step at which it did, in Python numbers.
        """
        return self.exhaustion(state.scale, int(state.bad) + 1)

    def exhaustion(self, scale: float, overflows: int) -> ScaleExhausted:
        """Return the error that says why training cannot continue.

        Args:
            scale: the loss scale at which the gradients overflowed.
            overflows: how many were counted, the last one included.
        """
        return ScaleExhausted(
            f"the gradients overflowed at a loss scale of {scale:g} "
            f"({overflows} overflow{'s' if overflows > 1 else ''} counted) and {self!r} gives up. "
            "The step was skipped; no parameter was changed. Look for NaN or inf in the data and the "
            "loss, and for the first layer to overflow; a learning rate that is too high does this too. "
            f"To continue, write {self._remedy()}, or train in bfloat16, which needs no loss scale.",
            scale=scale,
            overflows=overflows,
        )

    @property
    def gives_up(self) -> bool:
        """Whether `exhausted` can be true. By default, whether a class has an `exhausted` of its own."""
        return type(self).exhausted is not Policy.exhausted

    def restore(self, saved: Mapping[str, Any]) -> S:
        """Return the state that saved numbers describe. A field that is missing starts as in `start`.

        Args:
            saved: the state's fields by name, such as a checkpoint holds; others are ignored.

        Raises:
            PolicyError: for a scale that is not a finite float32 above 0, or a count that is not one.
        """
        state = self.start()
        known = {name: saved[name] for name in state._fields if name in saved}
        for name, value in known.items():
            rounded = to_float32(value) if is_number(value) else math.nan
            is_allowed = rounded > 0.0 if name == "scale" else rounded >= 0.0 or name in self.signed
            if name in COUNTS:
                is_allowed = 0.0 <= rounded < LARGEST_COUNT and float(value).is_integer()
            if not (math.isfinite(rounded) and is_allowed):
                raise PolicyError(
                    f"{name}={shown(value)} is not a valid state: a scale must be a finite float32 "
                    "above 0, a count a whole number from 0 to below 2**31. Write scale=2.0**16 or good=0."
                )
        restored: S = state._replace(**{name: float(value) for name, value in known.items()})
        return restored

    def _remedy(self) -> str:
        """Say which settings keep this policy from giving up."""
        return "another policy"


def describe_settings(kind: type) -> None:
    """Add an "Args" section with every described setting to the docstring of a class of settings."""
    described = _descriptions(kind)
    if described and kind.__doc__ and "Args:" not in kind.__doc__:
        entries = "\n".join(
            fill(f"{name}: {text}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
            for name, text in described.items()
        )
        kind.__doc__ = f"{cleandoc(kind.__doc__)}\n\nArgs:\n{entries}"


def _descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of the settings of a class, inherited ones first.

    Called before `dataclass` has processed the class: its own settings are still in its namespace.
    """
    inherited = {one.name: one for one in fields(kind)} if is_dataclass(kind) else {}
    own = {name: value for name, value in vars(kind).items() if isinstance(value, Field)}
    known = {**inherited, **own}
    return {name: one.metadata["help"] for name, one in known.items() if "help" in one.metadata}
