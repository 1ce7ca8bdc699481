"""Count what is cast, where, and what it costs, for `autocast(report=True)`.

The region's mode records what was asked for, and a dispatch mode records what then runs, casts included. Both
make a region many times slower. Backward passes are not counted.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch_compat import (
    DispatchMode,
    OpOverload,
    is_compiled_now,
    is_in_backward,
    pop_mode,
    push_mode,
    tree_leaves,
)
from preamp.autocasting.report import REPEATED, CastReport, CastRow, Tally, place, repeated, stayed
from preamp.torch.autocasting import compiled
from preamp.torch.autocasting.modes import ELIGIBLE, MISFIT
from preamp.torch.autocasting.weight_cache import is_cached, summed_low
from preamp.torch.flops import flops_of
from preamp.torch.running_modules import RunningModules

aten = torch.ops.aten
CASTS = (aten._to_copy, aten.to)  # under inference_mode only the second is dispatched
UNCOUNTED = frozenset(["new_empty", "new_empty_strided", "new_zeros", "_unsafe_view"])
# Operators whose results can be infinite for other reasons than the range of the dtype.
INFINITE_BY_DEFINITION = frozenset(
    ["div", "log", "log10", "log1p", "log2", "logit", "reciprocal", "rsqrt", "atanh"]
)


class _Checking(threading.local):
    """Whether a counter of this thread is checking results for infinities, which no counter counts."""

    now = False


_checking = _Checking()


class _InGraph(threading.local):
    """Where the operator comes from that a compiled function runs in this thread; empty outside of graphs."""

    module = source = ""


_in_graph = _InGraph()


@dataclass
class _Call:
    """One call of an operator, during and after it."""

    operator: str
    rule: str
    module: str
    tensors: list[Tensor]
    inputs: str
    source: str
    rehearsed: bool = False
    runs: str = ""
    bytes_cast: int = 0
    bytes_moved: int = 0
    flops: int = 0
    overflowed: bool = False


@dataclass
class _Source:
    """A tensor that was cast, and how often."""

    tensor: weakref.ref[Tensor]
    what: str
    why: str
    bytes: int
    version: int
    times: int = 0
    modules: dict[str, None] = field(default_factory=dict)


class CastCounter(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run while it is entered, in the thread that entered it.

    Attributes:
        entries: the regions that are open in that thread, outermost first, each with what was before it.
    """

    entries: Sequence[tuple[torch.autocast, bool, torch.dtype, bool]] = ()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return that the compiler may go on: this mode changes nothing."""
        return True

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._tallies: dict[tuple[str, ...], Tally] = {}
        self._repeats: dict[str, _Source] = {}
        self._sources: dict[tuple[int, torch.dtype], _Source] = {}
        # The casts that PyTorch caches, by the address of their numbers; how often each weight was used since
        # the last backward pass, by name; and the most uses between two.
        self._cached: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._uses: Counter[str] = Counter()
        self._most_uses: Counter[str] = Counter()
        self._low: torch.dtype | None = None
        self._current: _Call | None = None
        self._modules = RunningModules()

    def __enter__(self) -> CastCounter:
        if self._modules.follow():
            self._keep_repeats()
            self._sources.clear()
            push_mode(self)  # once: a region that is entered twice counts once
        compiled.replace_backend(partial(compiled.counted_backend, _at))
        return self

    def __exit__(self, *error: object) -> None:
        compiled.restore_backend()
        if self._modules.leave():
            self._keep_uses()
            self._cached.clear()
            pop_mode()

    def check_thread(self) -> None:
        """Refuse to count while another thread is being counted."""
        self._modules.check_thread()

    def report(self) -> CastReport:
        """Return the counts so far."""
        rows = [
            CastRow(*names, **vars(tally), source=source)  # type: ignore[misc, arg-type]
            for (*names, source), tally in self._tallies.items()
        ]
        rows.sort(key=lambda row: (row.flops, row.bytes_moved), reverse=True)
        self._keep_uses()
        shared = summed_low(self._most_uses, self._low, "one region") if self._low else ()
        return CastReport(rows, [*_noted(rows), *shared, *self._repeated(), *stayed(rows)])

    def count(
        self,
        name: str,
        rule: str,
        rehearsed: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """Return what the call of an operator returns, and count it.

        Only the outermost operator is counted: what it calls is part of it.
        """
        if self._current is not None or _in_graph.module or is_in_backward():
            return run()
        self._current = call = self._call(name, rule, (args, kwargs))
        call.rehearsed = rehearsed
        try:
            result = run()
        finally:
            self._current = None
        self._finish(call, (args, kwargs), result)
        return result

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_in_backward():
            self._keep_uses()
        elif not _checking.now and not is_compiled_now():
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func.overloadpacket in CASTS and {args[0].dtype, result.dtype} <= ELIGIBLE:
            if result.dtype is not args[0].dtype:
                self._record_cast(args[0], result)
                # Regions with edits cast without gradients, and give each use a gradient of its own.
                if torch.is_grad_enabled() and is_cached(args[0]) and not _in_graph.module:
                    self._low, what = result.dtype, self._what(args[0])
                    self._cached[result.untyped_storage().data_ptr()] = weakref.ref(result), what
            return
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in UNCOUNTED or name.endswith("_like") or not _floats([args, kwargs]):
            return
        if self._cached and torch.is_grad_enabled():
            self._record_uses(_floats([args, kwargs]))
        call = self._current or self._call(name, self._unlisted(), (args, kwargs))
        call.bytes_moved += sum(map(_bytes, _floats([args, kwargs, result])))
        call.flops += flops_of(func, args, kwargs, result)
        if call is not self._current:
            self._finish(call, (args, kwargs), result)

    def _record_cast(self, source: Tensor, result: Tensor) -> None:
        call = self._current
        if call is None:
            call = self._call("to", self._unlisted(), [source])
            call.bytes_cast = _bytes(source)
            self._finish(call, [source], result)
        elif call.rehearsed and (result.dtype is torch.float32 or all(source is not t for t in call.tensors)):
            return  # not the region's, but one to compute in float32
        else:
            call.bytes_cast += _bytes(source)
        self._record_source(source, result.dtype, call.module)

    def _record_source(self, source: Tensor, dtype: torch.dtype, module: str) -> None:
        key, version = (id(source), dtype), _version(source)
        known = self._sources.get(key)
        if known is None or known.tensor() is not source:
            known = _Source(weakref.ref(source), self._what(source), _why(source), _bytes(source), version)
            self._sources[key] = known
        if known.version != version:
            known.version, known.why = version, "it is written to in between"
        known.times += 1
        known.modules[module] = None

    def _record_uses(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dtype is self._low and tensor.layout is torch.strided:
                cast, what = self._cached.get(tensor.untyped_storage().data_ptr(), (None, ""))
                if cast is not None and cast() is not None:
                    self._uses[what] += 1

    def _keep_uses(self) -> None:
        """Keep the largest number of uses of each weight, where a backward pass begins or the region ends."""
        self._most_uses |= self._uses
        self._uses.clear()

    def _what(self, source: Tensor) -> str:
        """Return the path of a parameter, or the shape of another tensor."""
        nameless = f"A {_name(source.dtype)} tensor of shape {tuple(source.shape)}"
        return self._modules.names.get(id(source), nameless)

    def _unlisted(self) -> str:
        """Return the rule of an operator that no table names, or of one in a graph, where casts are apart."""
        if _in_graph.module:
            return "compiled"
        regions = (region for region, *_ in reversed(self.entries))
        innermost = next((region for region in regions if region.device == self._device_type), None)
        return "unlisted" if innermost is None or innermost._enabled else "off"

    def _call(self, operator: str, rule: str, values: object) -> _Call:
        tensors = _floats(values)
        inputs = ", ".join(dict.fromkeys(_name(tensor.dtype) for tensor in tensors))
        module = _in_graph.module or self._modules.current
        return _Call(operator, rule, module, tensors, inputs, _in_graph.source)

    def _finish(self, call: _Call, values: object, result: object) -> None:
        results = _floats(result)
        numbers = [tensor for tensor in _tensors(result) if tensor.is_complex()]
        dtype = next(
            (tensor.dtype for tensor in [*results, *numbers, *call.tensors, *_tensors(result)]), None
        )
        call.runs = _name(dtype) if dtype else "-"
        call.inputs = call.inputs or call.runs
        call.overflowed = _overflows(call, values, results)
        names = (call.operator, call.module, call.rule, call.inputs, call.runs, call.source)
        self._tallies.setdefault(names, Tally()).add(
            calls=1,
            bytes_cast=call.bytes_cast,
            bytes_moved=call.bytes_moved,
            flops=call.flops,
            overflows=call.overflowed,
        )

    def _keep_repeats(self) -> None:
        """Keep the largest number of casts of each tensor between entering the region and leaving it."""
        for source in self._sources.values():
            if source.times >= REPEATED:
                known = self._repeats.setdefault(source.what + source.why, source)
                known.times = max(known.times, source.times)

    def _repeated(self) -> Iterator[str]:
        """Yield a sentence for each tensor that was cast more than once in one entry, costliest first."""
        self._keep_repeats()
        for source in sorted(self._repeats.values(), key=lambda one: one.bytes * one.times, reverse=True):
            times, places = f"{source.times} times", map(place, source.modules)
            yield repeated(source.what, times, source.bytes, places, source.why)


def _at(module: str, source: str) -> None:
    _in_graph.module, _in_graph.source = module, source


def _noted(rows: Iterable[CastRow]) -> Iterator[str]:
    for row in rows:
        if row.overflows:
            yield (
                f"{row.operator} {row.place} overflowed {row.runs} in {row.overflows:,} of "
                f"{row.calls:,} calls: its inputs were finite, its results were not."
            )
        if row.rule.startswith(MISFIT):
            yield (
                f"{row.operator} {row.place} stays in {row.runs}: a size of its weight, or its number of "
                f"rows, is {row.rule}, or it computes in float64."
            )
        if row.rule == "without kernel" and row.inputs != "float32":
            yield (
                f"{row.operator} {row.place} ran in float32, and its results were rounded: this device has "
                f"no kernel for {row.inputs}, and a GPU has one."
            )


def _why(source: Tensor) -> str:
    """Return why a cast of a tensor is not cached."""
    if torch.is_inference_mode_enabled():
        return "inference mode keeps no casts"
    if not torch.is_autocast_cache_enabled():
        return "the cache is off"
    if not isinstance(source, torch.nn.Parameter) and not source.requires_grad:
        return "it is not a weight; cast it once before it is used"
    if not source.requires_grad:
        return "it does not require gradients, and only casts of weights that do are kept"
    if not source.is_leaf or source._is_view():
        return "it is not a leaf, and only casts of leaves are kept"
    if _in_graph.module:
        return "compiled code keeps no casts"
    return "the cache was emptied in between"


def _overflows(call: _Call, values: object, results: list[Tensor]) -> bool:
    """Return whether results are infinite because they exceed the range of their dtype."""
    given = [leaf for leaf in tree_leaves(values) if isinstance(leaf, float)]
    if call.operator in INFINITE_BY_DEFINITION or not all(map(math.isfinite, given)):
        return False
    _checking.now = True
    try:
        return not all(map(_finite, results)) and all(map(_finite, call.tensors))
    except (NotImplementedError, RuntimeError):  # sparse and fake tensors, and those of torch.func
        return False
    finally:
        _checking.now = False


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().float().isfinite().all())


def _floats(values: object) -> list[Tensor]:
    return [tensor for tensor in _tensors(values) if tensor.is_floating_point()]


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
