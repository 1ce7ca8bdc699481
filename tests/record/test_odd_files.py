"""What the commands say of files that are not what they expect: one line that names the file."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preamp import Step, Trace

STEPS = [Step(index, 4.0, finite=True, skipped=False, loss=0.5) for index in range(5)]


@pytest.fixture
def lines(tmp_path: Path) -> bytes:
    """Return the content of a trace."""
    Trace(STEPS).write(tmp_path / "good.jsonl")
    return (tmp_path / "good.jsonl").read_bytes()


READABLE: dict[str, Callable[[bytes], bytes]] = {
    "Windows line ends": lambda lines: lines.replace(b"\n", b"\r\n"),
    "a byte order mark": lambda lines: b"\xef\xbb\xbf" + lines,
    "both": lambda lines: b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"),
    "an empty last line": lambda lines: lines + b"\n",
    "a last line of blanks": lambda lines: lines + b" \t",
    "empty last lines": lambda lines: lines.replace(b"\n", b"\r\n") + b"\r\n\n  \n\r\n",
    "no last line end": lambda lines: lines.removesuffix(b"\n"),
}


@pytest.mark.parametrize("kind", READABLE)
def test_a_trace_that_an_editor_or_another_system_has_saved_is_read(
    kind: str, lines: bytes, tmp_path: Path, here: Any
) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(READABLE[kind](lines))
    assert list(Trace.read(path)) == STEPS
    for command in ("doctor", "report"):
        done = here(command, "odd.jsonl")
        assert (done.returncode, done.stderr) == (0, "")
    with Trace(path, mode="append") as trace:
        trace(STEPS[0]._replace(index=5))
    assert list(Trace.read(path)) == [*STEPS, STEPS[0]._replace(index=5)]


UNREADABLE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "blank": lambda _: b" \n",
    "gzip": gzip.compress,
    "binary": lambda _: bytes(range(256)) * 9,
    "array": lambda _: b"[1, 2]\n",
    "array of lines": lambda lines: b"[" + b",".join(lines.splitlines()) + b"]\n",
    "number": lambda _: b"3\n",
    "UTF-16": lambda lines: lines.decode().encode("utf-16"),
    "zeros": lambda lines: bytes(len(lines)),
    "deep": lambda _: b"[" * 100_000,
    "another JSON": lambda _: b'{"steps": []}\n',
    "zip": lambda _: b"PK\x03\x04" + bytes(99),
}


ARGUMENTS = {
    "doctor": ["doctor", "odd.bin"],
    "report": ["report", "odd.bin"],
    "simulate": ["simulate", "--trace", "odd.bin"],
    "inspect": ["inspect", "odd.bin:f"],
    "inspect.py": ["inspect", "odd.py:f"],
}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *(("doctor", kind) for kind in UNREADABLE),
        *(
            (command, kind)
            for command in ARGUMENTS
            for kind in ("empty", "gzip", "zeros")
            if command != "doctor"
        ),
    ],
)
def test_another_file_is_refused_by_name(
    command: str, kind: str, lines: bytes, tmp_path: Path, here: Any
) -> None:
    name = "odd.py" if command == "inspect.py" else "odd.bin"
    (tmp_path / name).write_bytes(UNREADABLE[kind](lines))
    done = here(*ARGUMENTS[command])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("preamp: ")
    assert name in done.stderr
    if kind == "gzip" and not command.startswith("inspect"):
        assert f"is compressed with gzip. Unpack it first: gunzip -k {name}" in done.stderr


@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_folder_or_a_link_to_itself_is_refused_by_name(command: str, tmp_path: Path, here: Any) -> None:
    path = tmp_path / ("odd.py" if command == "inspect.py" else "odd.bin")
    for make in (path.mkdir, lambda: path.symlink_to(path)):
        make()
        done = here(*ARGUMENTS[command])
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert path.name in done.stderr
        path.unlink() if path.is_symlink() else path.rmdir()


@pytest.mark.parametrize("name", ["a..b", ".a", "..", ":", "/nowhere/x"])
def test_what_cannot_be_a_module_is_refused_by_name(name: str, here: Any) -> None:
    done = here("inspect", f"{name}:f")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert name in done.stderr


def test_a_mistake_in_a_users_file_is_told_with_its_line(tmp_path: Path, here: Any) -> None:
    (tmp_path / "odd.py").write_text("import math\ndef f(:\n")
    assert "odd.py, line 2: this is not Python (invalid syntax)" in here("inspect", "odd.py:f").stderr
    (tmp_path / "imported.py").write_text("def f(:\n")
    (tmp_path / "odd.py").write_text("import imported\n")
    with pytest.raises(SyntaxError, match=r"imported\.py"):  # with its traceback
        here("inspect", "odd.py:f")
