"""Log skipped steps: why, the scale before and after, and the parameters concerned.

The records go to the logger "preamp.deepspeed" as warnings, from rank 0 only. A run that diverges skips
every step, on a thousand nodes at once: beyond a few records a minute, skipped steps are counted instead of
logged, and the next record gives the count.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from preamp.checks import positive, some_of, whole
from preamp.deepspeed.ranks import rank
from preamp.scaling import Step

LOGGER = logging.getLogger("preamp.deepspeed")


class OverflowLog:
    """Logs the skipped ones among the steps it is called with, so it can be given to any `on_step=`.

    The numbers are attributes of the `logging.LogRecord` too, for handlers that do not read prose: `step`,
    `reason`, `scale`, `new_scale`, `hysteresis_left`, `culprits` (all names, as a tuple) and `left_out`.

    Args:
        limit: how many records are written in a period.
        period: its length in seconds; it begins with a record.
        clock: returns monotonic seconds.

    Raises:
        PolicyError: for an invalid limit or period.

    >>> import sys
    >>> LOGGER.addHandler(handler := logging.StreamHandler(sys.stdout))
    >>> log = OverflowLog()
    >>> log(Step(7, 65536.0, False, True, 65536.0, culprits=("wte.weight", "h.0.weight")), hysteresis_left=1)
    step 7 skipped: loss scale stays 65536, hysteresis left 1; not finite: wte.weight, h.0.weight
    >>> log(Step(8, 65536.0, False, True, 32768.0))
    step 8 skipped: loss scale 65536 -> 32768
    >>> log(Step(9, 32768.0, True, False, 32768.0))
    >>> from preamp.scaling import Spike
    >>> log(Step(10, 32768.0, True, True, 32768.0, spike=Spike("loss", 21.5, 2.75)))
    step 10 skipped: loss 21.5, limit 2.75; loss scale stays 32768
    >>> LOGGER.removeHandler(handler)
    """

    def __init__(
        self, *, limit: int = 10, period: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        whole("limit", limit, least=1, instead="limit=10")
        positive("period", period, "period=60.0")
        self.limit: int = limit
        self.period: float = period
        self.clock: Callable[[], float] = clock
        self._began, self._written, self._left_out = -math.inf, 0, 0

    def __call__(self, step: Step, hysteresis_left: int | None = None) -> None:
        """Log a step if it was skipped, this is rank 0, and the period's records are not used up.

        Args:
            step: the record of the step.
            hysteresis_left: overflows until the scale backs off, 1 if the next does. None for a rule that
                does not count them.
        """
        if not step.skipped or rank() or not self._admits():
            return
        message = _explained(step, hysteresis_left) + self._rationing()
        numbers = {
            "step": step.index,
            "reason": step.reason,
            "scale": step.scale,
            "new_scale": step.new_scale,
            "hysteresis_left": hysteresis_left,
            "culprits": step.culprits,
            "left_out": self._left_out,
        }
        self._left_out = 0
        LOGGER.warning("step %d skipped: %s", step.index, message, extra=numbers)

    def _admits(self) -> bool:
        """Count one more record; return whether to write it."""
        now = self.clock()
        if not 0.0 <= now - self._began < self.period:  # another process's clock can be ahead of ours
            self._began, self._written = now, 0
        admitted = self._written < self.limit
        self._written += admitted
        self._left_out += not admitted
        return admitted

    def _rationing(self) -> str:
        """Say how many were left out before this record, and that following ones may be."""
        before = f"; skipped before it and not logged: {self._left_out}" if self._left_out else ""
        if self._written < self.limit:
            return before
        return f"{before}; the last of {self.limit} records in {self.period:g} s"


def not_finite(culprits: Sequence[str]) -> str:
    """Return the first few of the parameters' names and how many more there are; nothing for none."""
    return f"; not finite: {some_of(culprits)}" if culprits else ""


def _explained(step: Step, hysteresis_left: int | None) -> str:
    """Return what a record says about a skipped step."""
    if step.reason != "spike" or step.spike is None:
        return _move(step, hysteresis_left) + not_finite(step.culprits)
    of, value, limit = step.spike
    largest = f"; largest: {some_of(step.culprits)}" if step.culprits else ""
    return f"{of.replace('_', ' ')} {value:.6g}, limit {limit:.6g}; {_move(step, None)}{largest}"


def _move(step: Step, hysteresis_left: int | None) -> str:
    moves = step.new_scale is not None and step.new_scale != step.scale
    scale = f"{step.scale:.10g} -> {step.new_scale:.10g}" if moves else f"stays {step.scale:.10g}"
    left = "" if hysteresis_left is None else f", hysteresis left {hysteresis_left}"
    return f"loss scale {scale}{left}"
