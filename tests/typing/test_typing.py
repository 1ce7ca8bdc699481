"""What type checkers say to users of the installed package: nothing to `use_*.py`, an error to each mistake.

A mistake has a `type: ignore` with its reason, and one that is not needed is an error itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import public_api

HERE = Path(__file__).parent
CALLERS = sorted(path.name for path in HERE.glob("use_*.py"))
PYRIGHT = [sys.executable, "-m", "pyright", "--outputjson"]


def run(*words: str) -> str:
    """Run a checker as in a folder of a user's own, and return what it printed."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": beside, "VIRTUAL_ENV": sys.prefix}
    return subprocess.run(
        words, cwd=HERE, env=environment, capture_output=True, text=True, check=False
    ).stdout


def test_mypy_says_nothing() -> None:
    """With the options and the cache of `make typecheck`, where PyTorch has been read already."""
    root = HERE.parents[1]
    options = ["--config-file", str(root / "pyproject.toml"), "--cache-dir", str(root / ".mypy_cache")]
    said = run(sys.executable, "-m", "mypy", *options, *CALLERS)
    assert said.startswith("Success: no issues found in 6 source files"), said


def test_pyright_says_nothing() -> None:
    said = json.loads(run(*PYRIGHT, "--pythonpath", sys.executable, "--project", str(HERE)))
    assert not said["generalDiagnostics"], json.dumps(said["generalDiagnostics"], indent=1)
    assert said["summary"]["filesAnalyzed"] == len(CALLERS)


def test_every_public_type_is_written_down() -> None:
    """Else two checkers may infer two. Classes of libraries without types are bases of some of ours."""
    said = json.loads(run(*PYRIGHT, "--verifytypes", "preamp", "--ignoreexternal"))
    public = [
        f"{found.module}.{found.name}" for found in public_api.public().values() if found and found.node
    ]
    symbols = [symbol for symbol in said["typeCompleteness"]["symbols"] if is_one_of(symbol["name"], public)]
    unsaid = [symbol for symbol in symbols if not symbol["isTypeKnown"] and not has_untyped_base(symbol)]
    assert len(symbols) > len(public)
    assert not unsaid, json.dumps(unsaid, indent=1)


def is_one_of(name: str, public: list[str]) -> bool:
    """Return whether a name is public, or a member of what is."""
    return any(f"{name}.".startswith(f"{path}.") for path in public)


def has_untyped_base(symbol: dict[str, Any]) -> bool:
    """Return whether that is all that is unknown."""
    return all(
        problem["message"] in ("Type of base class unknown", "Type of metaclass unknown")
        for problem in symbol["diagnostics"] or [{"message": ""}]
    )
