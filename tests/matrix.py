"""The tests of each adapter with other releases of its framework: `make matrix`.

    python tests/matrix.py [ROW ...] [--tests FILE] [--list] [--keep] [--folder FOLDER] [--page]

Each row is an environment of its own, made by uv from PyPI alone, with preamp in it as a user installs it.
What came of it goes into docs/versions.json, row by row, and docs/versions.md is written from that. An
environment is removed when its row is done, which `--keep` prevents: one with PyTorch takes 5 GB. What was
downloaded stays in the folder, as much again for each release of PyTorch: `rm -r FOLDER/uv` removes it, and
without `--folder` FOLDER is ~/.cache/preamp-matrix. The logs of the tests lie in it too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import versions_page

__all__ = ["ROWS", "Outcome", "Row", "main", "outcome_of"]

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "preamp-matrix"
# What uv and the tests see of the user's environment: where programs are, and what some networks need.
KEPT = re.compile(r"(PATH|LANG|TMPDIR|SSL_CERT_FILE|SSL_CERT_DIR|(?i:(https?|all|no)_proxy))$")
TOOLS = {"pytest", "pytest-xdist", "hypothesis", "sybil"}  # of the group of tests
LIMIT = 2 * 60 * 60  # seconds that the tests of a row may take
VERSIONS = """
import importlib.metadata, json, platform, preamp, sys
names = {name.lower().replace("_", "-"): version for name, version in (
    (found.metadata["Name"], found.version) for found in importlib.metadata.distributions())}
versions = {name: names[name] for name in sys.argv[1:] if name in names}
print(json.dumps([preamp.__file__, platform.python_version(), versions]))
"""
NAMED = ("torch", "triton", "jax", "optax", "flax", "keras", "tensorflow", "tf-keras", "numpy")

CORE = (
    "tests/policy/test_frameworks.py",
    "tests/policy/test_headroom.py",
    "tests/record/test_exponents.py",
    "tests/record/test_trace.py",
)


@dataclass(frozen=True)
class Row:
    """An environment and what runs in it.

    Attributes:
        name: the framework and its release.
        python: which Python, such as "3.11".
        extra: the extra of pyproject.toml, whose lower bounds the releases have to meet.
        requires: the releases, and what else the tests compare with.
        tests: files and folders, as patterns.
        variables: of the environment.
    """

    name: str
    python: str
    extra: str
    requires: tuple[str, ...]
    tests: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> list[str]:
        """Return which files and folders of tests there are."""
        found = [path for pattern in self.tests for path in sorted(ROOT.glob(pattern))]
        return [str(path.relative_to(ROOT)) for path in found]


def _torch(release: str, python: str, *requires: str) -> Row:
    tests = ("tests/torch/test_*.py", "tests/recipes", *CORE)
    # Of the peers of recipes not torchao, which PyTorch 2.6 cannot import, and not qwix, which brings JAX.
    requires = (f"torch=={release}.*", "ml_dtypes", "gfloat", *requires)
    return Row(f"torch-{release}", python, "torch", requires, tests)


def _jax(release: str, python: str) -> Row:
    requires = (f"jax=={release}.*", "flax", "equinox", "flatbuffers")
    return Row(f"jax-{release}", python, "jax", requires, ("tests/jax", *CORE))


def _keras(release: str, python: str) -> Row:
    tests, variables = ("tests/keras",), {"KERAS_BACKEND": "jax", "KERAS_IN_FULL": "jax"}
    return Row(f"keras-{release}", python, "keras", (f"keras=={release}.*",), tests, variables=variables)


def _tensorflow(release: str, keras: str, python: str) -> Row:
    requires = (f"tensorflow=={release}.*", f"tf_keras=={release}.*", f"keras=={keras}.*", "tensorboard")
    tests = ("tests/tensorflow", "tests/keras")
    variables = {"KERAS_BACKEND": "tensorflow", "KERAS_IN_FULL": "tensorflow"}
    return Row(f"tensorflow-{release}", python, "tensorflow", requires, tests, variables=variables)


ROWS = (
    _torch("2.6", "3.11", "setuptools"),  # which its Triton imports, and does not ask for
    _torch("2.8", "3.12"),
    _torch("2.10", "3.12"),
    _torch("2.12", "3.13"),
    _torch("2.13", "3.11"),
    _torch("2.14", "3.12"),
    _torch("2.15", "3.13"),
    _jax("0.6", "3.11"),
    _jax("0.8", "3.12"),
    _jax("0.10", "3.11"),
    _jax("0.12", "3.13"),
    _keras("3.10", "3.11"),
    _keras("3.15", "3.12"),
    _tensorflow("2.18", "3.10", "3.11"),
    _tensorflow("2.21", "3.15", "3.13"),
)


class NotMade(Exception):
    """The environment of a row could not be made."""


@dataclass(frozen=True)
class Outcome:
    """What came of the tests of a row.

    Attributes:
        passed: how many passed.
        failed: the names of those that failed, or could not be collected.
        skipped: how many were skipped, for which reason.
    """

    passed: int
    failed: tuple[str, ...]
    skipped: Counter[str]


def outcome_of(report: Path, status: int) -> Outcome:
    """Return what pytest's report says.

    Args:
        report: the file in JUnit's format. There may be none.
        status: how pytest ended.
    """
    passed, failed, skipped = 0, [], Counter[str]()
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        reason = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif reason is not None:
            skipped[reason.get("message", "")] += 1
        else:
            passed += 1
    if status not in (0, 1) or (status == 1 and not failed):
        failed.append(f"pytest ended with status {status}")
    return Outcome(passed, tuple(dict.fromkeys(failed)), skipped)


class Matrix:
    """The folder where environments are made, with what uv downloads."""

    def __init__(self, folder: Path, keep: bool) -> None:
        self.folder, self.keep = folder, keep
        self.home = folder / "home"  # neither uv nor Keras reads the user's settings
        self.home.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
        self.environment = kept | {"HOME": str(self.home), "UV_CACHE_DIR": str(folder / "uv")}

    def uv(self, *words: str) -> None:
        """Run uv, without any setting of the machine."""
        command = [sys.executable, "-m", "uv", *words, "--no-config", "--no-python-downloads", "--quiet"]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise NotMade(f"uv {' '.join(words)}:\n{done.stderr.strip()}")

    def wheel(self) -> Path:
        """Build preamp, and return the file."""
        built = self.folder / "wheel"
        shutil.rmtree(built, ignore_errors=True)
        self.uv("build", "--wheel", "--out-dir", str(built))
        return next(built.glob("*.whl"))

    def run(self, row: Row, wheel: Path) -> dict[str, Any]:
        """Make a row's environment and run its tests there; return what there is to remember of it."""
        made = self.folder / row.name
        try:
            return self._run(row, wheel, made)
        finally:
            if not self.keep:
                shutil.rmtree(made, ignore_errors=True)

    def _run(self, row: Row, wheel: Path, made: Path) -> dict[str, Any]:
        self.uv("venv", "--clear", "--no-project", "--python", _interpreter(row.python), str(made))
        package = f"preamp[{row.extra},cli,report,lab] @ {wheel.as_uri()}"
        self.uv("pip", "install", "--python", str(made / "bin/python"), package, *_tools(), *row.requires)
        where, python, versions = json.loads(
            subprocess.run(
                [str(made / "bin/python"), "-c", VERSIONS, *NAMED],
                **self._settings(row, made),
                check=True,
                stdout=subprocess.PIPE,
            ).stdout
        )
        if not Path(where).is_relative_to(made):
            raise NotMade(f"preamp is {where}, which is not what was installed")
        report, log = self.folder / f"{row.name}.xml", self.folder / f"{row.name}.log"
        report.unlink(missing_ok=True)
        words = [str(made / "bin/pytest"), "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "-q"]
        words += [f"--junitxml={report}", "--continue-on-collection-errors", *row.files()]
        begun = time.monotonic()
        with log.open("w") as output:
            try:
                status = subprocess.run(
                    words,
                    **self._settings(row, made),
                    stdout=output,
                    stderr=output,
                    timeout=LIMIT,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = -1
        seconds = round(time.monotonic() - begun)
        outcome = outcome_of(report, status)
        with log.open("a") as output:
            for reason, count in outcome.skipped.most_common():
                print(f"skipped {count}: {reason}", file=output)
            for name in outcome.failed:
                print("failed", name, file=output)
                print("  failed", name)
        if outcome.failed:
            print(f"  more in {log}")
        return {
            "date": date.today().isoformat(),
            "commit": _commit(),
            "machine": versions_page.machine(),
            "python": python,
            "versions": versions,
            "passed": outcome.passed,
            "failed": len(outcome.failed),
            "skipped": outcome.skipped.total(),
            "seconds": seconds,
        }

    def _settings(self, row: Row, made: Path) -> dict[str, Any]:
        """Return how a process of a row is run: with its programs first, and no path to the sources."""
        path = f"{made / 'bin'}{os.pathsep}{self.environment.get('PATH', os.defpath)}"
        return {"cwd": ROOT, "text": True, "env": self.environment | row.variables | {"PATH": path}}


def _interpreter(python: str) -> str:
    """Return a Python of a release: one that runs, which not everything does that is called so."""
    folders = [Path(folder) for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)]
    folders += sorted(Path("~/.pyenv/versions").expanduser().glob(f"{python}.*/bin"), reverse=True)
    for found in (folder / f"python{python}" for folder in folders):
        words = [str(found), "-c", "import sys; print(sys.base_prefix)"]
        if found.exists():
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            at = Path(done.stdout.strip()) / "bin" / found.name
            if not done.returncode and at.exists():
                return str(at)  # not the environment of someone else
    raise NotMade(f"Python {python} is not here")


def _tools() -> list[str]:
    """Return what the tests run with, at the releases that pyproject.toml asks for."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["test"]
    lines = (line for line in group if isinstance(line, str))
    return [line for line in lines if re.split(r"[<>=\[ ]", line)[0] in TOOLS]


def _commit() -> str:
    """Return what was tested, as git calls it; what this program writes is no change."""
    asked = ["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", ":!docs/versions.*"]
    head, changes = (
        subprocess.run(words, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
        for words in asked
    )
    return f"{head}, changed" if changes else head


def _table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines that are printed at the end."""
    yield f"{'row':18}{'Python':8}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>8}  versions"
    for name, row in results.items():
        counts = "".join(f"{row[count]:8,}" for count in ("passed", "failed", "skipped", "seconds"))
        versions = " ".join(f"{package} {version}" for package, version in row["versions"].items())
        yield f"{name:18}{row['python']:8}{counts}  {versions}"


def run_all(rows: Sequence[Row], matrix: Matrix, remember: bool) -> int:
    """Run rows one after the other; return the exit status."""
    results, not_made = dict[str, dict[str, Any]](), list[str]()
    try:
        wheel = matrix.wheel()
    except NotMade as error:
        print(error)
        return 1
    for row in rows:
        print(f"{row.name}: Python {row.python}, {', '.join(row.requires)}", flush=True)
        try:
            results[row.name] = matrix.run(row, wheel)
        except NotMade as error:
            not_made.append(f"{row.name} was not made. {error}")
            print(f"  {not_made[-1]}", flush=True)
            continue
        if remember:
            versions_page.remember(row.name, results[row.name])
            versions_page.write(ROWS)
    print(*_table(results), *not_made, sep="\n")
    return int(bool(not_made) or any(row["failed"] for row in results.values()))


def main() -> None:
    """Run the rows that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="such as torch-2.6; without one, all")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="run these; docs stay as they are")
    parser.add_argument("--list", action="store_true", help="print the rows, and run nothing")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    parser.add_argument("--folder", type=Path, default=CACHE, help="for environments, downloads and logs")
    parser.add_argument("--page", action="store_true", help="write docs/versions.md again, and run nothing")
    given = parser.parse_args()
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in given.rows if name not in known]:
        parser.error(f"no row is called {', '.join(unknown)}. There are {', '.join(known)}.")
    rows = [known[name] for name in given.rows] or list(ROWS)
    if given.tests:
        rows = [replace(row, tests=tuple(given.tests)) for row in rows]
    if given.list:
        for row in rows:
            print(f"{row.name:18}Python {row.python:7}{' '.join(row.requires)}")
    elif given.page:
        versions_page.write(ROWS)
    else:
        sys.exit(run_all(rows, Matrix(given.folder.expanduser().resolve(), given.keep), not given.tests))


if __name__ == "__main__":
    main()
