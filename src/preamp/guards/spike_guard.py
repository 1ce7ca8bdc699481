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
LEAST_LOSS_WIDTH = 0.002  # of the loss itself
LEAST_NORM_WIDTH = 0.05
LARGEST = 1e30  # a limit stays below inf


class Track(NamedTuple):
    """What the guard remembers of one series.

    Attributes:
        level: where the series is.
        width: the standard deviation of one step, of a norm that of its logarithm, about.
        last: the last value that entered.
        count: how many values the level is the mean of.
        steps: how many values have entered so far.
    """

    level: Scalar
    width: Scalar
    last: Scalar
    count: Scalar
    steps: Scalar


class SpikeState(NamedTuple):
    """The state of a `SpikeGuard`: eleven floats.

    Attributes:
        loss: of the losses.
        grad_norm: of the norms.
        run: steps that were skipped in a row.
    """

    loss: Track
    grad_norm: Track
    run: Scalar


@dataclass(frozen=True, kw_only=True, repr=False)
class SpikeGuard(Guard[SpikeState]):
    """Skip a step whose loss or gradient norm is far above where it was, or not finite.

    ```
    loss limit = level + sigmas * width            width: of the differences of successive losses
    norm limit = level * (1 + width)**sigmas       width: of the ratios of successive norms, minus 1
    a step above a limit is skipped, and enters nothing
    a step below enters: level and width are exponential means over about 16 and 128 steps
    after `patience` skipped steps in a row the next one is taken, and the level starts there
    ```

    The statistics are taken of successive steps, so a loss that falls does not widen them. They have
    no use for values that were skipped, so several spikes in a row are all skipped. Only values above a limit
    are spikes.

    >>> guard = SpikeGuard(warmup=2)
    >>> state = guard.start()
    >>> for loss in (2.0, 2.1, 1.9, 2.0, 20.0, 1.9):
    ...     reading = Reading(finite=True, loss=loss)
    ...     print(guard.takes(state, reading), end=" ")
    ...     state = guard.advance(state, reading)
    True True True True False True
    """

    sigmas: float = setting(6.0, "how many standard deviations above the level is a spike.")
    warmup: int = setting(16, "how many steps are taken before any is skipped.")
    patience: int = setting(16, "how many steps in a row are skipped before a new level is accepted.")
    watch: Literal["both", "loss", "grad_norm"] = setting(
        "both", "what is watched: the loss, the norm of the gradients, or both of them, as far as given."
    )

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
        return SpikeState(track, track, 0.0)

    def judge(self, state: SpikeState, reading: Reading, where: Where = choose) -> Verdict:
        self.require(reading)
        loss_limit, norm_limit = self._limits(state, where)
        verdict = Verdict(True, loss_limit, norm_limit)
        for name, limit in (("loss", loss_limit), ("grad_norm", norm_limit)):
            value = getattr(reading, name)
            if value is not None and name in self.uses:
                most = where(state.run >= self.patience, LARGEST, limit)  # any finite value: a new level
                verdict = verdict.also(name, (value <= most) & (value >= -LARGEST), limit)
        return verdict

    def advance(self, state: SpikeState, reading: Reading, where: Where = choose) -> SpikeState:
        taken = self.judge(state, reading, where).taken & reading.finite
        restarts = state.run >= self.patience
        loss_limit, norm_limit = self._limits(state, where)
        loss, norm = state.loss, state.grad_norm
        if reading.loss is not None and "loss" in self.uses:
            apart = reading.loss - loss.last
            apart = where(apart < 0.0, -apart, apart) * ABOUT_NORMAL
            loss = self._entered(loss, reading.loss, apart, loss_limit, taken, restarts, where)
        if reading.grad_norm is not None and "grad_norm" in self.uses:
            value = where(reading.grad_norm > 0.0, reading.grad_norm, norm.last)
            small, large = (
                where(value < norm.last, value, norm.last),
                where(value < norm.last, norm.last, value),
            )
            apart = where(small > 0.0, large / where(small > 0.0, small, 1.0) - 1.0, 0.0) * ABOUT_NORMAL
            norm = self._entered(norm, value, apart, norm_limit, taken, restarts, where)
        skipped_run = where(restarts, state.run, state.run + 1.0)
        run = where(taken, 0.0, where(reading.finite, skipped_run, state.run))
        return SpikeState(loss, norm, run)

    def _limits(self, state: SpikeState, where: Where) -> tuple[Scalar, Scalar]:
        """Return the largest loss and norm that are no spikes."""
        loss, norm = state.loss, state.grad_norm
        size = where(loss.level < 0.0, -loss.level, loss.level)
        width = where(loss.width < LEAST_LOSS_WIDTH * size, LEAST_LOSS_WIDTH * size, loss.width)
        loss_limit = where(loss.steps < self.warmup, LARGEST, loss.level + self.sigmas * width)
        width = where(norm.width < LEAST_NORM_WIDTH, LEAST_NORM_WIDTH, norm.width)
        ratio = (1.0 + where(width < 100.0, width, 100.0)) ** self.sigmas
        norm_limit = where((norm.steps < self.warmup) | (norm.level <= 0.0), LARGEST, norm.level * ratio)
        return loss_limit, norm_limit

    def _entered(
        self,
        track: Track,
        value: Scalar,
        apart: Scalar,
        limit: Scalar,
        taken: Scalar,
        restarts: Scalar,
        where: Where,
    ) -> Track:
        """Return what is remembered of a series after a step.

        Args:
            track: before the step.
            value: the new one.
            apart: how far it is from the last one, in units of the width.
            limit: the largest value that is no spike.
            taken: whether the step is taken; if not, nothing changes.
            restarts: whether the level starts again, at this value.
            where: the framework's.
        """
        steps = track.steps
        count = where(restarts, 1.0, where(track.count < LEVEL_MEMORY, track.count + 1.0, LEVEL_MEMORY))
        level = track.level + (value - track.level) / count
        # A difference that is large by itself, such as that of a restart, must not open the guard.
        seen = where(steps < WIDTH_MEMORY, where(steps < 1.0, 1.0, steps), WIDTH_MEMORY)
        most = where(steps < self.warmup, apart, self.sigmas * track.width)
        moved = where(restarts, track.width, where(apart < most, apart, most))
        width = where(steps < 1.0, 0.0, track.width + (moved - track.width) / seen)
        after = Track(level, width, value, count, where(steps < 1e6, steps + 1.0, steps))
        return Track(*[where(taken, new, old) for new, old in zip(after, track, strict=True)])
