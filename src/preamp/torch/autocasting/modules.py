"""Rules of modules: hooks that tell a region's mode which modules are running."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from preamp.arrays.torch_compat import ModuleHooks, hooks_in_graph, mark_constant, untraced
from preamp.autocasting.tables import Casting
from preamp.errors import CastingError
from preamp.torch.autocasting import modes

NEAREST = 3


def find(model: nn.Module, table: Casting, delayed: bool) -> list[tuple[nn.Module, str]]:
    """Return the modules of a model that a table has rules for, each with a path.

    Args:
        model: whose paths the patterns of the table are about.
        table: any.
        delayed: also those that keep the scales of a delayed recipe, because they have a weight.

    Raises:
        CastingError: for a pattern that names no module, with the nearest paths, and for a module that has
            two paths with different rules.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    names = tuple((path, id(module)) for path, module in named.items())
    found = dict.fromkeys(path for path, _ in _with_rules(type(model).__name__, names, table))
    if delayed:
        found |= dict.fromkeys(path for path, module in model.named_modules() if has_weight(module))
    return [(named[path], path) for path in found]


def has_weight(module: nn.Module) -> bool:
    """Return whether a module has a matrix of its own, which a linear layer may take."""
    return any(parameter is not None and parameter.dim() == 2 for parameter in module._parameters.values())


def _with_rules(kind: str, names: tuple[tuple[str, int], ...], table: Casting) -> list[tuple[str, int]]:
    for pattern in table.modules:
        alone = Casting().module(pattern, "default")
        if not any(alone.scope(path) for path, _ in names):
            near = difflib.get_close_matches(
                pattern, [path for path, _ in names if path], n=NEAREST, cutoff=0.3
            )
            instead = " or ".join(map(repr, near)) or "a path that model.named_modules() yields"
            raise CastingError(f"{pattern!r} names no module of this {kind}. Write {instead}.")
    known: dict[int, tuple[str, Any]] = {}
    for path, module in names:
        scope = table.scope(path)
        other, its_scope = known.setdefault(module, (path, scope))
        if scope != its_scope:
            raise CastingError(
                f"{other!r} and {path!r} are one module with two rules. Write one rule for both."
            )
    return [(path, module) for module, (path, scope) in known.items() if scope]


@contextmanager
def followed(found: Iterable[tuple[nn.Module, str]], device_type: str, owner: str) -> Iterator[None]:
    """Have the modes of a device type follow the modules that `find` returned.

    Args:
        found: the modules and their paths.
        device_type: of the modes.
        owner: `Edits.owner` of the edits that the rules are in.
    """
    hooks = []
    for module, path in found:
        this = device_type, owner, id(module)
        hooks.append(ModuleHooks(module, partial(_enter, *this, path), partial(_leave, *this)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def followed_in_graph(
    model: nn.Module, device_type: str, key: str, owner: str, delayed: bool
) -> Iterator[None]:
    """Have the modes follow the modules of a model in code that is traced.

    Args:
        model: whose paths the patterns of the table are about.
        device_type: of the modes.
        key: of the edits with the table.
        owner: their `Edits.owner`.
        delayed: as in `find`.
    """
    names = [(path, id(module)) for path, module in model.named_modules(remove_duplicate=False)]
    paths = dict(with_rules_in_graph(key, type(model).__name__, tuple(names)))
    if delayed:
        paths |= {id(module): path for path, module in model.named_modules() if has_weight(module)}

    def before(module: nn.Module, args: object) -> None:
        if id(module) in paths:
            _enter(device_type, owner, id(module), paths[id(module)], module, args)

    def after(module: nn.Module, args: object, result: object) -> None:
        if id(module) in paths:
            _leave(device_type, owner, id(module), module, args, result)

    with hooks_in_graph(before, after):
        yield


# A module that is copied inside of the region has hooks, too, which are to do nothing.


@untraced
def _enter(device_type: str, owner: str, known: int, path: str, module: nn.Module, args: object) -> None:
    mode = modes.current(device_type)
    if mode is not None and id(module) == known:
        # The compiler must not meet a module in the mode, so it is there only if it keeps scales.
        kept = None if mode.module is None else module
        mode.enter(key_in_module(mode.key, owner, path), kept, path)


@untraced
def _leave(device_type: str, owner: str, known: int, module: nn.Module, args: object, result: object) -> None:
    mode = modes.current(device_type)
    if mode is not None and id(module) == known:
        mode.leave()


def with_rules_in_graph(
    key: str, kind: str, names: tuple[tuple[str, int], ...]
) -> tuple[tuple[int, str], ...]:
    """Return the identities and paths of the modules that edits have rules for, as `find` does."""
    table = modes.edits_of(key).table
    return tuple((module, path) for path, module in _with_rules(kind, names, table))


def key_in_module(key: str, owner: str, path: str) -> str:
    """Return the key of the edits that hold in a module, given those around it and whose rules it has."""
    edits = modes.edits_of(key)
    return modes.key_of(edits._replace(scope=edits.table.scope(path))) if edits.owner == owner else key


mark_constant(with_rules_in_graph)
mark_constant(key_in_module)
