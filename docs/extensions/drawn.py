"""Figures that a page computes: `{drawn}` shows Python code and, below it, the SVG that it ends with.

The blocks of a page run in one namespace, in order, when the page is built.
"""

from __future__ import annotations

import ast
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

__all__ = ["drawing", "run", "setup"]


def run(code: str, namespace: dict[str, Any]) -> Any:
    """Run code and return the value of the expression it ends with."""
    *statements, last = ast.parse(code).body
    if not isinstance(last, ast.Expr):
        raise ValueError(f"{ast.unparse(last)!r} draws nothing. End the block with loss_figure(...).")
    exec(compile(ast.Module(statements, []), "<drawn>", "exec"), namespace)
    return eval(compile(ast.Expression(last.value), "<drawn>", "eval"), namespace)


def drawing(svg: str, *, caption: str = "") -> nodes.figure:
    """Return a figure of a page."""
    figure = nodes.figure("", nodes.raw("", svg, format="html"), classes=["drawing"])
    if caption:
        figure += nodes.caption(caption, caption)
    return figure


class Drawn(SphinxDirective):
    """Code and what it draws. The argument, if there is one, stands below the figure."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        code = "\n".join(self.content)
        namespace: dict[str, Any] = self.env.temp_data.setdefault("drawn", {})  # type: ignore[assignment]
        listing = nodes.literal_block(code, code, language="python")
        return [listing, drawing(run(code, namespace), caption=" ".join(self.arguments))]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("drawn", Drawn)
    return {"parallel_read_safe": True}
