"""Inside `with optimizer.averaged():` the weights are not those that are trained: nothing is lost there."""

import copy

import pytest
import torch
from torch import nn

from preamp.errors import UsageError
from preamp.torch import LossScaleOptimizer

X = torch.ones(4, 3)


def trained(steps=3, half=False, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if half:
        model.half()
        options["master_weights"] = True
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-4)
    optimizer = LossScaleOptimizer(inner, use_ema=True, initial_scale=2.0**4, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        optimizer.step()
    return model, optimizer


def loss_of(model):
    return model(X.to(model.weight.dtype)).float().square().mean()


def held(model, optimizer):
    parts = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return torch.cat([one.float().flatten() for one in _tensors(parts)])


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


CALLS = {
    "backward": lambda model, optimizer: optimizer.backward(loss_of(model)),
    "scale_loss": lambda model, optimizer: optimizer.scale_loss(loss_of(model)),
    "step": lambda model, optimizer: optimizer.step(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(trained()[1].state_dict()),
    "finalize_variable_values": lambda model, optimizer: optimizer.finalize_variable_values(),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("call", list(CALLS))
def test_training_saving_and_loading_are_refused(call, half):
    model, optimizer = trained(half=half)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))  # so that a step could be taken
    before = held(model, optimizer)
    refused = pytest.raises(UsageError, match=rf"optimizer.{call}\(.*averaged.*after the block")
    with refused, optimizer.averaged():
        CALLS[call](model, optimizer)
    assert torch.equal(held(model, optimizer), before)
    optimizer.step()  # allowed again


def writes(model, optimizer):
    return {
        "load": lambda: model.load_state_dict(trained(1)[0].state_dict()),
        "inner": optimizer.inner_optimizer.step,
        "in place": lambda: nn.init.ones_(model.weight),
    }


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("how", ["load", "inner", "in place"])
def test_weights_that_are_written_there_are_told_of(how, half):
    model, optimizer = trained(half=half)
    for parameter in [*model.parameters(), *[p for g in optimizer.param_groups for p in g["params"]]]:
        parameter.grad = torch.ones_like(parameter)
    weights = [one.clone() for one in model.state_dict().values()]
    refused = pytest.raises(UsageError, match=r"weights were written inside.*Write it after the block")
    with refused, optimizer.averaged():
        writes(model, optimizer)[how]()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), weights, strict=True))
    optimizer.state_dict()


@pytest.mark.parametrize("half", [False, True])
def test_evaluation_is_free(half):
    model, optimizer = trained(half=half)
    before = held(model, optimizer)
    with optimizer.averaged(), torch.no_grad():
        averages = copy.deepcopy(model.state_dict())
        with optimizer.averaged():
            model.load_state_dict(model.state_dict())  # which changes nothing
            loss_of(model)
        with pytest.raises(UsageError):
            optimizer.state_dict()
    assert torch.equal(held(model, optimizer), before)
    assert not torch.equal(averages["weight"], model.weight)


def _write_and_fail(model):
    nn.init.ones_(model.weight)
    raise KeyError


def test_an_error_of_the_block_itself_is_what_is_raised():
    model, optimizer = trained()
    with pytest.raises(KeyError), optimizer.averaged():
        _write_and_fail(model)
    optimizer.state_dict()
