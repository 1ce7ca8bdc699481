"""What snapshots show: what is lost at a scale or would be at another, and which module limits the scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import Finding
from preamp.record.exponents import Band, ExponentHistogram, exponent_of
from preamp.record.formatting import percent, power, powers, two_to
from preamp.record.snapshots import Snapshot, SnapshotRow, owner

SHOWN: Final = 5  # names in a sentence
FEW: Final = 1 / 1000
"""A smaller share of lost entries is ignored."""
FAR: Final = 4
"""If one module is this many powers of two above all others, it should run in float32."""


def lost(snapshot: Snapshot, scale: float | None = None) -> tuple[float, float, float]:
    """Return which shares of gradient entries are exactly zero, round to zero and lose digits at a scale."""
    rows = (row.histogram for row in snapshot.rows if row.what != "activation")
    values = reduce(add, rows, ExponentHistogram())
    shift = 0 if scale is None else exponent_of(scale) - exponent_of(snapshot.scale)
    total, nonzero = max(values.total, 1), values.nonzero
    flushed, subnormal = values.flushed(snapshot.band, shift), values.subnormal(snapshot.band, shift)
    return values.zeros / total, flushed * nonzero / total, subnormal * nonzero / total


def norm_of(snapshot: Snapshot) -> float:
    """Return about the norm of the unscaled gradients of parameters, from their histograms; 0 without any."""
    total = sum(
        count * 2.25 * 4.0 ** (row.histogram.low + place)  # entries of a bin are about 1.5 times its power
        for row in snapshot.rows
        if row.what == "gradient" and abs(row.histogram.low) < 500
        for place, count in enumerate(row.histogram.counts)
    )
    return math.sqrt(total) / snapshot.scale


def saves_something(snapshot: Snapshot | None) -> bool | None:
    """Return whether a higher scale would save anything; None without a snapshot."""
    if snapshot is None:
        return None
    if sum(lost(snapshot)[1:]) >= FEW:
        return True
    # Some gradients may have been lost whole. They were not if the module's outputs are all zeros, nor if no
    # other gradient is close to the smallest numbers of the format.
    outputs: dict[str | None, int] = {
        row.name: row.histogram.nonzero for row in snapshot.rows if row.what == "activation"
    }
    rows = [row for row in snapshot.rows if row.direction == "backward"]
    lowest = min((row.histogram.low for row in rows if row.histogram.nonzero), default=-math.inf)
    return lowest <= exponent_of(snapshot.band.normal) and any(
        row.histogram.zeros and not row.histogram.nonzero and outputs.get(owner(row.name, outputs)) != 0
        for row in rows
    )


def best_scale(snapshot: Snapshot) -> float | None:
    """Return the best scale for a snapshot; None if none is needed, or if an overflow hides it."""
    return None if needs_no_scale(snapshot.band) or snapshot.first_overflow else snapshot.best_scale()


def lost_words(snapshot: Snapshot | None, scale: float | None = None) -> str:
    """Return a sentence about what is lost at a snapshot's scale and at another one; "" for no snapshot.

    Args:
        snapshot: of one step.
        scale: the other scale; None for the best one.
    """
    if snapshot is None:
        return ""
    zeros, flushed, subnormal = map(percent, lost(snapshot))
    words = (
        f" At {power(snapshot.scale)}, {zeros} of the gradient entries are exactly zero, {flushed} round to "
        f"zero and {subnormal} lose digits"
    )
    best = scale or best_scale(snapshot)
    if best is not None and best != snapshot.scale:
        _, flushed, subnormal = map(percent, lost(snapshot, best))
        words += f"; at {power(best)}, {flushed} would round to zero and {subnormal} lose digits"
    return f"{words}."


def needs_no_scale(band: Band) -> bool:
    """Return whether a format has the range of float32."""
    return band.largest > 1e30


def overflowed(record: Record) -> Finding | None:
    """Name the module or parameter that most often overflows first."""
    rows = Counter(
        (row.name, row.what)
        for snapshot in record.snapshots
        # If the loss itself is not finite, neither is any gradient: the first of them proves nothing.
        if (row := snapshot.first_overflow) and (row.direction == "forward" or not record.is_lost(snapshot))
    )
    if not rows and not record.first_culprits:
        return None
    sentence, numbers = first_parameter(record).strip(), {}
    if rows:
        (name, what), worst = max(rows.items(), key=lambda pair: (pair[1], pair[0]))
        in_order = all(is_in_order(row) for snapshot in record.snapshots for row in snapshot.rows)
        sentence = (
            f"In {worst:,} of {rows.total():,} snapshots of overflows, {module_name(name)} "
            f"{'was the first with' if in_order else 'had'} inf or NaN, in {_WHAT[what]}."
        )
        numbers = {"overflows": rows.total(), "first": worst}
    return Finding(kind="overflows first", severity="note", sentence=sentence, numbers=numbers)


def is_in_order(row: SnapshotRow) -> bool:
    """Return whether rows are in the order of computation, as a PyTorch lens records them.

    Those of `preamp.jax.snapshot` are in the order of a tree and do not distinguish NaN from inf.
    """
    return row.nans is not None


def limited(record: Record) -> Finding | None:
    """Name the module that keeps the scale from being higher, and tell whether it is the only one."""
    snapshot = record.snapshot
    row = snapshot and snapshot.limit
    if snapshot is None or row is None or needs_no_scale(record.band):
        return None
    name, headroom = module_name(row.name), snapshot.fit(row).headroom or 0
    others = snapshot._replace(rows=tuple(one for one in snapshot.rows if one.name != row.name))
    now, without = snapshot.best_scale(), others.best_scale()
    alone = exponent_of(without) - exponent_of(now) if now and without else 0
    without_it = f" Without it the scale could be {two_to(alone)} times higher." if alone >= FAR else ""
    return Finding(
        kind="limit",
        severity="note",
        sentence=f"{name[0].upper()}{name[1:]} limits the scale: at step {snapshot.index:,} the largest "
        f"value in {_WHAT[row.what]} had {powers(max(headroom, 0))} of headroom in {snapshot.low_dtype} at "
        f"{power(snapshot.scale)}.{without_it}",
        advice=record.code.run_in_float32(row.name) if alone >= FAR > headroom else "",
        numbers={"headroom": headroom, "alone": alone},
    )


def module_name(name: str) -> str:
    """Return the name of a module for a sentence; those in a `Sequential` are numbers."""
    return f"module {name}" if name else "the whole model"


_WHAT: Final = {
    "flow": "the gradient of its output",
    "gradient": "the gradients of its parameters",
    "activation": "its output",
}


def first_parameter(record: Record) -> str:
    """Name the parameter whose gradient was most often the first with inf or NaN, as far as that is known."""
    for name, count in record.first_culprits.most_common(1):
        skipped = f"{record.first_culprits.total():,} skipped steps"
        return f" In backward, {name} was the first parameter with inf or NaN in {count:,} of {skipped}."
    names = listed([name for name, _ in record.culprits.most_common()])
    return f" In backward, inf or NaN reached {names}; the order is not known." if names else ""


def listed(names: Sequence[str]) -> str:
    """Return names for a sentence: the first five, and how many more there are."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
