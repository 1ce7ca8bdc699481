"""What a scaler refuses, and where its readings go, in a process by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from preamp import UsageError
from preamp.torch import GradScaler, ShardedGradScaler
from preamp.torch.agreement import Agreement
from preamp.torch.readings import Readings


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_single_rank_can_watch_what_is_no_dtensor():
    weight = torch.nn.Parameter(torch.ones(2))
    assert GradScaler("cpu").watch(torch.optim.SGD([weight]))
    sharded = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(UsageError, match="are DTensors"):
        GradScaler("cpu").watch(torch.optim.SGD([torch.nn.Parameter(sharded)]))


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_scaler_wants_a_loss_on_every_rank():
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight])
    with pytest.raises(AssertionError, match="_scale is None"):
        ShardedGradScaler("cpu").step(optimizer)
    GradScaler("cpu", process_group=dist.group.WORLD).step(optimizer)


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_an_optimizer_that_asks_for_flags_hears_of_other_ranks(others):
    scaler = GradScaler("cpu", reduce=lambda readings: readings + torch.tensor([others, 0.0]))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # has no gradient here
    assert list(scaler._check_inf_per_device(optimizer).values()) == [torch.tensor(others)]
    scaler.update()
    assert scaler.get_scale() == 2.0**16 * 0.5**others


@pytest.mark.parametrize("gradient", [torch.ones(1), None], ids=["a gradient", "no gradient"])
def test_other_ranks_hear_of_a_gradient_on_the_device_of_the_loss(gradient):
    places = []

    def reduce(readings: torch.Tensor) -> torch.Tensor:
        places.append(readings.device.type)
        return torch.zeros(2, dtype=torch.float64)

    scaler = GradScaler("cpu", reduce=reduce)
    weight = torch.nn.Parameter(torch.ones(1))  # as one that is offloaded to the CPU
    weight.grad = gradient
    optimizer = torch.optim.SGD([weight])
    scaler.scale(torch.zeros((), device="meta"))
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    optimizer.zero_grad()
    scaler.unscale_(optimizer)
    Readings(Agreement(reduce=reduce)).flags({weight.device: torch.zeros(())}, [], torch.device("meta"))
    assert places == ["meta"] * 3
