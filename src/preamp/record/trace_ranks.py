"""The traces of a job's ranks as one run: what is one step, and where the ranks disagree."""

from __future__ import annotations

import math
from array import array
from typing import Any, Final

from preamp.record.columns import StepColumns
from preamp.record.trace_lines import Row

LARGEST: Final = 6, 7, 10  # of the ranks' grad_norm, peak and seconds the largest counts
MEANS: Final = 5, 8  # of loss and zeros the mean
NAMES: Final = 9, 11
SCALE, SKIPPED = 1, 3


class Merger:
    """Adds up ranks, one after the other, so that only two of them are in memory.

    A step is finite if it was on every rank, and skipped if it was on any. Its scale is that of the first
    rank that has the step.

    Attributes:
        columns: what has been added up so far.
        differing: in words, where ranks differ from those before them in scale or skips.
    """

    def __init__(self) -> None:
        self.columns = StepColumns()
        self._counts = array("q")  # three a row: by how many ranks a mean is, and whether the first skipped
        self._ranks: list[tuple[str, int, int]] = []
        self.differing: list[str] = []

    def add(self, name: str, other: StepColumns) -> None:
        """Add a rank.

        Args:
            name: what messages call it.
            other: its steps.
        """
        before, counts = self.columns, zip(*[iter(self._counts)] * 3, strict=True)
        self.columns, self._counts = StepColumns(), array("q")
        scales = skips = 0
        first_scale: tuple[int, float, float] | None = None  # the step, what it is before, what it is here
        first_skip: tuple[int, bool] | None = None
        mine, theirs = before.rows(), other.rows()
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
                if repr(one[SCALE]) != repr(two[SCALE]):  # which finds NaN equal to NaN
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
        """Return in words which ranks lack steps that others have.

        That a rank lacks the last step is not told: a job is not killed on all ranks at once.
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
    """Return one step of two, and by how many ranks its means now are."""
    row: list[Any] = list(one)
    row[2], row[3] = one[2] and two[2], one[3] or two[3]
    row[4] = two[4] if one[4] is None else one[4]
    for place in LARGEST:
        row[place] = _either(one[place], two[place], _larger)
    for place in NAMES:
        row[place] = tuple(dict.fromkeys(one[place] + two[place]))
    after = []
    for place, count in zip(MEANS, (losses, shares), strict=True):
        ranks = count + (two[place] is not None)
        after.append(ranks)
        row[place] = _either(one[place], two[place], lambda a, b, n=ranks: _mean(a, b, n))
    return tuple(row), after[0], after[1]


def _either(a: float | None, b: float | None, both: Any) -> float | None:
    return b if a is None else a if b is None else both(a, b)


def _larger(a: float, b: float) -> float:
    return a if a >= b or math.isnan(a) else b


def _mean(mean: float, value: float, ranks: int) -> float:
    """Return the mean of one rank more."""
    if math.isfinite(mean) and math.isfinite(value):
        return mean + (value - mean) / ranks
    return mean + value
