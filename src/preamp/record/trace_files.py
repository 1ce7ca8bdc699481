"""The file that a trace writes while it grows: whole lines, and only one writer."""

from __future__ import annotations

import errno
import os
import warnings
import weakref
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, Literal

from preamp.checks import level_of_caller
from preamp.errors import TraceError
from preamp.record.files import naming
from preamp.record.trace_lines import is_whole
from preamp.record.trace_ranks import RANK

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]


MODES: Final = ("new", "append", "replace")
BLOCK: Final = 2**16

_opened: weakref.WeakSet[TraceFile] = weakref.WeakSet()


class TraceFile:
    """A file to which only this process appends lines.

    The operating system locks it and releases the lock when the process ends, however it ends. A process
    forked from this one, such as a worker of a DataLoader, closes its copy and cannot write.

    Args:
        path: the file. Missing parent folders are made.
        mode: one of `MODES`.
        on_error: "raise", or "warn": lines that cannot be written then wait for the next write.

    Raises:
        TraceError: if the file exists and mode is "new", or another trace writes it.
        OSError: for a file that cannot be opened.
    """

    def __init__(self, path: Path, mode: str, on_error: Literal["raise", "warn"]) -> None:
        self.path, self.on_error = path, on_error
        self._waiting: deque[bytes] = deque()
        self._torn = 0  # bytes at the end that belong to an incomplete line and could not be removed
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)  # each write appends, wherever the end is by then
        try:
            self._lock()
            self.size = os.fstat(self._file.fileno()).st_size
            if self.size and mode == "new":
                raise TraceError(
                    f"{path} exists already. "
                    "Write mode='append' to continue it, mode='replace' to discard it."
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
                f"{self.path} is being written by another Trace of this process. Use that one, or "
                "close it first: trace.close()."
            )
        who = "another process" if owner is None else f"process {owner}"
        return (
            f"{self.path} is being written by {who}, and two writers would lose steps. If these are ranks of "
            f"one job, write {_forms(self.path)}. If not, choose another name."
        )

    def start(self, head: str) -> None:
        """Replace all that is in the file by a first line."""
        if self.size:
            with naming(self.path):
                self._file.truncate(0)
        self.write(head)

    def end_last_line(self) -> None:
        """Add a missing newline to the last line, or remove the line if it is incomplete or blank."""
        self._remove_blank_lines()
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

    def _remove_blank_lines(self) -> None:
        """Remove blank lines at the end, which would be in the middle once more is written."""
        self._file.seek(max(self.size - BLOCK, 0))
        end = self._file.read(BLOCK)
        blank = end[len(end.rstrip()) :]
        more = len(blank) - (blank.find(b"\n") + 1)
        if more:
            with naming(self.path):
                self._file.truncate(self.size - more)
            self.size -= more

    def write(self, line: str) -> None:
        """Append a line, completely or not at all.

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
                    f"{self.path} cannot be written: {error.strerror}. The run continues and the trace is "
                    "kept in memory; what is missing is written as soon as that works again. To save it "
                    "elsewhere, write trace.write('other.jsonl').",
                    stacklevel=level_of_caller(),
                )

    def _write_waiting(self) -> None:
        while self._waiting:
            self._append(self._waiting[0])
            self._waiting.popleft()

    def _append(self, data: bytes) -> None:
        """Write all of some bytes, or remove what was written of them."""
        self._remove_torn()
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError:
            self._torn = written
            with suppress(OSError):
                self._remove_torn()
            raise

    def _remove_torn(self) -> None:
        if self._torn:
            self._file.truncate(os.fstat(self._file.fileno()).st_size - self._torn)
            self._torn = 0

    def close(self) -> None:
        """Close the file and release the lock, also if this raises.

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


@cache  # once, since such a hook cannot be removed
def _close_after_fork() -> None:
    """Have forked processes close their copies, which would hold the lock after this process has ended."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for one in list(_opened):
        with suppress(OSError):
            one._file.close()


def refuse_written(path: str | Path) -> None:
    """Refuse to replace a file that a trace is writing, whose further lines would be lost."""
    if fcntl is None or not Path(path).is_file():
        return
    with Path(path).open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TraceError(
                f"{path} is being written by a trace. Close it first, or choose another name."
            ) from None
        except OSError:  # this file system has no locks
            return


def _owner(inode: int) -> int | None:
    """Return the process that holds a lock on a file, where the system is Linux."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF
            if fields[1] == "FLOCK" and int(fields[5].split(":")[2]) == inode:
                return int(fields[4]) or None
    return None


def _forms(path: Path) -> str:
    each = path.with_suffix(f".{RANK}{path.suffix}")
    return f"Trace({str(each)!r}) for a file of each rank, or Trace({str(path)!r}, only_rank=0)"
