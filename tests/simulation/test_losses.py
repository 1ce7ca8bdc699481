"""Synthetic losses: what is planted, and what guards make of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from preamp import Dynamic, PolicyError, Static, guards, processes, simulate
from preamp.simulation.processes import Losses, SpikeOutcome

KINDS: list[type[Losses]] = [
    processes.RestingLoss,
    processes.FallingLoss,
    processes.SpikeRuns,
    processes.NaNLoss,
]
each_kind = pytest.mark.parametrize("kind", KINDS)
ALWAYS = guards.NormLimit(1e-30)  # skips everything


@each_kind
def test_a_process_is_the_same_whenever_it_is_iterated_over(kind: type[Losses]) -> None:
    process = kind(steps=300, seed=4)
    assert repr([*process]) == repr([*process]) == repr([*kind(steps=300, seed=4)])
    assert repr([*process]) != repr([*kind(steps=300, seed=5)])
    assert len([*process]) == 300
    assert process.planted == kind(steps=300, seed=4).planted


@each_kind
def test_planted_spikes_are_as_high_as_is_said(kind: type[Losses]) -> None:
    process = kind(steps=2500, seed=1)
    without = kind(steps=2500, seed=1, chance=0.0)
    assert without.planted == frozenset()
    readings = [*process]
    assert len(process.planted) >= 5
    for step in process.planted:
        usual = process.level(step)
        assert readings[step].loss > 1.15 * usual
        assert readings[step].grad_norm > 2.0 * process.norm_level(step)
        assert readings[step].finite


@pytest.mark.parametrize("kind", [processes.RestingLoss, processes.NaNLoss])
def test_an_outcome_counts(kind: type[Losses]) -> None:
    process = kind(steps=2000, seed=2)
    overflows = sum(not reading.finite for reading in process)
    spikes = len(process.planted)
    nothing = process.outcome(simulate(Static(1.0), process, guard=guards.MEGATRON_NORM))
    run = 1 if overflows else 0
    assert nothing == SpikeOutcome(2000, overflows, spikes, spikes, 0, run)
    everything = process.outcome(simulate(Static(1.0), process, guard=ALWAYS))
    assert everything == SpikeOutcome(2000, 2000, spikes, 0, 2000 - overflows - spikes, 2000)
    assert process.outcome(simulate(Static(1.0), process)).missed == spikes
    assert process.outcome(simulate(Static(1.0), [*process][:100], guard=ALWAYS)).steps == 100


def test_the_trace_says_which_process_and_guard() -> None:
    process = processes.RestingLoss(steps=50)
    about = simulate(Dynamic(), process, guard=guards.SpikeGuard()).about
    assert about["process"] == repr(process)
    assert about["guard"] == "guards.SpikeGuard()"


def test_runs_have_their_length() -> None:
    process = processes.SpikeRuns(steps=5000, length=6, chance=0.0005)
    starts = [step for step in process.planted if step - 1 not in process.planted]
    assert starts
    assert any({*range(step, step + 6)} <= process.planted for step in starts)
    assert {step + 6 for step in starts}.isdisjoint(process.planted)


def test_nan_comes_with_an_overflow() -> None:
    process = processes.NaNLoss(steps=3000, rate=0.01)
    broken = [reading for reading in process if math.isnan(reading.loss)]
    assert 10 < len(broken) < 60
    assert not any(reading.finite for reading in broken)


@each_kind
def test_spike_guard_misses_no_spike(kind: type[Losses]) -> None:
    process = kind(seed=7)
    assert process.outcome(simulate(Static(1.0), process, guard=guards.SpikeGuard())).missed == 0


@pytest.mark.parametrize(
    "kind", [processes.RestingLoss, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_spike_guard_misses_less_than_the_rolling_rules(kind: type[Losses]) -> None:
    process = kind(seed=8)

    def outcome(guard: Any) -> SpikeOutcome:
        return process.outcome(simulate(Static(1.0), process, guard=guard))

    ours = outcome(guards.SpikeGuard())
    for guard in (guards.OLMO, guards.LEVANTER, guards.MAXTEXT):
        theirs = outcome(guard)
        assert ours.missed <= theirs.missed
        assert ours.false_alarms <= theirs.false_alarms


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 0}, "steps=0"),
        ({"seed": -1}, "seed=-1"),
        ({"chance": 1.5}, "chance=1.5"),
        ({"noise": -0.1}, "noise=-0.1"),
        ({"loss": 0.0}, "loss=0.0"),
        ({"jitter": math.nan}, "jitter=nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        processes.RestingLoss(**settings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: processes.FallingLoss(time=0.0), "time=0.0"),
        (lambda: processes.FallingLoss(fall=0.0), "fall=0.0"),
        (lambda: processes.SpikeRuns(length=0), "length=0"),
        (lambda: processes.NaNLoss(rate=-1.0), "rate=-1.0"),
    ],
)
def test_settings_of_one_process_are_refused(make: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        make()
