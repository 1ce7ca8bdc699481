"""Findings about the forward pass and the loss: overflows, operations that make NaN, the loss function."""

from __future__ import annotations

from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import Finding
from preamp.doctor.first_nonfinite import Origin
from preamp.doctor.history import Extent
from preamp.doctor.snapshots import module_name, needs_no_scale
from preamp.record.exponents import exponent_of
from preamp.record.formatting import two_to
from preamp.record.snapshots import Snapshot, SnapshotRow

CLOSE: Final = 2  # powers of two below the largest number of a format
NO_SCALE: Final = "No loss scale helps, because the loss is scaled after the forward pass."


def _float32(extent: Extent) -> str:
    return f"Compute the loss in float32: {extent.code.loss_in_float32}."


def forward_overflow(extent: Extent, source: Origin, row: SnapshotRow) -> Finding:
    """Return the finding that the output of a module is too large for the low dtype."""
    low, before = source.snapshot.low_dtype, _too_large_before(source, row)
    return extent.finding(
        "forward overflow",
        f"{_place(source, row)} overflows in forward {extent.words}: {low} ends at "
        f"{source.snapshot.band.largest:,.0f}{before and f', and {before}'}. {NO_SCALE}",
        f"{extent.code.run_in_float32(row.name)} {AFTER_IT}",
    )


def _place(source: Origin, row: SnapshotRow) -> str:
    what = "What is computed for" if source.stage == "between" else "The output of"
    return f"{what} {module_name(row.name)}"


AFTER_IT: Final = (
    "The next module casts the output back, and it is inf again: run that module in float32 too, and so on "
    "until the values are small, or make the values smaller where they become large."
)


def _too_large_before(source: Origin, row: SnapshotRow) -> str:
    """Name an earlier module whose output is finite but too large for the low dtype; "" if there is none."""
    for one in source.snapshot.rows:
        if one is row or one.name == row.name or one.what != "activation":
            break
        if one.largest is not None and one.largest > source.snapshot.band.largest:
            return f"the output of {module_name(one.name)} before it already reaches {one.largest:,.0f}"
    return ""


def unknown_forward(record: Record, extent: Extent) -> Finding:
    """Return the finding that something unknown overflows in the forward pass or in the loss."""
    if record.snapshots:
        find = "A snapshot of such a step would name the module."
    else:
        find = f"Find the first layer whose output is inf: {extent.code.find_layer}."
    return extent.finding(
        "forward overflow",
        f"The loss itself is inf or NaN {extent.words}: something overflows in forward, or the loss "
        f"function produces it, for example from a logarithm of 0. {NO_SCALE}",
        f"{find} Run it in float32, {extent.code.in_float32}{extent.code.or_operator}. If all outputs are "
        "finite, the cause is the loss function: compute it in float32, and keep the arguments of logarithms "
        "away from 0.",
    )


def forward_nan(extent: Extent, source: Origin, row: SnapshotRow) -> Finding:
    """Return the finding that an operation in a module makes inf or NaN of finite values."""
    amax = row.histogram.amax_exponent
    others = "" if amax is None else f", while its other values are at most {two_to(amax + 1)}"
    where = "before it" if source.stage == "between" else "in it"
    given = "all outputs before it" if source.stage == "between" else "its inputs"
    return extent.finding(
        "forward NaN",
        f"{_place(source, row)} holds inf or NaN in forward {extent.words}{others}, and {given} "
        f"are finite: an operation {where} produces them. {NO_SCALE}",
        "Look there for a division by zero, or by a norm, a deviation or a count that can be zero, "
        "the logarithm or root of a value that may be zero or negative, and a softmax over a row that is "
        f"completely masked: add an epsilon, or clamp. {extent.code.run_in_float32(row.name)} Float32 fixes "
        "an exponential, a sum, a difference of squares or a mask of -1e9 that is too large for float16.",
    )


def close_to_overflow(record: Record) -> tuple[Snapshot, SnapshotRow] | None:
    """Return an output that nearly overflowed in a step that was taken, if any."""
    for snapshot in record.snapshots:
        if snapshot.first_overflow is None and not needs_no_scale(snapshot.band):
            top = exponent_of(snapshot.band.largest) - CLOSE
            for row in snapshot.rows:
                amax = row.histogram.amax_exponent
                if row.what == "activation" and row.dtype != "float32" and amax is not None and amax >= top:
                    return snapshot, row
    return None


def nearly_overflows(extent: Extent, close: tuple[Snapshot, SnapshotRow]) -> Finding:
    """Return the finding that a module overflows in some steps, because it comes close in others."""
    snapshot, row = close
    return extent.finding(
        "forward overflow",
        f"The loss is inf or NaN {extent.words}, and the output of {module_name(row.name)} comes "
        f"close to the largest number of {snapshot.low_dtype} in other steps: it overflows in forward. "
        f"{NO_SCALE}",
        extent.code.run_in_float32(row.name),
    )


def in_loss(extent: Extent, *, is_inf: bool) -> Finding:
    """Return the finding that the loss function makes inf or NaN of finite outputs."""
    cause = (
        "a sum or a power that overflows float16, the logarithm of 0, or targets that are inf or extreme"
        if is_inf
        else "a logarithm of 0 times 0, a division by zero, or targets that hold NaN"
    )
    return extent.finding(
        "loss function",
        f"The loss is {'inf or NaN' if is_inf else 'NaN'} {extent.words}, but all outputs of "
        "modules are finite, so the loss function produces it. No loss scale helps.",
        f"Look there for {cause}. {_float32(extent)}",
    )


def in_a_term(extent: Extent) -> Finding:
    """Return the finding that a negative loss became inf, and never NaN, where no snapshot shows why."""
    return extent.finding(
        "loss function",
        f"The loss is inf {extent.words}, never NaN, and it was negative before, so it is a "
        "difference of terms, one of which is inf. An inf in the outputs would most likely be in both terms "
        "and give NaN. So a term of the loss function overflows, or else an output overflows in forward. No "
        "loss scale helps.",
        f"Look there for an exponential, a power or a sum that overflows float16. {_float32(extent)} If that "
        "does not help, find the first layer whose output is inf and run it in float32.",
    )


def seems_in_loss(extent: Extent, *, is_inf: bool) -> Finding:
    """Return the finding that the loss is inf or NaN more and more often, where no snapshot shows why."""
    return extent.finding(
        "loss function",
        f"The loss is {'inf' if is_inf else 'NaN'} {extent.words}, more and more often, and it fell "
        "before: as predictions become confident, the loss function takes the logarithm of 0. Or an output "
        "overflows in forward. No loss scale helps.",
        f"{_float32(extent)} Keep the arguments of logarithms away from 0: use {extent.code.from_logits} on "
        "the raw outputs. If that does not help, find the first layer whose output is inf "
        f"({extent.code.find_layer}) and run it in float32.",
    )
