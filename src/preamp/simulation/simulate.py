"""Run a policy over recorded or synthetic gradients, in Python floats: no model, no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias

from preamp.errors import ScaleExhausted
from preamp.policy import Policy, Reading
from preamp.record.trace import Trace
from preamp.scaling import Step
from preamp.simulation.processes import Gradients, Process

__all__ = ["simulate"]

_CLEAN, _OVERFLOW = Reading(finite=True), Reading(finite=False)
Measurement: TypeAlias = tuple[Reading, float | None, float | None]  # and peak and zeros of the step
Measure: TypeAlias = Callable[[Any, float], Measurement]  # of a step, at a scale


def simulate(policy: Policy[Any], overflows: Process | Iterable[bool | Reading | Step]) -> Trace:
    """Play steps through a policy and return the trace.

    Args:
        policy: any policy or dialect.
        overflows: a process, such as those of `preamp.processes`: overflows and gradient statistics then
            depend on the policy's own scale. Or, the same at every scale, for each step True if its gradients
            overflow, or a `Reading`, or a `Step` of a recorded run; a `Trace` is a series of steps.

    Returns:
        One step each. If the policy gives up, the trace ends with that step and `trace.stopped`
        says why. Over a process, a step's `peak` is the scaled one, and `zeros` the share that was flushed.

    >>> from preamp import Dynamic, processes
    >>> trace = simulate(Dynamic(init_scale=8, growth_interval=2), [False, True, False, False])
    >>> [step.scale for step in trace], trace.summary().final_scale
    ([8.0, 8.0, 4.0, 4.0], 8.0)
    >>> shrinking = processes.Drifting(steps=5000, drift=-10, jitter=0.25)
    >>> [step.scale for step in simulate(Dynamic(growth_interval=100), shrinking)][::1000]
    [65536.0, 67108864.0, 134217728.0, 536870912.0, 2147483648.0]
    """
    if isinstance(overflows, (str, bytes)):
        raise TypeError(f"overflows={overflows!r} is text. Write [c == '1' for c in {overflows!r}].")
    trace = Trace(policy=repr(policy))
    if isinstance(overflows, Process):
        trace.about["process"] = repr(overflows)
        measure = _measure_process(policy, overflows)
    else:
        measure = _measure_given(policy)
    trace.extend(_played(policy, overflows, measure, trace))
    return trace


def _played(
    policy: Policy[Any], steps: Iterable[Any], measure: Measure, trace: Trace
) -> Iterator[tuple[Any, ...]]:
    advanced: Any = policy.step if policy.gives_up else policy.advance
    if not policy.needs:  # a policy that uses a single bit goes through few states, over and over
        advanced = lru_cache(maxsize=2**13)(advanced)
    state = policy.start()
    for index, item in enumerate(steps):
        scale = state.scale
        reading, peak, zeros = measure(item, scale)
        finite = reading.finite
        try:
            after = advanced(state, reading)
        except ScaleExhausted as reason:
            yield index, scale, finite, not finite, scale, None, None, peak, zeros, (), None, ()
            trace.stop(str(reason))
            return
        yield index, scale, finite, not finite, after.scale, None, None, peak, zeros, (), None, ()
        state = after


def _measure_process(policy: Policy[Any], process: Process) -> Measure:
    """Return a function that measures the gradients of a process, as far as a policy needs it."""
    top, bottom, flushed = process.top, process.bottom, lru_cache(maxsize=2**13)(process.flushed)
    needs_nothing, edge = not policy.needs, policy.edge if "share" in policy.needs else None

    def measure(gradients: Gradients, scale: float) -> Measurement:
        peak, typical = gradients[0] * scale, gradients[1] * scale
        if not peak < top:  # NaN as well
            return _OVERFLOW, None, None
        if not peak > bottom:
            peak = 0.0
        share = None if edge is None else process.share_from(edge, peak, typical)
        reading = _CLEAN if needs_nothing else Reading(True, peak, share)
        return reading, peak, flushed(typical) if peak else 1.0

    return measure


def _measure_given(policy: Policy[Any]) -> Measure:
    """Return the same for steps that are given, and equal at every scale."""
    needs_nothing = not policy.needs

    def measure(item: object, _: float) -> Measurement:
        reading = _reading(item)
        plain = _CLEAN if reading.finite else _OVERFLOW
        return plain if needs_nothing else reading, reading.peak, None

    return measure


def _reading(item: object) -> Reading:
    if item in (True, False):
        return _OVERFLOW if item else _CLEAN
    if isinstance(item, (Reading, Step)):
        return Reading(bool(item.finite), item.peak, getattr(item, "share", None))
    raise TypeError(
        f"overflows holds {item!r}, neither true nor false. Write True for a step that overflows."
    )
