"""Share PyTorch's cache of cast weights among threads, empty it when stale, and keep one for edited regions.

PyTorch caches the low-precision copy of a float32 leaf until the thread's outermost region ends. The copies
of all threads are in one map whose keys are the weights alone, without version, precision or thread. So

- one thread at a time uses the cache, and other threads cast every time;
- a region of another precision starts and ends with an empty cache;
- the step of an optimizer, in any thread, empties it.

As in PyTorch, other writes to a weight are not detected: after those, call `torch.clear_autocast_cache()`.

What PyTorch caches is a node of autograd's graph, too. All uses of a weight share it, so their gradients are
added up in low precision before they reach the weight. Regions with edits cast by `cast_weight`, which keeps
the numbers alone, under the same rules, and sees writes that PyTorch counts in a tensor's version.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, clear_autocast_cache, is_autocast_cache_enabled

from preamp.arrays.torch_compat import (
    HooksAndOneMore,
    is_in_transform,
    optimizer_hooks,
    outside_of_graphs,
    untraced,
)
from preamp.torch.autocasting.unscaled import PRE_HOOKS, watch
from preamp.torch.scaling.optimizers import OptimizerLike

_cache = threading.Lock()
_holder: int | None = None  # the thread that uses the cache
# By the identity of a weight and the precision: the weight, its version, and its numbers in that precision.
_numbers: dict[tuple[int, torch.dtype], tuple[weakref.ref[Tensor], int, Tensor]] = {}


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
        global _holder
        if not _cache.acquire(False):
            return False
        self.held, _holder = True, threading.get_ident()
        torch.clear_autocast_cache = clear  # users call it
        optimizer_hooks._global_optimizer_pre_hooks = _BEFORE
        optimizer_hooks._global_optimizer_post_hooks = _AFTER
        return True

    def release(self) -> None:
        """Empty the cache and let another thread use it."""
        global _holder
        _holder, torch.clear_autocast_cache = None, clear_autocast_cache
        optimizer_hooks._global_optimizer_pre_hooks = watch.pre_hooks
        optimizer_hooks._global_optimizer_post_hooks = _POST_HOOKS
        clear()
        self.held = False
        _cache.release()

    def __del__(self) -> None:
        if self.held:
            self.release()


def is_cached(tensor: Tensor) -> bool:
    """Return whether PyTorch would cache a cast of a tensor to low precision in this thread, now."""
    return (
        is_autocast_cache_enabled()
        and tensor.requires_grad
        and tensor.dtype is torch.float32
        and tensor.is_leaf
        and not tensor._is_view()
        and not torch.is_inference_mode_enabled()
    )


def summed_low(uses: Mapping[str, int], low: torch.dtype, where: str) -> Iterator[str]:
    """Yield a sentence if PyTorch's cache adds up gradients in low precision.

    Args:
        uses: how often each weight is used, by name.
        low: the precision.
        where: it is used that often.
    """
    often = {name: times for name, times in uses.items() if times > 1}
    if often:
        name = max(often, key=lambda name: (often[name], name))
        others = f" and of {len(often) - 1} more" if len(often) > 1 else ""
        yield (
            f"In one plain region, such as torch.autocast's, the gradients of {name}, with {often[name]:,} "
            f"uses in {where},{others} add up in {str(low).removeprefix('torch.')}: its cache has one cast "
            "for all uses. With casting=, emulate=True or cache_enabled=False they add up in float32."
        )


def cast_weight(tensor: Tensor, to: Callable[[Tensor], Tensor], low: torch.dtype) -> Tensor:
    """Return a tensor in low precision; a weight is cast once, and its gradients arrive in float32.

    Args:
        tensor: in float32, as the program has it.
        to: what casts it.
        low: the dtype it casts to.
    """
    if (
        not is_cached(tensor)
        or _holder != threading.get_ident()
        or is_in_transform()
        or tensor.is_inference()
    ):
        return to(tensor)
    key = id(tensor), low
    weight, version, numbers = _numbers.get(key, (None, 0, tensor))
    if weight is None or weight() is not tensor or version != tensor._version:
        with torch.no_grad():
            numbers = to(tensor)
        _numbers[key] = weakref.ref(tensor), tensor._version, numbers
    if not torch.is_grad_enabled():
        return numbers
    used: Tensor = _Use.apply(tensor, numbers)  # type: ignore[no-untyped-call]
    return used


class _Use(torch.autograd.Function):
    """One use of a weight in low precision: a cast whose result is there already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, numbers: Tensor) -> Tensor:
        return numbers.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


# Outside of graphs: a compiled graph would not empty the cache.
@outside_of_graphs
def clear() -> None:
    """Empty the cache of PyTorch, and that of regions with edits."""
    clear_autocast_cache()
    _numbers.clear()


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
        clear()
        return closure(*given, **named)

    if len(args) < 2:
        return args, {**kwargs, "closure": with_empty_cache}
    return (args[0], with_empty_cache, *args[2:]), kwargs


@outside_of_graphs
def _after_step(*_: object) -> None:
    clear()


_POST_HOOKS = optimizer_hooks._global_optimizer_post_hooks
_BEFORE = HooksAndOneMore(PRE_HOOKS, _before_step, compiled=True)
_AFTER = HooksAndOneMore(_POST_HOOKS, _after_step, compiled=True)
