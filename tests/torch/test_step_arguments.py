"""Arguments of an optimizer's own `step` that have the names of the scaler's."""

import pytest
import torch

from preamp import PolicyError
from preamp.errors import UsageError
from preamp.torch import GradScaler


class Own(torch.optim.SGD):
    """An optimizer whose `step` has arguments that the scaler has too."""

    def step(self, closure=None, *, max_norm=None, max_value=None, optimizer_kwargs=None, note=None):
        self.heard = (max_norm, max_value, optimizer_kwargs, note)
        return super().step(closure)


class Fused(Own):
    """The same where one step unscales and updates."""

    def __init__(self, params, lr):
        super().__init__(params, lr, fused=True)


def stepped(*, kind=Own, enabled=True, capturable=False, closure=False, **arguments):
    """Return the optimizer and its weight after one step on a gradient of 3."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = kind([weight], lr=1.0), GradScaler("cpu", enabled=enabled, capturable=capturable)

    def backward():
        optimizer.zero_grad()
        loss = 3 * weight.sum()
        scaler.scale(loss).backward()
        return loss

    if closure:
        arguments["optimizer_kwargs"] = {**arguments["optimizer_kwargs"], "closure": backward}
    else:
        backward()
    scaler.step(optimizer, **arguments)
    scaler.update()
    return optimizer, weight.item()


ways = pytest.mark.parametrize(
    "way",
    [
        {},
        {"kind": Fused},
        {"enabled": False},
        {"kind": Fused, "capturable": True},
        {"closure": True},
    ],
    ids=str,
)


@ways
def test_optimizer_kwargs_reach_the_optimizer_under_any_name(way):
    given = {"max_norm": 7.0, "max_value": -1.0, "optimizer_kwargs": {"a": 1}, "note": "own"}
    optimizer, weight = stepped(optimizer_kwargs=given, **way)
    assert optimizer.heard == (7.0, -1.0, {"a": 1}, "own")
    assert weight == -3.0  # not clipped


@ways
def test_both_may_have_their_own(way):
    optimizer, weight = stepped(max_norm=1.0, optimizer_kwargs={"max_norm": 7.0}, **way)
    assert optimizer.heard == (7.0, None, None, None)
    assert weight == pytest.approx(-1.0)
    optimizer, weight = stepped(max_value=0.5, optimizer_kwargs={}, **way)
    assert optimizer.heard == (None, None, None, None)
    assert weight == pytest.approx(-0.5)


@pytest.mark.parametrize("name", ["max_norm", "max_value"])
@pytest.mark.parametrize("enabled", [True, False])
def test_an_argument_that_could_be_meant_for_either_is_refused_and_changes_nothing(name, enabled):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = Own([weight], lr=1.0), GradScaler("cpu", enabled=enabled)
    scaler.scale(3 * weight.sum()).backward()
    before = weight.grad.clone()
    said = rf"{name}=2\.0.* Own\.step .*optimizer_kwargs=\{{\"{name}\": 2\.0\}}.*optimizer_kwargs=\{{\}}"
    with pytest.raises(UsageError, match=said):
        scaler.step(optimizer, **{name: 2.0})
    assert torch.equal(weight.grad, before)
    scaler.step(optimizer, note="still works")
    assert (weight.item(), optimizer.heard[-1]) == (-3.0, "still works")


def test_an_optimizer_without_such_an_argument_is_clipped_as_ever():
    assert stepped(kind=torch.optim.SGD, max_norm=1.0)[1] == pytest.approx(-1.0)


def test_what_is_given_twice_or_is_no_dict_is_refused():
    with pytest.raises(UsageError, match="note is given twice"):
        stepped(note="a", optimizer_kwargs={"note": "b"})
    with pytest.raises(UsageError, match=r"optimizer_kwargs=3 is not a dict"):
        stepped(optimizer_kwargs=3)
    with pytest.raises(PolicyError, match="max_norm=0"):
        stepped(max_norm=0, optimizer_kwargs={})


class UnscalesItself(torch.optim.SGD):
    """An optimizer of the kind that PyTorch deprecates: its `step` unscales and skips."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(grad_scaler.get_scale())
        return super().step(closure)


@pytest.mark.parametrize("limit", ["max_norm", "max_value"])
def test_an_optimizer_that_unscales_itself_cannot_be_clipped_here(limit):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = UnscalesItself([weight], lr=1.0), GradScaler("cpu")
    scaler.scale(3 * weight.sum()).backward()
    with pytest.raises(UsageError, match=rf"{limit}=1.0 .*UnscalesItself.step takes grad_scaler="):
        scaler.step(optimizer, **{limit: 1.0})
    assert weight.item() == 0.0
    with pytest.warns(FutureWarning) as caught:
        scaler.step(optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    assert weight.item() == -3.0
