"""Autocast regions: entering them, and restoring what was before when they are left.

Regions may be left in any order and in any number of threads. A region that edits nothing uses PyTorch's own
dispatcher and costs what PyTorch's region costs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

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

from preamp.arrays.torch_compat import UnmanagedAutocast, outside_of_graphs, traced_autocast, untraced
from preamp.autocasting.tables import Casting
from preamp.checks import level_of_caller
from preamp.errors import UsageError
from preamp.torch.autocasting import dispatcher, edits, operators
from preamp.torch.autocasting.generators import is_stepwise, wrap
from preamp.torch.autocasting.thread_state import Change, Edits, Frame, thread
from preamp.torch.scaling.unscaled import watch

if TYPE_CHECKING:
    from preamp.autocasting.report import CastReport
    from preamp.torch.autocasting.counting import CastCounter


F = TypeVar("F", bound=Callable[..., Any])
TorchAutocast = torch.autocast  # read once: users may replace torch.autocast by ours
CASTABLE = (torch.float16, torch.bfloat16)

_working = {"cpu"}  # device types for which PyTorch's constructor raised and warned of nothing


class autocast(TorchAutocast):  # PyTorch's name
    """A region, or a decorated function, in which each operator runs in its own precision.

    A drop-in for `torch.autocast`: the same arguments, lists of operators, warnings and errors, compiled by
    `torch.compile` in the same way. Beyond it:

    - `casting=` edits the table of operators for the region and the thread;
    - `report=True` counts what is cast, and `report()` returns the counts;
    - `emulate=True` emulates low precision in float32: listed operators round their inputs and results;
    - an instance can be entered twice, also by a recursive function, and regions can be left in any order, as
      coroutines do; a decorated generator or coroutine is in the region only while it runs;
    - a weight that an optimizer updates inside the region is cast again, regions of different precision do
      not share casts, and threads do not clear each other's.

    After the last region has been left, nothing of it remains in the process.

    It warns with `UnscaledFloat16`, once in a process, if float16 is used without a loss scaler and gradients
    underflow: after a few of the first regions, the gradients of an optimizer's next step are examined. Until
    that step, or the next region, a hook is among those of all optimizers.

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
        report: whether to count what is cast. It makes the region many times slower.
        emulate: whether to round instead of casting.

    Raises:
        ValueError: when `device_type` is not a string.
        RuntimeError: for a device type without autocast.
        CastingError: when a table names an operator that does not exist, with the nearest names, or a dtype
            cannot be emulated.
        UsageError: when a subclass is given `casting`, `report` or `emulate`.
    """

    _emulate = False

    def __new__(
        cls,
        device_type: str = "",  # pickle calls __new__ without arguments; __init__ requires it
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        casting: Casting | None = None,
        report: bool = False,
        emulate: bool = False,
    ) -> Self:
        """Choose the class: `EditedRegion` for edits, PyTorch's own while PyTorch traces."""
        if cls is autocast:
            if casting is not None or report or emulate:
                return object.__new__(EditedRegion)
            # The compiler and torch.export recognize PyTorch's own class and know how to write it down.
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
                f"{type(self).__name__} is a subclass of autocast and takes no casting, report or emulate. "
                "Write autocast(...)."
            )
        if device_type in _working and (dtype is None or dtype in CASTABLE):
            TorchAutocast.__init__(self, device_type, dtype, enabled, cache_enabled)
        else:
            self._prepare(device_type, dtype, enabled, cache_enabled)

    def __repr__(self) -> str:
        return f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self._enabled})"

    @untraced  # it is called where the compiler gave up on the caller
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
                thread.apply_changes()
        else:
            before = self._leave_early(frames)
        autocast_decrement_nesting()
        claim = thread.claim
        if not frames:
            if claim.held:
                claim.release()
            if dispatcher.unneeded:
                dispatcher.remove_unneeded()
            if watch.is_on and self.fast_dtype is torch.float16 and self._enabled and not self._emulate:
                watch.region_left()
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
            super().__call__(function)  # for PyTorch's error, where it raises one
            raise TypeError(
                f"A {type(function).__name__} cannot be decorated. Write @autocast(...) above a function, or "
                "`with autocast(...):`."
            )
        return wrap(self, function)

    def report(self) -> CastReport:
        """Return what was cast in the region.

        Raises:
            UsageError: when the region was made without `report=True`.
        """
        raise UsageError("This region was made without a report. Write autocast(..., report=True).")

    def context_fn(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Return the contexts of a checkpointed function: none in forward, this region when it is recomputed.

        PyTorch's checkpoint restores a region by itself, except for what is edited:
        `checkpoint(function, x, use_reentrant=False, context_fn=region.context_fn)`.
        """
        return nullcontext(), self

    def _prepare(
        self, device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
    ) -> None:
        """Call PyTorch's constructor, and let its warnings name the line that made the region."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            TorchAutocast.__init__(self, device_type, dtype, enabled, cache_enabled)
        for warning in caught:
            warnings.warn(warning.message, warning.category, stacklevel=level_of_caller("torch"))
        if self._enabled and not caught:
            _working.add(device_type)

    def _enter_traced(self) -> autocast:
        """Enter PyTorch's region, which `torch.export` records."""
        region = TorchAutocast(self.device, self.fast_dtype, self._enabled, self._cache_enabled)
        thread.traced.append((self, region))
        region.__enter__()  # type: ignore[no-untyped-call]
        return self

    def _leave_early(self, frames: list[Frame]) -> Frame:
        """Remove an entry that is not the innermost: those inside it will restore what it would have."""
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
            thread.apply_changes()
        return frame


# PyTorch's compiler takes any autocast for its own and would drop the edits, unless it is "unmanaged".
class EditedRegion(autocast, UnmanagedAutocast):  # type: ignore[misc]  # which has no type
    """A region with a table, emulation or a report: what `autocast` returns when asked for one of them.

    Its kernels are in the dispatcher while it is open. The compiler leaves it alone.
    """

    @outside_of_graphs
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
        edits.validate(casting, dtype, emulate)
        self._arguments = (device_type, dtype, enabled, cache_enabled, casting, report, emulate)
        # PyTorch has no regions of float8 and warns of them: float16 stands for it.
        self._float8 = dtype if emulate and dtype in edits.FLOAT8 else None
        super().__init__(device_type, torch.float16 if self._float8 else dtype, enabled, cache_enabled)
        self.device = device_type.partition(":")[0]
        if not operators.has_autocast(self.device):
            raise UsageError(
                f"casting=, report= and emulate= need an autocast of PyTorch's, and PyTorch "
                f"{torch.__version__} has none for {self.device!r}. Write autocast({device_type!r}) without "
                "them."
            )
        self._casting, self._emulate = casting, emulate
        self._counter: CastCounter | None = None
        if report:
            from preamp.torch.autocasting.counting import CastCounter  # imports the flop counter

            self._counter = CastCounter(self.device)

    @outside_of_graphs
    def __enter__(self) -> autocast:
        if is_compiling():
            raise UsageError(edits.NOT_COMPILED)
        if self._counter:
            self._counter.check_thread()
        change = self._change(thread.current_change(self.device))
        edits.suspend_compiled_code()
        dispatcher.hold(self.device, change.names)
        super().__enter__()
        thread.frames[-1].change = change
        thread.apply_changes()
        if self._counter:
            self._counter.__enter__()
        return self

    @outside_of_graphs
    def __exit__(self, *error: object) -> Literal[False]:
        frame = next((frame for frame in reversed(thread.frames) if frame.region is self), None)
        if frame and self._counter:
            self._counter.__exit__(*error)
        super().__exit__(*error)
        edits.resume_compiled_code()
        if frame and frame.change:
            dispatcher.let_go(self.device, frame.change.names)
        return False

    def __call__(self, function: F) -> F:
        inside = super().__call__(function)
        if is_stepwise(function):
            return inside
        eager = torch.compiler.disable(inside)  # type: ignore[no-untyped-call]

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:  # `disable` alone is undone by `torch.compile(result)`
            return eager(*args, **kwargs)

        return cast(F, run)

    def __repr__(self) -> str:
        names = ("dtype", "enabled", "cache_enabled", "casting", "report", "emulate")
        defaults = (None, True, None, None, False, False)
        given = zip(names, self._arguments[1:], defaults, strict=True)
        shown = [f"{name}={value!r}" for name, value, default in given if value is not default]
        return f"autocast({', '.join([repr(self.device), *shown])})"

    def __reduce__(self) -> tuple[Any, ...]:
        *positional, casting, report, emulate = self._arguments
        with_edits = functools.partial(autocast, casting=casting, report=report, emulate=emulate)
        return with_edits, tuple(positional)

    def report(self) -> CastReport:
        return self._counter.report() if self._counter else super().report()

    def _change(self, outer: Change | None) -> Change:
        """Return what an entry changes: this region's edits, and those of the edited region around it."""
        around = outer.edits if outer else Edits()
        merged = Edits(
            around.table if self._casting is None else self._casting,
            around.emulate or self._emulate,
            self._float8 or (None if self._emulate else around.dtype),
        )
        counters = outer.counters if outer else ()
        return edits.change(self.device, merged, (*counters, self._counter) if self._counter else counters)
