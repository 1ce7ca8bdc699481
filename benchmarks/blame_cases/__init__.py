"""Training steps with a planted fault and without, which `preamp.torch.blame` has to tell apart.

They were written without knowing how blame works. Run: python benchmarks/blame_cases/run.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from preamp.autocasting.tables import Casting

__all__ = ["OUTSIDE", "Case", "Step"]

OUTSIDE = "-"
"""The path of what no module below the root calls: the loss function and the root's own forward."""

# Names by which one operator may go. A cast back to float32 rounds the gradient to the low precision.
ALIKE = {
    **dict.fromkeys(("half", "bfloat16", "float", "type", "type_as", "_to_copy"), "to"),
    "_log_softmax": "log_softmax",
    "_softmax": "softmax",
    "bmm": "matmul",
    "cross_entropy_loss": "cross_entropy",
    "mm": "matmul",
    "native_group_norm": "group_norm",
    "native_layer_norm": "layer_norm",
    "rsub": "sub",
    "square": "pow",
    "true_divide": "div",
}


@dataclass(frozen=True)
class Step:
    """A training step, as blame gets it.

    Attributes:
        loss_fn: returns the loss, a scalar, from `args`; it calls `model`.
        args: what it is given.
        model: whose modules and weights the step is about.
        dtype: the low precision.
        casting: an edited table of operators, if the step has one.
        loss_scale: the loss scale; None for what a dynamic scaler would settle at, at most 2^16.
    """

    loss_fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    model: nn.Module
    dtype: torch.dtype
    casting: Casting | None = None
    loss_scale: float | None = None


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
        must_show_loss: whether a row names it only if gradients overflowed or were lost there.
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
        if self.must_show_loss and not (row.overflowed or row.lost):
            return False
        if any(_is_at(row.module, at) and _is_one(row.operator, (name,)) for at, name in self.also):
            return True
        at_place = any(_is_at(row.module, place) for place in self.modules)
        return at_place and (not self.operators or _is_one(row.operator, self.operators))


def _is_at(path: str, place: str) -> bool:
    if place == OUTSIDE:
        return path in ("", OUTSIDE)
    return not place or path == place or path.startswith(f"{place}.")


def _is_one(operator: str, names: tuple[str, ...]) -> bool:
    return _plain(operator) in map(_plain, names)


def _plain(operator: str) -> str:
    return ALIKE.get(operator, operator)
