"""The lines of a trace file: a description of the run first, then a step, a snapshot or an event on each.

Each line is an object of JSON. JSON has no infinities and no NaN: they are written as words, such as "inf".
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import fstat
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from preamp.checks import shown
from preamp.errors import TraceError
from preamp.recipes.values import FORMATS, PRODUCTS, Operand
from preamp.record.columns import FIELDS, NAMES
from preamp.record.exponents import BANDS, ExponentHistogram
from preamp.record.files import packed_as
from preamp.record.snapshots import COMPUTED, Kind, QuantizedRow, Snapshot, SnapshotRow
from preamp.scaling import Spike

FORMAT = 1
GIVEN: dict[str, Kind] = {"inputs": "input", "weights": "weight"}  # the optional lists of a snapshot's rows
QUANTIZED: dict[str, Any] = {"name": str, "product": str, "operand": str, "format": str, "values": int}
NUMBERS_OF_QUANTIZED = ("flushed", "saturated", "sqnr")
QUANTIZED |= dict.fromkeys(NUMBERS_OF_QUANTIZED, (int, float, str))
WORDS = {"product": PRODUCTS, "operand": get_args(Operand), "format": tuple(FORMATS)}
EXACT: dict[str, Any] = {"smallest": (int, float), "largest": (int, float), "nans": int}
KEYS = tuple("peak" if name == "amax" else name for name in FIELDS)  # in files: "peak" since 0.1
NUMBERS = ("scale", "new_scale", "loss", "grad_norm", "peak", "zeros", "seconds")
SPIKE = FIELDS.index("spike")
REQUIRED = ("index", "scale", "finite", "skipped")
SERIES = ("loss", "grad_norm")  # a guard looks at
PLAIN = frozenset((float, type(None)))
MEBIBYTE = 2**20
Row: TypeAlias = tuple[Any, ...]
T = TypeVar("T")


def line_of(entry: dict[str, Any]) -> str:
    """Return an entry as a line, with its end."""
    return _encode(entry) + "\n"


def head_line(about: dict[str, Any]) -> str:
    """Return the first line of a file."""
    if "preamp_trace" in about:
        raise TraceError("a trace's first line begins with preamp_trace. Write another name.")
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
    named = zip(KEYS, row, strict=True)
    entry = {name: to_json(value) for name, value in named if value is not None and value != ()}
    if (spike := row[SPIKE]) is not None:
        entry["spike"] = {name: to_json(value) for name, value in spike._asdict().items()}
    return line_of(entry)


def row_of(step: tuple[Any, ...]) -> Row:
    """Return a step, whose numbers may be scalars of any framework, as Python's own numbers.

    Raises:
        TypeError: for something that is not a number, or not a name.
        TraceError: for an index or a scale that no step has.
    """
    index, scale, finite, skipped, *rest = step
    if (  # the fast path: nearly every step is of Python's own types already
        type(index) is int
        and type(scale) is float
        and index >= 0
        and scale >= 0.0
        and type(finite) is bool is type(skipped)
        and rest[5] == () == rest[7]
        and rest[8] is None
        and rest[9] == () == rest[10]
        and PLAIN.issuperset(map(type, rest[:5]))
        and PLAIN.issuperset((type(rest[6]),))
        and (rest[0] is None or rest[0] >= 0.0)
    ):
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
    """Return a message about a number that no step can have, or "".

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
    """Return a value of a step as Python's own type."""
    if name in NAMES:
        names = value if type(value) is tuple else tuple(value) if isinstance(value, list) else None
        if names is None or not all(isinstance(one, str) for one in names):
            raise TypeError(f"a step's {name} is {shown(value)}, which is not a tuple of names.")
        return names
    if name == "spike":
        if not (isinstance(value, tuple) and len(value) == 3 and value[0] in SERIES):
            raise TypeError(f"a step's spike is {shown(value)}, which is not a Spike(of, value, limit).")
        return Spike(value[0], float(value[1]), float(value[2]))
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
    """Yield the number and the text of each line.

    A last line that is incomplete is left out, and so are blank lines at the end. The first line is always
    there: of an empty file it is "".

    Args:
        path: the file.
        progress: called with the bytes read so far and the size of the file, after every mebibyte and last.
    """
    number = done = reported = 0
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
                yield blank, ""  # `parse` refuses it: a trace never writes blank lines in the middle
            elif text.endswith("\n"):
                yield number, text[:-1]
            elif number == 1 or is_whole(text):
                yield number, text
            done += len(line)
            if progress is not None and done - reported >= MEBIBYTE:
                reported = done
                progress(done, max(size, done))
    if number == 0:
        yield 1, ""
    if progress is not None:
        progress(done, done)


def is_whole(line: str) -> bool:
    """Return whether a line without a newline is complete: no part of an object in braces is valid JSON."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def parse(path: str | Path, number: int, line: str) -> dict[str, Any]:
    """Return the JSON object of a line."""
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
    """Return the description of the run in the first line of a file."""
    with suppress(TraceError):
        about = parse(path, 1, line)
        if about.pop("preamp_trace", None) == FORMAT:
            return about
    found = repr(line[:40]) if line else "nothing"
    raise TraceError(
        f'{path}, line 1: found {found}, but a trace of this release begins with {{"preamp_trace": {FORMAT}'
    )


def row_of_entry(path: str | Path, number: int, entry: dict[str, Any]) -> Row:
    """Return the row of a step's line."""
    values = tuple(map(entry.get, KEYS))
    index, scale, finite, skipped, *rest = values
    if not (  # what nearly every line holds needs no further check
        type(index) is int
        and abs(index) < 2**63
        and type(scale) is float
        and (finite is True or finite is False)
        and (skipped is True or skipped is False)
        and len(entry) == len(FIELDS) - values.count(None)  # nothing unknown and no null
        and values[9] is None is values[11]
        and values[12] is None is values[13]
        and values[14] is None
        and PLAIN.issuperset(map(type, rest))
        and index >= 0
        and scale >= 0.0
        and (rest[0] is None or rest[0] >= 0.0)
    ):
        problem = _problem(entry)
        if problem:
            raise TraceError(f"{path}, line {number}: {problem}.")
        numbers = {name: float(entry[name]) for name in NUMBERS if name in entry}
        names = {name: tuple(entry.get(name, ())) for name in NAMES}
        spike = _spike(entry["spike"]) if "spike" in entry else None
        row = tuple(map({**entry, **numbers, **names, "spike": spike}.get, KEYS))
        problem = _impossible(row)
        if problem:
            raise TraceError(f"{path}, line {number}: {problem}.")
        return row
    return (*values[:9], (), values[10], (), None, (), ())


def _problem(entry: dict[str, Any]) -> str:
    """Return a message about what is wrong with a step's line, or ""."""
    missing = [name for name in REQUIRED if name not in entry]
    unknown = [name for name in entry if name not in KEYS]
    if missing or unknown:
        return f"a step without {', '.join(missing)}" if missing else f"unknown entry {shown(unknown[0])}"
    for name, value in entry.items():
        if name in NUMBERS and not is_number(value):
            return f"{name} is {shown(value)}, not a number"
        if name in ("finite", "skipped") and not isinstance(value, bool):
            return f"{name} is {shown(value)}, neither true nor false"
        if name in NAMES and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            return f"{name} is {shown(value)}, not a list of names"
        if name == "spike" and not _is_spike(value):
            return f"spike is {shown(value)}, not an object with of, value and limit"
    if not (isinstance(entry["index"], int) and is_number(entry["index"])):
        return f"index is {shown(entry['index'])}, not a whole number"
    return ""


def _is_spike(value: object) -> bool:
    if not (isinstance(value, dict) and set(value) == set(Spike._fields) and value["of"] in SERIES):
        return False
    return is_number(value["value"]) and is_number(value["limit"])


def _spike(entry: dict[str, Any]) -> Spike:
    return Spike(entry["of"], float(entry["value"]), float(entry["limit"]))


def snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as an object of JSON, without the fields that are None."""
    entry = {
        "index": int(snapshot.index),
        "scale": to_json(float(snapshot.scale)),
        "low_dtype": snapshot.low_dtype,
        "rows": list(map(_row_to_json, snapshot.rows)),
        **{name: list(map(_row_to_json, rows)) for name in GIVEN if (rows := getattr(snapshot, name))},
    }
    if snapshot.quantized:
        entry["quantized"] = [
            {name: to_json(value) for name, value in row._asdict().items()} for row in snapshot.quantized
        ]
    snapshot_from_json(entry)
    return entry


def _row_to_json(row: SnapshotRow) -> dict[str, Any]:
    known = {name: getattr(row, name) for name in EXACT if getattr(row, name) is not None}
    return {"name": row.name, "what": row.what, "dtype": row.dtype, **row.histogram.to_json(), **known}


def snapshot_from_json(entry: Any) -> Snapshot:
    """Return the snapshot from the object that `snapshot_to_json` made of it."""
    types = {"index": int, "scale": (int, float, str), "low_dtype": str, "rows": list}
    values = _fields(entry, "a snapshot", types, dict.fromkeys((*GIVEN, "quantized"), list))
    if not (is_number(values["index"]) and is_number(values["scale"])):
        raise TraceError(f"index or scale of a snapshot is not a number: {values['scale']!r:.60}")
    if values["low_dtype"] not in BANDS:
        raise TraceError(f"low_dtype is {values['low_dtype']!r:.60}, not one of {', '.join(BANDS)}")
    rows = {"rows": _rows(values["rows"], COMPUTED)}
    rows |= {name: _rows(values[name], (kind,)) for name, kind in GIVEN.items() if name in values}
    quantized = tuple(map(_quantized_row, values.get("quantized", ())))
    return Snapshot(**{**values, "scale": float(values["scale"]), **rows, "quantized": quantized})


def _rows(entries: list[Any], kinds: Sequence[Kind]) -> tuple[SnapshotRow, ...]:
    return tuple(_row(entry, kinds) for entry in entries)


def _row(entry: Any, kinds: Sequence[Kind]) -> SnapshotRow:
    rest = {"low": int, "counts": list, "zeros": int, "nonfinite": int}
    values = _fields(entry, "a snapshot's row", {"name": str, "what": str, "dtype": str, **rest}, EXACT)
    if values["what"] not in kinds:
        raise TraceError(f"what is {values['what']!r:.60}, not one of {', '.join(kinds)}")
    histogram = ExponentHistogram.from_json(values)
    exact = {name: values[name] for name in EXACT if name in values}
    for name in ("smallest", "largest"):
        if name in exact:
            if not (is_number(exact[name]) and 0.0 < exact[name] < math.inf):
                raise TraceError(f"{name} of a snapshot's row is {exact[name]!r:.60}, not a number above 0")
            exact[name] = float(exact[name])
    if not 0 <= exact.get("nans", 0) <= histogram.nonfinite:
        raise TraceError(f"nans of a snapshot's row is {exact['nans']!r:.60}, not from 0 to nonfinite")
    return SnapshotRow(values["name"], values["what"], values["dtype"], histogram, **exact)


def _quantized_row(entry: Any) -> QuantizedRow:
    values = _fields(entry, "a quantized operand", QUANTIZED, {})
    numbers = {name: values[name] for name in NUMBERS_OF_QUANTIZED}
    fits = {name: values[name] in words for name, words in WORDS.items()}
    fits |= {name: is_number(number) for name, number in numbers.items()}
    fits |= {name: fits[name] and 0.0 <= float(numbers[name]) <= 1.0 for name in ("flushed", "saturated")}
    fits["values"] = 0 <= values["values"] < 2**63
    for name, is_fit in fits.items():
        if not is_fit:
            raise TraceError(f"{name} of a quantized operand is {values[name]!r:.60}, which is not valid")
    return QuantizedRow(**{**values, **{name: float(number) for name, number in numbers.items()}})


def _fields(entry: Any, place: str, types: Mapping[str, Any], optional: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry after checking that it has all required fields, no unknown ones, and these types."""
    if not isinstance(entry, dict):
        raise TraceError(f"{place} is {entry!r:.60}, not an object in braces")
    known = {**types, **optional}
    missing = [name for name in types if name not in entry]
    unknown = [name for name in entry if name not in known]
    if missing or unknown:
        raise TraceError(f"{place} without {missing[0]}" if missing else f"unknown entry {unknown[0]!r:.60}")
    for name, value in entry.items():
        if isinstance(value, bool) or not isinstance(value, known[name]):
            raise TraceError(f"{name} of {place} is {value!r:.60}, which is not valid")
    return entry


def to_json(value: T) -> T | str:
    """Return a value with inf and NaN as words."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_number(value: object) -> bool:
    """Return whether a value that was read can be converted to a float."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1023  # beyond, there is no float
    return isinstance(value, float) or value in ("inf", "-inf", "nan")
