"""Files made to do harm: code, and texts that take for ever to search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import preamp.systems.deepspeed_config as config
from preamp import ConfigError, Trace


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
    with pytest.raises(ConfigError, match="a very large int"):
        config.load({"fp16": {"loss_scale": 10**5000}})
