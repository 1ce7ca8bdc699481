"""Models of how large gradients are, step by step, before scaling: recorded, or drawn from a formula.

They determine how often a scale overflows and what it flushes. In all of them, log2 of the step's
largest magnitude is

    level + trend(t) + excess

where the typical amax is 2**(level + trend(t)) and the excess is random and independent from step to step.
Below the typical amax the entries are log-normal: log2 of their magnitude is normal around a middle `depth`
powers of two down, with a standard deviation of `spread`, and cut off at the typical amax.

`Losses` are something else, a run's losses and gradient norms with spikes at known steps, to try guards on:

    loss = level(t) * exp(width(t) * N(0, 1))        norm = norm_level(t) * exp(jitter * N(0, 1))

A planted spike multiplies the loss by 1.3 to 5 and the norm by 4 to 40, both log-uniform. Every other step is
ordinary, and a guard that skips it raises a false alarm.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from preamp.checks import between, one_of, whole
from preamp.errors import TraceError
from preamp.policy import Reading
from preamp.record.exponents import BANDS, Band
from preamp.record.trace import Trace
from preamp.scaling import Step

__all__ = [
    "Drawn",
    "Drifting",
    "FallingLoss",
    "Gradients",
    "HeavyTailed",
    "Losses",
    "NaNLoss",
    "Outcome",
    "Process",
    "Recorded",
    "RestingLoss",
    "SpikeOutcome",
    "SpikeRuns",
    "Spiky",
    "Stationary",
    "has_amax",
    "longest_skipped_run",
]

STEPS_A_SKIP = 1000  # the best scale may skip one step in so many
LEAST, MOST = -126, 127  # exponents that a scale can have
FARTHEST = 500.0  # powers of two from 1; products of two such numbers and a scale fit in float64
HIGHEST = 1000.0
GRID = 1.0 / 16.0  # of log2 of the typical amax, so that the flushed share is computed once for many steps
_NORMAL = NormalDist()
LOSS_HEIGHT, NORM_HEIGHT = (1.3, 5.0), (4.0, 40.0)
UNDISTURBED = 24  # the first steps have no spikes: no rule can tell what is usual then


class Gradients(NamedTuple):
    """The gradients of one step, as they would be without a loss scale.

    Attributes:
        amax: the largest magnitude on any rank; inf where they overflow at every scale.
        typical: the amax of a usual step on a usual rank.
    """

    amax: float
    typical: float


class Outcome(NamedTuple):
    """The result of a policy on a process.

    Attributes:
        steps: steps until the end, or until the policy gave up.
        skipped: steps that overflowed.
        flushed: share of the entries that were rounded to 0, the mean over the steps that were applied, from
            0 to 1; None if none was.
        best_scale: `Process.best_scale`.
        reached: steps before the first whose scale was within a factor 2 of the best; None if none was.
        final_scale: the scale after the last step; None without steps.
    """

    steps: int
    skipped: int
    flushed: float | None
    best_scale: float | None
    reached: int | None
    final_scale: float | None


@dataclass(frozen=True, kw_only=True)
class Process(ABC):
    """A series of `Gradients`, the same whenever it is iterated over.

    A process of your own is one subclass: a frozen dataclass with `draw`.

    Args:
        dtype: the format that overflows and flushes: a name in `preamp.record.exponents.BANDS`.
        depth: how many powers of two the middle of the entries is below the typical amax.
        spread: standard deviation of log2 of the entries' magnitudes, before they are cut off at the amax.

    With the defaults of `depth` and `spread`, float16 loses about 0.03 percent at the best scale, and 2
    percent at a scale 4096 times lower: the order of what a small network on handwritten digits loses.
    """

    dtype: str = "float16"
    depth: float = 12.0
    spread: float = 8.0

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, tuple(BANDS))
        between("depth", self.depth, 0.0, FARTHEST, instead="depth=12.0")
        between("spread", self.spread, 0.0, FARTHEST, instead="spread=8.0")

    @abstractmethod
    def draw(self) -> Iterator[Gradients]:
        """Return the gradients of every step."""

    def __iter__(self) -> Iterator[Gradients]:
        return iter(self._drawn)

    @cached_property
    def _drawn(self) -> tuple[Gradients, ...]:
        return tuple(self.draw())

    @property
    def band(self) -> Band:
        """The range of the low precision."""
        return BANDS[self.dtype]

    @property
    def top(self) -> float:
        """The smallest magnitude that is rounded to more than the largest that is finite."""
        band = self.band
        ulp = 2.0 ** (math.frexp(band.largest)[1] - 1) * band.smallest / band.normal
        return band.largest + ulp / 2.0

    @property
    def bottom(self) -> float:
        """The largest magnitude that is rounded to 0."""
        return self.band.smallest / 2.0

    def flushed(self, typical: float) -> float:
        """Return the share of entries that are rounded to 0, given the scaled typical amax."""
        if typical <= self.bottom:
            return 1.0
        below = math.log2(self.bottom / typical) + self.depth
        return _below(below / self.spread) / _below(self.depth / self.spread)

    @cached_property
    def best_scale(self) -> float | None:
        """The highest power of two that, as a constant scale, overflows in at most one step in 1000.

        None if there is none between 2**-126 and 2**127.
        """
        allowed = len(self._drawn) // STEPS_A_SKIP
        amaxes = heapq.nlargest(allowed + 1, (gradients.amax for gradients in self))
        if not amaxes:
            return None
        power = MOST
        while power >= LEAST and amaxes[-1] * 2.0**power >= self.top:
            power -= 1
        return 2.0**power if power >= LEAST else None

    def outcome(self, trace: Trace) -> Outcome:
        """Return the result of a policy on this process.

        Args:
            trace: what `simulate` returned for it.
        """
        summary = trace.summary()
        zeros = [step.zeros for step in trace if step.zeros is not None]
        best = self.best_scale
        near = (n for n, step in enumerate(trace) if best and best / 2.0 <= step.scale <= best * 2.0)
        return Outcome(
            steps=summary.steps,
            skipped=summary.skipped,
            flushed=math.fsum(zeros) / len(zeros) if zeros else None,
            best_scale=best,
            reached=next(near, None),
            final_scale=summary.final_scale,
        )


@dataclass(frozen=True, kw_only=True)
class Drawn(Process):
    """The base of processes that are drawn from a formula.

    Args:
        steps: how many steps there are.
        seed: of the random numbers.
        level: log2 of the typical amax at the first step.
        ranks: how many ranks draw an excess of their own in every step; the largest counts.

    The other arguments are those of `Process`.
    """

    steps: int = 20_000
    seed: int = 0
    level: float = -8.0
    ranks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("steps", self.steps, least=1, instead="steps=20_000")
        whole("seed", self.seed, least=0, instead="seed=0")
        whole("ranks", self.ranks, least=1, instead="ranks=1")
        between("level", self.level, -FARTHEST, FARTHEST, instead="level=-8.0")

    def draw(self) -> Iterator[Gradients]:
        rng = Random(self.seed)
        for step in range(self.steps):
            power = self.level + self.trend(step)
            typical = 2.0 ** (round(power / GRID) * GRID)
            yield Gradients(2.0 ** min(power + self.excess(rng), HIGHEST), typical)

    def trend(self, step: int) -> float:
        """Return how many powers of two the typical amax has moved."""
        return 0.0

    @abstractmethod
    def excess(self, rng: Random) -> float:
        """Return how many powers of two the largest amax of all ranks is above the typical one."""

    def rarity(self, rng: Random) -> float:
        """Draw the chance with which one rank exceeds the largest excess of all ranks in a step.

        In (1 - q)**N of all steps, none of N ranks exceeds a value that each exceeds with chance q.
        """
        return max(-math.expm1(math.log1p(-rng.random()) / self.ranks), 2.0**-60)


@dataclass(frozen=True, kw_only=True)
class Stationary(Drawn):
    """The excess is normal: amaxes are log-normal around a constant level.

    excess = jitter * N(0, 1); trend = 0.

    Args:
        jitter: standard deviation of log2 of the amaxes.

    The other arguments are those of `Drawn`.

    >>> process = Stationary(steps=1000, jitter=0.25)
    >>> process.best_scale, f"{process.flushed(2.0**-8 * process.best_scale):.6f}"
    (8388608.0, '0.000249')
    """

    jitter: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        between("jitter", self.jitter, 0.0, FARTHEST, instead="jitter=0.5")

    def excess(self, rng: Random) -> float:
        return -self.jitter * _NORMAL.inv_cdf(self.rarity(rng))


@dataclass(frozen=True, kw_only=True)
class Drifting(Stationary):
    """The typical amax moves by the same number of powers of two in every step.

    excess = jitter * N(0, 1); trend = drift * t / steps.

    Args:
        drift: powers of two from the first step to the last; negative where gradients shrink.

    The other arguments are those of `Stationary`.
    """

    drift: float = -12.0

    def __post_init__(self) -> None:
        super().__post_init__()
        between("drift", self.drift, -FARTHEST, FARTHEST, instead="drift=-12.0")

    def trend(self, step: int) -> float:
        return self.drift * step / self.steps


@dataclass(frozen=True, kw_only=True)
class Spiky(Stationary):
    """Now and then a step's amax is much larger, as after a bad batch.

    excess = jitter * N(0, 1) + height * [a spike on any rank]; trend = 0.

    Args:
        height: powers of two by which a spike raises the amax.
        chance: of a spike, on each rank and in each step.

    The other arguments are those of `Stationary`.
    """

    height: float = 8.0
    chance: float = 0.0005

    def __post_init__(self) -> None:
        super().__post_init__()
        between("height", self.height, 0.0, FARTHEST, instead="height=8.0")
        between("chance", self.chance, 0.0, 1.0, instead="chance=0.0005")

    def excess(self, rng: Random) -> float:
        spike = self.rarity(rng) < self.chance
        return super().excess(rng) + (self.height if spike else 0.0)


@dataclass(frozen=True, kw_only=True)
class HeavyTailed(Drawn):
    """The amaxes have a power law (Pareto): no scale is free of overflows.

    P(excess > d) = 2**(-tail * d) for d >= 0; trend = 0.

    Args:
        tail: the index: a scale that is twice as high overflows 2**tail times as often.

    The other arguments are those of `Drawn`.
    """

    tail: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        between("tail", self.tail, 0.0, FARTHEST, instead="tail=1.5")

    def excess(self, rng: Random) -> float:
        return -math.log2(self.rarity(rng)) / self.tail


@dataclass(frozen=True, eq=False)
class Recorded(Process):
    """The gradients of a recorded run, as far as its amaxes determine them.

    The amax of a clean step is the recorded one divided by its scale, and does not overflow at that scale. A
    step that overflowed has the smallest amax that overflows at its scale, or the last known one if that is
    larger. Other steps without an amax have the last known one, or else the next.

    Args:
        trace: the steps; some of them with an amax.

    The other arguments are those of `Process`.

    Raises:
        TraceError: if no step has an amax.
    """

    trace: Trace

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(has_amax(step) for step in self.trace):
            raise TraceError(
                f"{self.trace!r} has no amaxes, so what overflows at another scale is not known. "
                "Write simulate(policy, trace), where the same steps overflow at every scale."
            )

    def draw(self) -> Iterator[Gradients]:
        known = next(
            step.amax / step.scale for step in self.trace if step.amax is not None and has_amax(step)
        )
        for step in self.trace:
            amax = self._amax(step, known)
            known = amax if step.finite else known
            yield Gradients(amax, known)

    def _amax(self, step: Step, known: float) -> float:
        if not 0.0 < step.scale < math.inf:
            return known if step.finite else math.inf
        if not step.finite:
            return max(known, math.nextafter(self.top / step.scale, math.inf))
        recorded = step.amax / step.scale if step.amax is not None and has_amax(step) else known
        return min(recorded, math.nextafter(self.top, 0.0) / step.scale)


def has_amax(step: Step) -> bool:
    """Return whether the record of a step has the size of its unscaled gradients."""
    known = step.finite and step.amax is not None and math.isfinite(step.amax)
    return known and 0.0 < step.scale < math.inf


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
    """The loss stays at one level; only noise and spikes move it.

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


def longest_skipped_run(trace: Trace) -> int:
    """Return the most steps that were skipped in a row."""
    runs = groupby(trace.column("skipped"))
    return max([len(list(run)) for skipped, run in runs if skipped], default=0)


def _height(rng: Random, bounds: tuple[float, float]) -> float:
    low, high = map(math.log, bounds)
    return math.exp(rng.uniform(low, high))


def _below(deviations: float) -> float:
    """Return the share of a normal distribution below so many deviations."""
    return 0.5 * math.erfc(-deviations * math.sqrt(0.5))
