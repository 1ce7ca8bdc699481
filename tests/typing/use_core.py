"""A user's code on what needs no framework."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, assert_type

from preamp import (
    Dynamic,
    ExponentHistogram,
    Headroom,
    Policy,
    PolicyError,
    PreampError,
    Reading,
    Snapshot,
    State,
    Static,
    Step,
    Summary,
    Tolerant,
    Trace,
    casting,
    dialects,
    processes,
    simulate,
)
from preamp.doctor import Diagnosis, Finding, diagnose
from preamp.policy import Where, choose
from preamp.report import Curve, scale_figure, write_report
from preamp.systems.deepspeed_config import Settings, load
from preamp.systems.dialects import Dialect


def choose_a_rule(hysteresis: int) -> Policy[Any]:
    rule = Dynamic(init_scale=2.0**12, hysteresis=hysteresis, max_scale=None, at_floor="raise")
    assert_type(rule.start(), State)
    assert_type(rule.advance(rule.start(), Reading(True)), State)
    assert_type(rule.growth_interval, int)
    assert_type(replace(rule, growth_interval=7), Dynamic)
    rules: Sequence[Policy[Any]] = [
        Static(8),
        Tolerant(tolerance=0.1),
        Headroom(margin=0.5),
        dialects.TORCH,
        rule,
    ]
    return rules[0]


def use_dialects() -> None:
    rule = dialects.MEGATRON(hysteresis=4, min_scale=0.5)
    assert_type(rule, Policy[Any])
    for name, dialect in dialects.ALL.items():
        text: str = name + dialect.odd + dialect.system
        print(text)
    any_dialect: Dialect[...] = dialects.KERAS
    print(any_dialect)


def record(path: Path) -> Summary:
    with Trace(path=path, name="run") as trace:
        trace(Step(0, 65536.0, True, False))
        trace.extend([(1, 65536.0, False, True)])
    with Trace("run.{rank}.jsonl", mode="append", on_error="warn", only_rank=0) as other:
        assert_type(other.resumed, list[int])
    trace = Trace.read([path, "other.jsonl"], progress=lambda done, size: print(done / size))
    assert_type(trace.disagreements, tuple[str, ...])
    assert_type(trace.summary().resumed, tuple[int, ...])
    trace = Trace.read(path)
    assert_type(trace[0], Step)
    assert_type(trace[0].buffers, tuple[str, ...])
    losses: list[float | None] = list(trace.column("loss"))
    print(losses)
    assert_type(trace[1:], list[Step])
    assert_type([step.culprits for step in trace], list[tuple[str, ...]])
    assert_type(trace[0].loss, float | None)
    snapshots: list[Snapshot] = list(trace.snapshots)
    assert_type(snapshots[0].best_scale(), float | None)
    assert_type(snapshots[0].rows[0].histogram, ExponentHistogram)
    assert_type(snapshots[0].table(modules=None), str)
    row = (*snapshots[0].inputs, *snapshots[0].weights)[0]
    assert_type(row.direction, Literal["forward", "backward"])
    assert_type(row.largest, float | None)
    assert_type(row.nans, int | None)
    return trace.summary()


def advise(trace: Trace) -> list[str]:
    diagnosis = diagnose(trace)
    assert_type(diagnosis, Diagnosis)
    assert_type(diagnosis.findings, tuple[Finding, ...])
    assert_type(diagnosis.better(), Policy[Any] | None)
    write_report("report.html", title="run", lead=["one run"], curves=[Curve("run", trace)], table=[])
    assert_type(scale_figure([Curve("run", trace)]), str)
    return [finding.sentence for finding in diagnosis.findings]


def rehearse() -> None:
    assert_type(simulate(Dynamic(), [False, True, Reading(True)]), Trace)
    assert_type(simulate(dialects.TORCH, processes.Spiky(seed=1)), Trace)
    assert_type(processes.Drifting(drift=-3.0).best_scale, float | None)
    assert_type(processes.Stationary().outcome(Trace()), processes.Outcome)


def edit_a_table() -> casting.Casting:
    assert_type(casting.DEFAULT["softmax"], casting.Rule)
    return casting.JAX.lower("exp").float32("dot_general").refuse("log")


def configure() -> Settings:
    settings = load({"fp16": {"enabled": True}})
    assert_type(settings.policy, Policy[Any] | None)
    assert_type(settings.max_norm, float | None)
    return load(Path("ds.json"), skip_blanks=True)


class Halving(Policy[State]):
    """A rule of the user's own."""

    def start(self) -> State:
        return State(1024.0, 0.0, 0.0)

    def advance(self, state: State, reading: Reading, where: Where = choose) -> State:
        return state._replace(scale=where(reading.finite, state.scale, state.scale * 0.5))


class Noisy(processes.Drawn):
    """A process of the user's own."""

    def excess(self, rng: Any) -> float:
        return float(rng.random())


def catch() -> str:
    try:
        Dynamic(backoff_factor=2.0)
    except PolicyError as error:
        assert_type(error, PolicyError)
        problem: PreampError = error
        also: ValueError = error
        return f"{problem}{also}"
    return ""


def mistakes() -> None:
    Dynamic(2.0**12)  # type: ignore[call-arg]
    Dynamic(init_scale="big")  # type: ignore[arg-type]
    Dynamic(growth=3)  # type: ignore[call-arg]
    Dynamic(at_floor="ignore")  # type: ignore[arg-type]
    dialects.TORCH(hysteresis=2)  # type: ignore[call-arg]
    dialects.MEGATRON(hysteresis="2")  # type: ignore[arg-type]
    Dynamic().growth_interval = 3  # type: ignore[misc]
    simulate(Dynamic())  # type: ignore[call-arg]
    simulate(Dynamic(), ["yes"])  # type: ignore[list-item]
    Trace(mode="overwrite")  # type: ignore[arg-type]
    Trace(on_error="ignore")  # type: ignore[arg-type]
    Step(0, 1.0, finite=True)  # type: ignore[call-arg]
    casting.Casting({"softmax": "half"})  # type: ignore[dict-item]
    load(3)  # type: ignore[arg-type]
    diagnose("trace.jsonl")  # type: ignore[arg-type]
    Halving().advance(1.0, Reading(True))  # type: ignore[arg-type]
