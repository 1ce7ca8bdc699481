"""What autocast does in this thread: the regions that are open, and what edited operators do in them.

This room only remembers. The framework keeps on, off and the precision by itself, thread by thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

    from preamp.torch.autocasting.edited import Edits
    from preamp.torch.autocasting.region import autocast

__all__ = ["Change", "Frame", "Run", "Thread", "thread"]

# What an operator does, called as the dispatcher calls it: with the set of dispatch keys, then its own
# arguments.
Run: TypeAlias = Callable[..., Any]


class Change(NamedTuple):
    """What an entry into an edited region did.

    Attributes:
        before: what edited operators did outside of it.
        edits: what is edited inside.
        names: the operators that have kernels for it.
    """

    before: dict[str, Run]
    edits: Edits
    names: frozenset[str]


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
        rules: by device type and operator, what an edited operator does. Never changed in place.
        owns_cache: whether the framework's weight cache is this thread's.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.rules: dict[str, Run] = {}
        self.owns_cache = False


thread = Thread()
