"""Findings about runs that learn nothing: zero gradients, dead units, an optimizer with other parameters."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import Finding
from preamp.doctor.headroom import is_cut_off, is_far_too_low
from preamp.doctor.history import SHORT, number
from preamp.doctor.snapshots import module_name
from preamp.record.exponents import exponent_of
from preamp.record.formatting import percent
from preamp.record.snapshots import Snapshot, SnapshotRow, module_of

MOST_VALUES: Final = 10_000  # of batches in an epoch
LEAST_CLIPPED: Final = 2.0**10  # at such a scale, nobody would choose a bound this small on purpose
SMALLEST_BOUND: Final = 0.01  # that people clip at
MOST_CLIPPED: Final = 100.0
ALIKE: Final = 1.01
ROUNDED: Final = 1.002
"""Norms that were clipped differ by less than this factor: by the rounding of float16 entries."""
MOST_OF_ONE_SCALE: Final = 0.9
NEARLY, ALIVE = 0.97, 0.9  # shares of zeros: of units that died, and at most of those that live


def not_learning(record: Record) -> Finding | None:
    """Find weights that do not change: no gradient reaches them, or losses repeat exactly."""
    if is_cut_off(record):
        return _cut_off(record)
    losses = record.loss.finite()
    if unused := _other_parameters(record):
        return unused
    tail = max(len(losses) // 4, SHORT // 2)
    if len(losses) < 2 * SHORT or len(losses) < len(record):
        return None
    late = set(losses[-tail:])
    if late == {0.0} or len(late) > MOST_VALUES or not late <= set(losses[-2 * tail : -tail]):
        return None
    if is_far_too_low(record):
        return None  # gradients round to zero: the scale is the reason
    moved = next((place for place in reversed(range(len(losses))) if losses[place] not in late), None)
    if moved is not None:
        return _stopped_learning(record, moved + 1, len(losses))
    values = len(late)
    count = "the same value in all" if values == 1 else f"only {values:,} different values in"
    return Finding(
        kind="not learning",
        severity="problem",
        sentence=f"The loss has {count} {len(losses):,} steps, and its values repeat exactly from beginning "
        "to end: the weights do not change.",
        advice="Check that the learning rate is above 0, that the optimizer was given the parameters of this "
        f"model{record.code.own_parameters}, and that the loss depends on them.",
        numbers={"values": values, "steps": len(losses)},
    )


def _cut_off(record: Record) -> Finding:
    return Finding(
        kind="not learning",
        severity="problem",
        sentence=f"All gradients were exactly zero in all {len(record):,} steps, although the loss times the "
        "scale is far too large for them to round to zero: the loss does not depend on the parameters that "
        "are trained.",
        advice=f"Look for {record.code.stops_gradients} or an argmax between the parameters and the loss, "
        "for frozen parameters, and for an optimizer that was given the parameters of another model.",
        numbers={"steps": len(record)},
    )


def _stopped_learning(record: Record, place: int, steps: int) -> Finding:
    return Finding(
        kind="stopped learning",
        severity="problem",
        sentence=f"From step {record.index[place]:,} on, the losses of {steps - place:,} steps repeat "
        "exactly: the weights no longer change.",
        advice="If the loss is worse than before, the learning rate was most likely too high, and units have "
        "died: lower it, or warm it up. Otherwise check whether the learning-rate schedule has "
        "reached 0.",
        numbers={"start": place, "steps": steps - place},
    )


def _other_parameters(record: Record) -> Finding | None:
    """Find an optimizer whose gradients are all zero, while those of the model are not."""
    norms = record.grad_norm.finite()
    snapshot = record.snapshot
    if len(norms) < SHORT or any(norms) or snapshot is None:
        return None
    if not any(row.what == "gradient" and row.histogram.nonzero for row in snapshot.rows):
        return None
    return Finding(
        kind="not learning",
        severity="problem",
        sentence=f"All gradients of the optimizer were zero in {len(norms):,} steps, but those of the model "
        "were not: the optimizer holds other parameters.",
        advice=record.code.make_optimizer,
        numbers={"steps": len(norms)},
    )


def clipped_while_scaled(record: Record) -> Finding | None:
    """Find gradients that were clipped before they were unscaled: norm times scale is constant.

    At a constant scale that may be because nothing else changes either. See `_is_bound`.
    """
    norms = record.grad_norm
    bounds, scales = array("d"), array("d")
    for norm, known, scale in zip(norms.values, norms.known, record.scales, strict=False):
        if known and scale >= LEAST_CLIPPED and math.isfinite(norm):
            bounds.append(norm * scale)
            scales.append(scale)
    if len(bounds) < SHORT:
        return None
    low, bound, high = _tenths(bounds)
    if not 0.0 < high <= MOST_CLIPPED or high > ALIKE * low:
        return None
    counts = Counter(scale for scale, one in zip(scales, bounds, strict=True) if low <= one <= high)
    is_one_scale = max(counts.values()) > MOST_OF_ONE_SCALE * counts.total()
    if is_one_scale and not _is_bound(record, low, bound, high):
        return None
    return Finding(
        kind="clipped while scaled",
        severity="problem",
        sentence=f"In nearly all steps the gradient norm times the scale is {number(bound)}: the gradients "
        "were clipped while they were still scaled, so the updates are too small by a factor of the "
        "scale.",
        advice=record.code.clip_unscaled,
        numbers={"bound": bound},
    )


def _is_bound(record: Record, low: float, bound: float, high: float) -> bool:
    """Return whether a norm that is constant at a constant scale is one that gradients were clipped to.

    It is the same to rounding then, and either the loss differs from step to step or it is a round number.
    """
    if low < SMALLEST_BOUND or high > ROUNDED * low:
        return False
    losses = record.loss.finite()
    if len(losses) >= SHORT:
        least, _, most = _tenths(losses)
        if most - least > (ALIKE - 1.0) * max(abs(least), abs(most)):
            return True
    return math.isclose(bound, float(f"{bound:.0e}"), rel_tol=ROUNDED - 1.0)


def _tenths(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the numbers that 10%, 50% and 90% of some numbers are below."""
    ordered = sorted(values)
    low, middle, high = (ordered[len(ordered) * tenth // 10] for tenth in (1, 5, 9))
    return low, middle, high


def poisoned_buffers(record: Record) -> Finding | None:
    """Find buffers, such as BatchNorm's statistics, that a skipped step left at inf or NaN."""
    names = record.buffers
    if not names:
        return None
    shown = _listed(names)
    return Finding(
        kind="poisoned buffers",
        severity="problem",
        sentence=f"After a skipped step, {shown} held inf or NaN. Skipping a step protects the weights "
        "but not the buffers of modules: in evaluation the model gives NaN.",
        advice="Reset them, or go back to a checkpoint before that step: "
        f"{record.code.reset_statistics}. An overflow in forward put them there; run the modules before it "
        "in float32.",
        numbers={"buffers": len(names)},
    )


def restored_buffers(record: Record) -> Finding | None:
    """Find buffers that held inf or NaN after a skipped step and were restored."""
    names = record.restored
    if not names:
        return None
    return Finding(
        kind="restored buffers",
        severity="note",
        sentence=f"After a skipped step, {_listed(names)} held inf or NaN and were set back to their "
        "values from before that step.",
        numbers={"buffers": len(names)},
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def dead_units(record: Record) -> Finding | None:
    """Find modules whose outputs have become zero, so that the modules before them get no gradient."""
    clean = [
        snapshot for snapshot in record.snapshots if not any(r.histogram.nonfinite for r in snapshot.rows)
    ]
    snapshots = clean[-2:]
    if len(snapshots) < 2:
        return None
    dead = [
        {row.name for row in snapshot.rows if row.what == "activation" and _is_zero(row)}
        for snapshot in snapshots
    ]
    stuck = [
        {row.name for row in snapshot.rows if row.what != "activation" and _is_zero(row)}
        for snapshot in snapshots
    ]
    names = [row.name for row in snapshots[-1].rows if row.name in dead[0] & dead[1]]
    if not names or not stuck[0] & stuck[1]:
        return _nearly_dead(clean) or _fed_with_zeros(clean)
    always = any(row.name == names[0] and row.what == "activation" and _is_zero(row) for row in clean[0].rows)
    began = (
        "They are zero from the start: the initial weights or biases are wrong, or the module divides by a "
        f"value that overflows, which gives 0. {record.code.run_in_float32(names[0])}"
    )
    return Finding(
        kind="dead units",
        severity="problem",
        sentence=f"All outputs of {module_name(names[0])} are exactly zero "
        f"{'from the first snapshot on' if always else 'in the last snapshots'}, and so are the "
        f"gradients of {len(stuck[0] & stuck[1]):,} modules.",
        advice=began if always else DIED,
        numbers={"modules": len(stuck[0] & stuck[1])},
    )


def _is_zero(row: SnapshotRow) -> bool:
    return row.histogram.zeros > 0 and row.histogram.zeros == row.histogram.total


DIED: Final = (
    "Its units have died. The usual reason is a learning rate that was too high at the start. Lower it, "
    "warm it up, or use an activation that does not die, such as GELU."
)


def _nearly_dead(clean: Sequence[Snapshot]) -> Finding | None:
    """Find a module with some zeros in its outputs at first, and almost only zeros at the end."""
    first, late = clean[0], clean[-2:]
    for row in first.rows:
        if row.what != "activation" or _zeros(row) > ALIVE:
            continue
        rows = [next((r for r in snapshot.rows if _is_same(r, row)), None) for snapshot in late]
        share = min((_zeros(r) if r is not None else 0.0) for r in rows)
        unmoved = min(
            max((_zeros(r) for r in snapshot.rows if r.what == "gradient"), default=0.0) for snapshot in late
        )
        if share >= NEARLY and unmoved >= ALIVE:
            return Finding(
                kind="dead units",
                severity="problem",
                sentence=f"{percent(share)} of the outputs of {module_name(row.name)} are exactly zero in "
                f"the last snapshots, and {percent(_zeros(row))} were in the first; {percent(unmoved)} of "
                "the weights of a module get no gradient.",
                advice=DIED,
                numbers={"zeros": share, "gradients": unmoved},
            )
    return None


def _fed_with_zeros(clean: Sequence[Snapshot]) -> Finding | None:
    """Find units that died between two modules, from the gradients of single parameters.

    The gradient of a bias is a sum of output gradients; that of a weight has the input as a factor. So if
    only the weight's is zero, the input was all zeros. The module that the zeros come from gets no gradient.
    """
    found = [_by_parameter(snapshot) for snapshot in clean]
    (dead, fed), (dead_before, fed_before) = found[-1], found[-2]
    modules, given = sorted(dead & dead_before), sorted(fed & fed_before)
    if not modules or not given:
        return None
    always = all(one[0] >= set(modules) for one in found)
    return Finding(
        kind="dead units",
        severity="problem",
        sentence=f"The gradients of all parameters of {module_name(modules[0])} are exactly zero "
        f"{'from the first snapshot on' if always else 'in the last snapshots'}. In {module_name(given[0])} "
        "those of the weight are zero and those of the bias are not: its input is all zeros.",
        advice="All units between them are dead from the start: check the initial weights and biases, such "
        "as a large negative bias before a ReLU."
        if always
        else DIED,
        numbers={"modules": len(modules)},
    )


def _by_parameter(snapshot: Snapshot) -> tuple[set[str], set[str]]:
    """Return the modules whose gradients are all zero, and those where only the smallest's is not.

    Both are empty where gradients are so small that zeros may come from a low scale, and for snapshots of a
    PyTorch lens, which have one row for all parameters of a module.
    """
    modules: dict[str, list[SnapshotRow]] = {}
    for row in snapshot.rows:
        if row.what == "gradient" and row.nans is None:
            modules.setdefault(module_of(row.name), []).append(row)
    several = {name: rows for name, rows in modules.items() if len(rows) > 1}
    alive = [row.histogram.low for rows in modules.values() for row in rows if row.histogram.nonzero]
    if not alive or min(alive) <= exponent_of(snapshot.band.normal):
        return set(), set()
    dead = {name for name, rows in several.items() if all(map(_is_zero, rows))}
    fed = {name for name, rows in several.items() if _is_bias_alone(rows)}
    return dead, fed


def _is_bias_alone(rows: Sequence[SnapshotRow]) -> bool:
    """Return whether only the smallest parameter of a module gets a gradient."""
    bias, *others = sorted(rows, key=lambda row: row.histogram.total)
    return not _is_zero(bias) and all(map(_is_zero, others))


def _zeros(row: SnapshotRow) -> float:
    return row.histogram.zeros / row.histogram.total if row.histogram.total else 0.0


def _is_same(one: SnapshotRow, other: SnapshotRow) -> bool:
    return (one.name, one.what) == (other.name, other.what)
