"""What a lens saw on one step, module by module, and what follows from it for the loss scale.

This room reads histograms: which module overflowed first, which one limits the scale, where the scale should
be. It refuses to know how they were measured, and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, NamedTuple, get_args

from preamp.checks import positive, whole
from preamp.errors import TraceError
from preamp.exponents import BANDS, Band, ExponentHistogram, exponent_of
from preamp.json_numbers import is_number, to_json

__all__ = ["Fit", "Kind", "Look", "LookRow", "look_from_json", "look_to_json"]

Kind = Literal["activation", "flow", "gradient"]
MARGIN = 2


class LookRow(NamedTuple):
    """Values of one kind in one module.

    Attributes:
        name: the module's dotted name, "" for the root.
        what: "activation" for what a module put out, "flow" for the gradient with respect to that,
            "gradient" for the gradients of the parameters that the module itself owns.
        dtype: the dtype of the values as they were seen, such as "float16".
        histogram: of the values as they were seen. Flows and gradients are scaled.
    """

    name: str
    what: Kind
    dtype: str
    histogram: ExponentHistogram


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
        rows: what was seen, in the order in which it was computed.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    scale: float
    low_dtype: str
    rows: tuple[LookRow, ...]

    @property
    def band(self) -> Band:
        """What the low dtype can hold."""
        return BANDS[self.low_dtype]

    @property
    def path(self) -> tuple[LookRow, ...]:
        """The rows with values that are not finite: the road that an inf took, in order."""
        return tuple(row for row in self.rows if row.histogram.nonfinite)

    @property
    def first_overflow(self) -> LookRow | None:
        """The first row of `path`; None if all flows and gradients are finite.

        An activation may hold infinities on purpose, such as those of a mask, and then it begins the path.
        """
        if all(row.what == "activation" for row in self.path):
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
            row: one of `rows`.
            scale: the loss scale to answer for, a power of two away from this step's; None for this step's.
                Activations are the same at all of them.

        Raises:
            PolicyError: for a scale that is no finite number above 0.
        """
        seen, shift = row.histogram, 0
        if scale is not None:
            positive("scale", scale, instead="scale=look.best_scale()")
        if scale is not None and row.what != "activation":
            shift = exponent_of(scale) - exponent_of(self.scale)
        return Fit(
            zeros=seen.zeros / seen.total if seen.total else 0.0,
            flushed=seen.flushed(self.band, shift),
            subnormal=seen.subnormal(self.band, shift),
            headroom=seen.headroom(self.band, shift),
        )

    def _scaled_rows(self) -> list[LookRow]:
        """Return the flows and gradients that can overflow in the low dtype."""
        scaled = [row for row in self.rows if row.what != "activation"]
        low = {row.name for row in scaled if row.dtype == self.low_dtype}
        chosen = [r for r in scaled if r.dtype == self.low_dtype or (r.what == "gradient" and r.name in low)]
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


def look_to_json(look: Look) -> dict[str, Any]:
    """Return a look as what JSON can hold.

    Raises:
        TraceError: for a look that could not be read back.
    """
    entry = {
        "index": int(look.index),
        "scale": to_json(float(look.scale)),
        "low_dtype": look.low_dtype,
        "rows": [
            {"name": r.name, "what": r.what, "dtype": r.dtype, **r.histogram.to_json()} for r in look.rows
        ],
    }
    look_from_json(entry)
    return entry


def look_from_json(entry: Any) -> Look:
    """Return the look that `look_to_json` described.

    Raises:
        TraceError: for what describes none, saying why.
    """
    values = _fields(
        entry, "a look", {"index": int, "scale": (int, float, str), "low_dtype": str, "rows": list}
    )
    if not (is_number(values["index"]) and is_number(values["scale"])):
        raise TraceError(f"index or scale of a look is no number: {values['scale']!r:.60}")
    if values["low_dtype"] not in BANDS:
        raise TraceError(f"low_dtype is {values['low_dtype']!r:.60}, none of {', '.join(BANDS)}")
    return Look(**{**values, "scale": float(values["scale"]), "rows": tuple(map(_row, values["rows"]))})


def _row(entry: Any) -> LookRow:
    rest = {"low": int, "counts": list, "zeros": int, "nonfinite": int}
    values = _fields(entry, "a look's row", {"name": str, "what": str, "dtype": str, **rest})
    if values["what"] not in get_args(Kind):
        raise TraceError(f"what is {values['what']!r:.60}, none of {', '.join(get_args(Kind))}")
    histogram = ExponentHistogram.from_json(values)
    return LookRow(values["name"], values["what"], values["dtype"], histogram)


def _fields(entry: Any, place: str, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an entry, which has these and no others."""
    if not isinstance(entry, dict):
        raise TraceError(f"{place} is {entry!r:.60}, not an object in braces")
    missing = [name for name in types if name not in entry]
    unknown = [name for name in entry if name not in types]
    if missing or unknown:
        raise TraceError(f"{place} without {missing[0]}" if missing else f"unknown entry {unknown[0]!r:.60}")
    for name, value in entry.items():
        if isinstance(value, bool) or not isinstance(value, types[name]):
            raise TraceError(f"{name} of {place} is {value!r:.60}, which it cannot be")
    return entry
