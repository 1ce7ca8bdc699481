"""What `LayerwiseScale` adds to the time of forward and backward. On one thread.

Run: python benchmarks/layerwise.py [--device cuda] [--quick]. Reports; asserts nothing.

The loss is so small that most layers have a factor above 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from rows import Area, Options, Row, main
from torch import Tensor, nn

from preamp.torch import LayerwiseScale

WITHOUT = "without LayerwiseScale"
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


def step(model: nn.Module, x: Tensor, backward: Callable[[Tensor], None]) -> None:
    model.zero_grad()
    backward(model(x).square().mean() * FAINT)


def measure_network(make: Callable[[], tuple[nn.Module, Tensor]], options: Options) -> Iterator[Row]:
    """Yield a row for passes with factors, and one for passes that take statistics."""
    torch.manual_seed(0)
    model, x = make()
    model, x = model.to(options.device), x.to(options.device)
    layerwise = LayerwiseScale(model, every=NEVER)
    scaled = partial(step, model, x, layerwise.backward)
    for _ in range(2):
        scaled()

    def measured() -> None:
        layerwise.measure()
        scaled()

    works = {
        WITHOUT: partial(step, model, x, Tensor.backward),
        "with factors": scaled,
        "with statistics": measured,
    }
    times = options.interleaved(works)
    raised = sum(factor > 1.0 for factor in layerwise.factors.values())
    network = (make.__doc__ or "").rstrip(".")
    yield from area(options).timed(
        f"{network}; {raised} layers raised", times, "with factors", floors=[WITHOUT]
    )
    yield from area(options).timed(
        f"{network}; a pass that takes statistics", times, "with statistics", floors=[WITHOUT]
    )


def area(options: Options) -> Area:
    return Area("torch LayerwiseScale", options.device)


def measure(options: Options) -> Iterator[Row]:
    """Yield two rows for each network."""
    torch.set_num_threads(1)
    for make in (dense,) if options.quick else (dense, wide, convolutions, transformer):
        yield from measure_network(make, options)


if __name__ == "__main__":
    main(measure, __doc__)
