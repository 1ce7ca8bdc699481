"""Closures: whatever the optimizer evaluates, it sees gradients that are unscaled, checked and clipped."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Trace
from preamp.errors import UsageError

from .pairs import INF, NAN, contents, make, ours, state_of, theirs

SEARCHES = [None, "strong_wolfe"]
searches = pytest.mark.parametrize("search", SEARCHES)
passings = pytest.mark.parametrize("passing", ["positional", "keyword"])
ONCE = ["SGD momentum", "Adam", "AdamW fused"]


def pass_closure(step, closure, passing, **limits):
    return step(closure, **limits) if passing == "positional" else step(closure=closure, **limits)


class Fit:
    """A least-squares problem that LBFGS needs many evaluations for. `scaler=None`: plain PyTorch."""

    def __init__(self, kind="LBFGS", scaler=None, **options):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(20, 4, generator=generator), torch.randn(20, generator=generator)
        self.weight, self.bias = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(1))
        self.scaler, self.evaluations, self.poison = scaler, 0, {}
        if kind == "LBFGS":
            options = {"max_iter": 5, "lr": 0.5, **options}
        momentum = {"momentum": 0.9} if kind.endswith(" momentum") else {}
        kind = kind.removesuffix(" momentum")
        self.optimizer = make(kind, [self.weight, self.bias], **{"lr": 0.1, **options, **momentum})

    def closure(self):
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = self.loss()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def error(self):
        return (torch.tanh(self.x @ self.weight) + self.bias - self.y).pow(4).mean()

    def loss(self):
        loss = self.error() * self.poison.get(self.evaluations, 1.0)
        self.evaluations += 1
        return loss

    def step(self, passing="positional", **limits):
        if self.scaler is None:
            return self.optimizer.step(self.closure)
        bound = lambda *args, **kwargs: self.scaler.step(self.optimizer, *args, **kwargs)  # noqa: E731
        result = pass_closure(bound, self.closure, passing, **limits)
        self.scaler.update()
        return result

    def everything(self):
        return contents([self.weight.detach(), self.bias.detach()]), state_of(self.optimizer)


@searches
@passings
def test_lbfgs_takes_the_steps_it_takes_without_a_scale(search, passing):
    """The scale is a power of two, so every bit is the same."""
    a, b = Fit(scaler=ours(), line_search_fn=search), Fit(line_search_fn=search)
    for _ in range(4):
        loss = a.step(passing)
        assert loss.item() == b.step().item()
        assert a.everything() == b.everything()
        assert a.evaluations == b.evaluations
    assert a.evaluations > 8
    assert a.scaler.get_scale() == 2048.0  # one clean step for each call of step, however many evaluations


@settings(max_examples=15, deadline=None)
@given(
    search=st.sampled_from(SEARCHES),
    steps_before=st.integers(0, 2),
    nth=st.integers(0, 5),
    value=st.sampled_from([INF, -INF, NAN]),
)
def test_an_overflow_in_any_evaluation_takes_all_of_the_step_back(search, steps_before, nth, value):
    a, b = Fit(scaler=ours(), line_search_fn=search), Fit(line_search_fn=search)
    for _ in range(steps_before):
        a.step()
        b.step()
    poisoned = a.evaluations + nth
    a.poison, before = {poisoned: value}, a.everything()
    result = a.step()
    if a.evaluations <= poisoned:
        return  # it needed fewer evaluations
    assert result is None
    assert a.scaler.last_step.skipped
    assert a.scaler.get_scale() == 512.0
    assert a.everything()[0] == before[0]
    if steps_before:
        assert a.everything()[1] == before[1]
    a.step()
    b.step()
    assert a.everything() == b.everything()


@pytest.mark.parametrize("kind", ONCE)
@passings
def test_other_optimizers_take_closures_too(kind, passing):
    a, b = Fit(kind, ours()), Fit(kind)
    for number in range(4):
        if number == 2:
            a.poison = {a.evaluations: NAN}
            before = a.everything()
            assert a.step(passing) is None
            assert a.everything() == before
            assert a.scaler.last_step.culprits == (
                "param_groups[0]['params'][1]",
                "param_groups[0]['params'][0]",
            )
        assert a.step(passing).item() == b.step().item()
        assert a.everything() == b.everything()
        assert not a.scaler.last_step.skipped


class Watched(torch.optim.LBFGS):
    """LBFGS that calls a function after every evaluation, when it is about to read the gradients."""

    def step(self, closure):
        def evaluate():
            loss = closure()
            self.watch()
            return loss

        return super().step(evaluate)


@searches
@pytest.mark.parametrize("limits", [{"max_norm": 0.02}, {"max_value": 0.01}])
def test_every_evaluation_is_clipped(search, limits):
    """Each is compared where it was made: on clipped gradients, LBFGS makes much of the last bit."""
    fit, seen = Fit(scaler=ours()), []
    parameters = [fit.weight, fit.bias]
    fit.optimizer = Watched(parameters, lr=0.1, max_iter=5, line_search_fn=search)

    @torch.enable_grad()
    def watch():
        unclipped = torch.cat(torch.autograd.grad(fit.error(), parameters))
        seen.append((torch.cat([parameter.grad for parameter in parameters]), unclipped))

    fit.optimizer.watch = watch
    for _ in range(2):
        fit.step(**limits)
    assert len(seen) == fit.evaluations > 8
    for gradient, unclipped in seen:
        if "max_norm" in limits:
            expected = unclipped * (limits["max_norm"] / torch.linalg.vector_norm(unclipped))
        else:
            expected = unclipped.clamp(-limits["max_value"], limits["max_value"])
        assert torch.allclose(gradient, expected, rtol=1e-4)
        assert not torch.allclose(gradient, unclipped, rtol=1e-2)


@pytest.mark.parametrize("kind", ["LBFGS", "SGD", "AdamW fused"])
def test_a_closure_may_unscale_and_clip_by_hand(kind):
    a, b = Fit(kind, ours()), Fit(kind)
    for fit in (a, b):

        def closure(fit=fit, plain=fit.closure):
            loss = plain()
            if fit.scaler:
                fit.scaler.unscale_(fit.optimizer)
            torch.nn.utils.clip_grad_norm_([fit.weight, fit.bias], 0.05)
            return loss

        fit.closure = closure
        fit.step()
        fit.step()
    assert a.everything() == b.everything()
    a.poison = {a.evaluations: INF}
    before = a.everything()[0]
    assert a.step() is None
    assert a.everything()[0] == before


@pytest.mark.parametrize("kind", ["LBFGS", "SGD", "AdamW fused"])
def test_a_closure_that_does_not_scale_is_refused(kind):
    fit = Fit(kind, ours())
    fit.step()
    before = fit.everything()[0]
    scaling = fit.closure

    def forgets():
        fit.optimizer.zero_grad()
        loss = fit.weight.sum()
        loss.backward()
        return loss

    fit.closure = forgets
    with pytest.raises(UsageError, match=r"did not scale its loss\. Write scaler\.scale\(loss\)\.backward"):
        fit.step()
    assert fit.everything()[0] == before
    fit.closure = scaling
    fit.step()  # and the scaler can be used further
    assert fit.everything()[0] != before


@pytest.mark.parametrize("none", [((None,), {}), ((), {"closure": None})])
@pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
def test_no_closure_is_passed_on_as_none(none, kind):
    """Accelerate calls `scaler.step(optimizer, None)`."""
    args, kwargs = none
    values = []
    for scaler in (ours(), theirs()):
        fit = Fit(kind, scaler)
        fit.closure()
        if kwargs and not hasattr(scaler, "last_step"):
            with pytest.raises(RuntimeError, match="Closure use"):
                scaler.step(fit.optimizer, **kwargs)
            args, kwargs = (None,), {}
        scaler.step(fit.optimizer, *args, **kwargs)
        scaler.update()
        values.append(fit.everything())
    assert values[0] == values[1]


def test_what_a_closure_does_is_recorded_once():
    trace = Trace()
    fit = Fit(scaler=ours(on_step=trace))
    fit.step(max_norm=100.0)
    fit.poison = {fit.evaluations + 2: INF}
    fit.step(max_norm=100.0)
    assert [(step.index, step.skipped, step.new_scale) for step in trace] == [
        (0, False, 1024.0),
        (1, True, 512.0),
    ]
    gradient = torch.cat([fit.weight.grad, fit.bias.grad])
    assert not gradient.isfinite().any()
    assert trace[0].grad_norm > 0.0
    fit.scaler.step(fit.optimizer, fit.closure)
    with pytest.raises(RuntimeError, match="already been called"):
        fit.scaler.step(fit.optimizer, fit.closure)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware SGD, of nobody's library: climbs, evaluates again, and steps from where it was."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        loss = closure()
        parameters = self.param_groups[0]["params"]
        climbs = [p.grad * 0.05 for p in parameters]
        torch._foreach_add_(parameters, climbs)
        closure()
        torch._foreach_sub_(parameters, climbs)
        for parameter in parameters:
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return loss


@pytest.mark.parametrize("nth", [0, 1])
def test_an_optimizer_that_moves_before_it_evaluates_again_is_put_back(nth):
    a, b = Fit(scaler=ours()), Fit()
    for fit in (a, b):
        fit.optimizer = Sharpness([fit.weight, fit.bias])
        fit.step()
    assert a.everything() == b.everything()
    a.poison = {a.evaluations + nth: INF}
    before = copy.deepcopy(a.everything())
    assert a.step() is None
    assert a.everything() == before
    a.step()
    b.step()
    assert a.everything() == b.everything()


@pytest.mark.parametrize("limits", [{"max_norm": 0.02}, {"max_value": 0.01}, {}])
@passings
def test_a_disabled_scaler_clips_what_the_closure_made(limits, passing):
    a, b = Fit("SGD", ours(enabled=False)), Fit("SGD", ours())
    for _ in range(2):
        a.step(passing, **limits)
        b.step(passing, **limits)
    assert torch.allclose(a.weight, b.weight, rtol=1e-4)
