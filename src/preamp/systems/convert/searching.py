"""Find a system's loss scale in a training checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from preamp.errors import CheckpointError, PolicyError
from preamp.policy import Policy
from preamp.systems.definition import Dialect
from preamp.systems.dialects import ALL
from preamp.systems.formats import entries_of
from preamp.systems.formats.base import GuardState


class Found(NamedTuple):
    """A state in a checkpoint, the path to it, its policy, and what our own adapter saved with it.

    `guards` are the states of a guard, one for each optimizer. `equal` has the paths to the other places
    where the same state was found.
    """

    where: str
    state: Any
    policy: Policy[Any]
    remembered: dict[str, Any]
    guards: list[GuardState]
    equal: tuple[str, ...] = ()


def find(tree: object, dialect: Dialect[...], source: Path) -> Found:
    """Return the only state in a checkpoint that a dialect can load, or the first of equal ones."""
    dialect.known_format()
    found, problems = _loadable(tree, dialect)
    if not found:
        if problems:
            raise type(problems[0])(f"{source}: {problems[0]}")
        raise _nothing(tree, dialect, source)
    if any(_compared(one) != _compared(found[0]) for one in found):
        places = ", ".join(f"{one.where} ({one.state.scale:g})" for one in found)
        raise CheckpointError(
            f"{source} holds loss scales that differ, at {places}. Save the one to use in a file of its own."
        )
    return found[0]._replace(equal=tuple(one.where for one in found[1:]))


def _compared(found: Found) -> object:
    """Return what must be the same in all places: everything but the number of steps."""
    guards = repr(found.guards)  # in which NaN is NaN
    return found.state, found.policy, {**found.remembered, "steps": 0}, guards


def _nothing(tree: object, dialect: Dialect[...], source: Path) -> CheckpointError:
    known = [other for other in ALL.values() if other.format and _loadable(tree, other)[0]]
    hint = f" Write --from {' or '.join(other.name.lower() for other in known)}." if known else ""
    optimizer = entries_of(entries_of(tree).get("optimizer"))
    if dialect.system.startswith("DeepSpeed") and "loss_scale_optimizer" in optimizer:
        hint = (
            f" preamp.deepspeed saved it, with the loss scale in PyTorch's format.{hint} Hysteresis, "
            "min_scale and the other settings that PyTorch does not save are not in it: they are in the "
            "configuration's fp16 section."
            if known
            else " preamp.deepspeed saved it in a training without a loss scale and without a guard."
        )
    if not known and any("policy_state" in entries_of(node) for _, node in _nodes(tree)):
        hint = (
            " preamp.jax saved it, and its states are not converted. Restore opt_state in JAX, and write "
            "dialects.TORCH.dump(opt_state.policy_state, policy), or that of another dialect, to a file; a "
            "guard starts again there."
        )
    return CheckpointError(f"{source} holds nothing that {dialect.system} saves.{hint}")


def _loadable(tree: object, dialect: Dialect[...]) -> tuple[list[Found], list[Exception]]:
    """Return all states that can be loaded, and the errors of others."""
    found: list[Found] = []
    problems: list[Exception] = []
    visited: list[tuple[str, Mapping[str, Any]]] = []
    for where, node in _nodes(tree):
        try:
            entries = dialect.known_format().find(node)
            if entries is not None and not any(
                entries is other and (not outer or where.startswith(f"{outer}.")) for outer, other in visited
            ):
                visited.append((where, entries))
                state, policy = dialect.load_quietly(entries), dialect.load_policy(entries)
                form = dialect.known_format()
                remembered, guards = form.remembered(entries), form.guards(entries)
                found.append(Found(where or "the top level", state, policy, remembered, guards))
        except (CheckpointError, PolicyError) as problem:
            problems.append(problem)
    return found, problems


def _nodes(tree: object) -> Iterator[tuple[str, Any]]:
    """Yield every node of a tree that has parts, once for each path to it, but its parts only once."""
    todo, visited = [("", tree)], set()
    while todo:
        where, node = todo.pop()
        yield where, node
        if id(node) in visited:
            continue
        visited.add(id(node))
        parts = enumerate(node) if isinstance(node, list | tuple) else entries_of(node).items()
        inside = [
            (f"{where}.{name}".strip("."), part)
            for name, part in parts
            if isinstance(part, Mapping | list | tuple) or entries_of(part)
        ]
        todo.extend(reversed(inside))
