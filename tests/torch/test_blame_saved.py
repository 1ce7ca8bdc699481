"""What blame keeps for its second backward pass: values, and how much memory they take."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.torch.blaming.saved import Difference, Packed, Saved, difference_of, packed, unpacked, value_of


def generator(seed):
    return torch.Generator().manual_seed(seed)


@settings(max_examples=25)
@given(st.integers(1, 700), st.integers(-60, 60), st.integers(0, 99), st.floats(0, 12))
def test_packed_values_change_by_a_sixteenth_at_most(count, power, seed, spread):
    """Unless they are 2**-15 of the largest of their block or less."""
    exponents = torch.randn(count, generator=generator(seed)).clamp(-1, 1) * spread / 2
    x = torch.randn(count, generator=generator(seed)) * 2.0**power * torch.exp2(exponents)
    back = unpacked(packed(x), x)
    blocks = torch.nn.functional.pad(x.abs(), (0, -count % 128)).view(-1, 128)
    small = (blocks.amax(1, keepdim=True) * 2.0**-15).expand_as(blocks).reshape(-1)[:count]
    assert ((back - x).abs() <= torch.maximum(x.abs() / 16, small)).all()


@pytest.mark.parametrize("value", [3e-41, 1e-30, 0.1, 1.7e38])
def test_values_that_are_equal_stay_as_they_are(value):
    x = torch.full((3, 100), value)
    assert torch.allclose(unpacked(packed(x), x), x, rtol=1e-6, atol=2e-41)


@settings(max_examples=15)
@given(st.integers(0, 600), st.integers(0, 600))
def test_a_range_of_packed_values_is_that_of_all(start, length):
    x = torch.randn(600, generator=generator(0))
    kept = packed(x)
    end = min(600, start + length)
    assert torch.equal(kept.values(start, end), kept.values(0, 600)[start:end])


def test_more_values_than_are_packed_at_a_time():
    x = torch.randn(2**18 + 77, generator=generator(0))
    assert (unpacked(packed(x), x) - x).abs().max() < 0.3
    assert packed(x).values(2**18 - 1, 2**18 + 2).shape == (3,)


def views(x):
    return [x, x.t(), x[1:], x[:, 3], x[::2].unsqueeze(0).expand(3, -1, -1), x[2:3, 4:5], x.view(-1)[5:50]]


@pytest.mark.parametrize("which", range(7))
def test_a_view_is_kept_as_the_difference_of_its_memory(which):
    base = torch.randn(8, 16, generator=generator(0))
    moved = base + 2.0**-7 * torch.randn(8, 16, generator=generator(1))
    saved = Saved([])
    whole = saved.kept(moved, base)
    kept = saved.kept(views(moved)[which], views(base)[which])
    assert isinstance(kept, Difference)
    assert kept.packed is whole.packed
    torch.testing.assert_close(value_of(kept), views(moved)[which], rtol=0, atol=4e-3)
    torch.testing.assert_close(
        difference_of(kept, views(base)[which]),
        (views(moved)[which] - views(base)[which]),
        rtol=1 / 15,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("x", "base"),
    [
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf])),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)),
        (torch.ones(2, 3), torch.zeros(3, 2).t()),
        (torch.ones(0), torch.ones(0)),
    ],
)
def test_what_has_no_finite_float32_difference_is_kept_whole(x, base):
    kept = Saved([]).kept(x, base)
    assert isinstance(kept, torch.Tensor)
    assert torch.equal(kept.nan_to_num(), x.nan_to_num())


def test_equal_tensors_and_leaves_take_no_memory():
    base = torch.ones(4)
    assert Saved([]).kept(base.clone(), base) is base
    leaf = base + 1
    assert Saved([leaf.untyped_storage().data_ptr()]).kept(leaf, base) is leaf


def test_a_tensor_that_was_written_into_is_not_taken_for_what_it_was():
    base, moved, saved = torch.ones(4), torch.full((4,), 1.5), Saved([])
    first = saved.kept(moved, base)
    moved.add_(1.0)
    torch.testing.assert_close(value_of(saved.kept(moved, base)), moved)
    torch.testing.assert_close(value_of(first), torch.full((4,), 1.5))


def test_gradients_there_are_those_of_the_tensors_themselves():
    weight = torch.randn(16, 16, generator=generator(0))
    noise = 2.0**-7 * torch.randn(16, 16, generator=generator(1))
    here, there, true = (w.requires_grad_() for w in (weight.clone(), weight + noise, weight + noise))
    saved, x = Saved([]), torch.randn(4, 16, generator=generator(2))

    def step(h, w):
        return torch.nn.functional.layer_norm((h @ w).sigmoid(), (16,))

    a = b = x
    for _ in range(3):
        with saved.here():
            a = step(a, here)
        with saved.there([b, there]):
            b = step(b, there)
    c = step(step(step(x, true), true), true)
    for last in (a, b, c):
        last.exp().mean().backward()
    moved, exact = there.grad - here.grad, true.grad - here.grad
    assert 0 < (moved - exact).norm() < 0.1 * exact.norm()


def test_what_is_written_into_before_the_backward_pass_is_refused_as_in_pytorch():
    saved, weight = Saved([]), torch.ones(3, requires_grad=True)
    with saved.here():
        result = weight.exp()
        square = result * result
    with torch.no_grad():
        result.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_a_quarter_of_the_memory_is_kept_and_freed_with_the_graph():
    base = torch.randn(1000, 128, generator=generator(0))
    kept = Packed(base.numel(), lambda start, end: base.view(-1)[start:end], base.device)
    size = sum(
        each.untyped_storage().nbytes() for each in vars(kept).values() if isinstance(each, torch.Tensor)
    )
    assert size <= 0.26 * base.untyped_storage().nbytes()
    saved, weight = Saved([]), torch.ones(3, requires_grad=True)
    with saved.here():
        one = weight.square()
    moved = weight + 1.0
    with saved.there([moved]):
        other = moved.square()
    known = weakref.ref(next(iter(saved._known.values())))
    del one, other
    gc.collect()
    assert known() is None


def test_results_are_kept_whole_and_so_is_what_uses_them() -> None:
    """Differences would not add up to 0 over a softmax, which its derivative relies on."""
    weight, saved = torch.tensor([30.0, 0.0, -30.0], requires_grad=True), Saved([])
    with saved.here():
        one = weight.softmax(0)
    moved = weight * 0.9
    with saved.there([moved]):
        other = moved.softmax(0)
    assert not saved._known
    with saved.here():
        one = one * one
    with saved.there([other]):
        other = other * other
    assert not saved._known
    (expected,) = torch.autograd.grad((0.9 * weight).softmax(0).square().sum(), weight)
    other.sum().backward()
    assert torch.equal(weight.grad, expected)
