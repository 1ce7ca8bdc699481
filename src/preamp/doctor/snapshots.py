"""What a lens saw, in sentences: what is lost, where less would be, who limits the scale, what else would do.

This room reads looks. It refuses to know how the scale moved.
"""

from __future__ import annotations

from collections import Counter
from functools import reduce
from operator import add
from typing import Final, NamedTuple

from preamp.doctor.evidence import Record
from preamp.doctor.finding import Finding
from preamp.record.exponents import BANDS, Band, ExponentHistogram, exponent_of
from preamp.record.formatting import percent, power, powers, two_to
from preamp.record.snapshots import Look, LookRow, owner

FEW: Final = 1 / 1000
"""Below this share of entries nothing is said to be lost."""
WIDE: Final = 1e30
"""A format that holds such values has the range of float32."""
FAR: Final = 4
"""Powers of two that one module has to be above all others for other advice than a scale."""


class Lost(NamedTuple):
    """Which part of the entries of flows and gradients is lost, each from 0 to 1.

    Attributes:
        zeros: exactly zero when seen, whatever made them so.
        flushed: rounds to zero in the low dtype.
        subnormal: keeps fewer digits than normal.
    """

    zeros: float
    flushed: float
    subnormal: float


def lost(look: Look, scale: float | None = None) -> Lost:
    """Return what is lost at a scale, None for the step's own."""
    seen = _seen(look)
    shift = 0 if scale is None else exponent_of(scale) - exponent_of(look.scale)
    total, nonzero = max(seen.total, 1), seen.nonzero
    flushed, subnormal = seen.flushed(look.band, shift), seen.subnormal(look.band, shift)
    return Lost(seen.zeros / total, flushed * nonzero / total, subnormal * nonzero / total)


def _seen(look: Look) -> ExponentHistogram:
    return reduce(add, (row.histogram for row in look.rows if row.what != "activation"), ExponentHistogram())


def saves_something(look: Look | None) -> bool | None:
    """Return whether a higher scale would save anything; None where nothing was seen."""
    if look is None:
        return None
    return _flushed_whole(look) or lost(look).flushed + lost(look).subnormal >= FEW


def _flushed_whole(look: Look) -> bool:
    """Return whether some gradients are all zero, and a scale that is too low may be the reason.

    It is not where a module puts out nothing but zeros, nor where no other gradient comes near the end of
    the format.
    """
    outputs: dict[str | None, int] = {
        row.name: row.histogram.nonzero for row in look.rows if row.what == "activation"
    }
    rows = [row for row in look.rows if row.direction == "backward"]
    zero = [
        row
        for row in rows
        if row.histogram.zeros and not row.histogram.nonzero and outputs.get(owner(row.name, outputs)) != 0
    ]
    alive = [row.histogram.low for row in rows if row.histogram.nonzero]
    return bool(zero) and (not alive or min(alive) <= exponent_of(look.band.normal))


def best_scale(look: Look) -> float | None:
    """Return the best scale for what was seen; None where none is needed, or an overflow hides it."""
    return None if needs_no_scale(look.band) or look.first_overflow else look.best_scale()


def lost_words(look: Look | None, scale: float | None = None) -> str:
    """Say what is lost at the scale of a look and what would be at another one; "" for no look.

    Args:
        look: what a lens saw on one step.
        scale: the other scale; None for the best one.
    """
    if look is None:
        return ""
    now, best = lost(look), scale or best_scale(look)
    words = (
        f" At {power(look.scale)}, {percent(now.zeros)} of the gradient entries are exactly zero, "
        f"{percent(now.flushed)} round to zero and {percent(now.subnormal)} lose digits"
    )
    if best is None or best == look.scale:
        return f"{words}."
    then = lost(look, best)
    return (
        f"{words}; at {power(best)}, {percent(then.flushed)} would round to zero and "
        f"{percent(then.subnormal)} lose digits."
    )


def needs_no_scale(band: Band) -> bool:
    """Return whether a format has the range of float32."""
    return band.largest > WIDE


def overflowed(record: Record) -> Finding | None:
    """Name who overflows first on skipped steps."""
    rows = Counter(
        (row.name, row.what)
        for look in record.looks
        # Where the loss itself was lost, so is all of backward: who came first there says nothing.
        if (row := look.first_overflow) and (row.direction == "forward" or not record.is_lost(look))
    )
    modules = Counter[tuple[str, str]]()
    for name, count in record.culprits.items():
        modules[name.rpartition(".")[0] or name, ""] += count
    counts = rows or modules
    if not counts:
        return None
    (name, what), worst = max(counts.items(), key=lambda pair: (pair[1], pair[0]))
    way = "forward" if what == "activation" else "backward"
    held = "had" if rows and not all(map(_knows_order, record.looks)) else "was the first with"
    which = f"the {_WHAT[what]} of {module_name(name)}" if what else f"a parameter of {name}"
    return Finding(
        kind="overflows first",
        severity="note",
        sentence=f"In {worst:,} of {counts.total():,} {'looks at overflows' if rows else 'overflows'}, "
        f"{which} {held} inf or NaN, in {way}.",
        numbers={"overflows": counts.total(), "first": worst},
    )


def _knows_order(look: Look) -> bool:
    return all(map(is_in_order, look.rows))


def is_in_order(row: LookRow) -> bool:
    """Return whether rows like this come in the order in which they were computed, as those of a lens do.

    Those of `preamp.jax.look` are in the order of a tree, and do not tell NaN from inf.
    """
    return row.nans is not None


def limited(record: Record) -> Finding | None:
    """Name the module that keeps the scale from being higher, and say whether it does so alone."""
    look = record.look
    row = look and look.limit
    if look is None or row is None or needs_no_scale(record.band):
        return None
    name, room = module_name(row.name), look.fit(row).headroom
    alone = _alone(look, row.name)
    return Finding(
        kind="limit",
        severity="note",
        sentence=f"{name[0].upper()}{name[1:]} limits the scale: at step {look.index:,} the largest "
        f"{_WHAT[row.what].replace(' the ', ' its ')} had {powers(room or 0)} of head room in "
        f"{look.low_dtype} at {power(look.scale)}"
        + (f". Without it the scale could be {two_to(alone)} times higher." if alone >= FAR else "."),
        advice=f"Run {name} in float32, in a region with autocast(enabled=False)." if alone >= FAR else "",
        numbers={"room": room or 0, "alone": alone},
    )


def module_name(name: str) -> str:
    """Return what to call a module; those of a `Sequential` have numbers as names."""
    return f"module {name}" if name else "the whole model"


_WHAT: Final = {
    "flow": "gradient of the output",
    "gradient": "gradient of the parameters",
    "activation": "output",
}


def _alone(look: Look, name: str) -> int:
    """Return how many powers of two higher the scale could be without one module."""
    others = look._replace(rows=tuple(row for row in look.rows if row.name != name))
    with_it, without = look.best_scale(), others.best_scale()
    return exponent_of(without) - exponent_of(with_it) if with_it and without else 0


def bfloat16_would_do(record: Record) -> Finding | None:
    """Say whether bfloat16 holds without a scale what was seen."""
    look = record.look
    if look is None or needs_no_scale(record.band) or not _seen(look).nonzero:
        return None
    seen = _seen(look).shifted(-exponent_of(look.scale))
    below, room = seen.flushed(BANDS["bfloat16"]), seen.headroom(BANDS["bfloat16"]) or 0
    would = "do without a scale" if below < FEW and room > 0 else "not do without one"
    least, most = two_to(seen.low), two_to(seen.peak_exponent or 0)
    return Finding(
        kind="bfloat16",
        severity="note",
        sentence=f"bfloat16 would {would}: the gradients lie between {least} and {most}, {_below(below)} "
        f"its range. It keeps 8 significant bits, {look.low_dtype} {_BITS[look.low_dtype]}.",
        numbers={"flushed": below, "room": room},
    )


def _below(share: float) -> str:
    return f"and {percent(share)} are below" if share else "none below"


_BITS: Final = {"float16": 11, "float8_e5m2": 3, "float8_e4m3fn": 4}
