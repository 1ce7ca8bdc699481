"""What autocast costs, compared with PyTorch's own: operators, regions, edits, rehearsal. On one thread.

Run: python benchmarks/torch_autocast.py [--device cuda] [--quick]. Reports; asserts nothing.

Small tensors (8 x 8) show what Python and the dispatcher take; with larger ones that would not be visible.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from rows import Area, Options, Row, main
from timing import Spread, Times, Work, spread
from torch import nn
from torch.nn import functional

from preamp import casting, recipes
from preamp.torch import autocast

Region = Callable[[], AbstractContextManager[Any]]
LOW = torch.bfloat16
CALLS, FEW = 1000, 30
PYTORCH, ALONE = "torch.autocast", "torch.autocast before the first of ours"
FLOAT32, BY_HAND = "float32", "casts by hand"
REHEARSED = (torch.float16, torch.bfloat16)
RECIPES = recipes.FLOAT8_CURRENT, recipes.MXFP8, recipes.NVFP4


def repeated(region: Region, work: Work, calls: int = CALLS) -> Work:
    """Return a work that calls another many times in one region."""

    def many() -> None:
        with region():
            for _ in range(calls):
                work()

    return many


def operators(device: str, size: int = 8) -> dict[str, Work]:
    """Return operators of all kinds, by name."""
    x = torch.randn(size, size, device=device)
    low = x.to(LOW)
    images = torch.randn(1, 4, size, size, device=device)
    weight, bias, kernel = (
        nn.Parameter(torch.randn(shape, device=device)) for shape in ((size, size), (size,), (4, 4, 3, 3))
    )
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


def of_operators(options: Options, area: Area) -> Iterator[Row]:
    """Compare operators in both regions, and with PyTorch's region before preamp's was first entered."""
    device, calls = options.device, FEW if options.quick else CALLS
    stock, ours = partial(torch.autocast, device, LOW), partial(autocast, device, LOW)
    works = operators(device)
    before = options.interleaved({name: repeated(stock, work, calls) for name, work in works.items()})
    for name, work in works.items():
        pair = {"preamp": repeated(ours, work, calls), PYTORCH: repeated(stock, work, calls)}
        times, what = options.interleaved(pair), f"{name}, 8 x 8"
        yield from area.timed(what, times, "preamp", [PYTORCH], unit="µs", calls=calls)
        taken = Spread(*(value * 1e6 / calls for value in spread(times["preamp"])))
        alone = Spread(*(value * 1e6 / calls for value in spread(before[name])))
        yield area.over(what, ALONE, taken, alone, "µs")


def of_regions(options: Options, area: Area) -> Iterator[Row]:
    """Compare entering and leaving a region, a new one and the same one again."""
    device, table = options.device, casting.DEFAULT.float32("mm")
    makers: dict[str, Region] = {
        PYTORCH: partial(torch.autocast, device, LOW),
        "a region": partial(autocast, device, LOW),
        "a region with one edit": partial(autocast, device, LOW, casting=table),
        "a region that rehearses": partial(autocast, device, LOW, emulate=True),
    }
    new = {name: partial(enter_new, make) for name, make in makers.items()}
    again = {name: partial(enter, make()) for name, make in makers.items()}
    for way, works in (("new", new), ("again", again)):
        times = options.interleaved(works)
        name, *costly = list(makers)[1:]
        yield from area.timed(f"entering and leaving {name}, {way}", times, name, [PYTORCH], unit="µs")
        for name in costly:
            yield from area.timed(
                f"entering and leaving {name}, {way}", times, name, floors=[PYTORCH], unit="µs"
            )


def enter_new(make: Region) -> None:
    with make():
        pass


def enter(region: AbstractContextManager[Any]) -> None:
    with region:
        pass


def of_edits(options: Options, area: Area) -> Iterator[Row]:
    """Compare edited operators with what PyTorch's region does with them, and with casts by hand."""
    default, device = casting.DEFAULT, options.device
    for size, calls in ((8, FEW if options.quick else CALLS), (256, FEW)):
        x = torch.randn(size, size, device=device)
        low = x.to(LOW)
        edits: dict[str, tuple[casting.Casting, Work, Work]] = {
            "float32('mm') of float32": (default.float32("mm"), lambda x=x: x.mm(x), lambda x=x: x.mm(x)),
            "float32('mm') of bfloat16": (
                default.float32("mm"),
                lambda x=low: x.mm(x),
                lambda x=low: x.float().mm(x.float()),
            ),
            "untouched('mm')": (default.untouched("mm"), lambda x=x: x.mm(x), lambda x=x: x.mm(x)),
            "lower('softmax')": (
                default.lower("softmax"),
                lambda x=x: x.softmax(-1),
                lambda x=x: x.to(LOW).softmax(-1),
            ),
            "x + x in a region with float32('mm')": (
                default.float32("mm"),
                lambda x=x: x + x,
                lambda x=x: x + x,
            ),
            "x.add_(0) in a region with float32('mm')": (
                default.float32("mm"),
                lambda x=x: x.add_(0.0),
                lambda x=x: x.add_(0.0),
            ),
        }
        for name, (table, work, by_hand) in edits.items():
            works = {
                "preamp": repeated(partial(autocast, device, LOW, casting=table), work, calls),
                PYTORCH: repeated(partial(torch.autocast, device, LOW), work, calls),
                BY_HAND: repeated(nullcontext, by_hand, calls),
            }
            times, what = options.interleaved(works), f"{name}, {size} x {size}"
            yield from area.timed(what, times, "preamp", [BY_HAND], [PYTORCH], "µs", calls)


class Block(nn.Module):
    """A transformer block of width 256 on 8 sequences of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(2))
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.register_buffer("batch", torch.randn(8, 64, 256))

    def forward(self, in_float32: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the block's result. `in_float32` calls the products of attention."""
        x = self.batch
        q, k, v = (
            part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        weights = in_float32(torch.matmul, q, k.transpose(-1, -2)).div(8).softmax(-1)
        x = x + self.out(in_float32(torch.matmul, weights, v).transpose(1, 2).flatten(2))
        return x + in_float32(self.down, functional.gelu(self.up(self.norms[1](x))))


def of_compiled(options: Options, area: Area) -> Iterator[Row]:
    """Compare a compiled block in a region with edits with one that has casts by hand."""
    device = options.device
    torch.manual_seed(0)
    block = Block().to(device)
    table = casting.DEFAULT.float32("matmul").module("down", "float32")

    def as_it_is(function: Callable[..., torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
        return function(*values)

    def cast(function: Callable[..., torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, enabled=False):
            return function(*(value.float() for value in values))

    def edited() -> torch.Tensor:
        with autocast(device, LOW, casting=table, model=block):
            return block(as_it_is)

    def by_hand() -> torch.Tensor:
        with torch.autocast(device, LOW):
            return block(cast)

    def forward(compiled: Work) -> Work:
        def run() -> None:
            with torch.no_grad():
                compiled()

        return run

    def training(compiled: Callable[[], torch.Tensor]) -> Work:
        def run() -> None:
            block.zero_grad(set_to_none=True)
            compiled().float().square().mean().backward()

        return run

    for what, way in (("forward", forward), ("forward and backward", training)):
        functions = {"preamp": edited, BY_HAND: by_hand}
        works = {name: way(torch.compile(one, fullgraph=True)) for name, one in functions.items()}
        times = options.interleaved(works)
        yield from area.timed(f"{what} of a compiled block with edits", times, "preamp", [BY_HAND], unit="ms")


class Chain(nn.Module):
    """The digits autoencoder of `preamp train`."""

    def __init__(self) -> None:
        super().__init__()
        pairs = itertools.pairwise((64, 128, 64, 32, 16, 32, 64, 128, 64))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.register_buffer("batch", torch.rand(128, 64))

    def forward(self) -> torch.Tensor:
        values = self.batch
        for layer in self.layers:
            values = torch.sigmoid(layer(values))
        return functional.mse_loss(values, self.batch)


class Transformer(nn.Module):
    """Two layers of width 256 on 16 sequences of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(256, 64)
        mask = nn.Transformer.generate_square_subsequent_mask(64)
        self.register_buffer("mask", mask)
        self.register_buffer("batch", torch.randint(0, 64, (16, 64)))

    def forward(self) -> torch.Tensor:
        values = self.embed(self.batch)
        for block in self.blocks:
            values = block(values, self.mask)
        return functional.cross_entropy(self.head(values[:, :-1]).flatten(0, 1), self.batch[:, 1:].flatten())


class Training:
    """A model that is trained in a region."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        region: AbstractContextManager[Any],
        device: str,
        compiled: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.region = make().to(device), region
        self.call = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)

    def step(self) -> None:
        with self.region:
            loss = self.call()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def of_rehearsals(options: Options, area: Area) -> Iterator[Row]:
    """Compare training steps in rehearsals with those in float32."""
    device = options.device
    models = (
        [(Chain, False)] if options.quick else [(Chain, False), (Transformer, False), (Transformer, True)]
    )
    for make, compiled in models:
        regions = {
            f"emulate=True, {str(dtype).removeprefix('torch.')}": autocast(device, dtype, emulate=True)
            for dtype in REHEARSED
        }
        if make is Transformer:
            regions |= {f"recipe={recipe.name}": autocast(device, recipe=recipe) for recipe in RECIPES}
        works = {name: Training(make, region, device, compiled).step for name, region in regions.items()}
        works[FLOAT32] = Training(make, nullcontext(), device, compiled).step
        times: Times = options.interleaved(works)
        for name in regions:
            model = (make.__doc__ or "").rstrip(".")
            step = "a compiled training step" if compiled else "a training step"
            yield from area.timed(f"{step} with {name}: {model}", times, name, floors=[FLOAT32])


def measure(options: Options) -> Iterator[Row]:
    """Yield all rows. Operators come first: they are compared with PyTorch's before ours is first entered."""
    torch.set_num_threads(1)
    area = Area("torch autocast", options.device)
    for part in (of_operators, of_regions, of_edits, of_compiled, of_rehearsals):
        yield from part(options, area)


if __name__ == "__main__":
    main(measure, __doc__)
