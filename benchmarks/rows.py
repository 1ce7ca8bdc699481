"""The rows that every benchmark yields, and how they are printed and kept.

A row divides what preamp takes by what something else takes: below 1, preamp takes less. The other is a peer,
which does the same job, or a floor, which does less: the optimizer alone, or reading the memory once.

A new benchmark is a script that hands `main` a generator of rows, a line in `run.py` and a section in
`page.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from timing import QUICK, Effort, Spread, Times, Work, interleaved, spread

__all__ = ["Area", "Options", "Row", "difference", "main", "markdown", "number", "saved"]

VERDICTS = ("loses", "even", "wins", "cost")
UNITS = {"s": 1.0, "ms": 1e3, "µs": 1e6}


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        area: what part of preamp it is about.
        device: "cpu" or "cuda".
        what: the job.
        against: what preamp is compared with.
        ratio: preamp's figure over the other's, the median over the rounds.
        low: the lower quartile; the ratio itself where things are counted.
        high: the upper quartile.
        ours: preamp's figure.
        unit: the unit of `ours`.
        peer: whether the other does the same job.
    """

    area: str
    device: str
    what: str
    against: str
    ratio: float
    low: float
    high: float
    ours: float
    unit: str
    peer: bool = True

    @property
    def verdict(self) -> str:
        """Whether preamp wins. Beside a floor it can only cost."""
        if not self.peer:
            return "cost"
        low, high = round(self.low, 3), round(self.high, 3)
        return "wins" if high < 1.0 else "loses" if low > 1.0 else "even"

    def __str__(self) -> str:
        hidden = math.isnan(self.ratio)
        quartiles = "" if hidden or self.low == self.high else f"{number(self.low)} to {number(self.high)}"
        shown, figure = "noise" if hidden else number(self.ratio), f"{number(self.ours)} {self.unit}"
        return f"{self.verdict:6}{shown:>8}  {quartiles:18}{figure:>16}  {self.what}; against {self.against}"


def number(value: float) -> str:
    """Return a number with three digits, with four near 1, and an integer as it is.

    >>> number(0.06013), number(1.0024), number(17.94), number(1234.5), number(8), number(float("inf"))
    ('0.0601', '1.002', '17.9', '1,234', '8', 'inf')
    """
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value) or value == 0.0:
        return f"{value:g}"
    digits = 3 if 0.9 < value < 1.1 else 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(digits, 0), 6)}f}"


def difference(times: Times, name: str, base: str, unit: str = "ms") -> Spread:
    """Return how much longer a work takes than another."""
    return spread((a - b) * UNITS[unit] for a, b in zip(times[name], times[base], strict=True))


@dataclass(frozen=True)
class Area:
    """Makes the rows of one part of preamp, measured on one device."""

    name: str
    device: str = "cpu"

    def timed(
        self,
        what: str,
        times: Times,
        ours: str,
        peers: Sequence[str] = (),
        floors: Sequence[str] = (),
        unit: str = "ms",
        calls: int = 1,
    ) -> Iterator[Row]:
        """Yield a row for each peer and floor. `calls` is how many calls one work makes."""
        for other in (*peers, *floors):
            ratios = spread(a / b for a, b in zip(times[ours], times[other], strict=True))
            taken = spread(times[ours]).middle * UNITS[unit] / calls
            yield self.row(what, other, ratios, taken, unit, other in peers)

    def added(self, what: str, times: Times, base: str, peer: str) -> Row:
        """Return what "preamp" adds to a base, divided by what a peer adds."""
        ours, theirs = (difference(times, name, base) for name in ("preamp", peer))
        return self.over(what, f"{peer}: what it adds", ours, theirs)

    def over(
        self, what: str, against: str, ours: Spread, theirs: Spread, unit: str = "ms", peer: bool = True
    ) -> Row:
        """Return a row for two figures that each have a spread.

        Where the other's may be zero or negative, the ratio is lost in the noise: it is NaN.
        """
        ratios = Spread(math.nan, -math.inf, math.inf)
        if theirs.low > 0.0:
            ends = [
                ours.low / theirs.low,
                ours.low / theirs.high,
                ours.high / theirs.low,
                ours.high / theirs.high,
            ]
            ratios = Spread(ours.middle / theirs.middle, min(ends), max(ends))
        return self.row(what, against, ratios, ours.middle, unit, peer)

    def counted(
        self, what: str, against: str, ours: float, theirs: float, unit: str, peer: bool = True
    ) -> Row:
        """Return a row for something that is counted, so that it has no spread."""
        ratio = ours / theirs if theirs else math.inf if ours else 1.0
        return self.row(what, against, Spread(ratio, ratio, ratio), ours, unit, peer)

    def row(self, what: str, against: str, ratios: Spread, ours: float, unit: str, peer: bool = True) -> Row:
        """Return a row of this area."""
        ratio, low, high = ratios
        return Row(self.name, self.device, what, against, ratio, low, high, ours, unit, peer)


def markdown(lines: Iterable[Sequence[Row]]) -> Iterator[str]:
    """Yield the lines of a table: what preamp is compared with, first where it loses most rows, and in bold.

    Args:
        lines: each is one comparison in several runs, the newest last.
    """
    yield "| compared with | rows | ratio |\n|---|---|--:|"
    groups: dict[tuple[bool, str], list[Sequence[Row]]] = {}
    for rows in lines:
        device = "" if rows[-1].device == "cpu" else f" ({rows[-1].device})"
        groups.setdefault((not rows[-1].peer, f"{rows[-1].against}{device}"), []).append(rows)
    counts = {key: Counter(map(verdict, group)) for key, group in groups.items()}
    for key in sorted(groups, key=lambda key: (-counts[key]["loses"], key[0])):
        found, against = counts[key], key[1]
        if found["loses"]:
            highest = max(groups[key], key=lambda rows: rows[-1].high if verdict(rows) == "loses" else 0.0)
            against = f"**{against}**; highest: {highest[-1].what}"
        said = ", ".join(f"{each} {found[each]}" for each in VERDICTS if found[each])
        yield f"| {against} | {said} | {ratio([row for rows in groups[key] for row in rows])} |"


def verdict(rows: Sequence[Row]) -> str:
    """Return the verdict of one comparison in several runs.

    All have to be won for "wins". One that is lost and none that is won is "loses".
    """
    found = {row.verdict for row in rows}
    if len(found) == 1:
        return found.pop()
    return "loses" if found == {"loses", "even"} else "even"


def ratio(rows: Sequence[Row]) -> str:
    """Return the range of the ratio. Rows in which it is lost in the noise do not count."""
    known = [row.ratio for row in rows if not math.isnan(row.ratio)]
    if not known:
        return "noise"
    least, most = number(min(known)), number(max(known))
    return least if least == most else f"{least} to {most}"


def saved(path: Path) -> list[Row]:
    """Return rows from a file of JSON lines."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


class Options(argparse.Namespace):
    """The options of a benchmark; its own choices are attributes too."""

    device: str
    quick: bool
    rows: Path | None

    def interleaved(self, works: Mapping[str, Work], before: Callable[[str], object] | None = None) -> Times:
        """Time works that take turns, as `timing.interleaved` does."""
        return interleaved(works, QUICK if self.quick else Effort(), self.device, before)


def main(measure: Callable[[Options], Iterable[Row]], doc: str | None, **choices: Sequence[str]) -> None:
    """Run one benchmark from the command line: print its rows as they come, and append them to `--rows`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="two rounds and small sizes, to try it")
    parser.add_argument("--rows", type=Path, help="append the rows to this file, as JSON lines")
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    options = parser.parse_args(namespace=Options())
    for row in measure(options):
        print(row, flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                print(json.dumps(asdict(row)), file=file)
