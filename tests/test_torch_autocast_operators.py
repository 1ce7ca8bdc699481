"""Every operator that autocast's document lists and every one that the release registers, beside our tables.

CUDA's operators run on fake tensors: dispatcher and casts are the real ones, only the numbers are missing.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from itertools import count, cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from preamp import UsageError, casting
from preamp.casting import RULES, Casting
from preamp.torch import autocast

from .torch_operators import CALLS, DIFFERENCES, DOCUMENT, REGISTERED_AS, Call, Input, aten, p, x

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*deprecated:UserWarning")
TABLES = {"cpu": casting.CPU, "cuda": casting.CUDA}
MAKERS = {"theirs": torch.autocast, "ours": autocast}
FLOAT, HALVES = torch.float32, [torch.float16, torch.bfloat16]
WITHOUT_FAKE = ["cudnn_convolution", "cudnn_convolution_transpose", "_thnn_fused_gru_cell", "grid_sampler_2d"]
devices = pytest.mark.parametrize("device", TABLES)
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
halves = pytest.mark.parametrize("low", HALVES)
each_call = pytest.mark.parametrize("call", CALLS, ids=repr)


class Kernels(TorchDispatchMode):
    """Stands in for kernels that have no fake: one tensor like the first, where all have the same dtype."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in [getattr(aten, name).default for name in WITHOUT_FAKE]:
            return function(*args, **(kwargs or {}))
        if len({value.dtype for value in args if isinstance(value, Tensor)}) > 1:
            raise RuntimeError("The kernel takes one dtype.")
        results = [torch.empty_like(args[0]) for _ in function._schema.returns]
        return tuple(results) if len(results) > 1 else results[0]


@contextmanager
def machine(device: str) -> Iterator[None]:
    """Be a machine with a device: for CUDA, one of fake tensors."""
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
            stack.enter_context(FakeTensorMode())
            stack.enter_context(Kernels())
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            available = "amp_definitely_not_available"
            stack.enter_context(patch.object(torch.cuda.amp.common, available, lambda: False))
            stack.enter_context(patch.object(torch.cuda, "is_bf16_supported", lambda: True))
        yield


def given(call: Call, device: str, *dtypes: torch.dtype, requires_grad: bool = False) -> Any:
    """Return the arguments of a call; its floating-point tensors have these dtypes, in turns."""
    seeds, turns = count(), cycle(dtypes)

    def tensor(value: Any) -> Any:
        if not isinstance(value, (Input, Tensor)):
            return value
        dtype = next(turns) if isinstance(value, Input) else value.dtype
        if device == "cuda":
            return torch.empty(value.shape, dtype=dtype, device=device)
        if isinstance(value, Tensor):
            return value
        made = value.make(next(seeds))
        exact = made if dtype.is_floating_point or dtype.is_complex else (4 * made).round()
        return exact.to(dtype).requires_grad_(requires_grad)

    return tree_map(tensor, (call.arguments, call.options), is_leaf=lambda value: isinstance(value, Input))


def contents(result: Any) -> Any:
    """Return dtype, shape and bits of each tensor of a result; fake ones have no bits."""
    found = [value.detach() for value in tree_leaves(result) if isinstance(value, Tensor)]
    bits = [None if t.is_cuda else t.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist() for t in found]
    return [(str(t.dtype), tuple(t.shape), some) for t, some in zip(found, bits, strict=True)]


def outcome(function: Callable[..., Any], values: Any) -> Any:
    """Return what a call gives, as plain data: its tensors, or its error."""
    arguments, options = values
    try:
        return contents(function(*arguments, **options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def cast(values: Any, rule: str, low: torch.dtype) -> Any:
    """Return values as a rule has them."""
    dtypes = [value.dtype for value in tree_leaves(values) if is_eligible(value)]
    widest = FLOAT if FLOAT in dtypes or not dtypes else dtypes[0]
    to = {"lower": low, "float32": FLOAT, "widest": widest}.get(rule)
    return tree_map(lambda value: value.to(to) if to and is_eligible(value) else value, values)


def rule_of(device: str, name: str) -> str:
    """Return the rule of a call in the device's table."""
    rules = TABLES[device].rules
    return rules.get(name) or rules.get(REGISTERED_AS.get(name, ""), "untouched")


def mixes(low: torch.dtype) -> list[tuple[torch.dtype, ...]]:
    return [(FLOAT,), (low,), (low, FLOAT), (FLOAT, low)]


@cache
def fitting(make: Any, device: str, call: Call) -> set[str]:
    """Return the rules that tell what autocast does with a call, in all precisions and mixtures of them."""
    rules = set(RULES)
    with machine(device):
        for low in HALVES:
            for dtypes in mixes(low):
                values = given(call, device, *dtypes)
                with make(device, low):
                    got = outcome(call.function, values)
                rules &= {rule for rule in RULES if got == predicted(call, rule, values, low)} | (
                    {"refuse"} if isinstance(got, str) and got.startswith("RuntimeError") else set()
                )
    return rules


def predicted(call: Call, rule: str, values: Any, low: torch.dtype) -> Any:
    """Return what a call gives under a rule: what it gives without autocast on inputs that were cast by hand."""
    return None if rule == "refuse" else outcome(call.function, cast(values, rule, low))


if __name__ == "__main__":
    pass
