"""Traces as figures, as SVG text: loss, scale with skipped steps, share of zero gradients.

Each figure is as wide as a phone is, so that a page can put one or two beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from operator import itemgetter
from statistics import fmean
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from preamp.report.drawing import in_style, to_svg
from preamp.trace import Step, Trace
from preamp.words import exponent

__all__ = ["Curve", "loss_figure", "scale_figure", "zeros_figure"]

SIZE_INCHES = (5.2, 3.3)
MOST_POINTS = 400
MOST_MARKS = 200
MOST_NAMES_INSIDE = 5
LONGEST_NAME = 40
HUGE = 1e30  # beyond, an axis cannot be drawn
MOST_MOVES = 2000
# Told apart by people with any colour vision (Okabe and Ito 2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
Style: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A trace and how it is drawn. Traces of one name share a colour.

    Attributes:
        name: what the legend calls it.
        trace: the steps.
        color: any colour of matplotlib's; None picks one.
        is_reference: True draws a broad line, to be seen beneath what covers it.
    """

    name: str
    trace: Trace
    color: str | None = None
    is_reference: bool = False


def loss_figure(curves: Sequence[Curve]) -> str:
    """Return the losses over the steps, averaged over neighbouring steps."""

    def draw(axes: Axes, curve: Curve, style: Style) -> None:
        width = 3.5 if curve.is_reference else 1.5
        axes.plot(*_averaged(curve.trace, lambda step: step.loss), linewidth=width, **style)

    return _svg(curves, "loss", draw)


def zeros_figure(curves: Sequence[Curve]) -> str:
    """Return the share of gradient entries that are exactly zero, in percent."""
    known = [step.zeros or 0.0 for curve in curves for step in curve.trace]
    top = 105.0 * max((share for share in known if 1e-6 < share <= 1.0), default=1.0)

    def draw(axes: Axes, curve: Curve, style: Style) -> None:
        steps, shares = _averaged(curve.trace, lambda step: step.zeros)
        axes.plot(steps, [100.0 * share for share in shares], **style)
        axes.set_ylim(0.0, min(top, 100.0))

    return _svg(curves, "gradient entries that are zero, %", draw)


def scale_figure(curves: Sequence[Curve]) -> str:
    """Return the loss scale in powers of two, with a mark for every skipped step.

    Of more than `MOST_MARKS` skipped steps some are marked, and the title says so.
    """
    every = max(1, math.ceil(sum(step.skipped for c in curves for step in c.trace) / MOST_MARKS))
    title = f"loss scale (▾ {'skipped step' if every == 1 else 'some of the skipped steps'})"

    def draw(axes: Axes, curve: Curve, style: Style) -> None:
        axes.step(*_moves(curve.trace), where="post", **style)
        skipped = [(s.index, exponent(s.scale)) for s in curve.trace if s.skipped]
        marks = skipped[::every]
        if marks:
            axes.plot(*zip(*marks, strict=True), "v", color="#222222", markersize=5, zorder=3)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$"))

    return _svg(curves, title, draw)


@in_style
def _svg(curves: Sequence[Curve], title: str, draw: Callable[[Axes, Curve, Style], None]) -> str:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    styles = _styles(curves)
    for curve in sorted(curves, key=lambda curve: not curve.is_reference):  # later ones cover it
        draw(axes, curve, styles[curve.name])
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
    axes.set_xlabel("step")
    _add_legend(figure, axes)
    return to_svg(figure, title)


def _styles(curves: Sequence[Curve]) -> dict[str, Style]:
    """Return a label, a colour and dashes for every name."""
    others = ({"color": color, "linestyle": line} for line in cycle(("-", "--", ":")) for color in COLORS)
    colors = {curve.name: curve.color for curve in curves}
    looks = {name: {"color": color} if color else next(others) for name, color in colors.items()}
    return {name: {"label": _legible(name), **look} for name, look in looks.items()}


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Name each look once: inside the figure if they are few, else below it."""
    lines, names = axes.get_legend_handles_labels()
    named = dict(zip(names, lines, strict=True))
    if len(named) <= MOST_NAMES_INSIDE:
        axes.legend(named.values(), named, fontsize=9.5, framealpha=0.8)
        return
    figure.set_figheight(SIZE_INCHES[1] + 0.18 * math.ceil(len(named) / 3))
    figure.legend(named.values(), named, fontsize=8, loc="outside lower center", ncols=3)


def _legible(name: str) -> str:
    """Return a name as a legend can show it: short, without mathematics, and not left out for a first _."""
    short = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    plain = short.encode("utf-8", "replace").decode().replace("$", r"\$")
    return plain.replace("_", "\u2017", 1) if plain.startswith("_") else plain


def _averaged(trace: Trace, value: Callable[[Step], float | None]) -> tuple[list[float], list[float]]:
    """Return at most `MOST_POINTS` means of neighbouring values, and their middle steps."""
    points = [(step.index, v) for step in trace if (v := value(step)) is not None and abs(v) < HUGE]
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    steps = [fmean(index for index, _ in group) for group in groups]
    return steps, [fmean(value for _, value in group) for group in groups]


def _moves(trace: Trace) -> tuple[list[float], list[float]]:
    """Return where the scale changes and to what power of two, the first step and the end included.

    Of very many changes the lowest and the highest of neighbouring ones are kept.
    """
    points = [(float(step.index), exponent(step.scale)) for step in trace]
    final = trace.summary().final_scale
    if points and final is not None:
        points.append((points[-1][0] + 1.0, exponent(final)))
    changes = [
        point for n, point in enumerate(points) if n in (0, len(points) - 1) or point[1] != points[n - 1][1]
    ]
    size = max(1, math.ceil(2 * len(changes) / MOST_MOVES))
    groups = [changes[start : start + size] for start in range(0, len(changes), size)]
    kept = [p for g in groups for p in sorted({min(g, key=itemgetter(1)), max(g, key=itemgetter(1)), g[-1]})]
    return [step for step, _ in kept], [power for _, power in kept]
