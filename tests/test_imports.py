"""What importing preamp costs, and that its lists of names are true."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from typing import Any

import pytest

import preamp
from preamp import errors

HEAVY = {
    *["numpy", "torch", "jax", "jaxlib", "optax", "flax", "keras", "tf_keras", "tensorflow", "deepspeed"],
    *["matplotlib", "rich", "cyclopts", "sklearn"],
}
ROOMS = {module.name for module in pkgutil.iter_modules(preamp.__path__)}
MODULES = [
    module.name
    for module in pkgutil.walk_packages(preamp.__path__, "preamp.")
    if not module.ispkg and module.name not in ("preamp.__main__", "preamp.torch.triton_kernels")
]  # the last is for Triton, which only PyTorch for CUDA brings


def test_importing_preamp_loads_no_framework() -> None:
    code = "import sys, preamp; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "preamp" in loaded
    assert not HEAVY & set(loaded)


def test_keras_without_its_backend_says_which_to_write() -> None:
    code = "import sys; sys.modules['tensorflow'] = None; import preamp.keras"
    environment = os.environ | {"KERAS_BACKEND": "tensorflow"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stderr.endswith(
        "MissingExtra: Keras is to compute with tensorflow, which is missing. Run: pip install tensorflow, "
        "or write before Keras is imported: os.environ['KERAS_BACKEND'] = 'jax'\n"
    )


def test_the_heavy_names_are_names_of_something_installed() -> None:
    """Else a misspelt one would hide what is loaded."""
    assert all(importlib.util.find_spec(name) for name in HEAVY)


def is_definition(value: Any) -> bool:
    """Return whether a value knows which module it is from; constants do not."""
    return inspect.isfunction(value) or inspect.isclass(value) or isinstance(value, preamp.dialects.Dialect)


def defined_in(module: Any) -> set[str]:
    """Return the public functions, classes and dialects that a module defines itself."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and is_definition(value) and value.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", MODULES)
def test_all_is_what_a_module_defines(name: str) -> None:
    module = importlib.import_module(name)
    constants = {name for name in module.__all__ if not is_definition(getattr(module, name))}
    assert set(module.__all__) == defined_in(module) | constants
    assert len(module.__all__) == len(set(module.__all__))


MODULES_OFFERED = {"casting", "dialects", "processes"}


def test_preamp_exports_what_it_imports_and_nothing_else() -> None:
    public = {name for name in vars(preamp) if not name.startswith("_")}
    rooms = {name for name in public if inspect.ismodule(getattr(preamp, name))} - MODULES_OFFERED
    exported = set(preamp.__all__) - {"__version__"}
    assert exported == {name for name in public - rooms if name != "annotations"}
    assert len(preamp.__all__) == len(exported) + 1
    assert rooms <= ROOMS
    for name in exported - MODULES_OFFERED:
        home = getattr(preamp, name).__module__
        assert name in importlib.import_module(home).__all__
        assert getattr(importlib.import_module(home), name) is getattr(preamp, name)


def test_the_tree_of_errors_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__
    _, tree, _ = errors.__doc__.split("```")
    drawn: dict[str, tuple[str | None, str | None]] = {}
    root = None
    for branch, name, base in re.findall(r"^([├└]── )?(\w+) *(?:\((\w+)\))?", tree, re.MULTILINE):
        root = root if branch else name
        drawn[name] = (root if branch else None, base or None)
    real = defined_in(errors)
    assert set(drawn) - {"UserWarning"} == real == set(errors.__all__)
    for name in real:
        parent, base = drawn[name]
        expected = [parent or "Exception", *([base] if base else [])]
        assert [cls.__name__ for cls in getattr(errors, name).__bases__] == expected
