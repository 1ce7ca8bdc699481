"""Why a run failed, or lost steps, where the loss scale is not the reason.

One function per cause. Each reads the history of the loss and of the gradient norm before the failure, what
the looks at forward and backward show, and whether a lower scale changed anything.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from preamp.dialect import Dialect
from preamp.doctor.finding import FEWEST, Finding
from preamp.doctor.history import (
    FEW_UPDATES,
    Failure,
    Origin,
    Rise,
    failure,
    is_lost,
    origin,
    rise,
    update_count,
)
from preamp.doctor.record import Record
from preamp.doctor.room import is_far_too_low
from preamp.doctor.values import module_name, needs_no_scale
from preamp.exponents import exponent_of
from preamp.looks import Look, LookRow
from preamp.policy import Static
from preamp.words import of_steps, power, powers, two_to

__all__ = [
    "backs_off_too_far",
    "bad_data",
    "clipped_while_scaled",
    "dead_units",
    "exploding",
    "failed",
    "first_parameter",
    "loss_spike",
    "lost_scale",
    "not_learning",
    "poisoned_buffers",
    "too_large",
]

TENFOLD: Final = 9.0  # of `Rise.ratio`
TWOFOLD: Final = 1.0
THOUSANDFOLD: Final = 999.0
SHORT: Final = 50  # steps below which loss values say little
MOST_VALUES: Final = 10_000  # of batches in an epoch
LEAST_CLIPPED: Final = 2.0**10  # at such a scale no bound of a norm is so small that it is meant
MOST_CLIPPED: Final = 100.0
ALIKE: Final = 1.01
NORM_WINDOW, SPIKE_OF_NORM = 20, 30.0
EXPLODED: Final = 10
"""From so many powers of two between the first and the largest gradient in backward, they explode."""
FARTHEST_BACKOFF: Final = 2.0**-4
SPIKE, SPIKE_STEPS, SPIKE_WINDOW = 10.0, 4, 50
LOAD: Final = "Save and load the scaler with the model: scaler.state_dict() and scaler.load_state_dict()."
CLOSE: Final = 2  # powers of two below the largest number of a format


def failed(record: Record) -> Finding | None:
    """Find why a run never recovered; None if it did, or nothing but the scale is to blame."""
    end = failure(record)
    if end is None:
        return _diverged_in_range(record)
    source = origin(record, end)
    found = _diverged(record, end, source)
    if found is not None:
        return found
    if not end.skips:
        return _not_skipped(record, end)
    if given := _lost_inputs(record, end, source):
        return _bad_inputs_from(record, end, given)
    if source is not None and source.row.what == "activation":
        return _in_forward(record, end, source)
    if not end.is_forward and (kept := _not_of_this_pass(record, end)):
        return kept
    if end.is_forward:
        return _without_look(record, end) if not _outputs_finite(record, end) else _in_loss(record, end)
    if end.is_backward or source is not None:
        return _in_backward(record, end, source)
    return None


# The learning rate


def _diverged(record: Record, end: Failure, source: Origin | None) -> Finding | None:
    """Return the finding that the loss or the gradients grew before the run failed."""
    losses = record.loss.finite()  # those of skipped steps too: they show what the last update did
    loss, norm = rise(losses), rise(record.grad_norm.finite())
    grew = loss is not None and loss.ratio >= TENFOLD
    norm_grew = norm is not None and norm.ratio >= TENFOLD and (loss is None or loss.ratio >= TWOFOLD)
    if not grew and not norm_grew:
        if not losses and update_count(record, end.start) and _outputs_grew(record):
            return _divergence(record, None, None, end)
        return _broken_by_updates(record, end, source)
    if _is_sudden(record, end, source):
        return None
    return _divergence(record, loss if grew else None, norm if norm_grew else None, end)


def _is_sudden(record: Record, end: Failure, source: Origin | None) -> bool:
    """Return whether one module alone overflowed, from one step to the next, on inputs like those before."""
    if source is None or source.row.what != "activation" or not source.is_steady:
        return False
    for column in (record.loss, record.grad_norm):
        before = rise(column.finite(0, end.start))
        if before is not None and before.ratio >= TENFOLD:
            return False
    return update_count(record, end.start) >= FEW_UPDATES


def _divergence(record: Record, loss: Rise | None, norm: Rise | None, end: Failure | None) -> Finding:
    parts = []
    if norm is not None:
        parts.append(f"the gradient norm rose from {_number(norm.base)} to {_number(norm.peak)}")
    if loss is not None:
        parts.append(f"the loss rose from {_number(loss.base)} to {_number(loss.peak)}")
    said = " and ".join(parts or ["the outputs of most modules grew at least 16-fold"])
    when = f" before the run failed at step {record.index[end.start]:,}" if end else ""
    return Finding(
        kind="diverged",
        severity="problem",
        sentence=f"The training diverged: {said}{when}. The loss scale did not cause this.",
        advice="Lower the learning rate, by a factor of 10 to begin with, warm it up, or clip the gradients "
        "(max_norm=1.0).",
        numbers={
            **({"first_norm": norm.base, "last_norm": norm.peak} if norm else {}),
            **({"first_loss": loss.base, "last_loss": loss.peak} if loss else {}),
        },
    )


def _broken_by_updates(record: Record, end: Failure, source: Origin | None) -> Finding | None:
    """Return the finding that a few updates broke a forward pass that had worked."""
    updates = update_count(record, end.start)
    if not 0 < updates < FEW_UPDATES or end.is_backward or not end.skips:
        return None
    if source is None and not end.is_forward:
        return None
    if source is not None and (source.row.what != "activation" or source.what == "NaN"):
        return None
    if _lost_inputs(record, end, source) is not None:
        return None
    made = "one update" if updates == 1 else f"{updates} updates"
    return Finding(
        kind="diverged",
        severity="problem",
        sentence=f"The training diverged: after {made} the forward pass gives inf or NaN, on every batch, "
        "and it worked before. The loss scale did not cause this.",
        advice="Lower the learning rate, by a factor of 10 to begin with. If that does not help, look at the "
        "optimizer's other settings, such as eps.",
        numbers={"updates": updates},
    )


def _diverged_in_range(record: Record) -> Finding | None:
    """Find a loss that rose and stayed high in a run whose steps are taken."""
    losses = record.loss.finite()
    if len(losses) < SHORT:
        return None
    first, late = losses[0], median(losses[-max(20, len(losses) // 4) :])
    loss = Rise(first, late)
    if first == 0.0 or loss.ratio < TENFOLD:
        return None
    norms = record.grad_norm.finite()
    norm = Rise(norms[0], median(norms[-max(20, len(norms) // 4) :])) if norms else None
    larger = norm is not None and norm.ratio >= TENFOLD
    if not larger and loss.ratio < THOUSANDFOLD and not _outputs_grew(record):
        return None
    return _divergence(record, loss, norm if larger else None, None)


def _outputs_grew(record: Record) -> bool:
    """Return whether the outputs of most modules are much larger in the last look than in the first."""
    if len(record.looks) < 2:
        return False
    first, last = record.looks[0], record.looks[-1]
    before = {(row.name, row.what): row.histogram.peak_exponent for row in first.rows}
    rows = [row for row in last.rows if row.what == "activation"]
    pairs = [(row.histogram.peak_exponent, before.get((row.name, row.what))) for row in rows]
    grown = [now - then for now, then in pairs if now is not None and then is not None]
    return bool(grown) and median(grown) >= FEWEST


# Forward


def _in_forward(record: Record, end: Failure, source: Origin) -> Finding | None:
    if source.what == "overflow" or (source.what == "unknown" and end.inf):
        return _forward_overflow(record, end, source)
    if not needs_no_scale(source.look.band) and source.what == "unknown" and not source.is_first:
        return _forward_overflow(record, end, source)
    if update_count(record, end.start) and not _lost_before(record, end):
        return _broken_update(record, end, source)
    if source.is_first:
        return _bad_inputs(end, source)
    return _forward_nan(record, end, source)


def _forward_overflow(record: Record, end: Failure, source: Origin | None) -> Finding:
    since = _since(record, end)
    if source is None:
        return Finding(
            kind="forward overflow",
            severity="problem",
            sentence=f"The loss itself is inf or NaN {since}: something overflows in forward. No loss "
            "scale helps, because the loss is scaled after it.",
            advice=_float32_somewhere(record),
            numbers=_counts(end),
        )
    name, low = module_name(source.row.name), source.look.low_dtype
    before = _too_large_before(source)
    return Finding(
        kind="forward overflow",
        severity="problem",
        sentence=f"The output of {name} overflows in forward {since}: {low} ends at "
        f"{source.look.band.largest:,.0f}{before and f', and {before}'}. No loss scale helps, because the "
        "loss is scaled after it.",
        advice=f"{_run_in_float32(source.row.name)} {_AFTER_IT}",
        numbers=_counts(end),
    )


def _run_in_float32(name: str) -> str:
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


_AFTER_IT: Final = (
    "What takes its output casts it back, and it is inf again: run that in float32 too, up to where the "
    "values are small, or make them smaller where they become large."
)


def _too_large_before(source: Origin) -> str:
    """Say which earlier module put out finite values that are already too large for the low dtype, or ""."""
    for row in source.look.rows:
        if row is source.row or row.name == source.row.name or row.what != "activation":
            break
        if row.largest is not None and row.largest > source.look.band.largest:
            return f"{module_name(row.name)} before it already puts out {row.largest:,.0f}"
    return ""


def _float32_somewhere(record: Record) -> str:
    if record.looks:
        return 'Run what overflows in float32: autocast(..., casting=casting.DEFAULT.float32("exp")).'
    return (
        "Find the layer whose output is the first to be inf (a preamp.torch.Lens names it) and run it in "
        'float32: autocast(enabled=False) around it, or casting=casting.DEFAULT.float32("exp") for an '
        "operator."
    )


def _forward_nan(record: Record, end: Failure, source: Origin) -> Finding:
    row = source.row
    peak = row.histogram.peak_exponent
    others = "" if peak is None else f" while its other values are at most {two_to(peak + 1)}"
    return Finding(
        kind="forward NaN",
        severity="problem",
        sentence=f"The output of {module_name(row.name)} holds inf or NaN in forward "
        f"{_since(record, end)},{others}, and its inputs are finite: an operation in it makes them. No loss "
        "scale helps, because the loss is scaled after it.",
        advice=f"{_run_in_float32(source.row.name)} That cures an exponential, a sum or a mask of -1e9 that "
        "is too large for float16. If it does not help, look for a division by zero, the logarithm or root "
        "of what may be zero or negative, and a softmax over a row that is masked whole.",
        numbers=_counts(end),
    )


def _broken_update(record: Record, end: Failure, source: Origin | None) -> Finding:
    step = record.index[end.start]
    where = f" The first is {module_name(source.row.name)}." if source else ""
    return Finding(
        kind="broken update",
        severity="problem",
        sentence=f"From step {step:,} on, every batch gives NaN in forward, and nothing had grown before: "
        f"the update before it most likely wrote NaN into weights.{where}",
        advice="Look at the optimizer: eps=0, or an eps that is 0 in float16 (1e-8 is), divides zero by "
        "zero where a gradient is zero. Check `all(p.isfinite().all() for p in model.parameters())`; if "
        "the weights are finite, the batches from there on hold NaN.",
        numbers=_counts(end),
    )


def _bad_inputs(end: Failure, source: Origin | None) -> Finding:
    if source is None:
        return Finding(
            kind="forward NaN",
            severity="problem",
            sentence="The loss is NaN in every step, from the first on: forward overflows or makes NaN, or "
            "the input data hold it. No loss scale helps, because the loss is scaled after it.",
            advice="Check the batches first: `x.isfinite().all()`. If they are finite, find the first "
            "layer whose output is not (a preamp.torch.Lens names it), and run that in float32: "
            "autocast(enabled=False) around it.",
            numbers=_counts(end),
        )
    return Finding(
        kind="bad data",
        severity="problem",
        sentence=f"In every step already the output of {module_name(source.row.name)}, the first module, "
        "holds inf or NaN, and its other values are far from overflowing: the input data hold inf or NaN. "
        "No loss scale helps.",
        advice="Check the batches before the model: `x.isfinite().all()`. Mend or drop such rows. If the "
        "inputs are finite, look at the weights that the model starts with.",
        numbers=_counts(end),
    )


def _lost_inputs(record: Record, end: Failure, source: Origin | None) -> LookRow | None:
    """Return what the first module was given, where that holds inf or NaN and all weights are finite."""
    if not end.is_forward or (source is not None and source.what == "overflow"):
        return None
    first = record.index[end.start]
    look = next((look for look in record.looks if look.index >= first and is_lost(record, look)), None)
    if look is None or not look.inputs or any(row.histogram.nonfinite for row in look.weights):
        return None
    given = look.inputs[0]
    before = [row for one in record.looks if one.index < first for row in one.inputs[:1]]
    on_purpose = any(row.histogram.nonfinite for row in before)  # such as the infinities of a mask
    return given if given.histogram.nonfinite and look.weights and not on_purpose else None


def _bad_inputs_from(record: Record, end: Failure, given: LookRow) -> Finding:
    held = "NaN" if given.nans == given.histogram.nonfinite else "inf or NaN"
    return Finding(
        kind="bad data",
        severity="problem",
        sentence=f"The loss is inf or NaN {_since(record, end)}: the input of {module_name(given.name)}, the "
        f"first module, holds {held} in {given.histogram.nonfinite:,} of {given.histogram.total:,} entries, "
        "and all weights are finite. So the input data hold it, or what is done to them first makes it. No "
        "loss scale helps.",
        advice="Check the batches before the model: `x.isfinite().all()`. Mend or drop such rows.",
        numbers={**_counts(end), "nonfinite": given.histogram.nonfinite},
    )


def _in_loss(record: Record, end: Failure) -> Finding:
    value = "inf" if 2 * end.inf >= end.not_finite else "NaN"
    cause = (
        "a sum or a power that leaves float16, or the logarithm of 0"
        if end.inf
        else "a logarithm of 0 times 0, a division by zero, or targets that hold NaN"
    )
    return Finding(
        kind="loss function",
        severity="problem",
        sentence=f"The loss is {value} {_since(record, end)}, but all outputs of modules are finite: it "
        "becomes so in the loss function. No loss scale helps.",
        advice=f"Look there for {cause}. Compute the loss in float32: loss_fn(output.float(), target).",
        numbers=_counts(end),
    )


def _without_look(record: Record, end: Failure) -> Finding:
    updates = update_count(record, end.start)
    if updates == 0 and not end.inf:
        return _bad_inputs(end, None)
    if needs_no_scale(record.band) and updates:
        return _broken_update(record, end, None)
    if not any(map(math.isinf, record.loss.values)):
        return _nan_without_look(record, end)
    return _forward_overflow(record, end, None)


def _nan_without_look(record: Record, end: Failure) -> Finding:
    """Return the finding that a loss became NaN, and was never inf, where nothing shows what made it so."""
    return Finding(
        kind="forward NaN",
        severity="problem",
        sentence=f"The loss is NaN {_since(record, end)}, and was never inf: the input data hold NaN, an "
        "update wrote NaN into weights, or forward makes it. No loss scale helps, because the loss is "
        "scaled after it.",
        advice="Check the batches from there on first: `x.isfinite().all()`. Then the weights: "
        "`all(p.isfinite().all() for p in model.parameters())`. If both are finite, find the first layer "
        "whose output is not (a preamp.torch.Lens names it), and run that in float32: "
        "autocast(enabled=False) around it.",
        numbers=_counts(end),
    )


def _not_skipped(record: Record, end: Failure) -> Finding:
    step = record.index[end.start]
    return Finding(
        kind="broken update",
        severity="problem",
        sentence=f"The loss is inf or NaN from step {step:,} on, and no step was skipped: the weights have "
        "taken a gradient that was not finite, and every step after it is lost.",
        advice="Go back to a checkpoint before that step. Let a scaler skip such steps: GradScaler(policy="
        "Static(1.0)) does so without scaling.",
        numbers=_counts(end),
    )


# Backward


def _in_backward(record: Record, end: Failure, source: Origin | None) -> Finding | None:
    """Return the finding that gradients are not finite at any scale; None where the scale may be to blame."""
    at_any = end.lowest <= record.band.normal or needs_no_scale(record.band)
    if source is not None and source.what == "overflow":
        return None
    if not at_any and (source is None or source.what != "NaN"):
        return None
    high = max(record.scales[end.start : len(record)])
    scales = f", at every scale from {power(high)} to {power(end.lowest)}" if high > end.lowest else ""
    loss = (
        "The loss is finite and the gradients are not" if end.is_backward else "The gradients are not finite"
    )
    return Finding(
        kind="NaN in backward",
        severity="problem",
        sentence=f"{loss}{scales} {_since(record, end)}: this is not an overflow, the derivative of an "
        f"operation is inf or NaN.{_where_in_backward(record, source)}",
        advice="Look for sqrt, norm, log or a power at 0, a division by zero, or torch.where over a branch "
        "that is NaN (its gradient is NaN even where it is not chosen). Add an epsilon inside, or clamp."
        + (
            "" if end.losses else " If the loss itself is inf or NaN, look at the data and the loss function."
        ),
        numbers=_counts(end),
    )


def _not_of_this_pass(record: Record, end: Failure) -> Finding | None:
    """Find skipped steps whose own gradients are finite: what is not comes from another pass or rank."""
    first = record.index[end.start]
    looks = [look for look in record.looks if look.index >= first]
    seen = [look for look in looks if any(row.what == "gradient" for row in look.rows)]
    if not seen or any(look.path for look in seen):
        return None
    here = bool(record.culprits)
    return Finding(
        kind="gradients not cleared" if here else "another rank",
        severity="problem",
        sentence=f"Every step is skipped {_since(record, end)}, but what one pass adds to the gradients is "
        "finite: "
        + (
            f"an inf from an earlier step was never cleared.{first_parameter(record)}"
            if here
            else "the gradients of another rank, or of an earlier step, are not."
        ),
        advice="Call optimizer.zero_grad() after every step, skipped or not"
        + (
            ", also where gradients are accumulated."
            if here
            else ". With several ranks, look at their records."
        ),
        numbers=_counts(end),
    )


def _where_in_backward(record: Record, source: Origin | None) -> str:
    if source is not None:
        where = "gradient of the output" if source.row.what == "flow" else "gradient of the parameters"
        return f" In backward, the {where} of {module_name(source.row.name)} is the first with inf or NaN."
    return first_parameter(record)


def first_parameter(record: Record) -> str:
    """Return which parameter was most often the first in backward whose gradient was not finite, or ""."""
    for name, count in record.culprits.most_common(1):
        return (
            f" In backward, {name} was the first parameter with inf or NaN in {count:,} of "
            f"{record.culprits.total():,} skipped steps."
        )
    return ""


# A step here and there


def bad_data(record: Record) -> Finding | None:
    """Find single steps whose loss was inf or NaN, whatever the scale; or that fail once per epoch."""
    loss = record.loss
    lost = array(
        "q",
        (place for place, known in enumerate(loss.known) if known and not math.isfinite(loss.values[place])),
    )
    if lost:
        if found := _lost_in_loss(record, lost):
            return found
        close = _close_to_overflow(record)
        if close is not None:
            return _sometimes_in_forward(record, lost, close)
        return _bad_batches(record, lost, "the loss itself was inf or NaN, which no scale changes")
    periodic = array("q", (skip.place for skip in record.skips.of("sudden")))
    if len(periodic) >= FEWEST and _period(periodic) >= 2 * FEWEST and not loss.count():
        return _bad_batches(record, periodic, "while the steps around them were fine at the same scale")
    return None


def _lost_in_loss(record: Record, lost: Sequence[int]) -> Finding | None:
    """Find losses that are not finite although everything that was seen of forward on those steps is."""
    looks = [look for look in record.looks if is_lost(record, look)]
    rows = [row for look in looks for row in (*look.inputs, *look.weights, *look.rows)]
    seen = [row for row in rows if row.direction == "forward"]
    if not any(row.what == "activation" for row in seen) or any(row.histogram.nonfinite for row in seen):
        return None
    return Finding(
        kind="loss function",
        severity="warning",
        sentence=f"{of_steps(len(lost), len(record))} have a loss that is inf or NaN, but all outputs of "
        "modules are finite in the looks at such steps: it becomes so in the loss function. No loss scale "
        "helps.",
        advice="Look there for the logarithm of 0, a division by zero, a sum or a power that leaves float16, "
        "or targets that hold inf or NaN. Compute the loss in float32: loss_fn(output.float(), target).",
        numbers={"steps": len(lost)},
    )


def _bad_batches(record: Record, places: Sequence[int], why: str) -> Finding:
    period = _period(places)
    some = ", ".join(f"{record.index[place]:,}" for place in places[:5])
    more = ", ..." if len(places) > 5 else ""
    again = f" They are {period:,} steps apart, or multiples of that: one epoch?" if period else ""
    steps = "1 step" if len(places) == 1 else f"{len(places):,} steps"
    return Finding(
        kind="bad data",
        severity="warning",
        sentence=f"In {steps} ({some}{more}), {why}: their batches, inputs or targets, most likely hold inf, "
        f"NaN or extreme values.{again}",
        advice="Look at the data of these steps: `x.isfinite().all()`, and how large they are. Mend or "
        "drop them.",
        numbers={"steps": len(places), "period": period},
    )


def _period(places: Sequence[int]) -> int:
    """Return what all distances between some places are multiples of, or 0 for fewer than four."""
    if len(places) < FEWEST:
        return 0
    common = math.gcd(*(after - before for before, after in pairwise(places)))
    return common if common >= 2 * FEWEST else 0


def _close_to_overflow(record: Record) -> tuple[Look, LookRow] | None:
    """Return an output of a step that was taken that nearly overflows, if any."""
    for look in record.looks:
        if look.first_overflow is None and not needs_no_scale(look.band):
            top = exponent_of(look.band.largest) - CLOSE
            for row in look.rows:
                peak = row.histogram.peak_exponent
                if row.what == "activation" and row.dtype != "float32" and peak is not None and peak >= top:
                    return look, row
    return None


def _sometimes_in_forward(record: Record, lost: Sequence[int], close: tuple[Look, LookRow]) -> Finding:
    look, row = close
    return Finding(
        kind="forward overflow",
        severity="warning",
        sentence=f"{of_steps(len(lost), len(record))} have a loss that is inf or NaN, and the output of "
        f"{module_name(row.name)} comes close to the end of {look.low_dtype} in others: it overflows in "
        "forward. No loss scale helps.",
        advice=_run_in_float32(row.name),
        numbers={"steps": len(lost)},
    )


def exploding(record: Record) -> Finding | None:
    """Find gradients that are now and then very much larger than just before."""
    norms = record.grad_norm.finite()
    spikes, highest = _spikes(norms)
    if spikes < FEWEST:
        return _growing_backward(record)
    return Finding(
        kind="exploding gradients",
        severity="warning",
        sentence=f"{spikes:,} times the gradient norm was more than {SPIKE_OF_NORM:.0f} times that of the "
        f"steps before, up to {_number(highest)}: the gradients explode now and then.",
        advice="Clip them (max_norm=1.0). In a recurrent net, take fewer time steps or smaller recurrent "
        "weights.",
        numbers={"steps": spikes, "highest": highest},
    )


def _growing_backward(record: Record) -> Finding | None:
    """Find gradients that grow from module to module in backward, in a run that lowered its scale."""
    clean = [look for look in record.looks if look.first_overflow is None]
    if not clean or max(record.opening, len(record.skips)) < FEWEST:
        return None
    look = clean[-1]
    flows = [(row.histogram.peak_exponent, row.name) for row in look.rows if row.what == "flow"]
    known = [(peak, name) for peak, name in flows if peak is not None]
    if not known:
        return None
    (start, last), (most, first) = known[0], max(known)
    if most - start < EXPLODED:
        return None
    return Finding(
        kind="exploding gradients",
        severity="warning",
        sentence=f"In backward, the gradients grow {two_to(most - start)}-fold from {module_name(last)} to "
        f"{module_name(first)}: they explode.",
        advice="Use smaller initial weights, normalization, or fewer time steps, and clip (max_norm=1.0).",
        numbers={"powers": most - start},
    )


def _spikes(norms: Sequence[float]) -> tuple[int, float]:
    """Return how many norms are far above the median of those just before them, and the largest such."""
    window: list[float] = []
    count, highest, was_high = 0, 0.0, False
    for place, norm in enumerate(norms):
        if len(window) == NORM_WINDOW:
            is_high = norm > SPIKE_OF_NORM * window[NORM_WINDOW // 2] > 0.0
            if is_high and not was_high:
                count += 1
            if is_high:
                highest = max(highest, norm)
            was_high = is_high
            del window[bisect_left(window, norms[place - NORM_WINDOW])]
        insort(window, norm)
    return count, highest


def too_large(record: Record) -> Finding | None:
    """Find gradients that overflow although the loss is scaled down."""
    if not record.late or isinstance(record.policy, Static) or not (record.opening or len(record.skips)):
        return None
    usual, found = median(record.of(record.late)), record.scales[record.opening]
    needed = record.usual_room < FEWEST if record.usual_room is not None else found < 1.0
    if usual >= 1.0 or not needed:
        return None
    return Finding(
        kind="gradient overflow",
        severity="warning",
        sentence=f"The scale had to fall to {power(usual)}, below 1: in backward the gradients overflow "
        f"{record.band.name} even without a scale.{first_parameter(record)}",
        advice="Make the loss smaller: a mean instead of a sum over the batch. If they grow from layer to "
        "layer, or from time step to time step, they explode: smaller initial weights, normalization.",
        numbers={"scale": usual},
    )


def backs_off_too_far(record: Record) -> Finding | None:
    """Find single overflows that each lower the scale by many powers of two."""
    rule = record.policy.policy if isinstance(record.policy, Dialect) else record.policy
    factor = getattr(rule, "backoff_factor", None)
    if rule is not None and (factor is None or factor > FARTHEST_BACKOFF):
        return None
    falls = [scale / after for scale, after in pairwise(record.scales) if after < scale]
    if (
        not falls
        or median(falls) * FARTHEST_BACKOFF < 1.0
        or (record.room is not None and record.room < FEWEST)
    ):
        return None
    fall = exponent_of(median(falls))
    return Finding(
        kind="backs off too far",
        severity="warning",
        sentence=f"Each overflow lowered the scale by {powers(fall)}, and it takes as many growths to come "
        "back.",
        advice="Halve it instead.",
        numbers={"powers": fall, "times": len(falls)},
        settings={"backoff_factor": 0.5},
    )


def loss_spike(record: Record) -> Finding | None:
    """Find a loss that rose far for some steps, and came back."""
    losses = record.loss.finite()
    if len(losses) < SHORT or min(losses) <= 0.0:
        return None
    place = max(range(SPIKE_WINDOW // 2, len(losses)), key=losses.__getitem__)
    base = median(losses[max(0, place - SPIKE_WINDOW) : max(1, place - SPIKE_STEPS)])
    if losses[place] < SPIKE * base:
        return None
    low, high = place, place
    while low > 0 and losses[low - 1] > 3 * base:
        low -= 1
    while high + 1 < len(losses) and losses[high + 1] > 3 * base:
        high += 1
    after = losses[high + 1 :]
    if high - low + 1 < SPIKE_STEPS or not after or median(after) > 3 * base:
        return None
    return Finding(
        kind="loss spike",
        severity="warning",
        sentence=f"The loss jumped from {_number(base)} to {_number(losses[place])} near step "
        f"{record.index[low]:,} and took {high - low + 1:,} steps to come back.",
        advice="Look at the data and the learning rate of the steps before it; clip the gradients "
        "(max_norm=1.0).",
        numbers={"base": base, "peak": losses[place], "steps": high - low + 1},
    )


def lost_scale(record: Record) -> Finding | None:
    """Find a scale that jumped up between two steps, as after a restart without the saved scale."""
    if record.resumed_at_start and record.opening >= FEWEST:
        return Finding(
            kind="lost scale",
            severity="warning",
            sentence=f"The record begins again at step {record.index[0]:,}, and the first "
            f"{record.opening:,} steps were skipped while the scale fell from {power(record.scales[0])} to "
            f"{power(record.scales[record.opening])}: the run was resumed without its scaler.",
            advice=LOAD,
            numbers={"skipped": record.opening},
        )
    new = record.new_scale
    for place in range(1, len(record)):
        before, scale = new[place - 1], record.scales[place]
        if before is None or scale < 4 * before or not record.skipped[place]:
            continue
        streak = record.skipped.find(0, place)
        skips = (len(record) if streak < 0 else streak) - place
        if skips < 2:
            continue
        return Finding(
            kind="lost scale",
            severity="warning",
            sentence=f"Between steps {record.index[place - 1]:,} and {record.index[place]:,} the scale "
            f"jumped from {power(before)} to {power(scale)}, and {skips:,} steps were skipped until it was "
            "back: the run was resumed without its scale.",
            advice=LOAD,
            numbers={"before": before, "scale": scale, "skipped": skips},
        )
    return None


# Nothing happens


def not_learning(record: Record) -> Finding | None:
    """Find losses that repeat exactly: the weights do not change."""
    losses = record.loss.finite()
    if unused := _other_parameters(record):
        return unused
    half = len(losses) // 2
    if half < SHORT or len(losses) < len(record):
        return None
    known = set[float]()
    for loss in losses[:half]:
        known.add(loss)
        if len(known) > MOST_VALUES:
            return None
    if not all(loss in known for loss in losses[half:]):
        return None
    if is_far_too_low(record):
        return None  # gradients round to zero: the weights do not change because of the scale
    late = set(losses[half:])
    moved = [place for place, loss in enumerate(losses[:half]) if loss not in late]
    if moved:
        return _stopped_learning(record, moved[-1] + 1, len(losses))
    values = len(known)
    count = "the same value in all" if values == 1 else f"only {values:,} different values in"
    return Finding(
        kind="not learning",
        severity="problem",
        sentence=f"The loss has {count} {len(losses):,} steps, and the second half of the run repeats those "
        "of the first exactly: the weights do not change.",
        advice="Check that the learning rate is above 0, that the optimizer was given the parameters of this "
        "model (after .to() and wrapping), and that the loss depends on them.",
        numbers={"values": values, "steps": len(losses)},
    )


def _stopped_learning(record: Record, place: int, steps: int) -> Finding:
    return Finding(
        kind="stopped learning",
        severity="problem",
        sentence=f"From step {record.index[place]:,} on, the losses of {steps - place:,} steps repeat "
        "exactly: the weights no longer change.",
        advice="If the loss is worse than before, the learning rate was most likely too high, and units have "
        "died: lower it, or warm it up. Otherwise look whether the schedule has reached 0.",
        numbers={"start": place, "steps": steps - place},
    )


def _other_parameters(record: Record) -> Finding | None:
    """Find an optimizer whose gradients are all zero, while those of the model are not."""
    norms = record.grad_norm.finite()
    look = record.look
    if len(norms) < SHORT or any(norms) or look is None:
        return None
    if not any(row.what == "gradient" and row.histogram.nonzero for row in look.rows):
        return None
    return Finding(
        kind="not learning",
        severity="problem",
        sentence=f"All gradients of the optimizer were zero in {len(norms):,} steps, but those of the model "
        "were not: the optimizer has other parameters.",
        advice="Make the optimizer last, after model.to(...) and whatever copies or wraps the model.",
        numbers={"steps": len(norms)},
    )


def clipped_while_scaled(record: Record) -> Finding | None:
    """Find gradients that were clipped before they were unscaled: norm times scale is constant."""
    norms = record.grad_norm
    bounds = array(
        "d",
        (
            norm * scale
            for norm, known, scale in zip(norms.values, norms.known, record.scales, strict=False)
            if known and scale >= LEAST_CLIPPED and math.isfinite(norm)
        ),
    )
    if len(bounds) < SHORT:
        return None
    ordered = sorted(bounds)
    low, bound, high = (ordered[len(ordered) * tenth // 10] for tenth in (1, 5, 9))
    if not 0.0 < high <= MOST_CLIPPED or high > ALIKE * low:
        return None
    return Finding(
        kind="clipped while scaled",
        severity="problem",
        sentence=f"In nearly all steps the gradient norm times the scale is {_number(bound)}: the gradients "
        "were clipped while they were still scaled, so the updates are as many times too small as the "
        "scale is large.",
        advice="Let the scaler clip: scaler.step(optimizer, max_norm=...). Or call "
        "scaler.unscale_(optimizer) before clip_grad_norm_. In optax, put the clipping inside: "
        "loss_scaled(optimizer, max_norm=...).",
        numbers={"bound": bound},
    )


def poisoned_buffers(record: Record) -> Finding | None:
    """Find buffers, such as BatchNorm's statistics, that a skipped step has left at inf or NaN."""
    names = record.buffers
    if not names:
        return None
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return Finding(
        kind="poisoned buffers",
        severity="problem",
        sentence=f"After a skipped step, {shown} held inf or NaN. A skipped step protects the weights and "
        "not the buffers of modules: in evaluation the model gives NaN.",
        advice="Reset them, or go back to a checkpoint before that step: module.reset_running_stats() for "
        "BatchNorm. An overflow in forward put them there; run the modules before it in float32.",
        numbers={"buffers": len(names)},
    )


def dead_units(record: Record) -> Finding | None:
    """Find modules whose outputs have become all zero, so that nothing before them gets a gradient."""
    clean = [look for look in record.looks if look.first_overflow is None]
    looks = clean[-2:]
    if len(looks) < 2:
        return None
    dead = [{row.name for row in look.rows if row.what == "activation" and _is_zero(row)} for look in looks]
    stuck = [{row.name for row in look.rows if row.what != "activation" and _is_zero(row)} for look in looks]
    names = [row.name for row in looks[-1].rows if row.name in dead[0] & dead[1]]
    if not names or not stuck[0] & stuck[1]:
        return None
    always = any(row.name == names[0] and row.what == "activation" and _is_zero(row) for row in clean[0].rows)
    died = (
        "Its units have died. The usual reason is a learning rate that was too high at the start. Lower it, "
        "warm it up, or use an activation that does not die, such as GELU."
    )
    began = (
        "It starts so: its first weights or biases are at fault, or something in it overflows and is divided "
        f"by, which gives 0. {_run_in_float32(names[0])}"
    )
    return Finding(
        kind="dead units",
        severity="problem",
        sentence=f"All outputs of {module_name(names[0])} are exactly zero "
        f"{'from the first look on' if always else 'in the last looks'}, and the gradients of "
        f"{len(stuck[0] & stuck[1]):,} modules with them.",
        advice=began if always else died,
        numbers={"modules": len(stuck[0] & stuck[1])},
    )


def _is_zero(row: LookRow) -> bool:
    return row.histogram.zeros > 0 and row.histogram.zeros == row.histogram.total


def _lost_before(record: Record, end: Failure) -> bool:
    """Return whether some steps before the failure had a loss that was not finite."""
    values, known = record.loss.values[: end.start], record.loss.known
    return any(known[place] and not math.isfinite(value) for place, value in enumerate(values))


def _outputs_finite(record: Record, end: Failure) -> bool:
    """Return whether outputs were looked at in the steps that failed, and all were finite."""
    first = record.index[end.start]
    looks = [look for look in record.looks if look.index >= first and is_lost(record, look)][:1]
    seen = [row for look in looks for row in look.rows if row.what == "activation"]
    return bool(seen) and not any(row.histogram.nonfinite for row in seen)


def _since(record: Record, end: Failure) -> str:
    return "in every step" if end.start == 0 else f"from step {record.index[end.start]:,} on"


def _counts(end: Failure) -> dict[str, float]:
    return {"start": end.start, "skipped": end.skips, "lowest_scale": end.lowest}


def _number(value: float) -> str:
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"
