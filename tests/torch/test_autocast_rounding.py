"""Rounding of what a rehearsal computes in float32, in graphs, beside casts down and up again."""

import pytest
import torch

from preamp.torch import autocast
from tests.compilers import HAS_CXX

from .regions import BRAIN, HALF, numbers

dtypes = pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)


def twice(x):
    """Return a tensor as products take and give it: this one multiplies what is negative by 1."""
    one = torch.ones(1)
    return torch.prelu(torch.prelu(x, one), one)


def rounded(x, dtype, function=twice):
    """Return what a function returns in a rehearsal, in float32."""
    with autocast("cpu", dtype, emulate=True):
        return function(x).float()


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def equal(one, other):
    """Return whether tensors are equal, signs of zero and places of NaN included."""
    alike = (one == other) & (one.signbit() == other.signbit())
    return bool((alike | (one.isnan() & other.isnan())).all())


def of_all_exponents(dtype):
    """Return numbers of every exponent and sign: exact, halfway between two, beside that, and random."""
    high = torch.arange(2**16) << 16
    bits = [high | low for low in (0, 0x8000, 0x7FFF, 0x8001, 0x1000, 0x0FFF)]
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    floats = torch.cat([*bits, random]).to(torch.int32).view(torch.float32)
    low = torch.finfo(dtype)
    return torch.cat([floats, numbers(50_000) * low.smallest_normal, numbers(50_000) * (low.max / 2)])


@dtypes
def test_it_is_what_casts_give_bit_for_bit(dtype):
    x = of_all_exponents(dtype)
    assert equal(rounded(x, dtype, compiled(twice)), x.to(dtype).float())
    assert equal(rounded(x, dtype), x.to(dtype).float())


@dtypes
def test_gradients_are_rounded(dtype):
    x, seed = numbers(64).requires_grad_(), 3.0 * numbers(64, seed=1)
    (gradient,) = torch.autograd.grad(rounded(x, dtype, compiled(twice)), x, seed)
    assert equal(gradient, seed.to(dtype).float())


def test_under_transformations_of_functions():
    def loss(row):
        return (twice(row) * twice(row)).sum()

    x, gradients = numbers(5, 4), torch.func.vmap(torch.func.grad(loss))
    assert equal(rounded(x, BRAIN, compiled(gradients)), rounded(x, BRAIN, gradients))
    assert not equal(gradients(x), rounded(x, BRAIN, gradients))


@pytest.mark.skipif(not HAS_CXX, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore:Skipping serialization of skipfiles:UserWarning")  # PyTorch 2.6
def test_inductor_does_not_drop_it():
    """It drops a cast down and up again, because it computes both precisions in float32."""
    torch._dynamo.reset()
    x, w = numbers(16, 16) * 2.0**12, numbers(16, 16, seed=1).requires_grad_()

    def run(x, w):
        return (x.neg() @ w * 0.75) @ w * 2.0**-10

    def learned(run):
        with autocast("cpu", HALF, emulate=True):
            result = run(x, w)
        result = result.float()
        return result.detach(), *torch.autograd.grad(result.isfinite().float().mul(result).nansum(), w)

    (result, gradient), (expected, its_gradient) = learned(torch.compile(run, fullgraph=True)), learned(run)
    assert 0 < result.isinf().sum() < result.numel()
    assert equal(result, expected)
    assert equal(gradient, its_gradient)
    assert not torch.allclose(result, run(x, w), rtol=1e-5)
