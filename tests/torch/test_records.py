"""What `last_step` says of steps that are not the usual ones: after `unscale_`, and of several optimizers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from preamp import Trace
from preamp.torch import GradScaler

from .pairs import INF, make, ours, theirs, weights

WAYS = {
    "host": ("SGD", {}),
    "fused": ("SGD fused", {}),
    "device": ("AdamW fused", {}),
    "capturable": ("SGD", {"capturable": True}),
    "ranks": ("SGD", {"reduce": lambda numbers: None}),
}
ways = pytest.mark.parametrize("way", list(WAYS))


@pytest.fixture
def run(way, request):
    """Return a scaler, an optimizer and its parameter, for one way of taking a step."""
    kind, options = WAYS[way]
    if way == "device":
        request.getfixturevalue("reads_cost")
    (weight,) = weights()
    return ours(**options), make(kind, [weight]), weight


def backward(scaler: Any, weight: torch.Tensor, factor: float) -> None:
    weight.grad = None
    scaler.scale((weight * factor).sum()).backward()


@ways
def test_unscaling_without_a_step_moves_the_scale_as_the_original_and_is_no_step(run):
    scaler, optimizer, weight = run
    original, seen = theirs(), []
    if not scaler._capturable:
        scaler.on_step = seen.append
    skipped = []
    for factor in (1.0, 1.0, INF, 1.0, 1.0, 1.0, INF):
        for one in (scaler, original):
            backward(one, weight, factor)
            one.unscale_(optimizer)
            one.update()
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (
            original.get_scale(),
            original._get_growth_tracker(),
        )
        skipped.append(
            None if scaler.last_step is None else (scaler.last_step.index, scaler.last_step.skipped)
        )
    assert skipped == [None, None, *[(0, True)] * 4, (1, True)]
    assert [step.index for step in seen] == ([] if scaler._capturable else [0, 1])
    assert scaler.state_dict()["preamp_state"] == {"steps": 2}


@ways
def test_a_skipped_step_is_told_without_the_loss_and_without_a_read_where_that_is_asked(run, way):
    scaler, optimizer, weight = run
    assert not scaler.has_skipped()
    unread = way in ("device", "capturable")
    for number, factor in enumerate((1.0, INF, 1.0), 1):
        backward(scaler, weight, factor)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.has_skipped() == (factor == INF)
        assert scaler.has_skipped(read=False) == (factor == INF and not unread)
        assert int(scaler.steps) == number
        assert isinstance(scaler.steps, torch.Tensor) == (way == "capturable")
    assert scaler.last_step.index == 2


@ways
def test_an_optimizer_that_is_unscaled_alone_is_not_part_of_another_ones_step(run):
    scaler, optimizer, weight = run
    (other,) = weights()
    idle = make("SGD", [other])
    for factor in (1.0, INF):
        backward(scaler, weight, 2.0)
        other.grad = torch.full((3,), factor)
        scaler.unscale_(idle)
        scaler.step(optimizer, max_norm=100.0)
        scaler.update()
        step = scaler.last_step
        assert step.skipped == (factor == INF)
        assert step.skipped or step.grad_norm == pytest.approx(2.0 * 3**0.5)


@ways
def test_the_norm_is_that_from_before_the_users_own_clipping(run):
    scaler, optimizer, weight = run
    backward(scaler, weight, 2.0)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], 1e-3)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.grad_norm == pytest.approx(2.0 * 3**0.5)


def test_a_plain_step_takes_no_norm():
    (weight,) = weights()
    scaler = ours()
    backward(scaler, weight, 2.0)
    scaler.step(make("SGD", [weight]))
    scaler.update()
    assert scaler.last_step.grad_norm is None


class CopiesUpdate(GradScaler):
    """As PyTorch's own body reads, which training libraries copy to change a part of it."""

    def update(self, new_scale=None):
        scale, tracker = self._check_scale_growth_tracker("update")
        found = [f for s in self._per_optimizer_states.values() for f in s["found_inf_per_device"].values()]
        factors = self._growth_factor, self._backoff_factor
        torch._amp_update_scale_(scale, tracker, sum(found), *factors, self._growth_interval)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


class TakesAllOfIt(GradScaler):
    step, update = torch.amp.GradScaler.step, torch.amp.GradScaler.update


@pytest.mark.parametrize("kind", [CopiesUpdate, TakesAllOfIt])
@pytest.mark.parametrize("optimizer", ["SGD", "SGD fused"])
def test_a_subclass_with_pytorchs_own_body_trains_as_the_original_and_is_recorded(kind, optimizer):
    trace = Trace()
    scalers = (
        kind("cpu", init_scale=8.0, growth_interval=2, on_step=trace),
        theirs(init_scale=8.0, growth_interval=2),
    )
    ends, scales = [], []
    for scaler in scalers:
        (weight,) = weights()
        one = make(optimizer, [weight])
        for factor in (1.0, 1.0, INF, 1.0):
            backward(scaler, weight, factor)
            scaler.step(one)
            scaler.update()
        ends.append(weight.tolist())
        scales.append(scaler.get_scale())
    assert ends[0] == ends[1]
    assert scales[0] == scales[1]
    assert [(step.index, step.skipped, step.scale, step.new_scale) for step in trace] == [
        (0, False, 8.0, 8.0),
        (1, False, 8.0, 16.0),
        (2, True, 16.0, 8.0),
        (3, False, 8.0, 8.0),
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_code_has_the_culprits_of_eager_code_but_no_first_one(compiled):
    torch.manual_seed(0)
    parts = [torch.nn.Linear(4, 4) for _ in range(3)]
    model = torch.nn.ModuleDict(dict(zip("abc", parts, strict=True)))

    def run(x):
        hidden = model["b"](model["a"](x))
        return model["c"](hidden + (hidden - hidden).sqrt())  # whose derivative is inf

    torch.compiler.reset()
    forward = torch.compile(run, backend="aot_eager") if compiled else run
    optimizer, scaler = make("SGD", model.parameters()), ours(model=model)
    scaler.scale(forward(torch.ones(4, 4)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    step = scaler.last_step
    assert set(step.culprits) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert step.first_culprits == (() if compiled else ("b.bias",))


def test_culprits_have_the_models_names_whatever_the_optimizers_were_made_from():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    scaler = ours(model=model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler.scale(model(torch.ones(4, 4)).sum() * INF).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert set(scaler.last_step.culprits) == {name for name, _ in model.named_parameters()}


def test_of_several_optimizers_a_culprit_tells_whose():
    """Both have the same names."""
    scaler, pairs = ours(), [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(part.named_parameters(), lr=0.1) for part in pairs]
    scaler.scale(pairs[0](torch.ones(1, 2)).sum() + pairs[1](torch.ones(1, 2)).sum() * INF).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert set(scaler.last_step.culprits) == {"optimizers[1].weight", "optimizers[1].bias"}
    assert set(scaler.last_step_of(optimizers[1]).culprits) == {"weight", "bias"}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("zeroed", [False, True])
def test_an_overflow_that_unscale_found_has_its_culprits_without_a_step(capturable, zeroed):
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    scaler = ours(model=torch.nn.Sequential(*models), capturable=capturable)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in models)
    scaler.scale(models[0](torch.ones(1, 2)).sum() * INF + models[1](torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(first)
    scaler.step(second)
    if zeroed:
        first.zero_grad()
    scaler.update()
    assert scaler.last_step.first_culprits == ("0.bias",)
    for step in (scaler.last_step, scaler.last_step_of(first)):
        assert step.skipped
        assert set(step.culprits) == {"0.weight", "0.bias"}
    assert scaler.last_step_of(second).culprits == ()
