"""The amax that policies use, in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.amp.grad_scaler import OptState

from preamp import PolicyError, Static
from preamp.torch import GradScaler
from tests.seeing import Remembering, amax_of

from .pairs import INF, NAN, give, make, ours, weights

KINDS = ["SGD", "AdamW", "SGD fused", "AdamW fused"]
numbers = st.floats(width=16, allow_nan=False, allow_infinity=False)


@st.composite
def gradients(draw: st.DrawFn, kind: str) -> list[torch.Tensor]:
    """Return some gradients that an optimizer of a kind takes."""
    plain = [torch.float32, torch.float64]
    taken = plain if "fused" in kind else [*plain, torch.float16, torch.bfloat16, torch.complex64]
    dtypes = draw(st.lists(st.sampled_from(taken), min_size=1, max_size=3))
    made = [torch.tensor(draw(st.lists(numbers, max_size=5)), dtype=dtype) for dtype in dtypes]
    made = [one * (1 + 0.5j) if one.is_complex() else one for one in made]
    return [one.to_sparse() if kind == "SGD" and draw(st.integers(0, 5)) == 0 else one for one in made]


steps = st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), gradients(kind)))


def stored(gradient: torch.Tensor) -> Any:
    """Return what is stored of a gradient, as NumPy."""
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    return (dense.double() if dense.dtype is torch.bfloat16 else dense).numpy()


class Training:
    """Several optimizers with given gradients, for one step."""

    def __init__(self, scaler: Any, steps: list[tuple[str, list[torch.Tensor]]], *, shared: bool) -> None:
        self.scaler, self.optimizers = scaler, []
        scaler.scale(torch.zeros(()))
        for kind, tensors in steps:
            parameters = [torch.nn.Parameter(torch.zeros(t.shape, dtype=t.dtype)) for t in tensors]
            for parameter, gradient in zip(parameters, tensors, strict=True):
                parameter.grad = gradient
            if shared and self.optimizers:
                parameters.append(self.optimizers[0].param_groups[0]["params"][0])
            self.optimizers.append(make("SGD" if shared else kind, parameters))  # which takes sparse ones

    def step(self, *, unscale: bool, spoil: bool, **limits: float) -> None:
        for optimizer in self.optimizers:
            if unscale:
                self.scaler.unscale_(optimizer)
            for parameter in optimizer.param_groups[0]["params"] if unscale and spoil else ():
                parameter.grad = parameter.grad * 0.5
            self.scaler.step(optimizer, **limits)
        self.scaler.update()


@pytest.mark.filterwarnings("ignore:eps=1e-08 of AdamW:UserWarning")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    steps=st.lists(steps, min_size=1, max_size=3),
    unscale=st.booleans(),
    spoil=st.booleans(),
    limits=st.sampled_from([{}, {"max_norm": 1.0}, {"max_value": 0.5}, {"max_norm": 1.0, "max_value": 0.5}]),
    capturable=st.booleans(),
    shared=st.booleans(),
)
def test_it_is_that_of_the_gradients_before_unscaling_and_clipping(
    steps: Any, unscale: bool, spoil: bool, limits: Any, capturable: bool, shared: bool
) -> None:
    arrays = [stored(tensor).copy() for _, tensors in steps for tensor in tensors]
    training = Training(ours(policy=Remembering(2.0**10), capturable=capturable), steps, shared=shared)
    training.step(unscale=unscale, spoil=spoil, **limits)
    amax = amax_of(arrays)
    assert training.scaler.policy_state.amax == amax
    assert training.scaler.last_step.amax == amax


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}])
def test_what_overflows_after_unscaling_is_skipped_where_it_would_be(limits: Any, capturable: bool) -> None:
    """As for a policy that does not see: whoever reads nothing, or takes a norm, looks again."""
    skipped = []
    for policy in (Remembering(2.0**10), Static(2.0**10)):
        (weight,) = weights()
        optimizer, scaler = make("SGD", [weight]), ours(policy=policy, capturable=capturable)
        give(scaler, weight, 1.0)
        scaler.unscale_(optimizer)
        weight.grad.fill_(INF)
        scaler.step(optimizer, **limits)
        scaler.update()
        skipped.append((scaler.last_step.skipped, scaler.last_step.culprits))
    assert skipped[0] == skipped[1]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
def test_an_overflow_tells_nothing(kind: str, capturable: bool, bad: float) -> None:
    (weight,) = weights()
    optimizer, scaler = make(kind, [weight]), ours(policy=Remembering(2.0**10), capturable=capturable)
    amaxes = []
    for gradient in (3.0, bad, 0.0):
        give(scaler, weight, torch.tensor([0.5, gradient, 0.0]))
        scaler.step(optimizer)
        scaler.update()
        amaxes.append(scaler.last_step.amax)
        assert scaler.policy_state.amax == (0.5 if gradient == 0.0 else 3.0)
    assert amaxes == [3.0, None, 0.5]


def test_of_a_closure_the_last_evaluation_counts() -> None:
    (weight,) = weights()
    scaler, factors = ours(policy=Remembering(2.0**10)), iter([1.0, 8.0, 2.0])
    optimizer = torch.optim.LBFGS([weight], lr=1e-3, max_iter=3, tolerance_change=0.0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = next(factors) * weight.sum()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert next(factors, None) is None
    assert scaler.last_step.amax == scaler.policy_state.amax == 2048.0


@pytest.mark.usefixtures("reads_cost")
def test_one_optimizer_may_be_read_and_another_not() -> None:
    """As on an accelerator, where a fused optimizer decides by itself."""
    for amaxes in ((3.0, 2.0), (2.0, 3.0)):
        pair = weights(2, size=4)
        scaler = ours(policy=Remembering(2.0**10))
        for kind, weight, amax in zip(("SGD", "AdamW fused"), pair, amaxes, strict=True):
            give(scaler, weight, torch.tensor([amax, 0.0, 0.0, 0.0]))
            scaler.step(make(kind, [weight]))
        scaler.update()
        assert scaler.policy_state.amax == 3.0
        assert scaler.last_step.amax == 3.0


class ToldByOthers(GradScaler):
    """Checks gradients in a way of its own, as scalers for other optimizers do."""

    def unscale_(self, optimizer: Any) -> None:
        ledger = self._per_optimizer_states[id(optimizer)]
        ledger["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(())}
        ledger["stage"] = OptState.UNSCALED


@pytest.mark.parametrize("capturable", [False, True])
def test_a_policy_that_sees_nothing_of_the_gradients_says_so(capturable: bool) -> None:
    (weight,) = weights()
    optimizer = make("SGD", [weight])
    scaler = ToldByOthers("cpu", policy=Remembering(), capturable=capturable)
    give(scaler, weight, 1.0)
    scaler.unscale_(optimizer)
    before = scaler.policy_state
    with pytest.raises(PolicyError, match=r"Remembering\(\) needs the amax of the gradients"):
        scaler.update()
    assert scaler.policy_state == before
    scaler.update(8.0)  # a scale by hand is a way on
    assert scaler.get_scale() == 8.0


def test_an_optimizer_that_checks_for_itself_is_heard() -> None:
    """An optimizer of the old kind takes the scaler and asks it for the flags alone."""

    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            grad_scaler._check_inf_per_device(self)

    (weight,) = weights()
    scaler = ours(policy=Remembering())
    give(scaler, weight, -3.0)
    with pytest.warns(FutureWarning):
        scaler.step(Old([weight]))
    scaler.update()
    assert scaler.policy_state.amax == 3.0


@settings(max_examples=30)
@given(
    st.floats(0.0, width=32, exclude_min=True, allow_infinity=False)
    | st.integers(-149, 127).map(lambda e: 2.0**e)
)
def test_ranks_read_the_power_of_two_above_a_peak(amax: float) -> None:
    (weight,), sums = weights(size=1), []
    scaler = GradScaler("cpu", policy=Remembering(1.0), reduce=lambda readings: sums.append(readings.clone()))
    give(scaler, weight, amax)
    scaler.step(make("SGD", [weight]))
    scaler.update()
    digits, exponent = math.frexp(amax)
    least = max(exponent - (digits == 0.5), -149)
    assert scaler.last_step.amax == 2.0**least
    assert sums[0][2:].tolist() == [float(one == least) for one in range(-149, 129)]


def test_a_peak_of_0_has_no_bin() -> None:
    (weight,), sums = weights(), []
    scaler = GradScaler("cpu", policy=Remembering(1.0), reduce=lambda readings: sums.append(readings.clone()))
    give(scaler, weight, 0.0)
    scaler.step(make("SGD", [weight]))
    assert sums[0].eq(0.0).all()
