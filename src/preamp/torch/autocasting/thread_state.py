"""What autocast does in this thread: the regions that are open, and what edited operators do in them.

This room only remembers. The framework keeps on, off and the precision by itself, thread by thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from preamp.torch.autocasting.weight_cache import Claim

if TYPE_CHECKING:
    import torch

    from preamp.torch.autocasting.counting import Census
    from preamp.torch.autocasting.edited import Edits
    from preamp.torch.autocasting.region import autocast


# What an operator does, called as the dispatcher calls it: with the set of dispatch keys, then its own
# arguments.
Kernel: TypeAlias = Callable[..., Any]


class Change(NamedTuple):
    """What an entry into an edited region does.

    Attributes:
        rules: what each operator does that does not do what the framework does by itself.
        edits: where the rules are from.
        names: the operators that have kernels for it.
        censuses: what counts inside, outermost first.
    """

    rules: dict[str, Kernel]
    edits: Edits
    names: frozenset[str]
    censuses: tuple[Census, ...]


class Frame:
    """One entry into a region, and what it has to restore.

    Attributes:
        region: what was entered.
        enabled: whether autocast was on for the region's device type.
        dtype: the low precision of the device type.
        cache: whether casts of weights were kept.
        change: what an edited region changes besides.
    """

    __slots__ = ("cache", "change", "dtype", "enabled", "region")

    def __init__(self, region: autocast, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
        self.region, self.enabled, self.dtype, self.cache = region, enabled, dtype, cache
        self.change: Change | None = None


class Thread(threading.local):
    """The state of one thread.

    Attributes:
        frames: entries into regions that were not left yet, outermost first.
        rules: what edited operators do, by device type and name. Never changed in place.
        claim: whether the framework's weight cache is this thread's.
        traced: the framework's regions that stand for ours while a program is traced.
        end: what acts when the thread ends, in a thread that was in an edited region.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.rules: dict[str, Kernel] = {}
        self.claim = Claim()
        self.traced: list[tuple[autocast, torch.autocast]] = []
        self.end: object = None

    def change_in_force(self, device_type: str) -> Change | None:
        """Return what the innermost edited region of a device type changes."""
        frames = (frame for frame in reversed(self.frames) if frame.region.device == device_type)
        return next((frame.change for frame in frames if frame.change), None)

    def follow_changes(self) -> None:
        """Have edited operators do what the innermost edited region of each device type says."""
        changes = {frame.region.device: frame.change for frame in self.frames if frame.change}
        self.rules = {key: run for change in changes.values() for key, run in change.rules.items()}


thread = Thread()
