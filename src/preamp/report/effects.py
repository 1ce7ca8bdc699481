"""Draw what each operator of a step loses, as bars in SVG."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from preamp.blaming.blame import Blame, BlameRow
from preamp.report.drawing import in_style, to_svg

MOST_ROWS = 24
LONGEST_NAME = 44
WIDTH, ROW, AROUND = 9.0, 0.24, 1.1  # inches
LOWEST = 1e-3  # of what is expected; less is not drawn
# Distinguishable with any color vision (Okabe and Ito 2008).
COLORS = {"forward": "#0072b2", "backward": "#d55e00"}


@in_style
def effects_figure(blame: Blame) -> str:
    """Return the worst rows as bars, by how many times more each loses than is expected of its operator."""
    rows = list(blame.rows[:MOST_ROWS])
    figure = Figure(figsize=(WIDTH, AROUND + ROW * max(1, len(rows))), layout="constrained")
    axes = figure.add_subplot()
    finite = [row.severity for row in rows if math.isfinite(row.severity)]
    top = 2 * max([4.0, *finite])
    for at, row in enumerate(rows):
        length = min(row.severity, top)
        axes.barh(at, max(length, LOWEST), color=COLORS[row.direction], height=0.7, left=LOWEST / 2)
        if math.isinf(row.severity):
            axes.text(
                top * 0.9, at, row.cells()["effect"], color="white", ha="right", va="center", fontsize=9
            )
    axes.axvline(1.0, color="#222222", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_axisbelow(True)
    axes.set_xlim(LOWEST, top)
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=9)
    axes.invert_yaxis()
    title = "lost, in multiples of what is expected"
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
    directions = [Patch(color=color, label=direction) for direction, color in COLORS.items()]
    axes.legend(handles=directions, fontsize=9.5, loc="lower right")
    return to_svg(figure, title)


def _name(row: BlameRow) -> str:
    name = f"{row.operator} {row.place}"
    short = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    return short.replace("$", r"\$")
