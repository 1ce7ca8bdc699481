"""What a lens recorded of one step, module by module, and what follows from it for the loss scale.

A `Look` says which module overflowed first, which one limits the scale and where the scale should be, and
prints itself as a table.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

from preamp.checks import positive, whole
from preamp.errors import TraceError
from preamp.record.exponents import BANDS, Band, ExponentHistogram, exponent_of
from preamp.record.json_numbers import is_number, to_json

__all__ = ["Fit", "Kind", "Look", "LookRow", "joined", "look_from_json", "look_to_json", "module_of", "owner"]

Kind = Literal["activation", "flow", "gradient", "input", "weight"]
MARGIN = 2
WIDTH = 80
SHOWN = 40  # modules in a table that is printed
LABELS: dict[Kind, str] = {
    "input": "input",
    "weight": "weight",
    "activation": "output",
    "flow": "output grad",
    "gradient": "weight grad",
}


class LookRow(NamedTuple):
    """Values of one kind in one module.

    Attributes:
        name: the module's dotted name, "" for the root.
        what: of the forward pass, "activation" for what a module put out, "input" for what it was called
            with, "weight" for the parameters that the module itself owns; of the backward pass, "flow" for
            the gradient with respect to the output, "gradient" for the gradients of the module's own
            parameters.
        dtype: the dtype of the values as they were seen, such as "float16".
        histogram: of the values as they were seen. Flows and gradients are scaled.
        smallest: the smallest magnitude other than 0; None where all values are 0 or not finite, and where
            only the histogram is known.
        largest: the largest finite magnitude; None likewise.
        nans: how many of `histogram.nonfinite` are NaN; None where that is not known.
    """

    name: str
    what: Kind
    dtype: str
    histogram: ExponentHistogram
    smallest: float | None = None
    largest: float | None = None
    nans: int | None = None

    @property
    def direction(self) -> Literal["forward", "backward"]:
        """The pass that the values belong to. A loss scale multiplies those of the backward pass alone."""
        return "backward" if self.what in ("flow", "gradient") else "forward"


class Fit(NamedTuple):
    """How the values of a row fit into the low dtype.

    Attributes:
        zeros: which part of all values was exactly 0 when it was seen, from 0 to 1. Of values that were in
            the low dtype already, what was flushed is in here.
        flushed: which part of the finite values other than 0 rounds to 0.
        subnormal: which part of the finite values other than 0 is left with fewer digits than normal.
        headroom: how many times the values can be doubled before the largest leaves the low dtype; negative
            if it does, None where all are 0 or not finite.
    """

    zeros: float
    flushed: float
    subnormal: float
    headroom: int | None


class Look(NamedTuple):
    """One sampled step.

    Attributes:
        index: the step's number, as in `Step`.
        scale: the loss scale that was in this step's loss.
        low_dtype: what overflows and underflows: "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn" or
            "float32".
        rows: what was computed, in that order: activations, then flows and gradients.
        inputs: what modules were called with, in the order of the calls: those modules that have parameters
            of their own, or no modules inside. Where nothing measured it, there are none.
        weights: the parameters that were used, likewise.

    `print(look)` shows all of this as a table.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    scale: float
    low_dtype: str
    rows: tuple[LookRow, ...]
    inputs: tuple[LookRow, ...] = ()
    weights: tuple[LookRow, ...] = ()

    def __str__(self) -> str:
        return self.table()

    def table(self, modules: int | None = SHOWN) -> str:
        """Return smallest and largest magnitude, zeros, inf and NaN of each module, as plain text.

        Lines are at most 80 columns wide. Magnitudes of the backward pass are those that were in the
        tensors: multiplied by the loss scale. Where only a histogram is known, they are powers of two, and
        the largest lies below twice what is shown.

        Args:
            modules: of how many modules to show each pass; None for all. Of more, those next to the first
                inf or NaN are shown, or else those that lose most.

        Raises:
            PolicyError: for a number of modules that is not a whole number from 1 on.
        """
        if modules is not None:
            whole("modules", modules, least=1, instead=f"modules={SHOWN}")
        return "\n".join(_table(self, modules))

    @property
    def band(self) -> Band:
        """What the low dtype can hold."""
        return BANDS[self.low_dtype]

    @property
    def path(self) -> tuple[LookRow, ...]:
        """The rows with values that are not finite, in the order in which they were computed."""
        return tuple(row for row in self.rows if row.histogram.nonfinite)

    @property
    def first_overflow(self) -> LookRow | None:
        """The first row of `path`; None if all flows and gradients are finite.

        Its `direction` says whether that was in the forward pass, where no loss scale helps, or in the
        backward pass. An activation may hold infinities on purpose, such as those of a mask, and then it
        begins the path.
        """
        if all(row.direction == "forward" for row in self.path):
            return None
        return self.path[0]

    @property
    def limit(self) -> LookRow | None:
        """The row that keeps the scale from being higher; None if all are 0.

        That is the one with the largest value, among the flows that are in the low dtype and the gradients
        of their modules. Where no flow is, as for a whole float32 model, all flows and gradients count.
        """
        found = self._highest()
        return found and found[1]

    def best_scale(self, margin: int = MARGIN) -> float | None:
        """Return the largest power of two at which this step would have kept a margin below overflow.

        Where something overflowed, it may still be too high: how large the values were is not known.

        Args:
            margin: how many times the largest value can still be doubled.

        Returns:
            The scale; None where there is nothing to go by.

        Raises:
            PolicyError: for a margin that is no whole number from 0 on.
        """
        whole("margin", margin, least=0, instead=f"margin={MARGIN}")
        found = self._highest()
        if found is None or not 0.0 < self.scale < math.inf:
            return None
        best = exponent_of(self.scale) + self._last_exponent() - found[0] - margin
        return math.ldexp(1.0, min(max(best, -1074), 1023))

    def fit(self, row: LookRow, scale: float | None = None) -> Fit:
        """Return how a row's values fit into the low dtype.

        Args:
            row: one of `rows`, `inputs` or `weights`.
            scale: the loss scale to answer for, a power of two away from this step's; None for this step's.
                Values of the forward pass are the same at all of them.

        Raises:
            PolicyError: for a scale that is no finite number above 0.
        """
        seen, shift = row.histogram, 0
        if scale is not None:
            positive("scale", scale, instead="scale=look.best_scale()")
        if scale is not None and row.direction == "backward":
            shift = exponent_of(scale) - exponent_of(self.scale)
        return Fit(
            zeros=seen.zeros / seen.total if seen.total else 0.0,
            flushed=seen.flushed(self.band, shift),
            subnormal=seen.subnormal(self.band, shift),
            headroom=seen.headroom(self.band, shift),
        )

    def _scaled_rows(self) -> list[LookRow]:
        """Return the flows and gradients that can overflow in the low dtype."""
        scaled = [row for row in self.rows if row.direction == "backward"]
        flows: dict[str | None, str] = {row.name: row.dtype for row in scaled if row.what == "flow"}
        chosen = [
            row
            for row in scaled
            if row.dtype == self.low_dtype
            or (row.what == "gradient" and flows.get(owner(row.name, flows)) == self.low_dtype)
        ]
        return chosen or scaled

    def _highest(self) -> tuple[int, LookRow] | None:
        """Return the largest exponent of the scaled rows and the first row that has it."""
        beyond = self._last_exponent() + 1  # of an overflow it is not known by how much
        found = []
        for row in self._scaled_rows():
            peak = beyond if row.histogram.nonfinite else row.histogram.peak_exponent
            found += [] if peak is None else [(peak, row)]
        return max(found, key=itemgetter(0), default=None)

    def _last_exponent(self) -> int:
        return exponent_of(self.band.largest)


def owner(name: str, modules: Collection[str | None]) -> str | None:
    """Return which of some modules a row belongs to; None for none of them.

    A row has its module's name, or, where `preamp.jax.look` named it, the path of a parameter below that:
    "dense.kernel", "dense/kernel" or "dense[0]" of "dense".
    """
    while name not in modules:
        name = module_of(name)
        if not name:
            return None
    return name


def module_of(path: str) -> str:
    """Return the path of what holds a parameter, such as "dense" for "dense.kernel"; "" for the outermost."""
    return path[: max(0, *map(path.rfind, "./["))]


def joined(looks: Iterable[Look]) -> list[Look]:
    """Return looks in which what was recorded of one step in several parts is one look.

    `preamp.jax.look` makes one look for each kind of value: gradients, activations, flows. A row that the
    step has already, as where a step has several passes, begins another look, and so does a backward pass at
    another scale. Rows are in the order of `Look.rows`. Where two formats are told, the narrower one holds.

    Args:
        looks: looks at any steps, in any order; the result is in the order of their first parts.
    """
    parts: list[Look] = []
    seen: list[set[tuple[Kind, str]]] = []
    latest: dict[int, int] = {}
    for look in looks:
        rows = {(row.what, row.name) for row in (*look.inputs, *look.weights, *look.rows)}
        place = latest.get(look.index)
        if place is None or rows & seen[place] or not _fit_together(parts[place], look):
            latest[look.index] = len(parts)
            parts.append(look)
            seen.append(rows)
        else:
            parts[place] = _both(parts[place], look)
            seen[place] |= rows
    return parts


def _fit_together(one: Look, other: Look) -> bool:
    alike = one.scale == other.scale or (math.isnan(one.scale) and math.isnan(other.scale))
    return alike or not (_is_scaled(one) and _is_scaled(other))


def _is_scaled(look: Look) -> bool:
    """Return whether any values of a look are multiplied by its scale."""
    return any(row.direction == "backward" for row in look.rows)


def _both(one: Look, other: Look) -> Look:
    rows = sorted((*one.rows, *other.rows), key=lambda row: ORDER[row.what])
    return Look(
        one.index,
        one.scale if _is_scaled(one) or not _is_scaled(other) else other.scale,
        min(one.low_dtype, other.low_dtype, key=lambda name: BANDS[name].largest),
        tuple(rows),
        (*one.inputs, *other.inputs),
        (*one.weights, *other.weights),
    )


def look_to_json(look: Look) -> dict[str, Any]:
    """Return a look as what JSON can hold. What is not known is left out.

    Raises:
        TraceError: for a look that could not be read back.
    """
    entry = {
        "index": int(look.index),
        "scale": to_json(float(look.scale)),
        "low_dtype": look.low_dtype,
        "rows": list(map(_row_to_json, look.rows)),
        **{name: list(map(_row_to_json, rows)) for name in GIVEN if (rows := getattr(look, name))},
    }
    look_from_json(entry)
    return entry


def _row_to_json(row: LookRow) -> dict[str, Any]:
    known = {name: getattr(row, name) for name in EXACT if getattr(row, name) is not None}
    return {"name": row.name, "what": row.what, "dtype": row.dtype, **row.histogram.to_json(), **known}


def look_from_json(entry: Any) -> Look:
    """Return the look that `look_to_json` described.

    Raises:
        TraceError: for what describes none, saying why.
    """
    types = {"index": int, "scale": (int, float, str), "low_dtype": str, "rows": list}
    values = _fields(entry, "a look", types, dict.fromkeys(GIVEN, list))
    if not (is_number(values["index"]) and is_number(values["scale"])):
        raise TraceError(f"index or scale of a look is no number: {values['scale']!r:.60}")
    if values["low_dtype"] not in BANDS:
        raise TraceError(f"low_dtype is {values['low_dtype']!r:.60}, none of {', '.join(BANDS)}")
    rows = {"rows": _rows(values["rows"], COMPUTED)}
    rows |= {name: _rows(values[name], (kind,)) for name, kind in GIVEN.items() if name in values}
    return Look(**{**values, "scale": float(values["scale"]), **rows})


COMPUTED: tuple[Kind, ...] = ("activation", "flow", "gradient")
ORDER: dict[Kind, int] = {what: place for place, what in enumerate(COMPUTED)}
GIVEN: dict[str, Kind] = {"inputs": "input", "weights": "weight"}
EXACT: dict[str, Any] = {"smallest": (int, float), "largest": (int, float), "nans": int}


def _rows(entries: list[Any], kinds: Sequence[Kind]) -> tuple[LookRow, ...]:
    return tuple(_row(entry, kinds) for entry in entries)


def _row(entry: Any, kinds: Sequence[Kind]) -> LookRow:
    rest = {"low": int, "counts": list, "zeros": int, "nonfinite": int}
    values = _fields(entry, "a look's row", {"name": str, "what": str, "dtype": str, **rest}, EXACT)
    if values["what"] not in kinds:
        raise TraceError(f"what is {values['what']!r:.60}, none of {', '.join(kinds)}")
    histogram = ExponentHistogram.from_json(values)
    exact = {name: values[name] for name in EXACT if name in values}
    for name in ("smallest", "largest"):
        if name in exact:
            if not (is_number(exact[name]) and 0.0 < exact[name] < math.inf):
                raise TraceError(f"{name} of a look's row is {exact[name]!r:.60}, not a number above 0")
            exact[name] = float(exact[name])
    if not 0 <= exact.get("nans", 0) <= histogram.nonfinite:
        raise TraceError(f"nans of a look's row is {exact['nans']!r:.60}, not from 0 to nonfinite")
    return LookRow(values["name"], values["what"], values["dtype"], histogram, **exact)


def _fields(entry: Any, place: str, types: Mapping[str, Any], optional: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an entry, which has all of these, perhaps the optional ones, and no others."""
    if not isinstance(entry, dict):
        raise TraceError(f"{place} is {entry!r:.60}, not an object in braces")
    known = {**types, **optional}
    missing = [name for name in types if name not in entry]
    unknown = [name for name in entry if name not in known]
    if missing or unknown:
        raise TraceError(f"{place} without {missing[0]}" if missing else f"unknown entry {unknown[0]!r:.60}")
    for name, value in entry.items():
        if isinstance(value, bool) or not isinstance(value, known[name]):
            raise TraceError(f"{name} of {place} is {value!r:.60}, which it cannot be")
    return entry


_Block: TypeAlias = tuple[str, list[LookRow]]


def _table(look: Look, most: int | None) -> Iterator[str]:
    """Yield the lines of `Look.table`."""
    band, first = look.band, look.first_overflow
    held = f"{band.name} holds {band.smallest:.2g} to {band.largest:.6g}"
    yield from _wrapped(f"step {look.index}, loss scale {look.scale:.6g}; {held}", "")
    if first is not None:
        given = [row for row in (*look.inputs, *look.weights) if row.name == first.name]
        bad = dict.fromkeys(LABELS[row.what] for row in given if row.histogram.nonfinite)
        note = f", whose {' and '.join(bad)} had some already" if bad and first.direction == "forward" else ""
        whose = f"{LABELS[first.what]} of {_printable(first.name)}"
        yield from _wrapped(f"first inf or NaN: {whose}{note}, {first.direction} pass", "")
    yield "min: smallest magnitude other than 0; max: largest finite magnitude"
    hidden = 0
    for title, blocks in zip(("forward pass", "backward pass, scaled"), _blocks(look), strict=True):
        shown = _chosen(look, blocks, most)
        hidden += len(blocks) - len(shown)
        if blocks:
            yield ""
            yield f"{title:<30}{'min':>10}{'max':>10}{'zero %':>8}  inf, NaN"
            yield from _lines(blocks, shown)
    if hidden:
        yield ""
        yield "print(look.table(None)) shows all modules."


def _blocks(look: Look) -> tuple[list[_Block], list[_Block]]:
    """Return each module with its rows of the forward and of the backward pass, as they were computed."""
    given: dict[str, list[LookRow]] = {}
    for row in (*look.inputs, *look.weights):
        given.setdefault(row.name, []).append(row)
    forward = [
        (name, [*given.pop(name, []), *rows])
        for name, rows in groupby((r for r in look.rows if r.direction == "forward"), key=_name)
    ]
    backward = groupby((r for r in look.rows if r.direction == "backward"), key=_name)
    return [*forward, *given.items()], [(name, list(rows)) for name, rows in backward]


def _name(row: LookRow) -> str:
    return row.name


def _lines(blocks: Sequence[_Block], shown: Iterable[int]) -> Iterator[str]:
    """Yield the lines of the blocks that are shown, and how many are left out between them."""
    after = 0
    for place in (*shown, len(blocks)):
        if place > after:
            yield f"  ... {place - after} more"
        if place < len(blocks):
            name, rows = blocks[place]
            yield from _wrapped(_printable(name), "  ")
            yield from map(_line, rows)
        after = place + 1


def _chosen(look: Look, blocks: Sequence[_Block], most: int | None) -> Sequence[int]:
    """Return which blocks to show: those around the first one that is not finite, or else the worst."""
    places = range(len(blocks))
    if most is None or len(blocks) <= most:
        return places
    bad = next((n for n in places if any(row.histogram.nonfinite for row in blocks[n][1])), None)
    if bad is not None:
        start = min(max(bad - most // 2, 0), len(blocks) - most)
        return places[start : start + most]
    return sorted(sorted(places, key=lambda n: _badness(look, blocks[n][1]))[:most])


def _badness(look: Look, rows: Iterable[LookRow]) -> tuple[float, float]:
    """Return what sorts blocks that lose much, or are close to overflow, to the front."""
    fits = [look.fit(row) for row in rows]
    lost = max(fit.zeros + (1.0 - fit.zeros) * (fit.flushed + fit.subnormal) for fit in fits)
    return -round(lost, 2), min((fit.headroom for fit in fits if fit.headroom is not None), default=0)


def _line(row: LookRow) -> str:
    seen = row.histogram
    label = f"    {LABELS[row.what]:<13}{_printable(row.dtype):.13}"
    low, high = _magnitude(row.smallest, seen.low, seen), _magnitude(row.largest, seen.peak_exponent, seen)
    return f"{label:<30}{low:>10}{high:>10}{_zeros(seen):>8}  {_nonfinite(row)}".rstrip()


def _magnitude(exact: float | None, exponent: int | None, seen: ExponentHistogram) -> str:
    if exact is not None:
        return f"{exact:.2e}"
    if seen.counts:
        return f"2^{exponent}"
    return "0" if seen.zeros else "-"


def _zeros(seen: ExponentHistogram) -> str:
    if not seen.total:
        return "-"
    percent = 100.0 * seen.zeros / seen.total
    return "<0.1" if 0.0 < percent < 0.05 else f"{percent:.1f}"


def _nonfinite(row: LookRow) -> str:
    """Return how many values are inf and how many NaN."""
    count, nans = row.histogram.nonfinite, row.nans
    if nans is None:
        return f"{_count(count)} inf or NaN" if count else ""
    told = ((count - nans, "inf"), (nans, "NaN"))
    return ", ".join(f"{_count(number)} {kind}" for number, kind in told if number)


def _count(number: int) -> str:
    return str(number) if number < 10_000 else f"{number:.0e}"


def _printable(name: str) -> str:
    """Return a module's name without what a terminal would act on: a file's names may come from anybody."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in name) or "the whole model"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
