"""What the overflow check and scaler cost, compared with DeepSpeed's and with reading memory. On one thread.

Run: python benchmarks/deepspeed_overflow.py [--device cuda] [--quick]. Reports; asserts nothing.

"The document's sum" is the check in DeepSpeed's documentation, `float(x.float().sum())`, for which finite
gradients with a large sum count as an overflow. Every check ends in a Python bool.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler as Original
from rows import Area, Options, Row, main
from timing import Work

from preamp.deepspeed import DynamicLossScaler

DEEPSPEED, SUM, MEMORY = "deepspeed", "the document's sum", "reading the memory once"
SIZES: list[tuple[int, ...]] = [(4096, 1024), (1024,)] * 12 + [(256,)] * 137
SETTINGS: dict[str, Any] = {
    "init_scale": 2.0**16,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
}


def by_sum(x: torch.Tensor) -> bool:
    total = float(x.float().sum())
    return math.isinf(total) or total != total


def memory(size: int, dtype: torch.dtype, device: str) -> Work:
    """Return a work that reads the bytes of `size` elements and does next to nothing with them."""
    flat = torch.zeros(size * dtype.itemsize // 4, device=device)
    return lambda: torch.dot(flat, flat).item()


def checks_of_one(options: Options, area: Area) -> Iterator[Row]:
    """Yield the rows for the check of one large gradient."""
    size = 1024 if options.quick else 8_388_608
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(size, device=options.device).to(dtype)
        works: dict[str, Work] = {
            "preamp": lambda x=x: bool(DynamicLossScaler._has_inf_or_nan(x)),
            DEEPSPEED: lambda x=x: bool(Original._has_inf_or_nan(x)),
            SUM: lambda x=x: by_sum(x),
            MEMORY: memory(size, dtype, options.device),
        }
        times, what = options.interleaved(works), f"the check of {size / 1e6:.1f}M elements, {_name(dtype)}"
        yield from area.timed(what, times, "preamp", [DEEPSPEED, SUM], [MEMORY])


def checks_of_many(options: Options, area: Area) -> Iterator[Row]:
    """Yield the rows for the check of all gradients of a model, large and small."""
    sizes = SIZES[24:] if options.quick else SIZES
    numbers = sum(math.prod(size) for size in sizes)
    for dtype in (torch.float16, torch.float32):
        parameters = [
            torch.nn.Parameter(torch.zeros(size, device=options.device, dtype=dtype)) for size in sizes
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        gradients, scaler = [parameter.grad for parameter in parameters], DynamicLossScaler(**SETTINGS)
        works: dict[str, Work] = {
            "preamp": lambda p=parameters, s=scaler: s.has_overflow_serial(p),
            DEEPSPEED: lambda g=gradients: any(bool(Original._has_inf_or_nan(one)) for one in g),
            SUM: lambda g=gradients: any(by_sum(one) for one in g),
            MEMORY: memory(numbers, dtype, options.device),
        }
        what = f"the check of {len(sizes)} gradients, {numbers / 1e6:.1f}M elements, {_name(dtype)}"
        yield from area.timed(what, options.interleaved(works), "preamp", [DEEPSPEED, SUM], [MEMORY])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def updates(options: Options, area: Area) -> Iterator[Row]:
    """Yield the rows for `update_scale`. A step that overflows is logged."""
    for label, overflow in (("a clean step", False), ("an overflow", True)):
        still = {**SETTINGS, "raise_error_at_min_scale": False}
        theirs, ours = Original(**still), DynamicLossScaler(**still)
        works: dict[str, Work] = {
            "preamp": lambda s=ours, o=overflow: s.update_scale(o),
            DEEPSPEED: lambda s=theirs, o=overflow: s.update_scale(o),
        }
        times = options.interleaved(works)
        yield from area.timed(f"update_scale after {label}", times, "preamp", [DEEPSPEED], unit="µs")


def measure(options: Options) -> Iterator[Row]:
    """Yield all rows."""
    torch.set_num_threads(1)
    logging.getLogger("preamp.deepspeed").addHandler(logging.NullHandler())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.ops.__compatible_ops__ = {}  # or it compiles one for its all-reduce
    deepspeed.init_distributed("gloo", verbose=False)  # its scaler asks for its rank
    area = Area("deepspeed", options.device)
    for part in (checks_of_one, checks_of_many, updates):
        yield from part(options, area)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(measure, __doc__)
