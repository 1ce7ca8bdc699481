"""What `LayerwiseScale` costs: a training step with it in the time of one without. Reports; asserts nothing.

Run: python benchmarks/layerwise.py [--rounds 15]

Steps with and without alternate in one process; a number is the median of the rounds' ratios. Factors are at
work: the loss is so small that most layers are raised.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from preamp.torch import LayerwiseScale

NEVER = 10**9
FAINT = 2.0**-24


def dense() -> tuple[nn.Module, Tensor]:
    """Eight layers of 64 units: mostly Python and dispatch."""
    layers = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(100, 64)


def wide() -> tuple[nn.Module, Tensor]:
    """Four layers of 1024 units."""
    layers = [part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(128, 1024)


def convolutions() -> tuple[nn.Module, Tensor]:
    """Six convolutions of 32 channels on maps of 16 x 16."""
    layers = [part for _ in range(6) for part in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(16, 32, 16, 16)


def transformer() -> tuple[nn.Module, Tensor]:
    """Four encoder layers of width 256."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 64, 256)


def seconds(run: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def step(model: nn.Module, x: Tensor, backward: Callable[[Tensor], None]) -> None:
    model.zero_grad()
    backward(model(x).square().mean() * FAINT)


def measure(make: Callable[[], tuple[nn.Module, Tensor]], rounds: int) -> None:
    torch.manual_seed(0)
    model, x = make()
    plain = partial(step, model, x, Tensor.backward)
    layerwise = LayerwiseScale(model, every=NEVER)
    scaled = partial(step, model, x, layerwise.backward)
    for _ in range(2):
        scaled()

    def measured() -> None:
        layerwise.measure()
        scaled()

    times = max(2, int(0.1 / seconds(plain, 5)))
    found = [[seconds(run, times) for run in (plain, scaled, measured)] for _ in range(rounds)]
    ratios = [statistics.median(row[n] / row[0] for row in found) for n in (1, 2)]
    ms = 1e3 * statistics.median(row[0] for row in found)
    raised = sum(factor > 1.0 for factor in layerwise.factors.values())
    print(f"| {make.__doc__} | {raised} | {ms:.2g} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread")
    print("| network | layers raised | step, ms | with factors | with statistics |")
    print("| --- | --- | --- | --- | --- |")
    for make in (dense, wide, convolutions, transformer):
        measure(make, arguments.rounds)


if __name__ == "__main__":
    main()
