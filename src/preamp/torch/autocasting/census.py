"""What was cast, where, and what it cost: the counting behind `autocast(report=True)`.

Kernels before the listed operators tell what was asked for; a dispatch mode sees what then runs, casts among
it. Both slow a region down many times. Backward passes are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from preamp.casting import Rule
from preamp.casts import CastReport, CastRow, size, work
from preamp.torch.autocasting import installed, operators
from preamp.torch.autocasting.kernels import ELIGIBLE
from preamp.torch.autocasting.thread import Run

if TYPE_CHECKING:
    from preamp.torch.autocasting.edited import Edits

__all__ = ["Census"]

CASTS = (torch.ops.aten._to_copy.default,)
UNCOUNTED = frozenset(["new_empty", "new_empty_strided", "new_zeros", "_unsafe_view"])
OUTSIDE = "-"
COSTLIEST = 3
REPEATED = 2
STAYED = {
    "unlisted": "the table does not name it, and its inputs were float32",
    "float32": "the table says so",
    "untouched": "the table leaves it alone",
}


@dataclass
class _Call:
    """One call of an operator, while it runs and after."""

    operator: str
    rule: str
    inputs: list[Tensor]
    module: str
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


class Census(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs while it is entered.

    Args:
        device_type: whose operators are listed.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._rules: dict[str, Rule] = {}
        self._emulated = False
        self._float8: torch.dtype | None = None
        self._calls: list[_Call] = []
        self._sources: dict[tuple[int, torch.dtype], _Source] = {}
        self._current: _Call | None = None
        self._looking = False
        self._modules = _Modules()

    def __enter__(self) -> Census:
        self._modules.follow()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._modules.leave()

    def watched(self, rules: dict[str, Run], edits: Edits) -> dict[str, Run]:
        """Return what operators do, told to this census: those that are edited and those that are listed."""
        self._rules = {**operators.listed(self._device_type), **operators.resolve(edits.table)}
        self._emulated, self._float8 = edits.emulate, edits.dtype
        listed = {
            installed.rule_key(self._device_type, name): name for name in operators.listed(self._device_type)
        }
        unedited = {key: installed.before(self._device_type, name) for key, name in listed.items()}
        return {key: self._told(key.split()[1], run) for key, run in {**unedited, **rules}.items()}

    def report(self) -> CastReport:
        """Return the counts so far."""
        rows = sorted(_rows(self._calls), key=lambda row: (row.flops, row.bytes_moved), reverse=True)
        return CastReport(rows, [*_overflowed(rows), *self._repeated(), *_stayed(rows)])

    def _told(self, name: str, run: Run) -> Run:
        def told(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if self._current is not None or _in_backward():
                return run(keyset, *args, **kwargs)
            self._current = call = self._call(name, (args, kwargs))
            try:
                result = run(keyset, *args, **kwargs)
            finally:
                self._current = None
            self._looking = True
            self._finish(call, result)
            self._looking = False
            return result

        return told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._looking and not _in_backward():
            self._see(func, args, kwargs, result)
        return result

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func in CASTS and result.dtype in ELIGIBLE and args[0].dtype in ELIGIBLE:
            if result.dtype is not args[0].dtype:
                self._see_cast(args[0], result.dtype)
            return
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in UNCOUNTED or name.endswith("_like") or not _floats([args, kwargs]):
            return
        call = self._current or self._call(name, (args, kwargs), rule="unlisted")
        call.bytes_moved += sum(map(_bytes, _floats([args, kwargs, result])))
        if func.overloadpacket in flop_registry:
            call.flops += int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        if call is not self._current:
            self._finish(call, result)

    def _see_cast(self, source: Tensor, dtype: torch.dtype) -> None:
        call = self._current
        if call is None:
            call = self._call("to", [source], rule="unlisted")
            call.runs = _name(dtype)
            self._calls.append(call)
        elif self._emulated:
            return
        call.bytes_cast += _bytes(source)
        self._remember(source, dtype, call.module)

    def _remember(self, source: Tensor, dtype: torch.dtype, module: str) -> None:
        key = (id(source), dtype)
        known = self._sources.get(key)
        if known is None or known.tensor() is not source:
            what = (
                self._modules.names.get(id(source))
                or f"A {_name(source.dtype)} tensor of shape {tuple(source.shape)}"
            )
            known = _Source(weakref.ref(source), what, _why(source), _bytes(source), source._version)
            self._sources[key] = known
        if known.version != source._version:
            known.version, known.why = source._version, "it is written to in between"
        known.times += 1
        known.modules[module] = None

    def _call(self, name: str, values: Any, rule: str | None = None) -> _Call:
        rule = rule or str(self._rules.get(name, "unlisted"))
        return _Call(name.partition(".")[0], rule, _floats(values), self._modules.current)

    def _finish(self, call: _Call, result: Any) -> None:
        results = _floats(result)
        dtype = next((tensor.dtype for tensor in [*results, *call.inputs]), None)
        call.runs = _name(dtype) if dtype else "-"
        if self._emulated and call.rule == "lower":
            call.runs = _name(self._float8 or torch.get_autocast_dtype(self._device_type)) + " emulated"
        call.overflowed = not all(map(_finite, results)) and all(map(_finite, call.inputs))
        self._calls.append(call)

    def _repeated(self) -> Iterator[str]:
        repeated = [source for source in self._sources.values() if source.times >= REPEATED]
        for source in sorted(repeated, key=lambda source: source.bytes * source.times, reverse=True):
            times = f"{source.times} times ({size(source.bytes)} each)"
            yield f"{source.what} is cast {times}: {source.why}. In {', '.join(source.modules)}."


class _Modules:
    """Which module is running, by its path from the outermost one."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._running: list[str] = []
        self._handles: list[Any] = []

    @property
    def current(self) -> str:
        return self._running[-1] if self._running else OUTSIDE

    def follow(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._running.clear()

    def _begin(self, module: torch.nn.Module, _: Any) -> None:
        if not self._running:
            root = type(module).__name__
            named = [*module.named_modules(remove_duplicate=False), *module.named_parameters()]
            self.names |= {id(part): f"{root}.{path}" if path else root for path, part in named}
        self._running.append(self.names.get(id(module), type(module).__name__))

    def _end(self, *_: Any) -> None:
        self._running.pop()


def _rows(calls: Iterable[_Call]) -> Iterator[CastRow]:
    groups: dict[tuple[str, ...], list[_Call]] = {}
    for call in calls:
        inputs = ", ".join(dict.fromkeys(_name(tensor.dtype) for tensor in call.inputs)) or call.runs
        groups.setdefault((call.operator, call.module, call.rule, inputs, call.runs), []).append(call)
    for (operator, module, rule, inputs, runs), group in groups.items():
        yield CastRow(
            operator=operator,
            module=module,
            rule=rule,
            calls=len(group),
            inputs=inputs,
            runs=runs,
            bytes_cast=sum(call.bytes_cast for call in group),
            bytes_moved=sum(call.bytes_moved for call in group),
            flops=sum(call.flops for call in group),
            overflows=sum(call.overflowed for call in group),
        )


def _overflowed(rows: Iterable[CastRow]) -> Iterator[str]:
    for row in rows:
        if row.overflows:
            yield (
                f"{row.operator} {_place(row)} overflowed {row.runs} in {row.overflows:,} of {row.calls:,} "
                "calls: its inputs were finite, its results were not."
            )


def _stayed(rows: Iterable[CastRow]) -> Iterator[str]:
    stayed = [
        row for row in rows if row.runs == "float32" and row.operator != "to" and row.operator[-1] != "_"
    ]
    for row in stayed[:COSTLIEST]:
        cost = f"{work(row.flops)}, {size(row.bytes_moved)}" if row.flops else size(row.bytes_moved)
        why = STAYED.get(row.rule, "its inputs were float32")
        yield f"{row.operator} {_place(row)} stayed in float32 ({cost}): {why}."


def _place(row: CastRow) -> str:
    return "outside of modules" if row.module == OUTSIDE else f"in {row.module}"


def _why(source: Tensor) -> str:
    """Return why a cast of a tensor is not kept."""
    if not torch.is_autocast_cache_enabled():
        return "the cache is off"
    if not isinstance(source, torch.nn.Parameter) and not source.requires_grad:
        return "it is no weight; cast it once before it is used"
    if not source.requires_grad:
        return "it does not require gradients, and only casts of weights that do are kept"
    if not source.is_leaf or source._is_view():
        return "it is not a leaf, and only casts of leaves are kept"
    return "the cache was emptied in between"


def _floats(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().float().isfinite().all())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None
