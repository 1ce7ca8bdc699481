"""Training steps with a planted fault and without, which `blame` has to tell apart.

PyTorch's are in `models`, `faults` and `healthy`, those of JAX in `jax_models` and `jax_faults`. They were
written without knowing how blame works. Run: python benchmarks/blame_cases/run.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from preamp.blaming.blame import Blame

__all__ = ["OUTSIDE", "Case", "Errors", "Harm", "Healthy", "Step", "harm"]

FACTOR, LOST = 3.0, 0.3  # what a fault has to do: multiply an error, or lose a share of a gradient
UNSOUND = 0.25  # an error of the gradient that needs no fault
LARGEST_SCALE, SMALLEST_SCALE = 16, -24  # of the loss scales that are tried, as powers of 2
LOSS_FLOOR = 1 / 8  # of the precision: a loss that is closer to float32's by luck counts as this close

OUTSIDE = "-"
"""The path of what no module below the root calls: the loss function and the root's own forward."""

# Names by which one operator may go. A cast back to float32 rounds the gradient to the low precision.
ALIKE = {
    **dict.fromkeys(("half", "bfloat16", "float", "type", "type_as", "_to_copy"), "to"),
    "_log_softmax": "log_softmax",
    "_softmax": "softmax",
    "add_any": "add",
    "bmm": "matmul",
    "cross_entropy_loss": "cross_entropy",
    "integer_pow": "pow",
    "mm": "matmul",
    "native_group_norm": "group_norm",
    "native_layer_norm": "layer_norm",
    "rsub": "sub",
    "square": "pow",
    "true_divide": "div",
}


class Errors(NamedTuple):
    """How far a step in low precision is from the same in float32.

    Attributes:
        loss: the relative error of the loss.
        gradient: the relative error of the whole gradient, as a vector.
        lost: the larger of the share of the gradient's norm and of one weight's entries that became 0.
        finite: whether the loss and all gradients are finite.
    """

    loss: float
    gradient: float
    lost: float
    finite: bool


class Step(Protocol):
    """A training step."""

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number of the low precision."""

    def blame(self) -> Blame:
        """Return what blame says of it."""

    def errors(self, seed: int) -> Errors:
        """Return how far it is from float32, measured without blame."""


class Harm(NamedTuple):
    """What a fault does: the errors of the step with it and without it."""

    fault: Errors
    sound: Errors
    epsilon: float

    @property
    def factor(self) -> float:
        """How many times larger it makes the error of the loss or the gradient; inf if one is not finite."""
        if not self.fault.finite:
            return math.inf
        of_loss = self.fault.loss / max(self.sound.loss, LOSS_FLOOR * self.epsilon)
        return max(of_loss, self.fault.gradient / self.sound.gradient)

    @property
    def hurts(self) -> bool:
        """Whether it does enough to be a fault, and the step without it is sound."""
        loses = self.fault.lost >= max(LOST, FACTOR * self.sound.lost)
        is_sound = self.sound.finite and self.sound.gradient < UNSOUND
        return is_sound and (self.factor >= FACTOR or loses)


class Healthy(NamedTuple):
    """A step without a fault.

    Attributes:
        name: the model with its options, how many steps it was trained, and the precision.
        build: makes the step from a seed.
    """

    name: str
    build: Callable[[int], Step]


@dataclass(frozen=True)
class Case:
    """A step with one fault.

    Attributes:
        name: the model, the precision and the fault, unique among the cases.
        kind: what sort of fault it is.
        model: the name of the model, a key of `models.STEPS`.
        build: makes the step from a seed.
        sound: makes the same step without the fault.
        modules: prefixes of the paths at which a row names the fault; "" is anywhere, `OUTSIDE` is outside of
            the modules below the root.
        operators: the operators that name it there; empty for any.
        direction: "forward", "backward", or None for either.
        also: operators elsewhere that name it as well, each with the path of its module.
        must_show_loss: whether a row names it only if gradients overflowed or were lost there, or are said to
            be too small.
    """

    name: str
    kind: str
    model: str
    build: Callable[[int], Step]
    sound: Callable[[int], Step]
    modules: tuple[str, ...]
    operators: tuple[str, ...]
    direction: str | None = None
    also: tuple[tuple[str, str], ...] = ()
    must_show_loss: bool = False

    def guilty(self, row: Any) -> bool:
        """Return whether a row of blame's result names the fault."""
        if self.direction not in (None, row.direction):
            return False
        if self.must_show_loss and not (row.overflowed or row.lost or "too small" in row.reason):
            return False
        if any(_is_at(row.module, at) and _is_one(row.operator, (name,)) for at, name in self.also):
            return True
        at_place = any(_is_at(row.module, place) for place in self.modules)
        return at_place and (not self.operators or _is_one(row.operator, self.operators))


def harm(case: Case, seed: int) -> Harm:
    """Return what the fault of a case does."""
    step = case.build(seed)
    return Harm(step.errors(seed), case.sound(seed).errors(seed), step.epsilon)


def _is_at(path: str, place: str) -> bool:
    if place == OUTSIDE:
        return path in ("", OUTSIDE)
    return not place or path == place or path.startswith(f"{place}.")


def _is_one(operator: str, names: tuple[str, ...]) -> bool:
    return _plain(operator) in map(_plain, names)


def _plain(operator: str) -> str:
    return ALIKE.get(operator, operator)
