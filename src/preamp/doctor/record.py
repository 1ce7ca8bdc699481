"""What a trace shows, counted once for all rules of the doctor.

This room counts. It refuses to know what is too much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from statistics import median
from typing import Any, Literal, NamedTuple

from preamp.doctor.advice import recorded_policy
from preamp.doctor.finding import RARE
from preamp.exponents import BANDS, Band, exponent_of
from preamp.looks import Look
from preamp.policy import Policy
from preamp.trace import Step, Trace

__all__ = ["Cause", "Record", "Skip"]

Cause = Literal["growth", "streak", "sudden"]
SOME = 100  # of so many steps one may be an outlier


class Skip(NamedTuple):
    """A skipped step, and what came before it.

    Attributes:
        step: the step.
        after: the scale of the next step.
        cause: "growth": the scale had just grown; "streak": the step before was skipped too; "sudden":
            neither, the gradients rose at a scale that had held.
    """

    step: Step
    after: float
    cause: Cause


class Record:
    """A trace with what was counted in it.

    Args:
        trace: the run. Steps without a usable scale are left out.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace: Trace = trace
        self.steps: list[Step] = [step for step in trace if 0.0 < step.scale < math.inf]
        self.policy: Policy[Any] | None = recorded_policy(trace.about.get("policy"))
        self.looks: list[Look] = [look for look in trace.looks if 0.0 < look.scale < math.inf]

    @cached_property
    def band(self) -> Band:
        """What the low precision of the run can hold; float16 unless the record says otherwise."""
        told = self.looks[-1].low_dtype if self.looks else str(self.trace.about.get("precision"))
        return BANDS.get(told, BANDS["float16"])

    @cached_property
    def scales(self) -> list[float]:
        """The scale of every step and, last, the one after it."""
        last = self.steps[-1:]
        return [*(s.scale for s in self.steps), *(s.new_scale or s.scale for s in last)]

    @cached_property
    def opening(self) -> int:
        """How many steps were skipped before the first that was taken."""
        return sum(1 for _ in takewhile(lambda step: step.skipped, self.steps))

    @cached_property
    def settled(self) -> list[Step]:
        """The steps from the first that was taken on."""
        return self.steps[self.opening :]

    @cached_property
    def late(self) -> list[Step]:
        """The second half of `settled`."""
        return self.settled[len(self.settled) // 2 :]

    @cached_property
    def skips(self) -> list[Skip]:
        """The skipped steps of `settled`, in order."""
        return list(self._skips())

    def fell_early(self, scale: float) -> bool:
        """Return whether a scale, or a lower one, overflowed in the first tenth of `settled` or before."""
        last = self.settled[len(self.settled) // 10].index if self.settled else math.inf
        return any(step.skipped and step.scale <= scale for step in self.steps if step.index <= last)

    def rate(self, count: int) -> float:
        """Return a count of steps as a share of `settled`."""
        return count / max(len(self.settled), 1)

    def _skips(self) -> Iterator[Skip]:
        stood, grew, was_skipped = 0, False, False
        for number, (step, after) in enumerate(zip(self.steps, self.scales[1:], strict=True)):
            if step.skipped and number >= self.opening:
                soon = grew and stood <= max(1.0, self.interval / 4)
                yield Skip(step, after, "streak" if was_skipped else "growth" if soon else "sudden")
            moved, was_skipped = after != step.scale, step.skipped
            stood, grew = (0, after > step.scale) if moved else (stood + (not step.skipped), grew)

    @cached_property
    def interval(self) -> float:
        """How many clean steps it takes to grow: what the rule says, or the median of the record."""
        return getattr(self.policy, "growth_interval", None) or median(self._stands() or [len(self.steps)])

    def _stands(self) -> list[int]:
        """Return how many steps the scale stood before each growth."""
        pairs = enumerate(zip(self.scales, self.scales[1:], strict=False), start=1)
        moves = [(number, after > before) for number, (before, after) in pairs if after != before]
        lasts = [0, *(number for number, _ in moves)]
        return [number - last for last, (number, grew) in zip(lasts, moves, strict=False) if grew]

    @cached_property
    def growths(self) -> int:
        """How often the scale grew."""
        return len(self._stands())

    def highest_scale(self, steps: Sequence[Step]) -> int | None:
        """Return the exponent of the highest scale at which all but a few of some steps stay finite.

        A look tells it for its step, the peaks of gradients tell it for the others, less what the looks
        show to be higher between modules. A skipped step was above it.

        Returns:
            The exponent; None where the record has neither looks nor peaks.
        """
        known = sorted(e for step in steps if (e := self._highest_of(step)) is not None)
        is_known = any(not step.skipped and self._highest_of(step) is not None for step in steps)
        outliers = max(len(known) // RARE, min(len(known) // SOME, 1))
        return known[outliers] if is_known else None

    def _highest_of(self, step: Step) -> int | None:
        if step.skipped:
            return exponent_of(step.scale) - 1
        if step.index in self._seen:
            return self._seen[step.index]
        own = self._of_peak(step)
        return None if own is None else own - self._higher_between

    def _of_peak(self, step: Step) -> int | None:
        if step.skipped or not (step.peak and 0.0 < step.peak < math.inf):
            return None
        return exponent_of(step.scale) + exponent_of(self.band.largest) - exponent_of(step.peak)

    @cached_property
    def _seen(self) -> dict[int, int]:
        """By the index of a step, the exponent of the highest scale that its look allows."""
        best = {look.index: look.best_scale(margin=0) for look in self.looks}
        return {index: exponent_of(scale) for index, scale in best.items() if scale}

    @cached_property
    def _higher_between(self) -> int:
        """How many powers of two the flows between modules are above the gradients of parameters."""
        both = [(self._of_peak(step), self._seen.get(step.index)) for step in self.steps]
        return max((a - b for a, b in both if a is not None and b is not None), default=0)

    @cached_property
    def room(self) -> int | None:
        """How many powers of two the scale could have been higher in the second half of the run."""
        highest = self.highest_scale(self.late)
        return None if highest is None else highest - exponent_of(median(s.scale for s in self.late))

    @cached_property
    def usual_room(self) -> float | None:
        """How many powers of two half of the steps that were taken late would have left above them."""
        clean = [(step, self._highest_of(step)) for step in self.late if not step.skipped]
        known = [highest - exponent_of(step.scale) for step, highest in clean if highest is not None]
        return median(known) if known else None

    @cached_property
    def culprits(self) -> Counter[str]:
        """How many skipped steps each parameter was the first to overflow in."""
        return Counter(step.culprits[0] for step in self.steps if step.skipped and step.culprits)

    @property
    def look(self) -> Look | None:
        """The latest look at a step that was not skipped, or the latest of all."""
        clean = [look for look in self.looks if look.first_overflow is None] or self.looks
        return clean[-1] if clean else None
