"""A step whose loss nobody scaled is warned of."""

import pytest
import torch

from preamp.torch import GradScaler


def stepped(scaler, weight, optimizer, scales):
    optimizer.zero_grad()
    loss = weight.sum()
    (scaler.scale(loss) if scales else loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_step_of_the_scaler_without_a_scaled_loss_is_warned_of_once() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        stepped(scaler, weight, optimizer, scales=True)
    with pytest.warns(UserWarning, match=r"no loss was scaled .*Write scaler\.scale\(loss\)\.backward\(\)"):
        stepped(scaler, weight, optimizer, scales=False)
    stepped(scaler, weight, optimizer, scales=False)  # once


@pytest.mark.parametrize(
    "settings", [{"reduce": lambda flags: None}, {"capturable": True}, {"enabled": False}]
)
def test_where_others_may_scale_the_loss_it_is_not(settings) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=8.0, **settings)
    stepped(scaler, weight, optimizer, scales=True)
    stepped(scaler, weight, optimizer, scales=False)


def test_one_loss_for_two_optimizers_and_accumulation_are_scaled() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        for _ in range(2):
            scaler.scale((weights[0] * weights[1]).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def test_an_update_between_losses_that_are_scaled_and_the_step_is_warned_of() -> None:
    """The second optimizer's gradients have the scale of before the update."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale((weights[0] * weights[1]).sum()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    scaler.step(optimizers[1])
    with pytest.warns(UserWarning, match="With several optimizers, call update"):
        scaler.update()
