"""Findings about updates: a run that diverged, an update that wrote NaN into weights, a loss spike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from preamp.doctor.evidence import Record
from preamp.doctor.finding import FEWEST, Finding
from preamp.doctor.first_nonfinite import Origin, grown, updates_grew
from preamp.doctor.history import (
    FEW_UPDATES,
    LATEST,
    SHORT,
    TENFOLD,
    TWOFOLD,
    Extent,
    Failure,
    Rise,
    number,
    rise,
    update_count,
)
from preamp.doctor.snapshots import module_name

SPIKE, SPIKE_STEPS, SPIKE_WINDOW = 10.0, 4, 50
HARMLESS: Final = 0.2  # times the first losses: a spike below this does little harm


def diverged(record: Record, end: Failure, source: Origin | None) -> Finding | None:
    """Find that the loss, the gradients or the weights grew before the run failed."""
    # With a finite loss, the steps that were skipped first to find the scale are part of the failure.
    stop = len(record) if end.is_backward else end.start
    if not update_count(record, stop) and end.skips:
        return None  # nothing was updated
    losses = record.loss.finite()  # also of skipped steps, which show the effect of the last update
    loss, norm = rise(losses), rise(record.grad_norm.finite())
    grew = loss is not None and loss.ratio >= TENFOLD
    norm_grew = norm is not None and norm.ratio >= TENFOLD and (loss is None or loss.ratio >= TWOFOLD)
    weights = _weights_grew(record, source)
    if weights is False or _is_sudden(record, end, source):
        return None
    if grew or norm_grew:
        return _divergence(record, loss if grew else None, norm if norm_grew else None, end)
    is_calm = loss is None or loss.ratio < TWOFOLD
    elsewhere = source is not None and source.stage in ("elsewhere", "backward")
    if not elsewhere and ((weights and not (losses and is_calm)) or (not losses and updates_grew(record))):
        return _divergence(record, None, None, end)
    return _broken_by_updates(record, end, source)


def _weights_grew(record: Record, source: Origin | None) -> bool | None:
    """Return True if updates made most weights far larger, False if none grew at all, else None."""
    if source is None or not record.snapshots or record.snapshots[0] is source.snapshot:
        return None
    first, last = record.snapshots[0], source.snapshot
    weights = grown(first, last, "weight")
    if not weights:
        return None
    if max(weights) < 1:
        return False
    outputs = grown(first, last, "activation")
    most = bool(outputs) and median(outputs) >= FEWEST
    return True if median(weights) >= FEWEST or (most and max(weights) >= 2) else None


def _is_sudden(record: Record, end: Failure, source: Origin | None) -> bool:
    """Return whether a module suddenly overflowed on inputs like those of the steps before."""
    if source is None or not source.in_forward or not source.is_steady:
        return False
    for column in (record.loss, record.grad_norm):
        before = rise(column.finite(0, end.start))
        if before is not None and before.ratio >= TENFOLD:
            return False
    return update_count(record, end.start) >= FEW_UPDATES


def _divergence(record: Record, loss: Rise | None, norm: Rise | None, end: Failure | None) -> Finding:
    parts = []
    if norm is not None:
        parts.append(f"the gradient norm rose from {number(norm.base)} to {number(norm.amax)}")
    if loss is not None:
        parts.append(f"the loss rose from {number(loss.base)} to {number(loss.amax)}")
    said = " and ".join(parts or ["weights and the outputs of most modules grew many times over"])
    when = f" before the run failed at step {record.index[end.start]:,}" if end else ""
    return Finding(
        kind="diverged",
        severity="problem",
        sentence=f"The training diverged: {said}{when}. The loss scale did not cause this.",
        advice="Lower the learning rate, by a factor of 10 to begin with, warm it up, or clip the gradients "
        f"({record.code.clip}).",
        numbers={
            **({"first_norm": norm.base, "last_norm": norm.amax} if norm else {}),
            **({"first_loss": loss.base, "last_loss": loss.amax} if loss else {}),
        },
    )


def _broken_by_updates(record: Record, end: Failure, source: Origin | None) -> Finding | None:
    """Find that a few updates broke a forward pass that had worked."""
    updates = update_count(record, end.start)
    if not 0 < updates < FEW_UPDATES or end.is_backward or not end.skips:
        return None
    if source is None and (not end.is_forward or not end.inf):
        return None
    if source is not None and (source.stage not in ("weights", "module", "between") or source.what == "NaN"):
        return None
    if source is not None and source.stage == "weights" and not _weights_overflow(source):
        return None
    made = "one update" if updates == 1 else f"{updates} updates"
    return Finding(
        kind="diverged",
        severity="problem",
        sentence=f"The training diverged: after {made} the forward pass gives inf or NaN, on every batch, "
        "although it worked before. The loss scale did not cause this.",
        advice="Lower the learning rate, by a factor of 10 to begin with. If that does not help, check the "
        "optimizer's other settings, such as eps.",
        numbers={"updates": updates},
    )


def _weights_overflow(source: Origin) -> bool:
    """Return whether weights are inf, and not only NaN."""
    row = source.row
    return row is not None and row.nans is not None and row.nans < row.histogram.nonfinite


def diverged_in_range(record: Record) -> Finding | None:
    """Find a loss that rose and stayed high while steps were taken."""
    losses = record.loss.finite()
    if len(losses) < SHORT:
        return None
    quarter = max(20, len(losses) // 4)
    first, late = losses[0], median(losses[-quarter:])
    best = min(median(losses[place : place + LATEST]) for place in range(0, len(losses) - quarter, LATEST))
    loss = Rise(min(first, best), late)
    if loss.base <= 0.0:
        return None
    if late <= first or loss.ratio < TENFOLD:
        return _unlearned(record, losses, late)
    norms = record.grad_norm.finite()
    norm = Rise(norms[0], median(norms[-max(20, len(norms) // 4) :])) if norms else None
    larger = norm is not None and norm.ratio >= TENFOLD
    grew = updates_grew(record)
    if grew is False or (grew is None and not larger and late < 2 * first):
        return None
    return _divergence(record, loss, norm if larger else None, None)


def _unlearned(record: Record, losses: Sequence[float], late: float) -> Finding | None:
    """Find a loss that fell, rose far above where it began, and then stayed about where it began."""
    levels = [median(losses[place : place + LATEST]) for place in range(0, len(losses) - LATEST + 1, LATEST)]
    top = max(range(len(levels)), key=levels.__getitem__)
    first, best, amax = levels[0], min(levels[: top + 1]), levels[top]
    rose = Rise(best, amax).ratio >= TENFOLD and Rise(first, amax).ratio >= TWOFOLD
    is_lost = 2 * late >= first and Rise(best, late).ratio >= TWOFOLD
    if not (rose and is_lost) or updates_grew(record) is False:
        return None
    found = _divergence(record, Rise(best, amax), None, None)
    stays = f" It then stayed near {number(late)}: what had been learned is lost."
    return replace(found, sentence=found.sentence + stays)


def broken_update(record: Record, end: Failure, source: Origin | None) -> Finding:
    """Return the finding that an update wrote inf or NaN into weights."""
    step = record.index[end.start]
    if source is not None and source.stage == "weights" and source.row is not None:
        row = source.row
        held = "NaN" if row.nans == row.histogram.nonfinite else "inf or NaN"
        sentence = (
            f"{row.histogram.nonfinite:,} of {row.histogram.total:,} weights of {module_name(row.name)} "
            f"are {held} from step {step:,} on, and nothing had grown before: an update wrote them."
        )
        rest = ""
    else:
        sentence = (
            f"From step {step:,} on, every batch gives NaN in forward, and nothing had grown before: the "
            "update before it most likely wrote NaN into weights."
        )
        sentence += f" The first is {module_name(source.row.name)}." if source and source.row else ""
        rest = (
            f" If none of that applies, check `{record.code.weights_finite}`; if the weights are finite, "
            f"check the batches from there on, {record.code.is_finite('x')}. Then find the first module "
            f"whose output is not finite ({record.code.find_layer}): an operation in it makes NaN, or "
            "overflows, and may have to run in float32. If all outputs are finite, the loss function takes "
            "the logarithm of 0."
        )
    return Extent.of_failure(record, end).finding(
        "broken update",
        sentence,
        "Go back to a checkpoint before it, and check the optimizer: eps=0, or an eps that is 0 in "
        "float16 (1e-8 is), divides zero by zero where a gradient is zero; so does any code that "
        f"divides by a norm.{rest}",
    )


def not_skipped(record: Record, end: Failure) -> Finding:
    """Return the finding that a step with inf or NaN in its gradients was taken."""
    step = record.index[end.start]
    return Extent.of_failure(record, end).finding(
        "broken update",
        f"The loss is inf or NaN from step {step:,} on, and no step was skipped: an update used a "
        "gradient that was not finite, and every step after it is lost.",
        "Go back to a checkpoint before that step. Use a scaler that skips such steps: "
        f"{record.code.skips_unscaled} does so without scaling.",
    )


def loss_spike(record: Record) -> Finding | None:
    """Find a loss that rose far for some steps and recovered."""
    losses = record.loss.finite()
    if len(losses) < SHORT or min(losses) <= 0.0:
        return None
    place = max(range(SPIKE_WINDOW // 2, len(losses)), key=losses.__getitem__)
    base = median(losses[max(0, place - SPIKE_WINDOW) : max(1, place - SPIKE_STEPS)])
    if losses[place] < max(SPIKE * base, HARMLESS * median(losses[:SPIKE_STEPS])):
        return None
    bound = max(3 * base, math.sqrt(base * losses[place]))
    low, high = place, place
    while low > 0 and losses[low - 1] > bound:
        low -= 1
    while high + 1 < len(losses) and losses[high + 1] > bound:
        high += 1
    after = losses[high + 1 :]
    if high - low + 1 < SPIKE_STEPS or not after or median(after) > bound:
        return None
    return Finding(
        kind="loss spike",
        severity="warning",
        sentence=f"The loss jumped from {number(base)} to {number(losses[place])} near step "
        f"{record.index[low]:,} and took {high - low + 1:,} steps to return below {number(bound)}.",
        advice="Check the data and the learning rate of the steps before it; clip the gradients "
        f"({record.code.clip}).",
        numbers={"base": base, "peak": losses[place], "steps": high - low + 1},
    )
