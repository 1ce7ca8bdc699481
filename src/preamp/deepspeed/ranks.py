"""Keep ranks consistent: the same model at the start, gradients averaged before an update.

Gradients are averaged when all micro-steps of an update have been accumulated, in the dtype they were
accumulated in: float32 for half-precision parameters. An overflow on one rank is then non-finite on all, so
that all skip. A single process communicates nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from preamp.errors import UsageError
from preamp.torch.scaling.ranks import number_of_ranks

PORT = "29500"  # where DeepSpeed's rank 0 listens by default
BUCKET = 2**25  # entries that are averaged in one all-reduce
ABSENT, DENSE, SPARSE = range(3)


def rank() -> int:
    """Return the rank of this process, 0 if it is the only one."""
    return dist.get_rank() if number_of_ranks() > 1 else 0


def join(device: torch.device) -> None:
    """Join the other processes that a launcher started, unless that has been done.

    Args:
        device: of this rank's model; determines the communication backend.
    """
    if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ.setdefault("MASTER_PORT", PORT)
        dist.init_process_group(dist.get_default_backend_for_device(device))


@torch.no_grad()
def begin_alike(tensors: Sequence[Tensor], about: object) -> None:
    """Copy rank 0's tensors to all ranks.

    Args:
        tensors: a model's parameters and buffers.
        about: what else must be the same on all ranks; its `repr` is compared.

    Raises:
        UsageError: if the model, or `about`, differs on some rank.
    """
    if number_of_ranks() == 1:
        return
    mine = [about, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors)]
    everywhere: list[str] = [""] * number_of_ranks()
    dist.all_gather_object(everywhere, hashlib.sha256(repr(mine).encode()).hexdigest())
    others = [number for number, one in enumerate(everywhere) if one != everywhere[0]]
    if others:
        raise UsageError(
            f"the model or its configuration on ranks {others} differs from that on rank 0. Write the same "
            "model, optimizer and config on every rank; only the data may differ."
        )
    for tensor in tensors:
        sent = tensor.detach().contiguous()
        dist.broadcast(sent, src=0)
        tensor.copy_(sent)


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace each gradient by its mean over all ranks. A rank without one counts as zeros.

    Args:
        parameters: the same on all ranks, in the same order; without a gradient anywhere they stay so.

    Raises:
        UsageError: on every rank, for a gradient that is sparse on any.
    """
    if number_of_ranks() == 1 or not parameters:
        return
    here = [_kind(parameter.grad) for parameter in parameters]
    anywhere = torch.tensor(here, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    kinds = anywhere.tolist()
    if SPARSE in kinds:
        raise UsageError(
            f"the gradient of parameter {kinds.index(SPARSE)} is sparse, which is not averaged over ranks. "
            "Write Embedding(..., sparse=False)."
        )
    used = [parameter for parameter, kind in zip(parameters, kinds, strict=True) if kind != ABSENT]
    for bucket in _buckets(_gradient(parameter) for parameter in used):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(number_of_ranks())
        dist.all_reduce(flat)
        for gradient, mean in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return ABSENT
    return DENSE if gradient.layout is torch.strided else SPARSE


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbours of one dtype and device, up to `BUCKET` entries or one gradient."""
    bucket: list[Tensor] = []
    entries = 0
    for gradient in gradients:
        alike = bucket and (bucket[0].dtype, bucket[0].device) == (gradient.dtype, gradient.device)
        if bucket and not (alike and entries + gradient.numel() <= BUCKET):
            yield bucket
            bucket, entries = [], 0
        bucket.append(gradient)
        entries += gradient.numel()
    if bucket:
        yield bucket
