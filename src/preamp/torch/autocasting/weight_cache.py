"""Share PyTorch's cache of cast weights among threads, and empty it when it is stale.

PyTorch caches the low-precision copy of a float32 leaf until the thread's outermost region ends. The copies
of all threads are in one map whose keys are the weights alone, without version, precision or thread. So

- one thread at a time uses the cache, and other threads cast every time;
- a region of another precision starts and ends with an empty cache;
- the step of an optimizer, in any thread, empties it.

As in PyTorch, other writes to a weight are not detected: after those, call `torch.clear_autocast_cache()`.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch import clear_autocast_cache

from preamp.arrays.torch_compat import HooksAndOneMore, optimizer_hooks, outside_of_graphs, untraced
from preamp.torch.scaling.optimizers import OptimizerLike
from preamp.torch.scaling.unscaled import PRE_HOOKS, watch

_cache = threading.Lock()


class Claim:
    """A thread's right to use the cache. It ends with the thread at the latest.

    Attributes:
        held: whether this thread uses the cache.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = False

    def take(self) -> bool:
        """Take the cache, if no thread has it; return whether it is this thread's."""
        if not _cache.acquire(False):
            return False
        self.held = True
        optimizer_hooks._global_optimizer_pre_hooks = _BEFORE
        optimizer_hooks._global_optimizer_post_hooks = _AFTER
        return True

    def release(self) -> None:
        """Empty the cache and let another thread use it."""
        optimizer_hooks._global_optimizer_pre_hooks = watch.pre_hooks
        optimizer_hooks._global_optimizer_post_hooks = _POST_HOOKS
        clear_autocast_cache()
        self.held = False
        _cache.release()

    def __del__(self) -> None:
        if self.held:
            self.release()


# Outside of graphs: a compiled graph would not empty the cache.
@outside_of_graphs
def _empty() -> None:
    clear_autocast_cache()


@outside_of_graphs
def _before_step(optimizer: OptimizerLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Empty the cache before each call of a closure: optimizers such as LBFGS write weights in between."""
    watch.look_at(optimizer)
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if not callable(closure):
        return None

    @untraced
    @functools.wraps(closure)
    def with_empty_cache(*given: object, **named: object) -> object:
        _empty()
        return closure(*given, **named)

    if len(args) < 2:
        return args, {**kwargs, "closure": with_empty_cache}
    return (args[0], with_empty_cache, *args[2:]), kwargs


@outside_of_graphs
def _after_step(*_: object) -> None:
    clear_autocast_cache()


_POST_HOOKS = optimizer_hooks._global_optimizer_post_hooks
_BEFORE = HooksAndOneMore(PRE_HOOKS, _before_step, compiled=True)
_AFTER = HooksAndOneMore(_POST_HOOKS, _after_step, compiled=True)
