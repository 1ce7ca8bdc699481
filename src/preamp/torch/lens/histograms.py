"""Count the entries of a tensor by binary exponent, and find its extremes, on its own device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from preamp.arrays.torch_devices import widest
from preamp.record.exponents import FIELDS, ExponentHistogram

INFINITY = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}
CHUNK = 2**18  # its fields fit a cache, and a large tensor needs no large copy


class Counts(NamedTuple):
    """The counts of a tensor, on its device.

    Attributes:
        fields: entries per exponent field of a float32, of shape [256], int64. The first bin holds zeros and
            values smaller than the smallest normal float32, 2**-126; the last one holds inf, NaN and values
            too large for a float32. Between them, bin b is that of the exponent b - 127. Complex entries
            count as two.
        nans: the number of NaN entries, of shape [], int64.
        extremes: of shape [2]: the smallest magnitude other than 0, inf where there is none, and the largest
            finite magnitude. As float64 of float64 tensors, otherwise as float32.
    """

    fields: Tensor
    nans: Tensor
    extremes: Tensor


class Measured(NamedTuple):
    """The counts of a tensor, on the host.

    Attributes:
        histogram: values by their exponents.
        nans: the number of NaN values.
        smallest: the smallest magnitude other than 0; None where all are 0 or not finite.
        largest: the largest finite magnitude; None likewise.
    """

    histogram: ExponentHistogram
    nans: int
    smallest: float | None
    largest: float | None


def count(tensor: Tensor) -> Counts:
    """Count the entries of a tensor by their exponents. Nothing is read to the host.

    Args:
        tensor: of any floating-point or complex dtype and layout; of a sparse one, the stored values.
    """
    flat = _flat(tensor.detach())
    if flat.numel() <= CHUNK:
        return _count(flat)
    return reduce(add, map(_count, torch.split(flat, CHUNK)))


def add(one: Counts, other: Counts) -> Counts:
    """Return the counts of two tensors together."""
    (low, high), (other_low, other_high) = one.extremes, other.extremes
    extremes = torch.stack([torch.minimum(low, other_low), torch.maximum(high, other_high)])
    return Counts(one.fields + other.fields, one.nans + other.nans, extremes)


def read(counts: Sequence[Counts], numbers: Sequence[Tensor] = ()) -> tuple[list[Measured], list[float]]:
    """Read counts and scalars to the host, all in one transfer."""
    device = counts[0].fields.device
    wide = widest(device)
    bits, _ = INFINITY[wide]
    floating = [number.view(-1).to(device, wide) for number in (*numbers, *(c.extremes for c in counts))]
    integers = [part.view(-1).to(device) for c in counts for part in (c.fields, c.nans)]
    host = torch.cat([*(part.view(bits).long() for part in floating), *integers]).cpu()
    split = len(numbers) + 2 * len(counts)
    floats = host[:split].to(bits).view(wide).tolist()
    table = host[split:].view(-1, FIELDS + 1).tolist()
    pairs = zip(floats[len(numbers) :: 2], floats[len(numbers) + 1 :: 2], strict=True)
    measured = [_measured(row, *pair) for row, pair in zip(table, pairs, strict=True)]
    return measured, floats[: len(numbers)]


def _measured(row: list[int], smallest: float, largest: float) -> Measured:
    histogram = ExponentHistogram.of_fields(row[:FIELDS])
    if smallest == math.inf:
        return Measured(histogram, row[FIELDS], None, None)
    return Measured(histogram, row[FIELDS], smallest, largest)


def _flat(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor along one dimension, without a copy if they are dense in memory."""
    if hasattr(tensor, "to_local"):  # a DTensor
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.reshape(-1)


def _count(piece: Tensor) -> Counts:
    wide = piece if piece.dtype in INFINITY else piece.float()
    histogram = _histogram(_fields(wide))
    if not wide.numel():
        extremes = torch.tensor([math.inf, 0.0], dtype=wide.dtype, device=wide.device)
        return Counts(histogram, torch.zeros_like(histogram[0]), extremes)
    integer, infinity = INFINITY[wide.dtype]
    most = torch.iinfo(integer).max
    # The bits of magnitudes, as integers, are in the same order: finite ones, then inf, then NaN. The wrap-
    # around of integers replaces comparisons of whole tensors, which are several times slower.
    bits = wide.view(integer) & most
    beyond = bits + (most - infinity)  # only NaN wraps around to below 0
    nans = -(beyond >> (8 * wide.itemsize - 1)).sum(dtype=integer).to(torch.int64)
    floor = most - infinity + 1
    largest = beyond.add_(1).amax().clamp(min=floor) - floor  # now inf is below 0, too
    smallest = bits.sub_(1).bitwise_and_(most).amin().clamp(max=infinity - 1) + 1  # 0 has become the largest
    extremes = torch.stack([smallest, largest])
    return Counts(histogram, nans, extremes.view(wide.dtype))


def _histogram(fields: Tensor) -> Tensor:
    if fields.is_cpu:
        return fields.bincount(minlength=FIELDS)
    one = torch.ones((), dtype=torch.int64, device=fields.device)  # bincount would synchronize for its size
    zeros = torch.zeros(FIELDS, dtype=torch.int64, device=fields.device)
    return zeros.scatter_add_(0, fields.long(), one.expand_as(fields))


def _fields(wide: Tensor) -> Tensor:
    """Return the exponent fields as uint8; the cast keeps the last eight bits, which drops the sign."""
    if wide.dtype is torch.float64:
        field = (wide.view(torch.int64) >> 52) & 0x7FF
        return (field - (1023 - 127)).clamp(0, FIELDS - 1).to(torch.uint8)
    return (wide.view(torch.int32) >> 23).to(torch.uint8)
