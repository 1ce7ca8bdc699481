"""The autocast state of each thread: the regions that are open, and what edited operators do in them.

PyTorch itself keeps, per thread, whether autocast is on and in which precision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from preamp.autocasting.tables import DEFAULT, Casting
from preamp.torch.autocasting.weight_cache import Claim

# What an operator does, called as the dispatcher calls it: with the set of dispatch keys, then its own
# arguments.
Kernel: TypeAlias = Callable[..., Any]


class Edits(NamedTuple):
    """What operators of a device type do differently from PyTorch.

    Attributes:
        table: the rules that replace PyTorch's.
        emulate: whether operators of the rule "lower" round instead of being cast.
        dtype: what they round to; None for the low precision of the region they run in.
    """

    table: Casting = DEFAULT
    emulate: bool = False
    dtype: torch.dtype | None = None


class Counter(Protocol):
    """The interface of `counting.CastCounter`, which counts the calls of operators for a report."""

    def counted(self, rules: dict[str, Kernel], edits: Edits) -> dict[str, Kernel]:
        """Return kernels that do what the given ones do and count it."""
        ...


class Change(NamedTuple):
    """What an entry into an edited region changes.

    Attributes:
        rules: the kernel of each operator that does something other than what PyTorch does.
        edits: what the rules follow from.
        names: the operators that have kernels registered for it.
        counters: what counts inside, outermost first.
    """

    rules: dict[str, Kernel]
    edits: Edits
    names: frozenset[str]
    counters: tuple[Counter, ...]


class Frame:
    """One entry into a region, and the state to restore when it is left.

    Attributes:
        region: what was entered.
        enabled: whether autocast was on for the region's device type.
        dtype: the low precision of the device type.
        cache: whether casts of weights were cached.
        change: what an edited region changes; None for any other.
    """

    __slots__ = ("cache", "change", "dtype", "enabled", "region")

    def __init__(self, region: torch.autocast, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
        self.region, self.enabled, self.dtype, self.cache = region, enabled, dtype, cache
        self.change: Change | None = None


class Thread(threading.local):
    """The state of one thread.

    Attributes:
        frames: entries into regions that have not been left yet, outermost first.
        rules: what edited operators do, by device type and name. Replaced, never changed in place: kernels
            read it without a lock.
        claim: whether this thread may use PyTorch's weight cache.
        traced: pairs of a region and the PyTorch region that stands for it while a program is traced.
        end: an object whose finalizer runs when the thread ends, in a thread that was in an edited region.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.rules: dict[str, Kernel] = {}
        self.claim = Claim()
        self.traced: list[tuple[torch.autocast, torch.autocast]] = []
        self.end: object = None

    def current_change(self, device_type: str) -> Change | None:
        """Return what the innermost edited region of a device type changes."""
        frames = (frame for frame in reversed(self.frames) if frame.region.device == device_type)
        return next((frame.change for frame in frames if frame.change), None)

    def apply_changes(self) -> None:
        """Apply the rules of the innermost edited region of each device type to edited operators."""
        changes = {frame.region.device: frame.change for frame in self.frames if frame.change}
        self.rules = {key: run for change in changes.values() for key, run in change.rules.items()}


thread = Thread()
