"""`preamp check`: the table, a user's step in each precision, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import preamp.cli.lab.compared as compared
from preamp.cli.lab.compared import PrecisionRun, sentences, table
from preamp.machine import REFERENCE, Advice, MachineReport, PrecisionRow, Product

SCRIPT = """
import os
import random
from pathlib import Path

import numpy
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(factor=1.0):
    print("not shown")
    x = torch.randn(64, 64)
    loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    (loss * factor).backward()
    optimizer.step()
    with Path("calls.txt").open("a") as file:
        file.write(f"{os.getpid()} {random.random()} {numpy.random.rand()} {float(x[0, 0])}\\n")
    return loss


def starved():
    return step(1e-7)


def only_float32():
    if torch.is_autocast_enabled("cpu"):
        if torch.get_autocast_dtype("cpu") is torch.bfloat16:
            raise TypeError("no autocast here")
        os._exit(3)
    return 1.5


def several():
    return torch.ones(3)


def nothing():
    pass


def fails():
    raise KeyError("data")
"""


def machine(verdict="emulated"):
    half = Product(0.02 if verdict == "emulated" else 3.0, claimed=verdict == "native")
    rows = [
        PrecisionRow("cpu", name, dict.fromkeys(("matmul", "conv"), product), "works")
        for name, product in {"float32": REFERENCE, "bfloat16": REFERENCE, "float16": half}.items()
    ]
    return MachineReport(rows, [], [Advice("cpu", "float32", "so.", "loss = ...")], {}, 1.0)


@pytest.fixture
def check(here, monkeypatch):
    """Return what runs the command over a script, without measuring the machine."""
    monkeypatch.setattr("preamp.torch.check", lambda devices: machine())
    Path("train.py").write_text(SCRIPT)
    return lambda *arguments: here("check", *arguments)


def rows(text):
    found = text.partition("in each precision")[2]
    return {
        line.split("  ")[0].strip(): line for line in found.splitlines() if re.match(r" ?(b?float)", line)
    }


def test_it_prints_the_table_of_the_machine(here):
    done = here("check", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["device", "precision", "matmul", "conv", "attention", "training"]
    assert {tuple(line.split()[:2]) for line in lines[1:4]} == {
        ("cpu", "float32"),
        ("cpu", "bfloat16"),
        ("cpu", "float16"),
    }
    assert re.search(r"^cpu: torch.compile with autocast works\.$", done.stdout, re.MULTILINE)
    assert re.search(r"^Use (float32|bfloat16|float16) on cpu: ", done.stdout, re.MULTILINE)


def test_a_step_runs_in_each_precision_from_the_same_seed_in_a_fresh_process(check):
    done = check("--model", "train.py:step", "--calls", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "train.py:step in each precision, 3 calls:" in done.stdout
    assert "not shown" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = rows(done.stdout)
    assert list(found) == ["float32", "bfloat16", "float16, emulated"]
    for line in found.values():
        assert re.search(r" 2\.\d+ +2\.\d+ +(-|0\.\d\d%) +\d+\.\d\dx", line), line
    calls = [line.split() for line in Path("calls.txt").read_text().splitlines()]
    assert len({pid for pid, *_ in calls}) == 3
    numbers = [tuple(rest) for _, *rest in calls]
    assert numbers[:3] == numbers[3:6] == numbers[6:]


def test_gradients_that_underflow_show_in_the_loss(check):
    done = check("--model", "train.py:starved", "--calls", "20")
    _, brain, half = (line.split()[-2].rstrip("%") for line in rows(done.stdout).values())
    assert float(brain) < 0.5 < float(half)


def test_a_precision_that_fails_is_a_row(check):
    done = check("--model", "train.py:only_float32", "--calls", "2")
    assert done.returncode == 0
    assert rows(done.stdout)["bfloat16"].split() == ["bfloat16", "-", "-", "-", "-"]
    assert "bfloat16: TypeError: no autocast here." in done.stdout
    assert "float16, emulated: its process ended with status 3 before it was done." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "train.py:step2"], "train.py has no function 'step2'"),
        (["--model", "train"], "'train' does not name a function. Write MODULE:FUNCTION"),
        (["--model", "other.py:step"], "There is no file other.py"),
        (
            ["--model", "train.py:several"],
            "train.py:several returned a Tensor. Write a function that",
        ),
        (["--model", "train.py:nothing"], "train.py:nothing returned no number. Write a function that"),
        (
            ["--model", "train.py:fails"],
            "train.py:fails fails in float32, without autocast: KeyError: 'data'.",
        ),
        (["--calls", "3"], "--calls 3 has no effect without --model"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_machine_is_measured(arguments, problem, check, monkeypatch):
    monkeypatch.setattr("preamp.torch.check", lambda devices: pytest.fail("measured"))
    done = check(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert done.stderr.startswith("preamp: ")
    assert done.stderr.count("\n") == 1


def test_a_device_that_is_not_there_is_refused(here):
    done = here("check", "--device", "gpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert "device='gpu' is not a device type of PyTorch" in done.stderr


def test_float16_is_emulated_only_where_it_is_slow(monkeypatch):
    monkeypatch.setattr(compared, "_run_apart", lambda run, *_: run)
    reference = PrecisionRun("float32", losses=[1.0], seconds=[1.0], device="cpu")
    for verdict, emulate in {"native": False, "emulated": True}.items():
        runs = compared.run_in_low_precision(reference, "a:b", "torch", machine(verdict))
        assert [run.emulate for run in runs] == [False, emulate]


def test_the_table_of_losses():
    reference = PrecisionRun("float32", losses=[2.0, 1.0], seconds=[9.0, 1.0])
    other = PrecisionRun("float16", losses=[2.0, 1.01], seconds=[9.0, 0.5])
    bad = PrecisionRun("bfloat16", losses=[2.0, float("inf")], seconds=[9.0, 1.0])
    assert [list(line.values()) for line in table([reference, other, bad])] == [
        ["float32", "2", "1", "-", "1.00x"],
        ["float16", "2", "1.01", "1.00%", "0.50x"],
        ["bfloat16", "2", "inf", "not finite", "1.00x"],
    ]
    assert sentences([reference, other, bad]) == ["bfloat16: the loss is inf in call 2."]


JAX_SCRIPT = """
import jax.numpy as jnp

weight = jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64)


def loss():
    return jnp.mean((weight @ weight) ** 2)
"""


def test_it_checks_jax(here, monkeypatch):
    done = here("check", "--framework", "jax")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert re.search(r"^cpu +bfloat16 .* works$", done.stdout, re.MULTILINE)
    assert re.search(r"^cpu +float16 .* works$", done.stdout, re.MULTILINE)
    done = here("check", "--framework", "jax", "--device", "tpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert "JAX has no device type 'tpu' here. Write one that it has: cpu." in done.stderr
    monkeypatch.setattr("preamp.jax.check", lambda devices: machine())
    Path("train.py").write_text(JAX_SCRIPT)
    done = here("check", "--framework", "jax", "--model", "train.py:loss", "--calls", "2")
    assert (done.returncode, done.stderr) == (0, "")
    differences = [line.split()[-2] for line in rows(done.stdout).values()]
    assert differences[0] == "-"
    assert all(float(one.rstrip("%")) < 5 for one in differences[1:])


def test_what_a_run_writes_can_be_read_again():
    run = PrecisionRun("float16", True, [1.0, float("nan")], [0.1, 0.1], "cpu")
    read = PrecisionRun(**json.loads(json.dumps(compared.asdict(run))))
    assert read.losses[0] == 1.0
    assert read.name == "float16, emulated"


@pytest.mark.parametrize("arguments", [[], ["--model", "train.py:loss"]])
@pytest.mark.parametrize("package", ["torch", "jax"])
def test_a_missing_framework_is_named(package, arguments, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('absent', name={package!r})")
    (tmp_path / "train.py").write_text("def loss(): return 1.0")
    done = subprocess.run(
        [sys.executable, "-m", "preamp", "check", "--framework", package, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"preamp: {package} is missing. Run: pip install 'preamp[{package}]'\n"
