"""Regions that change what operators do: another table, emulation, a report.

They put kernels in the dispatcher while they are open. The compiler leaves them alone, and compiled functions
run eagerly inside, because compiled code would not know of the edits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import torch

from preamp.arrays.torch_compat import UnmanagedAutocast
from preamp.autocasting.tables import DEFAULT, Casting
from preamp.errors import CastingError, UsageError
from preamp.torch.autocasting import dispatcher, kernels, operators
from preamp.torch.autocasting.generators import is_stepwise
from preamp.torch.autocasting.region import NOT_COMPILED, autocast
from preamp.torch.autocasting.thread_state import Change, Kernel, thread

if TYPE_CHECKING:
    from preamp.autocasting.report import CastReport
    from preamp.torch.autocasting.counting import Census


F = TypeVar("F", bound=Callable[..., Any])
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Edits(NamedTuple):
    """What operators of a device type do, beyond what the framework does.

    Attributes:
        table: the rules that replace the framework's.
        emulate: whether operators of the rule "lower" round instead of being cast.
        dtype: what they round to; None for the low precision of the region they run in.
    """

    table: Casting = DEFAULT
    emulate: bool = False
    dtype: torch.dtype | None = None


# PyTorch's compiler takes any autocast for its own and would drop the edits, unless it is "unmanaged".
class EditedRegion(autocast, UnmanagedAutocast):  # type: ignore[misc]  # which has no type
    """A region with a table, emulation or a report: what `autocast` returns when asked for one of them."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        _check(casting, dtype, emulate)
        self._asked = (device_type, dtype, enabled, cache_enabled, casting, report, emulate)
        # PyTorch casts to float8 nowhere, and warns of it
        self._float8 = dtype if emulate and dtype in FLOAT8 else None
        super().__init__(device_type, torch.float16 if self._float8 else dtype, enabled, cache_enabled)
        self.device = device_type.partition(":")[0]
        if not operators.has_autocast(self.device):
            raise UsageError(
                f"casting=, report= and emulate= work where PyTorch {torch.__version__} casts, which it does "
                f"not for {self.device!r}. Write autocast({device_type!r}) without them."
            )
        self._casting, self._emulate = casting, emulate
        self._census: Census | None = None
        if report:
            from preamp.torch.autocasting.counting import Census

            self._census = Census(self.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __enter__(self) -> autocast:
        if torch.compiler.is_compiling():
            raise UsageError(NOT_COMPILED)
        if self._census:
            self._census.check_thread()
        change = self._change(thread.change_in_force(self.device))
        _compiled_code_waits()
        dispatcher.hold(self.device, change.names)
        super().__enter__()
        thread.frames[-1].change = change
        thread.follow_changes()
        if self._census:
            self._census.__enter__()
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __exit__(self, *error: Any) -> Literal[False]:
        frame = next((frame for frame in reversed(thread.frames) if frame.region is self), None)
        if frame and self._census:
            self._census.__exit__(*error)
        super().__exit__(*error)
        _compiled_code_runs()
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
        names = ("device_type", "dtype", "enabled", "cache_enabled", "casting", "report", "emulate")
        given = zip(names[1:], self._asked[1:], (None, True, None, None, False, False), strict=True)
        said = [f"{name}={value!r}" for name, value, default in given if value is not default]
        return f"autocast({', '.join([repr(self.device), *said])})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, self._asked

    def report(self) -> CastReport:
        return self._census.report() if self._census else super().report()

    def _change(self, around: Change | None) -> Change:
        """Return what an entry changes, in a region that changes something itself."""
        outer = around.edits if around else Edits()
        edits = Edits(
            outer.table if self._casting is None else self._casting,
            outer.emulate or self._emulate,
            self._float8 or (None if self._emulate else outer.dtype),
        )
        rules, names = _rules(self.device, edits)
        censuses = (*(around.censuses if around else ()), *([self._census] if self._census else ()))
        for census in dict.fromkeys(censuses):
            rules = census.watched(rules, edits)
            names |= frozenset(operators.listed(self.device))
        return Change(rules, edits, names, censuses)


def _again(*asked: Any) -> autocast:
    """Return a region like another, for copies and pickles."""
    *arguments, casting, report, emulate = asked
    return autocast(*arguments, casting=casting, report=report, emulate=emulate)


def _check(casting: Any, dtype: Any, emulate: Any) -> None:
    if not isinstance(emulate, bool):
        raise CastingError(
            f"emulate={emulate!r} is not True or False. Write dtype=torch.float16, emulate=True."
        )
    if casting is not None and not isinstance(casting, Casting):
        raise CastingError(
            f"casting={casting!r} is not a table. Write casting=casting.DEFAULT.float32('softmax') "
            "after `from preamp import casting`."
        )
    operators.resolve(casting or DEFAULT)
    emulated = (None, torch.float16, torch.bfloat16, *FLOAT8)
    if emulate and dtype not in emulated:
        names = ", ".join(map(str, emulated[1:]))
        raise CastingError(f"dtype={dtype!r} cannot be emulated. Write one of {names}.")


@cache
def _rules(device_type: str, edits: Edits) -> tuple[dict[str, Kernel], frozenset[str]]:
    """Return what each operator does that does not do what the framework does by itself, and their names."""
    listed, edited = operators.listed(device_type), operators.resolve(edits.table)
    changed = {name: rule for name, rule in edited.items() if rule != listed.get(name)}
    rules = {name: kernels.make(rule, name, device_type) for name, rule in changed.items()}
    if edits.emulate:
        lower = (name for name, rule in {**listed, **edited}.items() if rule == "lower")
        rules |= {name: kernels.emulate(name, device_type, edits.dtype) for name in lower}
    keyed = {dispatcher.rule_key(device_type, name): run for name, run in rules.items()}
    return keyed, frozenset(rules)


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
