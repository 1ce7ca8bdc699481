"""What the tests of regions share: numbers, states, ways to run, threads in step, and counts of casts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
BASE = (False, BRAIN, True)  # the state of a thread outside of all regions
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
COMPILED = "inside" if RELEASE > (2, 6) else "around"  # 2.6 compiles no code that makes a region
WAYS = ["eager", COMPILED]
ways = pytest.mark.parametrize("way", WAYS)
since_2_7 = pytest.mark.skipif(RELEASE == (2, 6), reason="PyTorch 2.6 compiles no code that makes a region")
since_2_12 = pytest.mark.skipif(RELEASE < (2, 12), reason="PyTorch 2.10 compiles no method of a region")
# For a function that is compiled for more states of autocast than the compiler finds reasonable.
MANY_STATES = {"recompile_limit" if RELEASE > (2, 6) else "cache_size_limit": 256}
PATIENCE = 60  # seconds until a thread that waits for the others gives up
NO_KERNEL = "could not create a primitive descriptor"  # oneDNN, where it has none for a precision and a CPU


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(*shape: int, seed: int = 1) -> torch.nn.Parameter:
    return torch.nn.Parameter(numbers(*(shape or (3, 4)), seed=seed))


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    """Return a function compiled without breaks of the graph, which fails if it runs eagerly after all."""
    from torch._dynamo.testing import CompileCounterWithBackend  # loads the compiler

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    # Of its own code, so that what PyTorch wrote in C++ and partial functions are compiled as well.
    run = torch.compile(
        lambda *args, **kwargs: function(*args, **kwargs), backend=counter, fullgraph=True, **options
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        assert counter.frame_count, "nothing was compiled"
        return result

    return call


def run_in(
    way: str,
    make: Callable[[], Any],
    function: Callable[..., Any],
    backend: str = "aot_eager",
    **options: Any,
) -> Callable[..., Any]:
    """Return a function that runs in a region.

    Args:
        way: "eager"; "around", where the function is compiled and the region is entered around it; or
            "inside", where what makes and enters the region is compiled.
        make: makes the region.
        function: what runs in it.
        backend: the compiler's.
        options: others of `torch.compile`.
    """
    part = compiled(function, backend, **options) if way == "around" else function

    def run(*args: Any, **kwargs: Any) -> Any:
        with make():
            return part(*args, **kwargs)

    return compiled(run, backend, **options) if way == "inside" else run


def linear_of_every_state() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a linear layer that is compiled once for each state of autocast that it is called in."""

    def linear(x: Tensor, w: Tensor, precision: torch.dtype) -> Tensor:
        return {precision: F.linear}[precision](x, w)

    # PyTorch 2.6 keeps to the precision of the first region, unless an argument tells it.
    made = torch.compile(linear, backend="aot_eager", fullgraph=True, dynamic=False)
    return lambda x, w: made(x, w, torch.get_autocast_dtype("cpu"))


def state(device: str = "cpu") -> tuple[bool, torch.dtype, bool]:
    """Return what the framework knows of a device type's autocast in this thread."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return enabled, dtype, torch.is_autocast_cache_enabled()


def by_hand(x: Tensor, w: Tensor, dtype: torch.dtype = BRAIN) -> Tensor:
    return F.linear(x.to(dtype), w.to(dtype))


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function gives, or its error where this CPU has no kernel: LSTMs in low precision."""
    try:
        return function(*args)
    except RuntimeError as error:
        if NO_KERNEL not in str(error):
            raise
        return str(error)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Have PyTorch's own kernels run, which every CPU has in all precisions."""
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def same(a: Tensor | str, b: Tensor | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and a == b
    return a.dtype == b.dtype and torch.equal(a, b)


def flat(result: Any) -> list[Tensor | str]:
    """Return the tensors of a nested result, and the errors that stand for some."""
    return [result] if isinstance(result, (Tensor, str)) else [one for part in result for one in flat(part)]


def all_same(a: Any, b: Any) -> bool:
    """Return whether two results, which may be nested, are made of the same tensors and errors."""
    a, b = flat(a), flat(b)
    return len(a) == len(b) and all(map(same, a, b))


class Casts(TorchDispatchMode):
    """Counts how often a tensor is cast."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and args[0] is self.tensor:
            self.count += 1
        return function(*args, **(kwargs or {}))


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what a function returns in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def in_step(*works: Callable[[Callable[[], Any]], Any]) -> list[Any]:
    """Run functions in a thread each; they wait for all others where they call what they are given."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[Callable[[], Any]], Any]) -> Any:
        try:
            return work(lambda: barrier.wait(PATIENCE))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(run, work) for work in works]
    errors = [future.exception() for future in futures]
    first = next((e for e in errors if e and not isinstance(e, threading.BrokenBarrierError)), None)
    if first:
        raise first
    return [future.result() for future in futures]


def behaviour() -> tuple[torch.dtype, ...]:
    """Return what three operators do: one that is listed, one that is not, and one that calls the first."""
    a = torch.ones(2, 2)
    return torch.mm(a, a).dtype, F.softmax(a, -1).dtype, torch.matmul(a, a).dtype


def kernels() -> list[str]:
    """Return all that the dispatcher knows of some operators."""
    names = "mm", "softmax.int", "matmul", "exp", "cat"
    return [torch._C._dispatch_dump(f"aten::{name}") for name in names]
