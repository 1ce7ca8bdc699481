"""Where autocast is on: regions, entered and left in any order, in any number of threads.

A region that edits nothing stands on the framework's own dispatcher and costs what the framework's region
costs. This room decides what is restored when a region is left; which operators are cast, the framework does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from torch.compiler import is_compiling, is_dynamo_compiling

from preamp.arrays.torch_compat import traced_autocast, untraced
from preamp.autocasting.tables import Casting
from preamp.checks import level_of_caller
from preamp.errors import UsageError
from preamp.torch.autocasting.dispatcher import remove_unneeded, unneeded
from preamp.torch.autocasting.generators import wrap
from preamp.torch.autocasting.thread_state import Frame, thread

if TYPE_CHECKING:
    from preamp.autocasting.report import CastReport


F = TypeVar("F", bound=Callable[..., Any])
TorchAutocast = torch.autocast  # now: users may put ours in its place
CASTABLE = (torch.float16, torch.bfloat16)
NOT_COMPILED = (
    "An autocast region with casting=, report= or emulate= cannot be entered inside compiled code. "
    "Put @torch.compiler.disable on the function that enters it."
)


_working = {"cpu"}  # device types that PyTorch has no objection to


class autocast(TorchAutocast):  # PyTorch's name
    """A region, or a decorated function, in which each operator runs in a precision of its own.

    A drop-in for `torch.autocast`: the same arguments, lists of operators, warnings and errors, compiled by
    `torch.compile` in the same way. Beyond it:

    - `casting=` edits the table of operators for the region and the thread;
    - `report=True` counts what is cast, and `report()` tells;
    - `emulate=True` rehearses low precision in float32: listed operators round their inputs and results;
    - an instance can be entered twice, by a recursive function too, and regions can be left in any order, as
      coroutines do; a decorated generator or coroutine is in the region only while it runs;
    - a weight that an optimizer steps inside the region is cast again, regions of different precision do not
      share casts, and threads do not clear each other's.

    When the last region has been left, the process is as it was before the first.

    >>> import torch
    >>> from preamp import casting
    >>> x = torch.ones(2, 2)
    >>> with autocast("cpu", dtype=torch.bfloat16, casting=casting.DEFAULT.float32("mm")):
    ...     torch.mm(x, x).dtype, (x @ x).dtype
    (torch.float32, torch.bfloat16)

    Args:
        device_type: "cpu", "cuda", ...: whose tensors are cast.
        dtype: the low precision; None takes the surrounding region's, else the default of the device type,
            bfloat16 on CPUs and float16 on CUDA. Emulation takes float8_e4m3fn and float8_e5m2 as well.
        enabled: False switches autocast off inside.
        cache_enabled: whether the cast of a weight is kept until the outermost region ends; None takes the
            surrounding region's choice, else True.
        casting: an edited table of operators. None takes the surrounding region's, else the framework's;
            `casting.DEFAULT` goes back to the framework's.
        report: whether to count. It slows the region down many times.
        emulate: whether to round instead of casting.

    Raises:
        ValueError: when `device_type` is not a string.
        RuntimeError: for a device type without autocast.
        CastingError: when a table names an operator that does not exist, with the nearest names, or a dtype
            cannot be emulated.
        UsageError: when a subclass is given `casting`, `report` or `emulate`.
    """

    def __new__(
        cls,
        device_type: Any = None,
        dtype: Any = None,
        enabled: Any = True,
        cache_enabled: Any = None,
        *,
        casting: Any = None,
        report: Any = False,
        emulate: Any = False,
    ) -> Self:
        """Return a region: PyTorch's own while PyTorch traces, which knows how to compile it."""
        if cls is autocast:
            if casting is not None or report or emulate:
                from preamp.torch.autocasting.edited import EditedRegion

                return object.__new__(EditedRegion)  # type: ignore[no-any-return]  # a subclass
            if is_dynamo_compiling():
                return traced_autocast(device_type, dtype, enabled, cache_enabled)  # type: ignore[no-any-return]
            if is_compiling():
                return TorchAutocast(device_type, dtype, enabled, cache_enabled)  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        casting: Casting | None = None,
        report: bool = False,
        emulate: bool = False,
    ) -> None:
        if casting is not None or report or emulate:
            raise UsageError(
                f"{type(self).__name__} is a subclass of autocast, and cannot edit. Write autocast(...)."
            )
        if device_type in _working and (dtype is None or dtype in CASTABLE):
            TorchAutocast.__init__(self, device_type, dtype, enabled, cache_enabled)
        else:
            self._prepare(device_type, dtype, enabled, cache_enabled)

    def __repr__(self) -> str:
        return f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self._enabled})"

    @untraced  # where the compiler gave up on the caller
    def __enter__(self) -> autocast:
        if is_compiling():
            return self._enter_traced()
        device, dtype, claim = self.device, get_autocast_dtype(self.device), thread.claim
        cached = is_autocast_cache_enabled()
        thread.frames.append(Frame(self, is_autocast_enabled(device), dtype, cached))
        autocast_increment_nesting()
        set_autocast_enabled(device, self._enabled)
        set_autocast_cache_enabled(self._cache_enabled and (claim.held or claim.take()))
        if dtype is not self.fast_dtype:
            set_autocast_dtype(device, self.fast_dtype)
            if claim.held:
                clear_autocast_cache()
        return self

    @untraced
    def __exit__(self, *error: object) -> Literal[False]:
        if thread.traced and thread.traced[-1][0] is self:
            thread.traced.pop()[1].__exit__(None, None, None)
            return False
        frames, device = thread.frames, self.device
        if frames and frames[-1].region is self:
            before = frames.pop()
            set_autocast_enabled(device, before.enabled)
            set_autocast_dtype(device, before.dtype)
            set_autocast_cache_enabled(before.cache)
            if before.change is not None:
                thread.follow_changes()
        else:
            before = self._leave_early(frames)
        autocast_decrement_nesting()
        claim = thread.claim
        if not frames:
            if claim.held:
                claim.release()
            if unneeded:
                remove_unneeded()
        elif claim.held and before.dtype is not self.fast_dtype:
            clear_autocast_cache()
        return False

    def __call__(self, function: F) -> F:
        """Return a function that runs in the region.

        Generators, coroutines and asynchronous generators are in it while they run, and outside while they
        wait.

        Raises:
            TypeError: for what cannot be called.
        """
        if not callable(function):
            super().__call__(function)  # raises what PyTorch raises, if it does
            raise TypeError(
                f"A {type(function).__name__} cannot be decorated. Write @autocast(...) above a function, or "
                "`with autocast(...):`."
            )
        return wrap(self, function)

    def report(self) -> CastReport:
        """Return what was cast in the region.

        Raises:
            UsageError: when the region does not count.
        """
        raise UsageError("This region was made without a report. Write autocast(..., report=True).")

    def context_fn(self) -> tuple[Any, Any]:
        """Return the contexts of a checkpointed function: none in forward, this region when it is recomputed.

        PyTorch's checkpoint restores a region by itself, except for what is edited:
        `checkpoint(function, x, use_reentrant=False, context_fn=region.context_fn)`.
        """
        from contextlib import nullcontext

        return nullcontext(), self

    def _prepare(
        self, device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
    ) -> None:
        """Do as PyTorch does, and have its warnings name the line that asked for the region."""
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            TorchAutocast.__init__(self, device_type, dtype, enabled, cache_enabled)
        for warning in heard:
            warnings.warn(warning.message, warning.category, stacklevel=level_of_caller("torch"))
        if self._enabled and not heard:
            _working.add(device_type)

    def _enter_traced(self) -> autocast:
        """Enter PyTorch's region, which `torch.export` writes down."""
        region = TorchAutocast(self.device, self.fast_dtype, self._enabled, self._cache_enabled)
        thread.traced.append((self, region))
        region.__enter__()  # type: ignore[no-untyped-call]
        return self

    def _leave_early(self, frames: list[Frame]) -> Frame:
        """Take out an entry that is not the innermost: those inside it will restore what it would have."""
        place = next((n for n in reversed(range(len(frames))) if frames[n].region is self), None)
        if place is None:
            raise UsageError(
                "This autocast region was not entered in this thread. Enter and leave it in one thread."
            )
        frame = frames.pop(place)
        inner = frames[place:]
        same_device = next((other for other in inner if other.region.device == self.device), None)
        if same_device:
            same_device.enabled, same_device.dtype = frame.enabled, frame.dtype
        else:
            set_autocast_enabled(self.device, frame.enabled)
            set_autocast_dtype(self.device, frame.dtype)
        inner[0].cache = frame.cache
        if frame.change is not None:
            thread.follow_changes()
        return frame
