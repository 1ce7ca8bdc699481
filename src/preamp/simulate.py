"""A policy over recorded or invented readings, on plain Python floats: no model, no framework.

This room plays steps through a policy. It refuses to know where the overflows come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from preamp.errors import Starved
from preamp.policy import Policy, Reading
from preamp.trace import Step, Trace

__all__ = ["simulate"]

_CLEAN, _OVERFLOW = Reading(finite=True), Reading(finite=False)


def simulate(policy: Policy[Any], overflows: Iterable[bool | Reading | Step]) -> Trace:
    """Play steps through a policy and return the trace.

    Args:
        policy: any policy or dialect.
        overflows: for each step True if its gradients overflow, or a `Reading`, or a `Step` of a
            recorded run; a `Trace` is a series of steps.

    Returns:
        One step each. If the policy gives up, the trace ends with that step and `trace.stopped`
        says why.

    >>> from preamp import Dynamic
    >>> trace = simulate(Dynamic(init_scale=8, growth_interval=2), [False, True, False, False])
    >>> [step.scale for step in trace], trace.summary().final_scale
    ([8.0, 8.0, 4.0, 4.0], 8.0)
    """
    if isinstance(overflows, (str, bytes)):
        raise TypeError(f"overflows={overflows!r} is text. Write [c == '1' for c in {overflows!r}].")
    trace = Trace(policy=repr(policy))
    trace.extend(_played(policy, overflows, trace))
    return trace


def _played(policy: Policy[Any], overflows: Iterable[Any], trace: Trace) -> Iterator[tuple[Any, ...]]:
    advanced = lru_cache(maxsize=2**13)(policy.step)  # runs go through few states, over and over
    state = policy.start()
    for index, item in enumerate(overflows):
        reading = _OVERFLOW if item is True else _CLEAN if item is False else _reading(item)
        finite, peak = reading.finite, reading.peak
        try:
            after = advanced(state, reading)
        except Starved as reason:
            trace.stop(str(reason))
            after = state
        yield index, state.scale, finite, not finite, after.scale, None, None, peak, None, (), None
        if trace.stopped:
            return
        state = after


def _reading(item: Any) -> Reading:
    if isinstance(item, (Reading, Step)):
        return Reading(bool(item.finite), item.peak)
    if item in (0, 1):
        return _OVERFLOW if item else _CLEAN
    raise TypeError(
        f"overflows holds {item!r}, neither true nor false. Write True for a step that overflows."
    )
