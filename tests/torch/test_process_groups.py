"""`process_group=`: whatever has the methods of a ProcessGroup, as in PyTorch."""

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from preamp import PolicyError
from preamp.torch import GradScaler, ShardedGradScaler

INF = float("inf")


class Work:
    """What `allreduce` returns; a caller who does not wait reads numbers that are not there yet."""

    def __init__(self, finish=lambda: None):
        self.finish = finish

    def wait(self):
        self.finish()


class Alone:
    """As PyTorch's own test double, `DummyProcessGroup(0, 1)`: a group without a base class."""

    def rank(self):
        return 0

    def size(self):
        return 1

    def allreduce(self, *arguments, **options):
        return Work()


class WithAnother(Alone):
    """Two ranks; the other one's gradients are not finite."""

    def __init__(self):
        self.calls = 0

    def size(self):
        return 2

    def allreduce(self, tensors, options):
        assert options.reduceOp == torch.distributed.ReduceOp.SUM
        self.calls += 1

        def finish():
            tensors[0].view(-1)[0] += 1.0  # found_inf in PyTorch, how many overflowed here

        return Work(finish)


def trained(scaler, fused, factors=(1.0, INF, 1.0)):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=fused)
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)  # PyTorch asks other ranks here alone
        scaler.step(optimizer)
        scaler.update()
    return weight.tolist(), scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_a_group_of_one_that_is_no_process_group_trains_as_with_pytorch(fused):
    pairs = [
        trained(kind("cpu", 2.0, process_group=Alone()), fused)
        for kind in (ShardedGradScaler, TorchShardedGradScaler)
    ]
    assert pairs[0] == pairs[1] == ([0.0, 0.0, 0.0], 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [ShardedGradScaler, TorchShardedGradScaler])
def test_such_a_group_is_asked(kind, fused):
    group = WithAnother()
    assert trained(kind("cpu", 2.0, process_group=group), fused, factors=(1.0,)) == ([1.0, 1.0, 1.0], 1.0)
    assert group.calls == 1


def test_our_scaler_takes_it():
    assert trained(GradScaler("cpu", process_group=Alone()), fused=False)[0] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("group", [0, "all", object(), [0, 1], Alone, torch.zeros(2), -100])
def test_what_lacks_the_methods_is_refused(group):
    with pytest.raises(PolicyError, match=r"process_group=.* has no rank\(\), size\(\) and allreduce\(\)"):
        GradScaler("cpu", process_group=group)
