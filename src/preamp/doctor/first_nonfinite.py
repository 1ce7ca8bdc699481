"""Find the first inf or NaN in a training step, from snapshots of the steps that failed.

A step goes from the data through the weights, the modules and the loss to the gradients. The fault is in the
first of these that is not finite; everything after it only passes it on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, Literal, NamedTuple

from preamp.doctor.evidence import Record
from preamp.record.exponents import exponent_of
from preamp.record.snapshots import Snapshot, SnapshotRow

NEAR: Final = 3
"""Values within this many powers of two of a format's largest number are about to overflow."""
ENOUGH: Final = 8
"""This many finite values are enough to tell how large the others were."""
FAR_LARGER: Final = 7
"""Inputs this many powers of two larger than all others are unusual."""
UPDATES_SHOW: Final = 3
"""Weights that grew by this many powers of two were made large by updates."""

Stage = Literal["data", "weights", "module", "between", "loss", "other pass", "backward", "elsewhere"]
What = Literal["overflow", "NaN", "unknown"]


class Origin(NamedTuple):
    """The first place of a step at which something was not finite.

    Attributes:
        stage: "data": the input of the first module; "weights"; "module": the output of a module with finite
            inputs; "between": the input of a module, though the outputs of all modules before it are finite;
            "loss": the loss, though all outputs are finite; "other pass": as "loss", but the gradients of the
            pass in the snapshot are finite and those of the step are not, so it is in what the snapshot does
            not show, such as another micro-batch; "backward": a gradient, though the loss is finite or
            unknown; "elsewhere": nothing in the snapshot.
        snapshot: of the step.
        row: the values that were not finite; None for "loss", "other pass" and "elsewhere".
        what: "overflow": the other values are close to the largest number of the format; "NaN": they are
            not, so an operation made it; "unknown": no finite values were left.
        is_first: whether it is the first module in forward.
    """

    stage: Stage
    snapshot: Snapshot
    row: SnapshotRow | None = None
    what: What = "unknown"
    is_first: bool = False

    @property
    def in_forward(self) -> bool:
        """Whether it arose in a module or between two modules."""
        return self.stage in ("module", "between")


def origin_of(record: Record, snapshot: Snapshot) -> Origin:
    """Return the place of the first inf or NaN of a step."""
    bad = [row for row in _all(snapshot) if _lost(row) and not _is_on_purpose(row, record.infinite)]
    if weights := [row for row in bad if row.what == "weight"]:
        return Origin("weights", snapshot, weights[0])
    given = snapshot.inputs[0] if snapshot.inputs else None
    if given is not None and given in bad:
        return Origin("data", snapshot, given, _what(snapshot, given))
    outputs = [row for row in snapshot.rows if row.what == "activation"]
    if first := next((row for row in outputs if row in bad), None):
        own = next((row for row in snapshot.inputs if row.name == first.name), None)
        stage: Stage = "between" if own is not None and own in bad else "module"
        return Origin(stage, snapshot, first, _what(snapshot, first), is_first=outputs[0] is first)
    backward = [row for row in snapshot.rows if row.direction == "backward"]
    gradients = [row for row in backward if _lost(row)]
    if record.is_lost(snapshot):
        is_measured = any(row.what == "gradient" for row in backward)
        is_other = is_measured and not gradients and record.has_skipped(snapshot)
        return Origin("elsewhere" if not outputs else "other pass" if is_other else "loss", snapshot)
    if not gradients:
        return Origin("elsewhere", snapshot)
    what = _what(snapshot, gradients[0])
    finite = [row for row in backward if row.what == "flow" and not _lost(row)]
    if what == "unknown" and any(_what(snapshot, row) == "overflow" for row in finite):
        what = "overflow"  # no value of it is left, but those that it was computed from are large
    return Origin("backward", snapshot, gradients[0], what)


def given_far_larger(record: Record, snapshot: Snapshot) -> SnapshotRow | None:
    """Return the first module's input if it is far larger than in all other steps."""
    row = snapshot.inputs[0] if snapshot.inputs else None
    amax = row.histogram.amax_exponent if row is not None else None
    if row is None or amax is None:
        return None
    others = [_same(one, row) for one in record.sound if one is not snapshot and one.inputs]
    amaxes = [p for other in others if other and (p := other.histogram.amax_exponent) is not None]
    return row if amaxes and amax - max(amaxes) >= FAR_LARGER else None


def grown(first: Snapshot, last: Snapshot, what: str) -> list[int]:
    """Return by how many powers of two the largest value of each module grew between two snapshots."""
    before = {row.name: row.histogram.amax_exponent for row in _all(first) if row.what == what}
    pairs = [(r.histogram.amax_exponent, before.get(r.name)) for r in _all(last) if r.what == what]
    return [now - then for now, then in pairs if now is not None and then is not None]


def updates_grew(record: Record) -> bool | None:
    """Return whether updates made weights, or the outputs of most modules, much larger; None if unknown."""
    if len(record.snapshots) < 2:
        return None
    first, last = record.snapshots[0], record.snapshots[-1]
    weights, outputs = grown(first, last, "weight"), grown(first, last, "activation")
    if weights:
        return max(weights) >= UPDATES_SHOW
    return median(outputs) > UPDATES_SHOW if outputs else None


def _all(snapshot: Snapshot) -> Sequence[SnapshotRow]:
    return (*snapshot.inputs, *snapshot.weights, *snapshot.rows)


def _lost(row: SnapshotRow) -> int:
    return row.histogram.nonfinite


def _is_on_purpose(row: SnapshotRow, allowed: Mapping[tuple[str, str], SnapshotRow]) -> bool:
    """Return whether a row also held inf in sound steps, as a mask does, and holds no NaN now."""
    before = allowed.get((row.name, row.what))
    return before is not None and not (row.nans and before.nans == 0)


def _what(snapshot: Snapshot, row: SnapshotRow) -> What:
    amax = row.histogram.amax_exponent
    if amax is None:
        return "unknown"
    if amax >= exponent_of(snapshot.band.largest) - NEAR:
        return "overflow"
    return "NaN" if row.histogram.nonzero >= ENOUGH or row.nans == _lost(row) else "unknown"


def _same(snapshot: Snapshot, row: SnapshotRow) -> SnapshotRow | None:
    return next((one for one in _all(snapshot) if (one.name, one.what) == (row.name, row.what)), None)
