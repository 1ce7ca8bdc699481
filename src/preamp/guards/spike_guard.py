"""preamp's own guard: robust against the spikes that it has to find, with a handful of floats as state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from preamp.checks import one_of, positive, whole
from preamp.guards.base import Guard, Verdict
from preamp.policy.base import Reading, Scalar, Where, choose, setting

# How much of the last values the statistics remember. The level follows a loss that falls; the width has to
# be estimated from more values, or it is too small by chance now and then.
LEVEL_MEMORY = 16.0
WIDTH_MEMORY = 128.0
ABOUT_NORMAL = 0.8862269254527580  # mean of |x - y| of two normal numbers, to their standard deviation
# A rise of a loss by 12 percent is never a spike at the default of six widths, nor one of a norm by 77.
LEAST_LOSS_WIDTH = 0.02  # of the loss itself
LEAST_NORM_WIDTH = 0.1
FEW = 8.0  # a width of n values is taken to be larger by the factor 1 + FEW / n
NEAR = 2.0  # a step within so many times the distance of the limit is near it
LARGEST_RATIO = 1e6  # of successive norms: the next limit must not be inf
LARGEST = 1e30  # a limit stays below inf


class Track(NamedTuple):
    """What the guard remembers of one series.

    Attributes:
        level: where the series is.
        width: the standard deviation of one step, of a norm that of its logarithm, about.
        last: the last value that entered.
        averaged: how many values the level is the mean of.
        steps: how many values have entered so far.
    """

    level: Scalar
    width: Scalar
    last: Scalar
    averaged: Scalar
    steps: Scalar


class SpikeState(NamedTuple):
    """The state of a `SpikeGuard`: twelve floats.

    Attributes:
        loss: of the losses.
        grad_norm: of the norms.
        run: steps that were skipped in a row.
        near: 1 if the last of these was near its limit, else 0.
    """

    loss: Track
    grad_norm: Track
    run: Scalar
    near: Scalar


@dataclass(frozen=True, kw_only=True, repr=False)
class SpikeGuard(Guard[SpikeState]):
    """Skip a step whose loss or gradient norm is far above its recent values, or not finite.

    ```
    loss limit = level + sigmas * width            width: of the differences of successive losses
    norm limit = level * (1 + width)**sigmas       width: of the ratios of successive norms, minus 1
    a step above a limit is skipped, and enters nothing
    a step below enters: level and width are exponential means over about 16 and 128 steps
    after `patience` skipped steps in a row the next finite one is taken, and the level starts there
    a step is near if it is above a limit, but not above level + 2 * (limit - level); with norms as powers
    after a near step that was skipped, another near one is taken, and the level starts there
    ```

    The statistics are taken of successive steps, so a loss that falls does not widen them. They have
    no use for values that were skipped, so several spikes in a row are all skipped. Only values above a limit
    are spikes. A width is at least 2 percent of the loss, and 0.1 of the norm, so that on a plateau the
    limits are 12 percent above the loss and 77 above the norm at the least; while it is known from n values
    only, it is taken to be 1 + 8 / n times as large.

    >>> guard = SpikeGuard(warmup=2)
    >>> state = guard.start()
    >>> for loss in (2.0, 2.1, 1.9, 2.0, 20.0, 1.9):
    ...     reading = Reading(finite=True, loss=loss)
    ...     print(guard.takes(state, reading), end=" ")
    ...     state = guard.advance(state, reading)
    True True True True False True
    """

    sigmas: float = setting(6.0, "how many widths above the level a spike begins.")
    warmup: int = setting(16, "the first steps, none of which is skipped.")
    patience: int = setting(16, "skipped steps in a row until one is taken.")
    watch: Literal["both", "loss", "grad_norm"] = setting("both", "what it uses.")

    def __post_init__(self) -> None:
        one_of("watch", self.watch, ("both", "loss", "grad_norm"))
        positive("sigmas", self.sigmas, "SpikeGuard(sigmas=6.0)")
        whole("warmup", self.warmup, least=2, instead="SpikeGuard(warmup=16)")
        whole("patience", self.patience, least=1, instead="SpikeGuard(patience=16)")

    @property
    def uses(self) -> frozenset[str]:  # type: ignore[override]  # of a class it is a constant
        """The fields of a `Reading` that are watched."""
        return frozenset(["loss", "grad_norm"] if self.watch == "both" else [self.watch])

    def start(self) -> SpikeState:
        track = Track(0.0, 0.0, 0.0, 0.0, 0.0)
        return SpikeState(track, track, 0.0, 0.0)

    def judge(self, state: SpikeState, reading: Reading, where: Where = choose) -> Verdict:
        return self.decide(state, reading, where)[0]

    def advance(self, state: SpikeState, reading: Reading, where: Where = choose) -> SpikeState:
        return self.decide(state, reading, where)[1]

    def decide(
        self, state: SpikeState, reading: Reading, where: Where = choose
    ) -> tuple[Verdict, SpikeState]:
        """Return what `judge` and `advance` return, of limits that are computed once."""
        loss = reading.loss if "loss" in self.uses else None
        norm = reading.grad_norm if "grad_norm" in self.uses else None
        self.require(Reading(reading.finite, loss=loss, grad_norm=norm))
        is_full, was_near = state.run >= self.patience, state.near > 0.0
        verdict, is_near = Verdict(True), True
        restarts: Scalar = False  # a step above a limit, if it is taken all the same
        for name, value in (("loss", loss), ("grad_norm", norm)):
            if value is not None:
                of = self._loss_limits if name == "loss" else self._norm_limits
                limit, far = of(getattr(state, name), where)
                most = where(is_full, LARGEST, where(was_near, far, limit))  # full: any finite value
                is_number = value >= -LARGEST
                verdict = verdict.also(name, (value <= most) & is_number, limit)
                is_near = is_near & (value <= far) & is_number
                restarts = restarts | (value > limit)
        taken = verdict.taken & reading.finite
        losses, norms = state.loss, state.grad_norm
        if loss is not None:
            apart = loss - losses.last
            apart = where(apart < 0.0, -apart, apart) * ABOUT_NORMAL
            losses = self._entered(losses, loss, apart, taken, restarts, where)
        if norm is not None:
            last = norms.last
            value = where(norm > 0.0, norm, last)
            small, large = where(value < last, value, last), where(value < last, last, value)
            ratio = where(small > 0.0, large / where(small > 0.0, small, 1.0), 1.0)
            apart = (where(ratio < LARGEST_RATIO, ratio, LARGEST_RATIO) - 1.0) * ABOUT_NORMAL
            norms = self._entered(norms, value, apart, taken, restarts, where)
        run = where(is_full, state.run, state.run + 1.0)
        run = where(taken, 0.0, where(reading.finite, run, state.run))
        near = where(taken, 0.0, where(reading.finite, where(is_near, 1.0, 0.0), state.near))
        return verdict, SpikeState(losses, norms, run, near)

    def _loss_limits(self, track: Track, where: Where) -> tuple[Scalar, Scalar]:
        """Return the loss that is `sigmas` widths above the level, and the one that is NEAR times as far."""
        level, width = track.level, self._cautious(track, where)
        least = LEAST_LOSS_WIDTH * where(level < 0.0, -level, level)
        rise = self.sigmas * where(width < least, least, width)
        is_open = track.steps < self.warmup
        return where(is_open, LARGEST, level + rise), where(is_open, LARGEST, level + NEAR * rise)

    def _norm_limits(self, track: Track, where: Where) -> tuple[Scalar, Scalar]:
        """Return the norm that is `sigmas` widths above the level, and the one that is NEAR times as far."""
        width = self._cautious(track, where)
        width = where(width < LEAST_NORM_WIDTH, LEAST_NORM_WIDTH, width)
        is_open = (track.steps < self.warmup) | (track.level <= 0.0)

        def at(sigmas: float) -> Scalar:
            most = LARGEST ** (0.5 / sigmas) - 1.0  # so that the limit stays finite
            ratio = (1.0 + where(width < most, width, most)) ** sigmas
            return where(is_open, LARGEST, track.level * ratio)

        return at(self.sigmas), at(NEAR * self.sigmas)

    def _cautious(self, track: Track, where: Where) -> Scalar:
        """Return the width of a series, larger while it is known from few values."""
        return track.width * (1.0 + FEW / where(track.steps < 1.0, 1.0, track.steps))

    def _entered(
        self,
        track: Track,
        value: Scalar,
        apart: Scalar,
        taken: Scalar,
        restarts: Scalar,
        where: Where,
    ) -> Track:
        """Return what is remembered of a series after a step.

        Args:
            track: before the step.
            value: the new one.
            apart: how far it is from the last one, in units of the width.
            taken: whether the step is taken; if not, nothing changes.
            restarts: whether the level starts again, at this value.
            where: the framework's.
        """
        steps = track.steps
        count = where(restarts, 1.0, where(track.averaged < LEVEL_MEMORY, track.averaged + 1.0, LEVEL_MEMORY))
        level = track.level + (value - track.level) / count
        # A difference that is large by itself, such as that of a restart, must not open the guard.
        seen = where(steps < WIDTH_MEMORY, where(steps < 1.0, 1.0, steps), WIDTH_MEMORY)
        most = where(steps < self.warmup, apart, self.sigmas * track.width)
        moved = where(restarts, track.width, where(apart < most, apart, most))
        width = where(steps < 1.0, 0.0, track.width + (moved - track.width) / seen)
        after = Track(level, width, value, count, where(steps < 1e6, steps + 1.0, steps))
        return Track(*[where(taken, new, old) for new, old in zip(after, track, strict=True)])
