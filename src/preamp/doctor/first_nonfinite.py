"""Where in a training step the first inf or NaN was, by what a lens saw of the steps that failed.

A step goes from the data through the weights, the modules and the loss to the gradients. The first of these
that is not finite is where the fault lies: all that comes after it only passes it on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final, Literal, NamedTuple

from preamp.doctor.evidence import Record
from preamp.doctor.snapshots import is_in_order
from preamp.record.exponents import exponent_of
from preamp.record.snapshots import Look, LookRow

NEAR: Final = 3
"""Powers of two from the largest number of a format within which values are about to overflow."""
WIDE_NEAR: Final = 8
"""The same for values of which some are inf already, and none NaN: an exponential spreads them out."""
ENOUGH: Final = 8
"""So many finite values show how large the others were."""
FAR_LARGER: Final = 7
"""Inputs that are larger by so many powers of two than all before are not like the others."""
UPDATES_SHOW: Final = 3
"""Weights that are larger by so many powers of two show that updates made them so."""

Link = Literal["data", "weights", "module", "between", "loss", "backward", "elsewhere"]
What = Literal["overflow", "NaN", "unknown"]


class Break(NamedTuple):
    """The first place of a step at which something was not finite.

    Attributes:
        link: "data": what the first module was given; "weights"; "module": what a module put out, though it
            was given finite values; "between": what a module was given, though all modules before it put out
            finite values; "loss": the loss, though all outputs are finite; "backward": a gradient, though the
            loss is finite or not known; "elsewhere": nothing that was seen of this pass.
        look: what was seen of the step.
        row: what was not finite; None for "loss" and "elsewhere".
        what: "overflow": the other values come close to the largest of the format; "NaN": they do not, so an
            operation made it; "unknown": nothing finite was left.
        is_first: whether no module comes before it in forward.
        is_steady: whether the modules before it put out values as large as on earlier steps.
    """

    link: Link
    look: Look
    row: LookRow | None = None
    what: What = "unknown"
    is_first: bool = False
    is_steady: bool = False

    @property
    def in_forward(self) -> bool:
        """Whether a module, or what lies between two, made it."""
        return self.link in ("module", "between")


def of_lost(record: Record, start: int = 0) -> list[Look]:
    """Return the looks at steps from a place on whose loss was inf or NaN."""
    first = record.index[start]
    return [look for look in record.looks if look.index >= first and record.is_lost(look)]


def break_of(record: Record, look: Look) -> Break:
    """Return where the first inf or NaN of one step was."""
    before = bisect_left(record.sound, look.index, key=_index)
    known = record.sound[before - 1] if before else None
    bad = [row for row in _forward(look) if _lost(row) and not _is_on_purpose(row, record.infinite)]
    if weights := [row for row in bad if row.what == "weight"]:
        return Break("weights", look, weights[0])
    given = look.inputs[0] if look.inputs else None
    if given is not None and given in bad:
        return Break("data", look, given, _what(look, given, None))
    outputs = [row for row in look.rows if row.what == "activation"]
    lost = [row for row in outputs if row in bad]
    if lost and not is_in_order(lost[0]):  # sorted by name: the one at the limit made the others
        lost.sort(key=lambda row: _what(look, row, known) != "overflow")
    first = lost[0] if lost else None
    if first is not None:
        return _in_forward(look, first, outputs, bad, known)
    if record.is_lost(look):
        return Break("loss" if outputs else "elsewhere", look)
    gradients = [row for row in look.rows if row.direction == "backward" and _lost(row)]
    if gradients:
        return Break("backward", look, gradients[0], _what(look, gradients[0], known))
    return Break("elsewhere", look)


def _in_forward(
    look: Look, first: LookRow, outputs: list[LookRow], bad: list[LookRow], known: Look | None
) -> Break:
    own = next((row for row in look.inputs if row.name == first.name), None)
    link: Link = "between" if own is not None and own in bad else "module"
    what = _what(look, first, known)
    if what == "NaN" and link == "module" and own is not None and _may_overflow(look, own):
        what = "overflow"
    return Break(
        link, look, first, what, is_first=outputs[0] is first, is_steady=_is_steady(look, first, known)
    )


def _may_overflow(look: Look, given: LookRow) -> bool:
    """Return whether a product of two values that a module was given leaves the format."""
    peak = given.histogram.peak_exponent
    return peak is not None and 2 * peak > exponent_of(look.band.largest)


def common(breaks: Iterable[Break]) -> Break | None:
    """Return what most steps have in common; of several like it the one at the lowest scale."""
    listed = list(breaks)
    if not listed:
        return None
    (kind, _), *_ = Counter(map(_kind, listed)).most_common(1)
    return min((one for one in listed if _kind(one) == kind), key=lambda one: one.look.scale)


def _kind(one: Break) -> tuple[Link, str, What]:
    return one.link, one.row.name if one.row else "", one.what


def given_far_larger(record: Record, look: Look) -> LookRow | None:
    """Return what the first module was given, if far larger than ever before or than its format holds."""
    row = look.inputs[0] if look.inputs else None
    peak = row.histogram.peak_exponent if row is not None else None
    if row is None or peak is None:
        return None
    peaks = [
        p for one in record.sound if one is not look and one.inputs and (p := _peak_of(one, row)) is not None
    ]
    if peaks:
        return row if peak - max(peaks) >= FAR_LARGER else None
    return row if row.largest is not None and row.largest > look.band.largest else None


def _peak_of(look: Look, row: LookRow) -> int | None:
    same = _same(look, row)
    return same.histogram.peak_exponent if same is not None else None


def grown(first: Look, last: Look, what: str) -> list[int]:
    """Return by how many powers of two the largest values of each module grew between two looks."""
    before = {row.name: row.histogram.peak_exponent for row in _all(first) if row.what == what}
    pairs = [(r.histogram.peak_exponent, before.get(r.name)) for r in _all(last) if r.what == what]
    return [now - then for now, then in pairs if now is not None and then is not None]


def updates_grew(record: Record, until: Look | None = None) -> bool | None:
    """Return whether updates made weights, or the outputs of most modules, much larger; None if unknown."""
    if not record.looks:
        return None
    first, last = record.looks[0], until or record.looks[-1]
    if first is last:
        return None
    weights, outputs = grown(first, last, "weight"), grown(first, last, "activation")
    if weights:
        return max(weights) >= UPDATES_SHOW
    return median(outputs) > UPDATES_SHOW if outputs else None


def _index(look: Look) -> int:
    return look.index


def _all(look: Look) -> Sequence[LookRow]:
    return (*look.inputs, *look.weights, *look.rows)


def _forward(look: Look) -> list[LookRow]:
    return [row for row in _all(look) if row.direction == "forward"]


def _lost(row: LookRow) -> int:
    return row.histogram.nonfinite


def _is_on_purpose(row: LookRow, allowed: Mapping[tuple[str, str], LookRow]) -> bool:
    """Return whether a row held inf in steps that went well too, as that of a mask does, and no NaN now."""
    before = allowed.get((row.name, row.what))
    return before is not None and not (row.nans and before.nans == 0)


def _what(look: Look, row: LookRow, known: Look | None) -> What:
    top = exponent_of(look.band.largest)
    peak, nonfinite = row.histogram.peak_exponent, row.histogram.nonfinite
    if peak is not None:
        near = WIDE_NEAR if row.nans == 0 and row.direction == "forward" else NEAR
        if peak >= top - near:
            return "overflow"
        if row.histogram.nonzero >= ENOUGH or (row.nans is not None and row.nans == nonfinite):
            return "NaN"
    before = _same(known, row) if known is not None else None
    if before is not None and before.histogram.peak_exponent is not None:
        shift = 0 if row.direction == "forward" or known is None else _apart(look, known)
        if before.histogram.peak_exponent + shift >= top - NEAR:
            return "overflow"
    return "unknown"


def _apart(look: Look, known: Look) -> int:
    return exponent_of(look.scale) - exponent_of(known.scale)


def _same(look: Look, row: LookRow) -> LookRow | None:
    return next((one for one in _all(look) if (one.name, one.what) == (row.name, row.what)), None)


def _is_steady(look: Look, row: LookRow, known: Look | None) -> bool:
    """Return whether the outputs before a row are as large as they were; False where there is none before."""
    compared = 0
    for one in look.rows:
        if one.what != "activation" or one is row:
            break
        before = _same(known, one) if known is not None else None
        peaks = one.histogram.peak_exponent, before.histogram.peak_exponent if before else None
        if peaks[0] is not None and peaks[1] is not None:
            if peaks[0] - peaks[1] > NEAR:
                return False
            compared += 1
    return compared > 0
