"""Tables to train on: scikit-learn's handwritten digits, or a user's own CSV file."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from preamp.errors import DataError, MissingExtra

try:
    import numpy as np
    from numpy.typing import NDArray
    from sklearn.datasets import load_digits
except ImportError as error:
    raise MissingExtra.of(error, "preamp[lab]") from error


FEWEST_ROWS = 20
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Table:
    """Rows split into a training and a test part.

    Attributes:
        name: where the rows are from.
        train: float32 of shape (rows, columns).
        test: float32 of shape (test rows, columns).
        train_labels: int64 of shape (rows,), from 0 to classes - 1.
        test_labels: int64 of shape (test rows,).
        classes: the number of labels.
        picture: height and width when a row is an image in grey levels from 0 to 1.
    """

    name: str
    train: NDArray[np.float32]
    test: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_labels: NDArray[np.int64]
    classes: int
    picture: tuple[int, int] | None = None


def digits() -> Table:
    """Return scikit-learn's 1,797 handwritten digits: 64 grey levels from 0 to 1, ten labels."""
    data = load_digits()
    return _split("digits", data.data / 16.0, data.target, classes=10, picture=(8, 8))


def read_csv(path: str | Path) -> Table:
    """Read a table whose last column is the label. Columns are brought to the range from 0 to 1.

    Args:
        path: a comma-separated file of numbers, with or without a line of column names. Labels may
            be any text.

    Raises:
        DataError: with the line that cannot be used, and why.
        OSError: if there is no such file.
    """
    rows = _read_rows(path)
    names = sorted({label for _, label in rows})
    if len(names) < 2:
        raise DataError(
            f"{path}: every row has the label {names[0]!r}. The last column must hold at least two labels."
        )
    if len(names) > len(rows) // 2:
        raise DataError(
            f"{path}: {len(names)} different labels in {len(rows)} rows. "
            "The last column must be a label, not a measurement."
        )
    features = np.array([values for values, _ in rows])
    low, high = features.min(axis=0), features.max(axis=0)
    too_wide = np.flatnonzero(high / 2 - low / 2 > np.finfo(np.float64).max / 2)
    if len(too_wide):
        column = too_wide[0]
        raise DataError(
            f"{path}, column {column + 1}: {low[column]:g} to {high[column]:g} is too wide a range."
        )
    features = (features - low) / np.where(high > low, high - low, 1.0)
    labels = np.array([names.index(label) for _, label in rows])
    return _split(Path(path).name, features, labels, classes=len(names))


def _read_rows(path: str | Path) -> list[tuple[list[float], str]]:
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            lines = [(number, row) for number, row in enumerate(csv.reader(file), start=1) if any(row)]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8. Save it as a comma-separated UTF-8 file.") from error
    except csv.Error as error:
        raise DataError(f"{path} is not a table: {error}.") from error
    if len(lines) > 1 and not all(map(_is_number, lines[0][1][:-1])):
        lines = lines[1:]  # column names
    rows = [_row(path, number, row, columns=len(lines[0][1])) for number, row in lines]
    if len(rows) < FEWEST_ROWS:
        raise DataError(
            f"{path}: {len(rows)} rows of data; at least {FEWEST_ROWS} are needed to train and to test."
        )
    return rows


def _row(path: str | Path, number: int, row: list[str], columns: int) -> tuple[list[float], str]:
    where = f"{path}, line {number}"
    if columns < 2:
        other = next(
            (f" It has {mark!r}; columns are separated by commas." for mark in ";\t|" if mark in row[0]), ""
        )
        raise DataError(f"{where}: one column. At least one number and, last, a label are needed.{other}")
    if len(row) != columns:
        raise DataError(f"{where}: {len(row)} columns where the first row has {columns}.")
    for column, cell in enumerate(row[:-1], start=1):
        if not _is_number(cell):
            raise DataError(
                f"{where}, column {column}: {cell!r} is not a finite number. "
                "Every column but the last must be one."
            )
    if not row[-1].strip():
        raise DataError(f"{where}: the label, in the last column, is empty.")
    return [float(cell) for cell in row[:-1]], row[-1].strip()


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _split(
    name: str,
    features: NDArray[np.float64],
    labels: NDArray[np.int64],
    classes: int,
    picture: tuple[int, int] | None = None,
) -> Table:
    """Split at random, with a fixed seed."""
    order = np.random.default_rng(0).permutation(len(features))
    rows, names = features[order].astype(np.float32), labels[order].astype(np.int64)
    test = math.ceil(len(rows) * TEST_SHARE)
    return Table(name, rows[test:], rows[:test], names[test:], names[:test], classes, picture)
