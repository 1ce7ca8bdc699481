"""By which power of two gradients are too large in each part of a backward pass: one number per part.

The nodes of autograd's graph between marked nodes have one potential: the binary exponent of the factor that
their gradients carry. A marked node changes it, in front of the node. So does an edge to where nothing is
marked any more, if parts of different potential meet there. On the last edge, into a leaf, it is 0 again.
Whatever numbers are chosen, branches and sums agree, because the factor of a node is a difference of two
potentials. This room finds the parts and walks from the loss to the leaves. It refuses to know what a good
number is.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from preamp.errors import UsageError

LEAF = -1  # the part of all leaves: its potential is 0
Rule = Callable[["Mark", int], int]


class Mark(NamedTuple):
    """A marked node of a graph, with the parts above it, towards the loss, and below it.

    Attributes:
        node: what autograd calls a `grad_fn`.
        name: what it was marked with.
        use: 0 for the one of this name that backward reaches first, then 1, ...
    """

    node: Any
    name: str
    use: int
    above: int
    below: int


class Edge(NamedTuple):
    """A gradient that goes to a leaf, or to a part below which nothing is marked.

    Attributes:
        node: the node that computes it.
        slot: which of the node's results it is.
        above: the part of the node.
        below: the part it goes to, or `LEAF`.
    """

    node: Any
    slot: int
    above: int
    below: int


class Graph:
    """The graph below a loss, in parts.

    Args:
        root: the `grad_fn` of the loss.
        key: marked nodes have it in their `metadata`, with a name.

    Attributes:
        marks: the marked nodes, in the order of backward.
        edges: the edges on which a potential may change.

    Raises:
        UsageError: for a graph that is not all there before backward.
    """

    def __init__(self, root: Any, key: object) -> None:
        self._nodes, self._next = _explore(root)
        marks = ((number, node.metadata.get(key)) for number, node in enumerate(self._nodes))
        self._names: dict[int, str] = {number: name for number, name in marks if name is not None}
        self._group = list(range(2 * len(self._nodes)))
        cut = list(self._cut())  # all of it, before any part is asked for
        self.edges = [Edge(self._nodes[i], slot, self._part(i), self._part(j)) for i, slot, j in cut]
        self.marks = list(self._marks())
        self._root = self._part(self._above(0))

    @property
    def leaves(self) -> set[int]:
        """The `id` of every leaf tensor that backward can reach."""
        ends = (node for node, following in zip(self._nodes, self._next, strict=True) if not following)
        return {id(node.variable) for node in ends if hasattr(node, "variable")}

    def potentials(self, rule: Rule) -> dict[int, int]:
        """Choose the potential of every part, from the loss on. The loss's own part has 0.

        Args:
            rule: from a mark and the potential above it to the one wanted below it. Of several wishes for a
                part the smallest counts.
        """
        ways: dict[int, list[tuple[int, Mark | None]]] = defaultdict(list)
        for mark in self.marks:
            ways[mark.above].append((mark.below, mark))
        for edge in self.edges:
            if edge.below != LEAF:
                ways[edge.above].append((edge.below, None))
        chosen = {LEAF: 0}
        wishes = [(0, self._root)]
        while wishes:
            potential, part = heapq.heappop(wishes)
            if part not in chosen:
                chosen[part] = potential
                for below, by in ways[part]:
                    heapq.heappush(wishes, (rule(by, potential) if by else potential, below))
        return chosen

    def _cut(self) -> Iterator[tuple[int, int, int]]:
        """Join what must have one potential; yield the edges in between."""
        lead_on = self._lead_to_marks()
        for i, following in enumerate(self._next):
            for slot, j in enumerate(following):
                if j is None:
                    continue
                if not self._next[j]:
                    yield i, slot, LEAF
                elif lead_on[i] and not lead_on[j]:
                    yield i, slot, j
                else:
                    self._join(i, self._above(j))

    def _lead_to_marks(self) -> list[bool]:
        """Return for each node whether it is marked, or a marked one lies below it."""
        parents: list[list[int]] = [[] for _ in self._nodes]
        for i, following in enumerate(self._next):
            for j in following:
                if j is not None:
                    parents[j].append(i)
        found, reached = [False] * len(self._nodes), list(self._names)
        while reached:
            i = reached.pop()
            if not found[i]:
                found[i] = True
                reached += parents[i]
        return found

    def _marks(self) -> Iterator[Mark]:
        used: Counter[str] = Counter()
        for i in sorted(self._names, key=lambda i: -self._nodes[i]._sequence_nr()):
            name = self._names[i]
            yield Mark(self._nodes[i], name, used[name], self._part(self._above(i)), self._part(i))
            used[name] += 1

    def _above(self, i: int) -> int:
        return i + len(self._nodes) if i in self._names else i

    def _join(self, i: int, j: int) -> None:
        self._group[self._part(i)] = self._part(j)

    def _part(self, i: int) -> int:
        group = self._group
        while i != LEAF and group[i] != i:
            group[i] = i = group[group[i]]
        return i


def _explore(root: Any) -> tuple[list[Any], list[list[int | None]]]:
    """Return the nodes below a root, itself first, and the numbers of those that follow each."""
    numbers, nodes, following = {root: 0}, [root], []
    for node in nodes:
        if "CheckpointFunction" in type(node).__name__:
            raise UsageError(
                "A part of the model is checkpointed in a way that hides its graph until backward is there. "
                "Write checkpoint(..., use_reentrant=False)."
            )
        row: list[int | None] = []
        for other, _ in node.next_functions:
            number = numbers.get(other) if other is not None else None
            if number is None and other is not None:
                number = numbers[other] = len(nodes)
                nodes.append(other)
            row.append(number)
        following.append(row)
    return nodes, following
