"""What a record can show. A sign is present, absent, or unknown because nobody recorded it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Source: TypeAlias = Literal["loss", "norms", "lens", "names"]
"""What has to be recorded for a sign to be known."""
Test: TypeAlias = Callable[[Any], bool | None]


@dataclass(frozen=True)
class Sign:
    """Something that a record can show.

    Attributes:
        present: what it means if it is there, as a clause.
        absent: what it means if it is not.
        source: what has to be recorded for it to be known.
        usual: how often it is present where a cause says nothing about it.
        test: returns True, False, or None where the record does not tell.
    """

    present: str
    absent: str
    source: Source
    usual: float
    test: Test


class Signs(dict[str, Sign]):
    """Signs by name, each added by the function that looks for it."""

    def add(
        self, name: str, present: str, absent: str = "", source: Source = "loss", *, usual: float = 0.5
    ) -> Callable[[Test], Test]:
        """Return a decorator that adds a sign; the arguments are attributes of `Sign`."""

        def register(test: Test) -> Test:
            self[name] = Sign(present, absent, source, usual, test)
            return test

        return register
