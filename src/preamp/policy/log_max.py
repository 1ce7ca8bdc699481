"""A rule that fits a log-normal distribution to the peak of the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from preamp.checks import FLOAT32_TINY, assign, between, power_of_two, to_float32
from preamp.policy.base import Reading, Where, choose
from preamp.policy.dynamic import Moving
from preamp.policy.logarithm import GRID, log2_near, on_grid, power_below, two_to

FIRST_VARIANCE = 1.0  # before two peaks are known, a factor of two either way is usual
MOST_SURPRISE = (
    4.0  # by how much an overflow counts above the mean: infs that come at any scale must not drown it
)
MOST_MARGIN = 12.0  # beyond, peaks would be flushed for fear of overflows
LONGEST = 4096  # memory: beyond, what one peak adds is less than the grid resolves
COARSE, MOST_SQUARE = 2.0**-5, 256.0  # so that squares are on the grid and exact in a float32
UNSETTLED = 2.0**-4  # of the aim: where the scale may go at once after an overflow


class LogMaxState(NamedTuple):
    """`State` plus what is known of the peak. Logarithms are to the base 2, of the peak before scaling.

    Attributes:
        scale: as in `State`.
        good: clean steps since the last overflow.
        bad: overflows in a row.
        mean: of the logarithm of the peak.
        variance: of the same, around the mean.
        seen: how many peaks the two are made of. A float32 counts to 2**24 and stays there.
        unseen: clean steps with a peak of 0 since the last peak above.
    """

    scale: Any
    good: Any
    bad: Any
    mean: Any
    variance: Any
    seen: Any
    unseen: Any


@dataclass(frozen=True, kw_only=True, repr=False)
class LogMax(Moving[LogMaxState]):
    """Aim at the scale that a step overflows with a chosen probability (OpenSeq2Seq's rule).

    The logarithm of the peak is taken as normal. With its running mean and deviation, the scale is
    2**(log_max - mean - deviations * deviation), rounded down to a power of two: scaling is exact.

    As published, except for: a peak of 0 is left out of the averages; `log_max` stands where the constant 16
    did; an overflow counts as a scaled peak of 2**log_max, not as one before scaling, and as at most 16 times
    the mean; the memories are powers of two, so that every framework rounds alike; the first averages are
    plain ones; and the last peak has to fit. So that it cannot get stuck, an overflow backs off at once, and
    `growth_interval` peaks of 0 in a row, which may be flushed ones, let the scale grow until there is
    something to see, with which the averages begin anew.

    Args:
        log_max: the logarithm to the base 2 of where the gradients overflow: 16 for float16, 15.8 for
            float8_e5m2.
        deviations: how many standard deviations lie between the mean and `log_max`. 3.09: one step in
            a thousand overflows.
        mean_steps: the memory of the mean, in steps. A power of two, at most 4096.
        variance_steps: the memory of the variance, likewise.
        growth_interval: clean steps after an overflow before the scale may reach its aim again; up to
            a sixteenth of it, it goes at once. And how many peaks of 0 in a row it takes for the scale
            to grow on each further one.
        growth_factor: what such a growth multiplies the scale by.

    The other arguments are those of `Moving`. Source: `LogMaxScaler` of OpenSeq2Seq, Kuchaiev et al. 2018
    (arXiv 1805.10387).

    >>> policy = LogMax(init_scale=8)
    >>> state = policy.start()
    >>> for peak in (0.5, 256.0, 300.0):
    ...     state = policy.step(state, Reading(finite=True, peak=peak))
    ...     print(state.scale)
    4096.0
    8192.0
    16384.0
    """

    needs: ClassVar[frozenset[str]] = frozenset({"peak"})
    signed: ClassVar[frozenset[str]] = frozenset({"mean"})

    log_max: float = 16.0
    deviations: float = 3.09
    mean_steps: int = 128
    variance_steps: int = 1024
    growth_interval: int = 16
    growth_factor: float = 4.0

    _log_max: ClassVar[float]  # as they are used: on the grid, and in float32
    _deviations: ClassVar[float]

    def start(self) -> LogMaxState:
        return LogMaxState(self.init_scale, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def advance(self, state: LogMaxState, reading: Reading, where: Where = choose) -> LogMaxState:
        finite, peak, good = reading.finite, self.measured("peak", reading), state.good + 1.0
        seen = where(self._grows(state.unseen), 0.0, state.seen)  # what growing brings to light is new
        known = where(finite, peak >= FLOAT32_TINY, seen >= 1.0)
        unseen = where(known, 0.0, state.unseen + 1.0)

        top = where(finite, peak, 2.0**self._log_max)
        latest = log2_near(self._stored(top / state.scale), where)
        mean, variance = self._averages(state, seen, latest, finite, where)
        aim = self._aim(mean, variance, latest, where)

        settled = where(self._grows(good), aim, self._unsettled(state.scale, aim, where))
        searching = where(self._grows(unseen), self._up(state.scale, where), state.scale)
        lowered = self._down(state.scale, where)
        lowered = where(known, where(aim < lowered, aim, lowered), lowered)
        return LogMaxState(
            where(finite, where(known, settled, searching), lowered),
            where(finite, good, 0.0),
            where(finite, 0.0, state.bad + 1.0),
            where(known, mean, state.mean),
            where(known, variance, state.variance),
            where(known, seen + 1.0, state.seen),
            where(finite, unseen, state.unseen),
        )

    def _averages(
        self, state: LogMaxState, seen: Any, latest: Any, finite: Any, where: Where
    ) -> tuple[Any, Any]:
        """Return mean and variance with one more peak. Its weight is a power of two, so nothing rounds."""
        most = state.mean + MOST_SURPRISE
        surprise = where(finite, latest, where(latest < most, latest, most)) - state.mean
        fresh = 1.0 / power_below(seen + 1.0, where)
        slow, slower = 1.0 / self.mean_steps, 1.0 / self.variance_steps
        mean = state.mean + _nearest(surprise * where(fresh > slow, fresh, slow))

        coarse = surprise // COARSE * COARSE
        square = where(seen < 1.0, FIRST_VARIANCE, coarse * coarse)
        change = where(square < MOST_SQUARE, square, MOST_SQUARE) - state.variance
        return mean, state.variance + _nearest(change * where(fresh > slower, fresh, slower))

    def _aim(self, mean: Any, variance: Any, latest: Any, where: Where) -> Any:
        """Return the scale that overflows with the chosen probability, and does not with the latest peak."""
        margin = on_grid(self._stored(self._deviations * self._stored(variance**0.5)))
        power = self._log_max - mean - where(margin < MOST_MARGIN, margin, MOST_MARGIN)
        highest = self._log_max - latest
        return self._bounded(two_to(where(power < highest, power, highest), where), where)

    def _unsettled(self, scale: Any, aim: Any, where: Where) -> Any:
        """Return the scale soon after an overflow: well below the aim, or where it is if that is higher."""
        below = aim * UNSETTLED
        high = where(scale > below, scale, below)
        return where(high < aim, high, aim)

    def __post_init__(self) -> None:
        between("log_max", self.log_max, -126.0, 128.0, instead="log_max=16.0, which is float16's")
        between("deviations", self.deviations, 0.0, math.inf, instead="deviations=3.09")
        power_of_two("mean_steps", self.mean_steps, most=LONGEST, instead="mean_steps=128")
        power_of_two("variance_steps", self.variance_steps, most=LONGEST, instead="variance_steps=1024")
        assign(self, _log_max=on_grid(float(self.log_max)), _deviations=to_float32(float(self.deviations)))
        Moving.__post_init__(self)


def _nearest(x: Any) -> Any:
    return on_grid(x + 0.5 * GRID)
