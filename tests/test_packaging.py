"""What is built to be handed on: a wheel of the package alone, a source archive of everything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

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
    """R has no .dev0. What comes after 0.1.0 is there 0.1.0.9000, as R's own tools write it."""
    version, dates = preamp.__version__, said(r"date-released: (\S+)", "CITATION.cff")
    top = said(r"## \[(\S+)\].*", "CHANGELOG.md")[0]
    released, date = said(r"## \[(\d\S+)\] - (\S+)", "CHANGELOG.md")[0]
    in_r = said(r"Version: (\S+)", "r/preamp/DESCRIPTION")
    assert said(r"version: (\S+)", "CITATION.cff") == [version]
    if Version(version).is_devrelease:
        assert Version(released) < Version(version)
        assert (top, dates, in_r) == ("Unreleased", [], [f"{released}.9000"])
    else:
        assert (top, released, dates, in_r) == (version, version, [date], [version])


def test_constraints_pin_what_the_project_names_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"].values()
    extras = project["project"]["optional-dependencies"].values()
    lines = [line for lines in (*groups, *extras) for line in lines if isinstance(line, str)]
    asked = [Requirement(line) for line in [*lines, *project["build-system"]["requires"]]]
    pinned = [Requirement(line) for line in said(r"([^#\s].*)", "constraints.txt")]
    assert {pin.name.lower() for pin in pinned} == {need.name.lower() for need in asked}
    for pin in pinned:
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert all(exact.version in need.specifier for need in asked if need.name.lower() == pin.name.lower())


def test_classifiers_name_every_python_that_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = fresh_machine.supported()
    assert project["project"]["requires-python"] == f">={names[0]}"
    assert project["tool"]["ruff"]["target-version"] == f"py{names[0].replace('.', '')}"
    assert f"Python {', '.join(names[:-1])} or {names[-1]}, pip and make" in (ROOT / "README.md").read_text()


def test_install_lines_work_in_a_clone() -> None:
    """Until preamp is on a package index, when `preamp` takes the place of `.` and this test turns round."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "r").rglob("*.md")]:
        text = page.read_text()
        assert not re.findall(r"pip install '?preamp|'preamp\[", text), page
        for asked in re.findall(r"'\.\[(.+?)\]'", text):
            assert {*asked.split(",")} <= {*extras}, (page, asked)
    for extra in fresh_machine.BROUGHT:
        command, _ = fresh_machine.installing(extra)
        assert command[:2] == ["pip", "install"]
        assert len(command) == 3, command


def make_environment(folder: Path, runs: dict[str, bool], *words: str) -> subprocess.CompletedProcess[str]:
    """Let make choose among Pythons of which some fail, as pyenv's shims do and those without ensurepip."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("make", "sed", "sh"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, fine in runs.items():
        (folder / f"python{name}").write_text(f"#!/bin/sh\nexit {0 if fine else 127}\n")
        (folder / f"python{name}").chmod(0o755)
    asked = [str(folder / "make"), ".venv/bin/python", *words]
    return subprocess.run(asked, cwd=folder, env={"PATH": str(folder)}, capture_output=True, text=True)


@pytest.mark.parametrize("number", range(1, 8))
def test_make_takes_the_newest_python_that_runs(tmp_path: Path, number: int) -> None:
    names = fresh_machine.supported()
    runs = {name: bool(number >> place & 1) for place, name in enumerate(names)}
    newest = [name for name in names if runs[name]][-1]
    assert f"\npython{newest} -m venv .venv\n" in "\n" + make_environment(tmp_path, runs).stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "None of python3.11 python3.12 python3.13 runs here and can make an environment."),
        (["PYTHON=python3.9"], "PYTHON=python3.9 is older than 3.11, or lacks venv or ensurepip."),
    ],
)
def test_make_tells_what_is_missing(tmp_path: Path, words: list[str], told: str) -> None:
    done = make_environment(tmp_path, dict.fromkeys([*fresh_machine.supported(), "3.9"], False), *words)
    assert done.returncode
    assert told in done.stderr
    assert "apt install python3-venv" in done.stderr
    assert "-m venv" not in done.stdout


def said(line: str, file: str) -> list[Any]:
    """Return what the lines of a file say that look so."""
    return re.findall(f"^{line}$", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone knows what belongs to it")
def test_the_source_archive_holds_what_a_clone_does(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        held = {member.name.removeprefix(f"{NAME}/") for member in archive if member.isfile()}
    assert held == {*fresh_machine.tracked(), "PKG-INFO"}


@pytest.mark.slow
def test_the_source_archive_passes_its_tests(built: Path, tmp_path: Path) -> None:
    """Those of the rooms and pages, and of what is built from it."""
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    files = ["tests/test_imports.py", "tests/docs/test_pages.py", "tests/test_packaging.py"]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    there = {"cwd": tmp_path / NAME, "env": os.environ | {"PYTHONPATH": "src"}}
    done = subprocess.run(words, **there, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
