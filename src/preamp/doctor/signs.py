"""What a record can show. A sign is present, absent, or unknown because nobody recorded it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Source: TypeAlias = Literal["loss", "norms", "lens", "names"]
"""What has to be recorded for a sign to be known."""


@dataclass(frozen=True)
class Sign:
    """Something that a record can show.

    Attributes:
        test: returns True, False, or None where the record does not tell.
        present: what it means if it is there, as a clause.
        absent: what it means if it is not.
        source: what has to be recorded for it to be known.
        usual: how often it is present where a cause says nothing about it.
    """

    test: Callable[[Any], bool | None]
    present: str
    absent: str = ""
    source: Source = "loss"
    usual: float = 0.5
