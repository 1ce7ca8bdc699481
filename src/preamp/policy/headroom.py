"""A policy that keeps the largest gradient a chosen distance below overflow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from preamp.checks import assign, is_number, positive, power_of_two, to_float32, warn_if_inexact, whole
from preamp.errors import PolicyError
from preamp.policy.base import Policy, Reading, Scalar, Where, choose, setting
from preamp.policy.logarithm import log2_near, on_grid, two_to

# Distances are in powers of two.
FIRST_SPREAD = 1.0
OUTLIER_DISTANCE = 2.0  # an amax this far beyond twice the spread is an outlier: restart the mean
MAX_GAP_FROM_ISOLATED_OVERFLOW = 8.0
MAX_WIDENING_IN_A_ROW = 8.0  # what several overflows in a row may add to the gap
MAX_DISTANCE = 24.0  # of gap, spread and margin: with more, the amax itself would be flushed
FLUSHED_BELOW = 2.0**-40  # of `largest`, about float16's smallest number: a smaller amax counts as flushed
MAX_PATIENCE = 2**20  # in steps: a float32 has to count several times as many


class HeadroomState(NamedTuple):
    """`State` plus statistics of the amaxes. Logarithms are to the base 2, on a grid: float32 adds exactly.

    Attributes:
        scale: what the next loss is multiplied by; a power of two.
        good: clean steps since the last overflow.
        bad: overflows in a row.
        lost: clean steps in a row whose amax was flushed. It counts from 0 at the start, and from
            below 0 after an overflow or an amax, because some gradients are truly zero.
        peaks: how many amaxes are in `level`, since it last restarted. Checkpoints have this name.
        level: the running mean of the logarithm of the amax before scaling.
        spread: how far amaxes have lately reached above the level.
        gap: how far the values that overflow are above the amaxes.
    """

    scale: Scalar
    good: Scalar
    bad: Scalar
    lost: Scalar
    peaks: Scalar
    level: Scalar
    spread: Scalar
    gap: Scalar


@dataclass(frozen=True, kw_only=True, repr=False)
class Headroom(Policy[HeadroomState]):
    """Jump to the largest power of two at which no overflow is expected.

    The rule is our own. It tracks the `level` of the amaxes, a running mean of their logarithm, and their
    `spread`, how far they have recently reached above it:

    ```
    on a clean step:           scale = 2 ** (floor(log2(largest) - margin - level - spread) - gap)
    on an overflow:            scale /= 2, 4, 8, ...: one power more for each overflow in a row
    on an amax that is flushed: scale *= 2, 4, 8, ...: likewise; the first `memory` wait, but at the start
    ```

    The amax is measured in the parameters' gradients, but what overflows may be a gradient between layers. So
    an overflow that no amax explains widens the `gap`: the scale stays below the one that overflowed.
    After `patience` clean steps in a row the gap narrows by one power, after as many again by two more, and
    so on. In the long run at most one step in `patience` is skipped, unless steps overflow at any scale. An
    amax far above the spread, or the first after many that were flushed, restarts the level.

    >>> policy = Headroom(init_scale=8)
    >>> state = policy.start()
    >>> for reading in (Reading(True, amax=2.0), Reading(False), Reading(True, amax=2048.0)):
    ...     state = policy.step(state, reading)
    ...     print(state.scale)
    65536.0
    32768.0
    32768.0
    """

    needs_amax: ClassVar[bool] = True
    signed: ClassVar[frozenset[str]] = frozenset({"level", "lost"})

    init_scale: float = setting(2.0**16, "the scale of the first step.")
    margin: float = setting(
        0.25, "the distance from overflow, in powers of two. What the rule learns is added to it."
    )
    largest: float = setting(
        65504.0,
        "the largest finite number of the low precision. 65504.0 for float16, 57344.0 for float8_e5m2.",
    )
    min_scale: float = setting(2.0**-64, "the floor.")
    max_scale: float = setting(2.0**96, "the ceiling.")
    memory: int = setting(32, "steps whose amaxes make up the level.")
    patience: int = setting(
        1024, "steps over which the effect of high amaxes and overflows wears off. A power of two."
    )

    def start(self) -> HeadroomState:
        return HeadroomState(self.init_scale, 0.0, 0.0, 0.0, 0.0, 0.0, FIRST_SPREAD, 0.0)

    def advance(self, state: HeadroomState, reading: Reading, where: Where = choose) -> HeadroomState:
        amax = self.amax_in(reading)
        visible = reading.finite & (amax >= self._smallest_amax)
        if where is choose:  # Python numbers: only one of the two is needed
            after = (
                self._after_amax(state, amax, where)
                if visible
                else self._after_other(state, reading, amax, where)
            )
        else:
            cases = self._after_amax(state, amax, where), self._after_other(state, reading, amax, where)
            after = HeadroomState(*[where(visible, a, b) for a, b in zip(*cases, strict=True)])
        # Not `_replace` or a slice, here and below: the compiler of PyTorch 2.6 supports neither.
        scale, *others = after
        return HeadroomState(self._clamped(two_to(scale, where), where), *others)

    def _after_amax(self, state: HeadroomState, amax: Scalar, where: Where) -> HeadroomState:
        """Return the state after a clean step with a visible amax, with log2 of the scale for `scale`."""
        exponent = log2_near(state.scale, where)
        good = state.good + 1.0
        # If the scale had to search for an amax, the mean is from before the gradients shrank, and restarts.
        known = where(state.lost > 0.0, 0.0, state.peaks)
        logarithm = log2_near(amax, where) - exponent
        amaxes, level, spread = self._with_amax(known, state.level, state.spread, logarithm, where)
        aim = (self._log_limit - level - spread) // 1.0
        gap = self._gap_after(state, good, aim - exponent, where)
        return HeadroomState(aim - gap, good, 0.0, -float(self.memory), amaxes, level, spread, gap)

    def _after_other(
        self, state: HeadroomState, reading: Reading, amax: Scalar, where: Where
    ) -> HeadroomState:
        """Return the same after an overflow, or a clean step whose amax was flushed.

        Only the direction is known, so the changes get larger with each such step in a row.
        """
        exponent, clean = log2_near(state.scale, where), reading.finite
        good, bad, lost = state.good + 1.0, state.bad + 1.0, state.lost + 1.0
        higher = where(lost > 0.0, exponent + lost, exponent)
        return HeadroomState(
            where(clean, higher, exponent - bad),
            where(clean, good, 0.0),
            where(clean, 0.0, bad),
            where(clean & (amax < self._smallest_amax), lost, -float(self.memory)),
            state.peaks,
            state.level,
            state.spread,
            state.gap,
        )

    def _with_amax(
        self, amaxes: Scalar, level: Scalar, spread: Scalar, amax: Scalar, where: Where
    ) -> tuple[Scalar, Scalar, Scalar]:
        """Return `peaks`, `level` and `spread` after one more amax, given as its logarithm before scaling."""
        above = amax - level
        restarts = (amaxes < 1.0) | (above > spread + spread + OUTLIER_DISTANCE)
        count = where(restarts, 1.0, amaxes + 1.0)
        level = where(restarts, amax, level + on_grid(above / _min(count, float(self.memory), where)))
        # The spread grows at once and shrinks slowly: an amax just as high may come again.
        faded = spread - on_grid(spread / _min(count, float(self.patience), where))
        wide = _min(where(above > faded, above, faded), MAX_DISTANCE, where)
        return count, level, where(restarts, where(amaxes < 1.0, FIRST_SPREAD, spread), wide)

    def _gap_after(self, state: HeadroomState, good: Scalar, rise: Scalar, where: Where) -> Scalar:
        """Return the gap after a clean step, where the amaxes alone would multiply the scale by 2**`rise`."""
        # Narrow it after every `patience` clean steps, each time by one power more.
        times = good / float(self.patience)
        gap = where(times == times // 1.0, state.gap - times, state.gap)
        gap = where(gap > 0.0, gap, 0.0)
        # After overflows, widen it so that the scale ends one power below the one that overflowed last. An
        # isolated overflow may be a fluke, such as one bad batch, and must not cost much precision.
        wider = rise - state.bad + 1.0
        limit = MAX_GAP_FROM_ISOLATED_OVERFLOW
        isolated = where(gap > limit, wider, _min(wider, limit, where))
        in_a_row = _min(wider, gap + MAX_WIDENING_IN_A_ROW, where)
        wider = _min(where(state.bad > 1.0, in_a_row, isolated), MAX_DISTANCE, where)
        return where((state.bad > 0.0) & (wider > gap), wider, gap)

    def _clamped(self, scale: Scalar, where: Where) -> Scalar:
        scale = where(scale < self.min_scale, self.min_scale, scale)
        return where(scale > self.max_scale, self.max_scale, scale)

    @cached_property
    def _log_limit(self) -> float:
        return on_grid(math.log2(self.largest) - self.margin)  # type: ignore[no-any-return]

    @cached_property
    def _smallest_amax(self) -> float:
        return to_float32(self.largest * FLUSHED_BELOW)

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "max_scale", "largest"):
            self._round(name)
        for name in ("init_scale", "min_scale", "max_scale"):
            warn_if_inexact(name, getattr(self, name))
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise PolicyError(
                f"init_scale={self.init_scale!r} is outside min_scale={self.min_scale!r} and "
                f"max_scale={self.max_scale!r}. Start inside, or widen them."
            )
        if not (is_number(self.margin) and 0.0 <= self.margin <= MAX_DISTANCE):
            raise PolicyError(
                f"margin={self.margin!r} is not a number of powers of two from 0 to {MAX_DISTANCE:g}. "
                "Write margin=1.0 to stay a factor of two below overflow."
            )
        whole("memory", self.memory, least=1, instead="memory=32")
        power_of_two("patience", self.patience, most=MAX_PATIENCE, instead="patience=1024")

    def _round(self, name: str) -> None:
        """Round a setting to float32, where it must be a finite number above 0."""
        instead = f"{name}={getattr(type(self), name)!r}"
        positive(name, getattr(self, name), instead)
        assign(self, **{name: to_float32(float(getattr(self, name)))})
        positive(name, getattr(self, name), instead)


def _min(a: Scalar, b: Scalar, where: Where) -> Scalar:
    return where(a < b, a, b)
