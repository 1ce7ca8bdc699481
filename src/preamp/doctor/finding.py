"""A finding of the doctor, and the thresholds that several rules share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

OFTEN: Final = 1 / 100
"""The share of skipped steps that is too many."""
FEWEST: Final = 4
"""The least number of steps of a kind, or of powers of two, to report."""
RARE: Final = 1000
"""One skipped step in this many is the normal price of finding the scale."""

Verdict: TypeAlias = Literal["cause", "one of", "unknown"]
Severity: TypeAlias = Literal["problem", "warning", "note", "fine"]


class Weighed(NamedTuple):
    """A cause that was considered.

    Attributes:
        kind: its name.
        left: whether the record leaves it.
        speaks_for: what speaks for it in this run.
        speaks_against: what speaks against it.
    """

    kind: str
    left: bool
    speaks_for: tuple[str, ...]
    speaks_against: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a run shows.

    Attributes:
        kind: its name, in one or a few words, such as "too low".
        severity: "problem": the training cannot have worked; "warning": steps or digits are lost; "note":
            worth knowing; "fine": nothing is wrong.
        sentence: what the run shows, with numbers.
        advice: what to do about it, in words; empty if there is nothing to do.
        numbers: the numbers of the sentence, by name.
        settings: settings of the policy that fix it, by name; empty if none can.
        verdict: "cause": the record excludes the others; "one of": it leaves two or three, which are in
            `among`; "unknown": it leaves more, and `advice` says what to record.
        among: the causes that are left, likeliest first.
        because: what speaks for it in this run.
        excluded: the causes that the record excludes, each with what excludes it.
        steps: the indices of the steps it is about, at most a hundred.
        weighed: every cause that was considered, likeliest first.
        operation: whether there may be one operation behind it, for `preamp blame` to find.
    """

    kind: str
    severity: Severity
    sentence: str
    advice: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    verdict: Verdict = "cause"
    among: tuple[Finding, ...] = ()
    because: tuple[str, ...] = ()
    excluded: tuple[tuple[str, str], ...] = ()
    steps: tuple[int, ...] = ()
    operation: bool = False
    weighed: tuple[Weighed, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that it names: its own, or those of `among`; none if the record cannot tell."""
        return tuple(one.kind for one in self.among) or (() if self.verdict == "unknown" else (self.kind,))

    @property
    def is_bad(self) -> bool:
        """Whether it is a problem or a warning."""
        return self.severity in ("problem", "warning")

    def lines(self) -> list[str]:
        """Return the finding as lines of text, without its settings."""
        if self.verdict != "one of":
            others = "; ".join(f"not {kind}: {why}" for kind, why in self.excluded)
            said = [
                f"{_capital(self.kind)}: {self.sentence}",
                self.advice,
                others and f"{_capital(others)}.",
            ]
            return [" ".join(filter(None, said))]
        listed = [f"{self.sentence} {self.advice}".strip()]
        for place, one in enumerate(self.among, start=1):
            why = f" Evidence: {'; '.join(one.because)}." if one.because else ""
            listed.append(f"{place}. {_capital(one.kind)}: {one.sentence}{why} {one.advice}")
        return listed

    def explained(self) -> list[str]:
        """Return for every cause that was considered what speaks for it and against it, as lines of text."""
        listed = [] if self.weighed or not self.is_bad else ["measured; no causes were compared"]
        for one in self.weighed:
            left = ("the cause" if self.verdict == "cause" else "possible") if one.left else "excluded"
            listed.append(f"{one.kind} ({left})")
            listed += [f"  for: {words}" for words in one.speaks_for]
            listed += [f"  against: {words}" for words in one.speaks_against]
        return listed

    def to_json(self) -> dict[str, Any]:
        """Return the finding as values that JSON can hold."""
        plain = {name: getattr(self, name) for name in ("kind", "severity", "verdict", "sentence", "advice")}
        return {
            **plain,
            "numbers": dict(self.numbers),
            "settings": dict(self.settings),
            "because": list(self.because),
            "excluded": [{"kind": kind, "because": why} for kind, why in self.excluded],
            "among": [one.to_json() for one in self.among],
            "steps": list(self.steps),
            "weighed": [one._asdict() for one in self.weighed],
        }


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
