"""What the PyTorch scaler costs beside PyTorch's own. Reports; asserts nothing.

Run: python benchmarks/torch_scaler.py [--rounds 15] [--device cpu]

Every row compares whole iterations, interleaved in one process; a number is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preamp.torch import GradScaler

MAX_NORM = 1.0
Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """161 tensors, 25.6M numbers."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = 4 * planes
            shapes += [
                (planes, width, 1, 1),
                (planes,),
                (planes,),
                (planes, planes, 3, 3),
                (planes,),
                (planes,),
            ]
            shapes += [(out, planes, 1, 1), (out,), (out,)]
            shapes += [(out, width, 1, 1), (out,), (out,)] if block == 0 else []
            width = out
    return [*shapes, (1000, width), (1000,)]


def gpt2() -> Shapes:
    """148 tensors, 124.4M numbers."""
    d = 768
    block = [
        (d,),
        (d,),
        (3 * d, d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (4 * d, d),
        (4 * d,),
        (d, 4 * d),
        (d,),
    ]
    return [(50257, d), (1024, d), *(block * 12), (d,), (d,)]


def small() -> Shapes:
    """161 tensors of four numbers: what is left is Python and dispatch."""
    return [(4,)] * 161


class Iteration:
    """An optimizer with gradients, and scalers of both kinds to step it with."""

    def __init__(self, shapes: Shapes, device: str, kind: str) -> None:
        self.parameters = [torch.nn.Parameter(torch.randn(s, device=device) * 0.02) for s in shapes]
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer: Any = (
            torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
            if kind == "AdamW(fused)"
            else torch.optim.SGD(self.parameters, lr=1e-4, foreach=True)
        )
        self.loss = torch.ones((), device=device)
        never = {"init_scale": 1.0, "growth_interval": 10**9}
        self.stock = torch.amp.GradScaler(device, **never)
        self.ours = GradScaler(device, **never)

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


class Network:
    """A real network: backward and step of a transformer-like stack, 25M parameters."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        width, depth = 1024, 24
        layers = [m for _ in range(depth) for m in (torch.nn.Linear(width, width), torch.nn.GELU())]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to(device)
        self.batch = torch.randn(300, width, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        never = {"init_scale": 2.0**10, "growth_interval": 10**9}
        self.stock, self.ours = torch.amp.GradScaler(device, **never), GradScaler(device, **never)
        self.watched = GradScaler(device, **never)

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self.model(self.batch).square().mean()

    def neither(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()

    def stock_clip(self, loss: torch.Tensor) -> None:
        self.stock.scale(loss).backward()
        self.stock.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.stock.step(self.optimizer)
        self.stock.update()

    def combined(self, loss: torch.Tensor) -> None:
        self.ours.scale(loss).backward()
        self.ours.step(self.optimizer, max_norm=MAX_NORM)
        self.ours.update()

    def watching(self, loss: torch.Tensor) -> None:
        self.watched.scale(loss).backward()
        self.watched.step(self.optimizer, max_norm=MAX_NORM)
        self.watched.update()


class Calls(TorchDispatchMode):
    """Counts ATen calls and reads to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.reads += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def seconds(work: Callable[[], object], device: str) -> float:
    """Return how long a call takes, with what it started on the device."""
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    work()
    sync()
    return time.perf_counter() - start


def interleaved(
    works: dict[str, Callable[[], object]], rounds: int, device: str, repeat: int = 1
) -> dict[str, list[float]]:
    """Return the times of each work, one of each per round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(sum(seconds(work, device) for _ in range(repeat)) / repeat)
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))


def floor(shapes: Shapes, device: str) -> Callable[[], object]:
    """Return a work that reads as many bytes once as the gradients have."""
    flat = torch.randn(sum(torch.Size(s).numel() for s in shapes), device=device)
    return lambda: torch.dot(flat, flat)


def report_iterations(device: str, rounds: int) -> None:
    """Print what an iteration costs without the network."""
    print("\niteration without the network              stock ms  ours ms  ours/stock  bare/stock  floor ms")
    for model, shapes in (("ResNet-50-like", resnet50()), ("GPT-2-small-like", gpt2())):
        for kind in ("AdamW(fused)", "SGD(foreach)"):
            it = Iteration(shapes, device, kind)
            works: dict[str, Callable[[], object]] = {
                "stock clip": it.stock_clip,
                "ours clip": it.ours_clip,
                "stock plain": it.stock_plain,
                "ours plain": it.ours_plain,
                "bare": it.bare,
                "floor": floor(shapes, device),
            }
            times = interleaved(works, rounds, device)
            for what in ("clip", "plain"):
                stock, ours = f"stock {what}", f"ours {what}"
                label = f"{model}, {kind}, {'clip' if what == 'clip' else 'no clip'}"
                print(
                    f"{label:42} {1e3 * statistics.median(times[stock]):8.1f}"
                    f" {1e3 * statistics.median(times[ours]):8.1f} {ratio(times, ours, stock):11.3f}"
                    f" {ratio(times, 'bare', stock):11.3f} {1e3 * statistics.median(times['floor']):9.1f}"
                )
            del it, works
            gc.collect()


def report_small(device: str, rounds: int) -> None:
    """Print what Python and dispatch cost, and count the calls."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print(
        "\n161 gradients of 4 numbers, 1 thread       stock us  ours us  ours/stock   calls stock/ours  reads"
    )
    for kind in ("AdamW(fused)", "SGD(foreach)"):
        it = Iteration(small(), device, kind)
        for what, stock, ours in (
            ("clip", it.stock_clip, it.ours_clip),
            ("no clip", it.stock_plain, it.ours_plain),
        ):
            times = interleaved({"stock": stock, "ours": ours}, 4 * rounds, device, repeat=10)
            counts = [count(work) for work in (stock, ours, it.bare)]
            own = counts[2].calls
            print(
                f"{kind + ', ' + what:42} {1e6 * statistics.median(times['stock']):8.0f}"
                f" {1e6 * statistics.median(times['ours']):8.0f} {ratio(times, 'ours', 'stock'):11.3f}"
                f" {counts[0].calls - own:13} / {counts[1].calls - own}"
                f" {counts[0].reads - counts[2].reads:5} / {counts[1].reads - counts[2].reads}"
            )
    it = Iteration(small(), device, "AdamW(fused)")
    with patch("preamp.torch.stepping._reads_are_free", lambda _: False):
        it.ours_clip()
        ours, own = count(it.ours_clip), count(it.bare)
    print(f"AdamW(fused), clip, as on an accelerator: {ours.calls - own.calls} calls, {ours.reads} reads")
    torch.set_num_threads(threads)


def count(work: Callable[[], object]) -> Calls:
    """Return the ATen calls of a work."""
    with Calls() as calls:
        work()
    return calls


def report_network(device: str, rounds: int) -> None:
    """Print backward + step of a real network."""
    net = Network(device)
    names = ("neither", "stock_clip", "combined", "watching")
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names:
            handle = net.watched.watch(net.optimizer) if name == "watching" else None
            loss = net.loss()
            took = seconds(lambda name=name, loss=loss: getattr(net, name)(loss), device)
            if handle:
                handle.remove()
            if turn:
                times[name].append(took)
    print("\nbackward + step of a network of 25M parameters, over that with neither scaling nor clipping")
    for name in names:
        ms = 1e3 * statistics.median(times[name])
        print(
            f"{name.replace('_', ' ') + (' with clip' if name in names[2:] else ''):42} {ms:8.1f} ms"
            f" {ratio(times, name, 'neither'):8.3f}"
        )


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads, {options.rounds} rounds")
    report_iterations(options.device, options.rounds)
    report_small(options.device, options.rounds)
    report_network(options.device, options.rounds)


if __name__ == "__main__":
    main()
