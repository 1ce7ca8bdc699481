"""Split autograd's graph into parts whose gradients carry the same factor, and choose the factor of each.

The layers' nodes are marked. All nodes of a part, between marked nodes, have one potential: the binary
exponent of the factor that their gradients carry. The potential changes in front of a marked node. It also
changes on an edge to a part without marked nodes below it, where parts of different potential may meet. On
the last edge, into a leaf, it returns to 0. Branches and sums agree for any choice of potentials, because the
factor applied in one place is the difference of two potentials.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from preamp.errors import UsageError

LEAF = -1  # the part of all leaves, whose potential is 0
Rule = Callable[["Mark", int], int]


class Mark(NamedTuple):
    """A marked node of a graph, with the parts above it, towards the loss, and below it.

    Attributes:
        node: a `grad_fn` of autograd.
        name: the name it was marked with.
        use: 0 for the first node of this name in backward, then 1, ...
        above: the part above it.
        below: the part below it.
    """

    node: Node
    name: str
    use: int
    above: int
    below: int


class Edge(NamedTuple):
    """A gradient that goes to a leaf, or to a part below which nothing is marked.

    Attributes:
        node: the node that computes it.
        slot: its position among the node's results.
        above: the part of the node.
        below: the part it goes to, or `LEAF`.
    """

    node: Node
    slot: int
    above: int
    below: int


class Graph:
    """The graph below a loss, in parts.

    Args:
        root: the `grad_fn` of the loss.
        key: the key of a marked node's name in its `metadata`.

    Attributes:
        marks: the marked nodes, in the order of backward.
        edges: the edges on which a potential may change.
    """

    def __init__(self, root: Node, key: object) -> None:
        self._nodes, self._next = _explore(root)
        self._names: dict[int, str] = {}
        for number, node in enumerate(self._nodes):
            metadata: Any = node.metadata  # a dictionary, which PyTorch's types say is a method
            if key in metadata:
                self._names[number] = metadata[key]
        # A union-find forest. A marked node has two entries: one below it and, after all nodes, one above it.
        self._group = list(range(2 * len(self._nodes)))
        cut = list(self._cut())  # consumed completely, because `_part` needs all unions
        self.edges = [Edge(self._nodes[i], slot, self._part(i), self._part(j)) for i, slot, j in cut]
        self.marks = list(self._marks())
        self._root = self._part(self._above(0))

    @property
    def leaves(self) -> set[int]:
        """The `id` of every leaf tensor that backward can reach."""
        ends = (node for node, following in zip(self._nodes, self._next, strict=True) if not following)
        return {id(node.variable) for node in ends if hasattr(node, "variable")}

    def potentials(self, rule: Rule) -> dict[int, int]:
        """Choose the potential of every part, beginning with 0 for the part of the loss.

        Args:
            rule: returns the potential wanted below a mark, given the mark and the potential above it. If
                several are wanted for one part, the smallest is chosen.
        """
        targets: dict[int, list[tuple[int, Mark | None]]] = defaultdict(list)
        for mark in self.marks:
            targets[mark.above].append((mark.below, mark))
        for edge in self.edges:
            if edge.below != LEAF:
                targets[edge.above].append((edge.below, None))
        # As in Dijkstra's algorithm: the part with the smallest wanted potential is settled first.
        chosen = {LEAF: 0}
        wanted = [(0, self._root)]
        while wanted:
            potential, part = heapq.heappop(wanted)
            if part not in chosen:
                chosen[part] = potential
                for below, mark_between in targets[part]:
                    target = rule(mark_between, potential) if mark_between else potential
                    heapq.heappush(wanted, (target, below))
        return chosen

    def _cut(self) -> Iterator[tuple[int, int, int]]:
        """Join nodes that must have one potential; yield the edges between parts."""
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
        """Return for each node whether it or a node below it is marked."""
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
            group[i] = i = group[group[i]]  # halves the path
        return i


def _explore(root: Node) -> tuple[list[Node], list[list[int | None]]]:
    """Return the nodes below a root, itself first, and the numbers of the nodes that follow each."""
    numbers, nodes, following = {root: 0}, [root], []
    for node in nodes:
        if "CheckpointFunction" in type(node).__name__:
            raise UsageError(
                "A part of the model uses a reentrant checkpoint, which hides its graph until backward runs. "
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
