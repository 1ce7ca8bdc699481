"""The command line as a user meets it: real processes, real files, real exit statuses."""

import difflib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from html import escape
from pathlib import Path

import pydantic  # noqa: F401  # where it is loaded, cyclopts checks values and defaults with it
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from preamp import (
    Dynamic,
    Headroom,
    PreampError,
    Static,
    Step,
    Tolerant,
    Trace,
    dialects,
    processes,
    simulate,
)
from preamp.cli.app import run as run_here
from preamp.simulation.processes import Stationary
from tests.cli.inside import ALL, RULES, find_dialect, find_policy, kebab, power, terminal

ENVIRONMENT = {**os.environ, "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}


def preamp(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "preamp", *arguments]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_train_writes_traces_a_summary_and_a_report(tmp_path):
    done = preamp("train", "--epochs", "2", "--seeds", "2", "--precision", "all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/train"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["task"], summary["framework"], len(summary["runs"])) == ("autoencoder", "torch", 8)
    assert {(r["precision"], r["scaled"], r["seed"]) for r in summary["runs"]} == {
        (precision, scaled, seed)
        for precision, scaled in [("float32", 0), ("float16", 0), ("float16", 1), ("bfloat16", 0)]
        for seed in (0, 1)
    }
    for run in summary["runs"]:
        scaled = {"float16": "-preamp" if run["scaled"] else "-unscaled"}.get(run["precision"], "")
        trace = Trace.read(folder / f"{run['precision']}{scaled}-seed{run['seed']}" / "trace.jsonl")
        assert len(trace) == run["steps"] == 24
        assert trace.summary().final_scale == run["final_scale"]
        assert run["test_error"] > 0
        assert run["test_accuracy"] is None
        assert trace.snapshots[0].low_dtype == run["precision"]
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 3 + 4 * 3  # and of each name's snapshot three kinds of values
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "http://" not in re.sub(r'xmlns[^"]*"[^"]*"|<!DOCTYPE[^>]*>|rdf:\w+="[^"]*"', "", page)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_low_precision_is_rehearsed_or_the_cpus_own(here, tmp_path):
    errors = {}
    for flag in ("--emulate", "--native"):
        done = here("train", "--epochs", "1", "--precision", "float16", "--out", flag[2:], flag)
        assert done.returncode == 0, done.stderr
        runs = json.loads((tmp_path / flag[2:] / "summary.json").read_text())["runs"]
        errors[flag] = [run["test_error"] for run in runs]
    assert "rehearsed as on a GPU" in (tmp_path / "emulate/report.html").read_text()
    assert "the CPU&#x27;s own" in (tmp_path / "native/report.html").read_text()
    assert errors["--emulate"] != errors["--native"]
    assert errors["--emulate"] == pytest.approx(errors["--native"], rel=0.05)


def test_train_classifies_a_table_of_ones_own(here, tmp_path):
    rows = [f"{x / 60},{(x * 7 % 60) / 60},{'high' if x > 30 else 'low'}" for x in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["width,height,kind", *rows]))
    done = here("train", "--data", "table.csv", "--epochs", "3", "--policy.scale", "128", "--out", "o")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert summary["task"] == "classify"
    scaled = summary["runs"][-1]
    assert scaled["policy"] == "Static(scale=128.0)"
    assert scaled["max_scale"] == 128.0
    assert 0 <= scaled["test_accuracy"] <= 1


def test_the_same_seed_gives_the_same_run_and_the_policy_flags_start_from_what_it_uses(here, tmp_path):
    traces, policies = [], []
    for flags in ([], [], ["--policy.hysteresis", "2"]):
        once = ["train", "--epochs", "1", "--precision", "float16", "--seed", "7", "--out", "out"]
        here(*once, *flags)
        trace = Trace.read(tmp_path / "out/float16-preamp-seed7/trace.jsonl")
        traces.append([step._replace(seconds=None) for step in trace])
        policies.append(json.loads((tmp_path / "out/summary.json").read_text())["runs"][-1]["policy"])
    assert traces[0] == traces[1]
    assert policies == ["Dynamic(growth_interval=100)"] * 2 + ["Dynamic(growth_interval=100, hysteresis=2)"]


@pytest.mark.parametrize("steps", ["1", "13"])
def test_a_training_takes_as_many_steps_as_asked_for(steps, here, tmp_path):
    arguments = ["--steps", steps, "--policy", "headroom", "--precision", "float16", "--out", "o"]
    assert here("train", *arguments).returncode == 0
    runs = json.loads((tmp_path / "o/summary.json").read_text())["runs"]
    assert [run["steps"] for run in runs] == [int(steps)] * 2
    assert runs[-1]["policy"] == "Headroom()"


def test_ctrl_c_leaves_traces_and_a_report_of_what_ran(tmp_path):
    arguments = ["train", "--steps", "100000", "--precision", "float16", "--out", "out"]  # too many to end
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "preamp", *arguments],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    path = tmp_path / "out/float16-unscaled-seed0/trace.jsonl"
    deadline = time.monotonic() + 60
    try:
        while not (path.exists() and path.read_text().count("\n") > 30):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "float16, no scaling, seed 0 stopped: interrupted" in printed
    trace = Trace.read(path)
    assert trace.stopped == "interrupted"
    (run,) = json.loads((tmp_path / "out/summary.json").read_text())["runs"]
    assert run["steps"] == len(trace) >= 20
    assert "<svg" in (tmp_path / "out/report.html").read_text()


def test_a_policy_that_gives_up_ends_its_run_with_a_word(here, tmp_path):
    flags = [
        "--policy.init-scale",
        str(2.0**32),
        "--policy.min-scale",
        str(2.0**29),
        "--policy.at-floor",
        "raise",
    ]
    done = here("train", "--precision", "float16", "--epochs", "1", *flags, "--out", "o")
    assert done.returncode == 0, done.stderr
    assert "stopped: the gradients overflowed at a loss scale of" in " ".join(done.stdout.split())
    assert json.loads((tmp_path / "o/summary.json").read_text())["runs"][-1]["skipped"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--bogus"], "--bogus"),
        (["train", "--epochs", "0"], "--epochs"),
        (["train", "--seeds", "x"], "--seeds"),
        (["train", "--framework", "abacus"], "abacus"),
        (["train", "--precision", "fp16"], 'Choose from: "float32", "float16", "bfloat16", "all"'),
        (["train", "--dialect", "tork"], "torch"),
        (["train", "--dialect", "torch", "--policy.scale", "8"], "both"),
        (
            ["train", "--policy.growth-interval", "0"],
            "--policy.growth-interval 0 must be a whole number of at least 1. "
            "Write --policy.growth-interval 2000.",
        ),
        (
            ["train", "--policy.scale", "0"],
            "--policy.scale 0.0 is not a finite number above 0. Write --policy.scale 65536.",
        ),
        (
            ["train", "--policy.growth-interval", "2000.5"],
            "--policy.growth-interval: 2000.5 is not a whole number",
        ),
        (
            ["train", "--policy.hysteresis", "0.5"],
            "--policy.hysteresis: 0.5 is not a whole number",
        ),
        (["train", "--policy.scale", "8", "--policy.tolerance", "0.1"], "Tolerant"),
        (["train", "--rule", "roomhead"], "headroom"),
        (["train", "--policy", "headrom"], "Write one of headroom, "),
        (["simulate", "--policy", "torhc"], "Write one of torch, "),
        (["train", "--policy", "torch", "--policy.scale", "8"], "cannot change the policy of torch"),
        (["train", "--policy", "torch", "--dialect", "torch"], "--policy torch and --dialect torch"),
        (["simulate", "--dialect", "flx"], "Write one of flax, "),
        (["train", "--steps", "0"], "--steps"),
        (["train", "--steps", "5", "--epochs", "1"], "--epochs 1 and --steps 5 are both given"),
        (["train", "--rule", "headroom", "--dialect", "torch"], "both"),
        (["train", "--rule", "headroom", "--policy.tolerance", "0.1"], "--policy tolerant"),
        (["simulate", "--rule", "all", "--policy.min-scale", "1"], "one --policy"),
        (["train", "--data", "absent.csv"], "absent.csv"),
        (["train", "--data", "."], "."),
        (["train", "--seed", "-1"], "--seed"),
        (["train", "--empty-precision"], "--empty-precision"),
        (["report", "good.jsonl", "--out", "good.jsonl"], "good.jsonl"),
        (["simulate", "--trace", "good.jsonl", "--out", "./good.jsonl"], "good.jsonl"),
        (["simulate", "--trace", "good.jsonl", "--steps", "5"], "--steps"),
        (["simulate", "--trace", "good.jsonl", "--process", "spiky"], "--process"),
        (["simulate", "--trace", "good.jsonl", "--dtype", "bfloat16"], "--dtype"),
        (["simulate", "--process", "spiky", "--overflow-rate", "0.1"], "--overflow-rate"),
        (["simulate", "--process", "calm"], "calm"),
        (["simulate", "--ranks", "8"], "--process stationary"),
        (["simulate", "--dialect", "all", "--dialect", "nope"], "nope"),
        (["report"], "TRACES"),
        (["report", "absent.jsonl"], "absent.jsonl"),
        (["doctor"], "TRACES"),
        (["doctor", "absent.jsonl"], "absent.jsonl"),
        (["doctor", "good.jsonl", "broken.jsonl"], "line 2"),
        (["report", "broken.jsonl"], "line 2"),
        (["simulate", "--steps", "0"], "--steps"),
        (["simulate", "--overflow-rate", "1.5"], "--overflow-rate"),
        (["simulate", "--trace", "broken.jsonl"], "line 2"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_mistake_is_one_clear_line_and_status_2(arguments, words, tmp_path, monkeypatch, capsys):
    Trace([Step(0, 1.0, True, False)]).write(tmp_path / "good.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"preamp_trace": 1}\n{"index": 0, "sca\n')
    monkeypatch.chdir(tmp_path)
    assert run_here(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("preamp: ")
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))
    assert len(Trace.read(tmp_path / "good.jsonl")) == 1


def test_the_status_and_the_line_are_those_of_the_process(tmp_path):
    done = preamp("nonsense", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("preamp: ")
    assert done.stderr.count("\n") == 1


def test_simulate_compares_rules_on_a_recorded_trace(here, tmp_path):
    steps = [Step(i, 65536.0, finite=i % 5 != 0, skipped=i % 5 == 0) for i in range(100)]
    Trace(steps).write(tmp_path / "trace.jsonl")
    flags = [
        "--trace",
        "trace.jsonl",
        "--dialect",
        "torch",
        "--dialect",
        "deepspeed",
        "--policy.hysteresis",
        "2",
    ]
    done = here("simulate", *flags, "--out", "s.html")
    assert done.returncode == 0, done.stderr
    for name in ("preamp", "torch", "deepspeed"):
        assert f" {name} " in done.stdout
    assert done.stdout.count(" 20 ") == 2
    assert "deepspeed stopped: the gradients overflowed at a loss scale of 1 " in done.stdout
    assert "write at_floor='hold' or a lower min_scale" in " ".join(done.stdout.split())
    assert "<svg" in (tmp_path / "s.html").read_text()
    assert "without amaxes, so the same steps overflow at every scale" in (tmp_path / "s.html").read_text()
    assert max(map(len, done.stdout.splitlines())) <= 80


def rows_of(printed: str) -> dict[str, list[str]]:
    lines = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) == 7}


def test_simulate_follows_gradients_through_rules(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    process = processes.Drifting(steps=3000, seed=5, dtype="float8_e5m2", ranks=64)
    flags = ["--process", "drifting", "--steps", "3000", "--seed", "5", "--dtype", "float8_e5m2"]
    assert run_here(["simulate", *flags, "--ranks", "64", "--dialect", "torch", "--dialect", "megatron"]) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    for name in ("torch", "megatron"):
        done = process.outcome(simulate(ALL[name.upper()], process))
        reached = "-" if done.reached is None else str(done.reached)
        assert rows[name][:2] == ["3,000", str(done.skipped)]
        assert reached in rows[name]
    assert f"Best constant scale: {power(process.best_scale)} " in printed
    assert max(map(len, printed.splitlines())) <= 80
    page = (tmp_path / "runs/simulate.html").read_text()
    assert page.count("<svg") == 2
    assert escape(repr(process)) in page


def test_simulate_asks_a_recorded_run_with_peaks_what_another_scale_had_done(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recorded = simulate(Static(2.0**20), processes.Stationary(steps=500))
    recorded.write("run.jsonl")
    for scale, skipped in ((2.0**20, recorded.summary().skipped), (2.0**40, 500)):
        flags = ["--trace", "run.jsonl", "--policy.scale", str(scale)]
        assert run_here(["simulate", *flags]) == 0
        assert rows_of(capsys.readouterr().out)["preamp"][:2] == ["500", str(skipped)]
    assert "without amaxes" not in (tmp_path / "runs/simulate.html").read_text()


@pytest.mark.parametrize("flags", [[], ["--trace", "blind.jsonl"]])
def test_rules_that_look_at_gradients_are_refused_where_there_are_none(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Trace([Step(0, 8.0, finite=True, skipped=False)]).write("blind.jsonl")
    assert run_here(["simulate", "--rule", "headroom", *flags]) == 2
    printed = capsys.readouterr().err
    assert "headroom needs the size of the gradients" in printed
    assert "Write --process stationary" in printed


def test_report_draws_any_traces(here, tmp_path):
    with_loss = [Step(i, 2.0**i, True, False, loss=1.0 / (i + 1)) for i in range(5)]
    Trace(with_loss, name="<mine> [/red] \ud800").write(tmp_path / "a.jsonl")
    Trace([]).write(tmp_path / "b.jsonl")
    Trace([Step(0, 0.0, True, False, loss=1.7e308), Step(1, float("inf"), True, False)]).write(
        tmp_path / "c.jsonl"
    )
    done = here("report", "a.jsonl", "b.jsonl", "c.jsonl", "b.jsonl")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "runs/report.html").read_text()
    assert "&lt;mine&gt; [/red] ?" in page
    assert "b.jsonl" in page


def test_report_says_that_a_run_was_resumed_and_that_its_ranks_disagree(here, tmp_path):
    for number in range(2):
        Trace(
            [Step(i, 2.0 + number * (i > 6), True, False) for i in (*range(10), *range(5, 8))], name="job"
        ).write(tmp_path / f"run.{number}.jsonl")
    done = here("report", "run.{rank}.jsonl")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "runs/report.html").read_text()
    doctored = here("doctor", "run.{rank}.jsonl")
    for said in (" ".join(done.stdout.split()), page, " ".join(doctored.stdout.split())):
        assert "job was resumed from an older checkpoint, at step 5" in said
        assert "run.1.jsonl differs from the ranks before it in the scale of 1 of its steps" in said
    done = here("report", "run.{rank}.jsonl", "--out", "run.1.jsonl")
    assert "run.1.jsonl is one of the traces to read" in done.stderr
    assert "other.{rank}.jsonl" in here("report", "other.{rank}.jsonl", "run.{rank}.jsonl").stderr


def test_reading_a_long_trace_shows_how_far_it_is(tmp_path, monkeypatch):
    Trace(Step(i, 2.0, True, False) for i in range(30_000)).write(tmp_path / "long.jsonl")
    assert (tmp_path / "long.jsonl").stat().st_size > 2**20
    shown = io.StringIO()
    monkeypatch.setattr(terminal, "out", Console(file=shown, force_terminal=True, width=80))
    assert len(terminal.read_trace(tmp_path / "long.jsonl")) == 30_000
    assert "reading long.jsonl" in shown.getvalue()
    monkeypatch.setattr(terminal, "out", Console(file=(quiet := io.StringIO())))
    terminal.read_trace(tmp_path / "long.jsonl")
    assert quiet.getvalue().strip() == ""


def test_doctor_says_what_is_wrong_and_what_to_write(here, tmp_path):
    simulate(Dynamic(growth_interval=20), Stationary(steps=2000, level=0.0, jitter=0.2)).write(
        tmp_path / "sick.jsonl"
    )
    simulate(Dynamic(), [False] * 3000).write(tmp_path / "sound.jsonl")
    done = here("doctor", "sick.jsonl", "sound.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    sick, _, sound = " ".join(done.stdout.split()).partition("sound.jsonl")
    assert sick.startswith("sick.jsonl warning Oscillating: ")
    assert "Write policy=Dynamic(). then Simulated with the gradient amaxes" in sick
    assert sound.startswith(" fine Healthy: Nothing is wrong with the scale: 0 of 3,000 steps (0 %)")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not (tmp_path / "runs").exists()


def test_dialects_lists_every_dialect(here):
    done = here("dialects")
    assert done.returncode == 0
    for name in ALL:
        assert re.search(rf"^ ?{name.lower()} ", done.stdout, re.MULTILINE), name
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "command",
    ["train", "simulate", "report", "doctor", "inspect", "blame", "tune", "check", "dialects"],
)
def test_help_fits_80_columns_and_shows_no_default_of_python(command, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = here(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "[default: ()]" not in done.stdout
    for name in ("--policy --rule",) if command in ("train", "simulate") else ():
        assert name in done.stdout


def test_every_policy_setting_is_a_flag(tmp_path):
    command = [sys.executable, "-m", "preamp", "train", "--help"]
    text = subprocess.check_output(command, env={**ENVIRONMENT, "COLUMNS": "250"}, text=True)
    settings = {field.name for policy in RULES.values() for field in fields(policy)}
    assert {match.replace("-", "_") for match in re.findall(r"--policy\.([\w-]+) ", text)} == settings - {
        "compat"
    }


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_help_with_the_settings_of_all_policies_fits_on_two_screens(command, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert len(here(command, "--help").stdout.splitlines()) <= 85


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ([], {"preamp": Dynamic()}),
        (["--policy.tolerance", "0.5"], {"preamp": Tolerant(tolerance=0.5)}),
        (["--policy.margin", "2"], {"preamp": Headroom(margin=2)}),
        (["--rule", "Tolerant", "--rule", "head_room"], {"tolerant": Tolerant(), "headroom": Headroom()}),
        (["--policy=Headroom", "--policy.memory", "64"], {"headroom": Headroom(memory=64)}),
        (["--policy", "tf-keras", "--policy", "static"], {"tf_keras": dialects.TF_KERAS, "static": Static()}),
        (["--policy.max-scale", "none"], {"preamp": Dynamic(max_scale=None)}),
        (["--rule", "all"], {re.sub("(?<=[a-z])(?=[A-Z])", "-", k).lower(): v() for k, v in RULES.items()}),
    ],
)
def test_flags_choose_a_rule_and_its_settings(flags, policy, monkeypatch):
    chosen = {}
    monkeypatch.setattr("preamp.cli.comparison.compare", lambda rules, *_: chosen.update(rules))
    assert run_here(["simulate", *flags]) == 0
    assert chosen == policy


NAMES = [*map(kebab, RULES), *map(str.lower, ALL)]


@settings(max_examples=50, deadline=None)
@given(name=st.sampled_from(NAMES), noise=st.text("abcdehlmnoprst-_X1", max_size=3), data=st.data())
def test_a_misspelled_name_is_answered_with_all_names_and_the_nearest_first(name, noise, data):
    place = data.draw(st.integers(0, len(name)))
    wrong = name[:place] + noise + name[place + len(noise) :]
    plain = {re.sub("[-_]", "", one): one for one in NAMES}
    for find, known in ((find_policy, NAMES), (find_dialect, [*map(str.lower, ALL)])):
        key = re.sub("[-_]", "", wrong).lower()
        if plain.get(key) in known:
            find(wrong)
            continue
        with pytest.raises(PreampError) as refused:
            find(wrong)
        listed = str(refused.value).partition("Write one of ")[2].rstrip(".").split(", ")
        assert sorted(listed) == sorted(known)
        (nearest,) = difflib.get_close_matches(key, [re.sub("[-_]", "", one) for one in known], 1, 0.0)
        first, best = (
            difflib.SequenceMatcher(None, one, key).ratio()
            for one in (re.sub("[-_]", "", listed[0]), nearest)
        )
        assert first == best


def test_a_narrow_or_ascii_terminal_shows_whole_cells(tmp_path):
    for changes in ({"COLUMNS": "40"}, {"PYTHONIOENCODING": "ascii"}):
        command = [sys.executable, "-m", "preamp", "simulate", "--dialect", "deepspeed_fused"]
        done = subprocess.run(
            command, cwd=tmp_path, env={**ENVIRONMENT, **changes}, capture_output=True, check=True
        )
        assert b"deepspeed_fused " in done.stdout
        assert b"streak" in done.stdout


@pytest.mark.parametrize(
    ("package", "extra"),
    [("matplotlib", "report"), ("sklearn", "lab"), ("numpy", "report"), ("torch", "torch"), ("rich", "cli")],
)
def test_a_missing_extra_is_named_before_any_work(tmp_path, package, extra):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('absent', name={package!r})")
    command = [sys.executable, "-m", "preamp", "train", "--epochs", "1"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert re.fullmatch(rf"preamp: .*pip install 'preamp\[.*{extra}.*\]'\n", done.stderr)
    assert not (tmp_path / "runs").exists()


JAX_SCRIPT = """
import jax
import jax.numpy as jnp

weight = jnp.ones((4, 4))

def step():
    with jax.named_scope("layer"):
        return jnp.exp(weight[:2] @ weight)

def decide():
    return 1 if step()[0, 0] > 0 else 0
"""


def test_inspect_traces_a_function_of_jax(here, tmp_path):
    (tmp_path / "train.py").write_text(JAX_SCRIPT)
    line = 1 + JAX_SCRIPT.splitlines().index("        return jnp.exp(weight[:2] @ weight)")
    for arguments, dtypes in (
        ((), "f32 → bf16"),
        (("--dtype", "float16", "--emulate"), "f32 → f16"),
    ):
        done = here("inspect", "train.py:step", "--framework", "jax", *arguments)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"dot_general +layer +train.py:{line} +1 +{dtypes}", done.stdout)
        assert max(map(len, done.stdout.splitlines())) <= 80
        page = (tmp_path / "runs/inspect.html").read_text()
        assert f'<td data-label="source">train.py:{line}</td>' in page
        assert "jax, " in page


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["train.py:decide"], "train.py:decide cannot be traced: "),
        (["train.py:step", "--device", "cuda"], "--device cuda has no effect with --framework jax"),
        (["train.py:step", "--dtype", "float8_e5m2"], "Choose from"),
        (["train.py:other"], "train.py has no function 'other'"),
    ],
)
def test_inspect_says_what_is_wrong_with_a_function_of_jax(arguments, problem, here, tmp_path):
    (tmp_path / "train.py").write_text(JAX_SCRIPT)
    done = here("inspect", *arguments, "--framework", "jax")
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["doctor", "report"])
def test_a_folder_is_answered_with_the_traces_in_it(command, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name in ("b.jsonl", "a/trace.jsonl", "notes.txt"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).write_text("")
    assert run_here([command, str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert f"is a folder. Write its traces: {tmp_path}/runs/a/trace.jsonl {tmp_path}/runs/b.jsonl\n" in said
    assert run_here([command, str(tmp_path / "empty")]) == 2
    assert "no trace in it" in capsys.readouterr().err
