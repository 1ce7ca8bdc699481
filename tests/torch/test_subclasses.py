"""What training scripts put around PyTorch's scaler and optimizers, and steps that raise."""

import sys

import pytest
import torch

from preamp import PolicyError, UsageError, dialects
from preamp.torch import GradScaler

INF = float("inf")
STEPS = pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}])
KINDS = pytest.mark.parametrize("options", [{}, {"fused": True}])


def give(scaler, weight: torch.Tensor, factor: float) -> None:
    weight.grad = None
    scaler.scale((weight * factor).sum()).backward()


def optimizer_of(weight: torch.Tensor, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight], lr=1.0, **options)


@pytest.fixture
def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


class DecidesItself(GradScaler):
    """As PyTorch's own method reads, which subclasses copy."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        if not sum(flag.item() for flag in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return None


class AsksOtherRanks(GradScaler):
    """As scalers for model parallelism do: some other rank overflowed."""

    def _unscale_grads_(self, optimizer, *args):
        found = super()._unscale_grads_(optimizer, *args)
        return {device: torch.ones_like(flag) for device, flag in found.items()}


class KeepsANote(GradScaler):
    """Keeps something of its own beside PyTorch's entries, as scalers of training libraries do."""

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        state["note"] = state["stage"]


def test_a_subclass_may_keep_entries_of_its_own(weight):
    scaler, optimizer = KeepsANote("cpu", init_scale=4.0), optimizer_of(weight)
    give(scaler, weight, INF)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert "note" not in state
    assert state.get("note", "none") == "none"
    scaler.unscale_(optimizer)
    assert "stage" in state
    assert state["note"] is state.get("note") is state["stage"]
    assert [flag.item() for flag in scaler._found_inf_per_device(optimizer).values()] == [1.0]
    with pytest.raises(KeyError):
        state["other"]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.skipped


@KINDS
@STEPS
def test_a_subclass_may_decide_by_the_flags(weight, options, limits):
    scaler, optimizer = DecidesItself("cpu", init_scale=4.0), optimizer_of(weight, **options)
    give(scaler, weight, INF)
    scaler.step(optimizer, **limits)
    scaler.update()
    assert weight.tolist() == [1.0, 1.0]
    give(scaler, weight, 0.5)
    scaler.step(optimizer, **limits)
    assert weight.tolist() == [0.5, 0.5]


@KINDS
@STEPS
def test_a_subclass_may_ask_other_ranks(weight, options, limits):
    scaler, optimizer = AsksOtherRanks("cpu", init_scale=4.0), optimizer_of(weight, **options)
    give(scaler, weight, 0.5)
    scaler.step(optimizer, **limits)
    scaler.update()
    assert scaler.last_step.skipped
    assert weight.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 2.0


class AgreesInUnscale(GradScaler):
    """As scalers for tensor parallelism do in `unscale_`: some other rank overflowed."""

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        for flag in state["found_inf_per_device"].values():
            flag.fill_(1.0)


@STEPS
def test_every_step_unscales_as_the_subclass_does(weight, limits):
    scaler, optimizer = AgreesInUnscale("cpu", init_scale=4.0), optimizer_of(weight)
    give(scaler, weight, 0.5)
    scaler.step(optimizer, **limits)
    scaler.update()
    assert scaler.last_step.skipped
    assert weight.tolist() == [1.0, 1.0]


def test_unscaling_may_be_replaced_from_outside(weight):
    """The usual way to make PyTorch's scaler accept float16 gradients."""
    scaler, optimizer = GradScaler("cpu"), optimizer_of(weight)
    original = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda optimizer, inv_scale, found_inf, allow_fp16: original(
        optimizer, inv_scale, found_inf, True
    )
    give(scaler, weight, 0.5)
    scaler.step(optimizer)
    assert weight.tolist() == [0.5, 0.5]


class Wraps:
    """Passes everything on, and keeps what is set to itself."""

    def __init__(self, optimizer) -> None:
        self.inner = optimizer

    def __getattr__(self, name):
        return getattr(self.inner, name)


@STEPS
def test_a_wrapper_of_a_fused_optimizer_steps_on_unscaled_gradients(weight, limits):
    scaler, optimizer = GradScaler("cpu"), Wraps(optimizer_of(weight, fused=True))
    give(scaler, weight, 0.5)
    scaler.step(optimizer, **limits)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]


@KINDS
@pytest.mark.parametrize("capturable", [False, True])
@STEPS
def test_a_step_that_raised_can_be_tried_again(weight, options, capturable, limits, monkeypatch):
    scaler, optimizer = GradScaler("cpu", capturable=capturable), optimizer_of(weight, **options)
    give(scaler, weight, 0.5)
    scaler.step(optimizer)
    scaler.update()
    give(scaler, weight, 0.25)
    with monkeypatch.context() as patch:
        for name in ("_single_tensor_sgd", "_fused_sgd"):
            patch.setattr(sys.modules["torch.optim.sgd"], name, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scaler.step(optimizer, **limits)
    assert not hasattr(optimizer, "grad_scale")
    scaler.step(optimizer, **limits)
    scaler.update()
    assert weight.tolist() == [0.25, 0.25]
    assert not scaler.last_step.skipped


def test_a_closure_that_raises_leaves_everything_as_it_was(weight):
    scaler, optimizer = GradScaler("cpu"), torch.optim.LBFGS([weight], lr=0.1, max_iter=5)
    calls = []

    def closure():
        calls.append(None)
        if len(calls) == 3:
            raise KeyError
        optimizer.zero_grad()
        loss = weight.square().sum()
        scaler.scale(loss).backward()
        return loss

    with pytest.raises(KeyError):
        scaler.step(optimizer, closure)
    assert weight.tolist() == [1.0, 1.0]
    scaler.step(optimizer, closure)
    scaler.update()
    assert weight.abs().max() < 1.0


@KINDS
@STEPS
def test_a_scale_that_the_rule_let_fall_to_zero_is_told(weight, options, limits):
    scaler, optimizer = GradScaler("cpu", policy=dialects.TORCH), optimizer_of(weight, **options)
    while scaler.get_scale():
        give(scaler, weight, INF)
        scaler.step(optimizer, **limits)
        scaler.update()
    give(scaler, weight, 1.0)
    with pytest.raises(PolicyError, match=r"scale=0\.0 .* Write scale="):
        scaler.step(optimizer, **limits)
    assert weight.tolist() == [1.0, 1.0]


def test_capturable_refuses_a_first_step_of_an_optimizer_it_does_not_know(weight):
    class Slow(torch.optim.SGD):
        """Its state begins with the weights."""

    scaler = GradScaler("cpu", capturable=True)
    give(scaler, weight, 0.5)
    with pytest.raises(UsageError, match="initial state of Slow is not known"):
        scaler.step(Slow([weight]))
    assert weight.tolist() == [1.0, 1.0]


@STEPS
def test_the_same_loop_runs_with_a_disabled_scaler(weight, limits):
    scaler, optimizer = GradScaler("cpu", enabled=False), optimizer_of(weight)
    for index in range(2):
        give(scaler, weight, 0.25)
        scaler.step(optimizer, **limits)
        scaler.update()
        assert scaler.last_step[:4] == (index, 1.0, True, False)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.usefixtures("reads_cost")
@pytest.mark.parametrize("scale", [None, 16.0])
def test_what_other_code_wrote_moves_to_the_device_and_back(weight, scale):
    """As on an accelerator, where a fused optimizer decides by itself and another one reads."""
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=7)
    host, device = optimizer_of(weight), optimizer_of(weight, fused=True)
    for number, optimizer in enumerate([host, device, host, device]):
        if number == 1:
            scaler._growth_tracker.fill_(4)
            if scale is not None:
                scaler._scale.fill_(scale)
        give(scaler, weight, 0.25)
        scaler.step(optimizer)
        scaler.update()
    assert scaler._get_growth_tracker() == 0  # 4 and three more steps are the interval
    assert scaler.get_scale() == 2.0 * (scale or 4.0)
    assert weight.tolist() == [0.0, 0.0]
