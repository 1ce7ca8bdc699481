"""`preamp blame` and `preamp tune`: from a user's file to the table, the report and the file of edits."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from preamp.autocasting.tables import Casting
from preamp.cli.app import app
from preamp.errors import PreampError
from tests.cli.inside import PrecisionRun, run_in_process, tuned

MODELS = """
import torch
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.down(1e6 * self.up(x).relu().float()).float() / 1e6

net, x, y = Net(), torch.randn(32, 16), torch.randn(32, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")

def step():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss

half = Net().half()
half.up.weight.data /= 1e4
half_optimizer = torch.optim.SGD(half.parameters(), 1e-4)

def in_half():
    half_optimizer.zero_grad()
    loss = nn.functional.mse_loss(half(x.to(half.up.weight.dtype)).float(), y)
    loss.backward()
    half_optimizer.step()
    return loss

def lowered():
    return torch.sum(net(x).half(), dtype=torch.bfloat16)

def drawing():
    generator.manual_seed(generator.initial_seed() + 1)
    return nn.functional.mse_loss(net(torch.randn(32, 16, generator=generator)).float(), y)

class Lower(nn.Module):
    def forward(self, x):
        return nn.functional.layer_norm(x.half(), (16,))

needing = nn.Sequential(nn.Linear(16, 16), Lower(), nn.Linear(16, 4))
criterion = nn.MSELoss()

def needs_autocast():
    return criterion(needing(x).float(), y)

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), Net()

whole = Whole()

def by_parts():
    loss = criterion(whole.head(whole.body(x)).float(), y)
    torch.autograd.backward(loss)
    raise AssertionError("it ran on after its backward pass")

generator = torch.Generator()

def grown():
    return net(x)
"""
IN_JAX = """
import jax.numpy as jnp

def step():
    def loss(w, x):
        return jnp.mean(((1e4 * x) @ w) ** 2) / 1e8
    return loss, jnp.ones((16, 4)), jnp.ones((8, 16))

def wrong():
    return jnp.ones(3)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "steps.py").write_text(MODELS)
    (tmp_path / "in_jax.py").write_text(IN_JAX)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = app(list(arguments), result_action="return_value")
        return status, capsys.readouterr().out

    return run


def test_blame_names_the_operator_and_writes_a_page_and_json(run):
    status, text = run("blame", "steps.py:step", "--dtype", "float16", "--json", "rows.json")
    assert status == 0
    assert "*  linear    fwd   down" in text
    assert "overflow" in text
    rows = json.loads(Path("rows.json").read_text())["rows"]
    assert rows[0]["module"] == "down"
    assert rows[0]["effect"] == "inf"
    page = Path("runs/blame.html").read_text()
    assert "<svg" in page
    assert "linear in down" in page


def test_blame_folds_by_module_and_takes_a_table(run):
    Path("table.json").write_text(json.dumps({"edits": [{"modules": ["down"], "rule": "float32"}]}))
    _, text = run("blame", "steps.py:step", "--dtype", "float16", "--casting", "table.json", "--by", "module")
    assert "*  " not in text
    assert "No operator loses more than is expected in float16." in text


def test_blame_compares_jax(run):
    _, text = run("blame", "in_jax.py:step", "--framework", "jax", "--dtype", "float16")
    assert "overflow" in text
    assert "*  dot_general" in text


def test_tune_writes_a_table_that_trains(run):
    status, text = run("tune", "steps.py:step", "--dtype", "float16", "--calls", "3")
    assert status == 0
    assert "float32: down" in text
    assert Casting.from_dict(json.loads(Path("casting.json").read_text())) == Casting().module(
        "down", "float32"
    )
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines() if "float16," in line}
    assert "nan" in rows["float16, table before"] or "inf" in rows["float16, table before"]
    assert "%" in rows["float16, tuned"]
    assert "casts to low precision" not in text


def test_tune_says_that_steps_were_not_the_same(run):
    _, text = run("tune", "steps.py:drawing", "--dtype", "float16")
    assert "the function does not do the same each time" in " ".join(text.split())
    _, text = run("tune", "steps.py:step", "--dtype", "float16")
    assert "the same each time" not in " ".join(text.split())


def test_a_model_in_half_is_compared_with_one_in_float32(tmp_path, monkeypatch):
    """The reference is what the program computes with float32 weights, which its optimizer updates."""
    (tmp_path / "steps.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    reference = PrecisionRun("float32", finds_model=True)
    done = run_in_process(reference, "steps.py:in_half", "torch", "cpu", 5)
    assert (done.problem, done.widened) == ("", "float16")
    (tmp_path / "steps.py").write_text(
        MODELS.replace("half_optimizer = ", "half = half.float()\nhalf_optimizer = ")
    )
    truly = run_in_process(PrecisionRun("float32"), "steps.py:in_half", "torch", "cpu", 5)
    assert done.losses == truly.losses


def test_tune_says_that_the_weights_were_made_float32(monkeypatch):
    run = PrecisionRun("float32", widened="float16")
    assert (
        "Weights of the model are float16. In the float32 run they were made float32"
        in tuned.sentences([run])[0]
    )
    run.problem = "RuntimeError: dtypes"
    monkeypatch.setattr(tuned, "run_in_process", lambda *_: run)
    found = SimpleNamespace(before=SimpleNamespace(dtype="float16"), casting=Casting())
    with pytest.raises(
        PreampError, match=r"fails in float32.* Weights of its model are float16.*weight.dtype"
    ):
        tuned.train_with("steps.py:of_data", "torch", found, None, 3)


@pytest.mark.parametrize("table", [{}, {"edits": [{"modules": ["0"], "rule": "float32"}]}])
@pytest.mark.parametrize("command", ["blame", "tune", "inspect"])
def test_a_step_that_runs_only_under_autocast_is_run_under_it(run, command, table):
    Path("table.json").write_text(json.dumps(table))
    flags = ["--casting", "table.json", "--dtype", "float16"]
    _, text = run(command, "steps.py:needs_autocast", *flags)
    assert "linear" in text or "No rule" in text


@pytest.mark.parametrize(
    ("step", "name", "edited"), [("by_parts", "whole", "head.down"), ("step", "net", "down")]
)
def test_the_lines_that_tune_prints_run_as_they_are(run, step, name, edited):
    _, text = run("tune", f"steps.py:{step}", "--dtype", "float16", "--out", "t.json")
    program = {name: runpy.run_path("steps.py")[name]}
    exec(text.partition("To train with it:")[2], program)
    assert [edit["modules"] for edit in program["table"].to_dict()["edits"]] == [[edited]]
    assert text.rstrip().endswith(f"model={name}): ...")


def test_the_float32_run_is_float32_and_names_the_lines_that_ask_for_another(run):
    as_written = run_in_process(PrecisionRun("float32"), "steps.py:lowered", "torch", "cpu", 1)
    Path("steps.py").write_text(MODELS.replace("(net(x).half(), dtype=torch.bfloat16)", "(net(x))"))
    truly = run_in_process(PrecisionRun("float32"), "steps.py:lowered", "torch", "cpu", 1)
    assert as_written.losses == truly.losses
    assert (len(as_written.casts), truly.casts) == (1, [])


def test_tune_tunes_jax(run):
    flags = ["--framework", "jax", "--dtype", "float16", "--out", "x/t.json"]
    status, text = run("tune", "in_jax.py:step", *flags)
    assert status == 0
    assert json.loads(Path("x/t.json").read_text())["edits"]
    loss, *arguments = runpy.run_path("in_jax.py")["step"]()
    program = {"loss": loss}
    exec(text.partition("To train with it:")[2], program)
    assert program["loss"](*arguments).dtype == "float32"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["blame", "in_jax.py:wrong", "--framework", "jax"], "return loss_fn, params, batch"),
        (["blame", "steps.py:grown"], "with one element"),
        (["blame", "steps.py:none"], "has no function"),
        (["tune", "in_jax.py:step", "--framework", "jax", "--calls", "3"], "--calls is for PyTorch"),
        (["tune", "in_jax.py:wrong", "--framework", "jax"], "return loss_fn, params, batch"),
    ],
)
def test_what_cannot_be_done_is_said(run, arguments, problem):
    with pytest.raises(PreampError, match=problem):
        run(*arguments)
