"""Run a policy over recorded or synthetic gradients, in Python floats: no model, no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias

from preamp.errors import PolicyError, ScaleExhausted
from preamp.guards import Guard
from preamp.policy import Policy, Reading
from preamp.record.trace import Trace
from preamp.scaling import Measured, Step, advance, given_guard, judge, start, to_step
from preamp.simulation.processes import Gradients, Losses, Process

__all__ = ["simulate"]

_CLEAN, _OVERFLOW = Reading(finite=True), Reading(finite=False)
Measurement: TypeAlias = tuple[Reading, float | None, float | None]  # and amax and zeros of the step
Measure: TypeAlias = Callable[[Any, float], Measurement]  # of a step, at a scale


def simulate(
    policy: Policy[Any],
    overflows: Process | Losses | Iterable[bool | Reading | Step],
    guard: Guard[Any] | None = None,
) -> Trace:
    """Play steps through a policy, and through a guard, and return the trace.

    Args:
        policy: any policy or dialect.
        overflows: a process, such as those of `preamp.processes`: overflows and amaxes then
            depend on the policy's own scale. Or losses with spikes, such as `processes.RestingLoss()`, for
            a guard: `process.outcome(trace)` then counts the spikes that it missed. Or, the same at every
            scale, for each step True if its gradients overflow, or a `Reading`, or a `Step` of a recorded
            run; a `Trace` is a series of steps. A guard needs readings or steps with a loss or a norm.
            Steps that a guard skipped in a recorded run count as they would have without the guard.
        guard: any guard or dialect of `preamp.guards`, to skip spikes.

    Returns:
        One step each; `reason` says why one was skipped. If the policy gives up, the trace ends with that
        step and `trace.stopped` says why. Over a process, a step's `amax` is the scaled one, and `zeros` the
        share that was flushed.

    Raises:
        PolicyError: for a guard that uses what the steps do not have.

    >>> from preamp import Dynamic, Reading, Static, guards, processes
    >>> trace = simulate(Dynamic(init_scale=8, growth_interval=2), [False, True, False, False])
    >>> [step.scale for step in trace], trace.summary().final_scale
    ([8.0, 8.0, 4.0, 4.0], 8.0)
    >>> shrinking = processes.Drifting(steps=5000, drift=-10, jitter=0.25)
    >>> [step.scale for step in simulate(Dynamic(growth_interval=100), shrinking)][::1000]
    [65536.0, 67108864.0, 134217728.0, 536870912.0, 2147483648.0]
    >>> readings = [Reading(True, grad_norm=norm) for norm in (1.0, 9.0, 2.0)]
    >>> [step.reason for step in simulate(Static(1.0), readings, guard=guards.NormLimit(5.0))]
    [None, 'spike', None]
    >>> losses = processes.SpikeRuns(steps=1000, seed=3)
    >>> losses.outcome(simulate(Static(1.0), losses, guard=guards.SpikeGuard()))
    SpikeOutcome(steps=1000, skipped=24, spikes=24, missed=0, false_alarms=0, longest_run=6)
    """
    if isinstance(overflows, (str, bytes)):
        raise TypeError(f"overflows={overflows!r} is text. Write [c == '1' for c in {overflows!r}].")
    trace = Trace(policy=repr(policy))
    if isinstance(overflows, Losses):
        trace.about["process"] = repr(overflows)
    if given_guard(guard, may_be_idle=True) is not None:
        trace.about["guard"] = repr(guard)
        steps = _guarded(policy, guard, overflows, trace)  # type: ignore[arg-type]
        trace.extend(steps)
        return trace
    if isinstance(overflows, Process):
        trace.about["process"] = repr(overflows)
        measure = _measure_process(policy, overflows)
    else:
        measure = _measure_given(policy)
    trace.extend(_played(policy, overflows, measure, trace))
    return trace


def _guarded(
    policy: Policy[Any], guard: Guard[Any], steps: Iterable[Any], trace: Trace
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of steps that are given, played through a policy and a guard."""
    state, guard_state = start(policy, takes_norm=True, guard=guard), guard.start()
    for item in steps:
        if isinstance(item, Gradients):
            raise PolicyError(
                f"{guard!r} needs a loss or a norm of every step, and this process has neither. Write "
                "simulate(policy, processes.RestingLoss(), guard=guard), or give it a recorded trace or "
                "[Reading(True, loss=loss, grad_norm=norm), ...]."
            )
        reading = _reading(item)
        scale, norm = state.policy_state.scale, reading.grad_norm
        measured = Measured(reading.finite, scale, norm, reading.amax, reading.loss)
        judged = judge(guard, guard_state, measured)
        guard_state = judged.state
        state, gave_up = advance(policy, state, measured, judged=judged)
        step = to_step(state, loss=reading.loss)
        assert step is not None  # there was one
        yield step._replace(grad_norm=norm, amax=reading.amax)
        if gave_up:
            trace.stop(str(policy.exhaustion_from(state.policy_state)))
            return


def _played(
    policy: Policy[Any], steps: Iterable[Any], measure: Measure, trace: Trace
) -> Iterator[tuple[Any, ...]]:
    advanced: Any = policy.step if policy.gives_up else policy.advance
    if not policy.needs_amax:  # a policy that uses a single bit goes through few states, over and over
        advanced = lru_cache(maxsize=2**13)(advanced)
    state = policy.start()
    loss = norm = None
    keeps = not isinstance(steps, Process)
    for index, item in enumerate(steps):
        scale = state.scale
        reading, amax, zeros = measure(item, scale)
        finite = reading.finite
        if keeps and isinstance(item, Reading | Step):
            loss, norm = item.loss, item.grad_norm if finite else None
        try:
            after = advanced(state, reading)
        except ScaleExhausted as reason:
            yield index, scale, finite, not finite, scale, loss, norm, amax, zeros, (), None, (), None
            trace.stop(str(reason))
            return
        yield index, scale, finite, not finite, after.scale, loss, norm, amax, zeros, (), None, (), None
        state = after


def _measure_process(policy: Policy[Any], process: Process) -> Measure:
    """Return a function that measures the gradients of a process, as far as a policy needs it."""
    top, bottom, flushed = process.top, process.bottom, lru_cache(maxsize=2**13)(process.flushed)

    def measure(gradients: Gradients, scale: float) -> Measurement:
        amax, typical = gradients[0] * scale, gradients[1] * scale
        if not amax < top:  # NaN as well
            return _OVERFLOW, None, None
        if not amax > bottom:
            amax = 0.0
        reading = Reading(True, amax) if policy.needs_amax else _CLEAN
        return reading, amax, flushed(typical) if amax else 1.0

    return measure


def _measure_given(policy: Policy[Any]) -> Measure:
    """Return the same for steps that are given, and equal at every scale."""

    def measure(item: object, _: float) -> Measurement:
        reading = _reading(item)
        plain = _CLEAN if reading.finite else _OVERFLOW
        return reading if policy.needs_amax else plain, reading.amax, None

    return measure


def _reading(item: object) -> Reading:
    if item in (True, False):
        return _OVERFLOW if item else _CLEAN
    if isinstance(item, (Reading, Step)):
        return Reading(bool(item.finite), item.amax, item.loss, item.grad_norm)
    raise TypeError(
        f"overflows holds {item!r}, neither true nor false. Write True for a step that overflows."
    )
