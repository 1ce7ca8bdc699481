"""The doctor names the cause of runs whose cause is known, made by hand or trained by the bench."""

from __future__ import annotations

import importlib
import math
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from preamp import Compat, Dynamic, Headroom, Snapshot, SnapshotRow, Static, Step, Trace, dialects, simulate
from preamp.doctor import Finding, diagnose
from preamp.record.exponents import ExponentHistogram
from preamp.simulation.processes import Drifting, Stationary
from preamp.torch import GradScaler, Lens

from .inside import consistent, power

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("doctor")
    del sys.modules["doctor"]


def run(
    taken: int,
    failed: int,
    *,
    losses: Sequence[float | None] = (),
    norms: Sequence[float | None] = (),
    lost: float | None = None,
    policy: Any = None,
    low: float = 2.0**-14,
) -> Trace:
    """Return a run that takes some steps and then skips all; losses and norms come before the failure."""
    scale, steps = 2.0**16, []
    losses = [*[0.6 + 0.1 * (n % 3) for n in range(taken - len(losses))], *losses] if losses else []
    norms = [*[0.8 + 0.1 * (n % 4) for n in range(taken - len(norms))], *norms] if norms else []
    for n in range(taken):
        loss, norm = losses[n] if losses else None, norms[n] if norms else None
        step = Step(n, scale, finite=True, skipped=False, new_scale=scale)
        steps.append(step._replace(loss=loss, grad_norm=norm))
    for n in range(taken, taken + failed):
        after = max(scale / 2, low)
        step = Step(n, scale, finite=False, skipped=True, new_scale=after, loss=lost)
        steps.append(step._replace(culprits=("head.bias",), first_culprits=("head.bias",)))
        scale = after
    return Trace(steps, policy=repr(policy or Dynamic()))


def row(name: str, what: Any, amax: int, *, nonfinite: int = 0, dtype: str = "float16") -> SnapshotRow:
    return SnapshotRow(name, what, dtype, ExponentHistogram(amax - 7, (4,) * 8, nonfinite=nonfinite))


def first(trace: Trace) -> Any:
    return diagnose(trace).findings[0]


def left(finding: Finding) -> list[str]:
    """Return the causes that the record leaves."""
    return [one.kind for one in finding.weighed if one.left]


def test_a_norm_that_rose_before_the_failure_is_the_learning_rate() -> None:
    finding = first(run(40, 100, norms=[0.85, 1.8, 122.0, 455_698.0]))
    assert (finding.weighed[0].kind, finding.severity) == ("learning rate", "problem")
    assert "learning rate" in first(run(40, 100, norms=[0.85, 1.8, 122.0, 455_698.0], lost=math.nan)).kinds


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 80), st.floats(2.0, 50.0), st.integers(3, 8), st.sampled_from([math.nan, math.inf]))
def test_any_loss_that_rises_into_the_failure_is_the_learning_rate(
    before: int, factor: float, rises: int, lost: float
) -> None:
    losses = [0.7 * factor**power for power in range(1, rises + 1)]
    if losses[-1] >= 10.0:
        assert first(run(before + rises, 60, losses=losses, lost=lost)).kinds[0] == "learning rate"


@settings(deadline=None, max_examples=15)
@given(st.integers(8, 80), st.floats(0.3, 1.5))
def test_without_snapshots_a_loss_that_did_not_rise_leaves_several_causes(before: int, last: float) -> None:
    finding = first(run(before, 60, losses=[last], norms=[last], lost=math.inf))
    assert finding.verdict != "cause"
    assert "learning rate" not in finding.kinds
    assert "Lens(model" in finding.advice


def neck(amax: int, nonfinite: int) -> Trace:
    """Return a run whose module "neck" puts out inf from step 41 on."""
    trace = run(41, 100, losses=[0.5] * 5, norms=[0.9] * 5, lost=math.nan)
    for index in (0, 40):
        trace.add_snapshot(
            Snapshot(index, 2.0**16, "float16", (row("body", "activation", 1), row("neck", "activation", 2)))
        )
    broken = (
        row("body", "activation", 1),
        row("neck", "activation", amax, nonfinite=nonfinite),
        SnapshotRow("head", "activation", "float16", ExponentHistogram(nonfinite=32)),
        SnapshotRow("head", "gradient", "float32", ExponentHistogram(nonfinite=17)),
    )
    for index, scale in ((42, 2.0**15), (80, 2.0**-14)):
        trace.add_snapshot(Snapshot(index, scale, "float16", broken))
    return trace


def test_an_overflow_in_forward_names_the_module_and_the_edit_and_nothing_else() -> None:
    trace = neck(amax=15, nonfinite=100)
    assert trace.snapshots[-1].first_overflow.name == "neck"  # type: ignore[union-attr]
    (finding,) = diagnose(trace).findings
    assert (finding.kinds[0], finding.severity, dict(finding.settings)) == ("forward overflow", "problem", {})
    said = " ".join(finding.lines())
    assert "in the forward pass, from step 41 on" in said
    assert "The output of module neck" in said
    assert "No loss scale helps" in said
    assert "autocast(device, enabled=False): y = model.neck(x.float())" in said
    assert "head" not in said
    assert "make them smaller" in said


def test_nan_in_a_module_whose_weights_were_not_recorded_may_be_in_the_weights() -> None:
    assert "optimizer" in left(first(neck(amax=3, nonfinite=16)))


@pytest.mark.parametrize("low", [2.0**-14, 1.0])
def test_a_finite_loss_with_gradients_that_fail_at_every_scale_is_nan_in_backward(low: float) -> None:
    trace = run(0, 100, lost=0.5, low=low)
    for index in (0, 40):
        flows = row("head", "flow", 2, nonfinite=1), row("body", "flow", 2, nonfinite=9)
        told = tuple(flow._replace(nans=flow.histogram.nonfinite) for flow in flows)
        trace.add_snapshot(
            Snapshot(index, trace[index].scale, "float16", (row("head", "activation", 1), *told))
        )
    (finding,) = diagnose(trace).findings
    assert finding.kind == "NaN in backward"
    assert "The gradient of the output of module head is the first" in finding.sentence
    assert "sqrt" in finding.advice


def test_gradients_that_are_only_too_large_are_left_to_the_scale() -> None:
    trace = run(0, 100, lost=0.5, low=1.0)
    trace.add_snapshot(Snapshot(40, 1.0, "float16", (row("head", "flow", 15, nonfinite=9),)))
    finding = first(trace)
    assert (finding.kind, dict(finding.settings)) == ("scale too high", {"min_scale": 2.0**-14})


def test_a_loss_lost_between_finite_outputs_and_the_end_is_the_loss_function() -> None:
    trace = run(0, 60, lost=math.inf)
    trace.add_snapshot(
        Snapshot(1, 2.0**15, "float16", (row("head", "activation", 2), row("head", "flow", 3, nonfinite=9)))
    )
    assert {"loss function", "bad targets"} <= {*first(trace).kinds}


@settings(deadline=None, max_examples=15)
@given(st.sets(st.integers(10, 490), min_size=1, max_size=5), st.sampled_from([math.nan, math.inf]))
def test_single_steps_that_lose_the_loss_are_listed_and_nothing_is_concluded(
    places: set[int], lost: float
) -> None:
    readings = [place in places for place in range(500)]
    steps = (
        step._replace(loss=lost if step.skipped else 1.0 / (1 + step.index))
        for step in simulate(Dynamic(), readings)
    )
    finding = first(Trace(steps, policy=repr(Dynamic())))
    assert finding.verdict != "cause"
    assert f"({', '.join(map(str, sorted(places)))})" in finding.lines()[-1] + finding.lines()[0]
    assert finding.steps == tuple(sorted(places))


def nan_given(inputs: int, weights: int) -> Trace:
    """Return a run whose loss is NaN from step 41 on, with so many NaN in the inputs and in the weights."""
    trace = run(41, 100, losses=[0.5] * 5, norms=[0.9] * 5, lost=math.nan)
    for index, lost in ((0, False), (40, False), (42, True), (80, True)):
        gone = SnapshotRow("stem", "activation", "float16", ExponentHistogram(nonfinite=32), nans=32)
        rows = (gone, gone._replace(what="flow")) if lost else (row("stem", "activation", 1),)
        x = row("stem", "input", 1, nonfinite=inputs * lost)._replace(nans=inputs * lost)
        w = row("stem", "weight", 1, nonfinite=weights * lost)._replace(nans=weights * lost)
        trace.add_snapshot(Snapshot(index, trace[index].scale, "float16", rows, (x,), (w,)))
    return trace


def test_inputs_and_weights_tell_bad_data_from_a_broken_update() -> None:
    (data,) = diagnose(nan_given(inputs=32, weights=0)).findings
    assert (data.kinds[0], data.severity) == ("bad inputs", "problem")
    assert set(data.kinds) <= {"bad inputs", "poisoned average"}  # of a normalizer before the model
    assert "from step 41 on" in " ".join(data.lines())
    assert "is the first with NaN in 32 of 64 entries" in " ".join(data.lines())
    assert first(nan_given(inputs=0, weights=32)).kinds == ("optimizer",)
    assert first(nan_given(inputs=32, weights=32)).kinds == ("optimizer",)


@pytest.mark.parametrize("skipped", [True, False])
def test_a_loss_lost_while_its_snapshot_is_finite_is_the_loss_function(skipped: bool) -> None:
    scale, steps = 2.0**16, []
    for n in range(150):
        lost = n < 100 if skipped else n in (100, 107, 108)
        after = max(scale / 2, 2.0**-14) if lost and skipped else scale
        loss = math.inf if lost else 1 / (1 + n)
        steps.append(Step(n, scale, not lost, lost and skipped, after, loss=loss))
        scale = after
    trace = Trace(steps, policy=repr(Dynamic()))
    flow = row("head", "flow", -60 if skipped else 10, dtype="float32")
    for index in (0, 100, 120, 140):
        seen = row("head", "activation", 2), flow
        trace.add_snapshot(Snapshot(index, trace[index].scale, "float16", seen, (row("head", "input", 1),)))
    found = diagnose(trace)
    finding = found.findings[0]
    assert set(finding.kinds) <= {"loss function", "bad targets"}
    assert "logarithm of 0" in " ".join(finding.lines())
    if skipped:
        assert not found.settings


def test_nothing_is_said_of_backward_where_the_loss_itself_was_lost() -> None:
    lost = {24, 49, 74, 99, 124}
    steps = [
        step._replace(loss=math.nan, culprits=("head.weight",), first_culprits=("head.weight",))
        if step.skipped
        else step._replace(loss=0.5)
        for step in simulate(Dynamic(), [n in lost for n in range(150)])
    ]
    trace = Trace(steps, policy=repr(Dynamic()))
    assert "overflows first" not in {finding.kind for finding in diagnose(trace).findings}
    flows = row("head", "activation", 1), row("head", "flow", 2, nonfinite=9)
    trace.add_snapshot(Snapshot(49, trace[49].scale, "float16", flows))
    assert "backward" not in "".join(f.sentence for f in diagnose(trace).findings)
    finite = Trace((step._replace(loss=1 / (1 + step.index)) for step in steps), policy=repr(Dynamic()))
    assert "overflows first" in {finding.kind for finding in diagnose(finite).findings}


def test_a_loss_that_is_nan_without_a_skip_has_lost_the_weights() -> None:
    steps = [Step(n, 1.0, finite=True, skipped=False, loss=0.5 if n < 30 else math.nan) for n in range(60)]
    finding = first(Trace(steps, precision="float32", policy=None))
    assert finding.weighed[0].kind == "not skipped"
    assert "from step 30 on" in " ".join(finding.lines())


def test_a_restart_without_the_scale_is_named() -> None:
    steps = [Step(n, 8.0, finite=True, skipped=False, new_scale=8.0) for n in range(100)]
    scale = 2.0**16
    for n in range(100, 200):
        skipped = scale > 8.0
        after = scale / 2 if skipped else scale
        steps.append(Step(n, scale, finite=not skipped, skipped=skipped, new_scale=after))
        scale = after
    found = diagnose(Trace(steps))
    assert found.findings[0].kind == "lost scale"
    assert "from 2³ to 2¹⁶, and 13 steps were skipped" in found.findings[0].sentence


def test_buffers_that_a_skipped_step_poisoned_are_named() -> None:
    steps = [
        Step(n, 8.0, finite=n != 9, skipped=n == 9, buffers=("norm.running_mean",) * (n == 9))
        for n in range(99)
    ]
    finding = first(Trace(steps))
    assert (finding.kind, finding.severity) == ("poisoned buffers", "problem")
    assert "norm.running_mean" in finding.sentence


def test_buffers_that_were_restored_are_no_problem(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    settings: dict[str, Any] = {"model": model, "restore_buffers": True}
    with Trace(tmp_path / "run.jsonl") as trace:
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = GradScaler("cpu", init_scale=2.0**8, on_step=trace, **settings)
        for number in range(120):
            loss = model(torch.randn(8, 4) * (math.inf if number == 60 else 1.0)).square().mean()
            sgd.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(sgd)
            scaler.update()
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    for read in (trace, Trace.read(tmp_path / "run.jsonl")):
        found = {finding.kind: finding for finding in diagnose(read).findings}
        assert "poisoned buffers" not in found


def test_a_buffer_that_was_not_restored_once_is_poisoned() -> None:
    names = ("norm.running_mean", "norm.running_var")
    steps = [
        Step(n, 8.0, finite=n not in (9, 99), skipped=n in (9, 99), buffers=names * (n in (9, 99)))
        for n in range(200)
    ]
    steps[9] = steps[9]._replace(restored=names)
    steps[99] = steps[99]._replace(restored=names[1:])
    found = {finding.kind: finding for finding in diagnose(Trace(steps)).findings}
    assert "norm.running_mean held" in found["poisoned buffers"].sentence


def test_gradients_clipped_while_scaled_are_recognized_by_their_norm() -> None:
    scales = [2.0 ** (16 + n // 50) for n in range(200)]
    steps = [
        Step(n, s, finite=True, skipped=False, new_scale=s, grad_norm=0.5 / s if n % 9 else math.nan)
        for n, s in enumerate(scales)
    ]
    assert first(Trace(steps)).kind == "clipped while scaled"


@pytest.mark.parametrize(
    ("bound", "losses", "is_clipped"),
    [
        (1.0, True, True),
        (0.37, True, True),
        (0.37, False, False),
        (6.5e-4, True, False),
    ],
)
def test_a_constant_norm_at_a_constant_scale_was_not_always_clipped(
    bound: float, losses: bool, is_clipped: bool
) -> None:
    scale = 2.0**16
    steps = [
        Step(n, scale, True, False, scale, 0.5 + 0.1 * (n % 7) * losses, bound / scale) for n in range(200)
    ]
    found = diagnose(Trace(steps, policy=repr(Static(scale)))).findings
    assert (found[0].kind == "clipped while scaled") == is_clipped


@pytest.mark.parametrize(("rows", "is_fixed"), [(64, True), (4096, False)])
def test_a_tiny_loss_is_not_taken_for_clipping(rows: int, is_fixed: bool) -> None:
    torch.manual_seed(0)
    model, trace = nn.Linear(8, 1), Trace(policy=repr(Static(2.0**16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", policy=Static(2.0**16), on_step=trace)
    batch = torch.randn(rows, 8)
    for _ in range(200):
        optimizer.zero_grad()
        scaler.scale(1e-8 * model(batch if is_fixed else torch.randn(rows, 8)).mean()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    assert "clipped while scaled" not in [finding.kind for finding in diagnose(trace).findings]


def test_clipping_before_unscaling_is_found_at_a_constant_scale() -> None:
    torch.manual_seed(0)
    model, trace = nn.Linear(8, 1), Trace()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    scaler = GradScaler("cpu", on_step=trace)
    batch = torch.randn(64, 8)
    for _ in range(200):
        optimizer.zero_grad()
        scaler.scale((model(batch) - batch[:, :1]).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer, max_norm=1e9)
        scaler.update()
    assert first(trace).kind == "clipped while scaled"


def _diverged_in_keras(*, opening: int, finite: int, epoch: int) -> Trace:
    """Return a run with one update, whose loss is known up to its first inf in each epoch."""
    steps, scale = [], 2.0**24
    for n in range(400):
        taken = n == opening
        loss = 6.0 + n % 3 if n <= opening else 2e8 + n if n <= opening + finite else math.inf
        is_known = math.isfinite(loss) or n == opening + finite + 1 or n % epoch == 0
        new = scale if taken else max(scale / 2, 2.0**-14)
        norm = 4.0 if taken else None
        steps.append(Step(n, scale, taken, not taken, new, loss if is_known else None, norm))
        scale = new
    return Trace(steps, policy=repr(Dynamic(init_scale=2.0**24)))


@pytest.mark.parametrize(
    ("opening", "finite", "epoch"), [(0, 5, 100), (9, 25, 100), (9, 5, 1000), (0, 400, 1000)]
)
def test_a_loss_that_is_unknown_after_inf_is_not_called_finite(opening: int, finite: int, epoch: int) -> None:
    found = diagnose(_diverged_in_keras(opening=opening, finite=finite, epoch=epoch)).findings
    assert "learning rate" in found[0].kinds


def test_steps_without_a_loss_after_inf_do_not_show_a_fault_in_backward() -> None:
    steps = [
        Step(n, 2.0**-14, n == 30, n != 30, 2.0**-14, 0.5 if n < 20 else math.inf if n == 20 else None)
        for n in range(300)
    ]
    for finding in diagnose(Trace(steps)).findings:
        assert "loss is finite" not in finding.sentence


def test_losses_that_repeat_exactly_are_no_learning() -> None:
    losses = [0.5 + 0.01 * (n % 12) for n in range(240)]
    steps = [Step(n, 8.0, finite=True, skipped=False, loss=loss) for n, loss in enumerate(losses)]
    assert "learning rate zero" in first(Trace(steps)).kinds
    learned = [step._replace(loss=step.loss / (1 + step.index)) for step in steps]  # type: ignore[operator]
    assert "learning rate zero" not in [finding.kind for finding in diagnose(Trace(learned)).findings]


@pytest.mark.parametrize(
    "policy", [dialects.TORCH, Dynamic(compat=Compat(factor_dtype="float64"), growth_interval=20)]
)
def test_the_line_to_write_has_no_setting_that_only_copies_a_system(policy: Any) -> None:
    found = diagnose(simulate(policy, Stationary(steps=4000, level=20.0, jitter=0.25)))
    assert found.remedy()
    assert "factor_dtype" not in found.remedy()


def test_flags_are_for_runs_of_the_command() -> None:
    trace = simulate(Dynamic(growth_interval=20), Stationary(steps=2000, level=0.0, jitter=0.25))
    assert diagnose(trace).remedy() == "Write policy=Dynamic()."
    trace.about["command"] = "preamp train"
    assert diagnose(trace).remedy() == "Write policy=Dynamic(), or --policy.growth-interval 2000."


def test_a_run_that_stands_still_gets_no_other_advice() -> None:
    for trace in (
        neck(15, 100),
        neck(3, 16),
        run(40, 100, norms=[0.85, 1.8, 122.0, 455_698.0], lost=math.nan),
    ):
        assert len(diagnose(trace).findings) == 1


def test_the_command_prints_the_kind_of_each_finding(here: Any, tmp_path: Path) -> None:
    run(40, 100, norms=[0.85, 1.8, 122.0, 455_698.0], lost=math.nan).write(tmp_path / "run.jsonl")
    done = here("doctor", "run.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Learning rate: The training diverged" in " ".join(done.stdout.split())


def test_a_diagnosis_takes_little_memory_beside_the_trace() -> None:
    steps = 30_000
    losses = (
        Step(n, 2.0**16, n % 40 > 0, n % 40 == 0, loss=1.0 / (n + 1), grad_norm=1.0) for n in range(steps)
    )
    trace = Trace(losses, policy=repr(Dynamic()))
    tracemalloc.start()
    diagnose(trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak / steps < 120  # bytes; lists of steps take some 500


QUICK = (
    "torch_sgd_learning_rate_too_high",
    "torch_neck_overflows_from_step_41",
    "torch_nan_in_every_batch",
    "torch_root_of_zero_in_the_loss",
    "torch_batch_norm_keeps_an_inf",
    "torch_learning_rate_zero",
    "torch_initial_scale_far_too_high",
    "torch_static_scale_too_low",
    "jax_learning_rate_too_high",
    "healthy_torch",
    "healthy_torch_rare_overflows",
)


on_purpose = pytest.mark.filterwarnings("ignore:a skipped step left inf or NaN:UserWarning")


@on_purpose
@pytest.mark.parametrize("name", QUICK)
def test_the_cause_of_a_real_run_is_named_first(bench: Any, name: str) -> None:
    case = bench.CASES[name]
    result = bench.judge(case, 17, diagnose(case.run(17)))
    assert result.right, result.sentence


def test_the_bench_has_many_causes_and_a_third_is_held_out(bench: Any) -> None:
    broken = [case for case in bench.CASES.values() if case.cause]
    assert len(broken) >= 20
    assert len(bench.CASES) - len(broken) >= 10
    assert len(bench.HELD_OUT) >= len(bench.CASES) / 3


@on_purpose
@pytest.mark.slow
def test_nine_in_ten_causes_are_named_and_healthy_runs_left_alone(bench: Any) -> None:
    results = [bench.judge(case, 23, diagnose(case.run(23))) for case in bench.CASES.values()]
    broken, healthy = ([r for r in results if bool(r.cause) == sick] for sick in (True, False))
    assert sum(r.right for r in broken) >= 0.9 * len(broken), [r for r in broken if not r.right]
    assert all(r.right for r in healthy), [r for r in healthy if not r.right]


LINKS = {
    "data": "bad inputs",
    "weights": "optimizer",
    "overflow": "forward overflow",
    "NaN": "forward NaN",
    "between": "forward NaN",
    "loss": "loss function",
}


def seen(index: int, scale: float, link: str = "", *, told: bool = True) -> Snapshot:
    """Return a snapshot in which one link of the step is the first that is not finite."""
    order = ("data", "weights", "overflow", "NaN", "between", "loss", "backward")
    place = order.index(link) if link else len(order)

    def one(name: str, what: Any, since: int, amax: int = 1) -> SnapshotRow:
        if place > since:
            return row(name, what, amax)._replace(nans=0 if told else None)
        bad = row(name, what, 15 if link == "overflow" and name == "neck" else amax, nonfinite=9)
        return bad._replace(nans=(0 if link == "overflow" and name == "neck" else 9) if told else None)

    inputs = (one("stem", "input", 0), one("neck", "input", 1), one("head", "input", 4))
    weights = (one("stem", "weight", -1), one("neck", "weight", 1 if link == "weights" else -1))
    weights = (
        weights[0]._replace(smallest=1.0 + index),
        weights[1]._replace(smallest=1.0 + index),
    )  # updated
    outputs = (
        one("stem", "activation", 0),
        one("neck", "activation", 3 if link in ("overflow", "NaN") else 1),
        one("head", "activation", 4, 4),
    )
    flows = (one("head", "flow", 6, -4), one("neck", "gradient", 6, -4))
    return Snapshot(index, scale, "float16", (*outputs, *flows), inputs, weights)


@pytest.mark.parametrize(("start", "told"), [(0, True), (41, False)])
@pytest.mark.parametrize("link", LINKS)
def test_the_first_link_of_the_step_that_broke_is_the_cause(link: str, start: int, told: bool) -> None:
    trace = run(start, 100, losses=[0.5] if start else (), lost=math.nan)
    for index in (0, 40, 42, 80):
        trace.add_snapshot(seen(index, trace[index].scale, link if index >= start else "", told=told))
    found = diagnose(trace)
    finding = found.findings[0]
    assert LINKS[link] in finding.kinds, finding.lines()
    assert not found.settings


@pytest.mark.parametrize("link", ["data", "overflow", "NaN", "between"])
def test_the_first_link_is_the_cause_in_single_steps_too(link: str) -> None:
    lost = {20, 47, 60, 91, 100, 133}
    steps = [
        step._replace(loss=math.nan if step.skipped else 1 / (1 + step.index))
        for step in simulate(Dynamic(), [n in lost for n in range(150)])
    ]
    trace = Trace(steps, policy=repr(Dynamic()))
    for index in (0, 47, 50, 100, 120):
        trace.add_snapshot(seen(index, trace[index].scale, link if index in lost else ""))
    finding = first(trace)
    kinds = (LINKS[link], "forward overflow") if link == "between" else (LINKS[link],)
    assert (finding.kinds, finding.severity) == (kinds, "warning")


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 30))
def test_inputs_far_larger_than_all_before_are_bad_data(powers: int) -> None:
    trace = run(41, 100, losses=[0.5], lost=math.inf)
    for index in (0, 40, 42, 80):
        snapshot = seen(index, trace[index].scale, "overflow" if index > 41 else "")
        given = row("stem", "input", 1 + (powers if index > 41 else 0))
        trace.add_snapshot(snapshot._replace(inputs=(given, *snapshot.inputs[1:])))
    assert ("bad inputs" if powers >= 7 else "forward overflow") == first(trace).kinds[0]


def test_gradients_that_overflow_at_the_lowest_scale_are_too_large_and_not_nan() -> None:
    for nans, amax, kind in ((0, 15, "gradient overflow"), (9, 2, "NaN in backward")):
        trace = run(0, 100, lost=0.5)
        for index in (0, 60):
            flow = row("head", "flow", amax, nonfinite=9)._replace(nans=nans)
            trace.add_snapshot(
                Snapshot(index, trace[index].scale, "float16", (row("head", "activation", 1), flow))
            )
        assert kind == first(trace).kinds[0]


def sporadic(places: set[int], *, lost: float, norm: float | None, steps: int = 300) -> Trace:
    """Return a run that skips some steps, whose loss is as given, among others that are all alike."""
    readings = [n in places for n in range(steps)]
    made = (
        step._replace(
            loss=lost if step.skipped else 0.5 + 0.1 / (1 + step.index),
            grad_norm=None if step.skipped else norm,
        )
        for step in simulate(Dynamic(init_scale=2.0**10), readings)
    )
    return Trace((step._replace(amax=None) for step in made), policy=repr(Dynamic(init_scale=2.0**10)))


def test_single_steps_lost_at_scales_that_overflow_nothing_are_nan_in_backward() -> None:
    places = {20, 33, 71, 90, 131, 160, 171, 200}
    finding = first(sporadic(places, lost=0.6, norm=1.0))
    assert (finding.kinds[0], finding.severity) == ("NaN in backward", "warning")
    assert "NaN in backward" not in first(sporadic(places, lost=0.6, norm=200.0)).kinds


@pytest.mark.parametrize(("amax", "kind"), [(2, "NaN in backward"), (15, "dragged down")])
def test_nan_in_backward_is_told_from_overflow_by_snapshots_at_any_scale(amax: int, kind: str) -> None:
    trace = sporadic({20, 71, 131, 200}, lost=0.6, norm=200.0)
    for index in (20, 131):
        flow = row("head", "flow", amax, nonfinite=3)._replace(nans=3)
        trace.add_snapshot(
            Snapshot(index, trace[index].scale, "float16", (row("head", "activation", 1), flow))
        )
    assert first(trace).kinds == (kind,)


def test_inputs_of_the_first_lost_step_do_not_explain_those_after_it() -> None:
    trace = run(41, 100, losses=[0.5], lost=math.nan)
    for index in (0, 40, 41, 60, 80):
        snapshot = seen(index, trace[index].scale, "loss" if index > 40 else "")
        x = row("stem", "input", 30 if index == 41 else 1)
        trace.add_snapshot(snapshot._replace(inputs=(x, *snapshot.inputs[1:])))
    assert "bad inputs" not in left(first(trace))


def test_a_logarithm_of_zero_that_begins_in_the_middle_is_named_without_snapshots() -> None:
    losses = [0.7 / (1 + n / 20) for n in range(100)]
    for n in (60, 71, 78, 83, 88, 90, 93, 95, 96, 98, 99):
        losses[n] = math.inf
    losses += [math.inf] * 100
    steps = [
        Step(n, 8.0, finite=math.isfinite(loss), skipped=math.isinf(loss), new_scale=8.0, loss=loss)
        for n, loss in enumerate(losses)
    ]
    assert "loss function" in left(first(Trace(steps, policy=repr(Static(8.0)))))


def test_targets_that_change_at_once_are_told_from_answers_that_grew() -> None:
    for amax, kind in ((1, "bad targets"), (5, "loss function")):
        trace = run(41, 100, losses=[0.5], lost=math.inf)
        for index in (0, 40, 42, 80):
            seen_then = row("stem", "activation", 1), row("head", "activation", amax if index > 41 else 1)
            trace.add_snapshot(Snapshot(index, trace[index].scale, "float16", seen_then))
        assert kind in first(trace).kinds


def test_gradients_of_dead_units_need_no_higher_scale() -> None:
    def with_outputs(zeros: int) -> Trace:
        trace = Trace([Step(n, 1.0, finite=True, skipped=False) for n in range(300)], policy="Static(1.0)")
        outputs = SnapshotRow("act", "activation", "float16", ExponentHistogram(0, (32 - zeros,), zeros))
        nothing = SnapshotRow("act", "gradient", "float32", ExponentHistogram(zeros=32))
        trace.add_snapshot(
            Snapshot(299, 1.0, "float16", (outputs, row("head", "flow", 0 if zeros else -12), nothing))
        )
        return trace

    assert diagnose(with_outputs(32)).healthy
    assert first(with_outputs(0)).kind == "not scaled"


def test_a_loss_of_zero_has_no_gradients_and_needs_no_scale() -> None:
    steps = [Step(n, 8.0, finite=True, skipped=False, amax=0.0, loss=0.0) for n in range(200)]
    assert "vanished" not in [f.kind for f in diagnose(Trace(steps, policy=repr(Static(8.0)))).findings]


def test_losses_that_repeat_from_some_step_on_show_where_learning_stopped() -> None:
    losses = [2 / (1 + n) for n in range(150)] + [0.01 + 0.001 * (n % 15) for n in range(150)]
    steps = [Step(n, 8.0, finite=True, skipped=False, loss=loss) for n, loss in enumerate(losses)]
    finding = first(Trace(steps))
    assert finding.kinds[0] == "stopped learning"
    assert "from step 150 on" in " ".join(finding.lines())


def test_float16_without_a_scaler_shows_in_the_snapshots() -> None:
    trace = Trace([Step(n, 1.0, finite=True, skipped=False, loss=1 / (1 + n)) for n in range(120)])
    for index in (0, 60):
        trace.add_snapshot(Snapshot(index, 1.0, "float16", (row("head", "flow", -20),)))
    assert first(trace).kind == "not scaled"


def test_a_constant_scale_that_fails_in_half_of_the_steps_is_too_high() -> None:
    found = diagnose(simulate(Static(2.0**16), [n % 2 == 0 for n in range(300)]))
    assert found.findings[0].kind == "too high"
    assert found.better() is not None


def test_a_rule_that_waits_is_not_blamed_for_its_start() -> None:
    found = diagnose(simulate(Dynamic(hysteresis=12), [n < 14 for n in range(600)]))
    assert [finding.kind for finding in found.findings if finding.severity != "note"] == ["slow to back off"]


def test_a_loss_that_ends_far_above_its_best_has_diverged() -> None:
    losses = [3.0 / (1 + n / 10) for n in range(100)] + [14.0 + n % 5 for n in range(120)]
    steps = [Step(n, 1.0, finite=True, skipped=False, loss=loss) for n, loss in enumerate(losses)]
    assert first(Trace(steps, precision="bfloat16")).kinds[0] == "learning rate"


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.dictionaries(st.sampled_from(["scale", "init_scale", "growth_interval"]), st.integers(1, 3)))
)
def test_no_two_findings_advise_different_values_of_one_setting(wanted: list[dict[str, int]]) -> None:
    made = [Finding(kind=str(n), severity="note", sentence="", settings=s) for n, s in enumerate(wanted)]
    kept = list(consistent(made))
    told: dict[str, set[int]] = {}
    for finding in kept:
        for name, value in finding.settings.items():
            told.setdefault(name.removeprefix("init_"), set()).add(value)
    assert all(len(values) == 1 for name, values in told.items() if name != "scale") or not made
    firsts = [f.kind for f in made if not f.settings] + [f.kind for f in made if f.settings][:1]
    assert set(firsts) <= {f.kind for f in kept}


@settings(deadline=None, max_examples=12)
@example(-2, 16, 2000, -30.0)
@given(st.integers(-40, 0), st.integers(-8, 24), st.sampled_from([20, 2000]), st.floats(-40.0, 10.0))
def test_a_higher_scale_is_advised_where_it_is_called_too_low(
    level: int, start: int, interval: int, drift: float
) -> None:
    process = Drifting(steps=1000, level=float(level), drift=drift)
    found = diagnose(simulate(Dynamic(init_scale=2.0**start, growth_interval=interval), process))
    for finding in found.findings:
        if "Start higher" in finding.advice:
            better = found.better(finding)
            assert getattr(better, "init_scale", None) is not None
            assert better.init_scale > 2.0**start
            record = found.record
            first = record.highest_scale(record.settled[: max(20, len(record.settled) // 20)])
            assert better.init_scale == 2.0 ** (first - 1)
            said = f"Start higher, at {power(better.init_scale)}: one power of two, as a margin, below"
            assert finding.advice.startswith(said)
        if finding.kind == "too low" and "headroom" in finding.numbers:
            highest = found.record.highest_scale(found.record.late)
            assert f"powers of two below {power(2.0**highest)}, the highest" in finding.sentence


def test_a_policy_that_looks_at_gradients_gets_no_blame_for_a_quick_fall() -> None:
    trace = simulate(Headroom(init_scale=2.0**40), Stationary(steps=2000, level=0.0, jitter=0.25))
    assert "backs off too far" not in [finding.kind for finding in diagnose(trace).findings]


def in_parts(trace: Trace, *, scale: float | None = None) -> Trace:
    """Return a run with a look for each kind of value, as `preamp.jax.snapshot` makes them.

    Args:
        trace: a run.
        scale: that of the parts of the forward pass, which none multiplies; None for that of the step.
    """
    parted = Trace(trace, **trace.about)
    for snapshot in trace.snapshots:
        for what in ("gradient", "flow", "activation"):
            rows = tuple(row for row in snapshot.rows if row.what == what)
            told = scale if scale and what == "activation" else snapshot.scale
            parted.add_snapshot(snapshot._replace(rows=rows, scale=told, inputs=(), weights=()))
        if snapshot.inputs:
            parted.add_snapshot(snapshot._replace(rows=(), weights=(), scale=scale or snapshot.scale))
        if snapshot.weights:
            parted.add_snapshot(snapshot._replace(rows=(), inputs=(), scale=scale or snapshot.scale))
    return parted


@pytest.mark.parametrize(("link", "scale"), [("data", None), *((link, 1.0) for link in LINKS)])
def test_snapshots_that_were_recorded_in_parts_tell_as_much(link: str, scale: float | None) -> None:
    trace = run(41, 100, losses=[0.5] * 5, lost=0.5 if link == "backward" else math.nan)
    trace.add_snapshot(seen(0, 2.0**16))
    trace.add_snapshot(seen(40, 2.0**16))
    trace.add_snapshot(seen(60, trace[60].scale, link))
    whole, parted = diagnose(trace), diagnose(in_parts(trace, scale=scale))
    assert len(parted.record.trace.snapshots) > 2 * len(trace.snapshots)
    assert parted.findings == whole.findings


def steady(steps: int = 200, *, scale: float = 8.0, policy: Any = None, **about: Any) -> Trace:
    """Return a run of steps that are all taken at one scale, with losses that fall and never repeat."""
    losses = [1.0 / (1 + n / 50) + 0.01 * (n * 7919 % 101) / 101 for n in range(steps)]
    made = [Step(n, scale, finite=True, skipped=False, loss=loss) for n, loss in enumerate(losses)]
    return Trace(made, policy=repr(policy or Static(scale)), **about)


@pytest.mark.parametrize("what", ["flow", "gradient"])
def test_gradients_seen_in_parts_show_a_scale_that_is_too_low(what: Any) -> None:
    trace = steady(policy=Static(8.0))
    for index in (0, 100, 190):
        trace.add_snapshot(
            Snapshot(index, 8.0, "float16", (row("dense.kernel", what, -18, dtype="float32"),))
        )
        trace.add_snapshot(Snapshot(index, 8.0, "float16", (row("dense", "activation", 0),)))
    found = diagnose(trace)
    assert found.findings[0].kind == "too low"
    assert found.better() == Static(2.0**35)


def by_parameter(name: str, amax: int | None, entries: int) -> SnapshotRow:
    counts = (entries,) if amax is not None else ()
    seen = ExponentHistogram(amax or 0, counts, zeros=0 if counts else entries)
    return SnapshotRow(name, "gradient", "float32", seen)


@pytest.mark.parametrize("path", ["{}.{}", "{}/{}", "['{}']['{}']"])
def test_units_that_died_are_told_by_the_gradients_of_weight_and_bias(path: str) -> None:
    def gradients(*amaxes: int | None) -> Trace:
        trace = steady(policy=Static(8.0))
        places = [("first", "b", 8), ("first", "w", 64), ("last", "b", 2), ("last", "w", 16)]
        for index in (0, 100, 190):
            rows = (
                by_parameter(path.format(module, name), amax, size)
                for (module, name, size), amax in zip(places, amaxes, strict=True)
            )
            trace.add_snapshot(Snapshot(index, 8.0, "float16", tuple(rows)))
        return trace

    found = first(gradients(None, None, 0, None))
    assert (found.kind, found.severity) == ("dead units", "problem")
    assert "first" in found.sentence
    assert "from the first snapshot on" in found.sentence
    for alive in [
        (None, None, 0, 0),  # a frozen layer, or a head that begins at zero
        (0, None, 0, None),  # biases alone are trained
        (None, None, -20, None),  # or the scale is so low that they were lost
    ]:
        assert first(gradients(*alive)).kind != "dead units"


def test_one_row_for_a_whole_module_does_not_show_what_it_was_given() -> None:
    trace = steady(policy=Static(8.0))
    for index in (0, 100, 190):
        rows = [by_parameter(f"stem.{n}", None, 8 * n + 8) for n in (0, 1)]
        rows += [by_parameter("head.0", 0, 2), by_parameter("head.1", None, 16)]
        trace.add_snapshot(Snapshot(index, 8.0, "float16", tuple(one._replace(nans=0) for one in rows)))
    assert first(trace).kind != "dead units"


def test_a_loss_that_returned_only_to_where_it_began_has_diverged() -> None:
    def losses(late: float) -> Trace:
        values = [3.7 * 0.985**n for n in range(120)]
        values += [min(3.7, values[-1] + 4.0 * n) + 18.0 * math.sin(n / 13) for n in range(40)]
        values += [late + 0.01 * (n * 7919 % 141) / 141 for n in range(140)]
        steps = [Step(n, 1.0, finite=True, skipped=False, loss=loss) for n, loss in enumerate(values)]
        return Trace(steps, precision="bfloat16")

    found = first(losses(3.5))
    assert (found.kinds[0], found.severity) == ("learning rate", "problem")
    assert "loss spike" in first(losses(0.6)).kinds


@pytest.mark.parametrize("loss", [1e-7, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_loss_that_begins_below_the_format_at_its_scale_is_scaled_too_little(
    loss: float, scale: float
) -> None:
    steps = [
        Step(n, scale, finite=True, skipped=False, loss=loss * (1 + 0.1 * (n * 7919 % 101) / 101))
        for n in range(200)
    ]
    found = diagnose(Trace(steps))
    assert (found.findings[0].kind == "too low") == (loss * scale < 2.0**-14)
    assert diagnose(Trace(steps, precision="float32")).healthy
    assert diagnose(Trace([step._replace(grad_norm=1e-3 + 1e-4 * step.index) for step in steps])).healthy
    fell = [step._replace(loss=0.5 * 0.9**step.index) for step in steps]
    assert diagnose(Trace(fell)).healthy


def test_gradients_that_keep_an_older_scale_are_of_an_earlier_step() -> None:
    """Where gradients carry the scale of their pass, sums of them show where they come from."""

    def skipped(*, carried: bool) -> Trace:
        trace = run(41, 60, losses=[0.5], lost=0.5)
        steps = [step._replace(culprits=(), scale=2.0**16 if carried else step.scale) for step in trace]
        made = Trace(steps, **trace.about)
        for index in (20, 60, 80):
            rows = row("dense", "activation", 1), row("dense.kernel", "gradient", -3)
            made.add_snapshot(Snapshot(index, steps[index].scale, "float16", rows))
        return made

    assert first(skipped(carried=True)).kinds[0] == "gradients not cleared"
    assert "another rank" in first(skipped(carried=False)).kinds


def test_batches_whose_losses_stand_out_may_overflow_at_low_scales() -> None:
    places = {20, 33, 71, 90, 131, 160, 171, 200}
    assert first(sporadic(places, lost=2.0, norm=1.0)).kind == "dragged down"
    assert first(sporadic(places, lost=0.6, norm=1.0)).kinds[0] == "NaN in backward"


def test_head_room_that_most_late_snapshots_could_not_use_is_a_note() -> None:
    def late(*amaxes: int) -> Any:
        trace = steady(policy=Static(8.0))
        for place, amax in enumerate(amaxes):
            trace.add_snapshot(Snapshot(110 + 20 * place, 8.0, "float16", (row("dense", "flow", amax),)))
        return first(trace)

    assert late(-10, -10, -10, -10).severity == "warning"
    assert late(9, 8, 8, -10).severity in ("note", "fine")


def test_a_run_that_loses_most_late_steps_gets_their_cause_and_not_that_they_are_skipped() -> None:
    readings = [n > 60 and n % 6 != 0 for n in range(301)]
    steps = [
        step._replace(loss=math.inf if step.skipped else 0.5 + 0.1 / (1 + step.index))
        for step in simulate(Dynamic(), readings)
    ]
    trace = Trace([step._replace(amax=None) for step in steps], policy=repr(Dynamic()))
    for index in (0, 40, 200, 293):
        trace.add_snapshot(seen(index, steps[index].scale, "overflow" if steps[index].skipped else ""))
    finding = first(trace)
    assert (finding.kind, finding.severity) == ("forward overflow", "problem")
    assert "neck" in finding.sentence


def test_what_a_converged_run_could_save_is_a_note() -> None:
    def ending(last: float) -> Trace:
        losses = [1.0 * last ** (n / 200) + 1e-6 * n for n in range(200)]
        steps = [Step(n, 8.0, finite=True, skipped=False, loss=loss) for n, loss in enumerate(losses)]
        trace = Trace(steps, policy=repr(Dynamic(init_scale=8.0, growth_interval=50)))
        trace.add_snapshot(Snapshot(190, 8.0, "float16", (row("dense", "flow", -10),)))
        return trace

    assert first(ending(0.5)).severity == "warning"
    assert diagnose(ending(1e-4)).healthy


def test_steps_that_overflow_at_a_high_scale_do_not_hide_those_that_stand_out() -> None:
    trace = sporadic({20, 33, 71, 90, 131, 160, 171, 200, 221, 240}, lost=2.0, norm=10.0)
    early = [step._replace(loss=0.6) if step.index in (20, 33) else step for step in trace]
    assert first(Trace(early, **trace.about)).kind == "dragged down"


def test_culprits_of_earlier_steps_do_not_hide_another_rank() -> None:
    def skipped(start: int) -> Any:
        """Return the first finding where parameters are named from a step on, and in the first steps."""
        trace = run(41, 60, losses=[0.5], lost=0.5)
        names = ("dense.kernel",)
        opening = [Step(n, 2.0**16, finite=False, skipped=True, loss=0.6, culprits=names) for n in range(3)]
        steps = [
            step._replace(
                index=step.index + 3, culprits=names if step.skipped and step.index >= start else ()
            )
            for step in trace
        ]
        made = Trace([*opening, *steps], **trace.about)
        for index in (20, 60, 80):
            rows = row("dense", "activation", 1), row("dense.kernel", "gradient", -3)
            made.add_snapshot(Snapshot(index, made[index].scale, "float16", rows))
        return first(made)

    assert skipped(1000).kinds[0] == "another rank"
    assert skipped(0).kinds == ("gradients not cleared",)


def test_gradients_that_are_zero_with_a_large_scaled_loss_are_cut_off() -> None:
    def zeros(scale: float, loss: float) -> Any:
        steps = [
            Step(n, scale, finite=True, skipped=False, loss=loss * (1 + n % 7), grad_norm=0.0)
            for n in range(120)
        ]
        return first(Trace(steps))

    cut = zeros(2.0**16, 1.2)
    assert cut.kinds[0] == "cut off"
    assert "stop_gradient" in " ".join(cut.lines())
    assert zeros(2.0**4, 1e-6).kinds[0] == "vanished"


def test_a_low_scale_that_never_moved_under_an_unknown_rule_is_too_low() -> None:
    steps = [
        Step(n, 4.0, finite=True, skipped=False, loss=1e-6 + 1e-9 * (n * 7 % 101), amax=1e-6)
        for n in range(240)
    ]
    assert first(Trace(steps)).kind == "too low"
    assert first(Trace(steps, policy=repr(Dynamic(init_scale=4.0)))).kind == "too low"


@pytest.mark.parametrize(("first_bad", "last_bad"), [(161, 240), (160, 160)])
def test_a_bad_micro_batch_that_the_lens_did_not_see_is_not_blamed_on_the_loss(
    first_bad: int, last_bad: int
) -> None:
    torch.manual_seed(0)
    model, trace = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), Trace()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**8, on_step=trace)
    with Lens(model, every=20, scaler=scaler, on_snapshot=trace.add_snapshot):
        for number in range(240):
            x = torch.randn(64, 8)
            y = (x[:, 0] > 0).long()
            if first_bad <= number <= last_bad and number % 2 == first_bad % 2:
                x = x * math.inf
            scaler.scale(nn.functional.cross_entropy(model(x), y) / 2).backward()
            if number % 2:
                scaler.step(optimizer, max_norm=1.0)
                scaler.update()
                optimizer.zero_grad()
    assert first(trace).kinds[:1] in (("bad inputs",), ())
