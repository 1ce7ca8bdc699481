"""What a quantized tensor stands for, in PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from preamp.recipes import Quant, arithmetic

__all__ = ["quantize"]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _rotated(x: Tensor, matrix: list[list[float]]) -> Tensor:
    return (x @ torch.tensor(matrix, device=x.device)).bfloat16().float()


ARRAYS: Any = SimpleNamespace(
    where=torch.where,
    clip_=torch.clip_,
    floor_=torch.floor_,
    copysign=torch.copysign,
    isnan=torch.isnan,
    isfinite=torch.isfinite,
    bits=_bits,
    floats=lambda bits: bits.view(torch.float32),
    divided=torch.div,  # a number over a tensor by `/` is its reciprocal, rounded, times the number
    total=lambda bits: bits.sum(dtype=torch.int32),
    known_=lambda x, number: x.nan_to_num_(number),
    places=lambda x, count: torch.arange(count, dtype=torch.int32, device=x.device),
    bytes=lambda x, count: x.view(torch.uint8)[:count].float(),
    joined=torch.cat,
    amax=lambda x, axes: x.abs().amax(axes, keepdim=True),
    padded=lambda x, rows, columns: functional.pad(x, (0, columns, 0, rows)),
    rotated=_rotated,
)


def quantize(x: Tensor, quant: Quant, axis: int = -1, draw: int = 0) -> Tensor:
    """Return what a tensor stands for that is quantized.

    Args:
        x: a floating-point tensor. Its axes but one are taken for one, from the first to the last.
        quant: how it is quantized. One with a history takes the scale of this tensor.
        axis: the axis that a product sums over, along which blocks lie.
        draw: of stochastic rounding, which depends on this number and on x alone.

    Returns:
        A float32 tensor of the same shape.
    """
    moved = x.detach().float().movedim(axis, -1)
    matrix = moved.reshape(-1, moved.shape[-1])
    low: Tensor = arithmetic.quantized(ARRAYS, matrix, quant, draw).reshape(moved.shape)
    return low.movedim(-1, axis)
