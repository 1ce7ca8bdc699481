"""What happened, step by step: the record of a run, as JSON lines and as a summary.

This room remembers. It refuses to know who trained what, and draws nothing: figures are in `report`.

The first line of a file describes the run, every other line is one step, or what a lens saw in one. Lines
are written whole, one at a time, so the file of an interrupted run can be read up to its last step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple, overload

from preamp.columns import FIELDS, StepColumns
from preamp.errors import TraceError
from preamp.looks import Look, look_from_json, look_to_json
from preamp.trace_lines import (
    about_of,
    entries,
    head_line,
    is_whole,
    line_of,
    parse,
    row_of,
    row_of_entry,
    step_line,
)

__all__ = ["Step", "Summary", "Trace"]


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
        resumed: the steps at which the run was loaded from an older checkpoint, in the order it happened.
            What was lost there is not counted.
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
    resumed: tuple[int, ...] = ()


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
        resumed: the index of every step that did not follow the one before it: there the run was loaded from
            an older checkpoint, and the steps it went through again have replaced those it lost.

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
        self._columns = StepColumns()
        self.looks: list[Look] = []
        self.about: dict[str, Any] = about
        self.stopped: str | None = None
        self.resumed: list[int] = []
        self._looks_before = 0  # how many of the looks came before the last step
        self._file = None if path is None else self._open(Path(path), mode)
        for step in steps:
            self(step)

    def __call__(self, step: Step) -> None:
        """Record a step, and write it if the trace has a file.

        Raises:
            TypeError: for a step that holds something other than numbers and names.
        """
        row = row_of(step)
        if self._file is not None:
            self._file.write(step_line(row))
        self._record(row)
        self.stopped = None  # it went on

    def extend(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Record many steps given as plain tuples, in the order of `Step`'s fields."""
        for row in rows:
            self(Step(*row))

    def _record(self, row: tuple[Any, ...]) -> None:
        """Keep a row in memory, instead of what a run that was resumed there had done before."""
        index, columns = row[0], self._columns
        if columns and index <= columns.index[-1]:
            self.resumed.append(index)
            columns.truncate(columns.place_of(index))
            self._forget_looks(index)
        columns.append(row)
        self._looks_before = len(self.looks)

    def _forget_looks(self, index: int) -> None:
        """Drop the looks at steps that were lost; a lens looks at a step before it is recorded."""
        kept = [look for look in self.looks[: self._looks_before] if look.index < index]
        for look in self.looks[self._looks_before :]:
            while kept and kept[-1].index > look.index:
                kept.pop()
            kept.append(look)
        self.looks[:] = kept

    def look(self, look: Look) -> None:
        """Record what a lens saw: `Lens(model, on_look=trace.look)`. It is written if the trace has a file.

        Raises:
            TraceError: for a look that could not be read back.
        """
        line = line_of({"look": look_to_json(look)})
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
            self.__dict__.update(before.__dict__)
            _end_last_line(path)
            return path.open("a", encoding="utf-8", buffering=1)
        head = head_line(self.about)
        file = path.open("w", encoding="utf-8", buffering=1)  # line buffered: whole lines reach the file
        file.write(head)
        return file

    def __iter__(self) -> Iterator[Step]:
        return map(Step._make, self._columns.rows())

    def __len__(self) -> int:
        return len(self._columns)

    def column(self, name: str) -> Iterator[Any]:
        """Return one field of every step, which is quicker and smaller than whole steps.

        Args:
            name: a field of `Step`.

        Raises:
            TraceError: for a name that `Step` does not have.

        >>> trace = Trace([Step(index=0, scale=2.0, finite=True, skipped=False, loss=0.5)])
        >>> list(trace.column("loss"))
        [0.5]
        """
        if name not in FIELDS:
            raise TraceError(f"column({name!r}): a step has no such field. Write one of {', '.join(FIELDS)}.")
        return self._columns.values(name)

    @overload
    def __getitem__(self, index: int) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...

    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if isinstance(index, slice):
            return [Step._make(self._columns.row(place)) for place in range(len(self))[index]]
        return Step._make(self._columns.row(range(len(self))[index]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip_longest(self._lines(), other._lines()))

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
            self._file.write(line_of({"stopped": reason}))

    def close(self) -> None:
        """Close the file, if there is one. Nothing is lost without it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, path: str | Path) -> None:
        """Write the whole trace to a file of JSON lines."""
        head_line(self.about)  # what cannot be written is refused before the file is touched
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(self._lines())

    @classmethod
    def read(cls, path: str | Path, progress: Callable[[int, int], object] | None = None) -> Trace:
        """Read a file of JSON lines. A last line that was not written to its end is left out.

        Where the index of a step is not above the one before it, the run was resumed from an older
        checkpoint: later lines replace those of the steps that were lost.

        Args:
            path: the file.
            progress: called now and then with the bytes read so far and the size of the file.

        Raises:
            TraceError: naming the line that cannot be read and why.
            OSError: if there is no such file.
        """
        lines = entries(path, progress)
        trace = cls()
        trace.about = about_of(path, next(lines)[1])  # not as arguments: a file must not say what is opened
        for number, line in lines:
            entry = parse(path, number, line)
            if "index" in entry or len(entry) != 1:
                trace._record(row_of_entry(path, number, entry))
                trace.stopped = None  # it went on
            else:
                trace._note(path, number, entry)
        return trace

    def _note(self, path: str | Path, number: int, entry: dict[str, Any]) -> None:
        """Keep what a line that is not a step says."""
        ((name, value),) = entry.items()
        if name == "stopped" and isinstance(value, str):
            self.stopped = value
        elif name == "look":
            self.looks.append(_as_look(path, number, value))
        elif name == "resumed" and type(value) is int:
            self.resumed.append(value)
        else:
            row_of_entry(path, number, entry)  # which says what is wrong with it

    def summary(self) -> Summary:
        """Count steps, skips and moves of the scale."""
        skipped = longest = streak = growths = backoffs = 0
        low, high, before = math.inf, -math.inf, math.nan
        for skip, scale in zip(chain(self.column("skipped"), (False,)), self._scales(), strict=False):
            growths, backoffs = growths + (scale > before), backoffs + (scale < before)
            low, high, before = min(low, scale), max(high, scale), scale  # of NaN the other one
            streak = streak + 1 if skip else 0
            longest, skipped = max(longest, streak), skipped + skip
        steps, known = len(self), low <= high
        return Summary(
            steps=steps,
            skipped=skipped,
            skip_rate=skipped / steps if steps else 0.0,
            longest_streak=longest,
            min_scale=low if known else None,
            max_scale=high if known else None,
            final_scale=before if steps else None,
            growths=growths,
            backoffs=backoffs,
            resumed=tuple(self.resumed),
        )

    def _lines(self) -> Iterator[str]:
        """Return the lines of the file that holds this trace."""
        yield head_line(self.about)
        yield from (line_of({"resumed": index}) for index in self.resumed)
        looks = deque(self.looks)
        for row in self._columns.rows():
            while looks and looks[0].index <= row[0]:  # before its step, as a lens records it
                yield line_of({"look": look_to_json(looks.popleft())})
            yield step_line(row)
        yield from (line_of({"look": look_to_json(look)}) for look in looks)
        if self.stopped is not None:
            yield line_of({"stopped": self.stopped})

    def _scales(self) -> Iterator[float]:
        """Return the scale of every step and, last, the one after it."""
        yield from self.column("scale")
        if len(self):
            last = self[-1]
            yield last.scale if last.new_scale is None else last.new_scale


def _end_last_line(path: Path) -> None:
    """Make the last line of a file that could be read a whole one, or take it away."""
    with path.open("rb+") as file:
        before, newline, last = file.read().rpartition(b"\n")
        if last and is_whole(last.decode()):
            file.write(b"\n")
        else:
            file.truncate(len(before + newline))


def _as_look(path: str | Path, number: int, entry: Any) -> Look:
    try:
        return look_from_json(entry)
    except TraceError as error:
        raise TraceError(f"{path}, line {number}: {error}.") from error
