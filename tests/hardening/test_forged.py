"""Files made to do harm: code, bombs that grow when they are read, and texts that take for ever to search."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from preamp import ConfigError, PreampError, Trace, dialects
from preamp.doctor.advice import recorded_policy
from preamp.systems import deepspeed_config as config
from preamp.systems.convert import convert

STATE = dialects.TORCH.dump(dialects.TORCH.start())


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.victim}",)


class Eval(Code):
    """The same by way of a builtin."""

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.victim)!r}, 'w')",)


def carry(source: Path, origin: Any = dialects.TORCH) -> str:
    with pytest.raises(PreampError) as refused:
        convert(source, origin, source.with_name("out.json"), dialects.MEGATRON)
    assert not source.with_name("out.json").exists()
    assert str(source) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", [Code, Eval])
@pytest.mark.parametrize("place", ["beside", "inside"])
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, kind: Any, place: str, zipped: bool) -> None:
    victim, source = tmp_path / "victim", tmp_path / "forged.pt"
    forged = {"scaler": STATE, "x": kind(victim)} if place == "beside" else {**STATE, "scale": kind(victim)}
    torch.save(forged, source, _use_new_zipfile_serialization=zipped)
    carry(source)
    source.write_bytes(pickle.dumps(forged))
    carry(source)
    assert not victim.exists()


def test_what_is_small_in_a_file_and_large_when_shown_is_named_in_short(tmp_path: Path) -> None:
    bomb: Any = [0]
    for _ in range(60):
        bomb = [bomb, bomb]
    source = tmp_path / "bomb.pt"
    for entries, origin in (
        ({**STATE, "scale": bomb}, dialects.TORCH),
        ({"loss_scaler0": {"loss_scale": bomb, "unskipped": 0}} | {"loss_scaler1": bomb}, dialects.APEX),
    ):
        torch.save(entries, source)
        assert len(carry(source, origin)) < 1000


def test_an_archive_that_grows_when_it_is_read_is_refused(tmp_path: Path) -> None:
    for name in ("model.weights.h5", "archive/data.pkl"):
        source = tmp_path / "bomb.keras"
        with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, b"0" * 2**27)
        assert source.stat().st_size < 2**20
        assert "unpacked" in carry(source)


@pytest.mark.parametrize("unit", ["/*a", '\\"', '"a', "a ,", "# ", "[{"])
def test_no_text_takes_for_ever_to_read_as_a_configuration(tmp_path: Path, unit: str) -> None:
    """Three hundred thousand pieces: what looks at each pair of them would take hours."""
    path = tmp_path / "long.json"
    path.write_text(unit * 300_000)
    with pytest.raises(ConfigError, match=r"long\.json"):
        config.load(path)


@pytest.mark.parametrize("comment", ["/* never closed", "/*/", "/*"])
def test_a_comment_without_an_end_is_refused(tmp_path: Path, comment: str) -> None:
    path = tmp_path / "open.json"
    path.write_text(json.dumps({"train_batch_size": 8}) + comment)
    with pytest.raises(ConfigError, match="line 1, column 24"):
        config.load(path)


@pytest.mark.parametrize(
    "text",
    [
        "-" * 200_000 + "1",
        "(" * 200_000,
        "Dynamic(" + "-" * 100_000 + "1)",
        "Dynamic('\\d')",
        "Dynamic(\0)",
        "Dynamic(**{'x': 1})",
        "__import__('os').abort()",
        "Dynamic(init_scale=__import__('os').abort())",
    ],
)
def test_a_rule_in_a_record_is_read_and_never_run(text: str) -> None:
    assert recorded_policy(text) is None


def test_names_in_a_trace_do_not_command_the_terminal(tmp_path: Path, here: Any) -> None:
    path = tmp_path / "trace.jsonl"
    with Trace(path=path, name="\x1b]0;owned\x07\x1b[31mred") as trace:
        trace.stop("\x1b[2Jgone")
    for command in ("doctor", "report"):
        done = here(command, str(path))
        assert done.returncode == 0
        assert "red" in done.stdout
        assert "\x1b" not in done.stdout


def test_a_number_too_long_to_print_is_refused_all_the_same() -> None:
    huge = 10**5000
    for entries in ({**STATE, "scale": huge}, {**STATE, "growth_interval": -huge}):
        with pytest.raises(PreampError, match="a very large int"):
            dialects.TORCH.load(entries)
    with pytest.raises(ConfigError, match="a very large int"):
        config.load({"fp16": {"loss_scale": huge}})
