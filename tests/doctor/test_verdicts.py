"""Three kinds of answer: the cause, one of at most three, or what to record. The unknown excludes nothing."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import ExponentHistogram, Snapshot, SnapshotRow, Static, Step, Trace
from preamp.doctor import diagnose
from preamp.report import Curve, loss_figure, write_report

from .inside import Cause, of_trouble, rates, signs, weigh
from .test_causes import LINKS, first, left, neck, row, run, seen

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARTS = ("loss", "grad_norm", "culprits", "snapshots")


def test_causes_predict_signs_that_there_are_and_nothing_with_certainty() -> None:
    for listed, known in of_trouble:
        assert len({cause.kind for cause in listed}) == len(listed)
        for cause in listed:
            assert set(cause.predicts) <= set(known), cause.kind
            assert all(0.0 < chance < 1.0 for chance in cause.predicts.values()), cause.kind
        named = {name for cause in listed for name in cause.predicts}
        assert set(known) <= named  # or the sign decides nothing


def a_cause(kind: str, predicts: str, weight: float = 1.0) -> Cause:
    return Cause(kind=kind, weight=weight, says="", remedy="", predicts=rates(predicts))


def test_one_cause_left_is_the_cause_and_the_others_have_what_excludes_them() -> None:
    known = signs(smoke=True, noise=False)
    found = weigh((a_cause("fire", "smoke 98"), a_cause("wind", "smoke 2, noise 90")), known, None)
    assert (found.verdict, [one.cause.kind for one in found.left]) == ("cause", ["fire"])
    assert found.speaks_for(found.left[0]) == ["there is smoke", "there is no noise"]
    assert found.speaks_against(found.weighed[1]) == ["there is smoke", "there is no noise"]


def test_what_is_unknown_excludes_nothing_and_is_what_to_record() -> None:
    listed = (a_cause("fire", "smoke 98"), a_cause("wind", "smoke 2", weight=2.0))
    found = weigh(listed, signs(smoke=None), None)
    assert (found.verdict, [one.cause.kind for one in found.left]) == ("one of", ["wind", "fire"])
    assert found.to_record() == ["lens"]
    several = tuple(a_cause(str(n), "smoke 50") for n in range(5))
    assert weigh(several, signs(smoke=True), None).verdict == "unknown"


def without(trace: Trace, parts: set[str]) -> Trace:
    """Return a trace as if some parts had not been recorded."""
    less: dict[str, Any] = {"loss": None, "grad_norm": None, "culprits": ()}
    dropped = {name: value for name, value in less.items() if name in parts}
    shorter = Trace((step._replace(**dropped) for step in trace), **trace.about)
    for snapshot in () if "snapshots" in parts else trace.snapshots:
        shorter.add_snapshot(snapshot)
    return shorter


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([*LINKS]), st.sets(st.sampled_from(PARTS)))
def test_the_cause_is_left_whatever_was_not_recorded(link: str, missing: set[str]) -> None:
    trace = run(41, 100, losses=[0.5], norms=[0.9], lost=math.nan)
    for index in (0, 40, 42, 80):
        trace.add_snapshot(seen(index, trace[index].scale, link if index > 40 else ""))
    finding = first(without(trace, missing))
    alike = (
        {"bad targets", "poisoned average"} if link == "loss" else set[str]()
    )  # all at once, for all batches
    assert finding.verdict == "unknown" or {LINKS[link], *alike} & {*left(finding)}
    if {"snapshots"} & missing:
        assert finding.verdict != "cause"
        assert "Lens(model" in finding.advice


def test_a_finding_says_the_same_in_lines_and_in_json(here: Any, tmp_path: Path) -> None:
    traces = {"one": neck(15, 100), "several": run(41, 100, losses=[0.5], lost=0.5), "healthy": Trace()}
    for name, trace in traces.items():
        trace.write(tmp_path / f"{name}.jsonl")
    done = here("doctor", *(f"{name}.jsonl" for name in traces), "--json", "found.json", "--explain")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads((tmp_path / "found.json").read_text())
    printed = " ".join(done.stdout.split())
    for name, trace in traces.items():
        found = diagnose(trace)
        assert told[f"{name}.jsonl"] == json.loads(json.dumps(found.to_json()))
        assert told[f"{name}.jsonl"]["version"] == 1
        for finding in found.findings:
            for line in (*finding.lines(), *finding.explained()):
                assert " ".join(line.split()) in printed
    assert told["one.jsonl"]["findings"][0]["weighed"][0]["speaks_for"]


def test_a_report_begins_with_the_findings_and_marks_their_steps(tmp_path: Path) -> None:
    trace = run(41, 100, losses=[0.5], lost=0.5)
    curves = [Curve("ill <run>", trace), Curve("well", Trace(steady_steps(200)))]
    write_report(tmp_path / "r.html", title="Runs", lead=["Lead."], curves=curves, table=())
    page = (tmp_path / "r.html").read_text()
    said = page[: page.index("<svg")]
    assert "What the doctor found" in said
    assert "ill &lt;run&gt;" in said
    assert "well" not in said
    assert first(trace).lines()[1].partition(":")[0] in said
    write_report(tmp_path / "w.html", title="Runs", lead=["Lead."], curves=curves[1:], table=())
    assert "What the doctor found" not in (tmp_path / "w.html").read_text()
    marked = [loss_figure([Curve("ill", trace, steps=steps)]).count("<use") for steps in ((), (41, 50))]
    assert marked[1] == marked[0] + 2


def steady_steps(count: int, **fields: Any) -> Iterator[Step]:
    return (Step(n, 2.0**16, True, False, 2.0**16, 1.0 / (1 + n))._replace(**fields) for n in range(count))


def test_a_loss_that_does_not_fall_is_a_note_that_says_what_to_record() -> None:
    trace = Trace(step._replace(loss=2.3 + 0.01 * (step.index * 7919 % 101)) for step in steady_steps(200))
    found = diagnose(trace)
    assert found.healthy
    (note,) = [one for one in found.findings if one.kind == "no progress"]
    assert (note.severity, note.verdict) == ("note", "unknown")
    assert "Lens(model" in note.advice
    assert "no progress" not in [one.kind for one in diagnose(Trace(steady_steps(200))).findings]


def weighted(name: str, index: int, *, moves: bool) -> SnapshotRow:
    return row(name, "weight", 1)._replace(largest=1.0 + index * moves)


@pytest.mark.parametrize(
    ("moving", "kind"), [((True, False), "other parameters"), ((False, False), "learning rate zero")]
)
def test_weights_that_never_change_are_seen_in_the_snapshots(moving: tuple[bool, bool], kind: str) -> None:
    trace = Trace(steady_steps(200))
    for index in (20, 80, 140):
        names = ("body", "head")
        weights = tuple(weighted(name, index, moves=m) for name, m in zip(names, moving, strict=True))
        rows = tuple(row(name, what, 1) for name in names for what in ("activation", "gradient"))
        trace.add_snapshot(Snapshot(index, 2.0**16, "float16", rows, (), weights))
    finding = first(trace)
    assert kind in left(finding)
    if kind == "other parameters":
        assert "head never changed" in " ".join(finding.lines())


def test_the_gradient_of_a_loss_that_the_model_returns_limits_nothing() -> None:
    own = SnapshotRow("", "flow", "float16", ExponentHistogram(15, (1,)))
    seen_then = Snapshot(0, 2.0**15, "float16", (own, row("head", "flow", 3), row("head", "gradient", 3)))
    assert seen_then.limit is not None
    assert seen_then.limit.name == "head"
    assert seen_then.best_scale() == seen_then._replace(rows=seen_then.rows[1:]).best_scale()


def test_a_reward_that_jumps_under_a_constant_scale_is_not_called_divergence() -> None:
    steps = [
        Step(n, 2.0**14, n < 120, n >= 120, 2.0**14, (0.5 + 0.1 * (n % 7)) * (1.0 if n < 120 else 900.0), 1.0)
        for n in range(260)
    ]
    steps = [step._replace(grad_norm=None) if step.skipped else step for step in steps]
    finding = first(Trace(steps, policy=repr(Static(2.0**14))))
    assert finding.kinds[0] == "gradient overflow"


@pytest.fixture(scope="module")
def matrix() -> Iterator[Any]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("doctor_matrix")
    for name in set(sys.modules) - before:
        if name.startswith("doctor_"):
            del sys.modules[name]


QUICK = (
    *("never_cleared", "only_encoder_cleared", "clip_before_unscale", "running_normalizer", "mean_teacher"),
    *("reward_jump", "log_of_probability", "layers_in_a_list", "harder_lessons", "annealed_vae"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_no_way_of_recording_makes_an_answer_wrong(matrix: Any, name: str) -> None:
    cause, make = importlib.import_module("doctor_runs.torch_runs").RUNS[name]
    for way in matrix.WAYS["torch"]:
        assert matrix.outcome(cause, diagnose(make(5, way))) != "wrong", way


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", ["torch", "jax", "keras"])
def test_hardly_any_answer_is_wrong_and_no_healthy_run_is_accused(matrix: Any, framework: str) -> None:
    outcomes = [
        (cause, name, way, matrix.outcome(cause, diagnose(trace)))
        for name, cause, way, trace in matrix.recorded(framework, [3])
    ]
    wrong = [one for one in outcomes if one[-1] == "wrong"]
    assert len(wrong) <= 0.02 * len(outcomes), wrong
    assert not any(cause == "healthy" for cause, *_ in wrong), wrong
