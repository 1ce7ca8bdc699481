"""Compare the signs of a run with what each cause predicts, and answer in one of three ways.

Each sign multiplies the weight of a cause by how often the cause shows it, as in a naive Bayes classifier. A
sign that is unknown changes nothing. A cause is excluded if it is `EXCLUDED` times less likely than the
likeliest one. If only that is left, it is the cause. If the first three have nearly all of the likelihood, it
is one of them. Else the record cannot tell, and the answer is what to record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from preamp.doctor.causes import Cause
from preamp.doctor.finding import Verdict
from preamp.doctor.signs import Sign, Source

EXCLUDED: Final = 15.0
SPEAKS: Final = 1.3
"""A sign speaks for a cause that shows it this many times as often as the others that are left."""
MOST: Final = 3
ENOUGH: Final = 0.85
"""The share of all likelihood that the causes which are named have together."""


@dataclass(frozen=True)
class Weighed:
    """A cause and what the record says about it.

    Attributes:
        cause: the entry.
        score: the logarithm of its weight after all signs.
        found: for each known sign whether it is present.
    """

    cause: Cause
    score: float
    found: Mapping[str, bool]

    def chance(self, name: str, sign: Sign) -> float:
        """Return how likely what was found is under this cause."""
        present = self.cause.predicts.get(name, sign.usual)
        return present if self.found[name] else 1.0 - present


@dataclass(frozen=True)
class Weighing:
    """All causes of one kind of trouble, likeliest first.

    Attributes:
        weighed: the causes.
        signs: what was looked for.
        unknown: the signs that the record does not tell.
    """

    weighed: tuple[Weighed, ...]
    signs: Mapping[str, Sign]
    unknown: tuple[str, ...]

    @property
    def left(self) -> tuple[Weighed, ...]:
        """The causes that are not excluded."""
        best = self.weighed[0].score
        return tuple(one for one in self.weighed if best - one.score < math.log(EXCLUDED))

    @property
    def verdict(self) -> Verdict:
        """What the record can tell."""
        left = self.left
        if len(left) == 1:
            return "cause"
        best = self.weighed[0].score
        shares = [math.exp(one.score - best) for one in self.weighed]
        return "one of" if sum(shares[:MOST]) >= ENOUGH * sum(shares) else "unknown"

    def speaks_for(self, one: Weighed) -> list[str]:
        """Return what speaks for a cause, strongest first, compared with all others that are not excluded."""
        left = [other for other in self.left if other is not one]
        others = left or [other for other in self.weighed if other is not one]

        def ratio(name: str, sign: Sign) -> float:
            return one.chance(name, sign) * len(others) / sum(other.chance(name, sign) for other in others)

        return self._words(one.found, ratio)

    def speaks_against(self, one: Weighed) -> list[str]:
        """Return what speaks against a cause and not for it, strongest first, compared with the likeliest."""
        best, speaks_for = self.weighed[one is self.weighed[0]], self.speaks_for(one)
        words = self._words(one.found, lambda name, sign: best.chance(name, sign) / one.chance(name, sign))
        return [word for word in words if word not in speaks_for]

    def _words(self, found: Mapping[str, bool], ratio: Callable[[str, Sign], float]) -> list[str]:
        ratios = {name: ratio(name, self.signs[name]) for name in found}
        order = sorted((name for name in found if ratios[name] >= SPEAKS), key=lambda name: -ratios[name])
        words = [self.signs[name].present if found[name] else self.signs[name].absent for name in order]
        return [one for one in words if one]

    def to_record(self) -> list[Source]:
        """Return what to record so that fewer causes are left, most useful first."""
        useful: dict[Source, float] = {}
        for name in self.unknown:
            sign = self.signs[name]
            chances = [one.cause.predicts.get(name, sign.usual) for one in self.left]
            useful[sign.source] = max(useful.get(sign.source, 0.0), max(chances) - min(chances))
        return sorted(
            (source for source, gain in useful.items() if gain >= 0.5), key=lambda source: -useful[source]
        )


def weigh(causes: Sequence[Cause], signs: Mapping[str, Sign], trouble: Any) -> Weighing:
    """Return how well each cause explains the signs of some trouble."""
    tested = {name: sign.test(trouble) for name, sign in signs.items()}
    found = {name: present for name, present in tested.items() if present is not None}
    weighed = []
    for cause in causes:
        bare = Weighed(cause, math.log(cause.weight), found)
        chances = [bare.chance(name, signs[name]) for name in found]
        weighed.append(replace(bare, score=bare.score + sum(map(math.log, chances))))
    weighed.sort(key=lambda one: -one.score)
    return Weighing(tuple(weighed), signs, tuple(name for name in signs if name not in found))
