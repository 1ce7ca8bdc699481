"""Apply all rules of the doctor to a trace, and combine their advice into one policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from preamp.doctor.advice import as_code, as_flags, changed
from preamp.doctor.answers import (
    did_not_fall,
    failed,
    lost_steps,
    no_progress,
    poisoned_buffers,
    restored_buffers,
    risen_for_good,
    risen_loss,
)
from preamp.doctor.evidence import Record
from preamp.doctor.finding import OFTEN, Finding
from preamp.doctor.scale import (
    backs_off_too_far,
    dragged,
    lost_scale,
    not_scaled,
    oscillating,
    slow,
    too_high,
    too_low,
    wrong_start,
)
from preamp.doctor.snapshots import limited, needs_no_scale, overflowed
from preamp.doctor.spikes import NEARLY_ALL, spikes
from preamp.policy import Moving, Policy
from preamp.record.formatting import of_steps, power, powers
from preamp.record.trace import Summary, Trace
from preamp.simulation.processes import Recorded, has_amax
from preamp.simulation.simulate import simulate

Rule = Callable[[Record], Finding | None]
NO_STEPS = "There are no steps in this record."
WORST_FIRST = ("problem", "warning", "fine", "note")

DAMAGED: tuple[Rule, ...] = (lost_scale, lost_steps, risen_loss, backs_off_too_far)
"""Of each group only the first finding is reported."""
SKIPPED: tuple[Rule, ...] = (slow, oscillating, dragged, too_high)
UNUSED: tuple[Rule, ...] = (too_low,)
SNAPSHOTS: tuple[Rule, ...] = (overflowed, limited)


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
        settings = self.settings if finding is None else finding.settings
        return changed(self.policy, settings) if settings else None

    def remedy(self, finding: Finding | None = None) -> str:
        """Return the line to write for a finding, or for all; "" if there is none.

        For a run of the `preamp` command, it includes the flags that do the same.
        """
        policy = self.better(finding)
        if policy is None:
            return ""
        settings = self.settings if finding is None else finding.settings
        by_command = str(self.record.trace.about.get("command", "")).startswith("preamp ")
        flags = as_flags(policy, settings) if by_command else ""
        return f"Write policy={as_code(policy)}{f', or {flags}' if flags else ''}."

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
        """Return the command that finds the operation at fault; "" if none of the findings is about one.

        For Keras and TensorFlow there is none: the command runs functions of PyTorch and JAX.
        """
        flags = self.record.code.blame
        if flags is None or not any(finding.operation for finding in self.findings):
            return ""
        return (
            f"preamp blame MODULE:FUNCTION --dtype {self.record.band.name}{flags} says which operation of "
            "your step loses accuracy."
        )

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
        kept = {}
        for name, value in finding.settings.items():
            setting = "init_scale" if name == "scale" else name  # a constant scale is a first scale as well
            if advised.setdefault(setting, value) == value:
                kept[name] = value
        if kept or not finding.settings:
            yield finding if len(kept) == len(finding.settings) else replace(finding, settings=kept)


def _findings(record: Record) -> list[Finding]:
    if not len(record):
        return [_no_steps(record), *_all(SNAPSHOTS, record)]
    if broken := _first((failed, risen_for_good, never_scaled, no_progress), record):
        # A run that does not train at all needs no advice on how to train better.
        return [*broken, *_all((poisoned_buffers, spikes), record)]
    if unscaled := _first((not_scaled,), record):
        return [*unscaled, *_all((spikes, *SNAPSHOTS), record)]
    groups: tuple[tuple[Rule, ...], ...] = ((wrong_start,), SKIPPED, UNUSED)
    if record.opening_is_lost:  # the scale fell for other reasons than the size of the gradients
        groups = (SKIPPED,)
    if len(record.spikes) >= NEARLY_ALL * len(record):  # of so few clean steps the scale could not grow
        groups = tuple(rules for rules in groups if rules is not UNUSED)
    damaged = _first(DAMAGED, record)
    if any(2 * len(finding.steps) > len(record.skips) for finding in damaged):
        groups = tuple(rules for rules in groups if rules is not SKIPPED)  # these steps are explained
    found = [*_all((poisoned_buffers,), record), *damaged]
    found += [found for rules in groups for found in _first(rules, record)]
    spiked = _all((spikes,), record)
    if not found and not any(finding.severity == "problem" for finding in spiked):
        found = [_healthy(record)]
    return [*found, *spiked, *_all((did_not_fall, restored_buffers, *SNAPSHOTS), record)]


def never_scaled(record: Record) -> Finding | None:
    """Find a loss that was not scaled, where gradients are lost because of it."""
    found = not_scaled(record)
    return found if found and found.severity == "problem" else None


def _no_steps(record: Record) -> Finding:
    count = len(record.trace)
    sentence = f"None of the {count:,} steps has a scale that can be used." if count else NO_STEPS
    return Finding(kind="no steps", severity="note", sentence=sentence)


def _all(rules: Iterable[Rule], record: Record) -> list[Finding]:
    return [finding for rule in rules if (finding := rule(record))]


def _first(rules: Iterable[Rule], record: Record) -> list[Finding]:
    return next(([finding] for rule in rules if (finding := rule(record))), [])


def _healthy(record: Record) -> Finding:
    summary = record.summary
    if needs_no_scale(record.band) and summary.max_scale == 1.0:
        return Finding(kind="healthy", severity="fine", sentence=f"{record.band.name} needs no loss scale.")
    overflows = summary.skipped - summary.spikes
    if overflows >= OFTEN * summary.steps:
        return _too_few(overflows, summary.steps)
    is_unscaled = summary.min_scale == summary.max_scale == 1.0 and not isinstance(record.policy, Moving)
    if is_unscaled and record.headroom is None:
        return _not_measured(record, overflows)
    low, high = power(summary.min_scale), power(summary.max_scale)
    moved = f"stayed at {low}" if low == high else f"moved between {low} and {high}"
    return Finding(
        kind="healthy",
        severity="fine",
        sentence=f"Nothing is wrong with the scale: "
        f"{of_steps(overflows, summary.steps)} {_skipped_words(summary)} while it {moved}."
        f"{_headroom_words(record)}",
        numbers={"skipped": overflows, "steps": summary.steps, "headroom": record.headroom or 0},
    )


def _not_measured(record: Record, overflows: int) -> Finding:
    """Say that nothing is known about a loss that was not scaled."""
    name = record.band.name
    return Finding(
        kind="not measured",
        severity="note",
        sentence="The loss was not scaled (the scale was 1), and "
        f"{of_steps(overflows, record.summary.steps)} {_skipped_words(record.summary)}. Whether small "
        f"gradients round to zero in {name} is unknown without recorded amaxes of gradients or snapshots.",
        advice=f"If the model computes in {name}, use a loss scale. If not, say so: "
        f'{record.code.trace}(precision="float32").',
        numbers={"skipped": overflows, "steps": record.summary.steps},
    )


def _skipped_words(summary: Summary) -> str:
    return "overflowed" if summary.spikes else "were skipped"


def _too_few(skipped: int, steps: int) -> Finding:
    return Finding(
        kind="too few",
        severity="note",
        sentence=f"{of_steps(skipped, steps)} were skipped, too few to tell whether that continues.",
        advice="Record a longer run.",
        numbers={"skipped": skipped, "steps": steps},
    )


def _headroom_words(record: Record) -> str:
    if record.headroom is None:
        return " Whether it could be higher is unknown without recorded amaxes of gradients or snapshots."
    if record.headroom <= 0:
        return (
            f" The largest values of late steps come within a power of two of {record.band.name}'s largest."
        )
    return f" All late steps leave {powers(record.headroom)} of headroom."
