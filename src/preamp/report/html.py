"""Write the report: one self-contained HTML file, for wide and narrow screens."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.image import imsave
from numpy.typing import NDArray

from preamp.doctor import Diagnosis, diagnose, lost_words
from preamp.record.files import naming, replacing
from preamp.record.formatting import percent
from preamp.record.snapshots import QuantizedRow, Snapshot, merge_snapshots
from preamp.report.figures import Curve, loss_figure, scale_figure, zeros_figure
from preamp.report.heat import TITLES, WHOLE, heat_figure, heat_table
from preamp.report.strips import Strip, side_by_side

MOST_SNAPSHOTS = 4
MOST_OPERANDS = 8

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { margin: 0 auto; padding: 1.2rem; max-width: 1240px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0.4rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 1rem 0 0.5rem; }
p, li { max-width: 46rem; }
details { margin: 0.8rem 0; }
summary { cursor: pointer; color: #0072b2; }
.figures { display: grid; gap: 1rem 2rem; margin-top: 2rem; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 370px), 1fr)); }
figure { margin: 0; }
.figures svg { width: 100%; max-width: 640px; height: auto; display: block; }
.strips { display: grid; gap: 0.4rem 1rem; align-items: center; max-width: 860px; }
.strips { grid-template-columns: max-content 1fr; }
.strips img { width: 100%; image-rendering: pixelated; display: block; border: 1px solid #ddd; }
table { border-collapse: collapse; width: 100%; max-width: 860px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.35rem 0.6rem; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; color: #666; font-size: 0.85rem; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  .strips { grid-template-columns: 1fr; gap: 0.1rem; }
  .strips img { margin-bottom: 0.5rem; }
  thead { display: none; }
  tr { display: block; padding: 0.5rem 0; border-bottom: 2px solid #bbb; }
  td { display: flex; justify-content: space-between; border: 0; padding: 0.1rem 0; }
  td:first-child { font-weight: bold; }
  td:not(:first-child)::before { content: attr(data-label); color: #666; }
}
"""


def write_report(
    path: str | Path,
    *,
    title: str,
    lead: Sequence[str],
    curves: Sequence[Curve],
    table: Sequence[dict[str, str]],
    strips: Sequence[Strip] = (),
    strips_title: str = "",
    figures: Sequence[str] = (),
    footer: str = "",
) -> None:
    """Write the report. An existing one is replaced when the new one is complete.

    Args:
        path: the file to write. Missing folders are made.
        title: its heading.
        lead: introductory paragraphs.
        curves: the traces to draw. The doctor's findings about them stand at the top. A figure without
            numbers is left out. Of the first few traces with snapshots, the latest snapshot is drawn.
        table: one row each, heading to cell; all rows have the same headings.
        strips: rows of pictures to compare.
        strips_title: the heading above them.
        figures: more figures, as SVG.
        footer: small print.

    Raises:
        OSError: naming the file, if it cannot be written.
    """
    found = [(curve, diagnose(curve.trace)) for curve in curves]
    curves = [replace(curve, steps=_steps(diagnosis)) for curve, diagnosis in found]
    sections = [
        "".join(f"<p>{escape(text)}</p>" for text in lead),
        *_findings({curve.name: diagnosis for curve, diagnosis in reversed(found)}),
        *_pictures(strips, strips_title),
        f'<div class="figures">{"".join(map(_figure, _figures(curves)))}</div>',
        *map(_figure, figures),
        *_snapshots(curves),
        f"<h2>Numbers</h2>{_table(table)}" if table else "",
    ]
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{"".join(sections)}
<footer>{escape(footer)}</footer>
</body>
</html>
"""
    with naming(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(page.encode("utf-8", errors="replace"))


def _steps(diagnosis: Diagnosis) -> tuple[int, ...]:
    """Return the steps that problems and warnings are about."""
    return tuple(sorted({step for one in diagnosis.findings if one.is_bad for step in one.steps}))


def _findings(found: Mapping[str, Diagnosis]) -> list[str]:
    """Return what is wrong with each run; nothing if all are healthy."""
    bad = {name: [one for one in diagnosis.findings if one.is_bad] for name, diagnosis in found.items()}
    named = {name: findings for name, findings in reversed(bad.items()) if findings}
    if not named:
        return []
    sections = ["<h2>What the doctor found</h2>"]
    for name, findings in named.items():
        rows = [[*one.lines(), found[name].remedy(one)] for one in findings]
        items = "".join(f"<li>{'<br>'.join(map(escape, filter(None, lines)))}</li>" for lines in rows)
        sections.append(f"<h3>{escape(name)}</h3><ul>{items}</ul>")
    if any(_steps(found[name]) for name in named):
        sections.append("<p>Short lines at the bottom of the figures mark the steps that this is about.</p>")
    return sections


def _figures(curves: Sequence[Curve]) -> list[str]:
    scaled = [curve for curve in curves if any(x != 1.0 for x in curve.trace.column("scale"))]
    with_loss = [curve for curve in curves if any(x is not None for x in curve.trace.column("loss"))]
    with_zeros = [curve for curve in curves if any(x is not None for x in curve.trace.column("zeros"))]
    chosen: list[tuple[Callable[[Sequence[Curve]], str], list[Curve]]] = [
        (loss_figure, with_loss),
        (zeros_figure, with_zeros),
        (scale_figure, scaled),
    ]
    return [draw(some) for draw, some in chosen if some]


def _snapshots(curves: Sequence[Curve]) -> list[str]:
    """Return the latest snapshot of each of the first traces of different names that have one."""
    snapshots = {
        curve.name: merge_snapshots(curve.trace.snapshots)[-1]
        for curve in reversed(curves)
        if curve.trace.snapshots
    }
    chosen = [(name, snapshots[name]) for name in dict.fromkeys(c.name for c in curves) if name in snapshots][
        :MOST_SNAPSHOTS
    ]
    return ["<h2>Where the values are</h2>", LEGEND, *(_snapshot(*pair) for pair in chosen)] if chosen else []


LEGEND = (
    "<p>Each row is a module or a parameter, each column a power of two. The bars show which values the low "
    "precision can hold, at the loss scale of that step and at the best one; values to the left of a bar "
    "round to zero.</p>"
)


def _snapshot(name: str, snapshot: Snapshot) -> str:
    kinds = {row.what for row in snapshot.rows}
    ordered = [kind for kind in TITLES if kind in kinds]
    figures = "".join(_figure(heat_figure(snapshot, kind, name)) for kind in ordered)
    tables = "".join(
        f"<h3>{TITLES[kind].capitalize()}</h3>{_table(heat_table(snapshot, kind))}" for kind in ordered
    )
    return (
        f'<p><b>{escape(name)}.</b>{escape(lost_words(snapshot))}</p><div class="figures">{figures}</div>'
        f"{_operands(snapshot, name)}"
        f"<details><summary>{escape(name)} in numbers</summary>{tables}</details>"
    )


def _operands(snapshot: Snapshot, name: str) -> str:
    """Return what a recipe does to its operands, worst first; nothing without a recipe."""
    rows = snapshot.noisiest[:MOST_OPERANDS]
    if not rows:
        return ""
    count = len(snapshot.quantized)
    which = f"the worst {len(rows)} of {count} operands" if len(rows) < count else "operands, worst first"
    return f"<h3>{escape(name)}: {which}</h3>{OPERANDS}{_table(list(map(_operand, rows)))}"


OPERANDS = (
    "<p>What the recipe does to the two operands of each product: how many values other than zero become "
    "zero, how many are beyond the format's largest number after scaling, and the ratio of signal to "
    "noise.</p>"
)


def _operand(row: QuantizedRow) -> dict[str, str]:
    return {
        "module": row.name or WHOLE,
        "product": row.product,
        "operand": row.operand,
        "format": row.format,
        "becomes zero": percent(row.flushed),
        "saturates": percent(row.saturated),
        "SQNR": f"{row.sqnr:.1f} dB",
    }


def _figure(svg: str) -> str:
    return f"<figure>{svg}</figure>"


def _pictures(strips: Sequence[Strip], title: str) -> list[str]:
    if not strips:
        return []
    rows = [
        f'<div>{escape(s.name)}</div><img alt="{escape(s.name)}" src="{_png(s.pictures)}">' for s in strips
    ]
    return [f"<h2>{escape(title)}</h2>", f'<div class="strips">{"".join(rows)}</div>']


def _png(pictures: NDArray[np.float32]) -> str:
    """Return the pictures beside each other, as a data address."""
    buffer = io.BytesIO()
    imsave(buffer, side_by_side(pictures), cmap="gray_r", vmin=0.0, vmax=1.0, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _table(rows: Sequence[dict[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f'<td data-label="{escape(k)}">{escape(v)}</td>' for k, v in row.items()) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
