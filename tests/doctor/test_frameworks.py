"""Advice is written for the framework of the run."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import preamp.doctor
import preamp.jax
from preamp import ExponentHistogram, Snapshot, SnapshotRow, Static, Step, Trace
from preamp.cli.app import app
from preamp.doctor import Diagnosis, diagnose
from preamp.scaling import STEPS

from .inside import CODE, Code, framework_of
from .test_causes import nan_given, neck, row, run, steady

OTHERS = ("jax", "keras", "tensorflow")
PIECES = [field.name for field in fields(Code)]
OF_TORCH = re.compile(
    r"torch|Lens|\.isfinite\(\)|\.float\(\)|GradScaler|scaler\.|zero_grad|state_dict|\.to\(|parameters\(\)|"
    r"reset_running|cross_entropy_with|no_grad|detach"
)
OF_CASTING = re.compile(r"autocast|casting|max_norm|optax|jnp|opt_state")
ALIKE = {"jax": {"clip", "operator_in_float32", "trace"}, "keras": set[str](), "tensorflow": {"trace"}}
MAPS = {"records": dict.fromkeys(("loss", "norms", "lens", "names"), "<records>")}


def texts() -> Iterator[str]:
    """Yield all strings of the doctor's modules but docstrings, except those of the table."""
    for path in sorted(Path(preamp.doctor.__file__).parent.glob("*.py")):
        if path.stem == "frameworks":
            continue
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def test_only_the_table_has_the_code_of_a_framework() -> None:
    found = list(texts())
    assert len(found) > 500
    for text in found:
        assert not OF_TORCH.search(text), text
        assert not OF_CASTING.search(text), text


@pytest.mark.parametrize("framework", OTHERS)
def test_every_piece_differs_from_pytorchs_where_it_should(framework: str) -> None:
    code, torch = CODE[framework], CODE["torch"]
    assert {name for name in PIECES if getattr(code, name) == getattr(torch, name)} == ALIKE[framework]
    for name in PIECES:
        piece = str(getattr(code, name))
        assert not OF_TORCH.search(piece), piece
        assert framework == "jax" or not OF_CASTING.search(piece), piece


def taken(losses: list[float], norm: Callable[[int], float | None] = lambda n: None) -> Trace:
    return Trace([Step(n, 2.0**16, True, False, 2.0**16, x, norm(n)) for n, x in enumerate(losses)])


def skipped(*places: int, loss: float | None, **fields: Any) -> Trace:
    """Return a run in which some steps were skipped, with a loss that falls in the others."""
    steps = [Step(n, 8.0, n not in places, n in places, 8.0, 1.0 / (1 + n)) for n in range(120)]
    return Trace([step._replace(loss=loss, **fields) if step.skipped else step for step in steps])


def with_snapshots(trace: Trace, *places: int, rows: Any = (), **given: Any) -> Trace:
    for place in places:
        trace.add_snapshot(Snapshot(place, trace[place].scale, "float16", rows, **given))
    return trace


def in_a_micro_batch() -> Trace:
    sound = row("head", "activation", 1), row("head", "flow", 1), row("head", "gradient", 1)
    return with_snapshots(skipped(60, loss=math.inf), 60, rows=sound)


def with_large_inputs() -> Trace:
    trace = run(41, 60, losses=[0.5], norms=[0.9], lost=math.inf)
    for place, amax in ((0, 1), (40, 1), (42, 14)):
        lost = row("stem", "activation", 15, nonfinite=9 * (place > 40))
        with_snapshots(trace, place, rows=(lost,), inputs=(row("stem", "input", amax),))
    return trace


def of_another_pass() -> Trace:
    trace = run(41, 60, losses=[0.5], lost=0.5)
    trace = Trace([step._replace(scale=2.0**16) for step in trace], **trace.about)
    return with_snapshots(
        trace, 20, 60, 80, rows=(row("dense", "activation", 1), row("dense.b", "gradient", -3))
    )


def of_other_parameters() -> Trace:
    rows = row("dense", "activation", 1), row("dense.b", "gradient", 1)
    return with_snapshots(taken([1.0 / (1 + n) for n in range(120)], lambda n: 0.0), 60, 100, rows=rows)


def in_the_whole_model() -> Trace:
    return with_snapshots(run(0, 60, lost=math.inf), 1, rows=(row("", "activation", 15, nonfinite=9),))


def after_nan() -> Trace:
    gone = row("stem", "weight", 1, nonfinite=9)
    return with_snapshots(
        taken([0.5] * 30 + [math.nan] * 30), 40, rows=(row("stem", "activation", 1),), weights=(gone,)
    )


def beside_the_model() -> Trace:
    trace = run(41, 100, losses=[0.5] * 5, norms=[0.9] * 5, lost=math.nan)
    for place in (40, 42, 80):
        given = {"inputs": (row("stem", "input", 1),), "weights": (row("stem", "weight", 1),)}
        with_snapshots(trace, place, rows=(row("stem", "activation", 1), row("stem", "flow", 1)), **given)
    return trace


def restarted() -> Trace:
    steps = [Step(n, 8.0, True, False, 8.0) for n in range(100)]
    scales = [2.0 ** max(3, 16 - n) for n in range(100)]
    more = [Step(100 + n, x, x == 8.0, x > 8.0, max(x / 2, 8.0)) for n, x in enumerate(scales)]
    return Trace([*steps, *more])


PLANTED: dict[str, Callable[[], Trace]] = {
    "a layer overflows": lambda: neck(amax=15, nonfinite=100),
    "the whole model overflows": in_the_whole_model,
    "something overflows": lambda: run(8, 60, losses=[0.6], lost=math.inf),
    "inputs hold NaN": lambda: nan_given(inputs=32, weights=0),
    "inputs are large": with_large_inputs,
    "a micro-batch holds inf": in_a_micro_batch,
    "an update wrote NaN": lambda: run(70, 80, losses=[0.5], lost=math.nan),
    "the loss is NaN from the start": lambda: run(0, 60, lost=math.nan),
    "steps with NaN are not skipped": lambda: taken([0.5] * 30 + [math.nan] * 30),
    "a derivative is NaN": lambda: run(0, 100, lost=0.5),
    "gradients are left over": lambda: run(41, 100, losses=[0.5], lost=0.5),
    "gradients are of another pass": of_another_pass,
    "nothing is known": lambda: Trace([Step(n, 2.0**-14, False, True, 2.0**-14) for n in range(99)]),
    "the loss function overflows": lambda: with_snapshots(
        run(0, 60, lost=math.inf), 1, rows=(row("head", "activation", 2), row("head", "flow", 3, nonfinite=9))
    ),
    "a logarithm of zero": lambda: skipped(
        63, 71, 80, *[n for n in range(90, 120) if n % 5 < 3], loss=math.inf
    ),
    "the run diverged": lambda: run(40, 100, norms=[0.85, 1.8, 122.0, 455_698.0]),
    "clipped while scaled": lambda: taken([1.0 / (1 + n) for n in range(99)], lambda n: 2.0**-16),
    "resumed without the scale": restarted,
    "buffers hold inf": lambda: skipped(60, loss=1.0, buffers=("norm.running_mean",)),
    "losses repeat": lambda: taken([0.5 + 0.01 * (n % 12) for n in range(240)]),
    "the optimizer has other parameters": of_other_parameters,
    "the loss depends on nothing": lambda: taken([1.2 * (1 + n % 7) for n in range(120)], lambda n: 0.0),
    "the loss is tiny": lambda: Trace(
        taken([1e-12 * (101 + n * 7919 % 101) for n in range(120)]), policy=repr(Static(2.0**16))
    ),
    "an update wrote NaN into weights": lambda: nan_given(inputs=0, weights=32),
    "a step with NaN was taken": after_nan,
    "an average took in NaN": beside_the_model,
    "snapshots of other steps": lambda: with_snapshots(skipped(60, 70, 80, 83, loss=math.nan), 20),
    "a layer limits the scale": lambda: with_snapshots(
        steady(), 100, 190, rows=(row("last", "flow", 14), row("first", "flow", -10))
    ),
}


@cache
def planted(framework: str | None) -> dict[str, Diagnosis]:
    """Diagnose the planted runs as if they were of a framework."""
    found = {}
    for name, make in PLANTED.items():
        trace = make()
        trace.framework = framework
        found[name] = diagnose(trace)
    return found


def said(found: Diagnosis) -> str:
    words = [" ".join(finding.lines()) for finding in found.findings]
    return " ".join([*words, found.remedy(), found.search()])


def test_every_piece_is_in_some_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: dict[str, Any] = {name: f"<{name}>" for name in PIECES}
    monkeypatch.setitem(CODE, "jax", Code(**marks | MAPS))
    planted.cache_clear()
    everything = " ".join(map(said, planted("jax").values()))
    planted.cache_clear()
    assert [name for name, mark in marks.items() if mark not in everything] == []


@pytest.mark.parametrize("framework", OTHERS)
def test_no_finding_has_the_code_of_pytorch(framework: str) -> None:
    theirs, ours = planted(framework), planted("torch")
    for found in theirs.values():
        assert not OF_TORCH.search(said(found)), said(found)
        assert framework == "jax" or not OF_CASTING.search(said(found)), said(found)
        assert all(f.advice.endswith((".", "")) and "  " not in f.advice for f in found.findings)
    changed = sum(said(found) != said(ours[name]) for name, found in theirs.items())
    assert changed > 20


SLIPS = re.compile(r",,|, ,|;,|  | [,.;:](?!\d|\.\.|py)|(?<!\.)\.\.(?!\.)| \(\s*\)|\s$")


@st.composite
def runs(draw: st.DrawFn) -> Trace:
    """A run that fails, or loses single steps, with any snapshots of it."""
    lost = draw(st.sampled_from([0.5, math.nan, math.inf, -math.inf, None]))
    places = draw(st.lists(st.integers(60, 119), max_size=8, unique=True))
    trace = skipped(*places, loss=lost) if draw(st.booleans()) else run(41, 100, losses=[0.5] * 5, lost=lost)
    nonfinite, amax = st.integers(0, 64), st.integers(-30, 15)
    for index in sorted(draw(st.sets(st.sampled_from([0, 40, 42, 60, 80, *places]), min_size=1))):
        parts: dict[str, list[SnapshotRow]] = {"": [], "input": [], "weight": []}
        for name, what in draw(st.lists(st.tuples(NAMES, WHAT), unique=True, max_size=7)):
            bad = draw(nonfinite)
            values = ExponentHistogram(draw(amax) - 7, draw(st.sampled_from([(), (4,) * 8])), nonfinite=bad)
            nans = draw(st.sampled_from([0, bad, None]))
            parts.get(what, parts[""]).append(SnapshotRow(name, what, "float16", values, nans=nans))
        trace.add_snapshot(Snapshot(index, trace[index].scale, "float16", *map(tuple, parts.values())))
    return trace


def all_nan() -> Trace:
    trace = skipped(60, loss=math.nan)
    gone = SnapshotRow("head", "activation", "float16", ExponentHistogram(nonfinite=32), nans=32)
    for index, last in ((0, row("head", "activation", 2)), (60, gone)):
        rows = (row("body", "activation", 1), last)
        trace.add_snapshot(Snapshot(index, trace[index].scale, "float16", rows))
    return trace


NAMES = st.sampled_from(["", "stem", "body.0", "head"])
WHAT = st.sampled_from(["activation", "flow", "gradient", "input", "weight"])


@settings(deadline=None, max_examples=30)
@example(all_nan(), "torch")
@given(runs(), st.sampled_from(["torch", *OTHERS, None]))
def test_no_text_has_a_slip_of_the_pen(trace: Trace, framework: str | None) -> None:
    trace.framework = framework
    for finding in diagnose(trace).findings:
        for text in (finding.sentence, finding.advice):
            assert not SLIPS.search(text), text


def everything_skipped(made_by: Any, **about: Any) -> Diagnosis:
    steps = [STEPS[made_by](n, 2.0**-14, False, True, 2.0**-14, loss=math.inf) for n in range(200)]
    return diagnose(Trace(steps, policy=repr(Static(2.0**-14)), **about))


@pytest.mark.parametrize("framework", ["torch", *OTHERS])
def test_the_command_that_the_doctor_prints_runs_functions_of_the_framework(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    everything_skipped(framework).record.trace.write(path)
    assert app(["doctor", str(path)], result_action="return_value") == 0
    found = re.search(r"preamp (blame .*?) says which operation", " ".join(capsys.readouterr().out.split()))
    assert (found is not None) == (framework in ("torch", "jax"))
    if found is not None:
        command, bound, _ = app.parse_args(found[1].split(), exit_on_error=False, print_error=False)
        assert command.__name__ == "blame"
        assert bound.arguments.get("framework", "torch") == framework


def test_the_framework_is_that_of_the_steps_or_as_given() -> None:
    for framework in ("torch", *OTHERS):
        assert framework_of(everything_skipped(framework).record.trace) == framework
        assert framework_of(everything_skipped(None, framework=framework).record.trace) == framework
    for told in ("theano", 3, ["jax"], None):
        assert framework_of(everything_skipped(None, framework=told).record.trace) is None


def test_only_a_run_of_jax_is_told_to_blame_in_jax() -> None:
    assert "--dtype float16 --framework jax says" in everything_skipped("jax").search()
    assert "--dtype float16 says" in everything_skipped("torch").search()
    assert "--dtype float16 says" in everything_skipped(None).search()
    assert everything_skipped("keras").search() == everything_skipped("tensorflow").search() == ""
