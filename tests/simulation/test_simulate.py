"""A policy over readings without a model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Dynamic, Reading, ScaleExhausted, Step, dialects, simulate
from preamp.policy import choose
from tests.seeing import Remembering
from tests.strategies import blind, play, scripts

moderate = settings(deadline=None, max_examples=25)
stingy = Dynamic(init_scale=4.0, min_scale=1.0, at_floor="raise")


@moderate
@given(blind, scripts)
def test_simulating_is_stepping_by_hand(policy: Any, script: str) -> None:
    states = play(policy, script)
    trace = simulate(policy, [mark == "1" for mark in script])
    by_hand = [
        Step(index, before.scale, mark == "0", mark == "1", after.scale)
        for index, (mark, before, after) in enumerate(zip(script, states, states[1:], strict=False))
    ]
    assert list(trace)[: len(by_hand)] == by_hand
    assert (trace.stopped is None) == (len(by_hand) == len(script))
    assert trace.about == {"policy": repr(policy)}


@moderate
@given(blind, st.lists(st.tuples(st.booleans(), st.none() | st.floats(0.0, 65504.0)), max_size=30))
def test_readings_and_booleans_may_be_mixed(policy: Any, pairs: list[tuple[bool, float | None]]) -> None:
    plain = simulate(policy, (overflow for overflow, _ in pairs))
    mixed = simulate(
        policy, (overflow if amax is None else Reading(not overflow, amax) for overflow, amax in pairs)
    )
    assert [step._replace(amax=None) for step in mixed] == list(plain)
    assert [step.amax for step in mixed] == [amax for _, amax in pairs][: len(mixed)]
    assert mixed.stopped == plain.stopped


def test_a_rule_that_sees_is_shown_what_a_reading_holds() -> None:
    shown = []

    class Listed(Remembering):
        def advance(self, state: Any, reading: Reading, where: Any = choose) -> Any:
            shown.append(reading)
            return super().advance(state, reading, where)

    readings = [Reading(True, 2.0, 0.5), Reading(False, 3.0, 1.0), Reading(True, 2.0, 0.5)]
    trace = simulate(Listed(), readings)
    assert shown == readings
    assert [step.amax for step in trace] == [2.0, 3.0, 2.0]


def test_a_policy_that_gives_up_ends_the_trace_with_that_step() -> None:
    overflows = iter([False, True, True, True, "never read"])
    trace = simulate(stingy, overflows)  # type: ignore[arg-type]
    assert next(overflows) == "never read"
    assert [step.scale for step in trace] == [4.0, 4.0, 2.0, 1.0]
    assert trace[-1] == Step(3, 1.0, finite=False, skipped=True, new_scale=1.0)
    with pytest.raises(ScaleExhausted) as exhausted:
        stingy.step(play(stingy, "0111")[-1], Reading(finite=False))
    assert trace.stopped == str(exhausted.value)


def test_a_dialect_is_simulated_as_its_policy() -> None:
    overflows = [True] * 40
    ours, policy = simulate(dialects.DEEPSPEED, overflows), simulate(dialects.DEEPSPEED(), overflows)
    assert list(ours) == list(policy)
    assert ours.stopped
    assert ours.about == {"policy": "dialects.DEEPSPEED"}


@pytest.mark.parametrize("text", ["0010", b"0010", ""])
def test_text_is_refused_with_the_line_to_write(text: Any) -> None:
    """Every character of a text is true, '0' as well."""
    with pytest.raises(TypeError) as refused:
        simulate(stingy, text)
    assert repr(text) in str(refused.value)
    advice = str(refused.value).partition("Write ")[2].rstrip(".")
    if isinstance(text, str):
        assert eval(advice) == [mark == "1" for mark in text]


def test_a_recorded_run_is_played_again() -> None:
    """A Step is a tuple and so always true: it must be asked for its `finite`."""
    first = simulate(Dynamic(growth_interval=2), [False, False, True, False])
    again = simulate(Dynamic(growth_interval=2), first)
    assert list(again) == list(first)


@pytest.mark.parametrize("item", [2, None, 0.5, (), Dynamic])
def test_what_is_neither_true_nor_false_is_refused(item: Any) -> None:
    with pytest.raises(TypeError, match=r"neither true nor false\. Write True"):
        simulate(Dynamic(), [item])
