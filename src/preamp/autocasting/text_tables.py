"""Tables for a terminal, at most 80 columns wide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

WIDTH = 80
NARROWEST = 12


def text_table(rows: Sequence[Mapping[str, str]], cut: Iterable[str], right: Collection[str]) -> list[str]:
    """Return the lines of a table, the headings first.

    A name that is too long is cut from the left. Where that would make two names the same, both are shown
    whole, over several lines.

    Args:
        rows: heading to cell, at least one, all with the same headings.
        cut: the headings of the columns to narrow where the table is too wide, in this order.
        right: the headings of the columns that are aligned to the right.
    """
    headings = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in headings}
    gaps = 2 * (len(headings) - 1)
    for name in [each for each in cut if each in widths]:
        excess = max(0, sum(widths.values()) + gaps - WIDTH)
        widths[name] -= min(excess, max(0, widths[name] - NARROWEST))
    fitted = {name: _fitted([row[name] for row in rows], widths[name]) for name in headings}
    lines = [{name: name for name in headings}]
    for row in rows:
        cells = [fitted[name][row[name]] for name in headings]
        lines += [dict(zip(headings, parts, strict=True)) for parts in zip_longest(*cells, fillvalue="")]
    return [
        "  ".join(
            text.rjust(widths[name]) if name in right else text.ljust(widths[name])
            for name, text in line.items()
        ).rstrip()
        for line in lines
    ]


def _fitted(names: Iterable[str], width: int) -> dict[str, list[str]]:
    """Return the lines that show each name within a width."""
    cut = {name: name if len(name) <= width else "…" + name[len(name) - width + 1 :] for name in names}
    shown = Counter(cut.values())
    return {
        name: [text] if shown[text] == 1 else [name[at : at + width] for at in range(0, len(name), width)]
        for name, text in cut.items()
    }
