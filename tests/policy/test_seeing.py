"""Rules that look at the gradients, and the arithmetic under them, on Python floats."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import FloorSchedule, Histogram, LogMax, PolicyError, Reading
from preamp.checks import FLOAT32_MAX, FLOAT32_TINY
from preamp.policy import choose
from preamp.policy.logarithm import log2_near, power_below, two_to
from tests.strategies import seeing

OVERFLOW = Reading(finite=False)


@settings(deadline=None, max_examples=40)
@given(seeing)
def test_a_clean_step_that_shows_nothing_is_refused_by_name(policy: Any) -> None:
    shown = {name: 1.0 for name in policy.needs}
    for name in policy.needs:
        for finite in (True, np.bool_(True), np.bool_(False)):
            with pytest.raises(PolicyError, match=rf"{type(policy).__name__}.* the {name} .*Write .*{name}="):
                policy.advance(policy.start(), Reading(finite, **{**shown, name: None}))
    policy.advance(policy.start(), OVERFLOW)


@settings(deadline=None)
@given(st.floats(0.0, FLOAT32_MAX, width=32) | st.sampled_from([math.inf, math.nan, 2.0**-126, 2.0**127]))
def test_powers_and_logarithms_are_those_of_math(x: float) -> None:
    normal = min(x, FLOAT32_MAX) if x > FLOAT32_TINY else FLOAT32_TINY
    power, log = power_below(x, choose), log2_near(x, choose)
    assert math.frexp(power)[0] == 0.5
    assert power <= normal < 2.0 * power
    assert -0.087 <= log - math.log2(normal) <= 1e-9
    assert two_to(log, choose) == power


@pytest.mark.parametrize(("deviations", "share"), [(1.0, 0.16), (2.0, 0.023), (3.09, 0.001)])
def test_log_max_overflows_as_often_as_it_was_told(deviations: float, share: float) -> None:
    """At most; the scale is rounded down to a power of two, which may halve it."""
    policy, draw, overflows = (
        LogMax(deviations=deviations, settle_interval=1, search_interval=1),
        random.Random(0),
        0,
    )
    state = policy.start()
    for step in range(6000):
        peak = 2.0 ** draw.gauss(-10.0, 1.0) * state.scale
        finite = peak <= 65504.0
        overflows += not finite and step >= 1000
        state = policy.step(state, Reading(finite, peak=peak))
    assert share / 8 <= overflows / 5000 <= 1.5 * share


def test_a_peak_of_0_is_left_out_of_the_averages_of_log_max() -> None:
    policy = LogMax()
    state = policy.step(policy.start(), Reading(True, peak=2.0))
    for _ in range(policy.search_interval - 1):
        after = policy.step(state, Reading(True, peak=0.0))
        assert after == state._replace(good=state.good + 1.0, zeros=state.zeros + 1.0)
        state = after
    assert policy.step(state, Reading(True, peak=0.0)).scale == state.scale * policy.growth_factor


@pytest.mark.parametrize(("peak", "moves"), [(4093.0, 1), (4094.0, 0), (8187.0, 0), (8188.0, -1)])
def test_histogram_rests_between_growing_and_backing_off(peak: float, moves: int) -> None:
    """The edge is 8188, an eighth of 65504."""
    policy = Histogram()
    state = policy.start()
    for _ in range(3 * policy.growth_interval):
        state = policy.step(state, Reading(True, peak, 1e-3 if peak >= policy.edge else 0.0))
    assert (state.scale > 2.0**16) - (state.scale < 2.0**16) == moves


@pytest.mark.parametrize("largest", [1e39, 1e-46])
def test_a_largest_number_that_float32_cannot_hold_is_refused(largest: float) -> None:
    with pytest.raises(PolicyError, match=r"largest=.* Write largest=65504"):
        Histogram(largest=largest)


def test_a_floor_lifts_the_scale_withstands_overflows_and_gives_way() -> None:
    policy = FloorSchedule(init_scale=4.0, floors=((0, 2.0), (3, 64.0)), patience=2, growth_interval=4)
    state, scales = policy.start(), []
    for mark in "0001101111000011":
        state = policy.step(state, Reading(mark == "0"))
        scales.append(state.scale)
    lifted, withstood, gave_way, grew = [4, 4, 64], [64, 64, 64, 64, 64], [32, 16], [16, 16, 16, 32]
    assert scales == [*lifted, *withstood, *gave_way, *grew, 16, 8]
