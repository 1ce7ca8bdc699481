"""Traces as figures, as SVG text: loss, scale with skipped steps, share of zero gradients.

Each figure is as wide as a phone is, so that a page can put one or two beside each other.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean
from typing import Any, TypeAlias

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from preamp.trace import Step, Trace

__all__ = ["Curve", "loss_figure", "scale_figure", "zeros_figure"]

SIZE_INCHES = (5.2, 3.3)
MOST_POINTS = 400
MOST_MARKS = 300
MOST_NAMES_INSIDE = 5
MOST_MOVES = 2000
# Told apart by people with any colour vision (Okabe and Ito 2008).
KNOWN_COLORS = {
    "float32": "#b0b0b0",
    "float16, no scaling": "#d55e00",
    "float16 + preamp": "#0072b2",
    "bfloat16": "#009e73",
}
OTHER_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
Style: TypeAlias = dict[str, Any]
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "preamp",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Curve:
    """A trace and the name it is drawn under. Traces of one name share a colour."""

    name: str
    trace: Trace


def loss_figure(curves: Sequence[Curve]) -> str:
    """Return the losses over the steps, averaged over neighbouring steps."""

    def draw(axes: Axes, curve: Curve, style: Style) -> None:
        width = 3.5 if curve.name == "float32" else 1.5  # the reference shows beneath what covers it
        axes.plot(*_averaged(curve.trace, lambda step: step.loss), label=curve.name, linewidth=width, **style)

    return _svg(curves, "loss", draw)


def zeros_figure(curves: Sequence[Curve]) -> str:
    """Return the share of gradient entries that are exactly zero, in percent."""

    def draw(axes: Axes, curve: Curve, style: Style) -> None:
        steps, shares = _averaged(curve.trace, lambda step: step.zeros)
        axes.plot(steps, [100.0 * share for share in shares], label=curve.name, **style)
        axes.set_ylim(0.0, 100.0)

    return _svg(curves, "gradient entries that are zero, %", draw)


def scale_figure(curves: Sequence[Curve]) -> str:
    """Return the loss scale in powers of two, with a mark for every skipped step."""

    def draw(axes: Axes, curve: Curve, style: Style) -> None:
        axes.step(*_moves(curve.trace), where="post", label=curve.name, **style)
        skipped = [(s.index, _exponent(s.scale)) for s in curve.trace if s.skipped]
        marks = skipped[:: max(1, math.ceil(len(skipped) / MOST_MARKS))]
        if marks:
            axes.plot(
                *zip(*marks, strict=True), "v", color=style["color"], markersize=5, markeredgecolor="white"
            )
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$"))

    return _svg(curves, "loss scale (▾ skipped step)", draw)


def _svg(curves: Sequence[Curve], title: str, draw: Callable[[Axes, Curve, Style], None]) -> str:
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        styles = _styles(curves)
        for curve in curves:
            draw(axes, curve, styles[curve.name])
        axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
        axes.set_xlabel("step")
        _add_legend(figure, axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def _styles(curves: Sequence[Curve]) -> dict[str, Style]:
    """Return a colour and dashes for every name."""
    others = (
        {"color": color, "linestyle": line} for line in cycle(("-", "--", ":")) for color in OTHER_COLORS
    )
    names = dict.fromkeys(curve.name for curve in curves)
    return {n: {"color": KNOWN_COLORS[n]} if n in KNOWN_COLORS else next(others) for n in names}


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Name each curve once: inside the figure if they are few, else below it."""
    lines, names = axes.get_legend_handles_labels()
    named = dict(zip(reversed(names), reversed(lines), strict=True))
    handles, labels = list(named.values())[::-1], list(named)[::-1]
    if len(named) <= MOST_NAMES_INSIDE:
        axes.legend(handles, labels, fontsize=9.5)
        return
    figure.set_figheight(SIZE_INCHES[1] + 0.18 * math.ceil(len(named) / 3))
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=3)


def _averaged(trace: Trace, value: Callable[[Step], float | None]) -> tuple[list[float], list[float]]:
    """Return at most `MOST_POINTS` means of neighbouring finite values, and their middle steps."""
    points = [(step.index, v) for step in trace if (v := value(step)) is not None and math.isfinite(v)]
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    steps = [fmean(index for index, _ in group) for group in groups]
    return steps, [fmean(value for _, value in group) for group in groups]


def _moves(trace: Trace) -> tuple[list[int], list[float]]:
    """Return where the scale changes, and to what power of two, with the first and the last step."""
    steps: list[int] = []
    exponents: list[float] = []
    last = len(trace) - 1
    for number, step in enumerate(trace):
        exponent = _exponent(step.scale)
        if number == last or not exponents or exponent != exponents[-1]:
            steps.append(step.index)
            exponents.append(exponent)
    stride = max(1, math.ceil(len(steps) / MOST_MOVES))
    return steps[::stride], exponents[::stride]


def _exponent(scale: float) -> float:
    return math.log2(scale) if 0.0 < scale < math.inf else math.nan
