"""What a finding is, and from where on there is something to find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

OFTEN: Final = 1 / 100
"""The share of steps from which on skipping is too dear."""
FEWEST: Final = 4
"""Steps of a kind, or powers of two, from which on there is something to say."""
RARE: Final = 1000
"""One skipped step in so many is the price of finding the scale."""

Severity: TypeAlias = Literal["problem", "warning", "note", "fine"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a run shows.

    Attributes:
        kind: what it is, in one or two words, such as "too low".
        severity: "problem": the training cannot have worked; "warning": steps or digits are lost; "note":
            worth knowing; "fine": that nothing is wrong.
        sentence: what was seen, with numbers.
        advice: what to do about it, in words; empty where nothing is to be done.
        numbers: what the sentence says, by name.
        settings: settings of the rule that take it away, by name; empty where none can.
    """

    kind: str
    severity: Severity
    sentence: str
    advice: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
