"""Findings about batches that hold inf, NaN or values far larger than usual."""

from __future__ import annotations

from collections.abc import Sequence

from preamp.doctor.evidence import Record
from preamp.doctor.finding import Finding
from preamp.doctor.first_nonfinite import Origin
from preamp.doctor.history import Extent
from preamp.doctor.snapshots import module_name
from preamp.record.formatting import two_to
from preamp.record.snapshots import SnapshotRow


def _check(extent: Extent) -> str:
    return f"Check the batches before the model: {extent.code.is_finite('x')}."


def bad_inputs(extent: Extent, given: SnapshotRow) -> Finding:
    """Return the finding that the input of the first module holds inf or NaN."""
    held = "NaN" if given.nans == given.histogram.nonfinite else "inf or NaN"
    return extent.finding(
        "bad data",
        f"The loss is inf or NaN {extent.words}: the input of {module_name(given.name)}, the "
        f"first module, holds {held} in {given.histogram.nonfinite:,} of {given.histogram.total:,} entries, "
        "and all weights are finite. So it comes from the input data or the preprocessing. No "
        f"loss scale helps.{_again(extent)}",
        f"{_check(extent)} Fix or drop such rows.",
        nonfinite=given.histogram.nonfinite,
    )


def large_inputs(extent: Extent, given: SnapshotRow, low: str) -> Finding:
    """Return the finding that the input of the first module is far larger than in other steps."""
    amax = given.histogram.amax_exponent or 0
    return extent.finding(
        "bad data",
        f"The input of {module_name(given.name)}, the first module, reaches {two_to(amax)} "
        f"{extent.words}, far more than in other steps or more than {low} can hold, and what is "
        f"computed from it overflows. No loss scale helps.{_again(extent)}",
        f"Check how large the batches are before the model: {extent.code.largest_of('x')}. Normalize them, "
        "and fix or drop such rows.",
        powers=amax,
    )


def bad_first_module(extent: Extent, source: Origin) -> Finding:
    """Return the finding that the output of the first module is NaN, where its input was not recorded."""
    name = module_name(source.row.name) if source.row else "the first module"
    return extent.finding(
        "bad data",
        f"The output of {name}, the first module, holds inf or NaN {extent.words}, and its other "
        "values are far from overflowing: the input data hold inf or NaN. No loss scale helps.",
        f"{_check(extent)} Fix or drop such rows. If the inputs are finite, check the initial weights and "
        "the first module itself.",
    )


def bad_targets(extent: Extent) -> Finding:
    """Return the finding that all losses are inf or NaN at once, with inputs and outputs as before."""
    return extent.finding(
        "bad data",
        f"The loss is inf or NaN {extent.words}, for every batch at once, but all outputs of "
        "modules are finite and no larger than before: the targets hold inf, NaN or extreme values. No loss "
        "scale helps.",
        f"Check the targets of these batches: {extent.code.is_finite('y')}, and how large they are. A "
        "placeholder for missing values, such as 1e30 or -1, can do this too. If the targets are right, the "
        "cause is the loss function: compute it in float32, and keep the arguments of logarithms "
        "away from 0.",
    )


def bad_other_pass(extent: Extent) -> Finding:
    """Return the finding that the pass in the snapshot was sound, so that another one was not."""
    return extent.finding(
        "bad data",
        f"The loss is inf or NaN {extent.words}, but all outputs and gradients of the forward and backward "
        "pass that was recorded are finite. So the inf or NaN comes from what was not recorded: another pass "
        "of the same step (a micro-batch), a term of the loss that does not use this model, or another rank. "
        f"Most likely a micro-batch holds inf, NaN or extreme values. No loss scale helps.{_again(extent)}",
        f"Check each micro-batch of these steps, inputs and targets: {extent.code.is_finite('x')}, and how "
        f"large they are. Fix or drop them. {extent.code.other_passes}".rstrip(),
    )


def bad_batches(record: Record, places: Sequence[int], why: str, *, also: str = "") -> Finding:
    """Return the finding that single batches fail.

    Args:
        record: the run.
        places: the steps.
        why: what they have in common.
        also: another possible cause and its remedy, to add to the advice.
    """
    extent = Extent.of_steps(record, places)
    return Finding(
        kind="bad data",
        severity="warning",
        sentence=f"{extent.words[0].upper()}{extent.words[1:]}, {why}: their batches, inputs or targets, "
        f"most likely hold inf, NaN or extreme values.{_again(extent)}",
        advice=f"Check the data of these steps, inputs and targets: {extent.code.is_finite('x')}, and how "
        f"large they are. Fix or drop them.{also}",
        numbers=extent.numbers,
    )


def _again(extent: Extent) -> str:
    period = extent.numbers.get("period")
    return f" They are {period:,} steps apart, or a multiple of that: is that one epoch?" if period else ""
