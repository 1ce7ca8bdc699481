"""A policy that counts the gradient entries close to overflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from preamp.checks import FLOAT32_TINY, assign, between, is_number, positive, to_float32, whole
from preamp.policy.base import Reading, State, Where, choose, setting
from preamp.policy.bounded import Bounded

FAR = 2.0**-6  # of the edge: a peak below this is so far from overflow that there is nothing to wait for


@dataclass(frozen=True, kw_only=True, repr=False)
class Histogram(Bounded[State]):
    """Back off when many entries come close to overflow, grow when none would (Graphcore's rule).

    As published, the scale is lowered if more than the share `limit` of the entries is beyond an edge, at an
    eighth of the largest number. Otherwise the published rule raises it on every step, which causes
    overflows. Here the scale grows only once the peak, in `growth_interval` clean steps in a row, would have
    stayed below the edge even after a growth; or at once if the peak is far below the edge and not 0. In
    between, the scale does not move. An overflow backs off.

    `good` in the state counts clean steps in a row whose peak would stay below the edge after a growth.
    Source: automatic loss scaling of Graphcore's PopART (`lossscaleupdatex.cpp`).

    >>> policy = Histogram(init_scale=8)
    >>> state = policy.start()
    >>> for peak, share in ((100.0, 0.0), (7000.0, 0.0), (9000.0, 1e-3)):
    ...     state = policy.step(state, Reading(finite=True, peak=peak, share=share))
    ...     print(state.scale)
    16.0
    16.0
    8.0
    """

    needs: ClassVar[frozenset[str]] = frozenset({"peak", "share"})

    growth_interval: int = setting(
        8, "clean steps in a row before the scale grows. Only steps whose peak allows a growth count."
    )
    largest: float = setting(
        65504.0,
        "the largest finite number of the low precision. 65504.0 for float16, 57344.0 for float8_e5m2.",
    )
    location: float = setting(0.125, "where the edge is, as a fraction of `largest`. Between 0 and 1.")
    limit: float = setting(1e-7, "the share of entries allowed beyond the edge.")

    _edge: ClassVar[float]  # as they are used, in float32
    _limit: ClassVar[float]

    @property
    def edge(self) -> float:
        """The magnitude from which entries count for `Reading.share`."""
        return self._edge

    def start(self) -> State:
        return State(self.init_scale, 0.0, 0.0)

    def advance(self, state: State, reading: Reading, where: Where = choose) -> State:
        finite, peak, share = reading.finite, self.measured("peak", reading), self.measured("share", reading)
        scale, edge = state.scale, self.edge

        good = where(peak < edge / self.growth_factor, state.good + 1.0, 0.0)
        grows = where(peak < FLOAT32_TINY, False, peak < edge * FAR) | (good >= self.growth_interval)
        raised = where(grows, self._up(scale, where), scale)
        lowered = self._down(scale, where)
        return State(
            where(finite, where(share > self._limit, lowered, raised), lowered),
            where(finite, where(grows, 0.0, good), 0.0),
            where(finite, 0.0, state.bad + 1.0),
        )

    def __post_init__(self) -> None:
        if is_number(self.largest):
            assign(self, largest=to_float32(float(self.largest)))
        positive("largest", self.largest, "largest=65504.0, which is float16's")
        between("location", self.location, 0.0, 1.0, instead="location=0.125")
        between("limit", self.limit, 0.0, 1.0, instead="limit=1e-7")
        assign(self, _edge=to_float32(self.largest * self.location), _limit=to_float32(float(self.limit)))
        whole("growth_interval", self.growth_interval, least=1, instead="growth_interval=8")
        super().__post_init__()
