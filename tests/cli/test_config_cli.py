"""`preamp train` and `preamp simulate` with a DeepSpeed configuration."""

from __future__ import annotations

import json
import re
import warnings

import pytest

from tests.systems.test_config import DOCUMENT


@pytest.fixture
def preamp(tmp_path, monkeypatch, capsys):
    """Return what runs a command here and says its status, output and complaints."""
    from preamp.cli.app import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command replaces it
    (tmp_path / "ds.json").write_text(DOCUMENT)
    (tmp_path / "static.json").write_text(
        '{"fp16": {"enabled": true, "loss_scale": 128}, "train_batch_size": "auto"}'
    )
    (tmp_path / "bf16.json").write_text('{"bf16": {"enabled": true, "check_grad_overflow": false}}')
    return lambda *arguments: (run(arguments), *capsys.readouterr())


def test_simulate_plays_the_rule_of_a_configuration(preamp):
    status, shown, _ = preamp("simulate", "--steps", "50", "--config", "ds.json", "--config", "static.json")
    assert status == 0
    assert re.findall(r"(\w+)\.json .*(2\S+)  ▁+", shown) == [("ds", "2³²"), ("static", "2⁷")]
    assert "preamp " not in shown


def test_train_uses_the_precision_and_the_rule_of_a_configuration(preamp, tmp_path):
    for name, runs in (
        ("static", [("float32", None), ("float16", None), ("float16", "Static(scale=128.0)")]),
        ("bf16", [("float32", None), ("bfloat16", None)]),
    ):
        assert preamp("train", "--epochs", "1", "--config", f"{name}.json", "--out", name)[0] == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert [(run["precision"], run["policy"]) for run in summary["runs"]] == runs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--config", "ds.json", "--dialect", "torch"], "--dialect torch and --config ds.json"),
        (["train", "--config", "ds.json", "--policy.scale", "2"], "--policy.* and --config ds.json"),
        (["train", "--config", "bf16.json", "--precision", "float16"], "bf16.json does not scale the loss"),
        (["simulate", "--config", "bf16.json"], "bf16.json does not scale the loss"),
        (["simulate", "--config", "absent.json"], "absent.json: No such file"),
        (["simulate", "--config", "bad.json"], "bad.json: fp16.hysteresis: 0 is not"),
    ],
)
def test_a_configuration_of_no_use_is_one_line_and_status_2(preamp, tmp_path, arguments, words):
    (tmp_path / "bad.json").write_text('{"fp16": {"hysteresis": 0}}')
    status, _, complaint = preamp(*arguments)
    assert status == 2
    assert words in complaint
    assert complaint.count("\n") == 1
