"""What autocast costs beside PyTorch's own. Reports; asserts nothing.

Run: python benchmarks/torch_autocast.py [--rounds 15]

Ratios are medians over rounds that are interleaved in one process. Small tensors (8 x 8) show what Python and
the dispatcher take; nothing else would be seen with larger ones.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional

from preamp import casting
from preamp.torch import autocast

Work = Callable[[], object]
Region = Callable[[], AbstractContextManager[Any]]
LOW = torch.bfloat16


def microseconds(work: Work, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls * 1e6


def compare(works: dict[str, Work], rounds: int, calls: int = 1000) -> dict[str, list[float]]:
    """Return the microseconds a call takes, by name, one number a round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(microseconds(work, calls))
    return times


def ratio(times: dict[str, list[float]], ours: str, theirs: str) -> float:
    return statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True))


def enter(region: Region) -> Work:
    def work() -> None:
        with region():
            pass

    return work


def operators(rows: int) -> dict[str, Work]:
    x, low = torch.randn(rows, rows), torch.randn(rows, rows).to(LOW)
    weight, bias = torch.nn.Parameter(torch.randn(rows, rows)), torch.nn.Parameter(torch.randn(rows))
    images, kernel = torch.randn(1, 4, rows, rows), torch.nn.Parameter(torch.randn(4, 4, 3, 3))
    return {
        "mm, two casts": lambda: torch.mm(x, x),
        "mm, no cast": lambda: torch.mm(low, low),
        "linear, cached weight": lambda: functional.linear(x, weight, bias),
        "conv2d, cached weight": lambda: functional.conv2d(images, kernel),
        "mse_loss, two casts up": lambda: functional.mse_loss(low, low),
        "cat": lambda: torch.cat((x, low)),
        "add, unlisted": lambda: x + x,
        "softmax, unlisted": lambda: torch.softmax(x, -1),
        "mean, unlisted": x.mean,
        "dropout, unlisted": lambda: functional.dropout(x, 0.5),
        "to float32": low.float,
        "add_, in place": lambda: x.add_(0.0),
        "relu_, in place": lambda: functional.relu(x, inplace=True),
    }


def inside(region: Region, works: dict[str, Work], calls: int = 1000) -> dict[str, float]:
    with region():
        for work in works.values():
            work()
        return {name: microseconds(work, calls) for name, work in works.items()}


def print_operators(rounds: int) -> None:
    """Compare operators in both regions, and with PyTorch's region before preamp's was ever entered."""
    works = operators(8)
    alone = [inside(lambda: torch.autocast("cpu", LOW), works) for _ in range(rounds)]
    stock, ours = [], []
    for _ in range(rounds):
        stock.append(inside(lambda: torch.autocast("cpu", LOW), works))
        ours.append(inside(lambda: autocast("cpu", LOW), works))
    print(f"{'operator, 8 x 8':<26}{'us':>8}{'ours / PyTorch':>18}{'ours / PyTorch alone':>24}")
    for name in works:
        before = statistics.median(one[name] for one in alone)
        beside = statistics.median(a[name] / b[name] for a, b in zip(ours, stock, strict=True))
        after = statistics.median(one[name] for one in ours)
        print(f"{name:<26}{after:>8.2f}{beside:>18.3f}{after / before:>24.2f}")


def print_entering(rounds: int) -> None:
    theirs, ours = torch.autocast("cpu", LOW), autocast("cpu", LOW)
    table = casting.DEFAULT.float32("mm")
    edited, rehearsed = autocast("cpu", LOW, casting=table), autocast("cpu", LOW, emulate=True)
    works = {
        "PyTorch, new": enter(lambda: torch.autocast("cpu", LOW)),
        "ours, new": enter(lambda: autocast("cpu", LOW)),
        "PyTorch, again": enter(lambda: theirs),
        "ours, again": enter(lambda: ours),
    }
    times = compare(works, rounds)
    slow = {
        "one edit, new": enter(lambda: autocast("cpu", LOW, casting=table)),
        "one edit, again": enter(lambda: edited),
        "emulation, new": enter(lambda: autocast("cpu", LOW, emulate=True)),
        "emulation, again": enter(lambda: rehearsed),
    }
    times |= compare(slow, rounds, calls=50)
    print("\nentering and leaving a region, us")
    for name, values in times.items():
        print(f"  {name:<24}{statistics.median(values):>8.2f}")
    for kind in ("new", "again"):
        print(f"  ours / PyTorch, {kind:<8}{ratio(times, f'ours, {kind}', f'PyTorch, {kind}'):>8.2f}")


def print_edits(rounds: int) -> None:
    """Compare edited operators with what PyTorch's region does with them, and with casts by hand."""
    x, low = {n: torch.randn(n, n) for n in (8, 256)}, {n: torch.randn(n, n).to(LOW) for n in (8, 256)}
    edits: tuple[tuple[str, casting.Casting, Callable[[int], object], Callable[[int], object]], ...] = (
        (
            "float32('mm') of float32",
            casting.DEFAULT.float32("mm"),
            lambda n: torch.mm(x[n], x[n]),
            lambda n: torch.mm(x[n], x[n]),
        ),
        (
            "float32('mm') of bfloat16",
            casting.DEFAULT.float32("mm"),
            lambda n: torch.mm(low[n], low[n]),
            lambda n: torch.mm(low[n].float(), low[n].float()),
        ),
        (
            "untouched('mm')",
            casting.DEFAULT.untouched("mm"),
            lambda n: torch.mm(x[n], x[n]),
            lambda n: torch.mm(x[n], x[n]),
        ),
        (
            "lower('softmax')",
            casting.DEFAULT.lower("softmax"),
            lambda n: torch.softmax(x[n], -1),
            lambda n: torch.softmax(x[n].to(LOW), -1),
        ),
    )
    print(
        f"\n{'edited operator':<28}{'us':>7}{'/ PyTorch region':>18}{'/ by hand':>12}{'/ by hand, 256':>16}"
    )
    for name, table, work, by_hand in edits:
        values: dict[str, list[float]] = {}
        for _ in range(rounds):
            for n, calls in ((8, 1000), (256, 30)):
                jobs = {"work": lambda: work(n)}  # noqa: B023  # run before the names move on
                ours = inside(lambda: autocast("cpu", LOW, casting=table), jobs, calls)["work"]  # noqa: B023
                theirs = inside(lambda: torch.autocast("cpu", LOW), jobs, calls)["work"]
                hand = microseconds(lambda: by_hand(n), calls)  # noqa: B023
                for key, value in (("us", ours), ("theirs", ours / theirs), ("hand", ours / hand)):
                    values.setdefault(f"{key} {n}", []).append(value)
        cells = [statistics.median(values[key]) for key in ("us 8", "theirs 8", "hand 8", "hand 256")]
        print(f"{name:<28}{cells[0]:>7.2f}{cells[1]:>18.2f}{cells[2]:>12.2f}{cells[3]:>16.2f}")


class Chain(torch.nn.Module):
    """The digits autoencoder of `preamp train`."""

    def __init__(self) -> None:
        super().__init__()
        pairs = itertools.pairwise((64, 128, 64, 32, 16, 32, 64, 128, 64))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in pairs)
        self.batch = torch.rand(128, 64)

    def forward(self) -> torch.Tensor:
        values = self.batch
        for layer in self.layers:
            values = torch.sigmoid(layer(values))
        return functional.mse_loss(values, self.batch)


class Transformer(torch.nn.Module):
    """Two layers of width 128 on 16 sequences of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 128)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = torch.nn.Linear(128, 64)
        self.mask = torch.nn.Transformer.generate_square_subsequent_mask(64)
        self.batch = torch.randint(0, 64, (16, 64))

    def forward(self) -> torch.Tensor:
        values = self.embed(self.batch)
        for block in self.blocks:
            values = block(values, self.mask)
        return functional.cross_entropy(self.head(values[:, :-1]).flatten(0, 1), self.batch[:, 1:].flatten())


def steps(make: Callable[[], torch.nn.Module], region: AbstractContextManager[Any], count: int) -> float:
    """Return the milliseconds of a training step, the median of some."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        with region:
            loss = model()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[count // 10 :]) * 1e3


def print_emulation(rounds: int) -> None:
    headings = f"{'float32 ms':>12}{'float16':>10}{'bfloat16':>10}{'e4m3':>8}{'e5m2':>8}"
    print(f"\n{'training step, emulated':<26}{headings}")
    dtypes = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    for name, make, count in (("digits autoencoder", Chain, 200), ("transformer", Transformer, 12)):
        plain: list[float] = []
        ratios: dict[torch.dtype, list[float]] = {dtype: [] for dtype in dtypes}
        regions = {dtype: autocast("cpu", dtype, emulate=True) for dtype in dtypes}
        for _ in range(max(rounds // 3, 3)):
            plain.append(steps(make, contextlib.nullcontext(), count))
            for dtype in dtypes:
                ratios[dtype].append(steps(make, regions[dtype], count) / plain[-1])
        medians = [statistics.median(ratios[dtype]) for dtype in dtypes]
        print(
            f"{name:<26}{statistics.median(plain):>12.2f}{medians[0]:>10.2f}{medians[1]:>10.2f}{medians[2]:>8.2f}"
            f"{medians[3]:>8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"autocast, torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread\n")
    print_operators(rounds)
    print_entering(rounds)
    print_edits(rounds)
    print_emulation(rounds)


if __name__ == "__main__":
    main()
