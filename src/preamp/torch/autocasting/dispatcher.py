"""Which kernels are registered in the dispatcher before PyTorch's own, and for how long.

A kernel is registered for the whole process while any thread is in a region that edits its operator. It asks
its own thread what to do: without an edit it calls what was there before. When the last such region is left,
the kernel is removed.

It cannot be removed at any moment: PyTorch does not lock the dispatcher for a call, so a thread that is about
to enter a kernel while another removes it crashes. A kernel is removed while all other threads wait for a
lock, a queue or a socket. Otherwise it stays, does what PyTorch does, and is removed when the next region of
any thread is left, or a thread that had such a region ends, and the others wait.
"""

from __future__ import annotations

import operator
import sys
import threading
from functools import cache
from itertools import compress
from types import FrameType
from typing import Any

from preamp.arrays import torch_compat as compat
from preamp.torch.autocasting import operators
from preamp.torch.autocasting.thread_state import Kernel, thread

# The functions that a thread waits in, by their modules: what they call in C runs no operator.
WAITING_IN = {
    "concurrent.futures.thread": ("_worker",),
    "multiprocessing.connection": ("_poll", "_recv", "_send", "accept", "wait"),
    "multiprocessing.queues": ("get", "put"),
    "queue": ("get", "put"),
    "selectors": ("select",),
    "socket": ("accept", "readinto"),
    "ssl": ("read", "recv", "recv_into"),
    "subprocess": ("_try_wait",),
    "threading": ("_wait_for_tstate_lock", "acquire", "join", "wait"),
    "torch._inductor.compile_worker.subproc_pool": ("_recv_msg",),
}
# Packages whose threads run no operators: those of notebooks, debuggers, loggers and pytest-xdist.
WITHOUT_OPERATORS = frozenset(
    {"_pydevd_bundle", "debugpy", "execnet", "grpc", "ipykernel", "tornado", "tqdm", "wandb", "zmq"}
)


class _Holding:
    """A set of kernels in the dispatcher, and how many regions need it."""

    def __init__(self, library: Any) -> None:
        self.library, self.regions = library, 0


class _AtEndOfThread:
    """Removes what is not needed when the thread ends that has it among its local values."""

    def __del__(self) -> None:
        if unneeded:
            remove_unneeded()


class _Changing:
    """A lock for changes, which tells whether the thread that takes it is in the middle of one.

    Garbage collection may end a generator at any time, and the region that it is in ends with it.
    """

    def __init__(self) -> None:
        self._lock, self._depth = threading.RLock(), 0

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        return self._depth > 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._lock.release()


_changing = _Changing()
_held: dict[tuple[str, frozenset[str]], _Holding] = {}
unneeded: set[tuple[str, frozenset[str]]] = set()
"""The keys of kernels that no region needs and that are still registered. Empty almost always."""


def rule_key(device_type: str, name: str) -> str:
    """Return under which name a thread keeps what an operator does."""
    return f"{device_type} {name}"


def hold(device_type: str, names: frozenset[str]) -> None:
    """Register kernels for some operators, unless they are registered."""
    if not names:
        return
    key = device_type, names
    thread.end = thread.end or _AtEndOfThread()
    with _changing:
        if key not in _held:
            _held[key] = _Holding(_register(device_type, names))
        _held[key].regions += 1
        unneeded.discard(key)


def let_go(device_type: str, names: frozenset[str]) -> None:
    """Say that a region does not need its kernels any more."""
    if not names:
        return
    key = device_type, names
    with _changing:
        _held[key].regions -= 1
        if not _held[key].regions:
            unneeded.add(key)
    remove_unneeded()


def remove_unneeded() -> None:
    """Remove the kernels that no region needs, if all other threads wait."""
    with _changing as in_the_middle:
        if in_the_middle:
            return
        frames, me = sys._current_frames(), threading.get_ident()
        try:
            if all(ident == me or _waits(frame) for ident, frame in frames.items()):
                for key in list(unneeded):
                    # Compares once more and removes in one call into C: no other thread can start in between.
                    still = map(frames.__eq__, iter(sys._current_frames, None))
                    if [*map(operator.call, compress([compat.remover(_held[key].library)], still))]:
                        _held.pop(key).library._destroy()
                        unneeded.discard(key)
        finally:
            del frames  # the frame of this function is among them: a cycle


def _waits(frame: FrameType) -> bool:
    """Return whether a thread with this innermost frame waits."""
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in WITHOUT_OPERATORS or frame.f_code.co_name in WAITING_IN.get(module, ())


def _register(device_type: str, names: frozenset[str]) -> Any:
    library = operators.empty_library()
    for name in names:
        operators.put(library, name, operators.dispatch_key(device_type), _kernel(device_type, name))
    return library


@cache
def _kernel(device_type: str, name: str) -> Kernel:
    key, otherwise = rule_key(device_type, name), before(device_type, name)

    @compat.untraced
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        run = thread.rules.get(key)
        if run is None:
            return otherwise(keyset, *args, **kwargs)
        return run(keyset, *args, **kwargs)

    return kernel


@cache
def before(device_type: str, name: str) -> Kernel:
    """Return what the dispatcher does without our kernel: the framework's cast, or nothing."""
    if name in operators.registered(device_type):
        kernel = compat.kernel_at(f"aten::{name}", operators.dispatch_key(device_type))
        if kernel:
            return kernel
        if rule := operators.listed(device_type).get(name):  # which ours follow too, without PyTorch's cache
            from preamp.torch.autocasting import kernels

            return kernels.make(rule, name, device_type)
    if not operators.is_composite(name):
        return operators.without_autocast(name, device_type)
    operator, below = operators.find(name), operators.keys_below(device_type)
    return lambda keyset, *args, **kwargs: operator.redispatch(keyset & below, *args, **kwargs)
