"""Autocast regions: entering them, and restoring what was before when they are left.

Regions may be left in any order and in any number of threads. A region that edits nothing uses PyTorch's own
dispatcher and costs what PyTorch's region costs.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, cast

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

from preamp.arrays import torch_compat as compat
from preamp.arrays.torch_compat import UnmanagedAutocast, outside_of_graphs, traced_autocast, untraced
from preamp.autocasting.tables import DEFAULT, Casting
from preamp.checks import level_of_caller
from preamp.errors import UsageError
from preamp.recipes import Recipe
from preamp.torch.autocasting import modes, modules, operators, rules
from preamp.torch.autocasting.generators import is_stepwise, wrap
from preamp.torch.autocasting.modes import EditMode
from preamp.torch.autocasting.unscaled import watch
from preamp.torch.autocasting.weight_cache import Claim

if TYPE_CHECKING:
    from preamp.autocasting.report import CastReport
    from preamp.torch.autocasting.counting import CastCounter


F = TypeVar("F", bound=Callable[..., Any])
TorchAutocast = torch.autocast  # read once: users may replace torch.autocast by ours
CASTABLE = (torch.float16, torch.bfloat16)
EDITS = ("casting", "model", "report", "emulate", "recipe")  # arguments that PyTorch's own has not

# Device types and dtypes for which PyTorch's constructor raises and warns of nothing.
_working: set[tuple[str, torch.dtype]] = {("cpu", dtype) for dtype in CASTABLE}

# An entry into a region, and what was before: whether autocast was on for the region's device type, in which
# precision, and whether casts of weights were cached. A plain tuple is the fastest.
Entry: TypeAlias = "tuple[torch.autocast, bool, torch.dtype, bool]"


class _Thread:
    """The state of one thread.

    Attributes:
        entries: entries into regions that have not been left yet, outermost first.
        edited: the same for regions with edits.
        claim: whether this thread may use PyTorch's weight cache.
        traced: pairs of a region and what stands for it while a program is traced.
        in_backward: the compiler's setting for backward passes, while `_trace_backward_without_autocast` has
            replaced it.
    """

    __slots__ = ("claim", "edited", "entries", "in_backward", "traced")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.edited: list[_Edited] = []
        self.claim = Claim()
        self.traced: list[tuple[torch.autocast, AbstractContextManager[object]]] = []
        self.in_backward: Any = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


# An attribute of a `threading.local` takes three times as long to read as a slot: one is read, `thread`.
_local = _Local()


def _trace_backward_without_autocast() -> None:
    """Have the compiler trace backward passes with autocast off, for a region with edits or one in a graph.

    It would trace them in the region that is open around the compiled function, without the edits, and cast
    what a region inside had left alone. Before 2.13 the setting is of the whole process: whoever finds it off
    does not restore it.
    """
    thread = _local.thread
    if thread.entries and thread.in_backward is None:
        before = compat.autocast_in_backward()
        if before not in (None, "off"):
            thread.in_backward = before
            compat.set_autocast_in_backward("off")


def _trace_backward_as_before(thread: _Thread) -> None:
    compat.set_autocast_in_backward(thread.in_backward)
    thread.in_backward = None


compat.mark_constant(_trace_backward_without_autocast)  # so it runs while the compiler traces a region


class autocast(TorchAutocast):  # PyTorch's name
    """A region, or a decorated function, in which each operator runs in its own precision.

    A drop-in for `torch.autocast`: the same arguments, lists of operators, warnings and errors, compiled by
    `torch.compile` in the same way. Beyond it:

    - `casting=` edits the table of operators for the region and the thread;
    - `report=True` counts what is cast, and `report()` returns the counts;
    - `emulate=True` rehearses a GPU: the table is CUDA's, every result has the dtype that it has there, and
      products compute in float32 of operands in low precision, as tensor cores do;
    - `recipe=`, such as `preamp.recipes.MXFP8`, rehearses FP8, MXFP8 or NVFP4: the three products of linear
      layers have quantized operands, and everything else runs in the recipe's high precision. A recipe with
      delayed scaling keeps its scales with the modules of `model=`;
    - an instance can be entered twice, also by a recursive function, and regions can be left in any order, as
      coroutines do; a decorated generator or coroutine is in the region only while it runs;
    - a weight that an optimizer updates inside the region is cast again, regions of different precision do
      not share casts, and threads do not clear each other's.

    After the last region has been left, nothing of it remains in the process, except that `torch.compile`
    keeps passing calls of the functions that were edited to function modes, as eager code does.

    A region can be copied and pickled. The copy is a region that has not been entered, with a report of its
    own that starts empty. `copy.copy` keeps the model of the original. `copy.deepcopy` and `pickle` copy the
    model as well, as they do for an optimizer: copy both together.

    It warns with `UnscaledFloat16`, once per process, if float16 is used, rehearsed or not, without a loss
    scaler, and gradients underflow: after a few of the first regions, the gradients of an optimizer's next
    step are examined. Until that step a global optimizer hook is registered.

    >>> import torch
    >>> from preamp import casting
    >>> x = torch.ones(2, 2)
    >>> with autocast("cpu", dtype=torch.bfloat16, casting=casting.DEFAULT.float32("mm")):
    ...     torch.mm(x, x).dtype, (x @ x).dtype
    (torch.float32, torch.bfloat16)

    Args:
        device_type: "cpu", "cuda", ...: whose tensors are cast.
        dtype: the low precision; None takes the surrounding region's, else the default of the device type,
            bfloat16 on CPUs and float16 on CUDA.
        enabled: False switches autocast off inside.
        cache_enabled: whether the cast of a weight is kept until the outermost region ends; None takes the
            surrounding region's choice, else True.
        casting: an edited table of operators. None takes the surrounding region's, else the framework's;
            `casting.DEFAULT` goes back to the framework's.
        model: whose modules the table has rules for. Their paths are those of `model.named_modules()`.
        report: whether to count what is cast. It makes the region many times slower.
        emulate: whether to rehearse a GPU. What has a kernel for low precision there, and none here or one
            that rounds inside, runs in float32, and its results are rounded.

    Raises:
        ValueError: when `device_type` is not a string.
        RuntimeError: for a device type without autocast.
        CastingError: when a table names an operator or a module that does not exist, with the nearest names,
            and for a float8 dtype.
        UsageError: when a table with rules for modules is given without a model, and when a subclass is given
            `casting`, `report` or `emulate`.
    """

    device: str
    fast_dtype: torch.dtype

    def __new__(
        cls,
        device_type: str = "",  # pickle calls __new__ without arguments; __init__ requires it
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        casting: Casting | None = None,
        model: torch.nn.Module | None = None,
        report: bool = False,
        emulate: bool = False,
        recipe: Recipe | None = None,
    ) -> Self:
        """Choose the class: `EditedRegion` for edits, PyTorch's own while PyTorch traces."""
        if is_compiling() and compat.in_trace() and cls is autocast:
            given = device_type, dtype, enabled, cache_enabled
            if casting is None and not report and not emulate and recipe is None:
                if is_dynamo_compiling():
                    _trace_backward_without_autocast()
                # The compiler and torch.export recognize PyTorch's own class and know how to write it down.
                return (traced_autocast if is_dynamo_compiling() else TorchAutocast)(*given)  # type: ignore[return-value]
            if is_dynamo_compiling():
                return _in_graph(*given, casting, model, report, emulate, recipe)  # type: ignore[return-value]
        if cls is autocast and (casting is not None or report or emulate or recipe is not None):
            return object.__new__(EditedRegion)
        return object.__new__(cls)

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        casting: Casting | None = None,
        model: torch.nn.Module | None = None,
        report: bool = False,
        emulate: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        if casting is not None or report or emulate or recipe is not None:
            raise UsageError(
                f"{type(self).__name__} is a subclass of autocast and takes no casting, report, emulate or "
                "recipe. Write autocast(...)."
            )
        low = get_autocast_dtype(device_type) if dtype is None and type(device_type) is str else dtype
        if low is not None and (device_type, low) in _working:
            # What PyTorch's constructor does, without its checks, which take longer than all the rest.
            self.device, self.fast_dtype, self._enabled = device_type, low, enabled
            self._cache_enabled = is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        else:
            self._prepare(device_type, dtype, enabled, cache_enabled)

    def __repr__(self) -> str:
        return f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self._enabled})"

    @untraced  # it is called where the compiler gave up on the caller
    def __enter__(self) -> autocast:
        if is_compiling() and compat.in_trace():
            return self._enter_traced()
        device, low, thread = self.device, self.fast_dtype, _local.thread
        before, cached, claim = get_autocast_dtype(device), is_autocast_cache_enabled(), thread.claim
        thread.entries.append((self, is_autocast_enabled(device), before, cached))
        autocast_increment_nesting()
        set_autocast_enabled(device, self._enabled)
        set_autocast_cache_enabled(self._cache_enabled and (claim.held or claim.take()))
        if before is not low:
            set_autocast_dtype(device, low)
            if claim.held:
                clear_autocast_cache()
        return self

    @untraced
    def __exit__(self, *error: object) -> Literal[False]:
        thread = _local.thread
        if thread.traced and thread.traced[-1][0] is self:
            thread.traced.pop()[1].__exit__(None, None, None)
            return False
        entries, device, claim = thread.entries, self.device, thread.claim
        if entries and entries[-1][0] is self:
            _, enabled, before, cached = entries.pop()
            set_autocast_enabled(device, enabled)
            if before is not self.fast_dtype:
                set_autocast_dtype(device, before)
            set_autocast_cache_enabled(cached)
        else:
            before = self._leave_early(entries)
        autocast_decrement_nesting()
        if not entries:
            if thread.in_backward is not None:
                _trace_backward_as_before(thread)
            if claim.held:
                claim.release()
        elif claim.held and before is not self.fast_dtype:
            clear_autocast_cache()
        if self.fast_dtype is torch.float16 and watch.is_on and self._enabled:
            watch.region_left()
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
        return wrap(self, function, _trace_backward_without_autocast)

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
            _working.add((device_type, self.fast_dtype))

    def _enter_traced(self) -> autocast:
        """Enter what stands for this region in a trace: PyTorch's own, or for edits `_in_graph`."""
        region = self._region_in_trace()
        _local.thread.traced.append((self, region))
        region.__enter__()
        return self

    def _region_in_trace(self) -> AbstractContextManager[object]:
        return TorchAutocast(self.device, self.fast_dtype, self._enabled, self._cache_enabled)

    def _leave_early(self, entries: list[Entry]) -> torch.dtype:
        """Remove an entry that is not the innermost: those inside it will restore what it would have."""
        place = next((n for n in reversed(range(len(entries))) if entries[n][0] is self), None)
        if place is None:
            raise UsageError(
                "This autocast region was not entered in this thread. Enter and leave it in one thread."
            )
        _, enabled, dtype, cached = entries.pop(place)
        inner = range(place, len(entries))
        same_device = next((n for n in inner if entries[n][0].device == self.device), None)
        if same_device is None:
            set_autocast_enabled(self.device, enabled)
            set_autocast_dtype(self.device, dtype)
        else:
            region, *_, its_cached = entries[same_device]
            entries[same_device] = region, enabled, dtype, its_cached
        entries[place] = *entries[place][:3], cached
        return dtype


class _Edited:
    """An entry into a region with edits.

    Attributes:
        region: what was entered.
        mode: what it has put in force.
        outer: the mode of the region around it, and the key of the edits that held there.
        followed: what has the mode follow the modules of a model.
    """

    def __init__(self, region: EditedRegion, mode: EditMode, outer: EditMode | None) -> None:
        self.region, self.mode = region, mode
        self.outer = (outer, outer.key) if outer else None
        self.followed: AbstractContextManager[object] | None = None


# PyTorch's compiler takes any autocast for its own and would drop the edits, unless it is "unmanaged".
class EditedRegion(autocast, UnmanagedAutocast):  # type: ignore[misc]  # which has no type
    """A region with a table or a report, or a rehearsal: what `autocast` returns when asked for one of them.

    A mode is in force while it is open. In compiled code `_in_graph` takes its place.
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
        model: torch.nn.Module | None = None,
        report: bool = False,
        emulate: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        rules.validate(casting, dtype, emulate, recipe)
        self._arguments = device_type, dtype, enabled, cache_enabled, casting, model, report, emulate, recipe
        known = _model_of(casting, model, recipe)
        self._owner = "" if known is None else str(id(known))
        self._model: torch.nn.Module | None = known
        # A model that is being copied together with a region it holds has no modules yet.
        self._modules = self._find() if known is not None and "_modules" in vars(known) else None
        if recipe is not None:
            dtype = modes.DTYPES[recipe.high]
        super().__init__(device_type, dtype, enabled, cache_enabled)
        self.device = device_type.partition(":")[0]
        if not operators.has_autocast(self.device):
            raise UsageError(
                f"casting=, report= and emulate= need an autocast of PyTorch's, and PyTorch "
                f"{torch.__version__} has none for {self.device!r}. Write autocast({device_type!r}) without "
                "them."
            )
        self._casting, self._emulate, self._recipe = casting, emulate, recipe.key if recipe else ""
        self._counter: CastCounter | None = None
        self._keys: dict[tuple[str, bool], str] = {}
        if report:
            from preamp.torch.autocasting.counting import CastCounter  # imports the flop counter

            self._counter = CastCounter(self.device)

    @outside_of_graphs
    def __enter__(self) -> autocast:
        if compat.in_trace():
            return self._enter_traced()
        if self._counter:
            self._counter.check_thread()
        if self._owner and self._modules is None:
            self._modules = self._find()
        outer = modes.current(self.device)
        mode = self._mode(outer)
        delayed = self._arguments[-1] is not None and self._arguments[-1].delayed
        mode.module = self._model if delayed else outer.module if outer is not None else None
        super().__enter__()
        entry = _Edited(self, mode, outer)
        _local.thread.edited.append(entry)
        _trace_backward_without_autocast()
        if outer:
            outer.become(modes.NONE)
        compat.push_function_mode(mode)
        if self._modules:
            entry.followed = modules.followed(self._modules, self.device, self._owner)
            entry.followed.__enter__()
        if self._counter:
            self._counter.entries = _local.thread.entries
            self._counter.__enter__()
        return self

    @outside_of_graphs
    def __exit__(self, *error: object) -> Literal[False]:
        entry = next((entry for entry in reversed(_local.thread.edited) if entry.region is self), None)
        if entry:
            _local.thread.edited.remove(entry)
            if not _local.thread.edited and _local.thread.in_backward is not None:
                _trace_backward_as_before(_local.thread)
            if self._counter:
                self._counter.__exit__(*error)
            if entry.followed:
                entry.followed.__exit__(None, None, None)
            modes.remove(entry.mode)
            inside = (other for other in _local.thread.edited if other.outer and other.outer[0] is entry.mode)
            if inner := next(inside, None):
                inner.outer = entry.outer
            elif entry.outer:
                outer, key = entry.outer
                outer.become(key)
        return super().__exit__(*error)

    def __call__(self, function: F) -> F:
        inside = super().__call__(function)
        if is_stepwise(function):
            return inside
        arguments = self._arguments

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                with _in_graph(*arguments):
                    return function(*args, **kwargs)
            return inside(*args, **kwargs)

        return cast(F, run)

    def context_fn(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        mode = modes.current(self.device)
        return nullcontext(), self._entered_in(mode.key) if mode else self

    @contextmanager
    def _entered_in(self, key: str) -> Iterator[None]:
        """Enter the region with the edits that hold in a module."""
        with self, modes.in_force(self.device, key):
            yield

    def __repr__(self) -> str:
        names = ("dtype", "enabled", "cache_enabled", *EDITS)
        defaults = (None, True, None, None, None, False, False, None)
        given = zip(names, self._arguments[1:], defaults, strict=True)
        shown = [
            f"{name}={type(value).__name__ if name == 'model' else repr(value)}"
            for name, value, default in given
            if value is not default
        ]
        return f"autocast({', '.join([repr(self.device), *shown])})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, self._arguments

    def report(self) -> CastReport:
        return self._counter.report() if self._counter else super().report()

    def _find(self) -> list[tuple[torch.nn.Module, str]]:
        """Return the modules that the table has rules for, each with its path."""
        *_, table, _, _, _, recipe = self._arguments
        assert self._model is not None
        return modules.find(self._model, table or DEFAULT, recipe is not None and recipe.delayed)

    def _mode(self, outer: EditMode | None) -> EditMode:
        """Return a mode with this region's edits and those of the edited region around it."""
        around, counters = (outer.key, outer.counters) if outer else (modes.NONE, ())
        if self._counter and self._counter not in counters:  # a region that is entered twice counts once
            counters = (*counters, self._counter)
        if (around, bool(counters)) not in self._keys:
            table = (self._casting.edits, self._casting.optional) if self._casting else None
            self._keys[around, bool(counters)] = modes.key_inside(
                around, self.device, table, None, self._emulate, self._recipe, bool(counters), self._owner
            )
        return modes.mode_of(self.device, self._keys[around, bool(counters)], counters)

    def _region_in_trace(self) -> AbstractContextManager[object]:
        return _in_graph(*self._arguments)


def _again(*arguments: Any) -> autocast:
    """Make a region for `copy` and `pickle`, which copy the model as an argument."""
    return autocast(*arguments[:4], **dict(zip(EDITS, arguments[4:], strict=True)))


@contextmanager
def _in_graph(*arguments: Any) -> Iterator[None]:
    """Enter a region with edits in code that is traced."""
    device_type, dtype, enabled, _, casting, model, report, emulate, recipe = arguments
    if report:
        _refuse_report()
    if is_dynamo_compiling():
        modes.check_export()
        _trace_backward_without_autocast()
    if recipe is not None:
        dtype = modes.DTYPES[recipe.high]
    device = device_type.partition(":")[0]
    outer = modes.current(device)
    around = modes.NONE if outer is None else outer.key
    table = None if casting is None else (casting.edits, casting.optional)
    model = _model_of(casting, model, recipe)
    owner = "" if model is None else str(id(model))
    key = modes.key_inside(around, device, table, dtype, emulate, recipe.key if recipe else "", False, owner)
    # Without the cache, so that the gradients of a weight add up in float32: most backends have none anyway.
    with TorchAutocast(device_type, dtype, enabled, False), modes.in_force(device, key):
        if model is None:
            yield
        else:
            mode = modes.current(device)
            assert mode is not None
            if recipe is not None and recipe.delayed:
                mode.module = model
            with modules.followed_in_graph(model, device, key, owner, recipe is not None and recipe.delayed):
                yield


def _model_of(
    casting: Casting | None, model: torch.nn.Module | None, recipe: Recipe | None
) -> torch.nn.Module | None:
    """Return the model whose modules a table has rules for, or keep a recipe's scales, if any do."""
    if (casting is None or not casting.modules) and (recipe is None or not recipe.delayed):
        return None
    if recipe is not None and recipe.delayed and not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"The recipe takes its scales from earlier steps, and model={model!r} does not keep them. Write "
            "autocast(..., recipe=recipe, model=model)."
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"The table has rules for modules, and model={model!r} is not a module. Write "
            "autocast(..., casting=table, model=model) with the module whose paths they are about."
        )
    return model


@outside_of_graphs
def _refuse_report() -> None:
    raise UsageError(
        "A region with a report cannot be entered in compiled code. Enter it around the compiled function."
    )
