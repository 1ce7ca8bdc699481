"""When the framework's cache of cast weights may be used, and when it must be emptied.

The framework keeps the low-precision copy of a float32 leaf until the thread's outermost region ends. The
copies of all threads lie in one map that knows only the weight: not its version, not the precision, not whose
it is. So

- one thread at a time has the cache; others cast anew;
- a region of another precision starts and ends with an empty cache;
- what is written in place to a float32 leaf empties it, which also lets go of layers that new ones replaced.

Writes are seen by kernels that stand before the in-place operators, at the dispatch key that is on only
inside regions; before those few that other operators are made of, at a key that is off inside of operators.
They are put there by the first region that uses the cache, and stay. What no in-place operator of the thread
does is not seen: another thread, `out=`, a new `.data`, NumPy, compiled code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, clear_autocast_cache

from preamp.torch.autocasting import operators

__all__ = ["Claim", "watch_writes"]

# In-place operators that nobody changes a weight with, and clamp_min_, which relu_ is made of.
UNWATCHED = frozenset(
    """
    relu_ clamp_min_ relu6_ leaky_relu_ rrelu_ rrelu_with_noise_ elu_ celu_ selu_ gelu_ silu_ mish_ hardtanh_
    hardswish_ hardsigmoid_ sigmoid_ tanh_ threshold_ dropout_ alpha_dropout_ feature_dropout_
    feature_alpha_dropout_ bernoulli_ detach_ requires_grad_ resize_ squeeze_ unsqueeze_ t_ transpose_
    swapaxes_ swapdims_ as_strided_ eq_ ne_ lt_ le_ gt_ ge_
    """.split()  # noqa: SIM905  # a list of strings would be forty lines
)
# What operators write their results with. Watched where only what users write arrives.
USED_BY_OPERATORS = frozenset(
    "copy_ div_.Tensor fill_.Scalar fill_.Tensor masked_fill_.Scalar normal_ uniform_ zero_".split()  # noqa: SIM905
)
BY_A_USER = "ADInplaceOrView"  # the dispatch key that counts writes; off inside of operators

_cache = threading.Lock()
_watching: dict[str, Any] = {}
_installing = threading.Lock()


class Claim:
    """A thread's right to the cache, which goes with the thread.

    Attributes:
        held: whether the cache is this thread's.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = False

    def take(self, device_type: str) -> bool:
        """Take the cache, if no other thread has it; return whether it is this thread's."""
        if device_type not in _watching:
            watch_writes(device_type)
        if not self.held:
            self.held = _cache.acquire(blocking=False)
        return self.held

    def release(self) -> None:
        """Empty the cache and let another thread have it."""
        clear_autocast_cache()
        self.held = False
        _cache.release()

    def __del__(self) -> None:
        if self.held:
            self.release()


def watch_writes(device_type: str) -> None:
    """Have writes to leaves of a device type empty the cache."""
    with _installing:
        kind = device_type.partition(":")[0]
        if BY_A_USER not in _watching:
            _watching[BY_A_USER] = library = operators.empty_library()
            for name in USED_BY_OPERATORS:
                operators.put(library, name, BY_A_USER, _watched(operators.framework_kernel(name, BY_A_USER)))
        if kind not in _watching:
            _watching[kind] = library = operators.empty_library()
            key = operators.dispatch_key(kind)
            for name in filter(_is_a_users, operators.in_place_names()):
                operators.put(library, name, key, _watched(operators.without_autocast(name, kind)))
        _watching[device_type] = _watching[kind]


def _is_a_users(name: str) -> bool:
    """Return whether an operator writes what users want written, and hardly what other operators do."""
    unwatched = name.partition(".")[0] in UNWATCHED or operators.is_only_for_operators(name)
    return not unwatched and name not in USED_BY_OPERATORS


def _watched(write: Callable[..., Any]) -> Callable[..., Any]:
    @operators.untraced
    def kernel(keyset: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if _cache.locked() and (not isinstance(target, Tensor) or _may_be_a_weight(target)):
            clear_autocast_cache()
        return write(keyset, target, *args, **kwargs)

    return kernel


def _may_be_a_weight(target: Tensor) -> bool:
    """Return whether a write may change a float32 leaf, itself or through another tensor on its memory."""
    if target.dtype is not torch.float32:
        return False
    base = target if target._base is None else target._base
    if base.requires_grad:
        return base.is_leaf
    return isinstance(base, torch.nn.Parameter) or _is_shared(target)


def _is_shared(tensor: Tensor) -> bool:
    """Return whether tensors lie on the memory of one besides its base; True where that cannot be told."""
    try:
        storage = tensor.untyped_storage()
        owners = torch._C._storage_Use_Count(storage._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, those inside torch.func
        return True
    return owners > (2 if tensor._base is None else 3)  # itself, its base, and the object that was just made
