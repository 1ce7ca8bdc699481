"""The reference: every public name once, at the path a user imports it from.

`{api} policy` stands for what `preamp.policy` lists in `__all__`, so a new name appears by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import preamp
from preamp.guards import GuardDialect
from preamp.policy import Reading
from preamp.systems.dialects import Dialect

__all__ = ["names_of", "setup"]

NAMED_TUPLE_FIELD = type(Reading.finite)
LONGEST_VALUE = 80


def names_of(home: ModuleType) -> dict[str, Any]:
    """Return the public names of a module and of those it lists, by the shortest path to import them from."""
    found: dict[str, Any] = {}
    for name in home.__all__:
        value = getattr(home, name)
        offered = getattr(preamp, name, None) is value and name in preamp.__all__
        found[f"preamp.{name}" if offered else f"{home.__name__}.{name}"] = value
    for module in [value for value in found.values() if inspect.ismodule(value)]:
        known = {id(value) for value in found.values()}
        found |= {path: value for path, value in names_of(module).items() if id(value) not in known}
    return found


class Api(SphinxDirective):
    """The docstring of a module, and its public names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        home = import_module(f"preamp.{self.arguments[0]}")
        lines = ["```{eval-rst}", *self._entries(home), "```"]
        return self.parse_text_to_nodes(f"{home.__doc__}\n\n" + "\n".join(lines))

    def _entries(self, home: ModuleType) -> Iterator[str]:
        for path, value in names_of(home).items():
            yield from _entry(path, value)
            yield ""


def _entry(path: str, value: Any) -> list[str]:
    """Return the directive that shows a name."""
    if inspect.ismodule(value):
        return [f".. py:module:: {path}"]
    if isinstance(value, Dialect | GuardDialect):
        return [f".. py:function:: {path}{inspect.signature(value._make)}", "", f"   {value.__doc__}"]
    if inspect.isclass(value):
        return [f".. autoclass:: {path}", "   :members:"]
    if inspect.isroutine(value):
        return [f".. autofunction:: {path}"]
    if type(value).__module__.startswith("preamp"):
        return [f".. autodata:: {path}", "   :no-value:"]
    return [f".. py:data:: {path}", *([f"   :value: {value!r}"] if len(repr(value)) < LONGEST_VALUE else [])]


def _skip(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of a NamedTuple: its docstring says what they are."""
    return True if isinstance(value, NAMED_TUPLE_FIELD) else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("api", Api)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True}
