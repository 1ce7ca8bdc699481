"""The float32 weights of half-precision models under `LossScaleOptimizer`."""

import copy

import pytest
import torch

from .test_loss_scale_optimizer import Run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("steps", [None, 2])
def test_master_weights_keep_updates_that_half_precision_would_lose(dtype, steps):
    tiny = lambda p: torch.optim.SGD(p, lr=1e-5)  # noqa: E731
    wide = Run(tiny, wrap=False)
    with torch.no_grad():
        for p in wide.model.parameters():
            p.copy_(p.to(dtype))
    runs = [
        Run(tiny, dtype=dtype, master_weights=m, gradient_accumulation_steps=steps) for m in (True, False)
    ]
    start = runs[0].values()
    for number in range(200):
        wide.step(number)
        for run in runs:
            for _ in range(steps or 1):
                run.step(number)
    masters = torch.cat([p.detach().flatten() for p in runs[0].optimizer.param_groups[0]["params"]])
    moved = (wide.values() - start).norm()
    assert (masters - wide.values()).norm() < 0.02 * moved
    assert (runs[1].values() - wide.values()).norm() > 0.5 * moved
    assert torch.equal(runs[0].values(), masters.to(dtype).float())


def test_masters_follow_weights_that_are_loaded_into_the_model():
    run, other = (Run(dtype=torch.float16, master_weights=True) for _ in range(2))
    run.step(0)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    masters = [p.detach().clone() for p in run.optimizer.param_groups[0]["params"]]
    for order in ((0, 1), (1, 0)):
        for which in order:
            (other.model if which == 0 else other.optimizer).load_state_dict(saved[which])
        other.optimizer._masters.take_gradients()
        for a, b in zip(masters, other.optimizer.param_groups[0]["params"], strict=True):
            assert torch.equal(a, b)
    other.model.load_state_dict({k: v + 1 for k, v in saved[0].items()})
    other.step(1)
    assert (other.values() - run.values()).mean() > 0.5


def test_weights_that_are_loaded_into_the_model_reach_the_masters_before_anything_else():
    run = Run(dtype=torch.float16, master_weights=True, use_ema=True)
    run.step(0)
    loaded = {name: value + 1 for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(loaded)
    with run.optimizer.averaged():
        pass
    assert torch.equal(run.model.weight, loaded["weight"])
    saved = run.optimizer.state_dict()["loss_scale_optimizer"]["masters"]
    assert torch.equal(saved[0].half(), loaded["weight"])


def test_an_error_inside_averaged_puts_half_precision_weights_back_too():
    run = Run(dtype=torch.float16, master_weights=True, use_ema=True, ema_momentum=0.5)
    for number in range(3):
        run.step(number)
    weights = run.values()
    with pytest.raises(KeyError), run.optimizer.averaged():
        raise KeyError(torch.equal(run.values(), weights))
    assert torch.equal(run.values(), weights)
