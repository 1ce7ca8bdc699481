"""What docs/adding.md adds, put into a copy of the tree: a policy, a dialect and a framework."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
BLOCKS = {
    path: code
    for path, code in re.findall(
        r"```python\n# (\S+\.py)\n(.*?)```", (HERE / "docs/adding.md").read_text(), re.DOTALL
    )
}
POLICY, REGISTRY, DIALECT, FRAMEWORK, ROW = BLOCKS

OF_A_DIALECT = """
from preamp import dialects
from preamp.cli.app import run
from preamp.cli.flags import find_dialect

example = find_dialect("example")
assert example is dialects.ALL["EXAMPLE"] is dialects.EXAMPLE
assert example.start().scale == 1.0
run(["dialects"])
"""

OF_A_POLICY = """
from hypothesis import find, settings

from preamp import Trace, simulate
from preamp.cli.app import run
from preamp.doctor import diagnose
from preamp.policy.registry import from_json, to_json
from preamp.policy.slow_start import SlowStart
from tests import strategies

policy = SlowStart(first_interval=3)
assert from_json(to_json(policy, repr, {}.get), {}.get) == policy
simulate(policy, [False] * 500).write("run.jsonl")
read = diagnose(Trace.read("run.jsonl"))
assert read.record.policy == policy
enough = settings(database=None, max_examples=10_000)  # 100 may miss one rule of five
drawn = find(strategies.policies, lambda one: isinstance(one, SlowStart), settings=enough)
assert isinstance(drawn, SlowStart)
run(["simulate", "--policy.first-interval", "4", "--overflow-rate", "0", "--steps", "40"])
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources and tests, with the additions of the page."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("src", "tests"):
        shutil.copytree(HERE / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, code in BLOCKS.items():
        insert(folder / name, code)
    return folder


def insert(path: Path, code: str) -> None:
    """Make a file of some code, or put it before the last statement of the file that is there."""
    path.parent.mkdir(exist_ok=True)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    at = ast.parse("".join(lines)).body[-1].lineno - 1 if lines else 0
    path.write_text("".join([*lines[:at], code, *lines[at:]]))


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(tree / "src"), str(tree)])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def failed(tree: Path, *words: str) -> set[str]:
    """Run tests of the copy; return the names of those that failed."""
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(tree)]
    done = run(tree, "-m", "pytest", *options, *words)
    assert re.search(r"\d+ (passed|failed)", done.stdout), done.stdout + done.stderr
    return set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))


def test_the_page_adds_two_files() -> None:
    new = [name for name in BLOCKS if not (HERE / name).exists()]
    assert new == [POLICY, FRAMEWORK]
    assert [Path(name).parent.name for name in new] == ["policy", "numpy"]


def test_a_policy_is_one_file_and_one_line_beside_its_import(tree: Path) -> None:
    assert len(ast.parse(BLOCKS[REGISTRY]).body) == 2
    done = run(tree, "-c", OF_A_POLICY)
    assert done.returncode == 0, done.stderr
    assert "2²⁶" in done.stdout


def test_a_dialect_is_one_function(tree: Path) -> None:
    done = run(tree, "-c", OF_A_DIALECT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ ?example +Example GradScaler, example 1\.0 +As PyTorch's", done.stdout, re.MULTILINE)


def test_a_framework_is_one_folder_and_one_row(tree: Path) -> None:
    assert failed(tree, "tests/test_conformance.py", "-k", "numpy") == set()
