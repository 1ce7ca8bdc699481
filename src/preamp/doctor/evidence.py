"""Count what a trace shows, once for all rules of the doctor.

The rules decide how much is too much. Numbers are kept in arrays, because a trace may have millions of steps.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, pairwise
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from preamp.doctor.advice import recorded_policy
from preamp.doctor.finding import RARE
from preamp.doctor.frameworks import CODE, Code, framework_of
from preamp.policy import Policy
from preamp.record.exponents import BANDS, Band, exponent_of
from preamp.record.snapshots import Snapshot, SnapshotRow, merge_snapshots
from preamp.record.trace import Summary, Trace
from preamp.scaling import Spike

SOME: Final = 100  # of this many steps one may be an outlier


class Skip(NamedTuple):
    """A skipped step, and what came before it.

    Attributes:
        place: the step, counted from 0 among those of the record.
        scale: the scale that was in its loss.
        after: the scale of the next step.
        cause: "growth": the scale had just grown; "streak": the step before was skipped too; "sudden":
            neither, the gradients rose at a scale that had worked.
    """

    place: int
    scale: float
    after: float
    cause: Literal["growth", "streak", "sudden"]


class Column:
    """One number of each step, if known.

    Attributes:
        values: the numbers; 0 where unknown.
        known: for each step, 1 where the number is known.
    """

    def __init__(self, values: Iterator[float | None]) -> None:
        self.values: array[float] = array("d")
        self.known: bytearray = bytearray()
        for value in values:
            self.values.append(0.0 if value is None else value)
            self.known.append(value is not None)

    def finite(self, start: int = 0, stop: int | None = None) -> array[float]:
        """Return the finite numbers of some steps, in order."""
        isfinite = math.isfinite
        pairs = zip(self.values[start:stop], self.known[start:stop], strict=True)
        return array("d", (value for value, known in pairs if known and isfinite(value)))

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """Return how many of some steps have a number, finite or not."""
        return sum(self.known[start:stop])

    def __getitem__(self, place: int) -> float | None:
        return self.values[place] if self.known[place] else None


class Record:
    """A trace and what is counted in it.

    Args:
        trace: the run. Steps without a usable scale are left out; a place is a position among the others.

    Attributes:
        scales: the scale of every step and, last, the next one.
        skipped: for every step, 1 if it was skipped because it overflowed. A spike that a guard skipped does
            not count: its gradients were finite at that scale.
        policy: the policy, as the adapter or else the user recorded it; None if it is unknown.
        guard: the `repr` of the guard, likewise.
        snapshots: of single steps; parts that were recorded of the same step are merged.
        code: what advice consists of, in the framework of the run.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace: Trace = trace
        self.code: Code = CODE[framework_of(trace)]
        self.policy: Policy[Any] | None = recorded_policy(trace.policy)
        if self.policy is None:
            self.policy = recorded_policy(trace.about.get("policy"))
        self.guard: object = trace.guard or trace.about.get("guard")
        self.snapshots: list[Snapshot] = [
            snapshot for snapshot in merge_snapshots(trace.snapshots) if 0.0 < snapshot.scale < math.inf
        ]
        self.scales: array[float] = array("d", trace.column("scale"))
        self._left_out: frozenset[int] = frozenset(
            place for place, scale in enumerate(self.scales) if not 0.0 < scale < math.inf
        )
        if self._left_out:
            self.scales = array("d", self._kept("scale"))
        self._is_spike = bytearray(spike is not None for spike in self._kept("spike"))
        self.skipped: bytearray = bytearray(
            skip and not spike for skip, spike in zip(self._kept("skipped"), self._is_spike, strict=True)
        )
        if self.scales:
            new = self._last_scale()
            self.scales.append(self.scales[-1] if new is None else new)

    def __len__(self) -> int:
        return len(self.skipped)

    def _kept(self, name: str) -> Iterator[Any]:
        column = self.trace.column(name)
        if not self._left_out:
            return column
        return (value for place, value in enumerate(column) if place not in self._left_out)

    def _last_scale(self) -> float | None:
        last = max(place for place in range(len(self.trace)) if place not in self._left_out)
        return self.trace[last].new_scale

    @cached_property
    def index(self) -> Sequence[int]:
        """The index of every step."""
        try:
            return array("q", self._kept("index"))
        except OverflowError:
            return list(self._kept("index"))

    @cached_property
    def loss(self) -> Column:
        """The loss of every step; not that of a spike, which did nothing to the weights."""
        return Column(self._without_spikes("loss"))

    @cached_property
    def grad_norm(self) -> Column:
        """The norm of the unscaled gradients of every step; not that of a spike."""
        return Column(self._without_spikes("grad_norm"))

    def _without_spikes(self, name: str) -> Iterator[Any]:
        pairs = zip(self._kept(name), self._is_spike, strict=True)
        return (None if is_spike else value for value, is_spike in pairs)

    @cached_property
    def spikes(self) -> Mapping[int, Spike]:
        """Why a guard skipped a step, by place."""
        found = enumerate(self._kept("spike"))
        return {place: spike for place, spike in found if spike is not None}

    @cached_property
    def lost_spikes(self) -> Mapping[int, float]:
        """The losses that a guard skipped because they were inf or NaN, by place."""
        lost = ((place, spike) for place, spike in self.spikes.items() if spike.of == "loss")
        return {place: spike.value for place, spike in lost if not math.isfinite(spike.value)}

    @cached_property
    def amax(self) -> Column:
        """The largest finite magnitude among the scaled gradients of every step."""
        return Column(self._kept("amax"))

    @cached_property
    def new_scale(self) -> Column:
        """The scale that each step set for the next one."""
        return Column(self._kept("new_scale"))

    @cached_property
    def zeros(self) -> Column:
        """The share of gradient entries of every step that are exactly zero."""
        return Column(self._kept("zeros"))

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """The names of all buffers that a skipped step left at inf or NaN, and that were not restored."""
        pairs = zip(self._kept("buffers"), self._kept("restored"), strict=True)
        return tuple(dict.fromkeys(name for lost, back in pairs for name in lost if name not in back))

    @property
    def resumed_at_start(self) -> bool:
        """Whether all steps that were recorded before the run was resumed have been replaced."""
        return len(self) > 0 and self.index[0] in self.trace.resumed

    @cached_property
    def summary(self) -> Summary:
        """The totals of the trace."""
        return self.trace.summary()

    @cached_property
    def band(self) -> Band:
        """The range of the run's low precision; float16 unless the record says otherwise."""
        name = str(self.trace.about.get("precision"))
        if self.snapshots and name != "float32":  # a lens cannot tell that nothing runs in low precision
            name = self.snapshots[-1].low_dtype
        return BANDS.get(name, BANDS["float16"])

    @cached_property
    def opening(self) -> int:
        """The number of steps that were skipped before the first that was taken."""
        taken = self.skipped.find(0)
        return len(self) if taken < 0 else taken

    @property
    def settled(self) -> range:
        """The places of the steps from the first that was taken on."""
        return range(self.opening, len(self))

    @property
    def late(self) -> range:
        """The second half of `settled`."""
        return self.settled[len(self.settled) // 2 :]

    @cached_property
    def skips(self) -> Sequence[Skip]:
        """The skipped steps of `settled`."""
        found, soon = [], max(1.0, self.interval / 4)
        stood, grew, was_skipped = 0, False, False
        rows = zip(self.skipped, pairwise(self.scales), strict=True)
        for place, (skipped, (scale, after)) in enumerate(rows):
            if skipped and place >= self.opening:
                alone: Literal["growth", "sudden"] = "growth" if grew and stood <= soon else "sudden"
                found.append(Skip(place, scale, after, "streak" if was_skipped else alone))
            stood, grew = (0, after > scale) if after != scale else (stood + (not skipped), grew)
            was_skipped = bool(skipped)
        return found

    def numbers_of(self, places: Iterable[int]) -> tuple[int, ...]:
        """Return the indices of some steps, at most of the first hundred."""
        return tuple(self.index[place] for place in islice(places, SOME))

    def rate(self, count: int) -> float:
        """Return a count of steps as a share of `settled`."""
        return count / max(len(self.settled), 1)

    @cached_property
    def interval(self) -> float:
        """The number of clean steps until the scale grows: the policy's, or the median of the record."""
        return getattr(self.policy, "growth_interval", None) or median(self._stands or [len(self)])

    @cached_property
    def _stands(self) -> Sequence[int]:
        """The numbers of steps for which the scale was constant before each growth."""
        stands: array[int] = array("q")
        last = 0
        for number, (before, after) in enumerate(pairwise(self.scales), start=1):
            if after != before:
                if after > before:
                    stands.append(number - last)
                last = number
        return stands

    @property
    def growths(self) -> int:
        """The number of times the scale grew."""
        return len(self._stands)

    def highest_scale(self, steps: range) -> int | None:
        """Return the exponent of the highest scale at which all but a few of some steps stay finite.

        For a step with a snapshot it follows from that, and for others from the amax of the parameters'
        gradients, less the margin by which gradients between modules are larger in the snapshots. The scale
        of a skipped step was too high.

        Returns:
            The exponent; None where the record has neither snapshots nor amaxes.
        """
        known, has_clean = Counter[int](), False
        for place in steps:
            if (highest := self._highest_of(place)) is not None:
                known[highest] += 1
                has_clean = has_clean or not self.skipped[place]
        if not has_clean:
            return None
        total = known.total()
        below = max(total // RARE, min(total // SOME, 1))
        for highest in sorted(known):
            below -= known[highest]
            if below < 0:
                return highest
        raise AssertionError  # there is at least one clean step

    def _highest_of(self, place: int) -> int | None:
        if self.skipped[place]:
            return exponent_of(self.scales[place]) - 1
        if self._by_snapshot and (best := self._by_snapshot.get(self.index[place])) is not None:
            return best
        own = self._of_amax(place)
        return None if own is None else own - self._higher_between

    def _of_amax(self, place: int) -> int | None:
        amax = self.amax[place]
        if self.skipped[place] or not (amax and 0.0 < amax < math.inf):
            return None
        return exponent_of(self.scales[place]) + exponent_of(self.band.largest) - exponent_of(amax)

    @cached_property
    def _by_snapshot(self) -> dict[int, int]:
        """The exponent of the highest scale that each snapshot allows, by the index of its step."""
        best = {snapshot.index: snapshot.best_scale(margin=0) for snapshot in self.snapshots}
        return {index: exponent_of(scale) for index, scale in best.items() if scale}

    @cached_property
    def _higher_between(self) -> int:
        """By how many powers of two gradients between modules are larger than those of parameters."""
        if not self._by_snapshot:
            return 0
        places = (place for place, index in enumerate(self.index) if index in self._by_snapshot)
        both = [(self._of_amax(place), self._by_snapshot[self.index[place]]) for place in places]
        return max((a - b for a, b in both if a is not None), default=0)

    @property
    def clip(self) -> str:
        """The argument that clips gradients: to the norm that they began with, where it is known."""
        usual = min(self.grad_norm.finite()[:SOME], default=0.0)
        return self.code.clip.format(norm=f"{usual or 1.0:.1g}" if usual < 1e4 else f"{usual:.0e}")

    @cached_property
    def headroom(self) -> int | None:
        """By how many powers of two the scale could have been higher in the second half of the run."""
        highest = self.highest_scale(self.late)
        return None if highest is None else highest - exponent_of(median(self.of(self.late)))

    @cached_property
    def usual_headroom(self) -> float | None:
        """The median headroom of the steps taken in the second half of the run, in powers of two."""
        known: array[int] = array("q")
        for place in self.late:
            if not self.skipped[place] and (highest := self._highest_of(place)) is not None:
                known.append(highest - exponent_of(self.scales[place]))
        return median(known) if known else None

    def of(self, steps: range) -> array[float]:
        """Return the scales of some steps."""
        return self.scales[steps.start : steps.stop]

    @cached_property
    def culprits(self) -> Counter[str]:
        """The number of skipped steps in which each parameter's gradient was not finite.

        Steps whose loss was inf or NaN do not count: all their gradients are not finite because of it.
        """
        return self.culprits_from(0)

    @cached_property
    def first_culprits(self) -> Counter[str]:
        """The number of these steps in which each was the first, of those whose order is known."""
        return self.culprits_from(0, "first_culprits")

    def culprits_from(self, place: int, field: str = "culprits") -> Counter[str]:
        """Return `culprits` of the steps from a place on."""
        steps = zip(self.skipped, self._kept(field), self._kept("loss"), strict=True)
        return Counter(
            name
            for skipped, names, loss in islice(steps, place, None)
            if skipped and (loss is None or math.isfinite(loss))
            for name in names
        )

    def is_lost(self, snapshot: Snapshot) -> bool:
        """Return whether the loss of the step of a snapshot was inf or NaN."""
        place = self.place_of(snapshot)
        loss = None if place is None else self.loss[place]
        return loss is not None and not math.isfinite(loss)

    def has_skipped(self, snapshot: Snapshot) -> bool:
        """Return whether the step of a snapshot was skipped because it overflowed."""
        place = self.place_of(snapshot)
        return place is not None and bool(self.skipped[place])

    def place_of(self, snapshot: Snapshot) -> int | None:
        """Return the place of the step of a snapshot; None if it is not in the record."""
        place = bisect_left(self.index, snapshot.index)
        return place if place < len(self) and self.index[place] == snapshot.index else None

    @cached_property
    def sound(self) -> Sequence[Snapshot]:
        """The snapshots of steps whose loss and gradients were finite and that were taken, in order."""
        return [snapshot for snapshot in self.snapshots if self._is_sound(snapshot)]

    def _is_sound(self, snapshot: Snapshot) -> bool:
        if any(row.histogram.nonfinite for row in snapshot.rows if row.direction == "backward"):
            return False
        place = self.place_of(snapshot)
        return place is None or not (self.skipped[place] or self.is_lost(snapshot))

    @cached_property
    def infinite(self) -> Mapping[tuple[str, str], SnapshotRow]:
        """The rows that hold inf in a sound step, as a mask does, by name and kind."""
        return {
            (row.name, row.what): row
            for snapshot in self.sound
            for row in (*snapshot.inputs, *snapshot.rows)
            if row.direction == "forward" and row.histogram.nonfinite
        }

    @property
    def opening_is_lost(self) -> bool:
        """Whether most steps skipped at the start had a loss of inf or NaN, which no scale can fix."""
        losses = [loss for place in range(self.opening) if (loss := self.loss[place]) is not None]
        return 2 * sum(not math.isfinite(loss) for loss in losses) > self.opening

    @property
    def snapshot(self) -> Snapshot | None:
        """The latest snapshot of a step that was not skipped, or the latest of all."""
        clean = [snapshot for snapshot in self.snapshots if snapshot.first_overflow is None] or self.snapshots
        return clean[-1] if clean else None
