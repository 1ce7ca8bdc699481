"""Draw a snapshot as a heat map in SVG: modules by powers of two, and the range of the low dtype above."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from preamp.doctor import best_scale
from preamp.record.exponents import Band, ExponentHistogram, exponent_of
from preamp.record.formatting import percent, power
from preamp.record.snapshots import Fit, Kind, Snapshot, SnapshotRow
from preamp.report.drawing import in_style, to_svg

MOST_ROWS: Final = 40
MOST_COLUMNS: Final = 64
LONGEST_NAME: Final = 22
LONGEST_TITLE: Final = 52
WHOLE: Final = "whole model"
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 5.2, 1.5, 0.64, 0.5, 0.8  # inches
ROW: Final = 0.165  # inches
BAR: Final = 1.5  # rows from one bar to the next
FULL: Final = 0.25  # the share of a row's entries at which a cell has its full color
FAINTEST: Final = 0.14

LEGEND: Final[dict[str, Any]] = {
    "loc": "lower center",
    "ncols": 4,
    "fontsize": 9,
    "frameon": False,
    "handlelength": 1.0,
    "columnspacing": 1.4,
}

Fate: TypeAlias = Literal["kept", "loses digits", "zero", "overflows"]
# Distinguishable with any colour vision (Okabe and Ito 2008).
COLORS: Final[dict[Fate, str]] = {
    "kept": "#0072b2",
    "loses digits": "#56b4e9",
    "zero": "#d55e00",
    "overflows": "#222222",
}
TITLES: Final[dict[Kind, str]] = {
    "flow": "gradients between modules",
    "gradient": "gradients of parameters",
    "activation": "activations",
}


class Span(NamedTuple):
    """The limits of a format, as exponents of two.

    Attributes:
        smallest: below, values round to zero.
        normal: from here on all digits are kept.
        end: from here on values overflow.
    """

    smallest: int
    normal: int
    end: int


def span_of(band: Band, scale: float) -> Span:
    """Return the limits of a format for values that are multiplied by a scale before they are stored."""
    shift = exponent_of(scale)
    edges = (exponent_of(band.smallest) - 1, exponent_of(band.normal), exponent_of(band.largest) + 1)
    return Span(*(edge - shift for edge in edges))


def shown_rows(snapshot: Snapshot, what: Kind) -> list[SnapshotRow]:
    """Return the rows of a kind from the first module to the last; only the worst of very many."""
    rows = [row for row in snapshot.rows if row.what == what]
    ordered = rows if what == "activation" else rows[::-1]
    worst = sorted(ordered, key=lambda row: _badness(snapshot.fit(row), row), reverse=True)[:MOST_ROWS]
    kept = set(map(id, worst))
    return [row for row in ordered if id(row) in kept]


def _badness(fit: Fit, row: SnapshotRow) -> tuple[float, float]:
    headroom = math.inf if fit.headroom is None else fit.headroom
    return row.histogram.nonfinite + zero_share(fit) + 0.1 * fit.subnormal, -headroom


def zero_share(fit: Fit) -> float:
    """Return the share of all entries that is zero or rounds to zero."""
    return fit.zeros + (1.0 - fit.zeros) * fit.flushed


def heat_table(snapshot: Snapshot, what: Kind) -> list[dict[str, str]]:
    """Return the numbers of the rows that are shown."""
    return [_table_row(snapshot.fit(row), row) for row in shown_rows(snapshot, what)]


def _table_row(fit: Fit, row: SnapshotRow) -> dict[str, str]:
    return {
        "module": row.name or WHOLE,
        "exactly zero": percent(fit.zeros),
        "rounds to zero": percent(fit.flushed),
        "loses digits": percent(fit.subnormal),
        "headroom": "-" if fit.headroom is None else f"{fit.headroom} powers",
    }


@in_style
def heat_figure(snapshot: Snapshot, what: Kind, name: str = "") -> str:
    """Return the heat map of one kind of values.

    Columns are the powers of two of the values without the loss scale; activations never have one. The color
    of a cell shows what happens to its values in the low dtype at the scale of the step, and its strength the
    share of the row's entries. The bars above show the range of the low dtype at that scale, and at the best
    one.

    Args:
        snapshot: a snapshot with rows of this kind.
        what: "flow", "gradient" or "activation".
        name: the name of the run, for the title.
    """
    plan = _Plan(snapshot, what)
    height = TOP + BOTTOM + ROW * plan.height
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes(
        (LEFT / WIDTH, BOTTOM / height, 1 - (LEFT + RIGHT) / WIDTH, 1 - (TOP + BOTTOM) / height)
    )
    _frame(axes, plan)
    _draw_cells(axes, plan)
    for place in range(len(plan.spans)):
        _draw_span(axes, plan, place)
    _write(axes, plan)
    title = f"{name}: {TITLES[what]}" if name else TITLES[what].capitalize()
    figure.text(
        0.012, 1 - 0.2 / height, _legible(title, LONGEST_TITLE), fontsize=11.5, fontweight="bold", va="center"
    )
    figure.text(0.012, 1 - 0.43 / height, plan.subtitle(), fontsize=9.5, va="center")
    figure.legend(handles=[Patch(color=color, label=fate) for fate, color in COLORS.items()], **LEGEND)
    return to_svg(figure, f"{title}: {plan.subtitle()}")


class _Plan:
    """The rows and columns and their positions: one unit is a row or a power of two."""

    def __init__(self, snapshot: Snapshot, what: Kind) -> None:
        self.snapshot, self.what = snapshot, what
        self.rows = shown_rows(snapshot, what)
        self.scales = _scales(snapshot, what)
        self.shift = exponent_of(self.scales[0])
        self.spans = [span_of(snapshot.band, scale) for scale in self.scales]
        self.low, self.high = _columns(self.rows, self.spans, self.shift)
        self.side = max(0.045 * (self.high - self.low), 1.0)  # the width of the columns "0" and "inf"
        self.left, self.right = self.low - 1.6 * self.side, self.high + 1.6 * self.side
        self.head = BAR * len(self.spans) + 0.9

    @property
    def height(self) -> float:
        """The height of the map and of the bars above it, in rows."""
        return len(self.rows) + self.head

    def shares(self) -> NDArray[np.float64]:
        """Return the shares of each row's entries: zeros, each power of two, and non-finite values."""
        return np.array(
            [_shares(row.histogram.shifted(-self.shift), self.low, self.high) for row in self.rows]
        )

    def fates(self) -> list[Fate]:
        """Return what happens to the values of each column."""
        return ["zero", *(_fate(column, self.spans[0]) for column in range(self.low, self.high)), "overflows"]

    def label(self, place: int) -> str:
        """Return the label of a bar."""
        if self.what == "activation":
            return f"{self.snapshot.low_dtype} holds"
        scale = power(self.scales[place])
        return f"best: {scale}" if place else f"{self.snapshot.low_dtype} at {scale}"

    def subtitle(self) -> str:
        """Return what happens to the entries of all rows, shown or not, in one line."""
        rows = [row for row in self.snapshot.rows if row.what == self.what]
        fits = [(self.snapshot.fit(row), row.histogram) for row in rows]
        total = sum(histogram.total for _, histogram in fits) or 1
        zero = sum(zero_share(fit) * histogram.total for fit, histogram in fits) / total
        digits = sum(fit.subnormal * histogram.nonzero for fit, histogram in fits) / total
        worst = f", the worst {len(self.rows)} of {len(rows)}" if len(rows) > len(self.rows) else ""
        words = f"{percent(zero)} is zero or rounds to it, {percent(digits)} loses digits"
        for first in [row for row in self.snapshot.path if row.what == self.what][:1]:
            name = f"module {_legible(first.name, LONGEST_NAME)}" if first.name else f"the {WHOLE}"
            words = f"inf or NaN, first in {name}"
        return f"step {self.snapshot.index:,}{worst}: {words}"


def _scales(snapshot: Snapshot, what: Kind) -> list[float]:
    """Return the scale of the step and, where it matters, the best one."""
    if what == "activation":
        return [1.0]
    best = best_scale(snapshot)
    return [snapshot.scale] if best is None else [snapshot.scale, best]


def _columns(rows: Sequence[SnapshotRow], spans: Sequence[Span], shift: int) -> tuple[int, int]:
    """Return the first exponent and the one after the last: of all values, and of the spans if they fit."""
    histograms = [row.histogram for row in rows if row.histogram.counts]
    low = min((one.low for one in histograms), default=0) - shift
    high = max((one.low + len(one.counts) for one in histograms), default=1) - shift
    low = max(low, high - MOST_COLUMNS)
    rest = MOST_COLUMNS - (high - low)
    left = min(max(low - min(span.smallest for span in spans) + 1, 1), rest // 2)
    right = min(max(max(span.end for span in spans) - high + 1, 1), rest - left)
    return low - left, high + right


def _shares(histogram: ExponentHistogram, low: int, high: int) -> list[float]:
    """Return the shares of a row; values below the first column are counted in it."""
    below = sum(histogram.counts[: max(low - histogram.low, 0)])
    by_exponent = dict(enumerate(histogram.counts, start=histogram.low))
    first, *others = [by_exponent.get(exponent, 0) for exponent in range(low, high)]
    return [
        count / max(histogram.total, 1)
        for count in (histogram.zeros, first + below, *others, histogram.nonfinite)
    ]


def _fate(exponent: int, span: Span) -> Fate:
    if exponent < span.smallest:
        return "zero"
    if exponent < span.normal:
        return "loses digits"
    return "kept" if exponent < span.end else "overflows"


def _frame(axes: Axes, plan: _Plan) -> None:
    axes.set_xlim(plan.left, plan.right)
    axes.set_ylim(len(plan.rows), -plan.head)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for border in (plan.spans[0].smallest, plan.spans[0].end):
        if plan.low < border < plan.high:
            axes.plot([border, border], [0.6 - plan.head, len(plan.rows)], color="#222222", linewidth=1.0)


def _draw_cells(axes: Axes, plan: _Plan) -> None:
    shares = plan.shares()
    pixels = np.stack([_pixels(shares[:, n], fate) for n, fate in enumerate(plan.fates())], axis=1)
    blocks = (
        (slice(0, 1), plan.left, plan.left + plan.side),
        (slice(1, -1), plan.low, plan.high),
        (slice(-1, None), plan.right - plan.side, plan.right),
    )
    for part, left, right in blocks:
        extent = (left, right, len(plan.rows), 0.0)
        axes.imshow(pixels[:, part], extent=extent, interpolation="none", aspect="auto")
        axes.add_patch(
            Rectangle((left, 0), right - left, len(plan.rows), fill=False, edgecolor="#bbbbbb", linewidth=0.6)
        )


def _pixels(shares: NDArray[np.float64], fate: Fate) -> NDArray[np.float64]:
    """Return colors: white for 0, the full color from `FULL` on, by the square root in between."""
    strength = FAINTEST + (1 - FAINTEST) * np.sqrt(np.minimum(shares / FULL, 1.0))
    strength = np.where(shares > 0, strength, 0.0)[:, None]
    return 1.0 - strength * (1.0 - np.array(to_rgb(COLORS[fate])))


def _draw_span(axes: Axes, plan: _Plan, place: int) -> None:
    """Draw the range of the format as a bar, with an arrow where it continues beyond the map."""
    span, top = plan.spans[place], 0.9 + BAR * place - plan.head
    parts: Sequence[tuple[int, int, Fate]] = (
        (span.smallest, span.normal, "loses digits"),
        (span.normal, span.end, "kept"),
    )
    for left, right, fate in parts:
        inside = max(left, plan.low), min(right, plan.high)
        if inside[0] < inside[1]:
            bar = Rectangle((inside[0], top), inside[1] - inside[0], 0.8, color=COLORS[fate], linewidth=0)
            bar.set_gid(f"{plan.what}-{place}-{fate.replace(' ', '-')}")
            axes.add_patch(bar)
    arrow = {"arrowstyle": "-|>", "color": COLORS["kept"]}
    if span.end > plan.high:
        axes.annotate("", (plan.right, top + 0.4), (plan.high - 0.1, top + 0.4), arrowprops=arrow)
    if span.smallest < plan.low:
        axes.annotate("", (plan.left, top + 0.4), (plan.low + 0.1, top + 0.4), arrowprops=arrow)
    axes.annotate(
        plan.label(place),
        (plan.left, top + 0.4),
        (-3, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=9,
    )


def _write(axes: Axes, plan: _Plan) -> None:
    """Label rows and columns, and write the share of zeros beside each row."""
    names = _shortened([row.name for row in plan.rows])
    axes.set_yticks([n + 0.5 for n in range(len(names))], names, fontsize=8.5)
    axes.tick_params(axis="y", length=0, pad=2)
    step = 4 if plan.high - plan.low <= 32 else 8
    inner = range(plan.low + step // 4, plan.high - step // 4 + 1)
    marks = [exponent for exponent in inner if exponent % step == 0]
    ticks = [plan.left + plan.side / 2, *marks, plan.right - plan.side / 2]
    axes.set_xticks(ticks, ["0", *(f"$2^{{{mark}}}$" for mark in marks), "inf"], fontsize=9)
    axes.set_xlabel(
        "magnitude" if plan.what == "activation" else "magnitude without the loss scale", fontsize=9.5
    )
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
    axes.annotate("zero", (plan.right, -0.45), (4, 0), color=COLORS["zero"], fontweight="bold", **beside)
    for n, row in enumerate(plan.rows):
        share = percent(zero_share(plan.snapshot.fit(row))).replace("below ", "<")  # or it would be cut off
        axes.annotate(share, (plan.right, n + 0.5), (4, 0), **beside)


def _shortened(names: Sequence[str]) -> list[str]:
    """Shorten names: remove the modules that all of them begin with, and the middle of long ones."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    short = ["….".join(["", name.split(".", shared)[-1]]) if shared > 1 else name for name in names]
    return [_legible(name or WHOLE, LONGEST_NAME) for name in short]


def _legible(text: str, most: int) -> str:
    """Return a text without mathematics, and without its middle if it is long."""
    plain = text.encode("utf-8", "replace").decode()
    half = most // 2
    short = plain if len(plain) <= most else f"{plain[: most - half - 1]}…{plain[-half:]}"
    return short.replace("$", r"\$")
