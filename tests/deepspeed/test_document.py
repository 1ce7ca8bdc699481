"""The document's listing of DeepSpeed's loss scaler, as it stands there, beside ours."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.deepspeed import DynamicLossScaler

START = 2.0**32  # the document's default


def listed_check(x: torch.Tensor) -> bool:
    """The listing's `_has_inf_or_nan`: a tensor overflows if its float32 sum does."""
    try:
        total = float(x.float().sum())
    except RuntimeError as error:
        if "value cannot be converted" not in str(error):
            raise
        return True
    return total in (math.inf, -math.inf) or total != total


class Listing:
    """The listing's scaler. It shows no constructor; these are the attributes that it reads."""

    def __init__(self, scale_window: int, delayed_shift: int, min_scale: float = 1.0) -> None:
        self.cur_scale, self.scale_factor, self.min_scale = START, 2.0, min_scale
        self.scale_window = scale_window
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.cur_iter, self.last_overflow_iter = 0, -1

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss * self.loss_scale).backward(retain_graph=retain_graph)

    def has_overflow(self, parameters: Any) -> bool:
        return any(listed_check(parameter.grad) for parameter in parameters)

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            stable_interval = (self.cur_iter - self.last_overflow_iter) - 1
            if stable_interval > 0 and stable_interval % self.scale_window == 0:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def ours(scale_window: int, delayed_shift: int, min_scale: float = 1.0) -> DynamicLossScaler:
    return DynamicLossScaler(
        START, scale_window, min_scale, delayed_shift, False, raise_error_at_min_scale=False
    )


def scales(scaler: Any, script: list[bool]) -> list[float]:
    seen = []
    for overflow in script:
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    return seen


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "preamp.deepspeed")


scripts = st.lists(st.booleans(), max_size=80)


@settings(deadline=None, max_examples=40)
@given(scripts, st.integers(1, 5), st.sampled_from([1.0, 1e-4, 2.0**31]))
def test_without_hysteresis_the_listing_is_ours(script: list[bool], window: int, floor: float) -> None:
    assert scales(ours(window, 1, floor), script) == scales(Listing(window, 1, floor), script)


@settings(deadline=None, max_examples=40)
@given(scripts, st.integers(1, 5), st.integers(2, 4))
def test_with_hysteresis_it_is_ours_until_the_scale_grows(
    script: list[bool], window: int, hysteresis: int
) -> None:
    mine, listed = (scales(make(window, hysteresis), script) for make in (ours, Listing))
    growth = next((i for i, scale in enumerate(listed) if scale > [START, *listed][i]), len(listed))
    assert mine[: growth + 1] == listed[: growth + 1]


def test_the_listing_never_gives_hysteresis_back() -> None:
    """DeepSpeed does when the scale grows: the first overflow after that halves nothing."""
    script = [True, False, False, True]
    assert scales(Listing(1, 2), script) == [START, START, 2 * START, START]
    assert scales(ours(1, 2), script) == [START, START, 2 * START, 2 * START]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(-1e3, 1e3) | st.sampled_from([math.inf, -math.inf, math.nan]), max_size=50))
def test_the_checks_agree_on_what_a_sum_can_hold(dtype: torch.dtype, numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=dtype)
    assert bool(DynamicLossScaler._has_inf_or_nan(x)) == listed_check(x)


@pytest.mark.parametrize("numbers", [[3e38, 3e38], [-3e38, -1e38], [3.4e38] * 40])
def test_the_listings_check_skips_steps_that_are_finite(numbers: list[float]) -> None:
    x = torch.tensor(numbers)
    assert x.isfinite().all()
    assert listed_check(x)
    assert not DynamicLossScaler._has_inf_or_nan(x)


def train(scaler: Any, steps: int = 60) -> tuple[list[float], torch.Tensor]:
    """Train a float16 net with the loop of the document; return the scales and the weights."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).half()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.randn(32, 8).half()
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.backward((net(x).float() - x.float().sum(1, keepdim=True)).square().mean())
        overflow = scaler.has_overflow(list(net.parameters()))
        if not overflow:
            for parameter in net.parameters():
                parameter.grad /= scaler.loss_scale
            optimizer.step()
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    return seen, torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_a_float16_net_trains_as_with_the_listing() -> None:
    (mine, weights), (listed, theirs) = train(ours(7, 1)), train(Listing(7, 1))
    assert mine == listed
    assert weights.equal(theirs)
    assert weights.isfinite().all()
    moves = [after / before for before, after in itertools.pairwise(mine)]
    assert {0.5, 1.0, 2.0} == set(moves)  # it backed off and grew
