"""`preamp rehearse`, and the flag --recipe of blame and tune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preamp.autocasting.tables import Casting
from preamp.cli.app import app
from preamp.errors import PreampError
from preamp.recipes.values import CONSTANTS
from tests.cli.inside import PrecisionRun, rehearsed

TRAIN = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def step():
    x = torch.randn(64, 64)
    loss = nn.functional.cross_entropy(model(x), x[:, :32].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

def fails():
    raise KeyError("data")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        status = app(list(arguments), result_action="return_value")
        return status, capsys.readouterr().out

    return run


def test_recipes_train_from_the_same_start_on_the_same_batches(run: Any) -> None:
    table = {"edits": [{"modules": "2", "rule": "high"}]}
    Path("table.json").write_text(json.dumps(table))
    arguments = ("--recipes", "nvfp4", "--steps", "5", "--seeds", "1", "--casting", "table.json")
    status, text = run("rehearse", "train.py:step", *arguments, "--json", "losses.json")
    assert status == 0
    assert "NVFP4 loses most in fprop of 0" in text
    found = json.loads(Path("losses.json").read_text())
    (high,), (low,) = found["bfloat16"]["losses"], found["NVFP4"]["losses"]
    assert len(high) == len(low) == 5
    assert low[0] == pytest.approx(high[0], rel=0.05)
    assert low != high
    assert found["NVFP4"]["to_bfloat16"] == pytest.approx([low[-1] / high[-1] - 1])
    rows = found["NVFP4"]["found"]["blame"]["rows"]
    assert {row["runs"] for row in rows if row["product"] and row["module"] == "0"} == {"e2m1, e2m1"}
    assert {row["runs"] for row in rows if row["product"] and row["module"] == "2"} == {"bfloat16"}
    page = Path("runs/rehearse.html").read_text()
    assert "train.py:step in recipes" in page
    assert page.count("<svg") == 1


def test_a_function_that_fails_is_told(run: Any) -> None:
    with pytest.raises(PreampError, match=r"train\.py:fails fails in bfloat16: KeyError"):
        run("rehearse", "train.py:fails", "--recipes", "MXFP8", "--steps", "1", "--seeds", "1")


def test_blame_and_tune_take_a_recipe(run: Any) -> None:
    status, text = run("blame", "train.py:step", "--recipe", "mxfp8")
    assert status == 0
    assert "in bf16" in text
    assert "dgrad" in text
    assert "loses in MXFP8" in Path("runs/blame.html").read_text()
    _, text = run("tune", "train.py:step", "--recipe", "MXFP8", "--error", "0.03")
    assert "recipe=recipes.MXFP8, casting=table, model=model" in text
    products = Casting.from_dict(json.loads(Path("casting.json").read_text()))
    assert any(rule.startswith("MXFP8 without") for rule in products.modules.values())
    _, text = run("tune", "train.py:step", "--recipe", "MXFP8", "--error", "0.045", "--export", "te")
    assert "te.autocast(recipe=recipe.MXFP8BlockScaling())" in text
    whole = Casting.from_dict(json.loads(Path("casting.json").read_text()))
    assert set(whole.modules.values()) == {"high"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("blame", "train.py:step", "--recipe", "mxfp9"), "--recipe: 'mxfp9' is not a recipe"),
        (("rehearse", "train.py:step", "--recipes", "mxfp9"), "--recipes: 'mxfp9' is not a recipe"),
        (("tune", "train.py:step", "--export", "te"), "Write --recipe MXFP8 as well"),
        (
            ("tune", "train.py:step", "--recipe", "MXFP8", "--calls", "3"),
            "Write preamp rehearse train.py:step --recipes MXFP8",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused(run: Any, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(PreampError, match=said):
        run(*arguments)


def test_distances_are_those_of_the_same_seed() -> None:
    losses = {("", 0): 2.0, ("", 1): 4.0, ("MXFP8", 0): 2.2, ("MXFP8", 1): 4.0}
    runs = [
        PrecisionRun("bfloat16", losses=[9.0, loss], label=recipe or "bfloat16", recipe=recipe, seed=seed)
        for (recipe, seed), loss in losses.items()
    ]
    runs.append(PrecisionRun("bfloat16", label="NVFP4", recipe="NVFP4", problem="it broke", losses=[9.0]))
    high, mx, nv = rehearsed.table(runs)
    assert (high["to bfloat16"], mx["to bfloat16"]) == ("-", "+0.00% to +10.00%")
    assert nv["last losses"] == "nan"
    assert list(rehearsed.sentences(runs)) == ["NVFP4, seed 0: it broke."]


def test_all_recipes_are_those_of_the_module() -> None:
    assert rehearsed.named_recipes(["all", "mxfp8"]) == list(CONSTANTS)
    assert rehearsed.named_recipes(["mxfp8,NVFP4-plain"]) == ["MXFP8", "NVFP4_PLAIN"]
