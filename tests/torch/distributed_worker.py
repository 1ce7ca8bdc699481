"""One rank of several: a process of its own that trains as it is told.

One JSON request a line on stdin, one JSON answer a line on stdout; every rank gets the same requests. What is
planted is planted on one rank, in step `OVERFLOW`, after all communication of gradients.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import preamp.torch
from preamp.errors import PolicyError
from tests.torch import switches
from tests.torch.distributed_training import (
    BATCH,
    OVERFLOW,
    STEPS,
    Seen,
    Training,
    backpropagate,
    batch,
    entries,
    net,
    spoil,
)

TIMEOUT = timedelta(seconds=20)  # of a collective that not every rank calls


class Lacking(Exception):
    """What this release of PyTorch cannot do."""


def _shard(module: nn.Module, **how: Any) -> None:
    """Shard a module by FSDP2, to be trained on a CPU."""
    if torch.__version__ < (2, 9):  # 2.6 raises; 2.8 takes the sum of gradients for their mean
        raise Lacking("FSDP2 does not train on CPUs before torch 2.9")
    fully_shard(module, **how)


def _here() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _planter(training: Training, on: int | None = -1, name: str = "") -> Callable[[], None]:
    """Return what makes a gradient of one rank overflow: the first that has an entry there, or that one."""

    def plant() -> None:
        rank, ranks = _here()
        if on is not None and rank == on % ranks:
            spoil(next(p.grad for n, p in training.named.items() if name in n and entries(p.grad)))

    return plant


def ddp(*, first_listens: bool = False, **how: Any) -> Seen:
    """DDP. The loss of the last rank overflows.

    Args:
        first_listens: have the first rank hear of every step, and let the others read nothing, as if the
            CPU were an accelerator.
        how: for `Training`.
    """
    rank, ranks = _here()
    if first_listens and rank == 0:
        how["on_step"] = lambda step: None
    training = Training(net(), **how)
    training.model = DistributedDataParallel(training.model)

    def backward(step: int) -> None:
        overflows = rank == ranks - 1 and step == OVERFLOW
        backpropagate(training, step, rank, ranks, factor=math.inf if overflows else 1.0)

    steps: list[int] = []
    training.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    with switches.reads_are_free(not first_listens):
        return {**training.run(backward), "stepped": len(steps)}


def fsdp2(
    *,
    mesh: list[int] | None = None,
    small: bool = False,
    plain: tuple[str, ...] = (),
    planted: str = "",
    planted_on: int = -1,
    **how: Any,
) -> Seen:
    """FSDP2.

    Args:
        mesh: the shape of one mesh for all layers; without it each layer has its own.
        small: whether the net is so small that only the first rank holds something of it.
        plain: parameters that are not sharded; each rank has a copy.
        planted: whose gradient overflows.
        planted_on: the rank on which it does.
        how: for `Training`.
    """
    model = nn.Sequential(nn.Linear(3, 1)) if small else net()
    copied = [model.get_parameter(name) for name in plain]
    names = ("copies", "shards")[-len(mesh) :] if mesh else ()
    one = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names) if mesh else None
    for module in [*(layer for layer in model if isinstance(layer, nn.Linear)), model]:
        _shard(module, mesh=one, **({"ignored_params": set(copied)} if copied else {}))
    training = Training(model, **how)

    def backward(step: int) -> None:
        backpropagate(training, step, *_here())
        for parameter in copied:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return training.run(backward, _planter(training, planted_on, planted))


def tensor_parallel(*, shape: list[int], **how: Any) -> Seen:
    """PyTorch's tensor parallelism: DTensors, and after them a last layer that is not distributed.

    Args:
        shape: of the mesh: [tensor parallel] or [FSDP2, tensor parallel]. With two dimensions the last layer
            is sharded too, but only over the first.
        how: for `Training`.
    """
    model = net(6)
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "tp")[-len(shape) :])
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    rank, ranks = 0, 1
    if len(shape) == 2:
        _shard(model, mesh=mesh["dp"])
        rank, ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
    training = Training(model, **how)
    return training.run(lambda step: backpropagate(training, step, rank, ranks), _planter(training))


def sums_of_dtensors(**how: Any) -> Seen:
    """Copied DTensors and a sharded batch: each rank's gradients are terms of a sum that nobody has made."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    training = Training(distribute_module(net(), mesh), **how)

    def backward(step: int) -> None:
        x, y = (DTensor.from_local(rows, mesh, [Shard(0)]) for rows in batch(step, *_here()))
        error = training.model(x) - y  # whose mean() Gloo cannot take in torch 2.6
        training.scaler.scale(error.square().sum() / error.numel()).backward()
        assert all(p.grad.placements[0].is_partial() for p in training.named.values())

    return training.run(backward, _planter(training))


def crossed_meshes(**how: Any) -> Seen:
    """DTensors on two meshes that have one rank in common; a refusal is what is seen."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    for layer, name in zip(model, ("dp", "tp"), strict=True):
        distribute_module(layer, mesh[name])
    training = Training(model, **how)

    def backward(step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        training.scaler.scale(torch.zeros(()))

    try:
        return training.run(backward, _planter(training))
    except PolicyError as error:
        return {"refused": str(error)}


class Split(nn.Module):
    """A net of which every rank has some hidden units, in plain tensors."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        into, out = torch.randn(8, 3, generator=random), torch.randn(8, 1, generator=random)
        self.into, self.out = (nn.Parameter(whole.chunk(ranks)[rank].clone()) for whole in (into, out))

    def forward(self, x: Tensor) -> Any:
        return _Sum.apply(torch.tanh(x @ self.into.T) @ self.out)


class _Sum(torch.autograd.Function):
    """The sum over ranks of what they have of an activation, if there are ranks."""

    @staticmethod
    def forward(_: Any, part: Tensor) -> Tensor:
        total = part.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:  # all ranks go on with the same
        return gradients[0]


def split(
    *,
    agree: str = "group",
    planted_on: int | None = -1,
    bare: int | None = None,
    twins: bool = False,
    late: bool = False,
    capturable: list[bool] | None = None,
    **how: Any,
) -> Seen:
    """Plain tensors that differ from rank to rank.

    Args:
        agree: "group", "in place" or "returned", for what `reduce` does; "calls" has what it was called with.
        planted_on: the rank whose gradient overflows, if one does.
        bare: a rank that has no gradients.
        twins: whether on the first rank, and only there, two parameters have one gradient.
        late: whether it overflows in the last step, and only after it was unscaled.
        capturable: whether each rank's scaler is.
        how: for `Training`.
    """
    rank, ranks = _here()
    calls: list[list[str]] = []

    def reduce(readings: Tensor) -> Tensor | None:
        calls[-1].append(f"{readings.dtype} {list(readings.shape)}")
        total = readings if agree == "in place" else readings.clone()
        dist.all_reduce(total)
        return None if agree == "in place" else total

    ranks_agree = {"process_group": dist.new_group()} if agree == "group" else {"reduce": reduce}
    model = Split(rank, ranks)
    if twins and rank == 0:
        model.register_parameter("twin", nn.Parameter(model.into.detach().clone()))
    training = Training(model, **ranks_agree, capturable=bool(capturable and capturable[rank]), **how)

    def backward(step: int) -> None:
        calls.append([])
        backpropagate(training, step)
        if rank == bare:
            training.optimizer.zero_grad()
        if "twin" in training.named:
            training.named["twin"].grad = training.named["into"].grad

    plant, unscale = _planter(training, planted_on), training.scaler.unscale_

    def unscale_and_plant(optimizer: torch.optim.Optimizer) -> None:
        unscale(optimizer)
        if len(calls) == STEPS:
            plant()

    if late:
        training.scaler.unscale_ = unscale_and_plant
    return {**training.run(backward, _planter(training, None) if late else plant), "calls": calls}


def pipeline(*, frozen: bool = False, **how: Any) -> Seen:
    """Two stages of a pipeline. The first has no loss and, if it is frozen, no gradients."""
    rank, _ = _here()
    stage = net()[:2] if rank == 0 else net()[2:]
    training = Training(stage.requires_grad_(rank == 1 or not frozen), **how, process_group=dist.group.WORLD)

    def backward(step: int) -> None:
        x, y = batch(step)
        if rank == 0:
            sent = stage(x)
            dist.send(sent.detach(), 1)
            received = torch.empty_like(sent)
            dist.recv(received, 1)
            if not frozen:
                sent.backward(received)
        else:
            received = torch.empty(BATCH, 5)
            dist.recv(received, 0)
            received.requires_grad_()
            training.scaler.scale((stage(received) - y).square().mean()).backward()
            assert received.grad is not None
            dist.send(received.grad, 0)

    return training.run(backward, _planter(training))


def fsdp1(
    *, small: bool = False, original_parameters: bool = False, planted_on: int = -1, **how: Any
) -> Seen:
    """FSDP's first version. Its plain tensors are shards.

    Args:
        small: whether the model is one number, so that only the first rank has a gradient.
        original_parameters: whether the optimizer sees the model's parameters or one flat one.
        planted_on: the rank whose gradient overflows.
        how: for `Training`.
    """
    model = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False) if small else net(),
        use_orig_params=original_parameters,
        device_id=torch.device("cpu"),
    )
    training = Training(model, **how)

    def backward(step: int) -> None:
        x, y = batch(step, *_here())
        loss = (model(x[:, :1] if small else x) - y).square().mean()
        training.scaler.scale(loss).backward()

    seen = training.run(backward, _planter(training, planted_on))
    with FullyShardedDataParallel.summon_full_params(model):
        whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {**seen, "whole": whole.tolist()}


class _Given(torch.autograd.Function):
    """A loss and a gradient that are given."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, loss: float, norm: float) -> Tensor:
        ctx.norm = norm
        return weight.new_tensor(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient * ctx.norm).view(1), None, None


def guarded(
    *, losses: list[list[float]], norms: list[float], agree: str | None, sharded: bool, capturable: bool
) -> Seen:
    """A `SpikeGuard`, with losses that differ from rank to rank.

    Args:
        losses: of each step, one for each rank.
        norms: of each step's gradients, over all ranks.
        agree: "world", "half" for a group of this rank alone, "reduce", "reduce alone" of this rank's numbers
            alone, "trainers" where only the first two ranks train, or None.
        sharded: whether each rank has a part of the gradients, or all of them.
        capturable: as for the scaler.
    """
    rank, ranks = _here()
    how: dict[str, Any] = {"process_group": "world"} if agree == "world" else {}
    if agree == "half":
        how = {"process_group": [dist.new_group([one]) for one in range(ranks)][rank]}
    if agree == "reduce":
        how = {"reduce": lambda numbers: dist.all_reduce(numbers)}
    if agree == "reduce alone":
        how = {"reduce": lambda numbers: numbers if numbers.shape == (2,) else 1 / 0}
    if agree == "trainers":
        trainers = dist.new_group([0, 1])
        if rank > 1:  # they sample, and meet nobody
            return {"seen": [], "calls": [], "losses": []}
        how = {"loss_group": trainers}
        if sharded:
            how["process_group"] = trainers
            ranks = 2
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    guard = preamp.guards.SpikeGuard(warmup=4)
    scaler = preamp.torch.GradScaler("cpu", guard=guard, capturable=capturable, **how)
    seen: list[Any] = []
    calls: list[int] = []
    told: list[float | None] = []
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as all_reduce:
        for mine, norm in zip(losses, norms, strict=True):
            optimizer.zero_grad()
            part = norm / math.sqrt(ranks) if sharded else norm
            scaler.scale(_Given.apply(weight, mine[rank], part)).backward()
            before = all_reduce.call_count
            scaler.step(optimizer)
            scaler.update()
            calls.append(all_reduce.call_count - before)
            step = scaler.last_step
            assert step is not None
            seen.append([step.reason, step.spike and step.spike.of, step.scale, weight.item()])
            told.append(step.loss)
    return {"seen": seen, "calls": calls, "losses": told}


SCENARIOS: dict[str, Callable[..., Seen]] = {
    f.__name__: f
    for f in (
        crossed_meshes,
        ddp,
        fsdp1,
        fsdp2,
        guarded,
        pipeline,
        split,
        sums_of_dtensors,
        tensor_parallel,
    )
}


def serve(rank: int, ranks: int, rendezvous: str, requests: Iterable[str], answers: Any) -> None:
    """Join the other ranks and answer requests until there are no more."""
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=TIMEOUT)
    for line in requests:
        scenario, how = json.loads(line)
        try:
            answer = {"seen": SCENARIOS[scenario](**how)}
        except Lacking as reason:
            answer = {"lacking": str(reason)}
        except Exception:  # the parent's to show
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    warnings.filterwarnings(
        "ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning
    )  # torch.compile
    warnings.filterwarnings("ignore", "DTensor random operators may not have", UserWarning)  # PyTorch 2.6
    # PyTorch 2.8 says so under FSDP with its own scaler too, when Python's garbage collector runs.
    warnings.filterwarnings("ignore", "Deallocating Tensor that still has live", UserWarning)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.stdin, answers)
