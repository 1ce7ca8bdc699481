"""The diagram of docs/architecture.md: the layers of packages that import-linter enforces.

Names and layers are those of `[tool.importlinter]` in pyproject.toml. A box is coloured by what the files of
its package import, and its tooltip is the first paragraph of the package's docstring.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from extensions.drawn import drawing

__all__ = ["HEIGHT", "WIDTH", "Box", "Contract", "boxes", "contract", "diagram", "kind_of", "setup"]

HOME = Path(__file__).resolve().parents[2]
WIDTH, LEFT = 460, 26  # as wide as a phone can show it legibly; the arrow's place
LETTER, PADDING, HEIGHT = 7.0, 16, 24
GAP, LAYER_GAP = 6, 13
KINDS = {"plain": "plain Python", "adapter": "imports a framework", "surface": "draws or prints"}
ARRAYS = {"numpy", "sklearn"}  # which are not frameworks


class Contract(NamedTuple):
    """The layers of pyproject.toml.

    Attributes:
        layers: the packages of each layer, from the top.
        frameworks: what the core may not import.
        surfaces: what only packages that draw or print may import.
    """

    layers: list[list[str]]
    frameworks: set[str]
    surfaces: set[str]


class Box(NamedTuple):
    """A package in the diagram, with its upper left corner and its width."""

    package: str
    x: float
    y: float
    width: float


def contract(pyproject: str) -> Contract:
    """Read the contract of a pyproject.toml."""
    packages, core, apart, *_ = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    surfaces = set(apart["forbidden_modules"])
    layers = [layer.split(" | ") for layer in packages["layers"]]
    return Contract(layers, set(core["forbidden_modules"]) - surfaces - ARRAYS, surfaces)


def boxes(layers: list[list[str]]) -> list[Box]:
    """Place the packages: layers below each other and centred, in several lines where one is too short."""
    placed, y = [], 2.0
    for layer in layers:
        for line in _lines(layer):
            x = LEFT + (WIDTH - LEFT - _width(line)) / 2
            for package in line:
                placed.append(Box(package, x, y, _width([package])))
                x += _width([package]) + GAP
            y += HEIGHT + GAP
        y += LAYER_GAP - GAP
    return placed


def _width(packages: list[str]) -> float:
    return sum(LETTER * len(package) + PADDING for package in packages) + GAP * (len(packages) - 1)


def _lines(layer: list[str]) -> list[list[str]]:
    """Break a layer into lines that fit."""
    lines: list[list[str]] = [[]]
    for package in layer:
        if lines[-1] and _width([*lines[-1], package]) > WIDTH - LEFT:
            lines.append([])
        lines[-1].append(package)
    return lines


def diagram(contract: Contract) -> str:
    """Return the contract as SVG. Its colours are in the page's style sheet."""
    placed = boxes(contract.layers)
    bottom = placed[-1].y + HEIGHT
    elements = [_box(box, kind_of(box.package, contract)) for box in placed]
    legend = list(_legend(bottom + 22))
    return (
        f'<svg class="layers" viewBox="0 0 {WIDTH} {bottom + 40:.0f}" role="img" '
        'aria-label="Packages of preamp in layers: each imports only from below">'
        + f'<path class="arrow" d="M10 4 V{bottom - 4} m-5 -8 l5 8 l5 -8"/>'
        + "".join([*elements, *legend])
        + "</svg>"
    )


def _box(box: Box, kind: str) -> str:
    return (
        f'<g class="{kind}"><title>{escape(_summary(box.package))}</title>'
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{HEIGHT}" rx="4"/>'
        f'<text x="{box.x + box.width / 2:.1f}" y="{box.y + 16:.1f}">{escape(box.package)}</text></g>'
    )


def _legend(y: float) -> Iterator[str]:
    for number, (kind, words) in enumerate(KINDS.items()):
        x = LEFT + number * 150
        yield f'<g class="{kind}"><rect x="{x}" y="{y}" width="12" height="12" rx="2"/></g>'
        yield f'<text class="legend" x="{x + 18}" y="{y + 10}">{words}</text>'


def kind_of(package: str, contract: Contract) -> str:
    """Return "adapter", "surface" or "plain", by what the files of a package import."""
    imported = {name.partition(".")[0] for file in _files(package) for name in _imports(file)}
    if imported & contract.frameworks:
        return "adapter"
    return "surface" if imported & contract.surfaces else "plain"


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _files(package: str) -> list[Path]:
    """Return the files of a package, starting with the one that has its docstring."""
    folder = HOME / "src/preamp" / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def _summary(package: str) -> str:
    """Return the first paragraph of a package's docstring."""
    text = ast.get_docstring(ast.parse(_files(package)[0].read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


class Layers(SphinxDirective):
    """The diagram."""

    def run(self) -> list[nodes.Node]:
        pyproject = HOME / "pyproject.toml"
        self.env.note_dependency(str(pyproject))
        return [drawing(diagram(contract(pyproject.read_text())))]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("layers", Layers)
    return {"parallel_read_safe": True}
