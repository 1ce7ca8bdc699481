"""Traces of the processes of a job: the rank of this one, the files of all, and how they become one trace."""

from __future__ import annotations

import errno
import glob
import math
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

from preamp.errors import TraceError
from preamp.record.columns import StepColumns
from preamp.record.trace_lines import Row

RANK: Final = "{rank}"
RANK_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # torchrun, Open MPI, Slurm
SIZE_VARIABLES: Final = {"RANK": "WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
# Positions in a row. Merged steps have the largest grad_norm, amax and seconds, the mean loss and zeros, and
# all names of culprits and buffers; a buffer is restored if it is on every rank that names it.
LARGEST: Final = 6, 7, 10
MEANS: Final = 5, 8
NAMES: Final = 9, 11, 14
BUFFERS, SPIKE, RESTORED = 11, 12, 13
SCALE, SKIPPED = 1, 3


def rank() -> int:
    """Return the number of this process in its job, from 0; 0 if it is the only one.

    It comes from torch.distributed or jax.distributed if they are initialized, else from the environment, as
    torchrun, Open MPI or Slurm set it.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    jax: Any = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if is_initialized is not None and is_initialized():
        return int(jax.process_index())
    for name in RANK_VARIABLES:
        if os.environ.get(name):
            return _rank_from(name)
    return 0


def _rank_from(name: str) -> int:
    """Return the rank in an environment variable."""
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
            f"{name}={text!r} in the environment is not a number from 0, so the rank of this process is "
            f"unknown. Set it as the launcher does, or unset {name} in a job of one process."
        )
    return number


def of_rank(path: str | Path) -> Path:
    """Return a path with this process's rank for "{rank}"."""
    text = os.fspath(path)
    _refuse_other_braces(text)
    return Path(text.replace(RANK, str(rank())) if RANK in text else text)


def _refuse_other_braces(text: str) -> None:
    """Refuse a path that would be taken literally, although the number of the process was meant."""
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
    """Return the existing files for "{rank}" in a path, by rank; a path without it is rank 0's.

    Raises:
        FileNotFoundError: if there is none.
        TraceError: for other words in braces, unless there is a file of exactly that name.
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
    """Return a message about the files missing below the highest rank that has one; "" if none is."""
    found = set(ranks)
    missing = [number for number in range(max(found)) if number not in found]
    if not missing:
        return ""
    names = [os.fspath(path).replace(RANK, str(number)) for number in missing[:3]]
    more = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
    are = "is" if len(missing) == 1 else "are"
    return f"{', '.join(names)}{more} {are} missing, although there is a file of rank {max(found)}"


class Merger:
    """Merges the traces of ranks one after the other, so that only two of them are in memory.

    A step is finite if it was on every rank, and skipped if it was on any. Its scale is that of the first
    rank that has the step.

    Attributes:
        columns: the steps merged so far.
        differing: messages about ranks that differ from those before them in scale or skips.
    """

    def __init__(self) -> None:
        self.columns = StepColumns()
        # Three numbers a row: the ranks that loss and zeros are means of, and whether the first rank skipped.
        self._counts = array("q")
        self._ranks: list[tuple[str, int, int]] = []
        self.differing: list[str] = []

    def add(self, name: str, other: StepColumns) -> None:
        """Add a rank."""
        before, counts = self.columns, zip(*[iter(self._counts)] * 3, strict=True)
        self.columns, self._counts = StepColumns(), array("q")
        scales = skips = 0
        first_scale: tuple[int, float, float] | None = None  # the step, its scale before, its scale here
        first_skip: tuple[int, bool] | None = None
        mine, theirs = before.rows(), other.rows()
        # Both are sorted by index, so this is the merge of a merge sort.
        one, two = next(mine, None), next(theirs, None)
        while one is not None or two is not None:
            if two is None or (one is not None and one[0] < two[0]):
                assert one is not None
                self._append(one, *next(counts))
                one = next(mine, None)
            elif one is None or two[0] < one[0]:
                self._append(two, two[MEANS[0]] is not None, two[MEANS[1]] is not None, two[SKIPPED])
                two = next(theirs, None)
            else:
                losses, shares, skipped = next(counts)
                if repr(one[SCALE]) != repr(two[SCALE]):  # NaN equals NaN here
                    scales, first_scale = scales + 1, first_scale or (one[0], one[SCALE], two[SCALE])
                if skipped != two[SKIPPED]:
                    skips, first_skip = skips + 1, first_skip or (one[0], two[SKIPPED])
                self._append(*_together(one, two, losses, shares), skipped)
                one, two = next(mine, None), next(theirs, None)
        if first_scale is not None:
            index, first, second = first_scale
            self.differing.append(
                f"{name} differs from the ranks before it in the scale of {scales:,} of its steps, first of "
                f"step {index}: {second!r} instead of {first!r}"
            )
        if first_skip is not None:
            index, skipped = first_skip
            self.differing.append(
                f"{name} differs from the ranks before it in skipping {skips:,} of its steps, first step "
                f"{index}, which it {'skipped' if skipped else 'took'} and they did not"
            )
        self._ranks.append((name, len(other), other.index[-1] if len(other) else -1))

    def _append(self, row: Row, losses: int, shares: int, skipped: int) -> None:
        self.columns.append(row)
        self._counts.extend((losses, shares, skipped))

    def lacking(self) -> list[str]:
        """Return messages about ranks that lack steps that others have.

        A rank that lacks only the last step is not mentioned: a job is not killed on all ranks at once.
        """
        most = len(self.columns)
        final = self.columns.index[-1] if most else -1
        lacking = []
        for name, length, last in self._ranks:
            if most and not length:
                lacking.append(f"{name} has no steps")
            elif length < most - 1 and last < final - 1:
                lacking.append(
                    f"{name} ends at step {last:,}, and the run at step {final:,}: it has {length:,} of "
                    f"{most:,} steps"
                )
            elif length < most - 1:
                lacking.append(f"{name} has {length:,} of {most:,} steps, up to step {last:,}")
        return lacking


def _together(one: Row, two: Row, losses: int, shares: int) -> tuple[Row, int, int]:
    """Return the step merged from two, and of how many ranks its loss and its zeros now are means."""
    row: list[Any] = list(one)
    row[2], row[3] = one[2] and two[2], one[3] or two[3]
    row[4] = two[4] if one[4] is None else one[4]
    row[SPIKE] = one[SPIKE] if two[SPIKE] is None else two[SPIKE]
    lost = {name for rank in (one, two) for name in rank[BUFFERS] if name not in rank[RESTORED]}
    row[RESTORED] = tuple(name for name in dict.fromkeys(one[RESTORED] + two[RESTORED]) if name not in lost)
    for place in LARGEST:
        row[place] = _either(one[place], two[place], _larger)
    for place in NAMES:
        row[place] = tuple(dict.fromkeys(one[place] + two[place]))
    after = []
    for place, count in zip(MEANS, (losses, shares), strict=True):
        ranks = count + (two[place] is not None)
        after.append(ranks)
        row[place] = _either(one[place], two[place], partial(_mean, ranks=ranks))
    return tuple(row), after[0], after[1]


def _either(a: float | None, b: float | None, both: Callable[[float, float], float]) -> float | None:
    return b if a is None else a if b is None else both(a, b)


def _larger(a: float, b: float) -> float:
    return a if a >= b or math.isnan(a) else b


def _mean(mean: float, value: float, ranks: int) -> float:
    """Return the mean with one rank more; `ranks` counts that one."""
    if math.isfinite(mean) and math.isfinite(value):
        return mean + (value - mean) / ranks
    return mean + value
