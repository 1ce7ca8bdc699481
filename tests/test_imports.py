"""What importing preamp costs, and that its lists of names are true."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
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
    if not module.ispkg and module.name != "preamp.__main__"
]


def source(name: str) -> str:
    """Return the text of a module's file."""
    return Path(preamp.__path__[0], *name.split(".")[1:]).with_suffix(".py").read_text()


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, check=False)


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
        "MissingExtra: Keras is set to compute with tensorflow, which is not installed. "
        "Run: pip install tensorflow, "
        "or write before Keras is imported: os.environ['KERAS_BACKEND'] = 'jax'\n"
    )


# Stands before all that finds modules: notes that triton or TensorFlow is asked for, and hides TensorFlow.
ASKED_FOR = """
import sys
asked_for = []
class Noting:
    def find_spec(name, path=None, target=None):
        if name in ("triton", "tensorflow") and name not in asked_for:
            asked_for.append(name)
        if name == "tensorflow":
            raise ModuleNotFoundError("no tensorflow here", name=name)
sys.meta_path.insert(0, Noting)
try:
    {statement}
except ImportError:
    print(*asked_for)
"""
LOADING_TENSORFLOW = {
    "preamp.tensorflow": "import preamp.tensorflow",
    "preamp.arrays.tensorflow": "import preamp.arrays.tensorflow",
    "preamp.keras": "import preamp.keras",
}


@pytest.mark.parametrize("statement", LOADING_TENSORFLOW.values(), ids=LOADING_TENSORFLOW)
def test_triton_is_loaded_before_tensorflow(statement: str) -> None:
    if "keras" in statement:
        pytest.importorskip("keras")
    done = run(ASKED_FOR.format(statement=statement), KERAS_BACKEND="tensorflow")
    assert done.stdout == "triton tensorflow\n", done.stderr


def test_triton_is_not_loaded_where_tensorflow_is_not() -> None:
    pytest.importorskip("jax")
    pytest.importorskip("keras")
    done = run(ASKED_FOR.format(statement="import preamp.keras; raise ImportError"), KERAS_BACKEND="jax")
    assert done.stdout == "\n", done.stderr


def test_what_is_loaded_stays_as_it_is() -> None:
    """Once TensorFlow is loaded, triton must not be."""
    code = "import preamp.load_order as order; sys.modules['tensorflow'] = sys; order.before_tensorflow()"
    done = run(ASKED_FOR.format(statement=f"{code}; raise ImportError"))
    assert done.stdout == "\n", done.stderr


def test_keras_is_not_to_load_triton_after_tensorflow(tmp_path: Path) -> None:
    """Where triton is found, which is not imported: an empty file does."""
    (tmp_path / "triton.py").touch()
    code = "import sys; sys.path[:0] = sys.argv[1:]; sys.modules['tensorflow'] = sys; import preamp.keras"
    done = run(code, str(tmp_path), KERAS_BACKEND="torch")
    assert done.stderr.endswith("Write import triton before TensorFlow is imported.\n")
    assert "preamp.errors.UsageError: KERAS_BACKEND='torch', and TensorFlow is loaded already" in done.stderr


def test_pytorch_after_tensorflow_warns_of_triton(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "triton.py").touch()
    code = "import sys; sys.path[:0] = sys.argv[1:]; sys.modules['tensorflow'] = sys{}\nimport preamp.torch"
    done = run(code.format(""), str(tmp_path))
    assert done.returncode == 0
    assert "<string>:2: RuntimeWarning: TensorFlow was imported before triton, which PyTorch" in done.stderr
    in_order = run(code.format("; import triton"), str(tmp_path))
    assert (in_order.returncode, in_order.stderr) == (0, "")


STUBS = """
import sys, types
for name in ("torch", "jax", "optax", "keras", "tensorflow"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__version__ = "99.0" if name != sys.argv[1] else "0.1.9"
"""


@pytest.mark.parametrize(
    ("package", "room"),
    [("torch", "torch"), ("jax", "jax"), ("optax", "jax"), ("keras", "keras"), ("tensorflow", "tensorflow")],
)
def test_a_release_older_than_the_extra_asks_for_is_refused(package: str, room: str) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    asked = dict(line.split(">=") for line in project["optional-dependencies"][room])[package]
    done = run(f"{STUBS}import preamp.{room}", package)
    assert done.stderr.endswith(
        f"MissingExtra: {package} 0.1.9 is too old: preamp works with {asked} and newer. "
        f"Run: pip install '{package}>={asked}'\n"
    )


NEEDED = {
    **{"torch": "torch", "jax": "jax", "keras": "keras", "tensorflow": "tensorflow", "deepspeed": "torch"},
    **{"report": "matplotlib", "cli.app": "cyclopts", "cli.lab.data": "numpy"},
}
CRASHED_ONCE = {frozenset(("torch", "keras")), frozenset(("torch", "tensorflow"))}
WITH_TRITON = importlib.util.find_spec("triton") is not None  # without it there is nothing to crash


def pairs() -> Iterator[Any]:
    """Yield two rooms and Keras's backend: all are slow but those that have crashed and could again."""
    for pair in itertools.permutations(NEEDED, 2):
        for backend in ("tensorflow", "jax", "torch") if {"keras", "tensorflow"} & {*pair} else ("jax",):
            is_quick = WITH_TRITON and frozenset(pair) in CRASHED_ONCE and backend == "tensorflow"
            yield pytest.param(*pair, backend, marks=[] if is_quick else [pytest.mark.slow])


USED = """
if "torch" in sys.modules:  # which loads its compiler, and so triton, with the first optimizer
    import torch
    torch.optim.SGD([torch.ones(1, requires_grad=True)])
"""


@pytest.mark.parametrize(("first", "second", "backend"), list(pairs()))
def test_rooms_can_be_imported_in_any_order(first: str, second: str, backend: str) -> None:
    for name in {NEEDED[first], NEEDED[second], *([backend] if "keras" in (first, second) else [])} - {None}:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = run(f"import preamp.{first}, preamp.{second}, sys{USED}print('well')", KERAS_BACKEND=backend)
    assert done.stdout == "well\n", (done.returncode, done.stderr)


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


@pytest.mark.parametrize("name", [name for name in MODULES if "\n__all__ = " in source(name)])
def test_all_is_what_a_module_defines(name: str) -> None:
    module = importlib.import_module(name)
    values = {name: getattr(module, name) for name in module.__all__}
    constants = {name for name, value in values.items() if not is_definition(value)}
    assert set(module.__all__) == defined_in(module) | constants
    assert len(module.__all__) == len(set(module.__all__))


MODULES_OFFERED = {"casting", "dialects", "guards", "processes"}


def test_preamp_exports_what_it_imports_and_nothing_else() -> None:
    public = {name for name in vars(preamp) if not name.startswith("_")}
    rooms = {name for name in public if inspect.ismodule(getattr(preamp, name))} - MODULES_OFFERED
    exported = set(preamp.__all__) - {"__version__"}
    assert exported == {name for name in public - rooms if name != "annotations"}
    assert len(preamp.__all__) == len(exported) + 1
    assert rooms <= ROOMS
    for name in exported - MODULES_OFFERED:
        home = getattr(preamp, name).__module__
        assert getattr(importlib.import_module(home), name) is getattr(preamp, name)


@pytest.mark.parametrize("name", sorted(MODULES_OFFERED))
def test_a_module_of_preamp_can_be_imported_by_the_name_that_the_documentation_uses(name: str) -> None:
    code = f"import preamp.{name}; from preamp.{name} import *; print(preamp.{name}.__name__)"
    done = run(code)
    assert (done.stdout.strip(), done.stderr) == (getattr(preamp, name).__name__, "")


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
