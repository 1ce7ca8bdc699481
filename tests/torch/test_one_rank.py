"""What a scaler refuses, and where its readings go, in a process by itself."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from preamp import Headroom, PolicyError
from preamp.torch import GradScaler, ShardedGradScaler


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
    assert places == ["meta"] * 2


@pytest.mark.parametrize("keywords", [{}, {"capturable": True}, {"policy": Headroom()}], ids=str)
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda readings: "sum", "'sum', which is not a tensor"),
        (lambda readings: readings[:1], r"a torch.float64 tensor of shape \[1\]"),
        (lambda readings: readings.sum(), r"a torch.float64 tensor of shape \[\]"),
        (lambda readings: readings[None], r"a torch.float64 tensor of shape \[1, "),
        (lambda readings: readings.float(), r"a torch.float32 tensor of shape \[(2|280)\]"),
        (lambda readings: readings != 0.0, "a torch.bool tensor"),
    ],
    ids=["str", "part", "scalar", "wider", "float32", "bool"],
)
def test_what_reduce_returns_is_checked_before_anything_changes(spoil, named, keywords):
    spoils = True
    scaler = GradScaler("cpu", reduce=lambda readings: spoil(readings) if spoils else None, **keywords)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight.sum()).backward()
    gradient = weight.grad.clone()
    with pytest.raises(PolicyError, match=rf"^reduce= .*returned {named}.*Return a tensor of the same"):
        scaler.step(optimizer, max_norm=math.inf)
    assert weight.tolist() == [1.0, 1.0]
    assert torch.equal(weight.grad, gradient)
    spoils = False
    scaler.step(optimizer, max_norm=math.inf)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]
    assert scaler.last_step.grad_norm == pytest.approx(math.sqrt(2.0))


@pytest.mark.usefixtures("one_rank")
def test_a_sum_that_is_still_under_way_is_refused():
    scaler = GradScaler("cpu", reduce=partial(dist.all_reduce, async_op=True))
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaler.scale(weight.sum()).backward()
    with pytest.raises(PolicyError, match=r"has to wait until the sum is complete"):
        scaler.step(optimizer)
