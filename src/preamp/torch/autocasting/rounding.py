"""Round float32 to a low precision, forward and backward, so that compilers do not drop it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from preamp.arrays.torch_compat import in_trace, mark_constant

MANTISSA_BITS = 23  # of float32


def rounded(x: Tensor, dtype: torch.dtype, by_casts: bool = False) -> Tensor:
    """Return what casting to a low precision and up to float32 gives, bit for bit, and round gradients, too.

    In eager code it is those two casts, and autograd records them. In code that is traced it is arithmetic in
    float32, because Inductor computes low precision in float32 and drops such a pair of casts.

    Args:
        x: a floating-point tensor of any shape.
        dtype: float16 or bfloat16.
        by_casts: whether it is two casts in graphs, too, as for a report, whose graphs Inductor does not
            compile.

    Returns:
        A float32 tensor of the same shape.
    """
    if by_casts or not is_compiling() or not in_trace():
        return x.to(dtype).float()
    if is_dynamo_compiling():
        _let_compiler_call()
    return _rounded_in_graph(x.float(), dtype)


def stored(x: Tensor, dtype: torch.dtype, by_casts: bool = False) -> Tensor:
    """Return x in a low precision, rounded even where a compiler goes on in float32; arguments as above."""
    return rounded(x, dtype, by_casts).to(dtype) if is_compiling() and in_trace() else x.to(dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return _round(x, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        ctx.dtype = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _rounded_in_graph(gradient, ctx.dtype), None

    @staticmethod
    def vmap(_: object, in_dims: tuple[int | None, None], x: Tensor, dtype: torch.dtype) -> Any:
        return _rounded_in_graph(x, dtype), in_dims[0]


def _rounded_in_graph(x: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = _Rounded.apply(x, dtype)  # type: ignore[no-untyped-call]
    return result


def _let_compiler_call() -> None:
    """Have the compiler put `_rounded_in_graph` into graphs as it is.

    It would trace an autograd function in a way that raises where warnings are errors.
    """
    torch.compiler.allow_in_graph(_rounded_in_graph)  # type: ignore[no-untyped-call]


mark_constant(_let_compiler_call)  # so it runs while the compiler traces, which has loaded what it needs


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round mantissas as integers, half to even, and subnormal numbers to whole steps."""
    low = torch.finfo(dtype)
    dropped = MANTISSA_BITS + round(math.log2(low.eps))
    bits, size = x.view(torch.int32), x.abs()
    half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    kept = ((bits + half) & -(1 << dropped)).view(torch.float32)
    if dtype is torch.float16:  # bfloat16 has float32's exponents
        step = low.smallest_normal * low.eps
        kept = torch.where(size < low.smallest_normal, (x * (1.0 / step)).round() * step, kept)
    beyond = low.max * (2 - low.eps / 2) / (2 - low.eps)  # half a step above the largest number
    return torch.where(size < beyond, kept, x * math.inf)  # NaN stays NaN
