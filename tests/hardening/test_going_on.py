"""After a call that failed, or a checkpoint of another configuration, the next step is as it should be."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from preamp import Dynamic, PolicyError, ScaleExhausted
from preamp.torch import GradScaler, LossScaleOptimizer

INF = math.inf


class Run:
    """One weight of three entries, whose gradient is a factor."""

    def __init__(self, fails: bool = False, **arguments: Any) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        inner = torch.optim.SGD([self.weight], lr=0.5)
        self.optimizer = LossScaleOptimizer(inner, **arguments)
        self.fails = fails
        inner.register_step_pre_hook(self.fail)

    def fail(self, *_: Any) -> None:
        if self.fails:
            self.fails = False
            raise InterruptedError

    def backward(self, factor: float = 1.0) -> Any:
        self.optimizer.zero_grad()
        loss = (self.weight * factor).sum()
        self.optimizer.backward(loss)
        return loss

    def step(self, factor: float = 1.0, *, closure: bool = False) -> list[float]:
        if closure:
            self.optimizer.step(lambda: self.backward(factor))
        else:
            self.backward(factor)
            self.optimizer.step()
        return self.weight.tolist()


ARGUMENTS: list[dict[str, Any]] = [{}, {"clipnorm": 9.0}, {"gradient_accumulation_steps": 1}]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_step_without_gradients_changes_nothing(arguments: dict[str, Any]) -> None:
    run = Run(**arguments)
    run.optimizer.scale_loss(torch.ones(()))
    for _ in range(2):
        with pytest.raises(AssertionError, match="grad None"):
            run.optimizer.step()
    assert run.step() == [0.5] * 3


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


@pytest.mark.parametrize("again", ["the same gradients", "new gradients"])
@pytest.mark.parametrize("arguments", ARGUMENTS[:2])
def test_an_optimizer_that_failed_steps_with_gradients_that_are_unscaled_once(
    arguments: dict[str, Any], again: str
) -> None:
    run = Run(fails=True, **arguments)
    with pytest.raises(InterruptedError):
        run.step()
    assert run.weight.tolist() == [1.0] * 3
    if again == "new gradients":
        assert run.step() == [0.5] * 3
    else:
        run.optimizer.step()
        assert run.weight.tolist() == [0.5] * 3


def test_sums_of_more_micro_steps_than_are_wanted_now_make_an_update() -> None:
    before, after = Run(gradient_accumulation_steps=4), Run(gradient_accumulation_steps=2)
    for _ in range(3):
        before.step()
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    assert after.step() == [0.5] * 3


def test_accumulation_goes_on_after_a_policy_gave_up() -> None:
    run = Run(gradient_accumulation_steps=2, policy=Dynamic(init_scale=1.0, min_scale=1.0, at_floor="raise"))
    run.step()
    with pytest.raises(ScaleExhausted):
        run.step(INF)
    assert run.weight.grad is None
    assert run.step() == [0.5] * 3


def test_a_skipped_step_with_a_closure_decays_nothing() -> None:
    run = Run(weight_decay=0.125)
    assert run.step(INF, closure=True) == [1.0] * 3
    assert run.step(closure=True) == Run(weight_decay=0.125).step()


def test_a_closure_is_clipped_like_a_loss_before_the_step() -> None:
    assert Run(clipnorm=0.5).step(closure=True) == Run(clipnorm=0.5).step()


@pytest.mark.parametrize("work", [{"clipnorm": 1.0}, {"weight_decay": 0.1}])
def test_lbfgs_is_not_given_what_it_would_leave_out(work: dict[str, float]) -> None:
    inner = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(PolicyError, match="LBFGS evaluates its closure itself"):
        LossScaleOptimizer(inner, **work)  # type: ignore[arg-type]


def test_a_checkpoint_that_is_refused_has_changed_neither_half() -> None:
    run = Run(use_ema=True)
    run.step()
    saved = copy.deepcopy(run.optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    saved["loss_scale_optimizer"]["scaler"]["scale"] = math.nan
    before = repr(run.optimizer.state_dict())
    with pytest.raises(PolicyError, match="scale=nan"):
        run.optimizer.load_state_dict(saved)
    assert repr(run.optimizer.state_dict()) == before


def test_a_first_scale_without_a_finite_inverse_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"Write initial_scale=2\.0\*\*-126"):
        Run(initial_scale=2.0**-140)
    assert Run(initial_scale=2.0**-126).optimizer.loss_scale == 2.0**-126
