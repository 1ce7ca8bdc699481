"""A policy that fits a log-normal distribution to the peak of the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from preamp.checks import FLOAT32_TINY, assign, between, power_of_two, to_float32, whole
from preamp.policy.base import Reading, Scalar, Where, choose, setting
from preamp.policy.bounded import Bounded
from preamp.policy.logarithm import GRID, log2_near, on_grid, power_below, two_to

FIRST_VARIANCE = 1.0  # until two peaks are known: a factor of two either way
MAX_OVERFLOW_DEVIATION = 4.0  # above the mean: overflows at every scale must not pull it up
MAX_MARGIN = 12.0  # with more, gradients would be flushed
LONGEST_MEMORY = 4096  # with more, one peak would add less than the grid resolves
COARSE_GRID, MAX_SQUARE = 2.0**-5, 256.0  # squares of its multiples are on the grid and exact in float32
UNSETTLED = 2.0**-4  # of the aim: the scale returns to this at once after an overflow


class LogMaxState(NamedTuple):
    """`State` plus statistics of the peak. Logarithms are to the base 2, of the peak before scaling.

    Attributes:
        scale: as in `State`.
        good: clean steps since the last overflow.
        bad: overflows in a row.
        mean: of the logarithm of the peak.
        variance: of the same, around the mean.
        peaks: how many peaks are in these averages. A float32 counts to 2**24 and stays there.
        zeros: clean steps with a peak of 0 since the last peak above 0.
    """

    scale: Scalar
    good: Scalar
    bad: Scalar
    mean: Scalar
    variance: Scalar
    peaks: Scalar
    zeros: Scalar


@dataclass(frozen=True, kw_only=True, repr=False)
class LogMax(Bounded[LogMaxState]):
    """Aim at the scale at which a step overflows with a chosen probability (OpenSeq2Seq's rule).

    The logarithm of the peak is taken as normally distributed. With its running mean and deviation, the scale
    is 2**(log_max - mean - deviations * deviation), rounded down to a power of two: scaling is exact.

    As published, except for: a peak of 0 is left out of the averages; `log_max` replaces the constant 16; an
    overflow counts as a scaled peak of 2**log_max, not as one before scaling, and as at most 16 times the
    mean; the memories are powers of two, so that every framework rounds alike; the first averages are plain
    ones; and the last peak must not overflow. So that the scale cannot get stuck, an overflow backs off at
    once, and after `search_interval` peaks of 0 in a row, which may have been flushed, the scale grows until
    a peak is above 0; the averages then restart from that peak.

    Source: `LogMaxScaler` of OpenSeq2Seq, Kuchaiev et al. 2018 (arXiv 1805.10387).

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

    growth_factor: float = setting(4.0, "what a growth multiplies the scale by. Used only after peaks of 0.")
    log_max: float = setting(16.0, "log2 of where gradients overflow. 16 for float16, 15.8 for float8_e5m2.")
    deviations: float = setting(
        3.09,
        "standard deviations between mean and `log_max`. With 3.09 one step in a thousand overflows.",
    )
    mean_steps: int = setting(128, "the memory of the mean, in steps. A power of two, at most 4096.")
    variance_steps: int = setting(1024, "the memory of the variance, in steps. A power of two, at most 4096.")
    settle_interval: int = setting(
        16,
        "clean steps after an overflow before the scale returns to its target. It returns to a sixteenth "
        "of it at once.",
    )
    search_interval: int = setting(
        16, "peaks of 0 in a row before the scale grows. It then grows on each further one."
    )

    _log_max: ClassVar[float]  # as they are used: on the grid, and in float32
    _deviations: ClassVar[float]

    def start(self) -> LogMaxState:
        return LogMaxState(self.init_scale, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def advance(self, state: LogMaxState, reading: Reading, where: Where = choose) -> LogMaxState:
        finite, peak, good = reading.finite, self.measured("peak", reading), state.good + 1.0
        # The scale has grown because peaks were 0: the averages are from before that, and restart.
        peaks = where(state.zeros >= self.search_interval, 0.0, state.peaks)
        # An overflow counts as a peak only when there is a mean, above which it is clipped.
        counts = where(finite, peak >= FLOAT32_TINY, peaks >= 1.0)
        zeros = where(counts, 0.0, state.zeros + 1.0)

        # The peak of an overflow is undefined. All that is known is that it reached log_max.
        scaled_peak = where(finite, peak, 2.0**self._log_max)
        latest = log2_near(self._stored(scaled_peak / state.scale), where)
        mean, variance = self._averages(state, peaks, latest, finite, where)
        aim = self._aim(mean, variance, latest, where)

        # The cause of the last overflow may persist: wait before returning to the aim.
        aimed = where(good >= self.settle_interval, aim, self._unsettled(state.scale, aim, where))
        searching = where(zeros >= self.search_interval, self._up(state.scale, where), state.scale)
        # Back off even where the averages do not ask for it, or one large outlier could overflow for ever.
        lowered = self._down(state.scale, where)
        lowered = where(counts, where(aim < lowered, aim, lowered), lowered)
        return LogMaxState(
            where(finite, where(counts, aimed, searching), lowered),
            where(finite, good, 0.0),
            where(finite, 0.0, state.bad + 1.0),
            where(counts, mean, state.mean),
            where(counts, variance, state.variance),
            where(counts, peaks + 1.0, state.peaks),
            where(finite, zeros, state.zeros),
        )

    def _averages(
        self, state: LogMaxState, peaks: Scalar, latest: Scalar, finite: Scalar, where: Where
    ) -> tuple[Scalar, Scalar]:
        """Return mean and variance with one more peak. Its weight is a power of two, so nothing rounds."""
        most = state.mean + MAX_OVERFLOW_DEVIATION
        deviation = where(finite, latest, where(latest < most, latest, most)) - state.mean
        # Plain averages at first, exponential ones once there are more peaks than the memory holds.
        plain = 1.0 / power_below(peaks + 1.0, where)
        of_mean, of_variance = 1.0 / self.mean_steps, 1.0 / self.variance_steps
        mean = state.mean + _nearest(deviation * where(plain > of_mean, plain, of_mean))

        coarse = deviation // COARSE_GRID * COARSE_GRID
        square = where(peaks < 1.0, FIRST_VARIANCE, coarse * coarse)
        change = where(square < MAX_SQUARE, square, MAX_SQUARE) - state.variance
        return mean, state.variance + _nearest(change * where(plain > of_variance, plain, of_variance))

    def _aim(self, mean: Scalar, variance: Scalar, latest: Scalar, where: Where) -> Scalar:
        """Return the scale that overflows with the chosen probability, and does not with the latest peak."""
        margin = on_grid(self._stored(self._deviations * self._stored(variance**0.5)))
        power = self._log_max - mean - where(margin < MAX_MARGIN, margin, MAX_MARGIN)
        highest = self._log_max - latest
        return self._clamped(two_to(where(power < highest, power, highest), where), where)

    def _unsettled(self, scale: Scalar, aim: Scalar, where: Where) -> Scalar:
        """Return the scale soon after an overflow: well below the aim, or the present one if it is higher."""
        below = aim * UNSETTLED
        high = where(scale > below, scale, below)
        return where(high < aim, high, aim)

    def __post_init__(self) -> None:
        between("log_max", self.log_max, -126.0, 128.0, instead="log_max=16.0, which is float16's")
        between("deviations", self.deviations, 0.0, math.inf, instead="deviations=3.09")
        power_of_two("mean_steps", self.mean_steps, most=LONGEST_MEMORY, instead="mean_steps=128")
        power_of_two(
            "variance_steps", self.variance_steps, most=LONGEST_MEMORY, instead="variance_steps=1024"
        )
        whole("settle_interval", self.settle_interval, least=1, instead="settle_interval=16")
        whole("search_interval", self.search_interval, least=1, instead="search_interval=16")
        assign(self, _log_max=on_grid(float(self.log_max)), _deviations=to_float32(float(self.deviations)))
        super().__post_init__()


def _nearest(x: Scalar) -> Scalar:
    return on_grid(x + 0.5 * GRID)
