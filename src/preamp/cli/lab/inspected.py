"""What autocast casts in a user's function. The function is found by its name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

from preamp.autocasting.report import CastReport
from preamp.autocasting.tables import Casting
from preamp.cli.casting_file import read_casting
from preamp.errors import CastingError, MissingExtra, PreampError


def inspect_function(
    target: str,
    framework: str,
    device: str | None,
    dtype: str | None,
    *,
    emulate: bool,
    compiled: bool,
    casting_file: Path | None,
) -> CastReport:
    """Return what autocast casts in a function. A function of PyTorch is run, one of JAX is traced.

    Args:
        target: "MODULE:FUNCTION", called without arguments; the module is a name or the path of a file.
        framework: "torch" or "jax".
        device: the device type, None for the CPU; JAX's tables are the same on every device.
        dtype: the name of the low precision, None for the framework's default.
        emulate: whether to rehearse a GPU.
        compiled: whether to report the program that `torch.compile` makes of the function.
        casting_file: the edits of the framework's table; None for none.

    Raises:
        PreampError: for a target that does not exist, that runs no operator, or that JAX cannot trace, and
            for a file that has no table.
        MissingExtra: without the framework.
    """
    if framework == "jax" and compiled:
        raise PreampError("--compile is for PyTorch. Leave it out: JAX's report shows the compiled program.")
    if framework == "jax" and device:
        raise PreampError(
            f"--device {device} has no effect with --framework jax. Leave it out: JAX's casts are the same "
            "on every device."
        )
    table = read_casting(casting_file) if casting_file else None
    try:
        if framework == "torch":
            return _run_in_torch(target, device or "cpu", dtype, emulate, compiled, table)
        return _trace_in_jax(target, dtype, emulate, table)
    except CastingError as error:
        if casting_file is None:  # a region in the function has a table of its own
            raise
        raise PreampError(f"{casting_file}: {error}") from error


def _run_in_torch(
    target: str, device: str, dtype: str | None, emulate: bool, compiled: bool, table: Casting | None
) -> CastReport:
    try:
        import torch

        from preamp.torch.amp import autocast, is_autocast_available
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[torch]") from error
    try:
        is_autocast_available(device)
    except RuntimeError as error:
        raise PreampError(f"--device {device} is not a device type. Write cpu or cuda.") from error
    function = find_function(target)
    low = getattr(torch, dtype) if dtype else None
    around = casting_region(dtype, device, emulate=emulate, casting=table)
    model = model_of(function, around) if table and table.modules else None
    if compiled:
        function = torch.compile(function)
    with autocast(device, low, casting=table, model=model, report=True, emulate=emulate) as region:
        result = function()
    report = region.report()
    if not report.rows:
        raise PreampError(_nothing_ran(target, result))
    return report


class _Stopped(BaseException):
    """Ends a training step at its backward pass."""


@contextmanager
def casting_region(
    dtype: str | None, device: str | None = None, *, emulate: bool, casting: Casting | None = None
) -> Iterator[None]:
    """Enter a region without rules of modules, in which a step runs that works only under autocast.

    Args:
        dtype: the name of the low precision, None for the device's default.
        device: the device type; None for the CPU and the accelerator.
        emulate: whether to rehearse a GPU.
        casting: the edits of PyTorch's table.
    """
    import torch

    from preamp.torch import autocast

    if casting is not None:
        operators = [edit for edit in casting.edits if edit.of == "operators"]
        casting = Casting.of(operators, casting.optional)
    low = getattr(torch, dtype) if dtype else None
    with ExitStack() as stack:
        for each in [device] if device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            stack.enter_context(autocast(each, low, casting=casting, emulate=emulate))
        yield


def model_of(
    function: Callable[[], Any], region: AbstractContextManager[object], *, stops: bool = False
) -> Any:
    """Run a function once and return the module that it trains, or all of them in one.

    Of several it is the first module among the function's globals that has them inside.

    Args:
        function: what to run.
        region: what to run it in.
        stops: whether to end it where it calls `backward()`, and to put random states back.
    """
    import torch
    from torch import nn
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    running: list[nn.Module] = []
    outermost: dict[nn.Module, None] = {}
    backward = torch.autograd.backward

    def begin(module: nn.Module, _: object) -> None:
        if not running:
            outermost[module] = None
        running.append(module)

    def end(*_: object) -> None:
        running.pop()

    def stop(*_: object, **__: object) -> None:
        raise _Stopped

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True)]
    try:
        if not stops:
            with region:
                function()
        else:
            torch.autograd.backward = stop  # which Tensor.backward() calls
            with suppress(_Stopped), torch.random.fork_rng(), region:
                function()
    finally:
        torch.autograd.backward = backward
        for hook in hooks:
            hook.remove()
    trained = [module for module in outermost if any(True for _ in module.parameters())] or list(outermost)
    if len(trained) == 1:
        return trained[0]
    for module in getattr(function, "__globals__", {}).values():
        if isinstance(module, nn.Module) and trained and set(trained) <= set(module.modules()):
            return module
    return nn.ModuleList(trained)


def name_of(model: Any, function: Callable[[], Any]) -> str:
    """Return the name that a function has for a model that `model_of` found, "model" if it has none."""
    names: dict[int, str] = {id(value): name for name, value in getattr(function, "__globals__", {}).items()}
    if id(model) in names or not any(id(part) in names for part in model):
        return names.get(id(model), "model")
    return f"torch.nn.ModuleList([{', '.join(names.get(id(part), '...') for part in model)}])"


def _trace_in_jax(target: str, dtype: str | None, emulate: bool, table: Casting | None) -> CastReport:
    try:
        import jax
    except ImportError as error:
        raise MissingExtra.of(error, "preamp[jax]") from error
    from preamp.jax import casts

    function = find_function(target)
    returned: list[Any] = []

    def kept() -> Any:
        returned.append(function())
        return returned[0]

    try:
        report = casts(kept, dtype=dtype or "bfloat16", casting=table, emulate=emulate)
    except jax.errors.JAXTypeError as error:
        reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
        raise PreampError(
            f"{target} cannot be traced: {reason}. Write a function that jax.jit can take."
        ) from error
    if not report.rows:
        raise PreampError(_nothing_ran(target, returned[0]))
    return report


def _nothing_ran(target: str, result: object) -> str:
    """Say that a function ran no operator, and what to write if it returns another function."""
    name = target.rpartition(":")[2]
    if callable(result):
        return (
            f"{target} ran no operator: it returns a function, and only {name} itself is called. Write a "
            f"function that calls it, such as def run(): {name}()()"
        )
    if isinstance(result, (tuple, list)) and result and callable(result[0]):
        return (
            f"{target} ran no operator: it returns a function and its arguments, and only {name} itself is "
            f"called. Write a function that calls it, such as def run(): fn, args = {name}(); fn(*args). "
            "If it is a function of JAX, write --framework jax."
        )
    return (
        f"{target} ran no operator on tensors, so there is nothing to show. Write a function that runs the "
        "model, such as one training step."
    )


def find_function(target: str) -> Callable[[], Any]:
    """Return what "MODULE:FUNCTION" names; modules of the working directory are found too."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise PreampError(
            f"{target!r} does not name a function. Write MODULE:FUNCTION, such as train.py:step."
        )
    if place.endswith(":"):
        raise PreampError(f"{target!r} has two colons. Write {place.rstrip(':')}:{name}.")
    module = _load(place, name)
    function = getattr(module, name, None)
    if not callable(function):
        raise PreampError(
            f"{place} has no function {name!r}. Write one of those that it has: {_functions(module)}."
        )
    try:
        signature(function).bind()
    except TypeError as error:
        raise PreampError(
            f"{target} cannot be called without arguments: {error}. Write a function that can."
        ) from error
    return function  # type: ignore[no-any-return]


def _load(place: str, name: str) -> Any:
    sys.path.insert(0, "")
    if not place.endswith(".py"):
        if _is_missing(place):
            if Path(place).exists():
                raise PreampError(
                    f"{place} is not a Python file. Write MODULE:FUNCTION with a file that ends in .py, or "
                    "the name of a module."
                )
            raise PreampError(
                f"There is no module {place!r}. Write its name, or the path of its file: {place}.py"
            )
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise PreampError(
            f"There is no file {place}. Write the path of a Python file, or the name of a module."
        )
    if b"\0" in path.read_bytes():  # Python's error for it differs between versions
        raise PreampError(f"{place}: this is not Python (it has null bytes).")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PreampError(f"{place} cannot be imported. Write the path of a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        if error.filename and os.path.realpath(error.filename) != os.path.realpath(path):
            raise  # in a module that it imports: with its traceback
        where = f", line {error.lineno}" if error.lineno else ""
        raise PreampError(f"{place}{where}: this is not Python ({error.msg}).") from error
    except ImportError as error:
        if "no known parent package" not in str(error):
            raise
        dotted = ".".join(path.with_suffix("").parts)
        usable = dotted if dotted.replace(".", "").isidentifier() and "." in dotted else "PACKAGE.MODULE"
        raise PreampError(
            f"{place} has relative imports, so it has to be imported as part of its package. Write "
            f"{usable}:{name}."
        ) from error
    return module


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError, AttributeError):  # not a module name, such as "a..b" or ".a"
        return True


def _functions(module: object) -> str:
    own = [name for name, value in vars(module).items() if isfunction(value) and name[0] != "_"]
    return ", ".join(own) or "none"
