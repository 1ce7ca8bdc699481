"""A finding of the doctor, and the thresholds that several rules share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

OFTEN: Final = 1 / 100
"""The share of skipped steps that is too many."""
FEWEST: Final = 4
"""The least number of steps of a kind, or of powers of two, to report."""
RARE: Final = 1000
"""One skipped step in this many is the normal price of finding the scale."""

Severity: TypeAlias = Literal["problem", "warning", "note", "fine"]


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
    """

    kind: str
    severity: Severity
    sentence: str
    advice: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
