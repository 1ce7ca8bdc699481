"""Where in a training checkpoint a system's loss scale lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from preamp.errors import CheckpointError, PolicyError
from preamp.policy import Policy
from preamp.systems.definition import Dialect
from preamp.systems.dialects import ALL
from preamp.systems.formats import entries_of


class Found(NamedTuple):
    """A state in a checkpoint, the way to it, its policy, and what our own adapter saved beside it.

    `equal` has the ways to the other places where the same was found.
    """

    where: str
    state: Any
    policy: Policy[Any]
    remembered: dict[str, Any]
    equal: tuple[str, ...] = ()


def find(tree: object, dialect: Dialect[...], source: Path) -> Found:
    """Return the one state in a checkpoint that a dialect can load; of equal ones the first.

    Args:
        tree: mappings, sequences and objects, however deep.
        dialect: what saved the state.
        source: the file, for the messages.

    Raises:
        CheckpointError: for none, and for several that differ.
        PolicyError: for settings that cannot work.
    """
    dialect.known_format()
    found, problems = _loadable(tree, dialect)
    if not found:
        raise _at(source, problems[0]) if problems else _nothing(tree, dialect, source)
    if any(_told(one) != _told(found[0]) for one in found):
        places = ", ".join(f"{one.where} ({one.state.scale:g})" for one in found)
        raise CheckpointError(
            f"{source} holds loss scales that differ, at {places}. Save the right one in a file of its own."
        )
    return found[0]._replace(equal=tuple(one.where for one in found[1:]))


def _told(found: Found) -> Any:
    """Return what must be the same at all places: all but how many steps were counted."""
    return found.state, found.policy, {**found.remembered, "steps": 0}


def _at(source: Path, problem: Exception) -> Exception:
    """Return an error of the same kind that names the file."""
    return type(problem)(f"{source}: {problem}")


def _nothing(tree: object, dialect: Dialect[...], source: Path) -> CheckpointError:
    known = [other for other in ALL.values() if other.format and _loadable(tree, other)[0]]
    hint = f" Write --from {' or '.join(other.name.lower() for other in known)}." if known else ""
    optimizer = entries_of(entries_of(tree).get("optimizer"))
    if dialect.system.startswith("DeepSpeed") and "loss_scale_optimizer" in optimizer:
        hint = (
            f" preamp.deepspeed saved it, with the loss scale in PyTorch's format.{hint} Hysteresis, "
            "min_scale and the other settings that PyTorch does not save are not in it: they are in the "
            "configuration's fp16 section."
        )
    return CheckpointError(f"{source} holds nothing that {dialect.system} saves.{hint}")


def _loadable(tree: object, dialect: Dialect[...]) -> tuple[list[Found], list[Exception]]:
    """Return all states that can be loaded, and why others cannot."""
    found: list[Found] = []
    problems: list[Exception] = []
    seen: list[tuple[str, Mapping[str, Any]]] = []
    for where, node in _nodes(tree):
        try:
            entries = dialect.known_format().find(node)
            if entries is not None and not any(
                entries is other and _is_within(where, outer) for outer, other in seen
            ):
                seen.append((where, entries))
                state, policy = dialect.load_quietly(entries), dialect.load_policy(entries)
                remembered = dialect.known_format().remembered(entries)
                found.append(Found(where or "the top", state, policy, remembered))
        except (CheckpointError, PolicyError) as problem:
            problems.append(problem)
    return found, problems


def _is_within(where: str, outer: str) -> bool:
    return not outer or where.startswith(f"{outer}.")


def _nodes(tree: object) -> Iterator[tuple[str, Any]]:
    """Yield everything in a tree that has parts, with each way to it from a part that is met first."""
    todo, seen = [("", tree)], set()
    while todo:
        where, node = todo.pop()
        yield where, node
        if id(node) in seen:
            continue
        seen.add(id(node))
        parts = enumerate(node) if isinstance(node, list | tuple) else entries_of(node).items()
        inside = [(f"{where}.{name}".strip("."), part) for name, part in parts if _has_parts(part)]
        todo.extend(reversed(inside))


def _has_parts(value: object) -> bool:
    return isinstance(value, Mapping | list | tuple) or bool(entries_of(value))
