"""The style of figures, and their conversion to SVG."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from matplotlib import rc_context
from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "preamp",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": True,
    "legend.edgecolor": "none",
}


def in_style(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to draw in the style of all figures."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has other fonts
            return draw(*args, **kwargs)

    return styled


def to_svg(figure: Figure, title: str) -> str:
    """Return a figure as an SVG element. Call it in the style that the figure was drawn in."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
