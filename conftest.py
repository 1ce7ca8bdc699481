"""Every example in README.md, docs/ and docstrings runs as a test.

A `python` block and a docstring's `>>>` run as they are; a block below the comment `<!--- file: train.py -->`
is written to that file. In a `console` block every line after `$ ` runs and must succeed, and its output must
contain the lines printed below it. Each file runs in a folder of its own. What is for one backend of Keras
runs in the process that has it.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import SkipTest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two busy cores and spinning threads: a hundred times slower
os.environ.setdefault(
    "KERAS_BACKEND", "tensorflow"
)  # one for the whole process; the Makefile has the others run
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# What XLA compiles for one test or process it need not compile for the next.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import pytest
from sybil import Example, Sybil
from sybil.document import PythonDocStringDocument
from sybil.evaluators.python import PythonEvaluator
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.parsers.rest import DocTestParser

from preamp.load_order import before_tensorflow

before_tensorflow()  # which tests import by themselves

HERE = Path(__file__).parent


class PythonBlockParser(CodeBlockParser):
    """Blocks of Python: they run, or are written to the file that the comment above them names."""

    language = "python"
    run = PythonEvaluator()

    def evaluate(self, example: Example) -> str | None:
        named = re.search(r"<!--- file: (\S+) -->\s*$", example.document.text[: example.region.start])
        if named is None:
            return self.run(example)
        Path(named[1]).write_text(example.parsed)
        return None


class ConsoleBlockParser(CodeBlockParser):
    """Blocks of shell commands and what they print."""

    language = "console"

    def evaluate(self, example: Example) -> str | None:
        commands: list[tuple[str, list[str]]] = []
        for line in example.parsed.splitlines():
            if line.startswith("$ "):
                commands.append((line.removeprefix("$ "), []))
            elif line.strip():
                commands[-1][1].append(line.strip())
        return next((problem for command in commands if (problem := run(*command))), None)


def run(command: str, expected: list[str]) -> str | None:
    """Run a command; return what is wrong with it, or None."""
    words = (
        [sys.executable, "-m", *shlex.split(command)]
        if command.startswith("preamp")
        else shlex.split(command)
    )
    beside = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, env=beside)
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    missing = [line for line in expected if line != "..." and " ".join(line.split()) not in printed]
    if done.returncode or missing:
        return f"{command}: exit {done.returncode}, missing {missing} in:\n{done.stdout}{done.stderr}"
    return None


def setup(namespace: dict[str, Any]) -> None:
    namespace["home"], namespace["folder"] = Path.cwd(), tempfile.TemporaryDirectory()
    os.chdir(namespace["folder"].name)


def teardown(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["home"])
    namespace["folder"].cleanup()
    if "keras" in sys.modules:
        sys.modules["keras"].config.set_dtype_policy("float32")


def traceback_of(item: SybilItem, error: pytest.ExceptionInfo[BaseException]) -> Any:
    """Return what is shown of an error: of one outside of the examples, as a file left open, all of it."""
    try:
        return of_examples(item, error)
    except IndexError:
        return error.traceback


of_examples, SybilItem._traceback_filter = SybilItem._traceback_filter, traceback_of


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail a test that leaves an autocast region of PyTorch's or a mode behind: others would fail for it."""
    yield
    if torch := sys.modules.get("torch"):
        left = autocast_state(torch)
        assert left == (1, False, 0), f"(depth + 1, autocast on, function modes) is {left} after the test"


def autocast_state(torch: Any) -> tuple[int, bool, int]:
    """Return how deep this thread is in regions of autocast plus one, whether it is on, and the modes."""
    depth = torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting():  # restored, for the tests that follow
        pass
    return depth, torch.is_autocast_enabled("cpu"), torch._C._len_torch_function_stack()


pytest_collect_file = (
    Sybil(
        parsers=[PythonBlockParser(), ConsoleBlockParser(), SkipParser()],
        patterns=["README.md", "docs/*.md", "docs/*/*.md"],
        setup=setup,
        teardown=teardown,
        path=str(HERE),
    )
    + Sybil(
        parsers=[DocTestParser()],
        patterns=["src/preamp/*.py", "src/preamp/*/*.py", "src/preamp/*/*/*.py"],
        path=str(HERE),
        document_types={".py": PythonDocStringDocument},
    )
).pytest()


# The recipes that `make test` runs, one for each of the large adapters; `make test-slow` has the others.
RECIPES = {"pytorch_loop.md", "optax.md", "keras_fit.md"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most recipes to the slow tests: whole trainings in other libraries, of what the pages show."""
    for item in items:
        is_page = item.path.suffix == ".md"  # tests/recipes has none
        if is_page and item.path.parent.name == "recipes" and item.path.name not in RECIPES:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Keep what is there before a file's first test, some millions of objects, out of garbage collection.

    Examples use what is above them on their page: that runs here too where another process has taken it.
    """
    if getattr(item.session, "file_of_the_last_test", None) != item.path:
        item.session.file_of_the_last_test = item.path  # type: ignore[attr-defined]
        gc.collect()
        gc.freeze()
    yield
    if isinstance(item, SybilItem):
        document, here = item.example.document, item.example.start
        done = vars(document).setdefault("done", set())
        for example in document.examples():
            if example.start <= here and example.start not in done:
                done.add(example.start)
                if example.start < here:
                    with suppress(SkipTest):
                        example.evaluate()
