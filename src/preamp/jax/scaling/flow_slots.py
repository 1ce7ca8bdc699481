"""What `watch` counts in: a type of its own, so that counts among gradients are not taken for gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, eq=False)
class FlowSlot:
    """What `watch` counts in: an argument of the loss, made by `flow_slot`.

    The derivative of a loss with respect to it is a `FlowSlot` with the counts. What
    unscales, measures or clips gradients in `preamp.jax` leaves it as it is, and with an `axis_name` counts
    are added up over devices.

    Attributes:
        counts: float32 array of shape [256], one number for each binary exponent.
    """

    counts: Any


def is_flow_slot(node: Any) -> bool:
    """Return whether a node of a tree is a slot, for `is_leaf`."""
    return isinstance(node, FlowSlot)


def _flatten(slot: FlowSlot) -> tuple[list[tuple[Any, Any]], None]:
    return [(jax.tree_util.GetAttrKey("counts"), slot.counts)], None


def _unflatten(_: None, children: Iterable[Any]) -> FlowSlot:
    return FlowSlot(*children)


jax.tree_util.register_pytree_with_keys(FlowSlot, _flatten, _unflatten)
