"""The last values of a series, with their mean and standard deviation.

On the host a window is a tuple, oldest value first. In a framework it is a vector of fixed size, and a second
vector has the age of each place, because elementwise operators and ``where`` are all that is shared: the new
value goes to the place with the highest age.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from preamp.policy.base import Scalar, Where

LARGE = 1e15
"""Differences above it are divided before they are squared: float32 ends at 3e38."""


class Window(NamedTuple):
    """The last values of a series.

    Attributes:
        values: a vector; a place that has no value yet holds 0.
        ages: of each place, 0 for the newest value.
        known: how many values there were so far, at most the size.
    """

    values: Scalar
    ages: Scalar
    known: Scalar


def empty(size: int) -> Window:
    """Return a window without values."""
    return Window((0.0,) * size, tuple(float(age) for age in range(size - 1, -1, -1)), 0.0)


def push(window: Window, value: Scalar, where: Where) -> Window:
    """Return the window with a new value in the place of the oldest."""
    values, ages, count = window
    if isinstance(values, tuple):
        values = _oldest_first(window)
        size = len(values)
        return Window((*values[1:], value), empty(size).ages, min(count + 1.0, float(size)))
    size = values.shape[0]
    ages = where(ages >= size - 1.0, 0.0, ages + 1.0)
    count = where(count < size, count + 1.0, count)
    return Window(where(ages == 0.0, value, values), ages, count)


def mean_and_std(window: Window, where: Where, *, unbiased: bool) -> tuple[Scalar, Scalar]:
    """Return mean and standard deviation; NaN without enough values, or with NaN or inf among them."""
    values, ages, count = window
    if isinstance(values, tuple):
        given = _oldest_first(window)[len(values) - int(count) :]
        few = len(given) < (2 if unbiased else 1)
        mean = sum(given) / len(given) if given else math.nan
        if few:
            return mean, math.nan
        squares = sum([(value - mean) * (value - mean) for value in given])
        return mean, math.sqrt(squares / (len(given) - 1 if unbiased else len(given)))
    is_known = ages < count
    mean = _total(where(is_known, values, 0.0)) / count
    apart = where(is_known, values - mean, 0.0)
    size = _largest(where(apart < 0.0, -apart, apart), where)
    unit = where(size > LARGE, size, 1.0)
    apart = apart / unit
    return mean, (_total(apart * apart) / (count - 1.0 if unbiased else count)) ** 0.5 * unit


def _oldest_first(window: Window) -> tuple[float, ...]:
    """Return values in the order of their age; a state that was saved by a framework has another order."""
    values, ages, _ = window
    if ages[0] == len(values) - 1.0:
        return values  # type: ignore[no-any-return]
    pairs = sorted(zip(ages, values, strict=True), key=lambda pair: -pair[0])
    return tuple(value for _, value in pairs)


def _total(vector: Scalar) -> Scalar:
    """Return the sum of a vector. By halves: slices and sums are what all frameworks share."""
    size, rest = vector.shape[0], 0.0
    while size > 1:
        half = size // 2
        if size % 2:
            rest = rest + vector[size - 1]
        vector, size = vector[:half] + vector[half : 2 * half], half
    return vector[0] + rest


def _largest(vector: Scalar, where: Where) -> Scalar:
    """Return the largest entry of a vector, by halves as `_total` does."""
    size, rest = vector.shape[0], vector[0]
    while size > 1:
        half = size // 2
        if size % 2:
            rest = where(vector[size - 1] > rest, vector[size - 1], rest)
        first, second = vector[:half], vector[half : 2 * half]
        vector, size = where(first > second, first, second), half
    return where(vector[0] > rest, vector[0], rest)
