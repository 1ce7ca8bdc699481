"""`preamp simulate --guard`: losses, recorded and drawn, through guards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from preamp import Dynamic, Reading, Static, Step, Trace, guards, processes, simulate
from preamp.cli.app import run
from tests.cli.inside import GUARDS, LOSSES, PROCESSES, guards_of
from tests.guarding import LossLimit

Rows = dict[str, list[str]]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `preamp simulate` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run_here(*flags: str) -> tuple[int, str, str]:
        status = run(["simulate", *flags])
        return status, *capsys.readouterr()

    return run_here


def rows_of(printed: str) -> Rows:
    return {words[0]: words[1:] for words in map(str.split, printed.splitlines()) if words}


def test_every_process_of_losses_has_a_name() -> None:
    kinds = [getattr(processes, name) for name in processes.__all__]
    drawn = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, processes.Losses)}
    assert set(LOSSES.values()) == drawn - {processes.Losses}
    assert LOSSES.keys().isdisjoint(PROCESSES)


def test_every_guard_has_a_name() -> None:
    assert set(GUARDS.values()) == {guards.SpikeGuard, guards.NormLimit, *guards.ALL}


@pytest.mark.parametrize("name", ["spike-runs", "nan-loss"])
def test_guards_are_compared_on_losses_that_are_drawn(name: str, command: Command) -> None:
    status, printed, _ = command("--process", name, "--guard", "all", "--seed", "7", "--steps", "600")
    assert status == 0
    rows = rows_of(printed)
    process = LOSSES[name](seed=7, steps=600)
    for guard, kind in GUARDS.items():
        one = kind() if isinstance(kind, type) else kind
        assert (guard in rows) is (one.idle is None)
        if guard not in rows:
            continue
        done = process.outcome(simulate(Dynamic(), process, guard=one))
        said = [done.steps, done.skipped, done.spikes, done.missed, done.false_alarms, done.longest_run]
        assert rows[guard] == [f"{number:,}" for number in said]
    assert "they skip nothing: megatron-norm (--guard." in " ".join(printed.split())
    assert "planted spikes that the guard took" in Path("runs/simulate.html").read_text()


def test_a_guard_without_a_limit_is_said_to_skip_nothing(command: Command) -> None:
    flags = ("--process", "spike-runs", "--steps", "300", "--guard", "megatron-norm")
    _, printed, _ = command(*flags)
    said = "Without a limit megatron-norm skips nothing. Write --guard.grad-norm-skip-threshold 5."
    assert said in " ".join(printed.split())
    _, printed, _ = command(*flags, "--guard.grad-norm-skip-threshold", "5")
    assert "Without a limit" not in printed


def test_spike_guard_is_the_default_and_settings_are_flags(command: Command) -> None:
    _, printed, _ = command("--process", "spike-runs", "--steps", "600")
    assert "spike" in rows_of(printed)
    flags = [
        "--guard",
        "spike",
        "--guard",
        "maxtext",
        "--guard.sigmas",
        "400",
        "--guard.scaling-factor",
        "3",
    ]
    _, printed, _ = command("--process", "spike-runs", "--steps", "600", *flags)
    rows = rows_of(printed)
    process = processes.SpikeRuns(steps=600)
    maxtext = guards.MAXTEXT(scaling_factor=3.0)
    for name, guard in (("spike", guards.SpikeGuard(sigmas=400.0)), ("maxtext", maxtext)):
        done = process.outcome(simulate(Static(1.0), process, guard=guard))
        assert rows[name][1:4] == [str(done.skipped), str(done.spikes), str(done.missed)]


def test_a_recorded_run_is_replayed_with_several_guards(command: Command) -> None:
    losses = [2.0 + 0.01 * (step % 5) for step in range(200)]
    losses[150:153] = [30.0] * 3
    recorded = simulate(Static(4.0), [Reading(True, loss=x) for x in losses], guard=LossLimit(5.0))
    recorded.write("run.jsonl")
    flags = ["--guard", "spike", "--guard", "olmo"]
    status, printed, _ = command("--trace", "run.jsonl", *flags)
    assert status == 0
    rows = rows_of(printed)
    assert rows["spike"] == ["200", "3", "3", "3"]
    assert rows["olmo"] == ["200", "3", "3", "3"]
    assert "guards.OLMO" in Path("runs/simulate.html").read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--guard", "spke", "--process", "resting-loss"], "--guard spke is unknown. Write one of spike,"),
        (
            ["--guard", "spike"],
            "A guard needs losses or norms. Write --trace FILE, or --process resting-loss",
        ),
        (["--guard", "spike", "--process", "spiky"], "--process spiky has neither losses nor norms"),
        (
            ["--guard", "olmo", "--guard.sigmas", "3", "--process", "resting-loss"],
            "--guard.sigmas is not a setting of olmo. Leave it out, or write --guard spike.",
        ),
        (
            ["--guard", "spike", "--guard.sigmas", "-1", "--process", "nan-loss"],
            "preamp: --guard.sigmas -1.0 is not a finite number above 0. Write --guard.sigmas 6.0.",
        ),
        (
            ["--guard.threshold", "0", "--process", "nan-loss"],
            "preamp: --guard.threshold 0.0 is not a finite number above 0. Write --guard.threshold 10.0.",
        ),
        (
            ["--guard", "maxtext", "--guard.interval", "1", "--process", "nan-loss"],
            "preamp: --guard.interval 1 must be a whole number of at least 2. Write --guard.interval 128.",
        ),
        (
            ["--guard.warmup", "2000.5", "--process", "nan-loss"],
            "--guard.warmup: 2000.5 is not a whole number",
        ),
        (["--guard.patience", "0.5", "--process", "nan-loss"], "--guard.patience: 0.5 is not a whole number"),
        (["--process", "nan-loss", "--dtype", "float16"], "neither --dtype nor --ranks"),
        (["--process", "nan-loss", "--ranks", "2"], "neither --dtype nor --ranks"),
        (["--process", "nan-loss", "--overflow-rate", "0.1"], "--overflow-rate"),
        (
            ["--process", "nan-loss", "--policy", "dynamic", "--policy", "static"],
            "--guard requires exactly one --policy (got 2). Write one.",
        ),
        (["--trace", "blind.jsonl", "--guard", "spike"], "blind.jsonl has neither losses nor norms"),
        (
            ["--trace", "losses.jsonl", "--guard", "norm-limit"],
            "norm-limit needs the grad_norm of every step",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(flags: list[str], said: str, command: Command) -> None:
    Trace([Step(0, 1.0, True, False, 1.0)]).write("blind.jsonl")
    Trace([Step(0, 1.0, True, False, 1.0, loss=2.0)]).write("losses.jsonl")
    status, _, error = command(*flags)
    assert status == 2
    assert said in error
    assert len(error.splitlines()) == 1


def test_help_names_the_guards(command: Command) -> None:
    _, printed, _ = command("--help")
    assert "Guard against spikes" in printed
    for name in ("spike", "olmo", "--guard.patience"):
        assert name in printed


def test_a_setting_without_a_name_chooses_the_guard_that_has_it() -> None:
    assert guards_of([], {"threshold": 2.0}) == {"norm-limit": guards.NormLimit(2.0)}
    assert guards_of([], None) == {"spike": guards.SpikeGuard()}
    olmo = guards_of(["OLMO"], {"sigma_factor": 3.0})["olmo"]
    assert olmo == guards.OLMO(sigma_factor=3.0)
