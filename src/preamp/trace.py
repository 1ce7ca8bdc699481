"""What happened, step by step: the record of a run, as JSON lines and as a summary.

This room remembers. It refuses to know who trained what, and draws nothing: figures are in `report`.

The first line of a file describes the run, every other line is one step, or what a lens saw in one. Lines
are written whole, one at a time, so the file of an interrupted run can be read up to its last step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple, overload

from preamp.checks import shown
from preamp.errors import TraceError
from preamp.json_numbers import is_number, to_json
from preamp.looks import Look, look_from_json, look_to_json

__all__ = ["Step", "Summary", "Trace"]

FORMAT = 1


class Step(NamedTuple):
    """One training step.

    Attributes:
        index: 0 for the first step.
        scale: the loss scale that was in this step's loss.
        finite: True when every gradient was finite.
        skipped: True when the update was not applied; with several optimizers, that of any of them.
        new_scale: the scale of the next step; None until the policy has advanced.
        loss: the loss, not scaled.
        grad_norm: global L2 norm of the unscaled gradients.
        peak: the largest finite magnitude among the scaled gradients.
        zeros: the share of gradient entries that are exactly zero, from 0 to 1.
        culprits: names of the parameters whose gradients were not finite, first in backward order.
        seconds: wall time of the step.
        buffers: names of module buffers, such as BatchNorm's running statistics, that were not finite after
            a skipped step.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    scale: float
    finite: bool
    skipped: bool
    new_scale: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    peak: float | None = None
    zeros: float | None = None
    culprits: tuple[str, ...] = ()
    seconds: float | None = None
    buffers: tuple[str, ...] = ()


class Summary(NamedTuple):
    """What a trace comes to. Scales are None for a trace without steps.

    Attributes:
        steps: steps in the trace.
        skipped: steps whose `skipped` is true.
        skip_rate: skipped / steps, 0 without steps.
        longest_streak: the most steps skipped in a row.
        min_scale: the lowest scale that was in a loss, or is next.
        max_scale: the highest such scale.
        final_scale: the scale after the last step.
        growths: times the scale grew.
        backoffs: times the scale was lowered.
    """

    steps: int
    skipped: int
    skip_rate: float
    longest_streak: int
    min_scale: float | None
    max_scale: float | None
    final_scale: float | None
    growths: int
    backoffs: int


class Trace:
    """A list of `Step` that can be called with the next one, so it can be given to any `on_step=`.

    Args:
        steps: steps to begin with.
        path: a file that each step is written to as it is recorded.
        mode: what to do with a file that is there. "new" refuses it, so that no record is lost by
            starting again; "append" reads it and goes on, described as it was; "replace" forgets it.
        **about: anything JSON can hold that describes the run; the first line of the file.

    Attributes:
        about: what describes the run.
        looks: what a lens saw, on the steps that it sampled.
        stopped: why the run ended before its time, or None.

    Raises:
        TraceError: if the file cannot be gone on with.

    >>> trace = Trace(policy="Static(2.0)")
    >>> trace(Step(index=0, scale=2.0, finite=True, skipped=False))
    >>> trace.summary().steps
    1
    """

    def __init__(
        self,
        steps: Iterable[Step] = (),
        *,
        path: str | Path | None = None,
        mode: Literal["new", "append", "replace"] = "new",
        **about: Any,
    ) -> None:
        self._rows: list[tuple[Any, ...]] = []  # plain tuples: the garbage collector can forget them
        self.looks: list[Look] = []
        self.about: dict[str, Any] = about
        self.stopped: str | None = None
        self._file = None if path is None else self._open(Path(path), mode)
        for step in steps:
            self(step)

    def __call__(self, step: Step) -> None:
        """Record a step, and write it if the trace has a file.

        Raises:
            TypeError: for a step that holds something else than numbers, if the trace has a file.
        """
        if self._file is not None:
            self._file.write(_line(_as_json(step)))
        self._rows.append(tuple(step))

    def extend(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Record many steps given as plain tuples, in the order of `Step`'s fields."""
        if self._file is None:
            self._rows.extend(rows)
            return
        for row in rows:
            self(Step._make(row))

    def look(self, look: Look) -> None:
        """Record what a lens saw: `Lens(model, on_look=trace.look)`. It is written if the trace has a file.

        Raises:
            TraceError: for a look that could not be read back.
        """
        line = _line({"look": look_to_json(look)})
        if self._file is not None:
            self._file.write(line)
        self.looks.append(look)

    def _open(self, path: Path, mode: str) -> IO[str]:
        """Open the file to write whole lines to it; nothing is lost if this fails."""
        if mode not in ("new", "append", "replace"):
            raise TraceError(f"mode={mode!r} is unknown. Write mode='new', 'append' or 'replace'.")
        is_there = path.exists() and path.stat().st_size > 0
        if is_there and mode == "new":
            raise TraceError(
                f"{path} is there already. Write mode='append' to go on with it, mode='replace' to lose it."
            )
        if is_there and mode == "append":
            before = Trace.read(path)
            self._rows, self.looks, self.about = before._rows, before.looks, before.about
            _end_last_line(path)
            return path.open("a", encoding="utf-8", buffering=1)
        head = _head(self.about)
        file = path.open("w", encoding="utf-8", buffering=1)  # line buffered: whole lines reach the file
        file.write(head)
        return file

    def __iter__(self) -> Iterator[Step]:
        return map(Step._make, self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...

    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        rows = self._rows[index]
        return list(map(Step._make, rows)) if isinstance(index, slice) else Step._make(rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and list(self._lines()) == list(other._lines())

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # a trace changes while it is recorded

    def __repr__(self) -> str:
        about = "".join(f", {key}={value!r}" for key, value in self.about.items())
        return f"Trace({len(self)} steps{about})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: everything but the open file, which has one owner."""
        return {**self.__dict__, "_file": None}

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self, reason: str) -> None:
        """Note why the run ends before its time."""
        self.stopped = reason
        if self._file is not None:
            self._file.write(_line({"stopped": reason}))

    def close(self) -> None:
        """Close the file, if there is one. Nothing is lost without it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, path: str | Path) -> None:
        """Write the whole trace to a file of JSON lines."""
        lines = list(self._lines())
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(lines)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a file of JSON lines. A last line that was not written to its end is left out.

        Raises:
            TraceError: naming the line that cannot be read and why.
            OSError: if there is no such file.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            number = error.object[: error.start].count(b"\n") + 1
            raise TraceError(f"{path}, line {number}: not text ({error.reason}), so not a trace.") from error
        *lines, last = text.split("\n")
        if not lines or (last and _is_whole(last)):
            lines.append(last)
        trace = cls()
        trace.about = _about(path, lines[0])  # not as arguments: a file must not say what is opened
        for number, line in enumerate(lines[1:], start=2):
            entry = _parse(path, number, line)
            if set(entry) == {"stopped"} and isinstance(entry["stopped"], str):
                trace.stopped = entry["stopped"]
            elif set(entry) == {"look"}:
                trace.looks.append(_as_look(path, number, entry["look"]))
            else:
                trace(_as_step(path, number, entry))
                trace.stopped = None  # it went on
        return trace

    def summary(self) -> Summary:
        """Count steps, skips and moves of the scale."""
        skipped = longest = streak = growths = backoffs = 0
        scales = self._scales()
        for step, after in zip(self, scales[1:], strict=False):
            streak = streak + 1 if step.skipped else 0
            longest, skipped = max(longest, streak), skipped + step.skipped
            growths, backoffs = growths + (after > step.scale), backoffs + (after < step.scale)
        return Summary(
            steps=len(self),
            skipped=skipped,
            skip_rate=skipped / len(self) if len(self) else 0.0,
            longest_streak=longest,
            min_scale=min(scales, default=None),
            max_scale=max(scales, default=None),
            final_scale=scales[-1] if scales else None,
            growths=growths,
            backoffs=backoffs,
        )

    def _lines(self) -> Iterator[str]:
        """Return the lines of the file that holds this trace."""
        yield _head(self.about)
        yield from (_line(_as_json(step)) for step in self)
        yield from (_line({"look": look_to_json(look)}) for look in self.looks)
        if self.stopped is not None:
            yield _line({"stopped": self.stopped})

    def _scales(self) -> list[float]:
        """Return the scale of every step and, last, the one after it."""
        scales = [step.scale for step in self]
        last = self[-1] if scales else None
        return [*scales, last.scale if last.new_scale is None else last.new_scale] if last else []


def _head(about: dict[str, Any]) -> str:
    if "preamp_trace" in about:
        raise TraceError("preamp_trace is how a trace's first line begins. Write another name.")
    return _line({"preamp_trace": FORMAT, **about})


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"


def _as_json(step: Step) -> dict[str, Any]:
    """Return what a step holds as JSON's own numbers, so that scalars of any framework can be recorded."""
    entry = {name: _plain(name, value) for name, value in step._asdict().items() if value is not None}
    return {name: value for name, value in entry.items() if name not in _NAMES or value}


def _plain(name: str, value: Any) -> Any:
    try:
        plain = _TYPES.get(name, float)(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"a step's {name} is {value!r}, which is not a number: {error}.") from error
    return to_json(plain)


def _about(path: str | Path, line: str) -> dict[str, Any]:
    with suppress(TraceError):
        about = _parse(path, 1, line)
        if about.pop("preamp_trace", None) == FORMAT:
            return about
    found = repr(line[:40]) if line else "nothing"
    raise TraceError(
        f'{path}, line 1: found {found}, but a trace of this release begins with {{"preamp_trace": {FORMAT}'
    )


def _is_whole(line: str) -> bool:
    """Return whether a line without an end was written to its end: no part of an object in braces is JSON."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _end_last_line(path: Path) -> None:
    """Make the last line of a file that could be read a whole one, or take it away."""
    with path.open("rb+") as file:
        before, newline, last = file.read().rpartition(b"\n")
        if last and _is_whole(last.decode()):
            file.write(b"\n")
        else:
            file.truncate(len(before + newline))


def _parse(path: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise TraceError(f"{path}, line {number}: not JSON ({reason}).") from error
    if not isinstance(entry, dict):
        raise TraceError(f"{path}, line {number}: expected an object in braces, found {line[:40]!r}.")
    return entry


def _as_step(path: str | Path, number: int, entry: dict[str, Any]) -> Step:
    problem = _problem(entry)
    if problem:
        raise TraceError(f"{path}, line {number}: {problem}.")
    values: dict[str, Any] = {
        name: float(value) if name in _NUMBERS else value for name, value in entry.items()
    }
    return Step(**{**values, **{name: tuple(entry.get(name, ())) for name in _NAMES}})


def _as_look(path: str | Path, number: int, entry: Any) -> Look:
    try:
        return look_from_json(entry)
    except TraceError as error:
        raise TraceError(f"{path}, line {number}: {error}.") from error


_TYPES: dict[str, Any] = {"index": int, "finite": bool, "skipped": bool, "culprits": list, "buffers": list}
_NAMES = ("culprits", "buffers")
_NUMBERS = ("scale", "new_scale", "loss", "grad_norm", "peak", "zeros", "seconds")
_REQUIRED = ("index", "scale", "finite", "skipped")


def _problem(entry: dict[str, Any]) -> str:
    """Say what is wrong with a step's line, or nothing."""
    missing = [name for name in _REQUIRED if name not in entry]
    unknown = [name for name in entry if name not in Step._fields]
    if missing or unknown:
        return f"a step without {', '.join(missing)}" if missing else f"unknown entry {shown(unknown[0])}"
    for name, value in entry.items():
        if name in _NUMBERS and not is_number(value):
            return f"{name} is {shown(value)}, not a number"
        if name in ("finite", "skipped") and not isinstance(value, bool):
            return f"{name} is {shown(value)}, neither true nor false"
    if not (isinstance(entry["index"], int) and is_number(entry["index"])):
        return f"index is {shown(entry['index'])}, not a whole number"
    culprits = entry.get("culprits", [])
    if not (isinstance(culprits, list) and all(isinstance(name, str) for name in culprits)):
        return f"culprits is {shown(culprits)}, not a list of names"
    return ""
