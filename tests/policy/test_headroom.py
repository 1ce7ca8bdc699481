from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Headroom, PolicyError, Reading
from preamp.policy import choose
from tests.strategies import headrooms, log2_near, quietly, two_to

SMALLEST = 2.0**-24  # float16's
FLOAT32_MAX, FLOAT32_TINY = float(np.finfo("float32").max), 2.0**-126
QUIET = 1e-3  # skipped steps
many = settings(deadline=None, max_examples=100)

Draw = Callable[[random.Random], float]
STATIONARY: dict[str, Draw] = {
    "constant": lambda rng: -4.0,
    "narrow": lambda rng: rng.gauss(-4.0, 0.3),
    "log-normal": lambda rng: rng.gauss(-4.0, 1.0),
    "wide": lambda rng: rng.gauss(-20.0, 2.0),
    "skewed": lambda rng: -4.0 - rng.expovariate(1.0),
    "heavy tail": lambda rng: -6.0 + rng.expovariate(1.0),
}


class Run:
    """A policy in a loop with gradients of given size: too large ones overflow, too small ones are flushed.

    Attributes:
        scales: of every step.
        skipped: whether it overflowed.
        state: the last one.
    """

    def __init__(self, policy: Headroom, state: Any = None) -> None:
        self.policy, self.state = policy, state or policy.start()
        self.scales: list[float] = []
        self.skipped: list[bool] = []

    def train(self, amaxes: Sequence[float | None], gap: Draw = lambda rng: 0.0, every: int = 0) -> Run:
        """Go on with amaxes that are given as logarithms, None for a gradient that is zero.

        Args:
            amaxes: one for each step.
            gap: how far, in powers of two, something else reaches above the amax.
            every: each how manieth step overflows whatever the scale.
        """
        rng = random.Random(1)
        for index, logarithm in enumerate(amaxes):
            amax = 0.0 if logarithm is None else 2.0**logarithm * self.state.scale
            overflows = amax * 2.0 ** max(gap(rng), 0.0) > self.policy.largest
            overflows |= every > 0 and index % every == every - 1
            self.scales.append(self.state.scale)
            self.skipped.append(overflows)
            seen = amax if amax >= SMALLEST else 0.0
            self.state = self.policy.step(self.state, Reading(not overflows, math.nan if overflows else seen))
        return self


def drawn(draw: Draw, steps: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [draw(rng) for _ in range(steps)]


def powers_apart(scale: float, other: float) -> float:
    return abs(math.log2(scale / other))


@pytest.mark.parametrize("name", STATIONARY)
def test_quiet_where_gradients_keep_their_distribution(name: str) -> None:
    run = Run(Headroom()).train(drawn(STATIONARY[name], 10_000))
    assert sum(run.skipped[:50]) <= 5
    assert statistics.fmean(run.skipped[50:]) <= QUIET


@pytest.mark.parametrize(("draw", "below"), [("constant", 1.0), ("narrow", 2.0), ("skewed", 2.0)])
def test_no_lower_than_quiet_takes(draw: str, below: float) -> None:
    amaxes = drawn(STATIONARY[draw], 5_000)
    quiet = math.log2(65504.0) - sorted(amaxes)[-5]  # skips one step in 1000, at a scale that never moves
    scales = Run(Headroom()).train(amaxes).scales
    assert quiet - below <= statistics.fmean(map(math.log2, scales[50:])) <= quiet + 0.5


@pytest.mark.parametrize("distance", [1.0, 20.0])
def test_learns_how_far_above_the_peaks_something_else_overflows(distance: float) -> None:
    run = Run(Headroom()).train(drawn(STATIONARY["narrow"], 10_000), gap=lambda rng: rng.gauss(distance, 0.5))
    assert statistics.fmean(run.skipped[50:]) <= QUIET
    assert sum(run.skipped[:50]) <= 20


@many
@given(st.integers(-10, 30), st.integers(-60, 0), st.integers(0, 99))
def test_reaches_its_scale_within_thirty_steps(power: int, logarithm: int, seed: int) -> None:
    run = Run(Headroom(init_scale=2.0**power)).train(drawn(lambda rng: rng.gauss(logarithm, 0.3), 100, seed))
    settled = statistics.median(run.scales[50:])
    reached = next(i for i, scale in enumerate(run.scales) if powers_apart(scale, settled) <= 1)
    assert reached <= 30
    assert all(powers_apart(scale, settled) <= 2 for scale in run.scales[30:])
    assert logarithm + math.log2(settled) >= 12  # of 16


readings = st.builds(
    lambda finite, amax: Reading(finite, amax if finite else math.nan),
    st.booleans(),
    st.just(0.0) | st.integers(-60, 16).map(lambda power: 2.0**power) | st.floats(0.0, 65504.0),
)


@many
@given(headrooms(), st.lists(readings, max_size=60))
def test_every_scale_is_a_power_of_two_within_the_bounds(policy: Headroom, script: list[Reading]) -> None:
    state = policy.start()
    for reading in script:
        state = policy.step(state, reading)
        assert all(map(math.isfinite, state))
        assert policy.min_scale <= state.scale <= policy.max_scale
        assert math.frexp(state.scale)[0] == 0.5 or state.scale in (policy.min_scale, policy.max_scale)


@many
@given(st.lists(readings, max_size=200), st.integers(-40, 4))
def test_never_stuck_whatever_came_before(script: list[Reading], logarithm: int) -> None:
    policy = Headroom()
    state = policy.start()
    for reading in script:
        state = policy.step(state, reading)
    run = Run(policy, state).train([float(logarithm)] * 250)
    assert not any(run.skipped[150:])
    assert min(run.scales[150:]) * 2.0**logarithm >= SMALLEST


def test_the_longest_row_of_overflows_is_forgotten() -> None:
    policy = Headroom(patience=16)
    before = Run(policy).train([-4.0] * 200)
    for _ in range(300):
        before.state = policy.step(before.state, Reading(False))
    assert before.state.scale == policy.min_scale
    after = Run(policy, before.state).train([-4.0] * 300)
    assert after.scales[-1] == before.scales[-1]
    assert not any(after.skipped)


def test_peaks_are_found_again_where_all_that_was_learned_hides_them() -> None:
    policy = Headroom()
    start = Run(policy).train([-4.0] * 100)
    blind = start.state._replace(scale=2.0**-30, spread=24.0, gap=24.0, good=100.0)
    run = Run(policy, blind).train([-4.0] * 200)
    assert min(run.scales[150:]) * 2.0**-4 >= SMALLEST


def test_a_row_of_overflows_is_forgotten_faster_and_faster() -> None:
    policy = Headroom(patience=16)
    run = Run(policy).train([-4.0] * 200)
    settled = run.state.scale
    for _ in range(5):
        run.state = policy.step(run.state, Reading(False))
    after = Run(policy, run.state).train([-4.0] * 80).scales
    powers = [powers_apart(settled, scale) for scale in after]
    assert powers == [15.0] + [8.0] * 15 + [7.0] * 16 + [5.0] * 16 + [2.0] * 16 + [0.0] * 16


def test_a_short_burst_of_large_gradients_is_soon_forgotten() -> None:
    run = Run(Headroom()).train([-4.0] * 200 + [16.0] * 8 + [-4.0] * 60)
    assert powers_apart(run.scales[199], run.scales[-1]) <= 2


def test_after_an_overflow_it_does_not_return_before_patience_is_over() -> None:
    policy = Headroom(patience=64)
    run = Run(policy).train([-4.0] * 200)
    settled = run.state.scale
    run.state = policy.step(run.state, Reading(False))
    after = Run(policy, run.state).train([-4.0] * 100).scales
    assert after[:64] == [settled / 2] * 64
    assert after[65:] == [settled] * 35


@pytest.mark.parametrize("every", [2, 50])
def test_overflows_at_any_scale_cost_eight_powers_and_no_more(every: int) -> None:
    amaxes = drawn(STATIONARY["narrow"], 3_000)
    usual = statistics.median(Run(Headroom()).train(amaxes).scales)
    lowest = min(Run(Headroom()).train(amaxes, every=every).scales[100:])
    assert 8 <= powers_apart(usual, lowest) <= 10


@pytest.mark.parametrize("total", [60, -60])
def test_follows_gradients_over_sixty_powers_of_two(total: int) -> None:
    rng = random.Random(0)
    run = Run(Headroom()).train([rng.gauss(-4 + total * index / 1_000, 0.5) for index in range(1_000)])
    assert sum(run.skipped) <= 4
    room = [16 - math.log2(scale) + 4 - total * index / 1_000 for index, scale in enumerate(run.scales)]
    assert max(room[50:]) <= 8


@pytest.mark.parametrize("jump", [50, -50])
def test_finds_gradients_that_jumped(jump: int) -> None:
    rng = random.Random(0)
    run = Run(Headroom()).train([rng.gauss(-4 + jump * (index >= 300), 0.5) for index in range(600)])
    assert sum(run.skipped[50:]) <= 12
    assert 1 <= 16 - (jump - 4) - math.log2(run.scales[-1]) <= 5


def test_gradients_that_are_zero_now_and_then_change_nothing() -> None:
    amaxes = drawn(STATIONARY["skewed"], 300)
    rng = random.Random(0)
    mixed = [amax for one in amaxes for amax in ([None] * rng.randrange(9) + [one])]
    at = [index for index, amax in enumerate(mixed) if amax is not None]
    sparse = Run(Headroom(init_scale=2.0**10, margin=2)).train(mixed[at[0] :])
    dense = Run(Headroom(init_scale=2.0**10, margin=2)).train(amaxes)
    assert not any(dense.skipped)
    assert [sparse.scales[index - at[0]] for index in at] == dense.scales


def test_a_wider_margin_is_a_lower_scale() -> None:
    scales = [Run(Headroom(margin=margin)).train([-4.0] * 100).scales[-1] for margin in (0.25, 1.25, 5.25)]
    assert scales == [2.0**19, 2.0**18, 2.0**14]
    assert Run(Headroom(largest=448.0)).train([-4.0] * 100).scales[-1] == 2.0**12  # float8_e4m3fn


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"margin": -1.0}, "margin=-1.0 is not a number of powers of two from 0 to 24"),
        ({"margin": math.nan}, "margin=nan"),
        ({"largest": 0.0}, "Write largest=65504.0"),
        ({"largest": 1e39}, "largest=inf is not a finite number"),
        ({"memory": 0}, "Write memory=32"),
        ({"patience": 1000}, "patience=1000 is not a power of two"),
        ({"init_scale": 2.0**100}, "is outside min_scale"),
        ({"min_scale": 2.0, "max_scale": 1.0}, "widen them"),
        ({"init_scale": True}, "init_scale=True"),
    ],
)
def test_refuses_settings_that_cannot_work(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(PolicyError, match=says.replace("*", r"\*")):
        quietly(Headroom, **settings)


@pytest.mark.parametrize("level", [math.inf, -math.inf, math.nan, 1e39])
def test_a_saved_field_that_may_be_negative_is_a_number_still(level: float) -> None:
    assert Headroom().restore({"level": -7.0}).level == -7.0
    with pytest.raises(PolicyError, match=r"level=.* Write "):
        Headroom().restore({"level": level})


@pytest.mark.parametrize("finite", [True, np.bool_(True), np.bool_(False)])
def test_a_step_without_a_peak_is_refused(finite: Any) -> None:
    policy = Headroom()
    with pytest.raises(PolicyError, match=r"Headroom.* the amax .*Write .*amax="):
        policy.advance(policy.start(), Reading(finite))
    policy.advance(policy.start(), Reading(finite=False))  # after an overflow it is not used


@settings(deadline=None)
@given(st.floats(0.0, FLOAT32_MAX, width=32) | st.sampled_from([math.inf, math.nan, 2.0**-126, 2.0**127]))
def test_powers_and_logarithms_are_those_of_math(x: float) -> None:
    normal = min(x, FLOAT32_MAX) if x > FLOAT32_TINY else FLOAT32_TINY
    log = log2_near(x, choose)
    assert -0.087 <= log - math.log2(normal) <= 1e-9
    power = two_to(log, choose)
    assert math.frexp(power)[0] == 0.5
    assert power <= normal < 2.0 * power
