"""What is public, written down: the names and signatures that a release promises to keep.

A module is public when a page of docs/api shows it, and of a public module what `__all__` lists. It is read
from the source, so that no framework is needed and nothing of theirs is promised. `test_public_api.py`
compares it with the record; a person decides what may change.

    python tests/typing/public_api.py    # writes public_api.txt
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("public_api.txt")
PLAIN = "preamp"  # the package itself: the shortest path to a name
COMMANDS = "preamp.cli.app"  # their options are public, their functions stand on no page of names to import
OF_PYTHON = {
    f"__{name}__"
    for name in [
        "all",
        "doc",
        "module",
        "slots",
        "post_init",
        "repr",
        "hash",
        "getstate",
        "setstate",
        "reduce",
    ]
}
Definition: TypeAlias = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Found(NamedTuple):
    """Where a name is defined. `node` is None for a module."""

    module: str
    name: str
    node: Definition | None


def modules() -> list[str]:
    """Return the public modules, the package itself first."""
    pages = (ROOT / "docs/api").glob("*.md")
    shown = {name for page in pages for name in re.findall(r"^```\{api\} (\S+)", page.read_text(), re.M)}
    return [PLAIN, COMMANDS, *(f"preamp.{name}" for name in sorted(shown))]


@cache
def source(module: str) -> ast.Module | None:
    """Return a module of preamp as a tree; None if there is none of that name."""
    path = ROOT.joinpath("src", *module.split("."))
    files = [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()]
    return ast.parse(files[0].read_text()) if files and module.startswith("preamp") else None


def assigned(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a statement assigns to."""
    found = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    for target in found:
        yield from ast.walk(target)


def targets(node: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    # `owner.attribute = value` has a name too, which it only loads.
    return [
        name.id for name in assigned(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]


def definitions(module: str) -> dict[str, Definition]:
    """Return what the top level of a module defines."""
    tree = source(module)
    assert tree, f"{module} is no module of preamp"
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    return {name: node for node in tree.body if isinstance(node, kinds) for name in targets(node)}


def listed(module: str) -> list[str]:
    """Return what a module's `__all__` lists."""
    node = definitions(module)["__all__"]
    assert isinstance(node, ast.Assign)
    return [str(name) for name in ast.literal_eval(node.value)]


def find(module: str, name: str) -> Found | None:
    """Follow imports to where a name is defined; None if that is outside preamp."""
    if name in definitions(module):
        return Found(module, name, definitions(module)[name])
    for node in ast.walk(source(module) or ast.Module([], [])):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            origin = node.module or ""
            if name == (alias.asname or alias.name) and source(origin) and origin != module:
                return find(origin, alias.name)
    return Found(f"{module}.{name}", "", None) if source(f"{module}.{name}") else None


@cache
def public() -> dict[str, Found | None]:
    """Return every public path, and what it leads to."""
    found: dict[str, Found | None] = {}
    todo = modules()
    for module in todo:
        for name in sorted(listed(module)):
            there = find(module, name)
            found[f"{module}.{name}"] = there
            if there and not there.node and there.module not in todo:
                todo.append(there.module)
    return found


def arguments(node: ast.FunctionDef) -> str:
    """Return a signature as it is written."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def is_public(name: str) -> bool:
    """Return whether a member is: also what an operator, a call or a `with` calls."""
    return not name.startswith("_") or (name.endswith("__") and name not in OF_PYTHON)


def attributes(method: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield the attributes that a method gives its object, and their types where they are written."""
    for node in ast.walk(method):
        for place in assigned(node):
            if (
                isinstance(place, ast.Attribute)
                and ast.unparse(place.value) == "self"
                and is_public(place.attr)
            ):
                of = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
                yield place.attr, f"self.{place.attr}{of}"


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, and those under an `if TYPE_CHECKING` in its place."""
    for node in body:
        yield from flat(node.body) if isinstance(node, ast.If) else (node,)


def members(found: Found) -> dict[str, str]:
    """Return the public members of a class, with those of bases that are not public themselves."""
    assert isinstance(found.node, ast.ClassDef)
    lines: dict[str, str] = {}
    for node in flat(found.node.body):
        for name in filter(is_public, targets(node)):
            if isinstance(node, ast.FunctionDef):
                marks = "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list)
                written = f"{marks}def {name}{arguments(node)}"
                lines[written if "overload" in marks else f"{marks}{name}"] = written
            else:
                lines[name] = ast.unparse(node)
        for name, written in attributes(node) if isinstance(node, ast.FunctionDef) else ():
            lines.setdefault(name, written)
    for base in found.node.bases:
        there = find(found.module, ast.unparse(base))
        if there and isinstance(there.node, ast.ClassDef) and there not in public().values():
            lines = members(there) | lines
    return lines


def entry(path: str, found: Found | None) -> Iterator[str]:
    """Yield the lines of one public path."""
    if found is None:
        yield f"{path}: of another package"
    elif found.node is None:
        yield f"{path}: module"
    elif isinstance(found.node, ast.FunctionDef):
        yield f"{path}{arguments(found.node)}"
    elif isinstance(found.node, ast.ClassDef):
        marks = "".join(f"@{ast.unparse(mark)} " for mark in found.node.decorator_list)
        yield f"{marks}class {path}({', '.join(map(ast.unparse, found.node.bases))})"
        yield from (f"    {line}" for line in members(found).values())
    elif isinstance(found.node, ast.AnnAssign):
        yield f"{path}: {ast.unparse(found.node.annotation)}"
    else:
        yield f"{path}: constant"


def lines() -> Iterator[str]:
    """Yield the whole record. What has several paths is described at the first."""
    first: dict[Found, str] = {}
    for path, found in public().items():
        if found and found in first:
            yield f"{path} = {first[found]}"
        else:
            if found:
                first[found] = path
            yield from entry(path, found)


if __name__ == "__main__":
    RECORD.write_text("".join(f"{line}\n" for line in lines()))
