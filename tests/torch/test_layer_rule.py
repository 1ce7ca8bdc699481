"""How large factors are: what they rescue, the published formula, limits, and when statistics are taken."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from preamp import PolicyError
from preamp.torch import LayerwiseScale, autocast

from .layers import FAINT, backward_of, deep, relative_error

# What is rescued


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_gradients_that_low_precision_flushes_come_close_to_float64s(dtype):
    model = deep(depth=8, activation=nn.Sigmoid)
    x, factor = torch.randn(32, 16), 2.0**-6 if dtype is torch.float16 else 2.0**4
    exact_model = copy.deepcopy(model).double()
    exact = backward_of(torch.Tensor.backward, exact_model, exact_model(x.double()).square().mean() * factor)

    def loss():
        with autocast("cpu", dtype, emulate=True):
            return model(x).float().square().mean() * factor

    flushed = backward_of(torch.Tensor.backward, model, loss())
    layerwise = LayerwiseScale(model, dtype=dtype, bound=2.0**20)
    found = [backward_of(layerwise.backward, model, loss()) for _ in range(5)]
    assert relative_error(flushed, exact) == 1.0  # nothing of some layer's is left
    assert relative_error(found[-1], exact) < (0.004 if dtype is torch.float16 else 0.5)
    assert layerwise.factors["0"] >= 2.0**14


def test_of_layers_that_run_in_a_loop_every_turn_has_its_factor():
    model, x = deep(depth=1), torch.randn(32, 16)
    layerwise, marks = LayerwiseScale(model, bound=2.0**20), []

    def loss(model, x):
        for _ in range(10):
            x = torch.sigmoid(model(x))
        return x.square().mean() * 2.0**-6

    exact_model = copy.deepcopy(model).double()
    x = x.requires_grad_()
    exact = backward_of(torch.Tensor.backward, exact_model, loss(exact_model, x.double()), x)
    with autocast("cpu", torch.float16, emulate=True):
        flushed = backward_of(torch.Tensor.backward, model, loss(model, x), x)
    choose = layerwise._rule.potential_below
    for _ in range(4):
        marks.clear()
        layerwise._rule.potential_below = lambda mark, above: marks.append(mark.use) or choose(mark, above)
        with autocast("cpu", torch.float16, emulate=True):
            found = backward_of(layerwise.backward, model, loss(model, x), x)
    assert sorted(marks) == list(range(10))
    assert not flushed["input 0"].any()
    assert relative_error(found, exact) < 0.01


# When statistics are taken, and what they cost


class Reads(TorchFunctionMode):
    """Counts reads to the host."""

    NAMES = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in self.NAMES
        return function(*args, **(kwargs or {}))


def reads_of(run):
    with Reads() as reads:
        run()
    return reads.count


def test_statistics_cost_one_read_and_other_passes_none():
    model, x = deep(), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, every=10)
    found = [reads_of(lambda: layerwise.backward(model(x).square().mean())) for _ in range(30)]
    assert [n + 1 for n, count in enumerate(found) if count] == [1, 2, 4, 8, 10, 20, 30]
    assert max(found) == 1
    layerwise.measure()
    assert [reads_of(lambda: layerwise.backward(model(x).square().mean())) for _ in range(2)] == [1, 0]


def test_a_pass_that_overflows_lowers_factors_and_the_next_one_measures_again():
    model, x = deep(activation=nn.Sigmoid), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, every=1000)

    def backward(factor):
        return reads_of(lambda: layerwise.backward(model(x).square().mean() * factor)), layerwise.factors["0"]

    assert [backward(2.0**-6) for _ in range(3)] == [(1, 1.0), (1, 1024.0), (0, 1024.0)]
    assert [backward(math.inf) for _ in range(3)] == [(1, 1024.0), (1, 512.0), (1, 256.0)]
    assert [backward(2.0**-6) for _ in range(2)] == [(1, 128.0), (1, 1024.0)]  # the eighth is due anyway
    assert backward(2.0**-6) == (0, 1024.0)


def test_large_gradients_are_not_raised_and_a_limit_lowers_what_was_raised():
    model, x = deep(depth=3, activation=nn.Sigmoid), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, every=1, bound=2.0**30, layer_bound=2.0**30)

    def factors(factor):
        for _ in range(2):
            layerwise.backward(model(x).square().mean() * factor)
        return list(layerwise.factors.values())

    assert factors(2.0**8) == [1.0] * 3
    assert min(factors(2.0**-30)) >= 2.0**10


class OneEntry(nn.Linear):
    """A layer whose weight is zero but for one entry: its standard deviation says little of its peak."""

    def __init__(self):
        super().__init__(64, 64, bias=False)
        nn.init.zeros_(self.weight)
        self.weight.data[0, 0] = 1.0


@pytest.mark.parametrize("emulate", [False, True], ids=["leaves", "casts of leaves"])
@pytest.mark.parametrize(("x", "factor"), [(0.0, 2.0**9), (2.0**10, 2.0**1)])
def test_limits_are_set_by_the_largest_entries(x, factor, emulate):
    """65504 has room for 64 products of 1 raised by 2**9, and for 16 times a weight's 2**10 raised by 2."""
    model = nn.Sequential(OneEntry(), OneEntry())
    layerwise = LayerwiseScale(model, every=1, flushed=1e-9, layer_bound=2.0**40, bound=2.0**40)
    incoming = torch.zeros(4096, 64)
    incoming[0, 0] = 1.0
    for _ in range(4):
        with autocast("cpu", torch.float16, enabled=emulate, emulate=emulate):
            y = model(torch.full((4096, 64), x))
        layerwise.backward(y, incoming.to(y.dtype))
    assert list(layerwise.factors.values()) == [factor, factor]


def test_of_gradients_that_are_all_zero_nothing_is_learned():
    model, x = deep(depth=3), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, every=1)
    for factor in (FAINT, FAINT, 0.0, FAINT):
        layerwise.backward(model(x).square().mean() * factor)
    assert list(layerwise.factors.values()) == [16.0, 256.0, 1024.0]


@pytest.mark.parametrize(
    ("layer_bound", "bound", "largest"), [(4.0, 8.0, [4, 8, 8]), (3.0, 1000.0, [2, 4, 8])]
)
def test_bounds_hold_for_a_layer_and_for_the_product(layer_bound, bound, largest):
    model, x = deep(depth=3), torch.randn(4, 16)
    layerwise = LayerwiseScale(model, layer_bound=layer_bound, bound=bound)
    for _ in range(3):
        layerwise.backward(model(x).square().mean() * FAINT)
    assert list(layerwise.factors.values()) == largest


def test_the_papers_formula():
    """Its sigma is rms(g) rms(W) sqrt(n / 2), its factor u_min / (sqrt(2) erfinv(T) sigma)."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 512, bias=False)
    x = torch.randn(8, 8)
    layerwise = LayerwiseScale(layer, layer_bound=2.0**40, bound=2.0**40, flushed=0.01)
    incoming = torch.randn(8, 512) * 1e-7
    for _ in range(2):
        layerwise.backward(layer(x), incoming)
    sigma = math.sqrt(incoming.square().mean() * layer.weight.detach().square().mean() * 512 / 2)
    erfinv = torch.erfinv(torch.tensor(0.01)).item()
    factor = 2.0**-24 / (math.sqrt(2.0) * erfinv * sigma)
    assert layerwise.factors == {"": 2.0 ** math.floor(math.log2(factor))}
    wide = torch.randn(4096, 512) * 1e-7  # so many rows that the prediction can be compared with what leaves
    out = (wide @ layer.weight.detach()).std()
    assert out == pytest.approx(math.sqrt(2.0) * sigma, rel=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": torch.float32},
        {"dtype": "float16"},
        {"every": 0},
        {"every": 2.5},
        {"flushed": 0.0},
        {"flushed": 1.0},
        {"layer_bound": 0.5},
        {"bound": math.inf},
        {"bound": "large"},
    ],
)
def test_settings_that_cannot_work(wrong):
    model = deep(depth=2)
    (name,) = wrong
    with pytest.raises(PolicyError, match=rf"{name}=.*Write "):
        LayerwiseScale(model, **wrong)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_layers_is_refused():
    with pytest.raises(PolicyError, match="Tanh has no Linear or Conv layer"):
        LayerwiseScale(nn.Tanh())
