"""Turn the weighing of causes into findings: this is the cause, one of these, or what to record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
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
from preamp.doctor.verdict import Weighed, Weighing, weigh
from preamp.policy import Dynamic, Static
from preamp.record.formatting import two_to

RECENT: Final = 100
HIGHEST_TRY: Final = 2.0**32
WHY: Final = 3  # reasons in a sentence


def failed(record: Record) -> Finding | None:
    """Say why no step works any more, or why most late steps are lost."""
    found = Lost(record)
    if not found.places:
        return None
    late = range(max(0, len(record) - RECENT), len(record))
    if found.end is None and 2 * sum(place in late for place in found.places) < len(late):
        return None
    return _of_lost_steps(found, "problem")


def lost_steps(record: Record) -> Finding | None:
    """Say why single steps are lost at any scale."""
    found = Lost(record)
    return _of_lost_steps(found, "warning") if found.places else None


def _of_lost_steps(found: Lost, severity: Severity) -> Finding:
    record, end = found.record, found.end
    if end is None:
        when = words_of(record, found.places)
    else:
        when = "in every step" if end.start == 0 else f"from step {record.index[end.start]:,} on"
    row = found.origin.row if found.origin is not None else None
    settings, lower = _lower(found)
    facts = {
        "when": when,
        "float32": record.code.run_in_float32(row.name if row is not None else ""),
        "there": f"in {module_name(row.name)} " if row is not None else "there ",
        "buffers": f": {listed(record.buffers)} hold inf or NaN" if record.buffers else "",
        "lower": lower,
    }
    numbers = {"start": found.places[0], "steps": len(found.places)}
    weighing = weigh(causes.OF_LOST_STEPS, lost.SIGNS, found)
    answer = _answer(
        record, weighing, facts, severity, numbers, settings, _where(found), seen=found.origin is not None
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
    held = (
        f"NaN in {row.nans:,}"
        if row.nans and row.nans == row.histogram.nonfinite
        else f"inf or NaN in {row.histogram.nonfinite:,}"
    )
    what = {
        "data": "input",
        "weights": "weight",
        "between": "input",
        "backward": "gradient of the output" if row.what == "flow" else "gradient of the parameters",
    }.get(source.stage, "output")
    amax = row.histogram.amax_exponent
    others = "" if amax is None else f", and the others are at most {two_to(amax + 1)}"
    first = "is the first with" if is_in_order(row) else "holds"
    return (
        f" The {what} of {module_name(row.name)} {first} {held} of {row.histogram.total:,} entries{others}."
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
    rise = f"the loss rose from {number(found.loss.base)} to {number(found.loss.amax)}"
    step = found.record.index[found.place]
    facts = {"rise": f"{rise} (highest at step {step:,})"}
    weighing = weigh(causes.OF_RISEN_LOSS, risen.SIGNS, found)
    numbers = {"first_loss": found.loss.base, "last_loss": found.loss.amax}
    return replace(_answer(found.record, weighing, facts, severity, numbers, {}, ""), steps=(step,))


def no_progress(record: Record) -> Finding | None:
    """Say why weights do not change, or hardly do."""
    found = Stuck(record)
    if not found:
        return None
    dead = found.dead
    facts = {
        "bound": number(found.bound) if found.bound else "constant",
        "stopped": f"{record.index[min(found.moved or 0, len(record) - 1)]:,}",
        "dead": dead.words if dead else "they give zeros, and pass no gradient",
        "still": f": {listed(found.still.always)} never changed"
        if found.still and found.still.always
        else "",
        "revive": _revive(record, dead),
    }
    first = "scale" if isinstance(record.policy, Static) else "init_scale"
    settings = {first: HIGHEST_TRY} if record.scales[-1] < HIGHEST_TRY else {}
    weighing = weigh(causes.OF_NO_PROGRESS, stuck.SIGNS, found)
    losses = record.loss.finite()
    # Where the loss had fallen, a schedule that ends at 0 may be meant.
    fell = len(losses) >= SHORT and median(losses[-LATEST:]) < losses[0] / 2
    severity: Severity = (
        "note" if fell and weighing.weighed[0].cause.kind == "stopped learning" else "problem"
    )
    return _answer(record, weighing, facts, severity, {"steps": len(record)}, settings, "")


def _revive(record: Record, dead: stuck.Dead | None) -> str:
    if dead is not None and dead.always:
        return (
            "They are zero from the start: check the initial weights and biases, such as a large negative "
            "bias before a ReLU, and whether the module divides by a value that overflows, which gives 0. "
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
    settings: Mapping[str, Any],
    where: str,
    *,
    seen: bool = True,
) -> Finding:
    left = weighing.likely if weighing.verdict == "one of" else weighing.left

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
    if weighing.verdict == "cause":
        only = finding(left[0])
        excluded = [(one.kind, one.speaks_against[0]) for one in weighed[1 : 1 + WHY] if one.speaks_against]
        return replace(only, sentence=only.sentence + where, excluded=tuple(excluded), weighed=weighed)
    sources = weighing.to_record()
    lines = [line for source in sources if (line := _line_to_record(record, source, seen=seen))]
    to_record = f"To tell, record {'; or '.join(lines)}." if lines else ""
    among = tuple(finding(one) for one in left)
    if weighing.verdict == "one of":
        return replace(
            among[0],
            among=among,
            weighed=weighed,
            sentence=f"One of these, likeliest first.{where}",
            advice=to_record,
            because=(),
            operation=any(one.operation for one in among),
        )
    kinds = ", ".join(one.kind for one in among[:LATEST])
    return Finding(
        kind="unknown",
        severity=severity,
        sentence=f"{_symptom(facts)}{where} The record cannot tell which of these it is: {kinds}.",
        advice=to_record,
        numbers=numbers,
        verdict="unknown",
        operation=any(one.operation for one in among),
        weighed=weighed,
    )


def _line_to_record(record: Record, source: Source, *, seen: bool) -> str:
    """Return what to write to record something that is missing; "" if it is there or cannot be recorded.

    Args:
        record: the run.
        source: what is missing.
        seen: whether snapshots show the steps that matter.
    """
    line = record.code.records[source]
    if source == "lens" and record.snapshots:
        return "" if seen else record.code.these_steps
    has = {
        "loss": record.loss.count(),
        "norms": record.grad_norm.count(),
        "lens": 0,
        "names": len(record.culprits),
    }
    return "" if has[source] else line


def _symptom(facts: Mapping[str, str]) -> str:
    if "when" in facts:
        return f"Steps are lost whatever the scale ({facts['when'].removeprefix('in ')})."
    return (
        f"{facts['rise'][0].upper()}{facts['rise'][1:]}." if "rise" in facts else "The weights do not change."
    )


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
