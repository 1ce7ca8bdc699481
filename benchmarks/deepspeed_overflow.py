"""What DeepSpeed's overflow check and scaler cost beside ours. Reports; asserts nothing.

Run: python benchmarks/deepspeed_overflow.py [--rounds 15] [--device cpu] [--threads 1]

All ways are interleaved in one process; a ratio is the median of the rounds' ratios. "sum" is the check that
the document shows, `float(x.float().sum())`. Every check ends in a Python bool.
"""

from __future__ import annotations

import argparse
import logging
import math
import platform
import statistics
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler as Original
from torch_scaler import interleaved, ratio

from preamp.deepspeed import DynamicLossScaler

SIZE = 8_388_608
SETTINGS: dict[str, Any] = {
    "init_scale": 2.0**16,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
}
Works = dict[str, Callable[[], object]]


def by_sum(x: torch.Tensor) -> bool:
    """Check as the document does; finite numbers with a large sum count as an overflow."""
    total = float(x.float().sum())
    return math.isinf(total) or total != total


def row(label: str, times: dict[str, list[float]], unit: float) -> None:
    """Print the median times, and ours over each of the others."""
    cells = [f"{name} {unit * statistics.median(values):.2f}" for name, values in times.items()]
    cells += [f"ours/{name} {ratio(times, 'ours', name):.3f}" for name in times if name != "ours"]
    print(f"{label:34} " + "  ".join(f"{cell:24}" for cell in cells))


def report_one(device: str, rounds: int) -> None:
    """Print the check of one large gradient."""
    print(f"\none gradient of {SIZE / 1e6:.1f}M numbers, ms")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(SIZE, device=device).to(dtype)
        works: Works = {
            "sum": lambda x=x: by_sum(x),
            "deepspeed": lambda x=x: bool(Original._has_inf_or_nan(x)),
            "ours": lambda x=x: bool(DynamicLossScaler._has_inf_or_nan(x)),
        }
        row(str(dtype), interleaved(works, rounds, device), 1e3)


def report_many(device: str, rounds: int) -> None:
    """Print the check of the gradients of a model, large and small ones."""
    sizes = [(4096, 1024), (1024,)] * 12 + [(256,)] * 137
    print(f"\n{len(sizes)} gradients, {sum(math.prod(size) for size in sizes) / 1e6:.1f}M numbers, ms")
    for dtype in (torch.float16, torch.float32):
        parameters = [torch.nn.Parameter(torch.zeros(size, device=device, dtype=dtype)) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        scaler = DynamicLossScaler(**SETTINGS)
        works: Works = {
            "sum": lambda p=parameters: any(by_sum(one.grad) for one in p),
            "deepspeed": lambda p=parameters: any(bool(Original._has_inf_or_nan(one.grad)) for one in p),
            "ours": lambda p=parameters, s=scaler: s.has_overflow_serial(p),
        }
        row(str(dtype), interleaved(works, rounds, device), 1e3)


def report_update(rounds: int) -> None:
    """Print what moving the scale costs, and a step that is skipped and logged."""
    print("\nupdate_scale, us")
    for label, overflow in (("clean step", False), ("overflow", True)):
        still = {**SETTINGS, "raise_error_at_min_scale": False}
        theirs, ours = Original(**still), DynamicLossScaler(**still)
        works: Works = {
            "deepspeed": lambda s=theirs, o=overflow: s.update_scale(o),
            "ours": lambda s=ours, o=overflow: s.update_scale(o),
        }
        row(label, interleaved(works, rounds, "cpu", repeat=200), 1e6)


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("preamp.deepspeed").addHandler(logging.NullHandler())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.ops.__compatible_ops__ = {}  # or it compiles one for its all-reduce
    deepspeed.init_distributed("gloo", verbose=False)  # its scaler asks for its rank
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(
        f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, {name}, "
        f"{options.threads} threads, {options.rounds} rounds"
    )
    report_one(options.device, options.rounds)
    report_many(options.device, options.rounds)
    report_update(options.rounds)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
