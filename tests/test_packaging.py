"""What is built to be handed on: a wheel of the package alone, a source archive of everything."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest

import preamp

from . import fresh_machine

ROOT = fresh_machine.ROOT
NAME = f"preamp-{preamp.__version__}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive from the tree, and the wheel from the source archive."""
    out = tmp_path_factory.mktemp("built")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return out


@pytest.fixture
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl")


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    package = [path.relative_to(ROOT / "src") for path in (ROOT / "src/preamp").rglob("*") if path.is_file()]
    about = [f"{NAME}.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")]
    files = [str(path) for path in package if path.suffix != ".pyc"]
    assert "preamp/py.typed" in files
    assert sorted(wheel.namelist()) == sorted([*files, *about, f"{NAME}.dist-info/licenses/LICENSE"])


def test_the_wheel_alone_needs_nothing(wheel: zipfile.ZipFile) -> None:
    about = message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))
    needed = about.get_all("Requires-Dist") or []
    assert needed
    assert all("extra ==" in line for line in needed)
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Version"] == preamp.__version__


def test_the_version_is_said_alike_everywhere() -> None:
    dates = said(r"date-released: (\S+)", "CITATION.cff")
    assert said(r"version: (\S+)", "CITATION.cff") == [preamp.__version__]
    assert said(r"Version: (\S+)", "r/preamp/DESCRIPTION") == [preamp.__version__]
    assert said(r"## \[(\d\S+)\] - (\S+)", "CHANGELOG.md")[0] == (preamp.__version__, *dates)


def said(line: str, file: str) -> list[Any]:
    """Return what the lines of a file say that look so."""
    return re.findall(f"^{line}$", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone knows what belongs to it")
def test_the_source_archive_holds_what_a_clone_does(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        held = {member.name.removeprefix(f"{NAME}/") for member in archive if member.isfile()}
    assert held == {*fresh_machine.tracked(), "PKG-INFO"}
