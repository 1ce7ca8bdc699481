"""`scaler.step(optimizer, max_norm=, max_value=)` beside PyTorch's unscale_, clip_grad_norm_ and step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import PolicyError, Static
from preamp.torch import GradScaler
from tests.combinations import in_one_test
from tests.seeing import Remembering

from .pairs import INF, NAN, give, make, ours, theirs, weights

OPTIMIZERS = {
    "SGD": {},
    "SGD fused": {},
    "SGD fused momentum": {"momentum": 0.9},
    "AdamW": {},
    "AdamW fused": {},
    "Adagrad fused": {},
}
few = pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
LARGE = 2**15 + 1  # torch.dot takes the norm from 2**15 numbers on


def optimizer_of(kind, parameters, lr=0.01):
    return make(kind.removesuffix(" momentum"), parameters, lr=lr, **OPTIMIZERS[kind])


def close(a, b, rtol=3e-5, atol=1e-7):
    """PyTorch's float32 norm of 2**15 equal numbers is off by 1e-5, hence the tolerance."""
    return all(torch.allclose(x, y, rtol=rtol, atol=atol) for x, y in zip(a, b, strict=True))


def parameters_of(layout, dtype):
    """Return parameters of several shapes: one empty, one large, some not contiguous."""
    shapes = [(5,), (3, 4), (2, 3, 2, 2), (0,), (LARGE,), (190, 180), ()]
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for shape in shapes]
    if layout == "channels_last":
        made[2] = made[2].contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        made = [one.t().contiguous().t() if one.ndim == 2 else one for one in made]
    return [torch.nn.Parameter(one) for one in made]


def gradients_for(parameters, seed, strength):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(p.shape, generator=generator) * strength + strength for p in parameters]
    return [torch.empty_like(p).copy_(one) for p, one in zip(parameters, made, strict=True)]


def exactly_clipped(gradient, max_norm=math.inf, max_value=math.inf):
    clamped = gradient.clamp(-max_value, max_value)
    return clamped * min(1.0, max_norm / clamped.norm().item())


@settings(max_examples=20, deadline=None)
@given(
    script=st.lists(
        st.tuples(
            st.integers(0, 99),
            st.sampled_from([0.05, 1.0, 30.0]),
            st.sampled_from([1.0, 1.0, 1.0, INF, NAN]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    kind=st.sampled_from(list(OPTIMIZERS)),
    layout=st.sampled_from(["plain", "channels_last", "transposed"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    max_norm=st.sampled_from([None, 1.0, 50.0, torch.tensor(3.0)]),
    max_value=st.sampled_from([None, 0.1, 20.0]),
    capturable=st.booleans(),
)
def test_scales_parameters_and_gradients_are_those_of_the_three_calls(
    script, kind, layout, dtype, max_norm, max_value, capturable
):
    a, b = parameters_of(layout, dtype), parameters_of(layout, dtype)
    mine, original = ours(capturable=capturable), theirs()
    one, other = optimizer_of(kind, a), optimizer_of(kind, b)
    if kind == "SGD fused momentum":  # the original's begins with unwritten memory after a first skip
        other = make("SGD", b, lr=0.01, momentum=0.9)
    for seed, strength, factor, explicit in script:
        for scaler, parameters in ((mine, a), (original, b)):
            for parameter, gradient in zip(parameters, gradients_for(a, seed, strength), strict=True):
                give(scaler, parameter, gradient * scaler.get_scale())
            parameters[0].grad[seed % 5] *= factor
        plain = [g / original.get_scale() for g in (p.grad for p in b)]
        if explicit:
            mine.unscale_(one)
        mine.step(one, max_norm=max_norm, max_value=max_value)
        original.unscale_(other)
        if max_value is not None:
            clip_grad_value_(b, max_value)
        if max_norm is not None:
            clip_grad_norm_(b, float(max_norm))
        original.step(other)
        mine.update()
        original.update()
        assert mine.get_scale() == original.get_scale()
        assert mine.last_step.skipped == (factor != 1.0)
        assert close(a, b, atol=1e-5)  # a thousandth of a step: Adam divides what cancels by what cancels
        if not mine.last_step.skipped:
            assert close([p.grad for p in a], [p.grad for p in b])
        else:
            assert all(torch.equal(p.grad, g) for p, g in list(zip(a, plain, strict=True))[1:]) or (
                capturable and "fused" in kind  # as in the original, the kernel leaves them scaled
            )
        if max_norm is not None and not mine.last_step.skipped:
            exact = math.hypot(*(p.double().norm().item() for p in plain))
            assert mine.last_step.grad_norm == pytest.approx(exact, rel=1.5e-5)


@pytest.mark.parametrize("kind", ["SGD", "SGD fused", "AdamW fused"])
@in_one_test(
    dtype=[torch.float16, torch.bfloat16],
    shares=[{"max_norm": 0.3}, {"max_value": 0.3}, {"max_norm": 0.2, "max_value": 0.5}],
    scale=[2.0**-3, 2.0**16],
    capturable=[False, True],
)
def test_half_gradients_are_clipped_to_the_last_digit(dtype, kind, shares, scale, capturable):
    """A factor far below 1 is no half number, and must not be rounded to one."""
    (weight,) = weights(dtype=dtype, size=50)
    scaler, optimizer = ours(init_scale=scale, capturable=capturable), optimizer_of(kind, [weight])
    scaled = (torch.randn(50, generator=torch.Generator().manual_seed(1)) * min(scale, 2.0**11)).to(dtype)
    plain = scaled.double() / scale
    largest = {"max_norm": plain.norm().item(), "max_value": plain.abs().max().item()}
    limits = {name: share * largest[name] for name, share in shares.items()}
    give(scaler, weight, scaled.clone())
    scaler.step(optimizer, **limits)
    assert not scaler.last_step.skipped
    exact, digits = exactly_clipped(plain, **limits), torch.finfo(dtype)
    spacing = digits.smallest_normal * digits.eps
    assert torch.allclose(weight.grad.double(), exact, rtol=1.5 * digits.eps, atol=spacing)


@few
@in_one_test(
    entries=[[1e20] * 4, [1e30, 1e-10, 3.0, 0.0], [3e38] * 3, [1e38] * LARGE],
    scale=[1.0, 2.0**16],
    max_norm=[1.0, 1e-3],
)
def test_a_norm_whose_squares_overflow_is_taken_again_exactly(kind, entries, scale, max_norm):
    (weight,) = weights(size=len(entries))
    scaler, optimizer = ours(init_scale=scale), optimizer_of(kind, [weight], lr=1.0)
    coefficients = torch.tensor(entries) / scale
    scaler.scale((weight * coefficients).sum()).backward()
    exact = coefficients.double()
    scaler.step(optimizer, max_norm=max_norm)
    assert not scaler.last_step.skipped
    assert scaler.last_step.grad_norm == pytest.approx(exact.norm().item(), rel=1e-6)
    assert torch.allclose(weight.grad.double(), exact / exact.norm() * max_norm, rtol=1e-5, atol=1e-30)


@few
@in_one_test(entry=[(1e30, torch.float32), (1e200, torch.float64)], size=[3, LARGE])
def test_large_gradients_are_finite_although_their_squares_are_not(kind, entry, size):
    entry, dtype = entry
    (weight,) = weights(size=size, dtype=dtype)
    scaler, optimizer = ours(), optimizer_of(kind, [weight])
    give(scaler, weight, entry)
    scaler.step(optimizer)
    assert not scaler.last_step.skipped


@few
@in_one_test(limits=[{}, {"max_norm": 1.0}, {"max_value": 1.0}])
def test_a_gradient_without_numbers_is_no_obstacle(kind, limits):
    (weight,) = weights(size=0)
    scaler, optimizer = ours(init_scale=0.25), optimizer_of(kind, [weight])
    give(scaler, weight, torch.zeros(0))
    scaler.step(optimizer, **limits)
    assert not scaler.last_step.skipped


@few
@pytest.mark.parametrize("capturable", [False, True])
def test_max_norm_inf_measures_and_changes_nothing(kind, capturable):
    values = []
    for limits in ({"max_norm": math.inf}, {}):
        parameters = parameters_of("plain", torch.float32)
        scaler, optimizer = ours(capturable=capturable), optimizer_of(kind, parameters)
        for parameter, gradient in zip(parameters, gradients_for(parameters, 0, 1.0), strict=True):
            give(scaler, parameter, gradient * 1024.0)
        scaler.step(optimizer, **limits)
        values.append([p.detach() for p in parameters] + [p.grad for p in parameters])
        norm = scaler.last_step.grad_norm
        assert (norm is None) == (not limits)
    assert all(torch.equal(x, y) for x, y in zip(*values, strict=True))


@in_one_test(
    name=["max_norm", "max_value"], limit=[0, -1.0, NAN, -INF, "x", True, [1.0]], enabled=[True, False]
)
def test_a_limit_that_cannot_work_is_refused_and_changes_nothing(name, limit, enabled):
    (weight,) = weights()
    scaler, optimizer = ours(enabled=enabled), make("SGD", [weight], lr=1.0)
    give(scaler, weight, 1024.0)
    with pytest.raises(PolicyError, match=rf"{name}=.* Write {name}=1\.0, or None"):
        scaler.step(optimizer, **{name: limit})
    assert (weight[0].item(), weight.grad[0].item()) == (0.0, 1024.0)
    scaler.step(optimizer)
    assert weight[0].item() == -1.0 if enabled else -1024.0


@pytest.mark.parametrize(
    "limits", [{"max_norm": 1.0}, {"max_value": 0.5}, {"max_norm": 1.0, "max_value": 0.7}]
)
def test_a_disabled_scaler_clips_all_the_same(limits):
    results, norms = [], []
    for enabled in (False, True):
        (weight,) = weights()
        scaler, optimizer = ours(enabled=enabled), make("SGD", [weight], lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale((weight * torch.tensor([1.0, 2.0, -3.0])).sum()).backward()
            scaler.step(optimizer, **limits)
            scaler.update()
        results.append(weight.detach())
        norms.append(scaler.last_step.grad_norm)
    assert close(*[[r] for r in results])
    assert norms[0] == pytest.approx(norms[1] if "max_norm" in limits else None)


@in_one_test(
    limits=[{"max_norm": 1.0}, {"max_norm": 1.0, "max_value": 0.5}],
    closure=[False, True],
    alone=[True, False],
)
def test_a_disabled_scaler_records_what_clip_grad_norm_returns(limits, closure, alone):
    others = {} if alone else {"reduce": lambda readings: None}
    for value, finite in ((4.0, True), (INF, False), (NAN, False)):
        (weight,), (same,) = weights(), weights()
        scaler, optimizer = ours(enabled=False, **others), make("SGD", [weight], lr=1.0)
        gradient = torch.tensor([3.0, value, 0.0])
        weight.grad, same.grad = gradient.clone(), gradient.clone()
        scaler.step(optimizer, *([lambda: torch.zeros(())] if closure else []), **limits)
        expected = clip_grad_norm_([same], 1.0).item()
        last = scaler.last_step
        assert (last.finite, last.skipped) == (finite, False)  # the step is taken all the same
        assert last.grad_norm == (pytest.approx(expected) if finite else None)
        scaler.update()
        scaler.step(optimizer)
        assert (scaler.last_step.finite, scaler.last_step.grad_norm) == (True, None)  # of this step


@few
@in_one_test(explicit=[False, True], capturable=[False, True])
def test_a_grad_scale_that_the_user_set_counts(kind, explicit, capturable):
    (weight,) = weights()
    scaler, optimizer = ours(capturable=capturable), make(f"{kind} fused".replace("d fused", "d"), [weight])
    give(scaler, weight, torch.tensor([0.0, 3.0, 4.0]) * 1024.0 * 8.0)
    optimizer.grad_scale = torch.tensor(8.0)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, max_norm=1.0)
    assert scaler.last_step.grad_norm == pytest.approx(5.0)
    assert torch.allclose(weight.grad, torch.tensor([0.0, 0.6, 0.8]))
    assert not hasattr(optimizer, "grad_scale")


@few
@pytest.mark.parametrize("enabled", [True, False])
def test_a_limit_of_the_scaler_holds_in_every_step_that_is_given_none(kind, enabled):
    def stepped(options, **limits):
        (weight,) = weights()
        scaler = GradScaler("cpu", init_scale=4.0, enabled=enabled, **options)
        for _ in range(2):
            give(scaler, weight, 3.0)
            scaler.step(make(kind, [weight], lr=0.1), **limits)
            scaler.update()
        return weight.tolist()

    limited = {"max_norm": 0.5}
    assert stepped(limited) == stepped({}, **limited)
    assert stepped(limited, max_norm=2.0) == stepped({}, max_norm=2.0)
    assert stepped(limited, max_value=0.125) == stepped({}, **limited, max_value=0.125)
    assert stepped(limited, max_norm=INF) == stepped({}) != stepped(limited)


def test_a_limit_of_the_scaler_that_cannot_work_is_refused():
    with pytest.raises(PolicyError, match=r"max_norm=-1.*Write max_norm=1.0"):
        GradScaler("cpu", max_norm=-1)


class Calls(TorchDispatchMode):
    """Counts ATen calls, and reads to the host except of the scale, which only a CPU reads."""

    def __init__(self, scaler):
        super().__init__()
        self.calls = self.reads = 0
        self.scaler = scaler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        is_read = "_local_scalar_dense" in str(func)
        self.reads += is_read and (self.scaler is None or args[0] is not self.scaler._scale)
        return func(*args, **(kwargs or {}))


def counted(scaler, kind, *, bare=False, **limits) -> Calls:
    """Count what the second iteration on 161 small gradients calls; `bare` is the optimizer alone."""
    parameters = weights(161, size=4)
    optimizer, loss = optimizer_of(kind, parameters), torch.zeros(())
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones(4)
        with Calls(scaler) as calls:
            if not bare:
                scaler.scale(loss)
                scaler.step(optimizer, **limits)
                scaler.update()
            else:
                optimizer.step()
    return calls


def test_combined_clipping_takes_a_handful_of_calls():
    never = {"init_scale": 1024.0, "growth_interval": 10**6}
    own = counted(None, "AdamW fused", bare=True).calls
    assert counted(GradScaler("cpu", **never), "AdamW fused", max_norm=1.0).calls - own <= 9
    assert counted(GradScaler("cpu", **never), "AdamW fused").calls - own <= 9


@pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
def test_a_peak_takes_one_call_for_each_gradient(kind):
    """A fused step that looks for the amax looks for nothing else."""
    blind, seeing = (
        counted(GradScaler("cpu", policy=policy), kind).calls
        for policy in (Static(1024.0), Remembering(1024.0))
    )
    assert 161 <= seeing - blind <= 161 + 6


@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}, {"max_norm": 1.0, "max_value": 0.5}])
@pytest.mark.usefixtures("reads_cost")
def test_a_policy_that_sees_reads_no_more_than_one_that_does_not(limits):
    for kind, options in (("AdamW fused", {}), ("SGD", {"capturable": True})):
        bare = counted(None, kind, bare=True).reads
        assert counted(ours(policy=Remembering(1024.0), **options), kind, **limits).reads == bare


@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}, {"max_norm": 1.0, "max_value": 0.5}])
@pytest.mark.usefixtures("reads_cost")
def test_where_reads_cost_a_fused_step_has_none_and_any_other_one(limits):
    fused = ours()
    assert counted(fused, "AdamW fused", **limits).reads == 0
    norm = pytest.approx(644**0.5 / 1024) if "max_norm" in limits else None
    expected = (1, 1024.0, True, False, 1024.0, 0.0, norm, None, None, (), None, (), None, (), ())
    assert fused.last_step == expected
    assert counted(ours(), "SGD", **limits).reads == 1 + ("max_value" in limits)
    for kind in ("SGD", "AdamW fused", "SGD fused momentum"):
        bare = counted(None, kind, bare=True).reads
        assert counted(ours(capturable=True), kind, **limits).reads == bare
