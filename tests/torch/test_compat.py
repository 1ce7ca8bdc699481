"""The releases of PyTorch that `preamp.torch` works with."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import preamp.torch
from preamp import MissingExtra

FOLDER = Path(preamp.__file__).parent
FILES = sorted(set((FOLDER / "torch").rglob("*.py")) | {FOLDER / "arrays" / "torch.py"})


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_an_older_release_is_refused_at_import() -> None:
    found = "2.5.0a0+872d972e41.nv24.8"
    done = python(f"import torch; torch.__version__ = {found!r}; import preamp.torch")
    assert done.stderr.endswith(
        f"MissingExtra: torch {found} is too old: preamp works with 2.6 and newer. "
        "Run: pip install 'torch>=2.6'\n"
    )


@pytest.mark.parametrize(
    "found", ["2.6.0", "2.6.0a0+ecf3bae40a.nv25.1", "2.10.0.dev20251101", "2.13.0+cpu", "3"]
)
def test_numbers_are_compared_as_numbers(found: str) -> None:
    MissingExtra.refuse_older("torch", found, "2.6")
    with pytest.raises(MissingExtra, match=r"torch 1\.13\.1 is too old"):
        MissingExtra.refuse_older("torch", "1.13.1", "2.6")
    with pytest.raises(MissingExtra, match=r"works with 12\.1 and newer"):
        MissingExtra.refuse_older("torch", found, "12.1")


def test_importing_it_loads_neither_the_compiler_nor_triton() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import preamp.torch; print(*set(sys.modules) - before)"
    )
    new = python(code).stdout.split()
    assert "preamp.arrays.torch_compat" in new
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch._inductor", "triton"))]


def private(file: Path) -> Iterator[str]:
    """Yield the private names of PyTorch that a file asks modules for."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            names = [name for name in (ast.unparse(node),) if name.startswith("torch.")]
        else:
            names = []
        yield from (name for name in names if any(re.match("_(?!_)", part) for part in name.split(".")))


def test_private_names_of_pytorch_stand_in_one_module() -> None:
    assert {str(file): names for file in FILES if (names := list(private(file)))} == {}
    assert list(private(FOLDER / "arrays" / "torch_compat.py"))  # it would find them
