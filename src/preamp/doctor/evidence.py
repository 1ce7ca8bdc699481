"""What a trace shows, counted once for all rules of the doctor.

This module counts; the rules decide how much is too much. Numbers of many steps are kept in arrays and read
in passes, because a trace may have millions of steps.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, pairwise
from statistics import median
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from preamp.doctor.advice import recorded_policy
from preamp.doctor.finding import RARE
from preamp.policy import Policy
from preamp.record.exponents import BANDS, Band, exponent_of
from preamp.record.snapshots import Look, LookRow, joined
from preamp.record.trace import Summary, Trace

Cause: TypeAlias = Literal["growth", "streak", "sudden"]
CAUSES: Final[tuple[Cause, ...]] = ("growth", "streak", "sudden")
SOME = 100  # of so many steps one may be an outlier


class Skip(NamedTuple):
    """A skipped step, and what came before it.

    Attributes:
        place: the step, counted from 0 among those of the record.
        scale: the scale that was in its loss.
        after: the scale of the next step.
        cause: "growth": the scale had just grown; "streak": the step before was skipped too; "sudden":
            neither, the gradients rose at a scale that had held.
    """

    place: int
    scale: float
    after: float
    cause: Cause


class Column:
    """One number of each step, which may not be known.

    Attributes:
        values: the numbers; 0 where there is none.
        known: for each step, 1 where there is a number.
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


class Skips:
    """The skipped steps of a record from the first that was taken on, in order."""

    def __init__(self, scales: Sequence[float]) -> None:
        self._scales: Sequence[float] = scales
        self._places: array[int] = array("q")
        self._causes: bytearray = bytearray()

    def add(self, place: int, cause: Cause) -> None:
        """Add a step."""
        self._places.append(place)
        self._causes.append(CAUSES.index(cause))

    def of(self, cause: Cause) -> Skips:
        """Return those of one cause."""
        chosen, number = Skips(self._scales), CAUSES.index(cause)
        for place, one in zip(self._places, self._causes, strict=True):
            if one == number:
                chosen.add(place, cause)
        return chosen

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Skip]:
        for place, cause in zip(self._places, self._causes, strict=True):
            yield Skip(place, self._scales[place], self._scales[place + 1], CAUSES[cause])


class Record:
    """A trace with what was counted in it.

    Args:
        trace: the run. Steps without a usable scale are left out, and places count the others from 0.

    Attributes:
        scales: the scale of every step and, last, the one after it.
        skipped: for every step, 1 if it was skipped.
        looks: what was seen of single steps; what was recorded of one step in parts is one look.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace: Trace = trace
        self.policy: Policy[Any] | None = recorded_policy(trace.about.get("policy"))
        self.looks: list[Look] = [look for look in joined(trace.looks) if 0.0 < look.scale < math.inf]
        self.scales: array[float] = array("d", trace.column("scale"))
        self._left_out: frozenset[int] = frozenset(
            place for place, scale in enumerate(self.scales) if not 0.0 < scale < math.inf
        )
        if self._left_out:
            self.scales = array("d", self._kept("scale"))
        self.skipped: bytearray = bytearray(self._kept("skipped"))
        if self.scales:
            self.scales.append(self._last_scale() or self.scales[-1])

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
        """The loss of every step."""
        return Column(self._kept("loss"))

    @cached_property
    def grad_norm(self) -> Column:
        """The norm of the unscaled gradients of every step."""
        return Column(self._kept("grad_norm"))

    @cached_property
    def peak(self) -> Column:
        """The largest finite magnitude among the scaled gradients of every step."""
        return Column(self._kept("peak"))

    @cached_property
    def new_scale(self) -> Column:
        """The scale that the step after each was to have."""
        return Column(self._kept("new_scale"))

    @cached_property
    def zeros(self) -> Column:
        """The share of gradient entries of every step that are exactly zero."""
        return Column(self._kept("zeros"))

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """The names of all buffers that a skipped step has left at inf or NaN."""
        return tuple(dict.fromkeys(name for names in self._kept("buffers") for name in names))

    @property
    def resumed_at_start(self) -> bool:
        """Whether all steps that were recorded before the run was resumed have been replaced."""
        return len(self) > 0 and self.index[0] in self.trace.resumed

    @cached_property
    def summary(self) -> Summary:
        """What the trace comes to."""
        return self.trace.summary()

    @cached_property
    def band(self) -> Band:
        """What the low precision of the run can hold; float16 unless the record says otherwise."""
        told = str(self.trace.about.get("precision"))
        if self.looks and told != "float32":  # a lens cannot tell that nothing is lowered
            told = self.looks[-1].low_dtype
        return BANDS.get(told, BANDS["float16"])

    @cached_property
    def opening(self) -> int:
        """How many steps were skipped before the first that was taken."""
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
    def skips(self) -> Skips:
        """The skipped steps of `settled`."""
        found, soon = Skips(self.scales), max(1.0, self.interval / 4)
        stood, grew, was_skipped = 0, False, False
        rows = zip(self.skipped, pairwise(self.scales), strict=True)
        for place, (skipped, (scale, after)) in enumerate(rows):
            if skipped and place >= self.opening:
                just_grown = grew and stood <= soon
                found.add(place, "streak" if was_skipped else "growth" if just_grown else "sudden")
            stood, grew = (0, after > scale) if after != scale else (stood + (not skipped), grew)
            was_skipped = bool(skipped)
        return found

    def fell_early(self, scale: float) -> bool:
        """Return whether a scale, or a lower one, overflowed in the first tenth of `settled` or before."""
        end = self.settled[len(self.settled) // 10] + 1 if self.settled else len(self)
        pairs = zip(self.skipped[:end], self.scales, strict=False)
        return any(skipped and used <= scale for skipped, used in pairs)

    def rate(self, count: int) -> float:
        """Return a count of steps as a share of `settled`."""
        return count / max(len(self.settled), 1)

    @cached_property
    def interval(self) -> float:
        """How many clean steps it takes to grow: what the rule says, or the median of the record."""
        return getattr(self.policy, "growth_interval", None) or median(self._stands or [len(self)])

    @cached_property
    def _stands(self) -> Sequence[int]:
        """How many steps the scale stood before each growth."""
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
        """How often the scale grew."""
        return len(self._stands)

    def highest_scale(self, steps: range) -> int | None:
        """Return the exponent of the highest scale at which all but a few of some steps stay finite.

        A look tells it for its step, the peaks of gradients tell it for the others, less what the looks
        show to be higher between modules. A skipped step was above it.

        Returns:
            The exponent; None where the record has neither looks nor peaks.
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
        if self._seen and (seen := self._seen.get(self.index[place])) is not None:
            return seen
        own = self._of_peak(place)
        return None if own is None else own - self._higher_between

    def _of_peak(self, place: int) -> int | None:
        peak = self.peak[place]
        if self.skipped[place] or not (peak and 0.0 < peak < math.inf):
            return None
        return exponent_of(self.scales[place]) + exponent_of(self.band.largest) - exponent_of(peak)

    @cached_property
    def _seen(self) -> dict[int, int]:
        """By the index of a step, the exponent of the highest scale that its look allows."""
        best = {look.index: look.best_scale(margin=0) for look in self.looks}
        return {index: exponent_of(scale) for index, scale in best.items() if scale}

    @cached_property
    def _higher_between(self) -> int:
        """How many powers of two the flows between modules are above the gradients of parameters."""
        if not self._seen:
            return 0
        places = (place for place, index in enumerate(self.index) if index in self._seen)
        both = [(self._of_peak(place), self._seen[self.index[place]]) for place in places]
        return max((a - b for a, b in both if a is not None), default=0)

    @cached_property
    def room(self) -> int | None:
        """How many powers of two the scale could have been higher in the second half of the run."""
        highest = self.highest_scale(self.late)
        return None if highest is None else highest - exponent_of(median(self.of(self.late)))

    @cached_property
    def usual_room(self) -> float | None:
        """How many powers of two half of the steps that were taken late would have left above them."""
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
        """How many skipped steps each parameter was the first to overflow in.

        Steps whose loss was inf or NaN do not count: all their gradients are lost with it.
        """
        return self.culprits_from(0)

    def culprits_from(self, place: int) -> Counter[str]:
        """Return the same of the steps from a place on."""
        steps = zip(self.skipped, self._kept("culprits"), self._kept("loss"), strict=True)
        return Counter(
            names[0]
            for skipped, names, loss in islice(steps, place, None)
            if skipped and names and (loss is None or math.isfinite(loss))
        )

    def is_lost(self, look: Look) -> bool:
        """Return whether the loss of the step of a look was inf or NaN."""
        place = self._place(look)
        loss = None if place is None else self.loss[place]
        return loss is not None and not math.isfinite(loss)

    def _place(self, look: Look) -> int | None:
        place = bisect_left(self.index, look.index)
        return place if place < len(self) and self.index[place] == look.index else None

    @cached_property
    def sound(self) -> Sequence[Look]:
        """The looks at steps whose loss and gradients were finite and that were taken, in order."""
        return [look for look in self.looks if self._is_sound(look)]

    def _is_sound(self, look: Look) -> bool:
        if any(row.histogram.nonfinite for row in look.rows if row.direction == "backward"):
            return False
        place = self._place(look)
        return place is None or not (self.skipped[place] or self.is_lost(look))

    @cached_property
    def infinite(self) -> Mapping[tuple[str, str], LookRow]:
        """By name and kind, what held inf in a step that went well, as a mask does."""
        return {
            (row.name, row.what): row
            for look in self.sound
            for row in (*look.inputs, *look.rows)
            if row.direction == "forward" and row.histogram.nonfinite
        }

    @property
    def opening_is_lost(self) -> bool:
        """Whether most steps skipped at the start had a loss of inf or NaN, which no scale changes."""
        losses = [loss for place in range(self.opening) if (loss := self.loss[place]) is not None]
        return 2 * sum(not math.isfinite(loss) for loss in losses) > self.opening

    @property
    def look(self) -> Look | None:
        """The latest look at a step that was not skipped, or the latest of all."""
        clean = [look for look in self.looks if look.first_overflow is None] or self.looks
        return clean[-1] if clean else None
