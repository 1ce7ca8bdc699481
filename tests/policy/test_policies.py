"""The state machine on Python floats."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from dataclasses import FrozenInstanceError, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from preamp import (
    Compat,
    Dynamic,
    Policy,
    PolicyError,
    Reading,
    ScaleExhausted,
    Static,
    Tolerant,
)
from preamp.policy import State
from tests.strategies import (
    OWN,
    RULES,
    dynamics,
    moving,
    near_the_defaults,
    play,
    policies,
    quietly,
    replace_quietly,
    scripts,
    statics,
    tolerants,
    walked,
)

CLEAN, OVERFLOW = Reading(finite=True), Reading(finite=False)
FLOORED = {"bounds": "strict", "min_scale": 1.0, "max_scale": None}
EXACT = {"growth_factor": 2.0, "backoff_factor": 0.5, "backoff_divisor": None}
UNBOUNDED = {"min_scale": None, "max_scale": None, "at_floor": "hold", "bounds": "strict"}

no_deadline = settings(deadline=None, max_examples=100)
moderate = settings(deadline=None, max_examples=40)


# What the scale does


@no_deadline
@given(moving(bounds="strict"), scripts)
def test_the_scale_stays_between_floor_and_ceiling(policy: Any, script: str) -> None:
    low, high = policy.min_scale or 0.0, policy.max_scale or math.inf
    assert all(low <= state.scale <= high for state in play(policy, script))


@no_deadline
@given(moving(bounds="moves", init_scale=1e-40) | moving(bounds="moves", init_scale=1e35), scripts)
def test_a_scale_outside_the_bounds_moves_inside_or_not_at_all(policy: Any, script: str) -> None:
    low, high = policy.min_scale or 0.0, policy.max_scale or math.inf
    for mark, (before, after) in zip(script, pairwise(play(policy, script)), strict=False):
        assert after.scale == before.scale or (after.scale >= low if mark == "1" else after.scale <= high)


@moderate
@given(st.lists(st.tuples(st.sampled_from("01"), st.integers(1, 300)), max_size=12), st.integers(1, 4))
@example(runs=[("1", 200), ("0", 400), ("1", 200)], interval=1)
def test_the_default_is_always_a_power_of_two_of_a_float16_gradient(
    runs: list[tuple[str, int]], interval: int
) -> None:
    script = "".join(mark * length for mark, length in runs)
    for state in play(Dynamic(growth_interval=interval), script):
        assert math.frexp(state.scale)[0] == 0.5
        assert 2.0**-14 <= state.scale <= 2.0**32


@pytest.mark.parametrize(("mark", "end"), [("1", 0.0), ("0", math.inf)])
def test_without_bounds_the_scale_does_run_away(mark: str, end: float) -> None:
    policy = Dynamic(growth_interval=1, min_scale=None, max_scale=None)
    assert play(policy, mark * 400)[-1].scale == end


@no_deadline
@given(moving(bounds="strict", at_floor="hold"), st.floats(1e-30, 1e30), st.booleans())
def test_a_scale_set_by_hand_never_moves_the_wrong_way(policy: Any, scale: float, finite: bool) -> None:
    state = policy.restore({"scale": scale, "good": 10.0})
    after = policy.advance(state, Reading(finite))
    assert after.scale >= state.scale if finite else after.scale <= state.scale


@no_deadline
@given(policies, scripts)
def test_a_saved_state_is_restored(policy: Any, script: str) -> None:
    state = play(policy, script)[-1]
    if 1e-45 < state.scale < 3e38:
        assert policy.restore({**state._asdict(), "unknown": None}) == state


@pytest.mark.parametrize("saved", [
    *[{"scale": scale} for scale in (0.0, -1.0, math.inf, math.nan, 1e-46, 1e39, True, "8", None)],
    {"good": -1.0},
    {"bad": math.nan},
])  # fmt: skip
def test_a_saved_state_that_would_ruin_gradients_is_refused(saved: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=rf"{next(iter(saved))}=.* Write "):
        Dynamic().restore(saved)


def test_a_static_scale_stays_its_own() -> None:
    assert Static(8.0).restore({"scale": 4.0, "bad": 3.0}) == (8.0, 0.0, 3.0)
    for scale in (4.0, math.nan, math.inf):  # a framework's checkpoint need not pass through restore
        for finite, counts in ((True, (1.0, 0.0)), (False, (0.0, 3.0))):
            assert Static(8.0).step(State(scale, 0.0, 2.0), Reading(finite)) == (8.0, *counts)


@pytest.mark.parametrize("make", [Dynamic, Tolerant])
@pytest.mark.parametrize(("ceiling", "refused_at"), [(8.0, 8.0), (12.0, 8.0), (15.9, 8.0), (1.0, 1.0)])
def test_growth_ends_at_the_ceiling_or_at_the_last_scale_that_fits(
    make: Any, ceiling: float, refused_at: float
) -> None:
    clamp = quietly(make, init_scale=1.0, growth_interval=1, max_scale=ceiling, scale_dtype="float64")
    assert play(clamp, "0" * 9)[-1].scale == ceiling
    assert play(replace_quietly(clamp, at_ceiling="refuse"), "0" * 9)[-1].scale == refused_at


@no_deadline
@given(dynamics(**EXACT, **UNBOUNDED, init_scale=1.0), scripts)
def test_the_scale_counts_runs(policy: Dynamic, script: str) -> None:
    """The same rule without a state machine: count growths and backoffs run by run."""
    resets, power, held = policy.hysteresis_reset, 0, 0
    for mark, marks in groupby(script):
        length = len(list(marks))
        if mark == "0":
            growths = max(0, (length - policy.compat.growth_delay) // policy.growth_interval)
            power += growths
            held = 0 if resets == "clean" or growths else held
        else:
            absorbed = min(length, max(0, policy.hysteresis - 1 - held))
            power -= length - absorbed
            held += length
    assert play(policy, script)[-1].scale == 2.0**power


@no_deadline
@given(moving(bounds="strict"), scripts)
def test_the_scale_moves_only_for_a_reason(policy: Any, script: str) -> None:
    scales = [state.scale for state in play(policy, script)]
    since = 0
    for step, (before, after) in enumerate(pairwise(scales)):
        if script[step] == "1":
            assert after <= before
            assert after == before or script[: step + 1].count("1") >= getattr(policy, "hysteresis", 1)
            since = step + 1
        elif after != before:
            assert after > before
            assert step + 1 - since >= policy.growth_interval
            since = step + 1


@no_deadline
@given(tolerants(**EXACT, **UNBOUNDED, init_scale=1.0), scripts)
def test_tolerant_backs_off_at_the_rate_it_was_told(policy: Tolerant, script: str) -> None:
    scales = [state.scale for state in play(policy, script)]
    moved = lowered = 0
    for step, (before, after) in enumerate(pairwise(scales), start=1):
        rate = script[lowered:step].count("1") / (step - moved)
        assert (after < before) == (script[step - 1] == "1" and rate >= policy.tolerance)
        moved, lowered = (step if after != before else moved), (step if after < before else lowered)


@no_deadline
@given(statics, scripts)
def test_static_never_moves_and_counts(policy: Static, script: str) -> None:
    last = play(policy, script)[-1]
    runs = {mark: len(list(marks)) for mark, marks in groupby(script)}  # the last run of each mark
    good, bad = (runs.get(mark, 0) if script.endswith(mark) else 0 for mark in "01")
    assert last == (policy.scale, good if script else 0, bad if script else 0)


# Resuming


@no_deadline
@given(policies, scripts, st.data())
def test_a_run_resumed_through_json_is_the_uninterrupted_run(policy: Any, script: str, data: Any) -> None:
    states = play(policy, script)
    step = data.draw(st.integers(0, len(states) - 1))
    saved = json.dumps(states[step]._asdict())
    restored = type(policy.start())(**json.loads(saved))
    assert play(policy, script[step:], restored) == states[step:]


@moderate
@given(moving(bounds="strict", max_scale=None, growth_interval=1000), st.integers(10, 900), st.integers(1, 9))
def test_a_counter_beyond_a_lowered_interval_still_grows(policy: Any, clean: int, interval: int) -> None:
    before = play(policy, "0" * clean)[-1]
    resumed = replace_quietly(policy, growth_interval=interval)
    assert play(resumed, "0", before)[-1].scale > before.scale


# Giving up


def first_exhausted(policy: Policy[Any], script: str) -> tuple[int, Any, ScaleExhausted] | None:
    """Return the step, the state and the exception with which the policy gives up, if it does."""
    state = policy.start()
    for step, mark in enumerate(script):
        try:
            state = policy.step(state, Reading(finite=mark == "0"))
        except ScaleExhausted as exhausted:
            return step, state, exhausted
    return None


@no_deadline
@given(moving(**EXACT, **FLOORED, init_scale=8.0, at_floor="raise"), scripts)
@example(policy=Dynamic(init_scale=1.0, min_scale=1.0, at_floor="raise"), script="1")
@example(policy=Tolerant(init_scale=1.0, min_scale=1.0, at_floor="raise", tolerance=0.5), script="00111")
def test_raise_gives_up_when_a_backoff_would_leave_the_floor(policy: Any, script: str) -> None:
    lower = replace(policy, min_scale=2.0**-60, at_floor="hold")
    below = [step for step, state in enumerate(play(lower, script)) if state.scale < 1.0]
    exhausted = first_exhausted(policy, script)
    assert (exhausted[0] if exhausted else None) == (below[0] - 1 if below else None)


@no_deadline
@given(
    moving(**FLOORED, init_scale=4.0, at_floor="raise"),
    scripts.map(lambda script: script + "1" * 40),
)
def test_exhaustion_says_what_happened_and_changes_nothing(policy: Any, script: str) -> None:
    found = first_exhausted(policy, script)
    assume(found)
    step, state, exhausted = found
    assert state == play(policy, script)[-1]
    assert exhausted.scale == state.scale
    assert 1 <= exhausted.overflows <= script[: step + 1].count("1")
    assert f"{state.scale:g}" in str(exhausted)
    assert f"{exhausted.overflows} overflow" in str(exhausted)
    patient_twin = replace_quietly(policy, at_floor="hold")
    assert policy.step(state, CLEAN) == patient_twin.step(state, CLEAN)
    with pytest.raises(ScaleExhausted):
        policy.step(state, OVERFLOW)


@no_deadline
@given(moving(at_floor="hold"), scripts)
def test_hold_never_gives_up(policy: Any, script: str) -> None:
    assert len(play(policy, script)) == len(script) + 1


# Policies are values


@no_deadline
@given(policies)
def test_a_policy_is_a_value(policy: Any) -> None:
    for twin in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), replace_quietly(policy)):
        assert twin == policy
        assert hash(twin) == hash(policy)
    assert eval(repr(policy), {}, quiet_names()) == policy  # the repr is the line that makes it
    with pytest.raises(FrozenInstanceError):
        policy.scale = policy.init_scale = 1.0


def quiet_names() -> dict[str, Any]:
    makes = {**RULES, "Compat": Compat}
    return {name: lambda make=make, **settings: quietly(make, **settings) for name, make in makes.items()}


def test_policies_with_other_settings_differ() -> None:
    different = [
        Static(),
        Static(2.0),
        Dynamic(),
        Dynamic(growth_interval=1),
        Tolerant(),
        Tolerant(tolerance=0.1),
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("kind", RULES.values())
@no_deadline
@given(st.data())
def test_a_state_starts_as_plain_floats(kind: Any, data: st.DataObject) -> None:
    state = data.draw(OWN.get(kind, near_the_defaults(kind))).start()
    assert all(type(value) is float for value in state)
    assert state.good == state.bad == 0.0


def test_numbers_of_numpy_are_numbers() -> None:
    with warnings.catch_warnings(action="error"):
        assert Dynamic(init_scale=np.float32(8), growth_interval=np.int64(3)).start().scale == 8.0
    with pytest.raises(PolicyError, match="init_scale"):
        Dynamic(init_scale=10**400)


@no_deadline
@given(
    policy=dynamics(min_scale=None, at_floor="hold", bounds="moves"),
    script=scripts,
)
def test_overflows_left_are_those_until_the_scale_backs_off(policy: Dynamic, script: str) -> None:
    state = play(policy, script)[-1]._replace(scale=1.0)
    scales, _ = walked(policy, "1" * policy.hysteresis, state)
    assert policy.overflows_left(state) == next(step for step, scale in enumerate(scales) if scale < 1.0)
