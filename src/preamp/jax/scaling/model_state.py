"""Keep a model's state, which a loss function returns in aux, unchanged on a skipped step.

Path and shape decide what is new state. A node of aux that has all entries of an argument, or of a part of
one, is its new state; other entries of the node are passed on. Where only some entries agree, state cannot be
distinguished from a metric of the same name, and an error asks the user. Running statistics that no argument
has, as when the loss function finds the old ones in its closure, could not be restored, and are an error too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from preamp.errors import UsageError

Path = tuple[Any, ...]

NOT_STATE = (
    "If it is not state, give it another name, or write step(..., keep_state=False), which returns aux as it "
    "was computed."
)


# What the statistics of a batch norm look like in aux, without an old value to compare them with: the name of
# Flax's collection; types of Flax NNX and Equinox; the names in one layer of Flax and of Haiku.
COLLECTION = "batch_stats"
TYPES = {("flax", "BatchStat"), ("equinox", "State")}
LAYERS: tuple[set[Path], ...] = ({("mean",), ("var",)}, {("average",), ("counter",), ("hidden",)})


class Leaf(NamedTuple):
    """A leaf, the number of its tree, its path there, and its name in messages."""

    root: int
    path: Path
    name: str
    value: Any


@dataclass(frozen=True)
class Node:
    """A node with names, such as a dictionary or a module: the numbers of its leaves by relative path."""

    path: Path
    name: str
    whole: bool  # it is an argument, not a part of one
    entries: dict[Path, int]


@dataclass(frozen=True)
class Forest:
    """The leaves of trees, in the order in which JAX flattens them, and their nodes with names."""

    leaves: list[Leaf] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    roots: list[object] = field(default_factory=list)
    statistics: set[int] = field(default_factory=set)  # numbers of leaves

    def add(self, tree: object, path: Path, name: str) -> None:
        self.roots.append(tree)
        self._visit(tree, path, name, whole=True)

    def _visit(self, node: object, path: Path, name: str, whole: bool) -> dict[Path, int]:
        if node is None:
            return {}
        if jax.tree_util.all_leaves([node]):
            self.leaves.append(Leaf(len(self.roots) - 1, path, name, node))
            return {(): len(self.leaves) - 1} if _is_array(node) else {}
        children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
        boxed = len(children) == 1 and children[0][0] == (jax.tree_util.GetAttrKey("value"),)  # flax.nnx
        entries: dict[Path, int] = {}
        for keys, child in children:
            below = () if boxed else tuple(_key(key, node, len(children)) for key in keys)
            inner = self._visit(child, path + below, name + jax.tree_util.keystr(keys), whole=False)
            entries |= {below + rest: number for rest, number in inner.items()}
        if (type(node).__module__.partition(".")[0], type(node).__name__) in TYPES or self._is_layer(entries):
            self.statistics.update(entries.values())
        if entries and type(node) not in (tuple, list):
            self.nodes.append(Node(path, name, whole, entries))
        return entries

    def _is_layer(self, entries: dict[Path, int]) -> bool:
        """Return whether entries have the names of a batch norm's statistics, and the shapes of vectors."""
        if entries.keys() not in LAYERS:
            return False
        shapes = {jnp.shape(self.leaves[n].value) for path, n in entries.items() if path != ("counter",)}
        return len(shapes) == 1 and () not in shapes


def keep_on_skip(
    aux: object, taken: Array, args: Sequence[object], kwargs: Mapping[str, object], *, required: bool
) -> Any:
    """Return aux, with the state from the arguments on a skipped step.

    State is a node with names that has all entries of one argument, or of a part of one, by path and shape.
    A list may take the place of a tuple, and a dictionary that of flax's variables. Entries of the node that
    the argument does not have are passed on. A bare array, list or tuple does not count as state, because
    logits and labels may well have the same shape. State has the wider of both dtypes.

    Args:
        aux: any tree.
        taken: whether the step was taken, a boolean scalar.
        args: the positional arguments that aux was computed from.
        kwargs: the keyword arguments.
        required: whether there has to be state; then single entries whose path and shape agree are kept too.

    Raises:
        UsageError: for state that could belong to several arguments; for a node that has only some entries of
            an argument; for running statistics that no argument has; for no state where it is required.
    """
    given, returned = Forest(), Forest()
    for number, argument in enumerate(args):
        given.add(argument, (), f"args[{number}]")
    for name, argument in kwargs.items():
        given.add(argument, (name,), name)
    returned.add(aux, (), "aux")
    kept = _matched(returned, given)
    for number, other in _agreeing(returned, given, kept, required):
        kept[number] = other
    if (lost := _lost_statistics(returned, given, kept)) is not None:
        raise UsageError(
            f"{lost.name} looks like the running statistics of a batch norm, and no argument of the step has "
            "its names and shape: a skipped step could not return the old ones, and inf or NaN would stay in "
            "them for good. Give the loss function the old statistics as an argument, instead of a variable "
            "from outside. Write step(...)(params, opt_state, batch_stats, ...) and def loss_fn(params, "
            f"batch_stats, ...). {NOT_STATE}"
        )
    if required and not kept:
        raise UsageError(
            "keep_state=True, but nothing in aux has the names and shapes of an argument. Write "
            'step(params, opt_state, {"batch_stats": old}, ...) and return loss, {"batch_stats": new}.'
        )
    leaves, structure = jax.tree.flatten(aux)
    for number, other in kept.items():
        leaves[number] = _chosen(taken, leaves[number], given.leaves[other].value)
    return jax.tree.unflatten(structure, leaves)


def _matched(returned: Forest, given: Forest) -> dict[int, int]:
    """Return the numbers of the leaves of aux that are new state, each with that of its old value."""
    alike, named = defaultdict(list), defaultdict(list)
    for node in given.nodes:
        alike[_signature(node, given)].append(node)
        if node.path:
            named[node.path[-1]].append(node)
    wholes = [node for node in given.nodes if node.whole]
    kept: dict[int, int] = {}
    # From the outermost node inwards: a node that is one argument's state is not split among others.
    for new in sorted(returned.nodes, key=lambda node: len(node.path)):
        free = {path: number for path, number in new.entries.items() if number not in kept}
        # A part of an argument may agree in all entries, be a whole argument, or have the same name.
        candidates = [*alike[_signature(new, returned)], *wholes]
        candidates += named[new.path[-1]] if new.path else []
        candidates = [
            old
            for old in {id(node): node for node in candidates}.values()
            if len(old.entries) <= len(free) and (() not in old.entries or old.path[-1:] == new.path[-1:])
        ]
        while candidates := [old for old in candidates if _has_all(free, old, returned, given)]:
            # The argument with the most entries, then the one whose path ends most alike. What it leaves may
            # be the state of another.
            ranks = [(len(old.entries), _agreement(old.path, new.path)) for old in candidates]
            best, *others = [old for old, rank in zip(candidates, ranks, strict=True) if rank == max(ranks)]
            for other in others:
                if other.entries.keys() & best.entries.keys():
                    raise UsageError(
                        f"{new.name} could be the new state of {best.name} and of {other.name}: both have "
                        "its names and shapes, and a skipped step has to return one of them. Write both as "
                        'one argument and one entry of aux, {"a": ..., "b": ...}, or step(..., '
                        "keep_state=False)."
                    )
            kept |= {free.pop(path): number for path, number in best.entries.items()}
    return kept


def _agreeing(returned: Forest, given: Forest, kept: dict[int, int], required: bool) -> list[tuple[int, int]]:
    """Return single leaves of aux, and the leaves of arguments, whose paths and shapes agree.

    Raises:
        UsageError: with the first of them, unless state is required; for shapes that differ where the names
            are those of an argument.
    """
    last, used = defaultdict(list), set(kept.values())
    for number, leaf in enumerate(given.leaves):
        if leaf.path and number not in used and _is_array(leaf.value):
            last[leaf.path[-1]].append(number)
    # Pair each leaf that is left with the argument's leaf whose path ends most alike, and group the pairs by
    # what precedes the common end: a group is one node of aux and one node of an argument.
    groups: dict[tuple[Path, Path, int], list[tuple[int, int]]] = defaultdict(list)
    for number, leaf in enumerate(returned.leaves):
        if number in kept or not leaf.path or not _is_array(leaf.value):
            continue
        best = max(
            last[leaf.path[-1]], key=lambda n: _agreement(leaf.path, given.leaves[n].path), default=None
        )
        if best is None or leaf.value is given.leaves[best].value:  # an argument that is returned as it was
            continue
        old = given.leaves[best]
        count = _common(leaf.path, old.path)
        if any(isinstance(key, str) for key in leaf.path[-count:]) and (
            count >= min(2, len(leaf.path), len(old.path))
        ):
            groups[leaf.path[:-count], old.path[:-count], old.root].append((number, best))
    found = []
    for (above, above_old, root), pairs in groups.items():
        # Without one equal shape the names alone may coincide, unless they are all the same.
        same = [pair for pair in pairs if _what(returned, pair[0]) == _what(given, pair[1])]
        if not same and _names_below(returned, 0, above) != _names_below(given, root, above_old):
            continue
        for number, other in pairs:
            if (number, other) not in same:
                raise UsageError(
                    f"{returned.leaves[number].name} is {_shown(returned, number)}, and "
                    f"{given.leaves[other].name}, whose new state it seems to be, is "
                    f"{_shown(given, other)}: a skipped step could not return the old one. If it is state, "
                    f"return it with the shape and the kind of dtype of the argument. {NOT_STATE}"
                )
        if not required:
            number, other = same[0]
            raise UsageError(
                f"{returned.leaves[number].name} has the name and shape of {given.leaves[other].name}, but "
                "aux does not have all of the other entries there. If it is new state, write return loss, "
                "{**state, **new} with every entry of the argument, or step(..., keep_state=True), which "
                f"returns the old entries by path and shape on a skipped step. {NOT_STATE}"
            )
        found += same
    return found


def _lost_statistics(returned: Forest, given: Forest, kept: Mapping[int, int]) -> Leaf | None:
    """Return the first running statistic in aux that is neither kept nor an argument as it was."""
    same = {id(leaf.value) for leaf in given.leaves}
    for number, leaf in enumerate(returned.leaves):
        if number in kept or id(leaf.value) in same or not _is_array(leaf.value):
            continue
        is_inexact = _what(returned, number)[1] in ("floating", "complexfloating")
        if is_inexact and (number in returned.statistics or COLLECTION in leaf.path):
            return leaf
    return None


def _key(key: object, node: object, count: int) -> object:
    """Return a key in the form that is compared: a name, a number, or a place in a node of one type."""
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        return type(node), count, key.key
    for attribute in ("name", "idx", "key"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)  # of a class that is registered with keys of its own


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, int | float | complex) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _what(forest: Forest, number: int) -> tuple[tuple[int, ...], str]:
    """Return the shape and the kind of a leaf. State may change the length of its dtype, not the kind."""
    leaf = forest.leaves[number].value
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return jnp.shape(leaf), next((kind.__name__ for kind in kinds if jnp.issubdtype(dtype, kind)), str(dtype))


def _shown(forest: Forest, number: int) -> str:
    leaf = forest.leaves[number].value
    return f"of shape {jnp.shape(leaf)} and dtype {getattr(leaf, 'dtype', type(leaf).__name__)}"


def _signature(node: Node, forest: Forest) -> Hashable:
    return frozenset((path, _what(forest, number)) for path, number in node.entries.items())


def _has_all(free: dict[Path, int], old: Node, returned: Forest, given: Forest) -> bool:
    """Return whether free entries of a node have all paths, shapes and kinds of another."""
    return all(
        path in free and _what(returned, free[path]) == _what(given, number)
        for path, number in old.entries.items()
    )


def _common(first: Path, second: Path) -> int:
    """Return the length of the common end of two paths, in keys."""
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return count


def _agreement(first: Path, second: Path) -> tuple[int, bool]:
    return _common(first, second), first == second


def _names_below(forest: Forest, root: int, path: Path) -> set[Path]:
    """Return the paths of the leaves below a path of a tree."""
    size, leaves = len(path), forest.leaves
    return {leaf.path[size:] for leaf in leaves if leaf.root == root and leaf.path[:size] == path}


def _chosen(taken: Array, new: ArrayLike, old: ArrayLike) -> Array:
    """Return the new entry or the old one, in the wider of their dtypes."""
    new, old = jnp.asarray(new), jnp.asarray(old)
    if new.dtype != old.dtype:
        inexact = jnp.issubdtype(new.dtype, jnp.inexact)
        dtype = old.dtype if inexact and old.dtype.itemsize > new.dtype.itemsize else new.dtype
        new, old = new.astype(dtype), old.astype(dtype)
    return jnp.where(taken, new, old)
