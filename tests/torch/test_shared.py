"""Gradients of two owners are unscaled once: of two parameters, of two optimizers."""

import itertools

import pytest
import torch

from tests.combinations import in_one_test

from .pairs import INF, make, ours, theirs, weights
from .pairs import give as give_gradient
from .switches import reads_are_free

SGDS = ["SGD", "SGD fused"]
kinds = pytest.mark.parametrize("kind", SGDS)


@kinds
@in_one_test(
    unscale=[False, True], limits=[{}, {"max_norm": 1e6}, {"max_value": 1e6}], capturable=[False, True]
)
def test_a_gradient_that_two_parameters_have_is_unscaled_once(kind, unscale, limits, capturable):
    pair = weights(2)
    optimizer = make(kind, pair, lr=1.0)
    scaler = ours(capturable=capturable)
    for _ in range(2):
        for parameter in pair:
            give_gradient(
                scaler, parameter, torch.full((3,), 2048.0) if parameter is pair[0] else pair[0].grad
            )
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer, **limits)
        scaler.update()
    assert [parameter[0].item() for parameter in pair] == [-4.0, -4.0]
    assert pair[1].grad[0].item() == 2.0


@pytest.mark.parametrize("capturable", [False, True])
def test_an_overflow_in_a_gradient_that_two_parameters_have_is_seen(capturable):
    pair = weights(2)
    scaler = ours(capturable=capturable)
    give_gradient(scaler, pair[0], INF)
    pair[1].grad = pair[0].grad
    scaler.step(make("SGD fused", pair))
    scaler.update()
    assert scaler.last_step.skipped
    assert torch.equal(pair[0], torch.zeros(3))


class Shared:
    """A parameter of two optimizers, each of which has one of its own."""

    def __init__(self, scaler, kinds=("SGD", "SGD")) -> None:
        self.scaler = scaler
        self.common, self.own_a, self.own_b = weights(3)
        self.a = make(kinds[0], [self.own_a, self.common], lr=1.0)
        self.b = make(kinds[1], [self.common, self.own_b], lr=1.0)

    def backward(self, of_common=1.0, of_a=1.0, of_b=1.0) -> None:
        loss = of_common * self.common.sum() + of_a * self.own_a.sum() + of_b * self.own_b.sum()
        self.scaler.scale(loss).backward()

    def zero_grad(self, **options) -> None:
        self.a.zero_grad(**options)
        self.b.zero_grad(**options)

    def values(self) -> list[float]:
        return [p[0].item() for p in (self.common, self.own_a, self.own_b)]


ORDERS = ["", "a", "b", "ab", "ba"]  # in which gradients are unscaled by hand
mixes = pytest.mark.parametrize("mix", list(itertools.product(SGDS, SGDS)))


@mixes
@in_one_test(unscaled=ORDERS, limits=[{}, {"max_norm": 1e6}], reads=[True, False, None])
def test_a_parameter_of_two_optimizers_is_unscaled_once(mix, unscaled, limits, reads):
    pair = Shared(ours(capturable=reads is None), mix)
    for _ in range(2):
        pair.zero_grad()
        pair.backward(2.0)
        with reads_are_free(bool(reads)):
            for name in unscaled:
                pair.scaler.unscale_(getattr(pair, name))
            for name in unscaled or "ab":
                pair.scaler.step(getattr(pair, name), **limits)
            if len(unscaled) == 1:
                pair.scaler.step(pair.b if unscaled == "a" else pair.a, **limits)
            pair.scaler.update()
    assert pair.values() == [-8.0, -2.0, -2.0]


@mixes
@in_one_test(unscaled=ORDERS, reads=[True, False, None], where=["common", "a", "b"])
def test_an_overflow_stops_those_that_own_it(mix, unscaled, reads, where):
    """The other optimizer steps, on gradients that are unscaled whoever should have done it."""
    pair = Shared(ours(capturable=reads is None), mix)
    pair.backward(**{f"of_{where}": INF})
    with reads_are_free(bool(reads)):
        for name in unscaled:
            pair.scaler.unscale_(getattr(pair, name))
        for name in "ab":
            pair.scaler.step(getattr(pair, name))
            skipped = pair.scaler.last_step.skipped
            assert skipped == (where in ("common", name))
        pair.scaler.update()
    assert (
        pair.values()
        == {
            "common": [0.0, 0.0, 0.0],
            "a": [-1.0, 0.0, -1.0],
            "b": [-1.0, -1.0, 0.0],
        }[where]
    )
    assert pair.scaler.get_scale() == 512.0


@mixes
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("factor", [1.0, INF])
def test_separate_backward_passes_are_what_they_are_in_the_original(mix, set_to_none, factor):
    """Two optimizers, two losses, one update: a shared gradient is written anew and unscaled anew."""
    values = []
    for scaler in (ours(), theirs()):
        pair = Shared(scaler, mix)
        for factor_of_a in (1.0, factor, 1.0):
            for optimizer, of_common in ((pair.a, factor_of_a), (pair.b, 3.0)):
                pair.zero_grad(set_to_none=set_to_none)
                pair.backward(of_common)
                scaler.step(optimizer)
            scaler.update()
        values.append((pair.values(), scaler.get_scale()))
    assert values[0] == values[1]


def test_a_gradient_that_was_replaced_is_unscaled_anew():
    """Also if it was written to as often as the one it replaces."""
    pair = Shared(ours())
    pair.backward(2.0)
    pair.scaler.step(pair.a)
    replacement = torch.full((3,), 4.0 * 1024.0)
    while replacement._version < pair.common.grad._version:
        replacement.mul_(1.0)
    pair.common.grad = replacement
    pair.scaler.step(pair.b)
    assert pair.values() == [-6.0, -1.0, -1.0]
