"""Register kernels in front of PyTorch's own, and remove them when no region needs them.

A kernel is registered for the whole process while any thread is in a region that edits its operator. It looks
up the edits of the thread that calls it; without any it calls what was there before. When the last such
region is left, the kernel is removed.

Removing it is not safe at any moment: PyTorch does not lock the dispatcher for a call, so a thread that is
about to enter a kernel while another removes it crashes. A kernel is removed while all other threads wait for
a lock, a queue or a socket. Otherwise it stays and does what PyTorch does, until the next time that a region
is left, or a thread that had such a region ends, while all other threads wait.
"""

from __future__ import annotations

import operator
import sys
import threading
from functools import cache
from itertools import compress
from types import FrameType

import torch

from preamp.arrays import torch_compat as compat
from preamp.torch.autocasting import kernels, operators
from preamp.torch.autocasting.thread_state import Kernel, thread

# Functions in which a thread waits, by their modules: what they call in C runs no operator.
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


class _Registration:
    """A set of kernels in the dispatcher, and how many regions need it."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library, self.regions = library, 0


class _AtEndOfThread:
    """Removes unneeded kernels when the thread ends whose local values it is among."""

    def __del__(self) -> None:
        if unneeded:
            remove_unneeded()


class _RegistryLock:
    """A lock that returns, when it is taken, whether this thread holds it already.

    Garbage collection may end a generator at any time, and with it the region that it is in: a thread can get
    here in the middle of a change of its own.
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


_lock = _RegistryLock()
_registered: dict[tuple[str, frozenset[str]], _Registration] = {}
unneeded: set[tuple[str, frozenset[str]]] = set()
"""The keys of kernels that no region needs and that are still registered. Almost always empty."""


def rule_key(device_type: str, name: str) -> str:
    """Return the key of an operator's kernel in `Thread.rules`."""
    return f"{device_type} {name}"


def hold(device_type: str, names: frozenset[str]) -> None:
    """Register kernels for some operators, unless they are registered."""
    if not names:
        return
    key = device_type, names
    thread.end = thread.end or _AtEndOfThread()
    with _lock:
        if key not in _registered:
            _registered[key] = _Registration(_register(device_type, names))
        _registered[key].regions += 1
        unneeded.discard(key)


def let_go(device_type: str, names: frozenset[str]) -> None:
    """Record that a region does not need its kernels any more, and remove what no region needs."""
    if not names:
        return
    key = device_type, names
    with _lock:
        _registered[key].regions -= 1
        if not _registered[key].regions:
            unneeded.add(key)
    remove_unneeded()


def remove_unneeded() -> None:
    """Remove the kernels that no region needs, if all other threads wait."""
    with _lock as is_changing:
        if is_changing:
            return
        frames, me = sys._current_frames(), threading.get_ident()
        try:
            if all(ident == me or _waits(frame) for ident, frame in frames.items()):
                for key in list(unneeded):
                    # `frames` was read a moment ago, and a thread may have woken up since. This one line
                    # compares the frames again and removes the kernels, all inside one call into C: the
                    # interpreter switches threads only between bytecodes, so no thread can start in between.
                    still = map(frames.__eq__, iter(sys._current_frames, None))
                    if [*map(operator.call, compress([compat.remover(_registered[key].library)], still))]:
                        _registered.pop(key).library._destroy()  # type: ignore[no-untyped-call]
                        unneeded.discard(key)
        finally:
            del frames  # a reference cycle: this function's own frame is among them


def _waits(frame: FrameType) -> bool:
    """Return whether a thread with this innermost frame is waiting and cannot enter a kernel."""
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in WITHOUT_OPERATORS or frame.f_code.co_name in WAITING_IN.get(module, ())


def _register(device_type: str, names: frozenset[str]) -> torch.library.Library:
    library = operators.empty_library()
    for name in names:
        operators.put(library, name, operators.dispatch_key(device_type), _kernel(device_type, name))
    return library


@cache
def _kernel(device_type: str, name: str) -> Kernel:
    key, otherwise = rule_key(device_type, name), kernels.before(device_type, name)

    @compat.untraced
    def kernel(keyset: torch.DispatchKeySet, *args: object, **kwargs: object) -> object:
        run = thread.rules.get(key)
        if run is None:
            return otherwise(keyset, *args, **kwargs)
        return run(keyset, *args, **kwargs)

    return kernel
