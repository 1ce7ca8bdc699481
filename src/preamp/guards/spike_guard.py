"""preamp's own guard: robust against the spikes that it has to find, with a handful of floats as state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from preamp.checks import between, one_of, positive, whole
from preamp.errors import PolicyError
from preamp.guards.base import Guard, Verdict, leaves_of
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
FORGIVEN = 0.25  # skipped steps, of those that count towards `patience`, for each step that is taken
NEAR = 2.0  # a step within so many times the distance of the limit is near it
LARGEST_RATIO = 1e6  # of successive norms: the next limit must not be inf
LARGEST = 1e30  # a limit stays below inf
MOST_SIGMAS = 1000.0
MOST_STEPS = 1_000_000  # float32 counts to 16 times as many


class Track(NamedTuple):
    """What the guard remembers of one series.

    Attributes:
        level: where the series is.
        width: about the standard deviation of the values, of the logarithms of norms.
        last: the last value that entered.
        averaged: the number of values in the level, 16 at most.
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
        loss: the track of the losses.
        grad_norm: the track of the norms.
        run: skipped steps, less a quarter of those that were taken since.
        near: 1 if the last skipped step was near its limit, else 0.
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
    a step above a limit is skipped and does not change the level
    level and width are exponential means over about 16 and 128 steps
    no difference of successive values counts as more than sigmas widths
    run: one more with each skipped step, a quarter less with each that is taken
    once run >= patience, the next finite step above a limit is taken, and the warm-up starts again
    near: above a limit, but not above level + 2 * (limit - level); of norms, in their logarithms
    a value of exactly 0 is compared with its limit, and changes neither the statistics nor run and near
    after a near step was skipped, another near one is taken, and the level restarts there
    ```

    Differences are taken between successive steps, so a loss that falls does not widen the limits. Skipped
    steps widen them a little, by 4 percent each: several spikes in a row are all skipped, and noise that has
    grown is accepted soon. NaN and inf change nothing, and are skipped in the warm-up too. Only values above
    a limit are spikes. Where losses are often exactly 0, such as hinge losses, the others set the limits.
    A width is at least 2 percent of the loss, and 0.1 of the norm, so that on a plateau
    the limits are at least 12 percent above the loss and 77 above the norm. After n values it is multiplied
    by 1 + 8 / n.

    >>> guard = SpikeGuard(warmup=2)
    >>> state = guard.start()
    >>> for loss in (2.0, 2.1, 1.9, 2.0, 20.0, 1.9):
    ...     reading = Reading(finite=True, loss=loss)
    ...     print(guard.takes(state, reading), end=" ")
    ...     state = guard.advance(state, reading)
    True True True True False True
    """

    sigmas: float = setting(6.0, "how many widths above the level a spike begins.")
    warmup: int = setting(16, "accepted steps before it skips.")
    patience: int = setting(16, "skips in a row until it starts again.")
    watch: Literal["both", "loss", "grad_norm"] = setting("both", "what to check.")

    def __post_init__(self) -> None:
        one_of("watch", self.watch, ("both", "loss", "grad_norm"))
        positive("sigmas", self.sigmas, "SpikeGuard(sigmas=6.0)")
        between("sigmas", self.sigmas, 0.0, MOST_SIGMAS, instead="SpikeGuard(sigmas=6.0)")
        whole("warmup", self.warmup, least=2, most=MOST_STEPS, instead="SpikeGuard(warmup=16)")
        whole("patience", self.patience, least=1, most=MOST_STEPS, instead="SpikeGuard(patience=16)")

    @property
    def uses(self) -> frozenset[str]:  # type: ignore[override]  # of a class it is a constant
        """The fields of a `Reading` that are watched."""
        return frozenset(["loss", "grad_norm"] if self.watch == "both" else [self.watch])

    def start(self) -> SpikeState:
        track = Track(0.0, 0.0, 0.0, 0.0, 0.0)
        return SpikeState(track, track, 0.0, 0.0)

    def restore(self, saved: Any) -> SpikeState:
        state = super().restore(saved)
        for name, value in leaves_of(state):
            if not math.isfinite(value) or (value < 0.0 and not name.startswith("loss.l")):  # level and last
                raise PolicyError(
                    f"the saved state is not valid for {self!r}: {name} is {value!r}. Start the guard again."
                )
        return state

    def judge(self, state: SpikeState, reading: Reading, where: Where = choose) -> Verdict:
        return self.decide(state, reading, where)[0]

    def advance(self, state: SpikeState, reading: Reading, where: Where = choose) -> SpikeState:
        return self.decide(state, reading, where)[1]

    def decide(
        self, state: SpikeState, reading: Reading, where: Where = choose
    ) -> tuple[Verdict, SpikeState]:
        """Return the results of `judge` and `advance`, computing the limits only once."""
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
        starts_again = is_full & restarts
        losses, norms = state.loss, state.grad_norm
        # Zeros change nothing: after many of them, every other step would look like a spike.
        informs: Scalar = False
        if loss is not None:
            apart = loss - losses.last
            apart = where(apart < 0.0, -apart, apart) * ABOUT_NORMAL
            counts = (loss != 0.0) | restarts
            informs = informs | counts
            widens = counts & reading.finite & (loss >= -LARGEST) & (loss <= LARGEST)
            losses = self._entered(losses, loss, apart, taken & counts, widens, restarts, starts_again, where)
        if norm is not None:
            last = norms.last
            value = where(norm > 0.0, norm, last)
            counts = (norm != 0.0) | restarts
            informs = informs | counts
            small, large = where(value < last, value, last), where(value < last, last, value)
            ratio = where(small > 0.0, large / where(small > 0.0, small, 1.0), 1.0)
            apart = (where(ratio < LARGEST_RATIO, ratio, LARGEST_RATIO) - 1.0) * ABOUT_NORMAL
            widens = counts & reading.finite & (norm <= LARGEST)
            norms = self._entered(norms, value, apart, taken & counts, widens, restarts, starts_again, where)
        less = where(state.run > FORGIVEN, state.run - FORGIVEN, 0.0)
        more = where(is_full, state.run, state.run + 1.0)
        skipped_run = where(reading.finite, more, state.run)
        run = where(taken & informs, where(restarts, 0.0, less), where(taken, state.run, skipped_run))
        skipped_near = where(reading.finite, where(is_near, 1.0, 0.0), state.near)
        near = where(taken & informs, 0.0, where(taken, state.near, skipped_near))
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
            most = LARGEST ** min(0.5 / sigmas, 1.0) - 1.0  # so that the limit stays finite
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
        widens: Scalar,
        restarts: Scalar,
        starts_again: Scalar,
        where: Where,
    ) -> Track:
        """Return what is remembered of a series after a step.

        Args:
            track: before the step.
            value: the new one.
            apart: how far it is from the last one, in units of the width.
            taken: whether the step is taken; if not, at most the width changes.
            widens: whether the value is finite, in a step that did not overflow.
            restarts: whether the level starts again, at this value.
            starts_again: whether everything does.
            where: the framework's.
        """
        steps = where(starts_again, 0.0, track.steps)
        count = where(restarts, 1.0, where(track.averaged < LEVEL_MEMORY, track.averaged + 1.0, LEVEL_MEMORY))
        level = where(restarts, value, track.level + (value - track.level) / count)
        # A large difference counts as `sigmas` widths, so that no single one opens the guard. Those of
        # skipped steps count too: where the noise has grown, most differences are large.
        seen = where(taken & (steps < WIDTH_MEMORY), where(steps < 1.0, 1.0, steps), WIDTH_MEMORY)
        most = where(steps < self.warmup, apart, self.sigmas * track.width)
        moved = where(restarts, track.width, where(apart < most, apart, most))
        width = where(steps < 1.0, 0.0, track.width + (moved - track.width) / seen)
        widens = taken | (widens & (steps >= self.warmup))
        return Track(
            where(taken, level, track.level),
            where(widens, width, track.width),
            where(taken, value, track.last),
            where(taken, count, track.averaged),
            where(taken, where(steps < MOST_STEPS, steps + 1.0, steps), track.steps),
        )
