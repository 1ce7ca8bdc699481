"""Policies against gradients that overflow and vanish as the scale makes them: nobody gets stuck.

An adversary draws the logarithm of the amax before scaling, step by step. The scale decides what becomes of
it: beyond float16's largest number it overflows, below its smallest it is read as 0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Dynamic, Policy, Reading
from tests.strategies import RULES, moving, seeing

LARGEST, SMALLEST = 65504.0, 2.0**-24
WIDE = {"min_scale": 2.0**-50, "max_scale": 2.0**50}

BLIND: list[Policy[Any]] = [Dynamic(growth_interval=10, **WIDE)]
SEEING = [
    kind(**{name: bound for name, bound in WIDE.items() if name in kind.__dataclass_fields__})
    for kind in RULES.values()
    if kind.needs_amax
]
each = pytest.mark.parametrize("policy", BLIND + SEEING, ids=lambda policy: type(policy).__name__)

Logs = list[float]  # of the amax before scaling, to the base 2; -inf for an amax that is truly 0


class Seen(NamedTuple):
    """What became of one step: the amax as it was read, None after an overflow, and the next scale."""

    amax: float | None
    scale: float


def run(
    policy: Policy[Any], logs: Iterable[float], state: Any = None, is_inf: Callable[[int], bool] | None = None
) -> list[Seen]:
    """Return what the adversary's steps come to. No scale of them is 0, inf or NaN."""
    state, steps = policy.start() if state is None else state, []
    for index, log in enumerate(logs):
        amax = 2.0**log * state.scale
        finite = amax <= LARGEST and not (is_inf and is_inf(index))
        amax = amax if amax >= SMALLEST else 0.0
        state = policy.step(state, Reading(finite, amax if finite else math.nan))
        assert policy.min_scale <= state.scale <= policy.max_scale
        steps.append(Seen(amax if finite else None, state.scale))
    return steps


def around(level: float, spread: float, steps: int, seed: int = 0) -> Logs:
    draw = random.Random(seed)
    return [draw.gauss(level, spread) for _ in range(steps)]


def skipped(steps: list[Seen]) -> int:
    return sum(step.amax is None for step in steps)


def unseen(steps: list[Seen]) -> int:
    return sum(step.amax == 0.0 for step in steps)


readings = st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 1e-6, 1.0, 1e4, LARGEST])))


def after(policy: Policy[Any], past: list[tuple[bool, float]]) -> Any:
    """Return the state after any readings, whether or not a scale could have made them."""
    state = policy.start()
    for finite, amax in past:
        state = policy.advance(state, Reading(finite, amax if finite else math.inf))
    return state


@settings(deadline=None, max_examples=40)
@given(seeing | moving(at_floor="hold"), readings)
def test_whatever_is_read_the_state_stays_finite_and_the_scale_above_0(policy: Any, past: Any) -> None:
    state = after(policy, past)
    if policy.min_scale and policy.max_scale:
        assert all(math.isfinite(value) for value in state)
        assert state.scale > 0.0


@each
@settings(deadline=None, max_examples=10)
@given(past=readings)
def test_overflows_in_a_row_lower_the_scale_to_its_floor(policy: Any, past: Any) -> None:
    state = after(policy, past)
    for _ in range(200):
        state = policy.step(state, Reading(False, math.nan))
    assert state.scale == policy.min_scale


@each
@settings(deadline=None, max_examples=5)
@given(past=readings, level=st.integers(-30, 30))
def test_from_anywhere_steps_come_back_that_are_clean_and_seen(policy: Any, past: Any, level: int) -> None:
    steps = run(policy, around(level, 0.25, 1500), after(policy, past))[1000:]
    assert skipped(steps) <= 50  # 1 in 11
    assert unseen(steps) == 0


@each
@pytest.mark.parametrize(("way", "length"), [(-1.0, 900), (1.0, 900), (1.0, 6000)])
def test_a_drift_over_60_powers_of_two_is_followed(policy: Any, way: float, length: int) -> None:
    logs = [way * 60.0 * (step / length - 0.5) + noise for step, noise in enumerate(around(0, 0.25, length))]
    steps = run(policy, logs)[length // 6 :]
    assert unseen(steps) == 0
    assert skipped(steps) <= length / 7


@each
def test_a_peak_that_is_0_for_ever_does_no_harm(policy: Any) -> None:
    steps = run(policy, [-math.inf] * 2000 + around(-10.0, 0.25, 1000))
    assert skipped(steps[:2000]) == 0
    assert skipped(steps[2000:]) <= 130
