"""The quiet and fast rule: keep the largest gradient a chosen distance below overflow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

from preamp.checks import assign, is_number, positive, power_of_two, to_float32, warn_if_inexact, whole
from preamp.errors import PolicyError
from preamp.policy.base import Policy, Reading, Where, choose
from preamp.policy.logarithm import log2_near, on_grid, two_to

Scalar: TypeAlias = Any

FIRST_SPREAD = 1.0
SURPRISE = 2.0  # a peak this far beyond twice the spread is not of the same process
ALONE = 8.0  # the widest gap that overflows one at a time are believed, and what a row of them may add
WIDEST = 24.0  # gap and spread: beyond, the peak itself is hardly seen
DEPTH = 2.0**-40  # of `largest`: about float16's smallest number; a peak below says nothing

LONGEST = 2**20  # patience, in steps: a float32 has to count some of them


class HeadroomState(NamedTuple):
    """`State` plus what is known of the peaks. Logarithms are to the base 2, on a grid: float32 adds exactly.

    Attributes:
        scale: what the next loss is multiplied by; a power of two.
        good: clean steps since the last overflow.
        bad: overflows in a row.
        lost: clean steps in a row whose peak was too small to be seen. It counts from 0 at the start, from
            below 0 after an overflow or a peak: some gradients are truly zero.
        seen: peaks that went into `level` since it was last begun anew.
        level: the running mean of the logarithm of the peak before scaling.
        spread: how far peaks have lately reached above the level.
        gap: how far what overflows lies above the peaks.
    """

    scale: Any
    good: Any
    bad: Any
    lost: Any
    seen: Any
    level: Any
    spread: Any
    gap: Any


@dataclass(frozen=True, kw_only=True, repr=False)
class Headroom(Policy[HeadroomState]):
    """Jump to the largest power of two at which no overflow is to be expected.

    The rule is ours. From the peaks it knows their `level`, the mean logarithm of the last ones, and their
    `spread`, how far they have reached above it:

    ```
    on a clean step:           scale = 2 ** (floor(log2(largest) - margin - level - spread) - gap)
    on an overflow:            scale /= 2, 4, 8, ...: one power more for each overflow in a row
    on a peak that is flushed: scale *= 2, 4, 8, ...: likewise; the first `memory` wait, but at the start
    ```

    The peak is that of the parameters' gradients, and what overflows may be a gradient between layers. So an
    overflow that the peaks do not explain teaches the `gap`: the scale stays below the one that overflowed.
    After `patience` clean steps in a row the gap narrows by one power, after as many again by two more, and
    so on. In the long run one step in `patience` is skipped, or fewer, unless overflows come at any scale. A
    peak far above the spread, or the first after many that were flushed, begins the level anew.

    Args:
        init_scale: the scale of the first step.
        margin: the distance to keep from overflow, in powers of two, besides what is learned.
        largest: the largest finite number of the low precision: 65504.0 for float16, 57344.0 for float8_e5m2.
        min_scale: the floor.
        max_scale: the ceiling.
        memory: steps whose peaks make up the level.
        patience: steps after which it is doubted what high peaks and overflows have taught. A power of two.

    >>> policy = Headroom(init_scale=8)
    >>> state = policy.start()
    >>> for reading in (Reading(True, peak=2.0), Reading(False), Reading(True, peak=2048.0)):
    ...     state = policy.step(state, reading)
    ...     print(state.scale)
    65536.0
    32768.0
    32768.0
    """

    needs: ClassVar[frozenset[str]] = frozenset({"peak"})
    signed: ClassVar[frozenset[str]] = frozenset({"level", "lost"})

    init_scale: float = 2.0**16
    margin: float = 0.25
    largest: float = 65504.0
    min_scale: float = 2.0**-64
    max_scale: float = 2.0**96
    memory: int = 32
    patience: int = 1024

    def start(self) -> HeadroomState:
        return HeadroomState(self.init_scale, 0.0, 0.0, 0.0, 0.0, 0.0, FIRST_SPREAD, 0.0)

    def advance(self, state: HeadroomState, reading: Reading, where: Where = choose) -> HeadroomState:
        scale, good, bad, lost, seen, level, spread, gap = state
        peak, clean = self.measured("peak", reading), reading.finite
        good, bad, lost = good + 1.0, bad + 1.0, lost + 1.0
        exponent = log2_near(scale, where)
        visible = clean & (peak >= self._faintest)

        logarithm = log2_near(peak, where) - exponent
        known = where(lost > 1.0, 0.0, seen)
        new_seen, new_level, new_spread = self._looked(known, level, spread, logarithm, where)
        aim = (self._room - new_level - new_spread) // 1.0
        new_gap = self._distanced(state, good, aim - exponent, where)
        searched = where(clean, where(lost > 0.0, exponent + lost, exponent), exponent - bad)
        return HeadroomState(
            self._bounded(two_to(where(visible, aim - new_gap, searched), where), where),
            where(clean, good, 0.0),
            where(clean, 0.0, bad),
            where(clean & (peak < self._faintest), lost, -float(self.memory)),
            where(visible, new_seen, seen),
            where(visible, new_level, level),
            where(visible, new_spread, spread),
            where(visible, new_gap, gap),
        )

    def _looked(
        self, seen: Scalar, level: Scalar, spread: Scalar, peak: Scalar, where: Where
    ) -> tuple[Scalar, Scalar, Scalar]:
        """Return `seen`, `level` and `spread` after one more peak, given as its logarithm before scaling."""
        above = peak - level
        anew = (seen < 1.0) | (above > spread + spread + SURPRISE)
        count = where(anew, 1.0, seen + 1.0)
        level = where(anew, peak, level + on_grid(above / _least(count, float(self.memory), where)))
        faded = spread - on_grid(spread / _least(count, float(self.patience), where))
        wide = _least(where(above > faded, above, faded), WIDEST, where)
        return count, level, where(anew, where(seen < 1.0, FIRST_SPREAD, spread), wide)

    def _distanced(self, state: HeadroomState, good: Scalar, rise: Scalar, where: Where) -> Scalar:
        """Return the gap after a clean step, where the peaks alone would multiply the scale by 2**`rise`."""
        laps = good / float(self.patience)
        gap = where(laps == laps // 1.0, state.gap - laps, state.gap)
        gap = where(gap > 0.0, gap, 0.0)
        wider = rise - state.bad + 1.0  # one power below the scale that overflowed last
        alone = where(gap > ALONE, wider, _least(wider, ALONE, where))
        in_a_row = _least(wider, gap + ALONE, where)
        wider = _least(where(state.bad > 1.0, in_a_row, alone), WIDEST, where)
        return where((state.bad > 0.0) & (wider > gap), wider, gap)

    def _bounded(self, scale: Scalar, where: Where) -> Scalar:
        scale = where(scale < self.min_scale, self.min_scale, scale)
        return where(scale > self.max_scale, self.max_scale, scale)

    @cached_property
    def _room(self) -> float:
        return on_grid(math.log2(self.largest) - self.margin)  # type: ignore[no-any-return]

    @cached_property
    def _faintest(self) -> float:
        return to_float32(self.largest * DEPTH)

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "max_scale", "largest"):
            self._round(name)
        for name in ("init_scale", "min_scale", "max_scale"):
            warn_if_inexact(name, getattr(self, name))
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise PolicyError(
                f"init_scale={self.init_scale!r} lies outside min_scale={self.min_scale!r} and "
                f"max_scale={self.max_scale!r}. Start inside, or widen them."
            )
        if not (is_number(self.margin) and 0.0 <= self.margin <= WIDEST):
            raise PolicyError(
                f"margin={self.margin!r} is not a number of powers of two from 0 to {WIDEST:g}. "
                "Write margin=1.0 to stay a factor of two below overflow."
            )
        whole("memory", self.memory, least=1, instead="memory=32")
        power_of_two("patience", self.patience, most=LONGEST, instead="patience=1024")

    def _round(self, name: str) -> None:
        """Round a setting to float32, where it must be a finite number above 0."""
        instead = f"{name}={getattr(type(self), name)!r}"
        positive(name, getattr(self, name), instead)
        assign(self, **{name: to_float32(float(getattr(self, name)))})
        positive(name, getattr(self, name), instead)


def _least(a: Scalar, b: Scalar, where: Where) -> Scalar:
    return where(a < b, a, b)
