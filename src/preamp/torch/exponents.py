"""How many entries of a tensor there are of each binary exponent, counted where the tensor lies.

This room counts and reads. It refuses to know whose values they are and when to look at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from preamp.exponents import FIELDS, ExponentHistogram

__all__ = ["count", "read"]

CHUNK = 2**18  # its fields fit a cache, and a large tensor needs no large copy


def count(tensor: Tensor) -> Tensor:
    """Return how many entries have which exponent field as a float32. Nothing is read to the host.

    The first bin holds zeros and what is smaller than the smallest normal float32, 2**-126; the last one
    holds inf, NaN and what no float32 can hold. Between them, bin b is that of the exponent b - 127. Complex
    entries count as two.

    Args:
        tensor: of any floating or complex dtype and layout; only the values that a sparse one stores count.

    Returns:
        Counts of shape [256], int64, on the tensor's device.
    """
    flat = _flat(tensor.detach())
    if flat.numel() <= CHUNK:
        return _count(flat)
    return reduce(Tensor.add_, map(_count, torch.split(flat, CHUNK)))


def read(
    counts: Sequence[Tensor], numbers: Sequence[Tensor] = ()
) -> tuple[list[ExponentHistogram], list[float]]:
    """Read counts to the host, all in one transfer.

    Args:
        counts: what `count` returned.
        numbers: scalars to read along.

    Returns:
        A histogram for each count, and the numbers.
    """
    parts = [*[number.to(torch.float64).view(torch.int64).view(1) for number in numbers], *counts]
    host = torch.cat([part.to(counts[0].device) for part in parts]).cpu()
    table = host[len(numbers) :].view(-1, FIELDS).tolist()
    return list(map(ExponentHistogram.of_fields, table)), host[: len(numbers)].view(torch.float64).tolist()


def _flat(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor along one dimension, without a copy where they lie densely."""
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


def _count(piece: Tensor) -> Tensor:
    fields = _fields(piece)
    if piece.is_cpu:
        return fields.bincount(minlength=FIELDS)
    one = torch.ones((), dtype=torch.int64, device=piece.device)  # bincount would wait for the largest
    zeros = torch.zeros(FIELDS, dtype=torch.int64, device=piece.device)
    return zeros.scatter_add_(0, fields.long(), one.expand_as(fields))


def _fields(piece: Tensor) -> Tensor:
    """Return the exponent fields as uint8. A cast to it keeps the last eight bits, and so not the sign."""
    if piece.dtype is torch.float64:
        wide = (piece.view(torch.int64) >> 52) & 0x7FF
        return (wide - (1023 - 127)).clamp(0, FIELDS - 1).to(torch.uint8)
    if piece.dtype is torch.bfloat16:
        return (piece.view(torch.int16) >> 7).to(torch.uint8)
    return (piece.float().view(torch.int32) >> 23).to(torch.uint8)
