"""A step whose optimizer raised is tried again: what is told of it is what backward left."""

import math
import weakref

import pytest
import torch
from torch import nn

from preamp import Headroom
from preamp.torch import GradScaler
from tests.combinations import in_one_test


class Run:
    """One weight whose gradients are 3, 4 and 0, and an optimizer that can fail."""

    def __init__(self, kind="SGD", **options):
        self.weight, self.fails = nn.Parameter(torch.zeros(3)), False
        name, *fused = kind.split()
        self.optimizer = getattr(torch.optim, name)([self.weight], lr=0.1, **dict.fromkeys(fused, True))
        step = self.optimizer.step

        def failing(*args, **kwargs):
            if self.fails:
                raise InterruptedError
            return step(*args, **kwargs)

        self.optimizer.step = failing
        self.scaler = GradScaler("cpu", policy=Headroom(init_scale=2.0**10), **options)

    def backward(self):
        self.optimizer.zero_grad()
        self.scaler.scale((self.weight * torch.tensor([3.0, 4.0, 0.0])).sum()).backward()

    def try_step(self, *, fails, **limits):
        self.fails = fails
        if fails:
            with pytest.raises(InterruptedError):
                self.scaler.step(self.optimizer, **limits)
        else:
            self.scaler.step(self.optimizer, **limits)


limits = pytest.mark.parametrize(
    "limits", [{"max_norm": 0.1}, {"max_value": 1.0}, {"max_norm": 1.0, "max_value": 2.0}]
)
ways = pytest.mark.parametrize("kind", ["SGD", "SGD fused", "AdamW"])
modes = pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=str)


@limits
@ways
@modes
@in_one_test(unscales=[False, True], times=[1, 2])
def test_a_step_that_is_tried_again_is_told_of_as_if_it_had_not_failed(
    limits, kind, options, unscales, times
):
    told, weights = [], []
    for fails in (False, True):
        run = Run(kind, **options)
        run.backward()
        if unscales:
            run.scaler.unscale_(run.optimizer)
        for _ in range(times if fails else 0):
            run.try_step(fails=True, **limits)
        run.try_step(fails=False, **limits)
        run.scaler.update()
        told.append(run.scaler.last_step)
        weights.append(run.weight.detach().clone())
    assert told[1].amax == told[0].amax == 4.0 * 2.0**10
    assert told[1].grad_norm == told[0].grad_norm
    assert told[1].new_scale == told[0].new_scale
    torch.testing.assert_close(weights[1], weights[0])


def test_a_failed_step_leaves_gradients_as_they_were_where_it_clips_by_norm():
    run = Run()
    run.backward()
    before = run.weight.grad.clone()
    run.try_step(fails=True, max_norm=0.1)
    torch.testing.assert_close(run.weight.grad, before)
    run.try_step(fails=True, max_norm=0.01)
    run.try_step(fails=False, max_norm=math.inf)
    run.scaler.update()
    torch.testing.assert_close(run.weight.detach(), -0.1 * torch.tensor([3.0, 4.0, 0.0]))


@pytest.mark.parametrize("changes", ["backward", "in place", "replaced"])
def test_other_gradients_are_measured_afresh(changes):
    run = Run()
    run.backward()
    run.try_step(fails=True, max_norm=0.1)
    if changes == "backward":
        run.optimizer.zero_grad()
        run.scaler.scale(2 * (run.weight * torch.tensor([3.0, 4.0, 0.0])).sum()).backward()
    elif changes == "in place":
        run.weight.grad.mul_(2.0)
    else:
        run.weight.grad = run.weight.grad * 2.0
    run.try_step(fails=False, max_norm=0.1)
    run.scaler.update()
    assert run.scaler.last_step.grad_norm == pytest.approx(10.0)
    assert run.scaler.last_step.amax == pytest.approx(8.0 * 2.0**10)


def test_the_largest_scale_is_undone_too():
    run = Run("SGD fused")
    run.backward()
    run.scaler.update(2.0**110)
    run.backward()
    before = run.weight.grad.clone()
    run.try_step(fails=True)
    assert torch.equal(run.weight.grad, before)


def test_nothing_of_the_gradients_is_kept_alive():
    run = Run()
    run.backward()
    run.try_step(fails=True, max_norm=0.1)
    gradient = weakref.ref(run.weight.grad)
    run.weight.grad = None
    assert gradient() is None


def test_a_scaler_goes_on_after_a_step_without_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="grad None"):
        scaler.step(optimizer)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5] * 3


def test_an_overflow_after_a_failed_step_is_seen_by_unscale() -> None:
    run = Run()
    run.backward()
    run.try_step(fails=True)
    run.scaler.scale(run.weight.sum() * math.inf).backward()
    run.scaler.unscale_(run.optimizer)
    run.scaler.update()
    assert run.scaler.last_step.skipped
    assert run.scaler.get_scale() < 2.0**10
