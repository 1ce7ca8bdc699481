"""Steps that a guard skipped: the doctor and the report tell them from overflows."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from preamp import Dynamic, Reading, Static, Trace, guards, processes, simulate
from preamp.cli.app import run
from preamp.doctor import Diagnosis, Finding, diagnose

LEVEL = [1.0 + 2.0 * math.exp(-step / 100.0) + 0.01 * (step % 7) for step in range(400)]


def recorded(losses: list[float], policy: Dynamic | None = None) -> Trace:
    readings = [Reading(True, amax=100.0, loss=loss, grad_norm=1.0) for loss in losses]
    return simulate(policy or Dynamic(init_scale=64.0), readings, guard=guards.SpikeGuard())


def kinds(found: Diagnosis) -> list[str]:
    return [finding.kind for finding in found.findings]


def of_spikes(found: Diagnosis) -> list[str]:
    return [kind for kind in kinds(found) if "spike" in kind]


def with_spikes(*places: int) -> list[float]:
    return [30.0 if step in places else loss for step, loss in enumerate(LEVEL)]


def test_a_single_spike_is_a_note_and_the_rest_is_what_it_was() -> None:
    found, plain = diagnose(recorded(with_spikes(200))), diagnose(recorded(LEVEL))
    assert kinds(found) == [*kinds(plain), "spikes"]
    (finding,) = [finding for finding in found.findings if finding.kind == "spikes"]
    assert finding.severity == "note"
    assert finding.numbers == {"spikes": 1, "share": 1 / 400, "longest_run": 1}
    assert (
        finding.sentence
        == "The guard skipped 1 of 400 steps (0.25 %) because of the loss (1); longest run: 1; steps 200."
    )


def test_many_spikes_are_a_warning_and_no_overflows() -> None:
    found = diagnose(recorded(with_spikes(*range(50, 400, 20))))
    assert of_spikes(found) == ["many spikes"]
    assert not {"too high", "slow to back off", "dragged down", "oscillating", "loss spike"} & {*kinds(found)}
    (finding,) = [finding for finding in found.findings if finding.kind == "many spikes"]
    assert finding.severity == "warning"
    assert "raise the limit of guards.SpikeGuard(): the largest loss is 30" in finding.advice
    assert not finding.settings


def test_a_guard_that_skips_everything_else_is_not_called_a_scale_that_is_too_high() -> None:
    losses = [loss if step < 40 or step % 2 else 30.0 for step, loss in enumerate(LEVEL)]
    found = diagnose(recorded(losses))
    assert "skipping almost every step" not in kinds(found)
    assert "too high" not in kinds(found)
    assert of_spikes(found) == ["many spikes"]


@pytest.mark.parametrize(("until", "severity"), [(212, "warning"), (None, "problem")])
def test_a_long_run_says_where_it_began(until: int | None, severity: str) -> None:
    losses = [*LEVEL[:200], *[30.0] * 12, *(LEVEL[212:] if until else [])]
    (finding,) = [one for one in diagnose(recorded(losses)).findings if one.kind == "a long run of spikes"]
    assert finding.severity == severity
    assert "longest run: 12;" in finding.sentence
    assert "began at step 200" in finding.sentence
    assert "lower `patience`" in finding.advice


def test_both_causes_are_counted() -> None:
    readings = [Reading(True, loss=loss, grad_norm=1.0) for loss in LEVEL]
    readings[100] = Reading(True, loss=2.0, grad_norm=50.0)
    readings[300] = Reading(True, loss=50.0, grad_norm=1.0)
    (finding,) = [
        one
        for one in diagnose(simulate(Static(1.0), readings, guard=guards.SpikeGuard())).findings
        if one.kind == "spikes"
    ]
    assert (
        "because of the loss (1) and the gradient norm (1); longest run: 1; steps 100, 300."
        in finding.sentence
    )


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_advice_names_the_guard_as_far_as_it_is_known_and_the_largest_value(is_recorded: bool) -> None:
    readings = [Reading(True, loss=2.0, grad_norm=120.0 if step % 10 == 9 else 1.0) for step in range(400)]
    trace = simulate(Static(1.0), readings, guard=guards.NormLimit(50.0))
    trace.about = trace.about if is_recorded else {}
    (finding,) = [one for one in diagnose(trace).findings if one.kind == "many spikes"]
    guard = "guards.NormLimit(threshold=50.0)" if is_recorded else "the guard"
    assert finding.advice.endswith(f"raise the limit of {guard}: the largest gradient norm is 120.")


@pytest.mark.parametrize("policy", [Static(1.0), Dynamic(), Static(2.0**10)], ids=repr)
def test_a_fixed_limit_that_skips_every_step_is_the_only_finding(policy: Dynamic | Static) -> None:
    readings = [Reading(True, loss=2.0, grad_norm=60.0 + step / 100.0) for step in range(100)]
    found = diagnose(simulate(policy, readings, guard=guards.NormLimit(50.0)))
    assert not found.healthy
    (finding,) = found.findings
    assert finding.severity == "problem"
    assert "skipped 100 of 100 steps (100 %) because of the gradient norm" in finding.sentence
    assert "raise the limit of guards.NormLimit(threshold=50.0): the largest" in finding.advice
    assert "patience" not in finding.advice
    assert "checkpoint" not in finding.advice  # there is none before the first step


def test_nine_of_ten_steps_skipped_are_a_problem_without_a_long_run() -> None:
    readings = [Reading(True, loss=2.0, grad_norm=60.0 if step % 9 else 1.0) for step in range(300)]
    found = diagnose(simulate(Static(1.0), readings, guard=guards.NormLimit(50.0)))
    assert [(one.kind, one.severity) for one in found.findings] == [("many spikes", "problem")]


def test_nan_is_not_called_an_ordinary_step() -> None:
    for is_lost in (lambda step: step >= 300, lambda step: step % 40 == 20):
        losses = [math.nan if is_lost(step) else loss for step, loss in enumerate(LEVEL)]
        (finding,) = [one for one in diagnose(recorded(losses)).findings if "spikes" in one.kind]
        assert finding.advice == "Most of these values are inf or NaN: look at the data and the forward pass."
    losses = [loss if step != 200 else math.nan for step, loss in enumerate(LEVEL)]
    readings = [Reading(True, loss=loss, grad_norm=1.0) for loss in losses]
    trace = simulate(Static(1.0), readings, guard=guards.OLMO)
    (finding,) = [one for one in diagnose(trace).findings if "spikes" in one.kind]
    assert "A NaN entered the statistics of the guard" in finding.advice


def test_losses_that_are_nan_are_bad_data_where_a_guard_skipped_them_too() -> None:
    lost = (120, 160, 213, 300)
    losses = [math.nan if step in lost else loss for step, loss in enumerate(LEVEL)]
    trace = recorded(losses)
    (data,) = [one for one in diagnose(trace).findings if "bad inputs" in one.kinds]
    assert data.verdict == "one of"
    assert "in 4 steps (120, 160, 213, 300)" in data.among[0].sentence
    readings = [Reading(step != 213, loss=loss, grad_norm=1.0) for step, loss in enumerate(losses)]
    trace = simulate(Dynamic(init_scale=64.0), readings, guard=guards.SpikeGuard())
    (data,) = [one for one in diagnose(trace).findings if "bad inputs" in one.kinds]
    assert data.numbers["steps"] == 4


def test_a_run_without_loss_scaling_is_neither_called_well_nor_told_that_its_scale_could_be_higher() -> None:
    def found(policy: Static, **about: str) -> Finding:
        trace = Trace(simulate(policy, [False] * 400), policy=repr(policy), **about)
        (only,) = diagnose(trace).findings
        return only

    unscaled = found(Static(1.0))
    assert (unscaled.kind, unscaled.severity) == ("not measured", "note")
    assert "could be higher" not in unscaled.sentence
    assert "round to zero in float16 is unknown" in unscaled.sentence
    assert found(Static(1.0), precision="float32").kind == "healthy"
    scaled = found(Static(2.0**10))
    assert scaled.kind == "healthy"
    assert "could be higher" in scaled.sentence


def test_an_overflow_among_spikes_is_still_one() -> None:
    readings = [Reading(step % 10 != 5, loss=loss, grad_norm=1.0) for step, loss in enumerate(LEVEL)]
    trace = simulate(Static(2.0**10), readings, guard=guards.SpikeGuard())
    plain = simulate(Static(2.0**10), readings)
    assert trace.summary().spikes == 0
    assert kinds(diagnose(trace)) == kinds(diagnose(plain))
    readings[200] = Reading(True, loss=90.0, grad_norm=1.0)
    again = diagnose(simulate(Static(2.0**10), readings, guard=guards.SpikeGuard()))
    assert kinds(again) == [*kinds(diagnose(plain)), "spikes"]


def test_the_report_marks_and_counts_spikes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    losses = processes.SpikeRuns(steps=400, seed=3, chance=0.02)
    spikes = len(losses.planted)
    simulate(Dynamic(), losses, guard=guards.SpikeGuard()).write("guarded.jsonl")
    simulate(Dynamic(), [False, True, False]).write("plain.jsonl")
    assert run(["report", "guarded.jsonl", "--out", "guarded.html"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"guarded.jsonl: a guard skipped {spikes} steps because of a spike." in printed
    page = Path("guarded.html").read_text()
    assert f"a guard skipped {spikes} steps because of a spike" in page
    assert "✕ spike" in page
    readings = [Reading(True, loss=math.nan if step == 90 else loss) for step, loss in enumerate(LEVEL)]
    simulate(Dynamic(), readings, guard=guards.SpikeGuard()).write("nan.jsonl")
    assert run(["report", "nan.jsonl", "--out", "nan.html"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "a guard skipped 1 step because of a loss that was inf or NaN." in printed
    readings[200] = Reading(True, loss=90.0)
    simulate(Dynamic(), readings, guard=guards.SpikeGuard()).write("both.jsonl")
    assert run(["report", "both.jsonl", "--out", "both.html"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 steps because of a spike, 1 of them with a loss that was inf or NaN." in printed
    assert run(["report", "plain.jsonl", "--out", "plain.html"]) == 0
    assert "spike" not in capsys.readouterr().out
    assert "✕ spike" not in Path("plain.html").read_text()
    assert run(["doctor", "guarded.jsonl"]) == 0
    assert re.search(r"guard skipped", " ".join(capsys.readouterr().out.split()))
