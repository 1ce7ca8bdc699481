"""A policy's state goes through the attributes of DeepSpeed's scaler unharmed, whatever the policy."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Dynamic, Moving, Policy, Reading, ScaleExhausted, State, Tolerant, dialects
from preamp.deepspeed.attaching.method_patches import MethodPatches
from preamp.deepspeed.attaching.scaler_attributes import ScalerAttributes
from preamp.deepspeed.attributes import RECORD, policy_of, settings_of, state_of
from preamp.errors import CheckpointError, PolicyError, UsageError
from tests.strategies import policies, reading, scripts

deepspeeds = st.builds(
    dialects.DEEPSPEED,
    init_scale=st.integers(0, 20).map(lambda power: 2.0**power),
    scale_window=st.integers(1, 4),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    raise_error_at_min_scale=st.booleans(),
)


def original(module: ModuleType, saved: dict[str, Any]) -> Any:
    """Return DeepSpeed's scaler with these attributes."""
    scaler = module.DynamicLossScaler(1.0, 1000, 1.0, 1, False)
    vars(scaler).update(copy.deepcopy(saved))
    return scaler


@settings(max_examples=40)
@given(policies, scripts)
def test_every_policy_goes_on_from_its_attributes(policy: Policy[Any], script: str) -> None:
    attributes, state = ScalerAttributes(policy), policy.start()
    saved = attributes.first()
    for mark in script:
        seen = reading(policy, state, mark)
        try:
            state = policy.step(state, seen)
        except ScaleExhausted:
            with pytest.raises(ScaleExhausted):
                policy.step(attributes.read(saved), seen)
            return
        saved = attributes.written(saved, policy.step(attributes.read(saved), seen), seen.finite)
        assert saved["cur_scale"] == state.scale
    if isinstance(policy, Moving):
        assert attributes.read(saved).good == state.good


@settings(max_examples=40)
@given(deepspeeds, scripts)
def test_deepspeeds_own_rule_leaves_what_deepspeed_leaves(peer: ModuleType, policy: Any, script: str) -> None:
    """Attribute by attribute, so that it goes on with them as if it had been there all along."""
    attributes = ScalerAttributes(policy)
    saved = attributes.first()
    scaler = original(peer, saved)
    for mark in script:
        finite = mark == "0"
        try:
            after = policy.step(attributes.read(saved), Reading(finite))
        except ScaleExhausted:
            with pytest.raises(Exception, match="already at minimum"):
                scaler.update_scale(True)
            return
        saved = attributes.written(saved, after, finite)
        scaler.update_scale(not finite)
        assert RECORD not in saved
        assert {name: getattr(scaler, name) for name in saved} == saved


@settings(max_examples=40)
@given(scripts.filter(bool), scripts.filter(bool))
def test_a_record_is_forgotten_when_deepspeed_goes_on_alone(
    peer: ModuleType, before: str, after: str
) -> None:
    policy = Tolerant(init_scale=2.0**20, growth_interval=3, tolerance=0.4)
    attributes = ScalerAttributes(policy)
    saved = attributes.first()
    for mark in before:
        finite = mark == "0"
        saved = attributes.written(saved, policy.step(attributes.read(saved), Reading(finite)), finite)
    scaler = original(peer, {**saved, "raise_error_at_min_scale": False})
    for mark in after:
        scaler.update_scale(mark == "1")
    assert attributes.read(vars(scaler)) == policy.start()._replace(scale=scaler.cur_scale)


def test_a_scale_without_counts_is_taken_over() -> None:
    """Such as that of DeepSpeed's static scaler."""
    assert ScalerAttributes(Dynamic()).read({"cur_scale": 8, "dynamic": False}) == State(8.0, 0.0, 0.0)


class Owner:
    def method(self, number: int) -> int:
        return number + 1


def test_hooks_replace_on_one_object_and_put_back() -> None:
    owner, hooks = Owner(), MethodPatches()
    owner.other = owner.method  # type: ignore[attr-defined]
    before = dict(vars(owner))
    hooks.place(owner, "method", lambda old, number: 10 * old(number))
    hooks.place(owner, "other", lambda old, number: -old(number))
    assert (owner.method(1), owner.other(1), Owner().method(1)) == (20, -2, 2)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"Owner.method was replaced by an earlier attach"):
        MethodPatches().place(owner, "method", lambda old, number: number)
    hooks.remove()
    assert vars(owner) == before


def test_hooks_that_are_wrapped_stay_all() -> None:
    owner, hooks = Owner(), MethodPatches()
    hooks.place(owner, "method", lambda old, number: 10 * old(number))
    wrapped = owner.method
    owner.method = lambda number: wrapped(number)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"Owner.method was replaced again after attach"):
        hooks.remove()
    assert owner.method(1) == 20


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("cur_scale", "65536", "is not one number"),
        ("cur_iter", 0.5, "not a whole number"),
        ("consecutive_hysteresis", "no", "neither True nor False"),
        ("scale_factor", 0.5, "growth_factor=0.5"),
        ("scale_window", -3, "growth_interval=-3"),
        ("delayed_shift", 0, "hysteresis=0"),
    ],
)
def test_attributes_that_cannot_work_are_refused(name: str, value: Any, problem: str) -> None:
    saved = {**ScalerAttributes(dialects.DEEPSPEED()).first(), name: value}
    with pytest.raises((PolicyError, CheckpointError), match=problem):
        state_of(saved, policy_of(saved))


def test_a_floor_of_0_is_no_floor() -> None:
    saved = {**ScalerAttributes(dialects.DEEPSPEED()).first(), "min_scale": 0.0}
    policy = policy_of(saved)
    assert (policy.min_scale, policy.at_floor) == (None, "hold")
    assert settings_of(policy)["min_scale"] == 0.0
