"""Turn the weighing of causes into findings: this is the cause, one of these, or what to record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import Any, Final

from preamp.doctor import causes, lost, risen, stuck
from preamp.doctor.evidence import Record
from preamp.doctor.finding import Finding, Severity
from preamp.doctor.finding import Weighed as Considered
from preamp.doctor.first_nonfinite import Origin, given_far_larger
from preamp.doctor.history import LATEST, SHORT, hardly_fell, number, words_of
from preamp.doctor.lost import Lost
from preamp.doctor.risen import Risen
from preamp.doctor.signs import Source
from preamp.doctor.snapshots import first_parameter, is_in_order, listed, module_name
from preamp.doctor.stuck import Stuck
from preamp.doctor.verdict import MOST, Weighed, Weighing, weigh
from preamp.policy import Dynamic, Static
from preamp.record.formatting import two_to

RECENT: Final = 100
HIGHEST_TRY: Final = 2.0**32
WHY: Final = 3  # reasons in a sentence


def failed(record: Record) -> Finding | None:
    """Say why no step works any more, or why most late steps are lost."""
    found, late = Lost(record), range(max(0, len(record) - RECENT), len(record))
    is_most = 2 * sum(place in late for place in found.places) >= len(late)
    return _of_lost_steps(found, "problem") if found.places and (found.end or is_most) else None


def lost_steps(record: Record) -> Finding | None:
    """Say why single steps are lost at any scale."""
    found = Lost(record)
    return _of_lost_steps(found, "warning") if found.places else None


def _of_lost_steps(found: Lost, severity: Severity) -> Finding:
    record, end, origin = found.record, found.end, found.origin
    row, is_between = origin and origin.row, origin is not None and origin.stage == "between"
    # The gradient of an output is made by what comes after it.
    is_after = row is not None and row.what == "flow"
    side = "in what leads to" if is_between else "in what follows" if is_after else "in"
    when = words_of(record, found.places)
    if end is not None:
        when = f"from step {record.index[end.start]:,} on" if end.start else "in every step"
    settings, lower = _lower(found)
    facts = {
        "symptom": f"Steps are lost whatever the scale ({when.removeprefix('in ')}).",
        "when": when,
        "float32": record.code.run_in_float32(row.name if row and not is_between else ""),
        "there": f"{side} {module_name(row.name)} " if row else "there ",
        "buffers": f": {listed(record.buffers)} hold inf or NaN" if record.buffers else "",
        "lower": lower,
    }
    answer = _answer(
        record,
        weigh(causes.OF_LOST_STEPS, lost.SIGNS, found),
        facts,
        severity,
        {"start": found.places[0], "steps": len(found.places)},
        settings=settings,
        where=_where(found),
        seen=origin is not None,
    )
    return replace(answer, steps=record.numbers_of(found.places))


def _lower(found: Lost) -> tuple[Mapping[str, Any], str]:
    """Return the settings, and words for them, of a scale that is low enough for the steps that were lost."""
    record = found.record
    last = found.places[-2 * LATEST :]
    lowest = min(record.scales[place] for place in last)
    if isinstance(record.policy, Static):
        return {"init_scale": lowest}, "Use a dynamic scale."
    if lowest >= record.scales[last[0]] and lowest > record.band.normal:
        return {"min_scale": record.band.normal}, "Lower the floor of the scale."
    return {"init_scale": min(lowest, Dynamic.init_scale)}, "The scale is still falling. Start lower."


def _where(found: Lost) -> str:
    """Say what snapshots or names show of the first value that was not finite."""
    source = found.origin
    if source is None:
        return "" if found.loss_lost else first_parameter(found.record)
    large = given_far_larger(found.record, source.snapshot)
    if large is not None:
        amax = two_to(large.histogram.amax_exponent or 0)
        return f" The input of {module_name(large.name)}, the first module, reaches {amax}."
    return _of_row(source)


def _of_row(source: Origin) -> str:
    row = source.row
    if row is None:
        return ""
    count, amax = row.histogram.nonfinite, row.histogram.amax_exponent
    of_step = {"data": "input", "weights": "weight", "between": "input"}
    of_backward = {"flow": "gradient of the output", "gradient": "gradient of the parameters"}
    what = of_step.get(source.stage) or of_backward.get(row.what, "output")
    first = "is the first with" if is_in_order(row) else "holds"
    held = "NaN" if row.nans == count else "inf or NaN"
    others = "" if amax is None else f", and the others are at most {two_to(amax + 1)}"
    return (
        f" The {what} of {module_name(row.name)} {first} {held} in {count:,} of {row.histogram.total:,} "
        f"entries{others}."
    )


def risen_for_good(record: Record) -> Finding | None:
    """Say why the loss rose while steps were taken, and did not recover."""
    found = Risen(record)
    return _of_risen_loss(found, "problem") if found and not found.recovers else None


def risen_loss(record: Record) -> Finding | None:
    """Say why the loss rose for a while."""
    found = Risen(record)
    return _of_risen_loss(found, "warning") if found else None


def _of_risen_loss(found: Risen, severity: Severity) -> Finding:
    assert found.loss is not None
    base, amax = found.loss
    step = found.record.index[found.place]
    rise = f"the loss rose from {number(base)} to {number(amax)} (highest at step {step:,})"
    facts = {"rise": rise, "symptom": f"{rise}.".capitalize()}
    weighing = weigh(causes.OF_RISEN_LOSS, risen.SIGNS, found)
    answer = _answer(found.record, weighing, facts, severity, {"first_loss": base, "last_loss": amax})
    return replace(answer, steps=(step,))


def no_progress(record: Record) -> Finding | None:
    """Say why weights do not change, or hardly do."""
    found = Stuck(record)
    if not found:
        return None
    dead, still = found.dead, found.still.always if found.still else ()
    facts = {
        "symptom": "The weights do not change.",
        "bound": number(found.bound) if found.bound else "constant",
        "stopped": f"from step {record.index[found.moved]:,} on the losses repeat exactly"
        if found.moved and found.moved < len(record)
        else "they are the same in the last snapshots",
        "dead": dead.words if dead else "they give zeros, and pass no gradient",
        "still": f": {listed(still)} never changed" if still else "",
        "revive": _revive(record, dead),
    }
    settings = {"init_scale": HIGHEST_TRY} if record.scales[-1] < HIGHEST_TRY else {}
    weighing, losses = weigh(causes.OF_NO_PROGRESS, stuck.SIGNS, found), record.loss.finite()
    # Where the loss had fallen, a schedule that ends at 0 may be meant.
    fell = len(losses) >= SHORT and median(losses[-LATEST:]) < losses[0] / 2
    is_meant = fell and weighing.weighed[0].cause.kind == "stopped learning"
    is_part = found.still is not None and found.still.some and bool(still)
    severity: Severity = "note" if is_meant else "warning" if is_part else "problem"
    return _answer(record, weighing, facts, severity, {"steps": len(record)}, settings=settings)


def _revive(record: Record, dead: stuck.Dead | None) -> str:
    if dead is not None and dead.always:
        return (
            "They are zero from the start: check the initial weights and biases, such as a large negative "
            "bias before a ReLU. A module that divides by a value that overflows gives zeros, too. "
            f"{record.code.run_in_float32(dead.name)}"
        )
    return (
        "The usual reason is a learning rate, or a weight decay, that was too high at the start. Lower it, "
        "warm it up, or use an activation that does not die, such as GELU."
    )


def _answer(
    record: Record,
    weighing: Weighing,
    facts: Mapping[str, str],
    severity: Severity,
    numbers: Mapping[str, float],
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    where: str = "",
    seen: bool = True,
) -> Finding:
    def finding(one: Weighed) -> Finding:
        cause = one.cause
        known = {**facts, "code": record.code, "band": record.band.name, "clip": record.clip}
        return Finding(
            kind=cause.kind,
            severity=severity,
            sentence=cause.says.format(**known),
            advice=cause.remedy.format(**known),
            numbers=numbers,
            settings=settings if cause.settings else {},
            verdict=weighing.verdict,
            because=tuple(weighing.speaks_for(one)[:WHY]),
            operation=cause.operation,
        )

    weighed = tuple(
        Considered(
            one.cause.kind,
            one in weighing.left,
            tuple(weighing.speaks_for(one)),
            tuple(weighing.speaks_against(one)),
        )
        for one in weighing.weighed
    )
    among = tuple(map(finding, weighing.left))
    if weighing.verdict == "cause":
        excluded = [(one.kind, one.speaks_against[0]) for one in weighed[1 : 1 + WHY] if one.speaks_against]
        return replace(
            among[0], sentence=among[0].sentence + where, excluded=tuple(excluded), weighed=weighed
        )
    lines = [line for one in weighing.to_record() if (line := _line_to_record(record, one, seen=seen))]
    to_record = f"To tell, record {'; or '.join(lines)}." if lines else ""
    sentence, kinds = f"One of these, likeliest first.{where}", ", ".join(one.kind for one in among[:LATEST])
    if weighing.verdict == "unknown":
        sentence = f"{facts['symptom']}{where} The record cannot tell which of these it is: {kinds}."
    return replace(
        among[0],
        kind="unknown" if weighing.verdict == "unknown" else among[0].kind,
        sentence=sentence,
        advice=to_record,
        settings={} if weighing.verdict == "unknown" else among[0].settings,
        because=(),
        operation=any(one.operation for one in among),
        among=among[:MOST] if weighing.verdict == "one of" else (),
        weighed=weighed,
    )


def _line_to_record(record: Record, source: Source, *, seen: bool) -> str:
    """Return what to write to record something that is missing; "" if it is there or cannot be recorded.

    Args:
        record: the run.
        source: what is missing.
        seen: whether snapshots show the steps that matter.
    """
    if source == "lens" and record.snapshots:
        return "" if seen else record.code.these_steps
    has = {"loss": record.loss.count(), "norms": record.grad_norm.count(), "names": len(record.culprits)}
    return "" if has.get(source) else record.code.records[source]


def poisoned_buffers(record: Record) -> Finding | None:
    """Find buffers, such as BatchNorm's statistics, that a skipped step left at inf or NaN."""
    names = record.buffers
    if not names:
        return None
    return Finding(
        kind="poisoned buffers",
        severity="problem",
        sentence=f"After a skipped step, {listed(names)} held inf or NaN. Skipping a step protects the "
        "weights but not the buffers of modules: in evaluation the model gives NaN.",
        advice=f"Reset them ({record.code.reset_statistics}), or go back to a checkpoint before that step. "
        f"{record.code.restore}",
        numbers={"buffers": len(names)},
    )


def did_not_fall(record: Record) -> Finding | None:
    """Say that the loss did not fall, which may be as it should be."""
    levels = hardly_fell(record)
    if levels is None:
        return None
    first, late = levels
    lines = [line for one in ("norms", "lens") if (line := _line_to_record(record, one, seen=True))]
    to_record = (
        f"To tell whether gradients reach the weights, record {'; and '.join(lines)}. " if lines else ""
    )
    return Finding(
        kind="no progress",
        severity="note",
        sentence=f"The loss hardly fell: it began at {number(first)} and ended near {number(late)}. "
        "Whether it should have, and why it did not, the record cannot tell.",
        advice=f"{to_record}Check the learning rate, the parameters that the optimizer was given, and the "
        "labels.",
        numbers={"first_loss": first, "last_loss": late},
        verdict="unknown",
    )
