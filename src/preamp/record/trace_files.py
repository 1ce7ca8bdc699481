"""The file that a trace writes while it grows: whole lines, one writer, and which file on which rank."""

from __future__ import annotations

import errno
import glob
import os
import re
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from preamp.checks import level_of_caller
from preamp.errors import TraceError
from preamp.record.files import naming
from preamp.record.trace_lines import is_whole

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]


MODES: Final = ("new", "append", "replace")
RANK: Final = "{rank}"
RANK_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # torchrun, Open MPI, Slurm
SIZE_VARIABLES: Final = {"RANK": "WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
BLOCK: Final = 2**16

_opened: weakref.WeakSet[TraceFile] = weakref.WeakSet()


class TraceFile:
    """A file that lines are added to by this process and by no other.

    The lock is the operating system's and ends with the process, however that ends. A process forked from
    this one, such as a worker of a DataLoader, closes its copy and cannot write.

    Args:
        path: the file. Folders that it lies in are made.
        mode: one of `MODES`.
        on_error: "raise", or "warn": what cannot be written then waits for the next time.

    Raises:
        TraceError: if the file is there and mode is "new", or another trace writes it.
        OSError: for a file that cannot be opened.
    """

    def __init__(self, path: Path, mode: str, on_error: Literal["raise", "warn"]) -> None:
        self.path, self.on_error = path, on_error
        self._waiting: deque[bytes] = deque()
        self._torn = 0  # bytes at the end that are part of a line and could not be taken back
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)  # each write goes to the end, wherever that is
        try:
            self._lock()
            self.size = os.fstat(self._file.fileno()).st_size
            if self.size and mode == "new":
                raise TraceError(
                    f"{path} is there already. "
                    "Write mode='append' to go on with it, mode='replace' to lose it."
                )
        except BaseException:
            self._file.close()
            raise
        self._process = os.getpid()
        _close_after_fork()
        _opened.add(self)

    def _lock(self) -> None:
        """Keep other writers out."""
        reason = "this platform"
        if fcntl is not None:
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                raise TraceError(self._taken()) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                reason = f"its file system ({error.strerror})"
        warnings.warn(
            f"{self.path} cannot be locked on {reason}, so a second writer would not be noticed. Let one "
            f"process write it: {_forms(self.path)}.",
            stacklevel=level_of_caller(),
        )

    def _taken(self) -> str:
        owner = _owner(os.fstat(self._file.fileno()).st_ino)
        if owner == os.getpid():
            return (
                f"{self.path} is being written by another Trace of this process. Go on with that one, or "
                "close it first: trace.close()."
            )
        who = "another process" if owner is None else f"process {owner}"
        return (
            f"{self.path} is being written by {who}, and two writers would lose steps. If these are ranks of "
            f"one job, write {_forms(self.path)}. If not, write another name."
        )

    def start(self, head: str) -> None:
        """Begin the file with a line, instead of all that was in it."""
        if self.size:
            with naming(self.path):
                self._file.truncate(0)
        self.write(head)

    def end_last_line(self) -> None:
        """Make the last line a whole one, or take it away if it was not written to its end or is blank."""
        self._take_blank_lines()
        file, end, last = self._file, self.size, b""
        while end and b"\n" not in last:
            begin = max(end - BLOCK, 0)
            file.seek(begin)
            last, end = file.read(end - begin) + last, begin
        last = last.rpartition(b"\n")[2]
        with naming(self.path):
            if last and is_whole(last.decode()):
                self._append(b"\n")
            elif last:
                file.truncate(self.size - len(last))

    def _take_blank_lines(self) -> None:
        """Take away blank lines at the end, which would be a gap once more is written."""
        self._file.seek(max(self.size - BLOCK, 0))
        end = self._file.read(BLOCK)
        blank = end[len(end.rstrip()) :]
        more = len(blank) - (blank.find(b"\n") + 1)
        if more:
            with naming(self.path):
                self._file.truncate(self.size - more)
            self.size -= more

    def write(self, line: str) -> None:
        """Add a line, whole or not at all.

        Raises:
            TraceError: in a process that was forked from the one that opened the file.
            OSError: naming the file, unless `on_error` is "warn".
        """
        if os.getpid() != self._process:
            raise TraceError(
                f"{self.path} is written by process {self._process}, from which this one was forked. "
                f"Open a trace in this process: Trace({str(self.path.with_suffix('.child.jsonl'))!r})."
            )
        if self.on_error == "raise":
            with naming(self.path):
                self._append(line.encode())
            return
        was_whole = not self._waiting
        self._waiting.append(line.encode())
        try:
            self._write_waiting()
        except OSError as error:
            if was_whole:
                warnings.warn(
                    f"{self.path} cannot be written: {error.strerror}. The run goes on and the trace is kept "
                    "in memory; what is missing is written as soon as that works again. To save it "
                    "elsewhere, write trace.write('other.jsonl').",
                    stacklevel=level_of_caller(),
                )

    def _write_waiting(self) -> None:
        while self._waiting:
            self._append(self._waiting[0])
            self._waiting.popleft()

    def _append(self, data: bytes) -> None:
        """Write all of some bytes, or take back what was written of them."""
        self._take_back()
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError:
            self._torn = written
            with suppress(OSError):
                self._take_back()
            raise

    def _take_back(self) -> None:
        if self._torn:
            self._file.truncate(os.fstat(self._file.fileno()).st_size - self._torn)
            self._torn = 0

    def close(self) -> None:
        """Close the file and give up the lock, also if that raises.

        Raises:
            OSError: naming the file, unless `on_error` is "warn".
        """
        _opened.discard(self)
        if os.getpid() != self._process:  # the file is that of the process that opened it
            self._file.close()
            return
        try:
            with naming(self.path):
                try:
                    self._write_waiting()
                finally:
                    self._file.close()
        except OSError as error:
            if self.on_error == "raise":
                raise
            warnings.warn(
                f"{self.path} lacks the last {len(self._waiting)} lines of the trace: {error.strerror}. "
                "To save all of it elsewhere, write trace.write('other.jsonl').",
                stacklevel=level_of_caller(),
            )


@cache  # a hook cannot be taken away again, so there is one, from the first file on
def _close_after_fork() -> None:
    """Have forked processes close their copies, which would keep the lock when this process has ended."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for one in list(_opened):
        with suppress(OSError):
            one._file.close()


def refuse_written(path: str | Path) -> None:
    """Refuse to replace a file that a trace is writing, whose lines would go nowhere from then on.

    Raises:
        TraceError: if there is such a trace.
    """
    if fcntl is None or not Path(path).is_file():
        return
    with Path(path).open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TraceError(
                f"{path} is being written by a trace. Close it first, or write another name."
            ) from None
        except OSError:  # there are no locks here
            return


def _owner(inode: int) -> int | None:
    """Return the process that holds a lock on a file, where Linux tells."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF
            if fields[1] == "FLOCK" and int(fields[5].split(":")[2]) == inode:
                return int(fields[4]) or None
    return None


def _forms(path: Path) -> str:
    each = path.with_suffix(f".{RANK}{path.suffix}")
    return f"Trace({str(each)!r}) for a file of each rank, or Trace({str(path)!r}, only_rank=0)"


def rank() -> int:
    """Return which process of a job this is: from 0, and 0 for the only one.

    What torch.distributed and jax.distributed say counts, if they are in use; else what torchrun, Open MPI or
    Slurm have put into the environment.

    Raises:
        TraceError: for a variable of the environment that is not the number of a process.
    """
    told: Any = sys.modules.get("torch.distributed")
    if told is not None and told.is_available() and told.is_initialized():
        return int(told.get_rank())
    jax: Any = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if is_initialized is not None and is_initialized():
        return int(jax.process_index())
    for name in RANK_VARIABLES:
        if os.environ.get(name):
            return _rank_from(name)
    return 0


def _rank_from(name: str) -> int:
    """Return the rank that a variable of the environment says."""
    number = _count_from(name)
    size_name = SIZE_VARIABLES.get(name, "")
    if os.environ.get(size_name):
        size = _count_from(size_name)
        if number >= size:
            raise TraceError(
                f"{name}={number} in the environment is not one of {size_name}={size} processes, which are "
                f"counted from 0. Set both as the launcher does, or unset {name} in a job of one process."
            )
    return number


def _count_from(name: str) -> int:
    text = os.environ[name]
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise TraceError(
            f"{name}={text!r} in the environment is not a number from 0, so which process of the job this "
            f"is cannot be told. Set it as the launcher does, or unset {name} in a job of one process."
        )
    return number


def of_rank(path: str | Path) -> Path:
    """Return a path with this process's rank for "{rank}".

    Raises:
        TraceError: for other words in braces, and if the environment has a rank that cannot be.
    """
    text = os.fspath(path)
    _refuse_other_braces(text)
    return Path(text.replace(RANK, str(rank())) if RANK in text else text)


def _refuse_other_braces(text: str) -> None:
    """Refuse what would be a file of that very name, although the number of the process was meant."""
    for part in re.finditer(r"\{[^{}/]*\}", text):
        folder = text[: part.end()] + text[part.end() :].partition("/")[0]
        is_folder = "/" in text[part.end() :] and Path(folder).is_dir()
        if part[0] != RANK and not is_folder:
            instead = text.replace(part[0], RANK)
            raise TraceError(
                f"{part[0]} in {text!r} is not replaced by anything: only {RANK} is, by the number of the "
                f"process. Write {instead!r}."
            )


def paths_of_ranks(path: str | Path) -> list[tuple[int, Path]]:
    """Return the files that there are for "{rank}" in a path, by rank; a path without it is rank 0.

    Raises:
        FileNotFoundError: if there is none.
        TraceError: for other words in braces, unless there is a file of that very name.
    """
    text = os.fspath(path)
    if RANK not in text:
        if not Path(text).exists():
            _refuse_other_braces(text)
        return [(0, Path(text))]
    first, *others = map(re.escape, text.split(RANK))
    name = re.compile(first + r"(?P<rank>\d+)" + r"(?P=rank)".join(others))
    matches = [name.fullmatch(one) for one in glob.glob(glob.escape(text).replace(RANK, "*"))]
    found = sorted((int(match["rank"]), Path(match[0])) for match in matches if match)
    if not found:
        raise FileNotFoundError(errno.ENOENT, "there is no such file of any rank", text)
    return found


def missing_ranks(path: str | Path, ranks: Iterable[int]) -> str:
    """Say which files are missing below the highest rank that has one; nothing if none is."""
    there = set(ranks)
    missing = [number for number in range(max(there)) if number not in there]
    if not missing:
        return ""
    names = [os.fspath(path).replace(RANK, str(number)) for number in missing[:3]]
    more = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
    are = "is" if len(missing) == 1 else "are"
    return f"{', '.join(names)}{more} {are} missing, although there is a file of rank {max(there)}"
