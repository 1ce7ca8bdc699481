"""The values of one step, module by module, as a lens recorded them, and the loss scale that suits them.

A `Snapshot` finds the module that overflowed first, the one that limits the scale, and the best scale, and
prints as a table.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

from preamp.checks import positive, whole
from preamp.recipes.values import Operand, Product
from preamp.record.exponents import BANDS, Band, ExponentHistogram, exponent_of

__all__ = [
    "Fit",
    "Kind",
    "QuantizedRow",
    "Snapshot",
    "SnapshotRow",
    "merge_snapshots",
    "module_of",
    "owner",
]

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
COMPUTED: tuple[Kind, ...] = ("activation", "flow", "gradient")
ORDER: dict[Kind, int] = {what: place for place, what in enumerate(COMPUTED)}


class SnapshotRow(NamedTuple):
    """Values of one kind in one module.

    Attributes:
        name: the module's dotted name, "" for the root.
        what: of the forward pass, "activation" for the outputs of a module, "input" for its arguments,
            "weight" for the parameters that the module itself owns; of the backward pass, "flow" for the
            gradient with respect to the output, "gradient" for the gradients of the module's own parameters.
        dtype: the dtype of the values when they were counted, such as "float16".
        histogram: of the values. Flows and gradients are multiplied by the loss scale.
        smallest: the smallest magnitude other than 0; None where all values are 0 or not finite, and where
            only the histogram is known.
        largest: the largest finite magnitude; None likewise.
        nans: how many of `histogram.nonfinite` are NaN; None if unknown.
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
        """The pass that the values belong to. A loss scale multiplies only those of the backward pass."""
        return "backward" if self.what in ("flow", "gradient") else "forward"


class QuantizedRow(NamedTuple):
    """What a recipe's format does to one operand of a product of linear layers, in all calls of a module.

    Attributes:
        name: the dotted name of the module that was running, "" for the root.
        product: "fprop", "dgrad" or "wgrad".
        operand: of it: "input", "weight" or "gradient".
        format: of its elements, such as "e4m3".
        values: how many there are.
        flushed: the share of those other than 0 that became 0, from 0 to 1.
        saturated: the share of all that were beyond the format's largest number after scaling.
        sqnr: the power of the finite values over that of their errors, in dB; inf if all are exact, NaN if
            none is finite.
    """

    name: str
    product: Product
    operand: Operand
    format: str
    values: int
    flushed: float
    saturated: float
    sqnr: float


class Fit(NamedTuple):
    """How the values of a row fit into the low dtype.

    Attributes:
        zeros: the share of all values that was exactly 0 when counted, from 0 to 1. Of values that were in
            the low dtype already, this includes what was flushed.
        flushed: the share of the finite nonzero values that rounds to 0.
        subnormal: the share of the finite nonzero values that becomes subnormal and loses digits.
        headroom: how many times the values can be doubled before the largest overflows the low dtype;
            negative if it does already, None where all are 0 or not finite.
    """

    zeros: float
    flushed: float
    subnormal: float
    headroom: int | None


class Snapshot(NamedTuple):
    """One sampled step.

    Attributes:
        index: the step's number, as in `Step`.
        scale: the loss scale that was in this step's loss.
        low_dtype: what overflows and underflows: "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn" or
            "float32".
        rows: what was computed, in the order of computation: activations, then flows and gradients.
        inputs: the inputs of modules that have parameters of their own or no submodules, in the order of the
            calls. Empty if they were not recorded.
        weights: the parameters that were used, likewise.
        quantized: what a recipe quantized, in the order of computation.

    `print(snapshot)` shows all of this as a table.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    scale: float
    low_dtype: str
    rows: tuple[SnapshotRow, ...]
    inputs: tuple[SnapshotRow, ...] = ()
    weights: tuple[SnapshotRow, ...] = ()
    quantized: tuple[QuantizedRow, ...] = ()

    def __str__(self) -> str:
        return self.table()

    def table(self, modules: int | None = SHOWN) -> str:
        """Return smallest and largest magnitude, zeros, inf and NaN of each module, as plain text.

        What a recipe quantized follows, worst first.

        Lines are at most 80 columns wide. Magnitudes of the backward pass are those in the tensors, which
        are multiplied by the loss scale. Where only a histogram is known, they are powers of two, and the
        largest magnitude is less than twice the number shown.

        Args:
            modules: the most modules to show of each pass, and the most quantized operands; None for all. If
                there are more, the modules next to the first inf or NaN are shown, or else those that lose
                most.

        Raises:
            PolicyError: for a number of modules that is not a whole number of at least 1.
        """
        if modules is not None:
            whole("modules", modules, least=1, instead=f"modules={SHOWN}")
        return "\n".join(_table(self, modules))

    @property
    def band(self) -> Band:
        """The range of the low dtype."""
        return BANDS[self.low_dtype]

    @property
    def path(self) -> tuple[SnapshotRow, ...]:
        """The rows with values that are not finite, in the order in which they were computed."""
        return tuple(row for row in self.rows if row.histogram.nonfinite)

    @property
    def first_overflow(self) -> SnapshotRow | None:
        """The first row of `path`; None if all flows and gradients are finite.

        Its `direction` tells whether that was in the forward pass, where no loss scale helps, or in the
        backward pass. An activation may hold infinities on purpose, as a mask does; it then begins the path.
        """
        if all(row.direction == "forward" for row in self.path):
            return None
        return self.path[0]

    @property
    def noisiest(self) -> list[QuantizedRow]:
        """The rows of `quantized`, those of the lowest SQNR first."""
        return sorted(self.quantized, key=lambda row: -math.inf if math.isnan(row.sqnr) else row.sqnr)

    @property
    def limit(self) -> SnapshotRow | None:
        """The row that keeps the scale from being higher; None if all are 0.

        It is the row with the largest value among the flows in the low dtype and the gradients of their
        modules. If no flow is in the low dtype, as in a float32 model, all flows and gradients count.
        """
        found = self._highest()
        return found and found[1]

    def best_scale(self, margin: int = MARGIN) -> float | None:
        """Return the largest power of two at which this step would have kept a margin below overflow.

        Where something overflowed, the result may still be too high, because the true values are unknown.

        Args:
            margin: how many times the largest value can still be doubled.

        Returns:
            The scale; None where all values are 0 or the step's scale is not usable.

        Raises:
            PolicyError: for a margin that is not a whole number of at least 0.
        """
        whole("margin", margin, least=0, instead=f"margin={MARGIN}")
        found = self._highest()
        if found is None or not 0.0 < self.scale < math.inf:
            return None
        best = exponent_of(self.scale) + self._last_exponent() - found[0] - margin
        return math.ldexp(1.0, min(max(best, -1074), 1023))

    def fit(self, row: SnapshotRow, scale: float | None = None) -> Fit:
        """Return how a row's values fit into the low dtype.

        Args:
            row: one of `rows`, `inputs` or `weights`.
            scale: another loss scale, a power of two away from this step's; None for this step's. It does
                not affect values of the forward pass.

        Raises:
            PolicyError: for a scale that is not a finite number above 0.
        """
        histogram, shift = row.histogram, 0
        if scale is not None:
            positive("scale", scale, instead="scale=snapshot.best_scale()")
        if scale is not None and row.direction == "backward":
            shift = exponent_of(scale) - exponent_of(self.scale)
        return Fit(
            zeros=histogram.zeros / histogram.total if histogram.total else 0.0,
            flushed=histogram.flushed(self.band, shift),
            subnormal=histogram.subnormal(self.band, shift),
            headroom=histogram.headroom(self.band, shift),
        )

    def _scaled_rows(self) -> list[SnapshotRow]:
        """Return the flows and gradients that can overflow in the low dtype."""
        scaled = [row for row in self.rows if row.direction == "backward" and not _is_loss(row)]
        flows: dict[str | None, str] = {row.name: row.dtype for row in scaled if row.what == "flow"}
        chosen = [
            row
            for row in scaled
            if row.dtype == self.low_dtype
            or (row.what == "gradient" and flows.get(owner(row.name, flows)) == self.low_dtype)
        ]
        return chosen or scaled

    def _highest(self) -> tuple[int, SnapshotRow] | None:
        """Return the largest exponent of the scaled rows and the first row that has it."""
        beyond = self._last_exponent() + 1  # for an overflow, whose true size is unknown
        found = []
        for row in self._scaled_rows():
            amax = beyond if row.histogram.nonfinite else row.histogram.amax_exponent
            found += [] if amax is None else [(amax, row)]
        return max(found, key=itemgetter(0), default=None)

    def _last_exponent(self) -> int:
        return exponent_of(self.band.largest)


def _is_loss(row: SnapshotRow) -> bool:
    """Return whether a row is the gradient of a loss that the model itself returns: the loss scale."""
    return row.what == "flow" and not row.name and row.histogram.total == 1


def owner(name: str, modules: Collection[str | None]) -> str | None:
    """Return the module, among the given ones, that a row belongs to; None if there is none.

    A row has its module's name, or, from `preamp.jax.snapshot`, the path of a parameter in it, such as
    "dense.kernel", "dense/kernel" or "dense[0]" of "dense".
    """
    while name not in modules:
        name = module_of(name)
        if not name:
            return None
    return name


def module_of(path: str) -> str:
    """Return the path of a parameter's module, such as "dense" for "dense.kernel"; "" for the outermost."""
    return path[: max(0, *map(path.rfind, "./["))]


def merge_snapshots(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Merge snapshots that are parts of one step.

    `preamp.jax.snapshot` makes one snapshot for each kind of value: gradients, activations, flows. Parts are
    not merged where both have the same row, as when a step has several passes, nor where both have gradients
    at different scales. Of two low dtypes, the merged snapshot has the narrower one. Its rows are in the
    order of `Snapshot.rows`.

    Args:
        snapshots: of any steps, in any order; the result is in the order of their first parts.
    """
    merged: list[Snapshot] = []
    names: list[set[tuple[str, ...]]] = []  # of the rows of each
    latest: dict[int, int] = {}  # by step, the place of the snapshot that further parts are merged into
    for snapshot in snapshots:
        rows: set[tuple[str, ...]] = {row[:4] for row in snapshot.quantized}
        rows |= {(row.what, row.name) for row in (*snapshot.inputs, *snapshot.weights, *snapshot.rows)}
        place = latest.get(snapshot.index)
        if place is None or rows & names[place] or not _fit_together(merged[place], snapshot):
            latest[snapshot.index] = len(merged)
            merged.append(snapshot)
            names.append(rows)
        else:
            merged[place] = _both(merged[place], snapshot)
            names[place] |= rows
    return merged


def _fit_together(one: Snapshot, other: Snapshot) -> bool:
    alike = one.scale == other.scale or (math.isnan(one.scale) and math.isnan(other.scale))
    return alike or not (_is_scaled(one) and _is_scaled(other))


def _is_scaled(snapshot: Snapshot) -> bool:
    """Return whether any values of a snapshot are multiplied by its scale."""
    return any(row.direction == "backward" for row in snapshot.rows)


def _both(one: Snapshot, other: Snapshot) -> Snapshot:
    rows = sorted((*one.rows, *other.rows), key=lambda row: ORDER[row.what])
    return Snapshot(
        one.index,
        one.scale if _is_scaled(one) or not _is_scaled(other) else other.scale,
        min(one.low_dtype, other.low_dtype, key=lambda name: BANDS[name].largest),
        tuple(rows),
        (*one.inputs, *other.inputs),
        (*one.weights, *other.weights),
        (*one.quantized, *other.quantized),
    )


_Block: TypeAlias = tuple[str, list[SnapshotRow]]


def _table(snapshot: Snapshot, most: int | None) -> Iterator[str]:
    """Yield the lines of `Snapshot.table`."""
    band, first = snapshot.band, snapshot.first_overflow
    held = f"{band.name} holds {band.smallest:.2g} to {band.largest:.6g}"
    yield from _wrapped(f"step {snapshot.index}, loss scale {snapshot.scale:.6g}; {held}", "")
    if first is not None:
        given = [row for row in (*snapshot.inputs, *snapshot.weights) if row.name == first.name]
        bad = dict.fromkeys(LABELS[row.what] for row in given if row.histogram.nonfinite)
        note = f", whose {' and '.join(bad)} had some already" if bad and first.direction == "forward" else ""
        whose = f"{LABELS[first.what]} of {_printable(first.name)}"
        yield from _wrapped(f"first inf or NaN: {whose}{note}, {first.direction} pass", "")
    yield "min: smallest magnitude other than 0; max: largest finite magnitude"
    hidden = 0
    for title, blocks in zip(("forward pass", "backward pass, scaled"), _blocks(snapshot), strict=True):
        shown = _chosen(snapshot, blocks, most)
        hidden += len(blocks) - len(shown)
        if blocks:
            yield ""
            yield f"{title:<30}{'min':>10}{'max':>10}{'zero %':>8}  inf, NaN"
            yield from _lines(blocks, shown)
    operands = snapshot.noisiest[:most]
    if operands:
        yield ""
        yield f"{'quantized, worst first':<24}{'format':<8}{'flushed %':>9}{'saturated %':>13}{'SQNR dB':>9}"
        for name, rows in groupby(operands, key=_name):
            yield from _wrapped(_printable(name), "  ")
            yield from map(_operand_line, rows)
        if len(operands) < len(snapshot.quantized):
            yield f"  ... {len(snapshot.quantized) - len(operands)} more"
            hidden += 1
    if hidden:
        yield ""
        yield "print(snapshot.table(None)) shows all."


def _blocks(snapshot: Snapshot) -> tuple[list[_Block], list[_Block]]:
    """Return the rows of each module, of the forward and of the backward pass, in order of computation."""
    given: dict[str, list[SnapshotRow]] = {}
    for row in (*snapshot.inputs, *snapshot.weights):
        given.setdefault(row.name, []).append(row)
    forward = [
        (name, [*given.pop(name, []), *rows])
        for name, rows in groupby((r for r in snapshot.rows if r.direction == "forward"), key=_name)
    ]
    backward = groupby((r for r in snapshot.rows if r.direction == "backward"), key=_name)
    return [*forward, *given.items()], [(name, list(rows)) for name, rows in backward]


def _name(row: SnapshotRow | QuantizedRow) -> str:
    return row.name


def _lines(blocks: Sequence[_Block], shown: Iterable[int]) -> Iterator[str]:
    """Yield the lines of the blocks to show, and the numbers of those left out between them."""
    after = 0
    for place in (*shown, len(blocks)):
        if place > after:
            yield f"  ... {place - after} more"
        if place < len(blocks):
            name, rows = blocks[place]
            yield from _wrapped(_printable(name), "  ")
            yield from map(_line, rows)
        after = place + 1


def _chosen(snapshot: Snapshot, blocks: Sequence[_Block], most: int | None) -> Sequence[int]:
    """Return the places of the blocks to show: around the first one that is not finite, or else the worst."""
    places = range(len(blocks))
    if most is None or len(blocks) <= most:
        return places
    bad = next((n for n in places if any(row.histogram.nonfinite for row in blocks[n][1])), None)
    if bad is not None:
        start = min(max(bad - most // 2, 0), len(blocks) - most)
        return places[start : start + most]
    return sorted(sorted(places, key=lambda n: _badness(snapshot, blocks[n][1]))[:most])


def _badness(snapshot: Snapshot, rows: Iterable[SnapshotRow]) -> tuple[float, float]:
    """Return a sort key: blocks that lose most, or are closest to overflow, come first."""
    fits = [snapshot.fit(row) for row in rows]
    lost = max(fit.zeros + (1.0 - fit.zeros) * (fit.flushed + fit.subnormal) for fit in fits)
    return -round(lost, 2), min((fit.headroom for fit in fits if fit.headroom is not None), default=0)


def _line(row: SnapshotRow) -> str:
    histogram = row.histogram
    label = f"    {LABELS[row.what]:<13}{_printable(row.dtype):.13}"
    low, high = (
        _magnitude(row.smallest, histogram.low, histogram),
        _magnitude(row.largest, histogram.amax_exponent, histogram),
    )
    return f"{label:<30}{low:>10}{high:>10}{_zeros(histogram):>8}  {_nonfinite(row)}".rstrip()


def _operand_line(row: QuantizedRow) -> str:
    numbers = f"{_percent(row.flushed):>9}{_percent(row.saturated):>13}{row.sqnr:>9.3g}"
    return f"    {row.product + ' ' + row.operand:<20}{row.format:<8}{numbers}"


def _magnitude(exact: float | None, exponent: int | None, histogram: ExponentHistogram) -> str:
    if exact is not None:
        return f"{exact:.2e}"
    if histogram.counts:
        return f"2^{exponent}"
    return "0" if histogram.zeros else "-"


def _zeros(histogram: ExponentHistogram) -> str:
    if not histogram.total:
        return "-"
    return _percent(histogram.zeros / histogram.total)


def _percent(share: float) -> str:
    percent = 100.0 * share
    return "<0.1" if 0.0 < percent < 0.05 else f"{percent:.1f}"


def _nonfinite(row: SnapshotRow) -> str:
    """Return the numbers of values that are inf and NaN, in words."""
    count, nans = row.histogram.nonfinite, row.nans
    if nans is None:
        return f"{_count(count)} inf or NaN" if count else ""
    kinds = ((count - nans, "inf"), (nans, "NaN"))
    return ", ".join(f"{_count(number)} {kind}" for number, kind in kinds if number)


def _count(number: int) -> str:
    return str(number) if number < 10_000 else f"{number:.0e}"


def _printable(name: str) -> str:
    """Return a module's name without control characters: a trace file may come from anybody."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in name) or "the whole model"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
