"""Regions that change what operators do: another table, emulation, a report.

They put kernels in the dispatcher while they are open. The compiler leaves them alone, and compiled functions run
eagerly inside, because compiled code would not know of the edits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.amp.autocast_mode import _UnmanagedAutocast

from preamp.casting import DEFAULT, Casting
from preamp.errors import CastingError, UsageError
from preamp.torch.autocasting import installed, kernels, operators
from preamp.torch.autocasting.region import NOT_COMPILED, autocast
from preamp.torch.autocasting.stepwise import is_stepwise
from preamp.torch.autocasting.thread import Run, thread

if TYPE_CHECKING:
    from preamp.torch.autocasting.census import CastReport, Census

__all__ = ["EditedRegion"]

F = TypeVar("F", bound=Callable[..., Any])
EMULATED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


# PyTorch's compiler takes any autocast for its own and would drop the edits, unless it is "unmanaged".
class EditedRegion(autocast, _UnmanagedAutocast):
    """A region with a table, emulation or a report: what `autocast` returns when asked for one of them."""

    @torch.compiler.disable
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
        if casting is not None and not isinstance(casting, Casting):
            raise CastingError(
                f"casting={casting!r} is not a table. Write casting=casting.DEFAULT.float32('softmax') "
                "after `from preamp import casting`."
            )
        if emulate and dtype not in (None, *EMULATED):
            names = ", ".join(map(str, EMULATED))
            raise CastingError(f"dtype={dtype} cannot be emulated. Write one of {names}.")
        is_float8 = dtype in EMULATED[2:] and emulate
        super().__init__(device_type, torch.float16 if is_float8 else dtype, enabled, cache_enabled)
        self.fast_dtype = dtype if is_float8 and dtype else self.fast_dtype
        replaces = (casting is not None or emulate) and self._enabled
        self._rules = _rules(device_type, casting or DEFAULT, emulate) if replaces else None
        self._names = frozenset(name for _, name in map(str.split, self._rules or ()))
        self._census: Census | None = None
        if report:
            from preamp.torch.autocasting.census import Census

            self._census = Census(device_type)
            self._names |= frozenset(operators.listed(device_type))

    @torch.compiler.disable
    def __enter__(self) -> autocast:
        _compiled_code_waits()
        installed.hold(self.device, self._names)
        super().__enter__()
        thread.frames[-1].rules = before = thread.rules
        if self._rules is not None:
            others = {key: run for key, run in before.items() if not key.startswith(self.device + " ")}
            thread.rules = {**others, **self._rules}
        if self._census:
            thread.rules = self._census.watched(thread.rules)
            self._census.__enter__()
        return self

    @torch.compiler.disable
    def __exit__(self, *error: Any) -> bool:
        if self._census:
            self._census.__exit__(*error)
        super().__exit__(*error)
        _compiled_code_runs()
        installed.let_go(self.device, self._names)
        return False

    def __call__(self, function: F) -> F:
        inside = super().__call__(function)
        if is_stepwise(function):
            return inside
        eager = torch.compiler.disable(inside)

        @functools.wraps(function)  # for the compiler looks through `disable` when it is asked to compile the result
        def run(*args: Any, **kwargs: Any) -> Any:
            return eager(*args, **kwargs)

        return cast(F, run)

    def report(self) -> CastReport:
        return self._census.report() if self._census else super().report()


@cache
def _rules(device_type: str, table: Casting, emulate: bool) -> dict[str, Run]:
    """Return what each operator does that does not do what the framework does by itself."""
    listed, edits = operators.listed(device_type), operators.resolve(table)
    changed = {name: rule for name, rule in edits.items() if rule != listed.get(name, "untouched")}
    rules = {name: kernels.make(rule, name, device_type) for name, rule in changed.items()}
    if emulate:
        lower = (name for name, rule in {**listed, **edits}.items() if rule == "lower")
        rules |= {name: kernels.emulate(name, device_type) for name in lower}
    return {installed.rule_key(device_type, name): run for name, run in rules.items()}


_open_regions = 0
_stance: Any = None
_lock = threading.Lock()


def _compiled_code_waits() -> None:
    """Make compiled functions run eagerly while any edited region is open."""
    global _open_regions, _stance
    with _lock:
        if _stance is None:
            try:
                _stance = torch.compiler.set_stance("force_eager")
            except RuntimeError as error:
                raise UsageError(NOT_COMPILED) from error
        _open_regions += 1


def _compiled_code_runs() -> None:
    global _open_regions, _stance
    with _lock:
        _open_regions -= 1
        if _stance is not None and not _open_regions:
            _stance.__exit__(None, None, None)
            _stance = None
