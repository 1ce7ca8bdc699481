"""The lines of a trace file: what describes the run first, then a step, a look or an event on each.

A step becomes a row of `StepColumns`, and a line of JSON.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from os import fstat
from pathlib import Path
from typing import Any, TypeAlias

from preamp.checks import shown
from preamp.errors import TraceError
from preamp.record.columns import FIELDS
from preamp.record.files import packed_as
from preamp.record.json_numbers import is_number, to_json

FORMAT = 1
NUMBERS = ("scale", "new_scale", "loss", "grad_norm", "peak", "zeros", "seconds")
REQUIRED = ("index", "scale", "finite", "skipped")
NAMES = ("culprits", "buffers")
PLAIN = frozenset((float, type(None)))
MEBIBYTE = 2**20
Row: TypeAlias = tuple[Any, ...]


def line_of(entry: dict[str, Any]) -> str:
    """Return an entry as a line, with its end."""
    return _encode(entry) + "\n"


def head_line(about: dict[str, Any]) -> str:
    """Return the first line of a file.

    Raises:
        TraceError: for what could not be read back.
    """
    if "preamp_trace" in about:
        raise TraceError("preamp_trace is how a trace's first line begins. Write another name.")
    for name, value in about.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TraceError(
                f"{name}={shown(value)} is not something JSON can hold ({error}). Write {name}=repr(...)."
            ) from error
    return line_of({"preamp_trace": FORMAT, **about})


def step_line(row: Row) -> str:
    """Return the line of a step, without what is None or empty."""
    named = zip(FIELDS, row, strict=True)
    return line_of({name: to_json(value) for name, value in named if value is not None and value != ()})


def row_of(step: tuple[Any, ...]) -> Row:
    """Return a step as Python's own numbers, which may be scalars of any framework.

    Raises:
        TypeError: for something that is not a number, or not a name.
        TraceError: for an index or a scale that no step has.
    """
    index, scale, finite, skipped, *rest = step
    if (
        type(index) is int
        and type(scale) is float
        and index >= 0
        and scale >= 0.0
        and type(finite) is bool is type(skipped)
        and rest[5] == () == rest[7]
        and PLAIN.issuperset(map(type, rest[:5]))
        and PLAIN.issuperset((type(rest[6]),))
        and (rest[0] is None or rest[0] >= 0.0)
    ):  # as nearly always
        return tuple(step)
    row = tuple(
        None if value is None and name not in REQUIRED else _plain(name, value)
        for name, value in zip(FIELDS, step, strict=True)
    )
    problem = _impossible(row)
    if problem:
        raise TraceError(f"a step's {problem}.")
    return row


def _impossible(row: Row) -> str:
    """Say which number of a row no step can have, or nothing.

    A scale of 0 or inf is possible: a policy without a floor or a ceiling gets there.
    """
    index, scale, _, _, new_scale, *_ = row
    if index < 0:
        return f"index is {index}, but the first step has index 0"
    for name, value in (("scale", scale), ("new_scale", new_scale)):
        if value is not None and not value >= 0.0:  # NaN too
            return f"{name} is {value}, but a loss scale is 0 or above"
    return ""


def _plain(name: str, value: Any) -> Any:
    if name in NAMES:
        names = value if type(value) is tuple else tuple(value) if isinstance(value, list) else None
        if names is None or not all(isinstance(one, str) for one in names):
            raise TypeError(f"a step's {name} is {shown(value)}, which is not a tuple of names.")
        return names
    try:
        return _TYPES.get(name, float)(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"a step's {name} is {shown(value)}, which is not a number: {error}.") from error


def _whole(value: Any) -> int:
    with suppress(TypeError):
        return operator.index(value)
    number = int(value)
    if number != value:
        raise ValueError("it is not whole")
    return number


_TYPES: dict[str, Callable[[Any], Any]] = {"index": _whole, "finite": bool, "skipped": bool}


def entries(
    path: str | Path, progress: Callable[[int, int], object] | None = None
) -> Iterator[tuple[int, str]]:
    """Return the number and the text of each line, one at a time.

    A last line that was not written to its end is left out, and so are blank lines at the end. The first line
    is always there.

    Args:
        path: the file.
        progress: called with the bytes read so far and the size of the file, after every mebibyte and last.

    Raises:
        TraceError: for a line that is not text.
        OSError: for a file that cannot be read.
    """
    number = done = told = 0
    blank = 0  # the first of the blank lines that may be at the end
    with Path(path).open("rb") as file:
        size = fstat(file.fileno()).st_size
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                reason = f"{path}, line {number}: not text ({error.reason}), so not a trace."
                packed = packed_as(path, line[:8]) if number == 1 else ""
                raise TraceError(packed or reason) from error
            if number > 1 and not text.strip():
                blank = blank or number
            elif blank:
                yield blank, ""  # which is refused: a gap in the middle is not what a trace writes
            elif text.endswith("\n"):
                yield number, text[:-1]
            elif number == 1 or is_whole(text):
                yield number, text
            done += len(line)
            if progress is not None and done - told >= MEBIBYTE:
                told = done
                progress(done, max(size, done))
    if number == 0:
        yield 1, ""
    if progress is not None:
        progress(done, done)


def is_whole(line: str) -> bool:
    """Return whether a line without an end was written to its end: no part of an object in braces is JSON."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def parse(path: str | Path, number: int, line: str) -> dict[str, Any]:
    """Return what a line holds.

    Raises:
        TraceError: for what is not an object of JSON.
    """
    try:
        text = line.strip()
        entry, end = _decode(text)
        if end != len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise TraceError(f"{path}, line {number}: not JSON ({reason}).") from error
    if not isinstance(entry, dict):
        raise TraceError(f"{path}, line {number}: expected an object in braces, found {line[:40]!r}.")
    return entry


def _refuse(constant: str) -> None:
    word = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[constant]
    raise ValueError(f'{constant} is not a number of JSON; a trace has "{word}" in quotes')


_encode = json.JSONEncoder(allow_nan=False).encode
_decode = json.JSONDecoder(parse_constant=_refuse).raw_decode


def about_of(path: str | Path, line: str) -> dict[str, Any]:
    """Return what the first line of a file says of the run.

    Raises:
        TraceError: for a line that no trace of this release begins with.
    """
    with suppress(TraceError):
        about = parse(path, 1, line)
        if about.pop("preamp_trace", None) == FORMAT:
            return about
    found = repr(line[:40]) if line else "nothing"
    raise TraceError(
        f'{path}, line 1: found {found}, but a trace of this release begins with {{"preamp_trace": {FORMAT}'
    )


def row_of_entry(path: str | Path, number: int, entry: dict[str, Any]) -> Row:
    """Return the row of a step's line.

    Raises:
        TraceError: naming the line and what is wrong with it.
    """
    values = tuple(map(entry.get, FIELDS))
    index, scale, finite, skipped, *rest = values
    if not (
        type(index) is int
        and abs(index) < 2**63
        and type(scale) is float
        and (finite is True or finite is False)
        and (skipped is True or skipped is False)
        and len(entry) == 12 - values.count(None)  # nothing unknown and no null
        and values[9] is None is values[11]
        and PLAIN.issuperset(map(type, rest))
        and index >= 0
        and scale >= 0.0
        and (rest[0] is None or rest[0] >= 0.0)
    ):  # the slow way, for what is rare
        problem = _problem(entry)
        if problem:
            raise TraceError(f"{path}, line {number}: {problem}.")
        numbers = {name: float(entry[name]) for name in NUMBERS if name in entry}
        names = {name: tuple(entry.get(name, ())) for name in NAMES}
        row = tuple(map({**entry, **numbers, **names}.get, FIELDS))
        problem = _impossible(row)
        if problem:
            raise TraceError(f"{path}, line {number}: {problem}.")
        return row
    return (*values[:9], (), values[10], ())


def _problem(entry: dict[str, Any]) -> str:
    """Say what is wrong with a step's line, or nothing."""
    missing = [name for name in REQUIRED if name not in entry]
    unknown = [name for name in entry if name not in FIELDS]
    if missing or unknown:
        return f"a step without {', '.join(missing)}" if missing else f"unknown entry {shown(unknown[0])}"
    for name, value in entry.items():
        if name in NUMBERS and not is_number(value):
            return f"{name} is {shown(value)}, not a number"
        if name in ("finite", "skipped") and not isinstance(value, bool):
            return f"{name} is {shown(value)}, neither true nor false"
        if name in NAMES and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            return f"{name} is {shown(value)}, not a list of names"
    if not (isinstance(entry["index"], int) and is_number(entry["index"])):
        return f"index is {shown(entry['index'])}, not a whole number"
    return ""
