"""Draw traces as figures in SVG: loss, scale with skipped steps, share of zero gradients.

Each figure is as wide as a phone, so that a page can place one or two side by side.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from preamp.record.formatting import exponent
from preamp.record.trace import Trace
from preamp.report.drawing import in_style, to_svg

SIZE_INCHES = (5.2, 3.3)
MOST_POINTS = 400
MOST_MARKS = 200
MOST_NAMES_INSIDE = 5
LONGEST_NAME = 40
HUGE = 1e30  # beyond, an axis cannot be drawn
MOST_MOVES = 2000
# Distinguishable with any color vision (Okabe and Ito 2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
MARKED = "#d55e00"
Style: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A trace and how it is drawn. Traces of the same name share a color.

    Attributes:
        name: its name in the legend.
        trace: the steps.
        color: any color that matplotlib accepts; None picks one.
        is_reference: True draws a broad line, which stays visible beneath other lines.
        steps: steps to mark below the line, such as those that the doctor's findings are about.
    """

    name: str
    trace: Trace
    color: str | None = None
    is_reference: bool = False
    steps: tuple[int, ...] = ()


def loss_figure(curves: Sequence[Curve]) -> str:
    """Return the losses over the steps.

    Of a long trace: means of neighboring steps and, in a lighter color, the range from the lowest to the
    highest of them, cut off where it would flatten the means.
    """

    def draw(axes: Axes, curve: Curve, style: Style) -> None:
        width = 3.5 if curve.is_reference else 1.5
        means = _averaged(curve.trace, "loss")
        axes.plot(means.steps, means.values, linewidth=width, **style)
        if means.is_grouped:
            limits = axes.dataLim.frozen()
            axes.fill_between(
                means.steps, means.lowest, means.highest, color=style["color"], alpha=0.25, linewidth=0
            )
            axes.dataLim.set(limits)  # the axis fits the means

    return _svg(curves, "loss", draw)


def zeros_figure(curves: Sequence[Curve]) -> str:
    """Return the share of gradient entries that are exactly zero, in percent."""
    known = (share or 0.0 for curve in curves for share in curve.trace.column("zeros"))
    top = 105.0 * max((share for share in known if 1e-6 < share <= 1.0), default=1.0)

    def draw(axes: Axes, curve: Curve, style: Style) -> None:
        means = _averaged(curve.trace, "zeros")
        axes.plot(means.steps, [100.0 * share for share in means.values], **style)
        axes.set_ylim(0.0, min(top, 100.0))

    return _svg(curves, "gradient entries that are zero, %", draw)


def scale_figure(curves: Sequence[Curve]) -> str:
    """Return the loss scale in powers of two, with a mark for every skipped step, another for spikes.

    If there are more than `MOST_MARKS` skipped steps, those too close together share a mark, and the title
    says so.
    """
    count = sum(skipped for curve in curves for skipped in curve.trace.column("skipped"))
    has_spikes = any(spike is not None for curve in curves for spike in curve.trace.column("spike"))
    what = "▾ overflow, ✕ spike" if has_spikes else f"▾ skipped step{'' if count <= MOST_MARKS else 's'}"
    title = f"loss scale ({what}{'' if count <= MOST_MARKS else ', one mark where they are close'})"

    def draw(axes: Axes, curve: Curve, style: Style) -> None:
        draw_scale(axes, curve, style, MOST_MARKS // len(curves) if count > MOST_MARKS else None)

    return _svg(curves, title, draw)


def draw_scale(axes: Axes, curve: Curve, style: Style, most: int | None = None) -> None:
    """Draw the loss scale in powers of two, and its skipped steps.

    Args:
        axes: where to draw it.
        curve: the trace.
        style: of the line.
        most: about how many marks there may be; None draws one for each skipped step.
    """
    axes.step(*_moves(curve.trace), where="post", **style)
    for marker, color, of_spikes in (("v", "#222222", False), ("x", "#d55e00", True)):
        marks = _marks(curve.trace, most, of_spikes=of_spikes)
        if marks:
            axes.plot(*zip(*marks, strict=True), marker, color=color, markersize=5, zorder=3)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$"))


@in_style
def _svg(curves: Sequence[Curve], title: str, draw: Callable[[Axes, Curve, Style], None]) -> str:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    styles = _styles(curves)
    for curve in sorted(curves, key=lambda curve: not curve.is_reference):  # later ones cover it
        draw(axes, curve, styles[curve.name])
        if curve.steps:
            below: Style = {
                "transform": axes.get_xaxis_transform(),
                "color": MARKED,
                "clip_on": False,
                "zorder": 4,
            }
            axes.plot(curve.steps, [0.0] * len(curve.steps), "|", markersize=9, **below)
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
    axes.set_xlabel("step")
    _add_legend(figure, axes)
    return to_svg(figure, title)


def _styles(curves: Sequence[Curve]) -> dict[str, Style]:
    """Return a label, a color and dashes for every name."""
    others = ({"color": color, "linestyle": line} for line in cycle(("-", "--", ":")) for color in COLORS)
    colors = {curve.name: curve.color for curve in curves}
    styles = {name: {"color": color} if color else next(others) for name, color in colors.items()}
    return {name: {"label": _legible(name), **style} for name, style in styles.items()}


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Name each style once: inside the figure if they are few, else below it."""
    lines, names = axes.get_legend_handles_labels()
    named = dict(zip(names, lines, strict=True))
    if len(named) <= MOST_NAMES_INSIDE:
        axes.legend(named.values(), named, fontsize=9.5, framealpha=0.8)
        return
    figure.set_figheight(SIZE_INCHES[1] + 0.18 * math.ceil(len(named) / 3))
    figure.legend(named.values(), named, fontsize=8, loc="outside lower center", ncols=3)


def _legible(name: str) -> str:
    """Return a name for a legend: short, without mathematics, and without a first _, which would hide it."""
    short = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    plain = short.encode("utf-8", "replace").decode().replace("$", r"\$")
    return plain.replace("_", "\u2017", 1) if plain.startswith("_") else plain


class _Means(NamedTuple):
    """Means of neighboring values, their middle steps, and the lowest and highest of each group."""

    steps: list[float]
    values: list[float]
    lowest: list[float]
    highest: list[float]
    is_grouped: bool


def _averaged(trace: Trace, name: str) -> _Means:
    """Return at most `MOST_POINTS` means of a field, without None and values that cannot be drawn."""

    def points() -> Iterator[tuple[int, float]]:
        pairs = zip(trace.column("index"), trace.column(name), strict=True)
        return ((index, value) for index, value in pairs if value is not None and abs(value) < HUGE)

    size = max(1, math.ceil(sum(1 for _ in points()) / MOST_POINTS))
    means = _Means([], [], [], [], size > 1)
    rest = points()
    while group := list(islice(rest, size)):
        values = [value for _, value in group]
        means.steps.append(fmean(index for index, _ in group))
        means.values.append(fmean(values))
        means.lowest.append(min(values))
        means.highest.append(max(values))
    return means


def _marks(trace: Trace, most: int | None, *, of_spikes: bool = False) -> list[tuple[float, float]]:
    """Return the step and power of two of overflows or spikes; of very many, one for each part of an axis."""
    columns = (trace.column(name) for name in ("index", "scale", "skipped", "spike"))
    skips = (
        (float(index), exponent(scale))
        for index, scale, skipped, spike in zip(*columns, strict=True)
        if skipped and (spike is not None) == of_spikes
    )
    if most is None:
        return list(skips)
    first, last = float(trace[0].index), float(trace[-1].index)
    width = max((last - first) / max(most - 1, 1), 1e-9)
    parts: dict[int, tuple[float, float]] = {}
    for skip in skips:
        parts.setdefault(int((skip[0] - first) / width), skip)
    return list(parts.values())


def _moves(trace: Trace) -> tuple[list[float], list[float]]:
    """Return the steps at which the scale changes, and its powers of two, from the first step to the end.

    Of very many changes, only the lowest and the highest of neighboring ones are kept.
    """
    steps, powers = array("d"), array("d")  # a changing scale has as many as the trace has steps
    index = 0
    for index, scale in zip(trace.column("index"), trace.column("scale"), strict=True):
        power = exponent(scale)
        if not powers or power != powers[-1]:
            steps.append(float(index))
            powers.append(power)
    if len(trace):
        last = trace[-1]
        steps.append(index + 1.0)
        powers.append(exponent(last.scale if last.new_scale is None else last.new_scale))
    size = max(1, math.ceil(2 * len(steps) / MOST_MOVES))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(steps), size):
        group = list(zip(steps[start : start + size], powers[start : start + size], strict=True))
        kept += sorted({min(group, key=itemgetter(1)), max(group, key=itemgetter(1)), group[-1]})
    return [step for step, _ in kept], [power for _, power in kept]
