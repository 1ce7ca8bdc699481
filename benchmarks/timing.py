"""Times several functions in turns.

A ratio is the median of the ratios of all rounds, so that whatever slows down a whole round cancels out. Its
spread is given by the quartiles.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["QUICK", "Effort", "Spread", "Times", "Work", "interleaved", "spread"]

LEAST = 5

Work = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds per call by the name of the work, one number for each round."""


@dataclass(frozen=True)
class Effort:
    """How long a comparison lasts.

    Attributes:
        rounds: the largest number of rounds.
        seconds: after this time no round begins, once there were five.
        turn: seconds that a work runs in a row, called repeatedly, because reading the clock takes time too.
    """

    rounds: int = 25
    seconds: float = 5.0
    turn: float = 0.01


QUICK = Effort(rounds=2, seconds=0.0, turn=0.0)


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    middle: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Return the median and the quartiles of two numbers or more.

    >>> spread([4.0, 1.0, 3.0, 2.0, 5.0])
    Spread(middle=3.0, low=2.0, high=4.0)
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def interleaved(
    works: Mapping[str, Work],
    effort: Effort,
    device: str = "cpu",
    before: Callable[[str], object] | None = None,
) -> Times:
    """Return the time that each work takes. They take turns, in an order that changes every round.

    Args:
        works: the functions to time, by name.
        effort: how long to measure.
        device: with "cuda" a turn lasts until PyTorch's device is idle.
        before: called with a work's name before its turn, which is then a single call. It is not timed.
    """
    wait = _wait(device)
    calls = {name: _calls(name, work, effort, wait, before) for name, work in works.items()}
    times: Times = {name: [] for name in works}
    names, end = list(works), time.perf_counter() + effort.seconds
    gc.collect()
    for turn in range(effort.rounds):
        if turn >= LEAST and time.perf_counter() > end:
            break
        random.Random(turn).shuffle(names)  # a work that always followed the same one found the same caches
        for name in names:
            times[name].append(_turn(name, works[name], calls[name], wait, before))
    return times


def _wait(device: str) -> Work:
    """Return a function that waits for PyTorch's device. Works of other frameworks do their own waiting."""
    torch = sys.modules.get("torch")
    return torch.cuda.synchronize if torch and device == "cuda" else lambda: None


def _calls(name: str, work: Work, effort: Effort, wait: Work, before: Callable[[str], object] | None) -> int:
    """Warm a work up, and return how many times to call it in a turn."""
    _turn(name, work, 1, wait, before)
    taken = _turn(name, work, 1, wait, before)
    return 1 if before else max(1, math.ceil(effort.turn / max(taken, 1e-9)))


def _turn(name: str, work: Work, calls: int, wait: Work, before: Callable[[str], object] | None) -> float:
    """Return the seconds of a call."""
    if before:
        before(name)
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return (time.perf_counter() - start) / calls
