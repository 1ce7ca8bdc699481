"""Why the forward pass itself gives inf or NaN: it leaves the format, or an operation makes NaN."""

from __future__ import annotations

from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import Finding
from preamp.doctor.first_nonfinite import Break
from preamp.doctor.history import Extent
from preamp.doctor.snapshots import module_name, needs_no_scale
from preamp.record.exponents import exponent_of
from preamp.record.formatting import two_to
from preamp.record.snapshots import Look, LookRow

CLOSE: Final = 2  # powers of two below the largest number of a format
NO_SCALE: Final = "No loss scale helps, because the loss is scaled after it."


def forward_overflow(extent: Extent, source: Break, row: LookRow) -> Finding:
    """Return the finding that what a module puts out is too large for the low dtype."""
    low, before = source.look.low_dtype, _too_large_before(source, row)
    return Finding(
        kind="forward overflow",
        severity=extent.severity,
        sentence=f"{_place(source, row)} overflows in forward {extent.said}: {low} ends at "
        f"{source.look.band.largest:,.0f}{before and f', and {before}'}. {NO_SCALE}",
        advice=f"{run_in_float32(row.name)} {AFTER_IT}",
        numbers=extent.numbers,
    )


def _place(source: Break, row: LookRow) -> str:
    what = "What is computed for" if source.link == "between" else "The output of"
    return f"{what} {module_name(row.name)}"


def run_in_float32(name: str) -> str:
    """Say how to run a module in float32."""
    if not name:
        return (
            "Run the operator that overflows in float32: autocast(..., "
            'casting=casting.DEFAULT.float32("exp")),'
            " with its name instead of exp. Or make its inputs smaller."
        )
    path = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))
    return (
        f"Run {name} in float32: write `with torch.autocast(device, enabled=False): y = "
        f"model{path}(x.float())` where {name} is called."
    )


AFTER_IT: Final = (
    "What takes its output casts it back, and it is inf again: run that in float32 too, up to where the "
    "values are small, or make them smaller where they become large."
)


def _too_large_before(source: Break, row: LookRow) -> str:
    """Say which earlier module put out finite values that are already too large for the low dtype, or ""."""
    for one in source.look.rows:
        if one is row or one.name == row.name or one.what != "activation":
            break
        if one.largest is not None and one.largest > source.look.band.largest:
            return f"{module_name(one.name)} before it already puts out {one.largest:,.0f}"
    return ""


def unknown_forward(record: Record, extent: Extent) -> Finding:
    """Return the finding that something overflows in forward, or in the loss, where no look shows what."""
    if record.looks:
        find = "A look at such a step would name the module."
    else:
        find = "Find the first layer whose output is inf: a preamp.torch.Lens names it."
    return Finding(
        kind="forward overflow",
        severity=extent.severity,
        sentence=f"The loss itself is inf or NaN {extent.said}: something overflows in forward, or the loss "
        f"function makes it, such as a logarithm of 0. {NO_SCALE}",
        advice=f"{find} Run that in float32: autocast(enabled=False) around it, or "
        'casting=casting.DEFAULT.float32("exp") for an operator. If all outputs are finite, it is the loss '
        "function: compute it in float32, and keep what it takes the logarithm of away from 0.",
        numbers=extent.numbers,
    )


def forward_nan(extent: Extent, source: Break, row: LookRow) -> Finding:
    """Return the finding that an operation in a module makes inf or NaN of finite values."""
    peak = row.histogram.peak_exponent
    others = "" if peak is None else f" while its other values are at most {two_to(peak + 1)}"
    where = "before it" if source.link == "between" else "in it"
    given = "all outputs before it" if source.link == "between" else "its inputs"
    return Finding(
        kind="forward NaN",
        severity=extent.severity,
        sentence=f"{_place(source, row)} holds inf or NaN in forward {extent.said},{others}, and {given} are "
        f"finite: an operation {where} makes them. {NO_SCALE}",
        advice="Look there for a division by zero, or by a norm, a deviation or a count that can be zero, "
        "the logarithm or root of what may be zero or negative, and a softmax over a row that is masked "
        f"whole: add an epsilon, or clamp. {run_in_float32(row.name)} That cures an exponential, a sum, a "
        "difference of squares or a mask of -1e9 that is too much for float16.",
        numbers=extent.numbers,
    )


def close_to_overflow(record: Record) -> tuple[Look, LookRow] | None:
    """Return an output of a step that was taken that nearly overflows, if any."""
    for look in record.looks:
        if look.first_overflow is None and not needs_no_scale(look.band):
            top = exponent_of(look.band.largest) - CLOSE
            for row in look.rows:
                peak = row.histogram.peak_exponent
                if row.what == "activation" and row.dtype != "float32" and peak is not None and peak >= top:
                    return look, row
    return None


def nearly_overflows(extent: Extent, close: tuple[Look, LookRow]) -> Finding:
    """Return the finding that a module overflows in some steps, because it comes close in others."""
    look, row = close
    return Finding(
        kind="forward overflow",
        severity=extent.severity,
        sentence=f"The loss is inf or NaN {extent.said}, and the output of {module_name(row.name)} comes "
        f"close to the end of {look.low_dtype} in others: it overflows in forward. {NO_SCALE}",
        advice=run_in_float32(row.name),
        numbers=extent.numbers,
    )
