"""Models of a run's losses and gradient norms, step by step, with spikes at known steps, to try guards on.

In all of them

    loss = level(t) * exp(width(t) * N(0, 1))        norm = norm_level(t) * exp(jitter * N(0, 1))

and a planted spike multiplies the loss by 1.3 to 5 and the norm by 4 to 40, both log-uniform. Every other
step is ordinary, and a guard that skips it raises a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from random import Random
from typing import NamedTuple

from preamp.checks import between, whole
from preamp.policy import Reading
from preamp.record.trace import Trace

__all__ = [
    "FallingLoss",
    "HeavyTailedNorms",
    "Losses",
    "NaNLoss",
    "PlateauLoss",
    "RestingLoss",
    "ShiftingLoss",
    "SpikeOutcome",
    "SpikeRuns",
    "WideningLoss",
    "longest_skipped_run",
]

LOSS_HEIGHT, NORM_HEIGHT = (1.3, 5.0), (4.0, 40.0)
UNDISTURBED = 24  # the first steps have no spikes: no rule can tell what is usual then


class SpikeOutcome(NamedTuple):
    """The result of a guard on a series of losses.

    Attributes:
        steps: steps until the end, or until the policy gave up.
        skipped: steps that were not applied, overflows included.
        spikes: planted spikes among the steps.
        missed: planted spikes that were taken.
        false_alarms: ordinary steps that the guard skipped.
        longest_run: the most steps that were skipped in a row.
    """

    steps: int
    skipped: int
    spikes: int
    missed: int
    false_alarms: int
    longest_run: int


@dataclass(frozen=True, kw_only=True)
class Losses:
    """A series of readings with a loss and a norm, the same whenever it is iterated over.

    A process of your own is one subclass: a frozen dataclass with some of `level`, `width`, `norm_level` and
    `disturbed`.

    Args:
        steps: how many steps there are.
        seed: of the random numbers.
        chance: of a planted spike, in each step.
        loss: where the loss rests.
        noise: standard deviation of the logarithm of the loss.
        jitter: standard deviation of the logarithm of the norm, which rests at 1.
    """

    steps: int = 3000
    seed: int = 0
    chance: float = 0.004
    loss: float = 2.5
    noise: float = 0.01
    jitter: float = 0.15

    def __post_init__(self) -> None:
        whole("steps", self.steps, least=1, instead="steps=3000")
        whole("seed", self.seed, least=0, instead="seed=0")
        between("chance", self.chance, -1e-9, 1.0, instead="chance=0.004")
        between("loss", self.loss, 0.0, 1e9, instead="loss=2.5")
        between("noise", self.noise, -1e-9, 10.0, instead="noise=0.01")
        between("jitter", self.jitter, -1e-9, 10.0, instead="jitter=0.15")

    def __iter__(self) -> Iterator[Reading]:
        return iter(self._drawn[0])

    @property
    def planted(self) -> frozenset[int]:
        """The steps that are spikes."""
        return self._drawn[1]

    @cached_property
    def _drawn(self) -> tuple[tuple[Reading, ...], frozenset[int]]:
        rng, readings, planted = Random(self.seed), list[Reading](), set[int]()
        for step in range(self.steps):
            loss = self.level(step) * math.exp(self.width(step) * rng.gauss(0.0, 1.0))
            norm = self.norm_level(step) * math.exp(self.norm_excess(rng))
            reading = self.disturbed(step, Reading(True, loss=loss, grad_norm=norm), rng)
            begins = step >= UNDISTURBED and rng.random() < self.chance
            if reading.finite and (begins or self.continues(step, planted)):
                planted.add(step)
                loss, norm = _height(rng, LOSS_HEIGHT), _height(rng, NORM_HEIGHT)
                reading = Reading(True, loss=loss * reading.loss, grad_norm=norm * reading.grad_norm)
            readings.append(reading)
        return tuple(readings), frozenset(planted)

    def level(self, step: int) -> float:
        """Return the usual loss."""
        return self.loss

    def width(self, step: int) -> float:
        """Return the standard deviation of the logarithm of the loss."""
        return self.noise

    def norm_level(self, step: int) -> float:
        """Return the usual norm."""
        return 1.0

    def norm_excess(self, rng: Random) -> float:
        """Draw the logarithm of the norm's ratio to the usual one."""
        return self.jitter * rng.gauss(0.0, 1.0)

    def disturbed(self, step: int, reading: Reading, rng: Random) -> Reading:
        """Return an ordinary step with what else may happen to it."""
        return reading

    def continues(self, step: int, planted: set[int]) -> bool:
        """Return whether a spike that was planted before is still there."""
        return False

    def outcome(self, trace: Trace) -> SpikeOutcome:
        """Return the result of a guard on this process.

        Args:
            trace: what `simulate` returned for it.
        """
        spikes = {step for step in self.planted if step < len(trace)}
        skipped = [step.index for step in trace if step.skipped]
        alarms = {step.index for step in trace if step.reason == "spike"}
        return SpikeOutcome(
            steps=len(trace),
            skipped=len(skipped),
            spikes=len(spikes),
            missed=len(spikes.difference(skipped)),
            false_alarms=len(alarms - spikes),
            longest_run=longest_skipped_run(trace),
        )


@dataclass(frozen=True, kw_only=True)
class RestingLoss(Losses):
    """The loss rests, and only noise and spikes move it.

    level(t) = loss; norm_level(t) = 1. The arguments are those of `Losses`.

    >>> process = RestingLoss(steps=500, seed=1)
    >>> sorted(process.planted), f"{[*process][0].loss:.3f}"
    ([175, 178, 183, 390, 461], '2.532')
    """


@dataclass(frozen=True, kw_only=True)
class FallingLoss(Losses):
    """The first thousand steps of a run: the loss falls quickly at first, and the norm with it.

    level(t) = loss * (1 + fall * exp(-t / time)); norm_level(t) = 1 + fall * exp(-t / time).

    Args:
        fall: how far above its end the loss begins, as a multiple of that.
        time: steps in which what is left falls to 1 / e.

    The other arguments are those of `Losses`.
    """

    steps: int = 1000
    chance: float = 0.01
    fall: float = 3.0
    time: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        between("fall", self.fall, 0.0, 1e6, instead="fall=3.0")
        between("time", self.time, 0.0, 1e9, instead="time=120.0")

    def level(self, step: int) -> float:
        return self.loss * self.norm_level(step)

    def norm_level(self, step: int) -> float:
        return 1.0 + self.fall * math.exp(-step / self.time)


@dataclass(frozen=True, kw_only=True)
class PlateauLoss(Losses):
    """A plateau with little noise, and now and then a step that is higher, as of a longer or rarer text.

    An ordinary step is higher with chance `rate`: its loss by a share of 2 to 6 percent, its norm by 1.5.

    Args:
        rate: the chance of a higher step.

    The other arguments are those of `Losses`.
    """

    noise: float = 0.003
    rate: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        between("rate", self.rate, -1e-9, 1.0, instead="rate=0.02")

    def disturbed(self, step: int, reading: Reading, rng: Random) -> Reading:
        is_higher, share = rng.random() < self.rate, rng.uniform(1.02, 1.06)
        if not is_higher:
            return reading
        return Reading(True, loss=share * reading.loss, grad_norm=1.5 * reading.grad_norm)


@dataclass(frozen=True, kw_only=True)
class SpikeRuns(Losses):
    """Spikes come in runs, as in a stretch of bad data.

    Args:
        length: of a run, in steps.

    The other arguments are those of `Losses`.
    """

    chance: float = 0.002
    length: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("length", self.length, least=1, instead="length=6")

    def continues(self, step: int, planted: set[int]) -> bool:
        run = 0
        while step - 1 - run in planted:
            run += 1
        return 0 < run < self.length


@dataclass(frozen=True, kw_only=True)
class ShiftingLoss(Losses):
    """The loss moves to another level and stays there, as where the data change: these steps are no spikes.

    In every second stretch of `every` steps the level is multiplied by `shift`, that of the norm by its square.

    Args:
        shift: the factor.
        every: steps from one shift to the next.

    The other arguments are those of `Losses`.
    """

    shift: float = 1.15
    every: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        between("shift", self.shift, 0.0, 1e6, instead="shift=1.15")
        whole("every", self.every, least=1, instead="every=500")

    def level(self, step: int) -> float:
        return self.loss * (self.shift if step // self.every % 2 else 1.0)

    def norm_level(self, step: int) -> float:
        return self.shift**2 if step // self.every % 2 else 1.0


@dataclass(frozen=True, kw_only=True)
class NaNLoss(Losses):
    """Now and then the loss is NaN and the gradients overflow: such a step is skipped by any guard.

    Args:
        rate: the chance of it.

    The other arguments are those of `Losses`.
    """

    rate: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        between("rate", self.rate, -1e-9, 1.0, instead="rate=0.001")

    def disturbed(self, step: int, reading: Reading, rng: Random) -> Reading:
        is_nan = rng.random() < self.rate
        return Reading(False, loss=math.nan, grad_norm=math.nan) if is_nan else reading


@dataclass(frozen=True, kw_only=True)
class HeavyTailedNorms(Losses):
    """The norms have a power law (Pareto), as with small batches or reinforcement learning.

    P(norm > x) = x**-tail for x >= 1.

    Args:
        tail: the index.

    The other arguments are those of `Losses`.
    """

    tail: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        between("tail", self.tail, 0.0, 1e6, instead="tail=4.0")

    def norm_excess(self, rng: Random) -> float:
        return rng.expovariate(1.0) / self.tail


@dataclass(frozen=True, kw_only=True)
class WideningLoss(Losses):
    """The noise of the loss grows and shrinks again.

    width(t) = noise * factor**sin(pi * t / period)**2

    Args:
        factor: the largest width, as a multiple of the smallest.
        period: steps from one smallest width to the next.

    The other arguments are those of `Losses`.
    """

    factor: float = 5.0
    period: float = 1000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        between("factor", self.factor, 0.0, 1e3, instead="factor=5.0")
        between("period", self.period, 0.0, 1e9, instead="period=1000.0")

    def width(self, step: int) -> float:
        return float(self.noise * self.factor ** math.sin(math.pi * step / self.period) ** 2)


def longest_skipped_run(trace: Trace) -> int:
    """Return the most steps that were skipped in a row."""
    runs = groupby(trace.column("skipped"))
    return max([len(list(run)) for skipped, run in runs if skipped], default=0)


def _height(rng: Random, bounds: tuple[float, float]) -> float:
    low, high = map(math.log, bounds)
    return math.exp(rng.uniform(low, high))
