"""The changes of a region with a table, emulation or a report to the kernels of operators.

Compiled functions run eagerly while such a region is open, because compiled code ignores the edits.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch

from preamp.autocasting.tables import DEFAULT, Casting
from preamp.errors import CastingError, UsageError
from preamp.torch.autocasting import dispatcher, kernels, operators
from preamp.torch.autocasting.thread_state import Change, Counter, Edits, Kernel

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NOT_COMPILED = (
    "An autocast region with casting=, report= or emulate= cannot be entered inside compiled code. "
    "Put @torch.compiler.disable on the function that enters it."
)


def validate(casting: object, dtype: torch.dtype | None, emulate: object) -> None:
    """Check the arguments of a region that edits.

    Raises:
        CastingError: for an argument of the wrong type, a table that names an operator that does not exist,
            or a dtype that cannot be emulated.
    """
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


def change(device_type: str, edits: Edits, counters: tuple[Counter, ...]) -> Change:
    """Return what operators do in a region."""
    rules, names = _rules(device_type, edits)
    for counter in dict.fromkeys(counters):  # a region that is entered twice counts once
        rules = counter.counted(rules, edits)
        names |= frozenset(operators.listed(device_type))
    return Change(rules, edits, names, counters)


@cache
def _rules(device_type: str, edits: Edits) -> tuple[dict[str, Kernel], frozenset[str]]:
    """Return the kernels of operators that do something other than what PyTorch does, and their names."""
    listed, edited = operators.listed(device_type), operators.resolve(edits.table)
    changed = {name: rule for name, rule in edited.items() if rule != listed.get(name)}
    rules = {name: kernels.make(rule, name, device_type) for name, rule in changed.items()}
    if edits.emulate:
        lower = (name for name, rule in {**listed, **edited}.items() if rule == "lower")
        rules |= {name: kernels.emulate(name, device_type, edits.dtype) for name in lower}
    keyed = {dispatcher.rule_key(device_type, name): run for name, run in rules.items()}
    return keyed, frozenset(rules)


_open_regions = 0
_stance: Any = None  # a context manager whose class PyTorch keeps private
_lock = threading.Lock()


def suspend_compiled_code() -> None:
    """Make compiled functions run eagerly until each call has been matched by `resume_compiled_code`."""
    global _open_regions, _stance
    with _lock:
        if _stance is None:
            try:
                _stance = torch.compiler.set_stance("force_eager")
            except RuntimeError as error:
                raise UsageError(NOT_COMPILED) from error
        _open_regions += 1


def resume_compiled_code() -> None:
    """Let compiled functions run compiled again, once no edited region is open."""
    global _open_regions, _stance
    with _lock:
        _open_regions -= 1
        if _stance is not None and not _open_regions:
            _stance.__exit__(None, None, None)
            _stance = None
