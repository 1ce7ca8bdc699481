"""Which kernels stand in the dispatcher before the framework's own, and for how long.

A kernel is there for the whole process while any thread is in a region that edits its operator. It asks its
own thread what to do: without an edit it calls what was there before. When the last such region is left, it
is gone, except that

- a region that is entered again and again keeps its kernels until it is deleted, because registering takes
  4 us for each;
- while other threads run, kernels stay, because one of them may be about to call one: they go when a region
  is entered or left and there is one thread only.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch

from preamp.torch.autocasting import operators
from preamp.torch.autocasting.thread import Kernel, thread

__all__ = ["before", "hold", "let_go", "rule_key"]


class _Holding:
    """A set of kernels in the dispatcher, and how many regions need it."""

    def __init__(self, library: Any) -> None:
        self.library, self.regions = library, 0


_lock = threading.RLock()  # a region that is collected lets go in the middle of anything
_held: dict[tuple[str, frozenset[str]], _Holding] = {}


def rule_key(device_type: str, name: str) -> str:
    """Return under which name a thread keeps what an operator does."""
    return f"{device_type} {name}"


def hold(device_type: str, names: frozenset[str]) -> None:
    """Put kernels for some operators in the dispatcher, unless they are there."""
    if not names:
        return
    key = device_type, names
    with _lock:
        holding = _held.get(key) or _Holding(_register(device_type, names))
        holding.regions += 1  # before anyone can find it and sweep it away
        _held[key] = holding
        _sweep()


def let_go(device_type: str, names: frozenset[str]) -> None:
    """Say that a region does not need its kernels any more."""
    if not names:
        return
    with _lock:
        _held[device_type, names].regions -= 1
        _sweep()


def _sweep() -> None:
    """Take away what no region needs, unless another thread may be on its way there."""
    if threading.active_count() == 1:
        for key in [key for key, holding in _held.items() if not holding.regions]:
            _held.pop(key).library._destroy()


def _register(device_type: str, names: frozenset[str]) -> Any:
    library = operators.empty_library()
    for name in names:
        operators.put(library, name, operators.dispatch_key(device_type), _kernel(device_type, name))
    return library


@cache
def _kernel(device_type: str, name: str) -> Kernel:
    key, otherwise = rule_key(device_type, name), before(device_type, name)

    @operators.untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        run = thread.rules.get(key)
        if run is None:
            return otherwise(keyset, *args, **kwargs)
        return run(keyset, *args, **kwargs)

    return kernel


@cache
def before(device_type: str, name: str) -> Kernel:
    """Return what the dispatcher does without our kernel: the framework's cast, or nothing."""
    if name in operators.listed(device_type):
        kernel = torch.library.get_kernel(f"aten::{name}", operators.dispatch_key(device_type))
        return kernel.call_boxed
    if not operators.is_composite(name):
        return operators.without_autocast(name, device_type)  # type: ignore[no-any-return]
    operator, below = operators.find(name), operators.keys_below(device_type)
    return lambda keyset, *args, **kwargs: operator.redispatch(keyset & below, *args, **kwargs)
