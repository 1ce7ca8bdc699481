"""Which parameters were not finite: their names, and the order in which backward reaches them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from preamp.torch.scaling.optimizers import OptimizerLike, parameters_of

COMPILED = "CompiledFunctionBackward"  # the node of a graph that torch.compile has made


class Culprits(NamedTuple):
    """Parameters whose gradients were not finite.

    Attributes:
        names: of all of them.
        first: of the one that backward reached first; empty where the order is not known.
    """

    names: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


def names(optimizer: OptimizerLike, model: nn.Module | None = None) -> dict[int, str]:
    """Return what to call each parameter, by its `id`.

    Those of the model have its names. Of the others an optimizer knows the names if it was made with
    `named_parameters()`; else the name is the expression that leads to the parameter, such as
    `param_groups[0]['params'][3]`.
    """
    named: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or ()
        for index, parameter in enumerate(group["params"]):
            expression = f"param_groups[{number}]['params'][{index}]"
            named[id(parameter)] = known[index] if index < len(known) else expression
    if model is not None:
        named |= {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in parameters_of(optimizer):
            original = getattr(parameter, "master_of", None)  # of a copy that `MasterWeights` made
            if original is not None:
                named[id(parameter)] = named.get(id(original), named[id(parameter)])
    return named


def culprits(
    named: dict[int, str], ids: Sequence[int], sizes: Iterable[float], order: dict[int, int]
) -> Culprits:
    """Return the parameters whose gradients are not finite, first in backward order.

    Args:
        named: what `names` returned.
        ids: of the parameters that have a gradient.
        sizes: the norm or amax of each of these gradients.
        order: when backward reaches a parameter, by its `id`, from `backward_order`. Parameters that are
            not in it come after the others, last one first.
    """
    found = [index for index, size in enumerate(sizes) if not math.isfinite(size)]
    found.sort(key=lambda index: (order.get(ids[index], len(order)), -index))
    listed = tuple(named[ids[index]] for index in found)
    is_known = len(found) == 1 or all(ids[index] in order for index in found)
    return Culprits(listed, listed[:1] if is_known else ())


def largest(named: dict[int, str], ids: Sequence[int], sizes: Iterable[float]) -> Culprits:
    """Return the parameters with the largest shares of the norm, largest first.

    They make up half of the squared norm together, and are at most three.

    Args:
        named: what `names` returned.
        ids: of the parameters that have a gradient.
        sizes: the norm of each of these gradients, all finite.
    """
    listed = [named[one] for one in ids]
    return Culprits(largest_of(listed, [size * size for size in sizes]))


def largest_of(named: Sequence[str], squares: Sequence[float]) -> tuple[str, ...]:
    """`largest`, of parameters by their names, with the squared norms of their gradients."""
    order = sorted(range(len(squares)), key=lambda index: -squares[index])[:3]
    found: list[str] = []
    share = 0.0
    for index in order:
        if share >= 0.5 * math.fsum(squares):
            break
        share += squares[index]
        found.append(named[index])
    return tuple(found)


def backward_order(root: Any) -> dict[int, int]:
    """Return when backward from a node reaches each parameter: 0, 1, ... by the parameter's `id`.

    As autograd does, of the nodes whose inputs are complete the one that was made last goes first. It is
    empty where compiled code is in the graph, which is one node and keeps its order to itself.
    """
    waiting = _uses(root)
    if any(type(node).__name__ == COMPILED for node in waiting):
        return {}
    order: dict[int, int] = {}
    ready, count = [(-root._sequence_nr(), 0, root)], 0
    while ready:
        _, _, node = heapq.heappop(ready)
        if hasattr(node, "variable"):
            order.setdefault(id(node.variable), len(order))
        for following in _next(node):
            waiting[following] -= 1
            if not waiting[following]:
                count += 1
                heapq.heappush(ready, (-following._sequence_nr(), count, following))
    return order


def nodes(root: Any) -> list[Any]:
    """Return all nodes of a graph."""
    return list(_uses(root))


def _uses(root: Any) -> dict[Any, int]:
    """Return how many nodes feed each node of a graph."""
    uses, reached = {root: 0}, [root]
    for node in reached:
        for following in _next(node):
            if following not in uses:
                uses[following] = 0
                reached.append(following)
            uses[following] += 1
    return uses


def _next(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]
