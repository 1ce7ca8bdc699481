"""Steps that a guard skipped: the doctor and the report tell them from overflows."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from preamp import Dynamic, Reading, Static, Trace, guards, processes, simulate
from preamp.cli.app import run
from preamp.doctor import Diagnosis, diagnose

LEVEL = [1.0 + 2.0 * math.exp(-step / 100.0) + 0.01 * (step % 7) for step in range(400)]


def recorded(losses: list[float], policy: Dynamic | None = None) -> Trace:
    readings = [Reading(True, peak=100.0, loss=loss, grad_norm=1.0) for loss in losses]
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
    assert "1 for the loss" in finding.sentence


def test_many_spikes_are_a_warning_and_no_overflows() -> None:
    found = diagnose(recorded(with_spikes(*range(50, 400, 20))))
    assert of_spikes(found) == ["many spikes"]
    assert not {"too high", "slow to back off", "dragged down", "oscillating", "loss spike"} & {*kinds(found)}
    (finding,) = [finding for finding in found.findings if finding.kind == "many spikes"]
    assert finding.severity == "warning"
    assert "SpikeGuard(sigmas=8.0)" in finding.advice
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
    assert "at most 12 in a row" in finding.sentence
    assert "began at step 200" in finding.sentence
    assert "patience" in finding.advice


def test_both_causes_are_counted() -> None:
    readings = [Reading(True, loss=loss, grad_norm=1.0) for loss in LEVEL]
    readings[100] = Reading(True, loss=2.0, grad_norm=50.0)
    readings[300] = Reading(True, loss=50.0, grad_norm=1.0)
    (finding,) = [
        one
        for one in diagnose(simulate(Static(1.0), readings, guard=guards.SpikeGuard())).findings
        if one.kind == "spikes"
    ]
    assert "1 for the loss and 1 for the gradient norm" in finding.sentence


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
    assert run(["report", "plain.jsonl", "--out", "plain.html"]) == 0
    assert "spike" not in capsys.readouterr().out
    assert "✕ spike" not in Path("plain.html").read_text()
    assert run(["doctor", "guarded.jsonl"]) == 0
    assert re.search(r"guard skipped", " ".join(capsys.readouterr().out.split()))
