"""A report of what autocast did: which operator ran in which precision, where, and what was cast."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from preamp.autocasting.text_tables import WIDTH, text_table

__all__ = [
    "OUTSIDE",
    "REPEATED",
    "CastReport",
    "CastRow",
    "Tally",
    "format_bytes",
    "format_flops",
    "place",
    "repeated",
    "stayed",
]

OUTSIDE = "-"
"""The module of operators that were called outside of modules."""
REPEATED = 2
"""The number of casts of one value from which on it is reported."""

CUT = ("module", "operator", "source")  # the columns to narrow, in this order
RIGHT = ("calls", "cast")
SHOWN = 20  # rows in a terminal
COSTLIEST = 3  # rows that are named for having stayed in float32
STAYED = {
    "unlisted": "the table does not name it",
    "float32": "the table says so",
    "untouched": "the table leaves it alone",
    "off": "autocast is off there",
    "explicit": "the program asks for its precision",
}
SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SHORT |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
PREFIXES = ("", "K", "M", "G", "T", "P")


@dataclass(frozen=True)
class CastRow:
    """The calls of one operator from one module with one set of precisions.

    Attributes:
        operator: the framework's name of it.
        module: the path of the module that called it, from the outermost one; "-" outside of modules.
        rule: its rule in the table; "unlisted" if it is not in the table, "off" if autocast is off,
            "explicit" if the call asks for a precision itself, "compiled" for an operator of a compiled
            graph, in which casts are operators, too.
        inputs: the floating-point dtypes of its inputs, such as "float32, bfloat16".
        runs: the dtype of its result.
        calls: the number of calls.
        bytes_cast: the size of the tensors that were cast for it, before the cast.
        bytes_moved: the size of its inputs and results, as it ran.
        flops: floating-point operations of its products; 0 if unknown.
        overflows: the number of calls with finite inputs and a result that is not finite.
        source: the line that called it, such as "train.py:41"; "-" if there is none; empty if lines are not
            recorded.
    """

    operator: str
    module: str
    rule: str
    inputs: str
    runs: str
    calls: int
    bytes_cast: int
    bytes_moved: int
    flops: int
    overflows: int
    source: str = ""

    @property
    def place(self) -> str:
        """Where it ran, in words."""
        return place(self.module, self.source)

    def cells(self) -> dict[str, str]:
        """Return the row as text, heading to cell."""
        return {
            "operator": self.operator,
            "module": self.module,
            **({"source": self.source} if self.source else {}),
            "rule": self.rule,
            "calls": f"{self.calls:,}",
            "dtypes": _short(self.runs if self.inputs == self.runs else f"{self.inputs} → {self.runs}"),
            "cast": format_bytes(self.bytes_cast) if self.bytes_cast else "-",
        }


@dataclass
class Tally:
    """The counts of one `CastRow` so far."""

    calls: int = 0
    bytes_cast: int = 0
    bytes_moved: int = 0
    flops: int = 0
    overflows: int = 0

    def add(self, **counts: int) -> None:
        """Add to some of the counts."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)


@dataclass(frozen=True)
class CastReport:
    """What was cast in a region.

    Attributes:
        rows: costliest first.
        warnings: sentences about what wastes time or overflows.
    """

    rows: Sequence[CastRow]
    warnings: Sequence[str]

    @property
    def bytes_cast(self) -> int:
        """The size of all tensors that were cast, before the cast."""
        return sum(row.bytes_cast for row in self.rows)

    @property
    def calls(self) -> int:
        """The number of operators that ran."""
        return sum(row.calls for row in self.rows)

    def summary(self) -> str:
        """Return how many operators ran in each precision, as a sentence."""
        by_dtype: dict[str, int] = {}
        for row in self.rows:
            by_dtype[row.runs] = by_dtype.get(row.runs, 0) + row.calls
        parts = [
            f"{calls:,} in {dtype}" for dtype, calls in sorted(by_dtype.items(), key=lambda item: -item[1])
        ]
        ran = "operator" if self.calls == 1 else "operators"
        return f"{self.calls:,} {ran} ran: {', '.join(parts)}. {format_bytes(self.bytes_cast)} were cast."

    def table(self) -> list[dict[str, str]]:
        """Return the rows as text, heading to cell."""
        return _cells(self.rows)

    def __str__(self) -> str:
        """Return the costliest rows, at most 80 columns wide, and the warnings.

        A name that is too long is cut from the left. Where that would make two names the same, both are shown
        whole, over several lines.
        """
        if not self.rows:
            return "No operator ran."
        table = _cells(self.rows)[:SHOWN]
        headings = [name for name in table[0] if name != "rule"]
        if len({tuple(row[name] for name in headings) for row in table}) < len(table):
            headings = list(table[0])  # some rows differ only in their rule
        text = text_table([{name: row[name] for name in headings} for row in table], CUT, RIGHT)
        more = len(self.rows) - len(table)
        rest = [f"... and {more} more rows in .rows"] if more else []
        paragraphs = [textwrap.fill(each, WIDTH) for each in (self.summary(), *self.warnings)]
        return "\n".join([*text, *rest, "", *paragraphs])


def _cells(rows: Sequence[CastRow]) -> list[dict[str, str]]:
    """Return rows as text, all with a source if one has one."""
    if not any(row.source for row in rows):
        return [row.cells() for row in rows]
    return [replace(row, source=row.source or OUTSIDE).cells() for row in rows]


def format_bytes(count: int) -> str:
    """Format a number of bytes for people to read.

    >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**20)
    ('512 B', '1.5 KiB', '3.0 MiB')
    """
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{count} B"


def format_flops(flops: int) -> str:
    """Format a number of floating-point operations for people to read.

    >>> format_flops(2_000_000), format_flops(500)
    ('2.0 MFLOP', '500 FLOP')
    """
    value, prefix = float(flops), 0
    while value >= 1000 and prefix < len(PREFIXES) - 1:
        value, prefix = value / 1000, prefix + 1
    return f"{value:.1f} {PREFIXES[prefix]}FLOP" if prefix else f"{flops} FLOP"


def stayed(rows: Iterable[CastRow]) -> Iterator[str]:
    """Yield a sentence for each of the costliest operators that stayed in float32, with the reason.

    Args:
        rows: costliest first.
    """
    kept = [row for row in rows if row.inputs == row.runs == "float32" and row.operator[-1] != "_"]
    for row in kept[:COSTLIEST]:
        work = f"{format_flops(row.flops)}, " if row.flops else ""
        why = STAYED.get(row.rule, "its inputs were float32")
        yield (
            f"{row.operator} {row.place} stayed in float32 ({work}{format_bytes(row.bytes_moved)}): {why}."
        )


def repeated(what: str, times: str, size: int, places: Iterable[str], why: str) -> str:
    """Return a sentence about a value that is cast several times.

    Args:
        what: the value.
        times: how often, such as "3 times".
        size: its bytes.
        places: where, each as `place` returns it.
        why: the reason, as the end of a sentence.
    """
    return f"{what} is cast {times} ({format_bytes(size)} each) {', '.join(places)}: {why}."


def place(module: str, source: str = "") -> str:
    """Return where an operator was called, in words.

    >>> place("Net.inner"), place(OUTSIDE), place(OUTSIDE, "train.py:41"), place("mlp", "train.py:41")
    ('in Net.inner', 'outside of modules', 'at train.py:41', 'in mlp at train.py:41')
    """
    if source in ("", OUTSIDE):
        return "outside of modules" if module == OUTSIDE else f"in {module}"
    return f"at {source}" if module == OUTSIDE else f"in {module} at {source}"


def _short(dtypes: str) -> str:
    """Abbreviate the names of dtypes."""
    return " ".join(
        SHORT.get(word.rstrip(","), word.rstrip(",")) + word[len(word.rstrip(",")) :]
        for word in dtypes.split()
    )
