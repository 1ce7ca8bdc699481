"""The autocast state of each thread: the regions that are open.

PyTorch itself keeps, per thread, whether autocast is on and in which precision.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from preamp.torch.autocasting.weight_cache import Claim

if TYPE_CHECKING:
    from preamp.torch.autocasting.modes import EditMode


class Frame:
    """One entry into a region, and the state to restore when it is left.

    Attributes:
        region: what was entered.
        enabled: whether autocast was on for the region's device type.
        dtype: the low precision of the device type.
        cache: whether casts of weights were cached.
        mode: the mode of an edited region; None for any other.
        outer: the mode of the edited region around it, and the key of the edits that held there.
        followed: what has the mode follow the modules of a model.
    """

    __slots__ = ("cache", "dtype", "enabled", "followed", "mode", "outer", "region")

    def __init__(self, region: torch.autocast, enabled: bool, dtype: torch.dtype, cache: bool) -> None:
        self.region, self.enabled, self.dtype, self.cache = region, enabled, dtype, cache
        self.mode: EditMode | None = None
        self.outer: tuple[EditMode, str] | None = None
        self.followed: AbstractContextManager[object] | None = None


class Thread(threading.local):
    """The state of one thread.

    Attributes:
        frames: entries into regions that have not been left yet, outermost first.
        claim: whether this thread may use PyTorch's weight cache.
        traced: pairs of a region and what stands for it while a program is traced.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.claim = Claim()
        self.traced: list[tuple[torch.autocast, AbstractContextManager[object]]] = []


thread = Thread()
