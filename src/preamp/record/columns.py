"""Store many steps in columns of numbers: 65 bytes a step, where a tuple of Python floats takes 400.

Rows are plain tuples in the order of `Step`'s fields, and their indices increase.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, MutableSequence
from typing import Any, Final, TypeAlias

from preamp.scaling import Spike, Step

FIELDS: Final = Step._fields
OPTIONAL: Final = ("new_scale", "loss", "grad_norm", "amax", "zeros", "seconds")
NAMES: Final = ("culprits", "buffers", "restored", "first_culprits")
FINITE, SKIPPED = 1, 2
KNOWN: Final = tuple(4 << place for place in range(len(OPTIONAL)))  # bits, set where the value is not None
Names: TypeAlias = tuple[str, ...]


class StepColumns:
    """A growing table of steps.

    The six numbers that may be None have a column of floats each, and a bit in `flags` that is set where the
    number is not None. Names and spikes are rare, so they are kept in dictionaries by position.
    """

    def __init__(self) -> None:
        self.index: MutableSequence[int] = array("q")
        self.scale = array("d")
        self.flags = bytearray()
        self.optional: tuple[array[float], ...] = tuple(array("d") for _ in OPTIONAL)
        self.culprits: dict[int, Names] = {}
        self.buffers: dict[int, Names] = {}
        self.spike: dict[int, Spike] = {}
        self.restored: dict[int, Names] = {}
        self.first_culprits: dict[int, Names] = {}
        self._interned: dict[Names, Names] = {}  # the same parameters are usually culprits many times

    def __len__(self) -> int:
        return len(self.flags)

    def append(self, row: tuple[Any, ...]) -> None:
        """Add a row of Python's own ints, bools, floats, None and tuples of names."""
        (
            index,
            scale,
            finite,
            skipped,
            new_scale,
            loss,
            grad_norm,
            amax,
            zeros,
            culprits,
            seconds,
            buffers,
            spike,
            restored,
            first_culprits,
        ) = row
        place, flags = len(self.flags), FINITE * finite + SKIPPED * skipped
        try:
            self.index.append(index)
        except OverflowError:  # beyond 64 bits
            self.index = [*self.index, index]
        values = (new_scale, loss, grad_norm, amax, zeros, seconds)
        for column, known, value in zip(self.optional, KNOWN, values, strict=True):
            if value is None:
                column.append(0.0)
            else:
                column.append(value)
                flags += known
        if culprits:
            self.culprits[place] = self._interned.setdefault(culprits, culprits)
        if buffers:
            self.buffers[place] = self._interned.setdefault(buffers, buffers)
        if spike is not None:
            self.spike[place] = spike
        if restored:
            self.restored[place] = self._interned.setdefault(restored, restored)
        if first_culprits:
            self.first_culprits[place] = self._interned.setdefault(first_culprits, first_culprits)
        self.scale.append(scale)
        self.flags.append(flags)

    def row(self, place: int) -> tuple[Any, ...]:
        """Return a row by its position, from 0."""
        flags = self.flags[place]
        new_scale, loss, grad_norm, amax, zeros, seconds = (
            column[place] if flags & known else None
            for column, known in zip(self.optional, KNOWN, strict=True)
        )
        return (
            self.index[place],
            self.scale[place],
            bool(flags & FINITE),
            bool(flags & SKIPPED),
            new_scale,
            loss,
            grad_norm,
            amax,
            zeros,
            self.culprits.get(place, ()),
            seconds,
            self.buffers.get(place, ()),
            self.spike.get(place),
            self.restored.get(place, ()),
            self.first_culprits.get(place, ()),
        )

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Return all rows, first to last."""
        culprits, buffers, spike = self.culprits.get, self.buffers.get, self.spike.get
        restored, first_culprits = self.restored.get, self.first_culprits.get
        numbers = zip(self.flags, self.index, self.scale, *map(self.values, OPTIONAL), strict=False)
        for place, (flags, index, scale, new_scale, loss, grad_norm, amax, zeros, seconds) in enumerate(
            numbers
        ):
            yield (
                index,
                scale,
                flags & FINITE != 0,
                flags & SKIPPED != 0,
                new_scale,
                loss,
                grad_norm,
                amax,
                zeros,
                culprits(place, ()),
                seconds,
                buffers(place, ()),
                spike(place),
                restored(place, ()),
                first_culprits(place, ()),
            )

    def values(self, name: str) -> Iterator[Any]:
        """Return one field of all rows, first to last."""
        if name in OPTIONAL:
            place = OPTIONAL.index(name)
            known = KNOWN[place]
            pairs = zip(self.flags, self.optional[place], strict=False)
            return (value if flags & known else None for flags, value in pairs)
        if name in ("finite", "skipped"):
            bit = FINITE if name == "finite" else SKIPPED
            return (flags & bit != 0 for flags in self.flags)
        if name in NAMES:
            rare: dict[int, Names] = getattr(self, name)
            return (rare.get(place, ()) for place in range(len(self)))
        if name == "spike":
            return (self.spike.get(place) for place in range(len(self)))
        plain: dict[str, MutableSequence[Any]] = {"index": self.index, "scale": self.scale}
        return iter(plain[name])

    def place_of(self, index: int) -> int:
        """Return the position of the first row whose index is at least this one."""
        return bisect_left(self.index, index)

    def truncate(self, length: int) -> None:
        """Keep only the first rows."""
        columns: tuple[MutableSequence[Any], ...] = (self.index, self.scale, self.flags, *self.optional)
        for column in columns:
            del column[length:]
        rare_ones: list[dict[int, Any]] = [self.spike, *[getattr(self, name) for name in NAMES]]
        for rare in rare_ones:
            for place in [place for place in rare if place >= length]:
                del rare[place]
