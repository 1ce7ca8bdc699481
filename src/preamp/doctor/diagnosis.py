"""Apply all rules of the doctor to a trace, and combine their advice into one policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from preamp.doctor import answers, scale, snapshots
from preamp.doctor.advice import as_code, as_flags, changed
from preamp.doctor.evidence import Record
from preamp.doctor.finding import OFTEN, Finding
from preamp.doctor.spikes import NEARLY_ALL, spikes
from preamp.policy import Moving, Policy
from preamp.record.formatting import of_steps, power, powers
from preamp.record.trace import Trace
from preamp.simulation.processes import Recorded, has_amax
from preamp.simulation.simulate import simulate

Rule = Callable[[Record], Finding | None]
WORST_FIRST = ("problem", "warning", "fine", "note")

SNAPSHOTS: tuple[Rule, ...] = (snapshots.overflowed, snapshots.limited)


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run.

    Attributes:
        findings: problems, warnings, notes, in this order.
        record: the trace and what was counted in it.
    """

    findings: tuple[Finding, ...]
    record: Record

    @property
    def policy(self) -> Policy[Any] | None:
        """The policy of the run; None if the record names none or an unknown one."""
        return self.record.policy

    @property
    def healthy(self) -> bool:
        """Whether there are no problems and no warnings."""
        return not any(finding.is_bad for finding in self.findings)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of all findings together. No two findings have different values for one name."""
        return {name: value for finding in self.findings for name, value in finding.settings.items()}

    def better(self, finding: Finding | None = None) -> Policy[Any] | None:
        """Return the policy that fixes a finding, or all; None if no setting would."""
        settings = (finding or self).settings
        return changed(self.policy, settings) if settings else None

    def remedy(self, finding: Finding | None = None) -> str:
        """Return the line to write, for `preamp` also as flags, for a finding or for all; "" if none."""
        policy = self.better(finding)
        if policy is None:
            return ""
        by_command = str(self.record.trace.about.get("command", "")).startswith("preamp ")
        flags = as_flags(policy, (finding or self).settings) if by_command else ""
        return f"Write policy={as_code(policy)}{flags and f', or {flags}'}."

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as values that JSON can hold; `version` counts changes of this form."""
        return {
            "version": 1,
            "healthy": self.healthy,
            "findings": [finding.to_json() for finding in self.findings],
            "remedy": self.remedy(),
            "rehearsal": self.rehearsal(),
            "search": self.search(),
        }

    def search(self) -> str:
        """Return the command that finds the operation at fault; "" if none of the findings is about one."""
        flags = self.record.code.blame
        if flags is None or not any(finding.operation for finding in self.findings):
            return ""
        command = f"preamp blame MODULE:FUNCTION --dtype {self.record.band.name}{flags}"
        return f"{command} says which operation loses accuracy, if the function takes a batch of such a step."

    def rehearsal(self) -> str:
        """Return what the better policy would do with the recorded amaxes; "" if there are none."""
        policy, trace = self.better(), self.record.trace
        if policy is None or not any(map(has_amax, trace)):
            return ""
        then = simulate(policy, Recorded(trace=trace, dtype=self.record.band.name)).summary()
        now = trace.summary()
        return (
            "Simulated with the gradient amaxes of this run, this policy skips "
            f"{of_steps(then.skipped, then.steps)} instead of {now.skipped:,}, and ends at "
            f"{power(then.final_scale)} instead of {power(now.final_scale)}."
        )


def diagnose(trace: Trace) -> Diagnosis:
    """Return what is wrong with a run.

    A trace always shows which steps were skipped. With `Step.amax` it also shows the headroom, and with
    snapshots (`preamp.torch.Lens`) what is lost, and where.

    Args:
        trace: a run that was recorded or simulated.

    >>> from preamp import Dynamic, simulate
    >>> found = diagnose(simulate(Dynamic(init_scale=2.0**32), [n < 16 for n in range(1000)]))
    >>> found.findings[0].kind, found.remedy()
    ('wrong start', 'Write policy=Dynamic().')
    """
    record = Record(trace)
    found = sorted(_findings(record), key=lambda finding: WORST_FIRST.index(finding.severity))
    return Diagnosis(tuple(_consistent(found)), record)


def _consistent(found: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings, worst first, so that no two advise different values of one setting.

    A finding keeps only the settings that agree with those of worse findings. If none is left, the finding is
    left out: its words would contradict those of the worse one.
    """
    advised: dict[str, Any] = {}
    for finding in found:
        kept = {
            name: value
            for name, value in finding.settings.items()
            # A constant scale is a first scale as well.
            if advised.setdefault("init_scale" if name == "scale" else name, value) == value
        }
        if kept or not finding.settings:
            yield replace(finding, settings=kept)


def _findings(record: Record) -> list[Finding]:
    if not len(record):
        sentence = f"None of the {len(record.trace):,} steps in this record has a scale that can be used."
        return [Finding(kind="no steps", severity="note", sentence=sentence), *_all(SNAPSHOTS, record)]
    unscaled = _all((scale.not_scaled,), record)
    flushed = [finding for finding in unscaled if finding.severity == "problem"]
    failed = _all((answers.failed, answers.risen_for_good), record)
    if broken := failed or flushed or _all((answers.no_progress,), record):
        # A run that does not train at all needs no advice on how to train better.
        is_named = "poisoned buffers" in broken[0].kinds
        return [broken[0], *_all((spikes,) if is_named else (answers.poisoned_buffers, spikes), record)]
    if unscaled:
        return [*unscaled, *_all((spikes, *SNAPSHOTS), record)]
    damaged = _all((scale.lost_scale, answers.lost_steps, answers.risen_loss), record)[:1]
    found = [*_all((answers.poisoned_buffers,), record), *damaged]
    is_lost = record.opening_is_lost  # the scale fell for other reasons than the size of the gradients
    if not is_lost:
        found += _all((scale.wrong_start,), record)
    if all(2 * len(finding.steps) <= len(record.skips) for finding in damaged):  # or they are explained
        found += _all((scale.often_skipped,), record)
    if not is_lost and len(record.spikes) < NEARLY_ALL * len(record):  # else the scale could not grow
        found += _all((scale.too_low,), record)
    spiked = _all((spikes,), record)
    if not found and not any(finding.severity == "problem" for finding in spiked):
        found = [_healthy(record)]
    return [*found, *spiked, *_all((answers.did_not_fall, *SNAPSHOTS), record)]


def _all(rules: Iterable[Rule], record: Record) -> list[Finding]:
    return [finding for rule in rules if (finding := rule(record))]


def _healthy(record: Record) -> Finding:
    """Say that nothing was found, or that too little is known."""
    summary, name, advice = record.summary, record.band.name, ""
    kind, is_unscaled = "healthy", summary.min_scale == summary.max_scale == 1.0
    skipped, steps = summary.skipped - summary.spikes, summary.steps
    overflowed = f"{of_steps(skipped, steps)} overflowed"
    unknown = "is unknown without recorded amaxes of gradients or snapshots"
    if is_unscaled and snapshots.needs_no_scale(record.band):
        sentence = f"{name} needs no loss scale."
    elif skipped >= OFTEN * steps:
        kind, advice = "too few", "Record a longer run."
        sentence = f"{overflowed}, too few to tell whether that continues."
    elif is_unscaled and record.headroom is None and not isinstance(record.policy, Moving):
        kind, advice = "not measured", scale.if_low(record)
        sentence = (
            f"The loss was not scaled (the scale was 1), and {overflowed}. Whether small gradients round to "
            f"zero in {name} {unknown}."
        )
    else:
        low, high = power(summary.min_scale), power(summary.max_scale)
        moved = f"stayed at {low}" if low == high else f"moved between {low} and {high}"
        unused = f" Whether it could be higher {unknown}."
        if record.headroom is not None:
            unused = f" All late steps leave {powers(max(record.headroom, 0))} of headroom."
        sentence = f"Nothing is wrong with the scale: {overflowed} while it {moved}.{unused}"
    return Finding(
        kind=kind,
        severity="fine" if kind == "healthy" else "note",
        sentence=sentence,
        advice=advice,
        numbers={"skipped": skipped, "steps": steps, "headroom": record.headroom or 0},
    )
