"""Named scopes for the modules of Flax NNX and Equinox, which write none or use other names.

Flax Linen runs each module in a `jax.named_scope` with its name. A module of NNX does not know its name,
because it is an attribute of another module. So while a call is traced, the methods of every module class
open a scope with the path of attributes from the calling module to the called one. The libraries are never
imported here: if nobody has imported one, no object can be one of its modules.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import jax

CALL = "__call__"
_NAMED = "equinox.nn."  # its classes write their names themselves: "eqx.nn.Linear"
# Libraries' own classes that only pass a call on.
_WRAPPERS = ("flax.nnx.bridge", "flax.nnx.transforms", "equinox._", "equinox.internal", "equinox.debug")


class Copy(NamedTuple):
    """A copy of a module that ran without the path of the original, because a transformation was given it.

    Attributes:
        kind: the name of its class.
        name: the part of its path that takes the place of the original's path.
        originals: the paths of the modules that it may be a copy of.
    """

    kind: str
    name: str
    originals: tuple[str, ...]


@dataclass(frozen=True)
class Calls:
    """The modules that ran in a block of `module_scopes`.

    Attributes:
        found: the paths of those that another module holds.
        copies: the copies among them.
    """

    found: set[str] = field(default_factory=set)
    copies: dict[Copy, None] = field(default_factory=dict)


class _Frame(NamedTuple):
    """A module while one of its methods runs.

    Attributes:
        module: the module.
        held: by id, the modules that it holds at any depth, each with its path.
        path: the path of the method.
    """

    module: object
    held: dict[int, tuple[object, str]]
    path: str


class _Frames(threading.local):
    """The modules that run in this thread, from the outermost one; None if nothing is traced."""

    now: list[_Frame] | None = None
    calls = Calls()


_FRAMES = _Frames()
_LOCK = threading.Lock()
_REPLACED: list[tuple[type[Any], str, Callable[..., Any], Callable[..., Any]]] = []
_users = 0


@contextmanager
def module_scopes() -> Iterator[Calls]:
    """Run modules of NNX and Equinox that are called in this block, and in this thread, in named scopes.

    A module that another one holds gets its attribute path there, such as "layers/0/mlp". The outermost
    module, and copies that a transformation made, get the name of their class. A method other than
    `__call__` adds its own name, as in Flax Linen. The block yields a record of the calls.

    The classes are restored when the last open block ends.
    """
    global _users
    libraries: list[tuple[Any, _HeldBy]] = [
        (library, held_by)
        for name, held_by in _HELD_BY.items()
        if hasattr(library := sys.modules.get(name), "Module")  # another thread may be importing it
    ]
    calls = Calls()
    if not libraries:
        yield calls
        return
    with _LOCK:
        if not _users:
            _replace(libraries)
        _users += 1
    before = _FRAMES.now, _FRAMES.calls
    _FRAMES.now, _FRAMES.calls = before[0] or [], calls
    try:
        yield calls
    finally:
        _FRAMES.now, _FRAMES.calls = before
        with _LOCK:
            _users -= 1
            if not _users:
                _restore()


def scoped_method(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the scoped version of a method that was looked up before the block, or else `fn` itself."""
    if _FRAMES.now is None:
        return fn
    method, owner = getattr(fn, "__func__", None), getattr(fn, "__self__", None)
    found = (scoped for _, _, original, scoped in _REPLACED if original is method)
    scoped = next(found, None)
    return fn if scoped is None else functools.partial(scoped, owner)


def _held_by_nnx(nnx: Any, module: object) -> Iterator[tuple[object, str]]:
    for path, node in nnx.iter_graph(module):
        if path and isinstance(node, nnx.Module):
            yield node, "/".join(map(str, path))


def _held_by_equinox(equinox: Any, module: object, before: str = "") -> Iterator[tuple[object, str]]:
    def is_inside(node: object) -> bool:
        return isinstance(node, equinox.Module) and node is not module

    for path, node in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_inside)[0]:
        if is_inside(node):
            name = before + jax.tree_util.keystr(path, simple=True, separator="/")
            yield node, name
            yield from _held_by_equinox(equinox, node, name + "/")


_HeldBy: TypeAlias = Callable[[Any, object], Iterator[tuple[object, str]]]
_HELD_BY: dict[str, _HeldBy] = {"flax.nnx": _held_by_nnx, "equinox": _held_by_equinox}
"""By the name of a library: what yields the modules in one of its modules, each with its path."""


def _replace(libraries: list[tuple[Any, _HeldBy]]) -> None:
    for library, held_by in libraries:
        for kind in _subclasses(library.Module):
            for name, method in list(vars(kind).items()):
                if isinstance(method, FunctionType) and (name == CALL or name[0] != "_"):
                    scoped = _scoped(method, name, functools.partial(held_by, library), library.Module)
                    setattr(kind, name, scoped)
                    _REPLACED.append((kind, name, method, scoped))


def _restore() -> None:
    for kind, name, method, scoped in _REPLACED:
        if vars(kind).get(name) is scoped:  # nobody else has replaced it since
            setattr(kind, name, method)
    _REPLACED.clear()


def _subclasses(base: type[Any]) -> dict[type[Any], None]:
    """Return the subclasses of a class, without the libraries' own that only pass a call on."""
    found: dict[type[Any], None] = {}
    kind: type[Any]
    for kind in base.__subclasses__():
        if not kind.__module__.startswith(_WRAPPERS):
            found[kind] = None
        found.update(_subclasses(kind))
    return found


def _scoped(
    method: Callable[..., Any],
    name: str,
    held_by: Callable[[object], Iterator[tuple[object, str]]],
    base: type[Any],
) -> Callable[..., Any]:
    """Return a method that opens a scope while something is traced.

    Args:
        method: the method of a class of modules.
        name: its name.
        held_by: yields the modules in a module, each with its path.
        base: the class of all modules.
    """

    @functools.wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        frames = _FRAMES.now
        if frames is None:
            return method(self, *args, **kwargs)
        path = _path(self, frames)
        if path is None:
            path = _path_from_caller(self, held_by, base, frames)
        scope = "/".join(filter(None, [path, "" if name == CALL else name]))
        held = {id(node): (node, path) for node, path in held_by(self)}
        frames.append(_Frame(self, held, _dotted(frames[-1].path if frames else "", scope)))
        try:
            with jax.named_scope(scope) if scope else nullcontext():
                return method(self, *args, **kwargs)
        finally:
            frames.pop()

    return scoped


def _dotted(*paths: str) -> str:
    return ".".join(path for path in paths if path).replace("/", ".")


def _path(module: object, frames: list[_Frame]) -> str | None:
    """Return the path of a module in the innermost one that holds it, "" if that is the module itself."""
    if frames and frames[-1].module is module:
        return ""
    for frame in reversed(frames):
        if id(module) in frame.held:
            path = frame.held[id(module)][1]
            _FRAMES.calls.found.add(_dotted(frame.path, path))
            return path
    return None


def _path_from_caller(
    module: object,
    held_by: Callable[[object], Iterator[tuple[object, str]]],
    base: type[Any],
    frames: list[_Frame],
) -> str:
    """Return the path of a module in the copy that calls it, or else the name of its class.

    A method that is decorated with a transformation (`nnx.remat`, `eqx.filter_jit`) runs with a copy of its
    module, which opened no scope. That copy is the `self` of a function between this call and the last scope.
    """
    frame = sys._getframe(1)
    code, caller = frame.f_code, frame.f_back
    while caller is not None and caller.f_code is not code:
        holder = caller.f_locals.get("self")
        if isinstance(holder, base) and not type(holder).__module__.startswith(_WRAPPERS):
            for node, path in held_by(holder):
                if node is module:
                    # The original has opened a scope, unless the decorator's object is not a function.
                    if frames and type(frames[-1].module) is not type(holder):
                        _note_copy(type(holder), _dotted(frames[-1].path, path), frames, _dotted(path))
                    return path
        caller = caller.f_back
    kind = type(module)
    if kind.__module__.startswith(_NAMED):
        _note_copy(kind, f"eqx.nn.{kind.__name__}", frames)
        return ""
    _note_copy(kind, kind.__name__, frames)
    return kind.__name__


def _note_copy(kind: type[Any], name: str, frames: list[_Frame], inside: str = "") -> None:
    """Record a copy, or a module `inside` of one, if a module that runs holds what it may be a copy of."""
    held: dict[int, str] = {}
    for frame in reversed(frames):
        for node, path in frame.held.values():
            if type(node) is kind:
                held.setdefault(id(node), _dotted(frame.path, path, inside))
    if held:
        _FRAMES.calls.copies[Copy(kind.__name__, name, tuple(held.values()))] = None
