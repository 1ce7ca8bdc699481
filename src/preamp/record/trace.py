"""The record of a run, step by step: in memory, as a file of JSON lines, and as a summary.

The first line of a file describes the run; every other line is a step, a lens's snapshot of one, or an event.
Lines are written whole, one at a time, so the file of an interrupted run can be read up to its last step.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, zip_longest
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, overload

from preamp.checks import level_of_caller, shown, whole
from preamp.errors import TraceError
from preamp.record.columns import FIELDS, StepColumns
from preamp.record.files import naming, replacing
from preamp.record.snapshots import Snapshot
from preamp.record.trace_files import MODES, TraceFile, refuse_written
from preamp.record.trace_lines import (
    about_of,
    entries,
    head_line,
    line_of,
    parse,
    row_of,
    row_of_entry,
    snapshot_from_json,
    snapshot_to_json,
    step_line,
)
from preamp.record.trace_ranks import Merger, missing_ranks, of_rank, paths_of_ranks, rank
from preamp.scaling import Step

__all__ = ["Summary", "Trace"]

OF_RUN: Final = ("framework", "policy", "guard")  # what steps of adapters know of their run
MERGED: Final = "merged"  # the key of `about` for the files that a trace was merged from


class Summary(NamedTuple):
    """Totals of a trace. Scales are None for a trace without steps.

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
        resumed: the steps at which the run was resumed from an older checkpoint, in the order this happened.
            The steps that were lost are not counted.
        spikes: steps that a guard skipped.
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
    spikes: int = 0


class Trace:
    """A list of `Step` that is called with the next one, so it can be passed as any `on_step=`.

    One trace writes a file, and a second one that is opened for it raises. In a job of several processes give
    each a file, `Trace("run.{rank}.jsonl")`, and read them as one run, `Trace.read("run.{rank}.jsonl")`; or
    have one process write, `Trace("run.jsonl", only_rank=0)`.

    Args:
        steps: steps to begin with; or the path, which may be the first argument.
        path: a file that each step is written to as it is recorded. "{rank}" in it becomes the number of this
            process: that of `torch.distributed` or `jax.distributed` if they are initialized, else that of
            torchrun, Open MPI or Slurm, else 0. Folders are made.
        mode: what to do if the file exists. "new" raises, so that no record is lost by starting again;
            "append" reads it and continues it, with its description; "replace" discards it.
        on_error: what to do if a line cannot be written, because the disk is full or the network is down.
            "raise" raises the OSError where the step is recorded; the step is then not in the trace. "warn"
            warns, keeps the step in memory, and writes what is missing as soon as it can. A file that cannot
            be opened always raises.
        only_rank: the number of the only process that writes the file; in others the trace is in memory.
        **about: anything JSON can hold that describes the run; the first line of the file.

    Attributes:
        about: the description of the run.
        snapshots: what a lens recorded, on the steps that it sampled.
        stopped: why the run ended early, or None.
        resumed: the index of every step that did not follow the one before it: there the run was resumed
            from an older checkpoint, and the repeated steps have replaced those that were lost.
        framework: "torch", "jax", "keras" or "tensorflow": whose adapter made the steps; None if unknown.
        policy: the `repr` of the policy that the latest steps were made with; None if they do not know it.
        guard: the same for their guard.

    Raises:
        TraceError: if the file exists and mode is "new", if another trace writes it, if it is not a trace,
            for something in `about` that JSON cannot hold, for braces around another word than "rank", or if
            the environment has a rank that is not a number below the number of processes.
        OSError: for a file that cannot be opened or written.

    >>> trace = Trace(policy="Static(2.0)")
    >>> trace(Step(index=0, scale=2.0, finite=True, skipped=False))
    >>> trace.summary().steps
    1
    """

    def __init__(
        self,
        steps: Iterable[Step] | str | Path = (),
        *,
        path: str | Path | None = None,
        mode: Literal["new", "append", "replace"] = "new",
        on_error: Literal["raise", "warn"] = "raise",
        only_rank: int | None = None,
        **about: Any,
    ) -> None:
        if isinstance(steps, str | PathLike):
            if path is not None:
                raise TraceError(f"the path is given twice: {shown(steps)} and path={shown(path)}.")
            path, steps = steps, ()
        if mode not in MODES:
            raise TraceError(f"mode={shown(mode)} is unknown. Write mode='new', 'append' or 'replace'.")
        if on_error not in ("raise", "warn"):
            raise TraceError(f"on_error={shown(on_error)} is unknown. Write on_error='raise' or 'warn'.")
        if only_rank is not None:
            whole("only_rank", only_rank, least=0, instead="only_rank=0")
        if not isinstance(steps, Iterable):
            raise TraceError(
                f"steps={shown(steps)} is not a series of Step. Write Trace('run.jsonl') for a file."
            )
        head_line(about)
        self._columns = StepColumns()
        self.snapshots: list[Snapshot] = []
        self.about: dict[str, Any] = about
        self.stopped: str | None = None
        self.resumed: list[int] = []
        self.framework: str | None = None
        self.policy: str | None = None
        self.guard: str | None = None
        self._rules: tuple[Any, Any] = (None, None)  # those of the last step
        self._snapshots_before = 0  # the number of snapshots that came before the last step
        self._closed: str | None = None  # why no step can be recorded any more
        self._file: TraceFile | None = None
        if path is not None and (only_rank is None or only_rank == rank()):
            self._open(of_rank(path), mode, on_error)
        try:
            for step in steps:
                self(step)
        except BaseException:
            self.close()
            raise

    def __call__(self, step: Step) -> None:
        """Record a step, and write it if the trace has a file.

        Raises:
            TypeError: for a step that holds something other than numbers and names.
            TraceError: for an index below 0, a scale that is NaN or below 0, a trace whose file is closed, a
                copy of one that writes a file, and in a process that was forked from the one that writes it.
            OSError: naming the file, if it cannot be written and `on_error` is "raise".
        """
        if not isinstance(step, Step):
            raise TypeError(f"{shown(step)} is not a Step. Write trace(Step(index, scale, finite, skipped)).")
        row = row_of(step)
        self._warn_of_lost_steps(row[0])
        if step.framework not in (None, self.framework):
            self._write(line_of, {"framework": step.framework})
            self.framework = step.framework
        policy, guard = self._rules
        if step.policy is not policy or step.guard is not guard:
            self._note_rules(step)
        self._write(step_line, row)
        self._record(row)
        self.stopped = None  # the run continues

    def _note_rules(self, step: Step) -> None:
        """Keep the rules of a step, in words, where they are known and differ from those before."""
        for name, rule in (("policy", step.policy), ("guard", step.guard)):
            words = None if rule is None else repr(rule)
            if words not in (None, getattr(self, name)):
                self._write(line_of, {name: words})
                setattr(self, name, words)
        self._rules = (step.policy, step.guard)

    def _warn_of_lost_steps(self, index: int) -> None:
        """Warn where a step repeats an earlier one and the run was most likely not resumed."""
        last = self._columns.index[-1] if self._columns else -1
        if index == last:
            warnings.warn(
                f"step {index} is recorded a second time and replaces the first. If two scalers share this "
                "trace, give each a trace of its own.",
                stacklevel=level_of_caller(),
            )
        elif index == 0 and last > 0:
            warnings.warn(
                f"the steps begin at 0 again, and what was recorded up to step {last} is replaced. To "
                "continue the count, load the scaler's own checkpoint; write another run to another file.",
                stacklevel=level_of_caller(),
            )

    def extend(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Record many steps, given as plain tuples in the order of `Step`'s fields."""
        if self._file is not None or self._closed is not None:
            for row in rows:
                self(Step(*row))
            return
        for row in rows:
            self._record(row_of(row if len(row) == len(FIELDS) else Step(*row)))

    def _record(self, row: tuple[Any, ...]) -> None:
        """Keep a row in memory. If the run was resumed there, it replaces the steps from there on."""
        index, columns = row[0], self._columns
        if columns and index <= columns.index[-1]:
            self.resumed.append(index)
            columns.truncate(columns.place_of(index))
            self._forget_snapshots(index)
        columns.append(row)
        self._snapshots_before = len(self.snapshots)

    def _forget_snapshots(self, index: int) -> None:
        """Drop the snapshots of lost steps. The snapshot of a step is added before the step is recorded."""
        kept = [snapshot for snapshot in self.snapshots[: self._snapshots_before] if snapshot.index < index]
        for snapshot in self.snapshots[self._snapshots_before :]:
            while kept and kept[-1].index > snapshot.index:
                kept.pop()
            kept.append(snapshot)
        self.snapshots[:] = kept

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """Record a snapshot, and write it if the trace has a file: `on_snapshot=trace.add_snapshot`.

        Raises:
            TraceError: for a snapshot that could not be read back.
        """
        self._write(line_of, {"snapshot": snapshot_to_json(snapshot)})
        self.snapshots.append(snapshot)

    def _write(self, to_line: Callable[[Any], str], entry: Any) -> None:
        """Write a line to the file, if there is one."""
        if self._closed is not None:
            raise TraceError(self._closed)
        if self._file is not None:
            self._file.write(to_line(entry))

    def _open(self, path: Path, mode: str, on_error: Literal["raise", "warn"]) -> None:
        """Open the file for writing; what it holds is unchanged if this fails."""
        file = TraceFile(path, mode, on_error)
        try:
            if file.size and mode == "append":
                self.__dict__.update(Trace.read(path).__dict__)
                file.end_last_line()
            else:
                file.start(head_line(self.about))
        except BaseException:
            file.close()
            raise
        self._file = file

    def __iter__(self) -> Iterator[Step]:
        return map(Step._make, self._columns.rows())

    def __len__(self) -> int:
        return len(self._columns)

    def column(self, name: str) -> Iterator[Any]:
        """Return one field of every step, which is faster and takes less memory than whole steps.

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
        # Not by the framework and the rules, which steps that were read back do not have.
        return len(self) == len(other) and all(a == b for a, b in zip_longest(self._run(), other._run()))

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # a trace changes while it is recorded

    def __repr__(self) -> str:
        about = "".join(f", {key}={value!r}" for key, value in self.about.items())
        return f"Trace({len(self)} steps{about})"

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the open file, which only one trace can write.

        A copy can be read and written elsewhere. It raises if it is called, because the steps it would record
        are not in the file.
        """
        kept = {**self.__dict__, "_rules": (None, None)}
        if self._file is None:
            return kept
        closed = (
            f"this is a copy of the trace that writes {self._file.path}, and a file has one writer. "
            "Give the copy that continues training its own trace: on_step=Trace('other.jsonl')."
        )
        return {**kept, "_file": None, "_closed": closed}

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self, reason: str) -> None:
        """Record why the run ends early.

        Raises:
            TraceError: as for a step.
            OSError: likewise.
        """
        self._write(line_of, {"stopped": reason})
        self.stopped = reason

    def close(self) -> None:
        """Close the file, if there is one; another trace can then continue it. Nothing is lost without this.

        Afterwards the trace can be read, and raises if it is called.

        Raises:
            OSError: naming the file, if a write fails only now. The file is closed all the same.
        """
        if self._file is not None:
            file, self._file = self._file, None
            self._closed = (
                f"the trace of {file.path} is closed. To continue it, write "
                f"trace = Trace({str(file.path)!r}, mode='append')."
            )
            file.close()

    def write(self, path: str | Path) -> None:
        """Write the whole trace to a file of JSON lines, which replaces an existing one once it is complete.

        Args:
            path: the file; "{rank}" in it becomes the number of this process.

        Raises:
            TraceError: for something in `about` that JSON cannot hold, or a file that a trace is writing.
            OSError: naming the file.
        """
        path = of_rank(path)
        refuse_written(path)
        with naming(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.writelines(line.encode() for line in self._lines())

    @classmethod
    def read(
        cls,
        path: str | Path | Iterable[str | Path],
        progress: Callable[[int, int], object] | None = None,
    ) -> Trace:
        """Read a file of JSON lines. A last line that was not written to its end is left out.

        Where the index of a step is not above the one before it, the run was resumed from an older
        checkpoint: later lines replace those of the steps that were lost.

        Several files are the ranks of one job and become one run. A step is finite if it was on every rank,
        and skipped if it was on any; of grad_norm, amax and seconds it has the largest, of loss and zeros the
        mean. Where ranks disagree about the scale, or about what was skipped, is in `disagreements`.

        Args:
            path: the file, or "run.{rank}.jsonl" for those of all ranks, or a list of them.
            progress: called from time to time with the bytes read so far and the size of the files.

        Raises:
            TraceError: naming the line that cannot be read and why.
            OSError: if there is no such file.

        Warns:
            UserWarning: if ranks disagree, if the file of a rank below the highest is missing, and if one has
                fewer steps than the others.
        """
        if not isinstance(path, str | PathLike):
            return cls._read_ranks(list(map(Path, path)), "", progress)
        ranks = paths_of_ranks(path)
        paths = [one for _, one in ranks]
        missing = missing_ranks(path, (number for number, _ in ranks))
        if len(paths) == 1 and not missing:
            return cls._read_one(paths[0], progress)
        return cls._read_ranks(paths, missing, progress)

    @classmethod
    def _read_one(cls, path: Path, progress: Callable[[int, int], object] | None) -> Trace:
        lines = entries(path, progress)
        trace = cls()
        trace.about = about_of(path, next(lines)[1])  # not as arguments: a file must not say what is opened
        for number, line in lines:
            entry = parse(path, number, line)
            if "index" in entry or len(entry) != 1:
                trace._record(row_of_entry(path, number, entry))
                trace.stopped = None  # the run continued
            else:
                trace._note(path, number, entry)
        return trace

    @classmethod
    def _read_ranks(
        cls, paths: list[Path], missing: str, progress: Callable[[int, int], object] | None
    ) -> Trace:
        if not paths:
            raise TraceError("there are no files to read. Write Trace.read(['run.0.jsonl', 'run.1.jsonl']).")
        sizes = [path.stat().st_size for path in paths]
        merger, trace, done = Merger(), cls(), 0
        for path, size in zip(paths, sizes, strict=True):

            def report(read: int, _: int, before: int = done) -> None:
                if progress is not None:
                    progress(before + read, max(sum(sizes), before + read))

            one = cls._read_one(path, report)
            merger.add(str(path), one._columns)
            trace.about = trace.about or one.about
            trace.stopped = trace.stopped or one.stopped
            trace.resumed = trace.resumed or one.resumed
            for name in OF_RUN:
                setattr(trace, name, getattr(trace, name) or getattr(one, name))
            trace.snapshots = sorted(trace.snapshots + one.snapshots, key=itemgetter(0))
            done += size
        trace._columns = merger.columns
        trace._snapshots_before = len(trace.snapshots)
        differing, incomplete = merger.differing, [*filter(None, [missing]), *merger.lacking()]
        found = differing + incomplete
        trace.about = {
            **trace.about,
            MERGED: {"files": [str(path) for path in paths], "disagreements": found},
        }
        if found:
            shown_ones = "; ".join(found[:3]) + ("; ..." if len(found) > 3 else "")
            problem, advice = "the record of this run is incomplete", ""
            if differing:
                problem = "the ranks of this run disagree"
                advice = " Ranks that keep one loss scale must skip together; see docs/distributed.md."
            warnings.warn(f"{problem}: {shown_ones}.{advice}", stacklevel=level_of_caller())
        return trace

    @property
    def disagreements(self) -> tuple[str, ...]:
        """Messages about ranks that disagree or lack steps, for a trace read from the files of a job."""
        merged = self.about.get(MERGED)
        found = merged.get("disagreements") if isinstance(merged, dict) else None
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def _note(self, path: str | Path, number: int, entry: dict[str, Any]) -> None:
        """Add the content of a line that is not a step."""
        ((name, value),) = entry.items()
        if name == "stopped" and isinstance(value, str):
            self.stopped = value
        elif name in OF_RUN and isinstance(value, str):
            setattr(self, name, value)
        elif name == "snapshot":
            self.snapshots.append(_as_snapshot(path, number, value))
        elif name == "resumed" and type(value) is int:
            self.resumed.append(value)
        else:
            row_of_entry(path, number, entry)  # raises, saying what is wrong with the line

    def summary(self) -> Summary:
        """Count steps, skips and changes of the scale."""
        skipped = longest = streak = growths = backoffs = 0
        low, high, before = math.inf, -math.inf, math.nan
        for skip, scale in zip(chain(self.column("skipped"), (False,)), self._scales(), strict=False):
            growths, backoffs = growths + (scale > before), backoffs + (scale < before)
            low, high, before = min(low, scale), max(high, scale), scale  # in this order, NaN is ignored
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
            spikes=len(self._columns.spike),
        )

    def _lines(self) -> Iterator[str]:
        """Yield the lines of a file of this trace."""
        yield head_line(self.about)
        known = {name: getattr(self, name) for name in OF_RUN}
        yield from (line_of({name: value}) for name, value in known.items() if value is not None)
        yield from islice(self._run(), 1, None)

    def _run(self) -> Iterator[str]:
        """Yield these lines, but not those of the framework and the rules."""
        yield head_line(self.about)
        yield from (line_of({"resumed": index}) for index in self.resumed)
        snapshots = deque(self.snapshots)
        for row in self._columns.rows():
            while snapshots and snapshots[0].index <= row[0]:  # before its step, as a lens records it
                yield line_of({"snapshot": snapshot_to_json(snapshots.popleft())})
            yield step_line(row)
        yield from (line_of({"snapshot": snapshot_to_json(snapshot)}) for snapshot in snapshots)
        if self.stopped is not None:
            yield line_of({"stopped": self.stopped})

    def _scales(self) -> Iterator[float]:
        """Yield the scale of every step and, last, the next one."""
        yield from self.column("scale")
        if len(self):
            last = self[-1]
            yield last.scale if last.new_scale is None else last.new_scale


def _as_snapshot(path: str | Path, number: int, entry: Any) -> Snapshot:
    try:
        return snapshot_from_json(entry)
    except TraceError as error:
        raise TraceError(f"{path}, line {number}: {error}.") from error
