"""Record what a GPU computes under `torch.autocast`, to compare rehearsals on a CPU with.

Run, on a machine with a CUDA device: python -m tests.recorded.h200.record FOLDER

It calls all of tests/torch/operators.py in float16 and bfloat16 regions, on float32 inputs, on inputs in
that dtype ("low") and on float32 inputs times 300 ("large"). The dtypes of outputs and gradients, or the
error, go to operators.jsonl, the first 600 numbers of each to operators.npz. Inputs come from the CPU's
generator, so that every machine has the same. What lies here was recorded with torch 2.11.0+cu130 on an
NVIDIA H200, driver 580.159.04.

Recorded in the same hour, by programs that are not kept:
- products.jsonl, models.jsonl: float16 and bfloat16 matrix products beside float32 products of the same
  operands, and losses and gradient norms of small transformers.
- fp8.jsonl, fp8.npz (the bits of bfloat16): "mm.64.128.96.SCALE.WAY.FAST" is `torch._scaled_mm` of e4m3
  operands with one scale for each tensor or row. A generator with seed 128 makes x = randn(64, 128) *
  SCALE, then w = randn(96, 128) / 128**0.5, both to bfloat16, and x[0, 0] is multiplied by 50.
  "ao.RECIPE.False.1.0.NAME" is torchao 0.18's Float8Linear in bfloat16, the first 64 rows of y and dx,
  and dw. A generator with seed 3 makes weight = randn(192, 256) / 16, bias = randn(192) / 4, x =
  randn(128, 256), and the gradient of y, randn(128, 192) * 1e-3.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.torch import operators as data

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
NUMBERS = 600


def variants() -> Iterator[tuple[str, data.Call, torch.dtype, str]]:
    """Yield each call with a name, the region's dtype and what its inputs are."""
    for home in ("CALLS", "THROUGH"):
        for index, call in enumerate(getattr(data, home)):
            for name, low in HALVES.items():
                for given in ("float32", "low", "large"):
                    yield f"{home}.{index}.{call.name}.{name}.{given}", call, low, given


def arguments(call: data.Call, low: torch.dtype, given: str, device: str) -> tuple[Any, list[Tensor]]:
    """Return a call's arguments, and those of them that were made for it."""
    made: list[Tensor] = []

    def make(value: Any) -> Any:
        if isinstance(value, data.Input):
            tensor = value.make(len(made)) * (300.0 if given == "large" and value.kind == "x" else 1.0)
            made.append(tensor.to(low if given == "low" else torch.float32).to(device).requires_grad_())
            return made[-1]
        return value.to(device) if isinstance(value, Tensor) else value

    return tree_map(make, (call.arguments, call.options), is_leaf=lambda v: isinstance(v, data.Input)), made


def function_of(call: data.Call, device: str) -> Callable[..., Any]:
    """Return what is called, a module with weights from a seed."""
    if not isinstance(call.function, nn.Module):
        return call.function
    module, generator = copy.deepcopy(call.function), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.to(device)


def record(
    call: data.Call, low: torch.dtype, given: str, device: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the dtypes of outputs and of the gradients of their weighted sum, and the values."""
    (args, options), made = arguments(call, low, given, device)
    function = function_of(call, device)
    torch.manual_seed(0)
    with torch.autocast(device, low):
        outputs = [one for one in tree_leaves(function(*args, **options)) if isinstance(one, Tensor)]
    values: dict[str, Tensor] = {f"out{n}": one for n, one in enumerate(outputs)}
    fact: dict[str, Any] = {"out": [str(one.dtype)[6:] for one in outputs]}
    generator, total = torch.Generator().manual_seed(11), None
    for one in outputs:
        if one.requires_grad and one.is_floating_point():
            weighted = (one.float() * torch.randn(one.shape, generator=generator).to(device)).sum()
            total = weighted if total is None else total + weighted
    if total is not None:
        gradients = torch.autograd.grad(total, made, allow_unused=True)
        fact["grad"] = [None if one is None else str(one.dtype)[6:] for one in gradients]
        if given != "large":
            values |= {f"grad{n}": one for n, one in enumerate(gradients) if one is not None}
    return fact, values


def main(folder: Path, first: int = 0, device: str = "cuda") -> None:
    """Record all calls from one on; a call that ends the process is left out."""
    facts, arrays = folder / f"{first}.jsonl", {}
    todo = list(variants())
    with facts.open("w") as lines:
        for number, (key, call, low, given) in list(enumerate(todo))[first:]:
            (folder / "at").write_text(str(number))
            try:
                fact, values = record(call, low, given, device)
            except Exception as error:
                fact, values = (
                    {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"},
                    {},
                )
            lines.write(json.dumps({"key": key, **fact}) + "\n")
            lines.flush()
            for name, value in values.items():
                value = value.detach().cpu().resolve_conj().ravel()[:NUMBERS]
                value = value.float() if value.dtype is torch.bfloat16 else value
                arrays[f"{key}.{name}"] = value.numpy()
    np.savez_compressed(folder / f"{first}.npz", **arrays)
    (folder / "at").unlink()


if __name__ == "__main__":
    place, start = Path(sys.argv[1]), 0
    place.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 2:
        main(place, int(sys.argv[2]), *sys.argv[3:])
    else:
        while subprocess.run(
            [sys.executable, "-m", "tests.recorded.h200.record", str(place), str(start)]
        ).returncode:
            start = int((place / "at").read_text()) + 1
