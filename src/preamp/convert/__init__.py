"""A saved loss scale from one system's checkpoint file to another's.

This room finds the one state in a file that a dialect can load, and has another write it. It refuses to know
entries (`formats`) and rules (`dialects`). Nothing in a file is ever executed: `reading` says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from preamp.convert.reading import read
from preamp.convert.searching import find
from preamp.convert.writing import check_name, write
from preamp.dialect import Dialect
from preamp.policy import Policy

__all__ = ["Conversion", "convert"]


class Conversion(NamedTuple):
    """What came of a conversion.

    Attributes:
        where: the place in the file where the state was found.
        state: the state that was carried over.
        policy: the policy that was saved with it, the origin's defaults for what was not.
        lost: what the target's format has no place for, in words.
        extras: what preamp's own adapter had saved beside the origin's entries, such as the counts of a
            policy that the origin does not have, and what was written again.
    """

    where: str
    state: Any
    policy: Policy[Any]
    lost: list[str]
    extras: dict[str, Any]


def convert(source: Path, origin: Dialect[...], out: Path, target: Dialect[...]) -> Conversion:
    """Read a loss scale as one system saved it and write it as another loads it.

    Args:
        source: a checkpoint file, or the folder of a DeepSpeed checkpoint, or the prefix of a TensorFlow one.
            The state may lie anywhere in it.
        origin: the dialect that saved it.
        out: the file to write, `.pt`, `.json` or `.msgpack`, which must not exist.
        target: the dialect that is to load it.

    Raises:
        CheckpointError: for a file that cannot be read, or holds no such state, or several.
        PolicyError: for a rule that the target does not have.
        UsageError: for an `out` that exists, or has another suffix.
        MissingExtra: if the library that reads or writes such files is absent.
        OSError: for a file that cannot be opened or written.
    """
    check_name(out)
    where, state, policy, extras = find(read(source), origin, source)
    kept = extras if type(origin.format) is type(target.format) else {}
    entries, lost = target.dump_and_tell(state, policy, kept)
    write(out, entries, target)
    return Conversion(where, state, policy, lost + _named(extras if not kept else {}), kept)


def _named(extras: Mapping[str, Any]) -> list[str]:
    """Name what preamp itself saved and the target does not have. A count of 0 is what it begins with."""
    return [_name(name, value) for name, value in extras.items() if value]


def _name(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{name}={value!r}"
    return f"{name} ({', '.join(_name(part, held) for part, held in value.items() if held)})"
