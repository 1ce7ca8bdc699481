"""What loss scaling costs in PyTorch, compared with PyTorch's own and with the bare optimizer. On all cores.

Run: python benchmarks/torch_scaler.py [--device cuda] [--quick]. Reports; asserts nothing.

Whole iterations take turns: scale, unscale, check, clip, step, update. Only the last rows have a network.
With four parameters in each tensor, only Python and dispatch are measured, on one thread.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from rows import Area, Options, Row, difference, main
from timing import Times, Work, spread
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import guards
from preamp.torch import GradScaler

MAX_NORM = 1.0
ALONE, PYTORCH, MEMORY = "the optimizer alone", "torch.amp.GradScaler", "reading the gradients once"
GUARDED, UNGUARDED = "preamp with SpikeGuard", "preamp without a guard"
NEITHER, BEYOND = "neither scaling nor clipping", "ATen calls beyond the optimizer's"
Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """161 tensors, 25.6M parameters."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out, norm = 4 * planes, [(planes,), (planes,)]
            shapes += [(planes, width, 1, 1), *norm, (planes, planes, 3, 3), *norm]
            shapes += [(out, planes, 1, 1), (out,), (out,)]
            shapes += [(out, width, 1, 1), (out,), (out,)] if block == 0 else []
            width = out
    return [*shapes, (1000, width), (1000,)]


def gpt2() -> Shapes:
    """148 tensors, 124.4M parameters."""
    d = 768
    attention: Shapes = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    feed_forward: Shapes = [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *((attention + feed_forward) * 12), (d,), (d,)]


def small() -> Shapes:
    """161 tensors of 4 parameters."""
    return [(4,)] * 161


class Iteration:
    """An optimizer with gradients, and scalers of all kinds to step it with."""

    def __init__(self, shapes: Shapes, device: str, kind: str) -> None:
        self.parameters = [torch.nn.Parameter(torch.randn(s, device=device) * 0.02) for s in shapes]
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.kind = kind
        self.optimizer = self.make_optimizer()
        self.loss = torch.ones((), device=device)
        never = {"init_scale": 1.0, "growth_interval": 10**9}
        self.stock, self.ours = torch.amp.GradScaler(device, **never), GradScaler(device, **never)
        self.guarded = GradScaler(device, **never, guard=guards.SpikeGuard())
        self.flat = torch.randn(sum(parameter.numel() for parameter in self.parameters), device=device)

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.kind == "AdamW(fused)":
            return torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        return torch.optim.SGD(self.parameters, lr=1e-4, foreach=True)

    def works(self, clip: bool) -> dict[str, Work]:
        """Return the ways to make an iteration, and the least that each of them has to do."""
        guarded = {GUARDED: self.guarded_clip} if clip else {}
        return {
            "preamp": self.ours_clip if clip else self.ours_plain,
            **guarded,
            PYTORCH: self.stock_clip if clip else self.stock_plain,
            ALONE: self.bare,
            MEMORY: self.floor,
        }

    def stock_clip(self) -> None:
        self.stock.scale(self.loss)
        self.stock.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.stock.step(self.optimizer)
        self.stock.update()

    def ours_clip(self) -> None:
        self.ours.scale(self.loss)
        self.ours.step(self.optimizer, max_norm=MAX_NORM)
        self.ours.update()

    def guarded_clip(self) -> None:
        self.guarded.scale(self.loss)
        self.guarded.step(self.optimizer, max_norm=MAX_NORM)
        self.guarded.update()

    def stock_plain(self) -> None:
        self.stock.scale(self.loss)
        self.stock.step(self.optimizer)
        self.stock.update()

    def ours_plain(self) -> None:
        self.ours.scale(self.loss)
        self.ours.step(self.optimizer)
        self.ours.update()

    def bare(self) -> None:
        self.optimizer.step()

    def floor(self) -> None:
        torch.dot(self.flat, self.flat)


class Network:
    """A network of dense layers, to run backward through and step."""

    def __init__(self, device: str, width: int, depth: int) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(depth) for m in (torch.nn.Linear(width, width), torch.nn.GELU())]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to(device)
        self.batch = torch.randn(300, width, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        never = {"init_scale": 2.0**10, "growth_interval": 10**9}
        self.stock, self.ours = torch.amp.GradScaler(device, **never), GradScaler(device, **never)

    def forward(self, name: str) -> None:
        """Make the loss for the next turn, whose time is that of backward and step."""
        self.optimizer.zero_grad()
        self.loss = self.model(self.batch).square().mean()

    def neither(self) -> None:
        self.loss.backward()
        self.optimizer.step()

    def stock_clip(self) -> None:
        self.stock.scale(self.loss).backward()
        self.stock.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.stock.step(self.optimizer)
        self.stock.update()

    def combined(self) -> None:
        self.ours.scale(self.loss).backward()
        self.ours.step(self.optimizer, max_norm=MAX_NORM)
        self.ours.update()


class Calls(TorchDispatchMode):
    """Counts ATen calls and reads to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.reads += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def count(work: Work) -> Calls:
    """Count the second call of a work: the first may set something up."""
    work()
    with Calls() as calls:
        work()
    return calls


def iterations(options: Options) -> Iterator[Row]:
    """Yield rows of iterations without a network."""
    scaler = Area("torch GradScaler", options.device)
    for shapes in (small(),) if options.quick else (resnet50(), gpt2()):
        for kind in ("AdamW(fused)", "SGD(foreach)"):
            iteration = Iteration(shapes, options.device, kind)
            for clip in (True, False):
                times = options.interleaved(iteration.works(clip))
                what = f"{kind}, {described(shapes)}, {'clip' if clip else 'no clip'}"
                yield from scaler.timed(what, times, "preamp", [PYTORCH], [ALONE])
                yield _over_memory(scaler, what, times)
                yield from guarded_rows(scaler, what, times)
            del iteration
            gc.collect()


def guarded_rows(area: Area, what: str, times: Times, unit: str = "ms") -> Iterator[Row]:
    """Yield the row that compares with and without a guard, where both were timed."""
    if GUARDED in times:
        named = {GUARDED: times[GUARDED], UNGUARDED: times["preamp"]}
        yield from area.timed(f"{what}, guard", named, GUARDED, floors=[UNGUARDED], unit=unit)


def described(shapes: Shapes) -> str:
    """Return how many tensors and parameters there are."""
    numbers = sum(math.prod(shape) for shape in shapes)
    return f"{len(shapes)} tensors, {numbers / 1e6:.1f}M parameters"


def _over_memory(area: Area, what: str, times: Times) -> Row:
    added, memory = difference(times, "preamp", ALONE), spread(1e3 * taken for taken in times[MEMORY])
    return area.over(f"{what}: what it adds to the optimizer", MEMORY, added, memory, peer=False)


def dispatch(options: Options) -> Iterator[Row]:
    """Yield rows of what Python and dispatch cost, and of ATen calls beyond the optimizer's own."""
    scaler = Area("torch GradScaler", options.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for kind in ("AdamW(fused)", "SGD(foreach)"):
        for clip in (True, False):
            works = Iteration(small(), options.device, kind).works(clip)
            del works[MEMORY]
            times = options.interleaved(works)
            what = f"{kind}, 161 tensors of 4 parameters, {'clip' if clip else 'no clip'}"
            yield from scaler.timed(what, times, "preamp", [PYTORCH], unit="µs")
            yield from guarded_rows(scaler, what, times, unit="µs")
            ours, theirs, own = (count(works[name]).calls for name in ("preamp", PYTORCH, ALONE))
            yield scaler.counted(f"{what}: {BEYOND}", PYTORCH, ours - own, theirs - own, "calls")
    yield from as_on_an_accelerator(scaler, options.device)
    torch.set_num_threads(threads)


def as_on_an_accelerator(area: Area, device: str) -> Iterator[Row]:
    """Yield the counts of the path that is taken where reading a value to the host is expensive."""
    iteration = Iteration(small(), device, "AdamW(fused)")
    # On a CPU it is a call for each tensor, which is faster there.
    largest = lambda tensors: torch.stack(torch._foreach_norm(tensors, math.inf))  # noqa: E731
    with (
        patch("preamp.torch.scaling.grad_scaler._sync_is_free", lambda _: False),
        patch("preamp.arrays.torch.largest", largest),
    ):
        ours = count(iteration.ours_clip)
        guarded = count(iteration.guarded_clip)
    theirs, own = count(iteration.stock_clip), count(iteration.bare)
    what = "AdamW(fused), clip, as on an accelerator"
    calls = ours.calls - own.calls, theirs.calls - own.calls
    yield area.counted(f"{what}: {BEYOND}", PYTORCH, *calls, "calls")
    yield area.counted(f"{what}: reads to the host", PYTORCH, ours.reads, theirs.reads, "reads")
    yield area.counted(f"{what}, guard: reads to the host", PYTORCH, guarded.reads, theirs.reads, "reads")
    calls = guarded.calls - own.calls, ours.calls - own.calls
    yield area.counted(f"{what}, guard: {BEYOND}", UNGUARDED, *calls, "calls", peer=False)


def network(options: Options) -> Iterator[Row]:
    """Yield the rows of backward and step in a real network."""
    net = Network(options.device, *((32, 2) if options.quick else (1024, 24)))
    numbers = sum(parameter.numel() for parameter in net.model.parameters())
    works: dict[str, Work] = {
        "preamp": net.combined,
        PYTORCH: net.stock_clip,
        NEITHER: net.neither,
    }
    times = options.interleaved(works, before=net.forward)
    area, what = (
        Area("torch GradScaler", options.device),
        f"backward and step of a network of {numbers / 1e6:.1f}M parameters",
    )
    yield from area.timed(f"{what}, clip", times, "preamp", [PYTORCH], [NEITHER])


def measure(options: Options) -> Iterator[Row]:
    """Yield all rows."""
    for part in (iterations, dispatch, network):
        yield from part(options)


if __name__ == "__main__":
    main(measure, __doc__)
