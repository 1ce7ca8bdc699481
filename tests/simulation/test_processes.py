"""Gradients without a model: what they are said to be, against numbers that were drawn and rounded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import (
    Headroom,
    PolicyError,
    Reading,
    ScaleExhausted,
    State,
    Static,
    Step,
    Trace,
    TraceError,
    simulate,
)
from preamp.policy import Policy, Where, choose
from preamp.record.exponents import BANDS
from preamp.simulation.processes import Drifting, HeavyTailed, Process, Recorded, Spiky, Stationary
from tests.strategies import blind, policies

LOW = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float32": np.float32,
}
few = settings(deadline=None, max_examples=12)

common = {
    "steps": st.integers(1, 200),
    "seed": st.integers(0, 2**32),
    "dtype": st.sampled_from(sorted(LOW)),
    "level": st.floats(-40.0, 20.0),
    "ranks": st.sampled_from([1, 1000]),
}
drawn: st.SearchStrategy[Any] = (
    st.builds(Stationary, jitter=st.floats(0.1, 4.0), **common)
    | st.builds(Drifting, drift=st.floats(-60.0, 60.0), **common)
    | st.builds(Spiky, height=st.floats(1.0, 40.0), chance=st.floats(0.001, 0.1), **common)
    | st.builds(HeavyTailed, tail=st.floats(0.3, 4.0), **common)
)


@dataclass(frozen=True)
class Peeking(Policy[State]):
    """Aims two powers of two below overflow in float16, and remembers what it saw last."""

    needs_amax = True

    def start(self) -> State:
        return State(1.0, 0.0, 0.0)

    def advance(self, state: State, reading: Reading, where: Where = choose) -> State:
        if not reading.finite:
            return State(state.scale / 2.0, 0.0, 0.0)
        power = 14 - math.frexp(reading.amax)[1] if reading.amax else 1
        return State(math.ldexp(state.scale, power), reading.amax, 0.0)


def rounded(dtype: str, values: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(LOW[dtype]).astype(np.float64)


def by_hand(policy: Policy[Any], process: Process) -> list[tuple[float, bool, float | None]]:
    """Play gradients that are really rounded, until the policy gives up."""
    state, steps = policy.start(), []
    for amax, _ in process:
        low = rounded(process.dtype, amax * state.scale)
        finite = bool(np.isfinite(low))
        seen = amax * state.scale if low else 0.0
        steps.append((state.scale, finite, seen if finite else None))
        reading = Reading(finite, seen) if policy.needs_amax and finite else Reading(finite)
        try:
            state = policy.step(state, reading)
        except ScaleExhausted:
            break
    return steps


@few
@given(policies | st.just(Peeking()), drawn)
def test_the_closed_loop_is_stepping_by_hand_with_numbers_that_are_really_rounded(
    policy: Any, process: Any
) -> None:
    trace = simulate(policy, process)
    assert [(step.scale, step.finite, step.amax) for step in trace] == by_hand(policy, process)
    assert all((step.zeros is None) == step.skipped == (not step.finite) for step in trace)
    assert [step.new_scale for step in trace][:-1] == [step.scale for step in trace][1:]
    assert trace.about == {"policy": repr(policy), "process": repr(process)}
    assert trace.stopped or len(trace) == process.steps


def test_a_blind_rule_decides_once_for_each_state_it_comes_through() -> None:
    decided = []

    @dataclass(frozen=True)
    class Counted(Static):
        def advance(self, state: State, reading: Reading, where: Where = choose) -> State:
            decided.append((state, reading))
            return state._replace(bad=(state.bad + 1.0) % 7.0)

    assert len(simulate(Counted(), Stationary(steps=3000))) == 3000
    assert len(decided) == len(set(decided)) == 7


def entries(process: Process, typical: float) -> Any:
    """Draw entries as the room describes them."""
    rng = np.random.default_rng(0)
    powers = rng.normal(-process.depth, process.spread, 400_000)
    return typical * 2.0 ** powers[powers < 0.0]


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float16", 3.0), ("bfloat16", 2.0**-130), ("float8_e5m2", 1.0)]
)
def test_shares_are_those_of_entries_that_are_drawn_and_rounded(dtype: str, scale: float) -> None:
    process = Stationary(dtype=dtype, depth=9.0, spread=6.0)
    scaled = scale * entries(process, 2.0**-4)
    error = 4.0 * 0.5 / math.sqrt(len(scaled))
    assert np.mean(rounded(dtype, scaled) == 0.0) == pytest.approx(
        process.flushed(scale * 2.0**-4), abs=error
    )
    assert process.flushed(0.0) == 1.0


@pytest.mark.parametrize("dtype", sorted(LOW))
def test_the_borders_are_those_of_the_format(dtype: str) -> None:
    process = Stationary(dtype=dtype)
    near = 1e-9 if dtype == "float32" else 1e-4  # the others are rounded to float32 on the way
    assert rounded(dtype, process.top * (1.0 - near)) == BANDS[dtype].largest
    assert not np.isfinite(rounded(dtype, process.top * (1.0 + near)))
    assert rounded(dtype, process.bottom * (1.0 + near)) == BANDS[dtype].smallest
    assert rounded(dtype, process.bottom * (1.0 - near)) == 0.0


@settings(deadline=None, max_examples=12)
@given(drawn, st.integers(900, 2100))
def test_the_best_scale_is_what_a_sweep_of_static_scales_finds(process: Any, steps: int) -> None:
    process = replace(process, steps=steps)
    amaxes = np.array([amax for amax, _ in process])
    sweep = [2.0**power for power in range(-126, 128)]
    held = [scale for scale in sweep if (amaxes * scale >= process.top).sum() <= steps / 1000]
    assert process.best_scale == max(held, default=None)
    for scale in (process.best_scale, 2.0 * (process.best_scale or 1.0)):
        if scale and scale < 2.0**127:
            outcome = process.outcome(simulate(Static(scale), process))
            assert (outcome.skipped <= steps / 1000) == (scale == process.best_scale)
            assert outcome.reached == 0


def test_an_outcome_says_what_is_in_the_trace() -> None:
    process = Stationary(steps=100, jitter=1e-9, level=0.0)
    assert process.best_scale == 2.0**15
    scales = [2.0**20, 2.0**17, 2.0**16, 2.0**14, 2.0**15]
    steps = [Step(n, scale, n > 1, n <= 1, zeros=n / 10 if n > 1 else None) for n, scale in enumerate(scales)]
    outcome = process.outcome(Trace(steps))
    assert outcome == (5, 2, pytest.approx(0.3), 2.0**15, 2, 2.0**15)
    assert process.outcome(Trace()) == (0, 0, None, 2.0**15, None, None)


def excesses(process: Any) -> Any:
    return np.array([math.log2(amax / typical) for amax, typical in process])


def test_the_processes_are_their_formulas() -> None:
    """Means of 20,000 draws, within four standard errors."""
    error = 4.0 / math.sqrt(20_000)
    normal = excesses(Stationary(jitter=2.0))
    assert normal.mean() == pytest.approx(0.0, abs=2.0 * error)
    assert normal.std() == pytest.approx(2.0, abs=2.0 * error)
    drifting = Drifting(drift=30.0, level=-5.0, jitter=2.0)
    typicals = [math.log2(typical) for _, typical in drifting]
    assert typicals[0] == -5.0
    trend = [30.0 * step / 20_000 for step in range(20_000)]
    assert typicals == pytest.approx([-5.0 + moved for moved in trend], abs=1.0 / 32.0)
    amaxes = [math.log2(amax) + 5.0 - moved for (amax, _), moved in zip(drifting, trend, strict=True)]
    assert amaxes == pytest.approx(list(normal))
    spiky = excesses(Spiky(height=100.0, chance=0.01, jitter=2.0))
    assert (spiky > 50.0).mean() == pytest.approx(0.01, abs=0.1 * error)
    assert spiky[spiky > 50.0].mean() == pytest.approx(100.0, abs=2.0)
    heavy = excesses(HeavyTailed(tail=0.5))
    assert heavy.min() >= 0.0
    for powers in (1.0, 4.0, 8.0):
        assert (heavy > powers).mean() == pytest.approx(2.0 ** (-0.5 * powers), abs=error)


@few
@given(blind | st.sampled_from([Peeking(), Headroom()]), drawn)
def test_a_recorded_run_replayed_through_its_rule_has_the_same_scales(policy: Any, process: Any) -> None:
    first = simulate(policy, process)
    if all(step.amax is None for step in first):
        with pytest.raises(TraceError, match="has no amaxes"):
            Recorded(first, dtype=process.dtype)
        return
    again = simulate(policy, Recorded(first, dtype=process.dtype))
    assert [(s.scale, s.finite, s.new_scale) for s in again] == [
        (s.scale, s.finite, s.new_scale) for s in first
    ]
    assert [s.amax for s in again] == [pytest.approx(s.amax) if s.amax else s.amax for s in first]
    assert again.stopped == first.stopped


def test_what_a_recorded_step_says_of_other_scales() -> None:
    top = 65520.0
    trace = Trace(
        [
            Step(0, 4.0, True, False),  # before any amax: the next one
            Step(1, 4.0, True, False, amax=8.0),
            Step(2, 2.0**16, False, True, amax=math.inf),
            Step(3, 2.0**13, False, True),
            Step(4, 2.0**20, True, False),  # the last known would have overflowed
            Step(5, 1.0, True, False, amax=1e9),  # gradients wider than what overflowed
            Step(6, math.inf, False, True),
            Step(7, 0.0, True, False, amax=2.0),
            Step(8, 8.0, True, False, amax=0.0),
        ]
    )
    below, above = math.nextafter(top, 0.0), math.nextafter(top / 2.0**13, math.inf)
    amaxes = [amax for amax, _ in Recorded(trace)]
    assert amaxes == [2.0, 2.0, 2.0, above, below / 2.0**20, below, math.inf, below, 0.0]
    assert [typical for _, typical in Recorded(trace)] == [2.0] * 4 + [below / 2.0**20] + [below] * 3 + [0.0]
    assert [step.finite for step in simulate(Static(4.0), Recorded(trace))] == [True] * 5 + [False] * 3 + [
        True
    ]


@pytest.mark.parametrize("steps", [[], [Step(0, 4.0, True, False)], [Step(0, 4.0, False, True, amax=8.0)]])
def test_a_run_without_peaks_is_refused_with_the_line_to_write(steps: list[Step]) -> None:
    trace, policy = Trace(steps), Static()
    with pytest.raises(TraceError) as refused:
        Recorded(trace)
    advice = str(refused.value).partition("Write ")[2].partition(", where")[0]
    assert len(eval(advice, {"simulate": simulate, "policy": policy, "trace": trace})) == len(steps)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (Stationary, {"steps": 0}),
        (Stationary, {"seed": -1}),
        (Stationary, {"ranks": 1.5}),
        (Stationary, {"level": math.nan}),
        (Stationary, {"jitter": 0.0}),
        (Stationary, {"dtype": "float8"}),
        (Stationary, {"depth": -1.0}),
        (HeavyTailed, {"spread": "wide"}),
        (Drifting, {"drift": math.inf}),
        (Spiky, {"height": 1e9}),
        (Spiky, {"chance": 1.0}),
        (HeavyTailed, {"tail": 0.0}),
    ],
)
def test_a_setting_that_cannot_work_is_named(kind: Any, setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(PolicyError, match=rf"{name}={value!r} .*Write "):
        kind(**setting)
