"""The doctor: what it says of runs that were really simulated, and that what it advises is a cure."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import preamp
from preamp import (
    Dynamic,
    Policy,
    Reading,
    Snapshot,
    SnapshotRow,
    Static,
    Step,
    Tolerant,
    Trace,
    dialects,
    simulate,
)
from preamp.cli.app import app
from preamp.doctor import Diagnosis, best_scale, diagnose, lost_words
from preamp.record.exponents import ExponentHistogram
from preamp.simulation.processes import Drifting, Process, Spiky, Stationary
from tests.strategies import RULES, policies, quietly, scripts

from .inside import as_code, as_flags, lost_at, recorded_policy, rules

steady = Stationary(steps=4000, level=0.0, jitter=0.25)
SICK: dict[str, tuple[str, Policy[Any], Process | list[bool]]] = {
    "starts too high": ("wrong start", Dynamic(init_scale=2.0**32), steady),
    "starts far too high": ("scale too high", Static(2.0**24), steady),
    "stands still at its floor": (
        "scale too high",
        Dynamic(min_scale=1.0),
        replace(steady, level=20.0),
    ),
    "tries again at once": ("oscillating", Dynamic(growth_interval=20), steady),
    "spikes drag it down": ("dragged down", Dynamic(), Spiky(steps=8000, chance=0.005, height=40.0)),
    "waits for ten overflows": ("slow to back off", Dynamic(hysteresis=10, growth_interval=100), steady),
    "is too high for some steps": ("too high", Static(2.0**15), replace(steady, jitter=0.5)),
    "tolerates too much": ("too high", Tolerant(growth_interval=50), replace(steady, jitter=1.0)),
    "flushes everything": ("vanished", Dynamic(), replace(steady, steps=1500, level=-43.0)),
    "may not grow": ("at the ceiling", Dynamic(max_scale=2.0**16), replace(steady, level=-15.0)),
    "is a short run": ("too low", Dynamic(), replace(steady, steps=1000, level=-15.0)),
    "climbs too slowly": ("too low", Dynamic(), replace(steady, level=-25.0)),
    "never moves": ("too low", Static(16.0), replace(steady, level=-10.0)),
    "gradients shrink faster than it climbs": (
        "too low",
        Dynamic(),
        Drifting(steps=8000, level=0.0, drift=-30.0),
    ),
}
HEALTHY: dict[str, tuple[Policy[Any], Process]] = {
    "long": (Dynamic(), Stationary(steps=8_000, level=-2.0)),
    "short": (Dynamic(init_scale=2.0**15), replace(steady, steps=500)),
    "growing gradients": (Dynamic(), Drifting(steps=10_000, level=-16.0, drift=20.0)),
    "rare spikes": (Dynamic(), Spiky(steps=20_000, chance=0.0002)),
    "a good constant": (Static(2.0**14), steady),
    "another system's rule": (dialects.KERAS, steady),
}
NAN = [True] * 300


@cache
def simulated(name: str) -> Trace:
    return simulate(*SICK[name][1:])


@cache
def examined(name: str) -> Diagnosis:
    return diagnose(simulated(name))


def kinds(found: Diagnosis) -> list[str]:
    return [finding.kind for finding in found.findings]


@pytest.mark.parametrize("name", SICK)
def test_an_ill_run_is_recognized(name: str) -> None:
    assert kinds(examined(name)) == [SICK[name][0]]
    (finding,) = examined(name).findings
    assert finding.settings
    assert finding.sentence
    assert finding.numbers


@pytest.mark.parametrize("name", SICK)
def test_the_advice_takes_the_finding_away(name: str) -> None:
    kind, _, process = SICK[name]
    (finding,) = examined(name).findings
    better = examined(name).better(finding)
    assert better is not None
    assert kind not in kinds(diagnose(simulate(better, process)))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_left_alone(name: str) -> None:
    policy, process = HEALTHY[name]
    trace = simulate(policy, process)
    found = diagnose(trace)
    assert found.healthy
    assert kinds(found) == ["healthy"]
    assert not found.remedy()
    assert f"{trace.summary().skipped:,} of {len(trace):,} steps" in found.findings[0].sentence


@settings(deadline=None, max_examples=6)
@given(st.integers(-34, 8), st.integers(-8, 30), st.sampled_from([20, 200, 2000]), st.integers(0, 9))
def test_a_rule_that_heeds_the_advice_is_healthy_or_ill_in_another_way(
    level: int, first: int, interval: int, seed: int
) -> None:
    process = Stationary(steps=3000, level=float(level), jitter=0.3, seed=seed)
    found = diagnose(simulate(Dynamic(init_scale=2.0**first, growth_interval=interval), process))
    better = found.better()
    if better is not None:
        after = diagnose(simulate(better, process))
        assert after.healthy or "vanished" in kinds(found)  # where nothing is known of the right scale
        assert not {f.kind for f in found.findings if f.settings} & set(kinds(after))


def test_what_a_blind_rule_leaves_behind_is_enough_for_skipped_steps() -> None:
    blind = {
        "wrong start",
        "scale too high",
        "oscillating",
        "dragged down",
        "slow to back off",
        "too high",
    }
    for name, (kind, policy, _) in SICK.items():
        steps = [step._replace(amax=None, zeros=None) for step in simulated(name)]
        found = diagnose(Trace(steps, policy=repr(policy)))
        assert (kind in kinds(found)) or kind not in blind
        assert found.healthy or kind in blind


def test_without_peaks_the_healthy_sentence_says_what_it_cannot_know() -> None:
    assert "without recorded amaxes" in diagnose(simulate(Dynamic(), [False] * 3000)).findings[0].sentence


def test_nan_is_told_from_a_scale_that_is_too_high() -> None:
    (finding,) = diagnose(simulate(Dynamic(), NAN)).findings
    assert (finding.severity, dict(finding.settings)) == ("problem", {})
    assert "NaN in backward" in [one.kind for one in finding.weighed if one.left]
    assert not {"scale too high", "wrong start"} & {one.kind for one in finding.weighed if one.left}


def test_a_loss_that_is_not_finite_is_named() -> None:
    steps = [Step(n, 8.0, finite=False, skipped=True, new_scale=8.0, loss=math.inf) for n in range(50)]
    (finding,) = diagnose(Trace(steps, policy=repr(Static(8.0)))).findings
    assert (finding.verdict, finding.severity) == ("unknown", "problem")
    assert finding.sentence.startswith("Steps are lost whatever the scale (every step).")
    assert not finding.settings


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (("head.weight",), "In backward, head.weight was the first parameter with inf or NaN in 300 of 300"),
        ((), "In backward, inf or NaN reached head.weight, body.bias; the order is not known."),
    ],
)
def test_the_parameter_that_always_overflows_first_is_named(first: tuple[str, ...], said: str) -> None:
    names = ("head.weight", "body.bias")
    steps = [step._replace(culprits=names, first_culprits=first) for step in simulate(Dynamic(), NAN)]
    found = diagnose(Trace(steps))
    assert said in found.findings[0].sentence
    assert len(found.findings) == 1  # what does not train gets no other advice


@pytest.mark.parametrize(
    ("about", "kind"),
    [
        ({"precision": "float16", "policy": None}, "not scaled"),
        ({"precision": "float32", "policy": None}, "healthy"),
        ({"precision": "bfloat16", "policy": None}, "healthy"),
        ({}, "not measured"),
    ],
)
def test_a_loss_that_is_not_scaled_is_found_where_it_matters(about: dict[str, Any], kind: str) -> None:
    steps = [Step(n, 1.0, finite=True, skipped=False, zeros=0.5) for n in range(300)]
    found = diagnose(Trace(steps, **about))
    assert kinds(found)[0] == kind
    assert (found.findings[0].severity == "problem") == (kind == "not scaled")


def test_a_run_too_short_to_judge_is_not_called_well() -> None:
    (finding,) = diagnose(simulate(Dynamic(), [True, False, False])).findings
    assert (finding.kind, finding.severity) == ("too few", "note")
    assert finding.sentence.startswith("1 of 3 steps (33 %) overflowed")


def test_no_steps_are_no_finding() -> None:
    assert kinds(diagnose(Trace())) == ["no steps"]


def test_steps_without_a_scale_are_counted_and_snapshots_without_steps_are_read() -> None:
    lost = diagnose(Trace([Step(n, 0.0, finite=False, skipped=True) for n in range(3)]))
    assert "None of the 3 steps" in lost.findings[0].sentence
    alone = Trace()
    alone.add_snapshot(Snapshot(0, 1.0, "float16", (row("a", "flow", -6, (1,)),)))
    assert kinds(diagnose(alone)) == ["no steps", "limit"]


def test_advice_stays_within_what_a_scale_can_be() -> None:
    tiny = [Step(n, 2.0**16, finite=True, skipped=False, amax=1e-30) for n in range(300)]
    better = diagnose(Trace(tiny)).better()
    assert isinstance(better, Dynamic)
    assert better.init_scale == 2.0**127
    huge = [Step(n, 1.7e308, finite=True, skipped=False, amax=1e-300) for n in range(30)]
    assert isinstance(diagnose(Trace(huge)).better(), Dynamic)


def test_only_peaks_of_finite_steps_are_played_again() -> None:
    exhausted = Trace([Step(n, 8.0, finite=False, skipped=True, amax=5.0) for n in range(50)])
    found = diagnose(Trace(exhausted, policy=repr(Static(8.0))))
    assert found.better() is not None
    assert not found.rehearsal()


def test_values_that_no_float_holds_have_words() -> None:
    assert diagnose(looked_at(row("a", "flow", -2048, (1,) * 4096))).findings


def test_no_scale_is_called_best_for_a_step_that_overflowed() -> None:
    (snapshot,) = looked_at(row("a", "flow", -20, (1,), nonfinite=1)).snapshots
    assert best_scale(snapshot) is None
    assert "would" not in lost_words(snapshot)
    assert diagnose(Trace()).healthy


def test_rehearsal_says_what_the_advice_would_have_done() -> None:
    found = examined("tries again at once")
    advised = simulate(found.better(), steady).summary()
    said = int(found.rehearsal().partition(" skips ")[2].split(" ")[0])
    assert abs(said - advised.skipped) <= 2
    assert found.record.trace.summary().skipped > 20 * (said + 1)


def test_the_command_that_finds_the_operation_comes_with_findings_about_one() -> None:
    everything_skipped = diagnose(simulate(Dynamic(), [True] * 200))
    assert "preamp blame MODULE:FUNCTION --dtype float16" in everything_skipped.search()
    assert diagnose(simulate(Dynamic(), [False] * 200)).search() == ""


@settings(deadline=None, max_examples=20)
@given(policies, scripts, st.booleans())
def test_any_rule_is_read_back_and_any_run_has_a_diagnosis(policy: Any, script: str, told: bool) -> None:
    assert recorded_policy(repr(policy)) == policy
    trace = simulate(policy, [Reading(mark == "0", amax=8.0) for mark in script])
    found = diagnose(trace if told else Trace(list(trace)))
    assert found.findings
    for finding in found.findings:
        better = found.better(finding)
        assert (better is None) == (not finding.settings)
        if better is not None:
            assert quietly_evaluated(as_code(better)) == better
            flags = as_flags(better, finding.settings)
            assert not flags or all(
                name.replace("_", "-") in flags for name in finding.settings if hasattr(better, name)
            )
            assert not flags or quietly(chosen_by, flags=flags) == better


def quietly_evaluated(code: str) -> Any:
    return quietly(lambda: eval(code, {**vars(preamp), **RULES}))


def chosen_by(flags: str) -> Policy[Any]:
    """Return the rule that the command line makes of some flags."""
    _, bound, _ = app.parse_args(["simulate", *flags.split()], exit_on_error=False, print_error=False)
    (chosen,) = rules(bound.arguments.get("rule", ()), bound.arguments.get("policy"), (), ()).values()
    return chosen


@pytest.mark.parametrize(
    "text",
    [
        "open('x')",
        "Dynamic(__import__('os'))",
        "Dynamic(init_scale=__import__('os').abort())",
        "(",
        "None",
        "-" * 200_000 + "1",
        "(" * 200_000,
        "Dynamic(" + "-" * 100_000 + "1)",
        "Dynamic('\\d')",
        "Dynamic(\0)",
        "Dynamic(**{'x': 1})",
    ],
)
def test_nothing_but_our_rules_is_made_of_what_a_file_says(text: str) -> None:
    assert recorded_policy(text) is None


def test_a_dialects_name_is_read_back() -> None:
    assert recorded_policy("dialects.TORCH") is dialects.TORCH


def row(
    name: str, what: Any, low: int, counts: tuple[int, ...], zeros: int = 0, nonfinite: int = 0
) -> SnapshotRow:
    return SnapshotRow(name, what, "float32", ExponentHistogram(low, counts, zeros, nonfinite))


def looked_at(*rows: SnapshotRow, scale: float = 2.0**8, steps: int = 3000) -> Trace:
    """Return a run that a blind rule kept at one scale, with a snapshot of its last step."""
    trace = Trace(
        [Step(n, scale, finite=True, skipped=False) for n in range(steps)], policy=repr(Static(scale))
    )
    trace.add_snapshot(Snapshot(steps - 1, scale, "float16", rows))
    return trace


def test_a_snapshot_alone_tells_that_the_scale_is_too_low_and_what_is_lost() -> None:
    trace = looked_at(
        row("a", "flow", -30, (20, 0, 0, 0, 0, 30, 0, 0, 50)), row("b", "gradient", -20, (100,))
    )
    found = diagnose(trace)
    assert kinds(found)[0] == "too low"
    assert lost_at(trace.snapshots[0]) == (0.0, 20 / 200, 180 / 200)
    assert "0 % of the gradient entries are exactly zero, 10 % round to zero and 90 % lose digits" in (
        found.findings[0].sentence
    )
    after = looked_at(
        *(r._replace(histogram=r.histogram.shifted(34)) for r in trace.snapshots[0].rows), scale=2.0**42
    )
    assert kinds(diagnose(after))[0] == "healthy"


def test_flows_that_are_larger_than_gradients_lower_the_scale_that_is_advised() -> None:
    def advised(flow: int) -> float:
        steps = [Step(n, 8.0, finite=True, skipped=False, amax=2.0**-20) for n in range(300)]
        trace = Trace(steps, policy=repr(Static(8.0)))
        trace.add_snapshot(Snapshot(299, 8.0, "float16", (row("a", "flow", flow, (1,)),)))
        return diagnose(trace).better().scale

    assert advised(-20) == 2.0**5 * advised(-15)


def test_head_room_that_would_save_nothing_is_no_finding() -> None:
    assert kinds(diagnose(looked_at(row("a", "flow", -10, (1, 1, 1, 1)))))[0] == "healthy"


def test_what_a_module_limits_and_whether_it_does_so_alone() -> None:
    rows = [
        row("body.0", "flow", -6, (1, 2)),
        row("body.1", "flow", 12, (1,)),
        row("body.1", "gradient", -4, (1,)),
    ]
    (finding,) = [f for f in diagnose(looked_at(*rows)).findings if f.kind == "limit"]
    assert finding.numbers == {"headroom": 3, "alone": 17}
    assert finding.sentence.startswith(
        "Module body.1 limits the scale: at step 2,999 the largest value in the gradient of its output"
    )
    assert "enabled=False): y = model.body[1](x.float())" in finding.advice


@pytest.mark.parametrize(("nans", "said"), [(0, "was the first with"), (None, "had")])
def test_who_overflows_first_is_taken_from_snapshots(nans: int | None, said: str) -> None:
    """Rows that do not tell NaN from inf are those of a tree, which has no order."""
    rows = row("late", "flow", 3, (1,), nonfinite=2), row("early", "flow", 3, (1,), nonfinite=1)
    trace = looked_at(*(one._replace(nans=nans) for one in rows))
    (finding,) = [f for f in diagnose(trace).findings if f.kind == "overflows first"]
    assert finding.sentence == (
        f"In 1 of 1 snapshots of overflows, module late {said} inf or NaN, in the gradient of its output."
    )


def test_no_snapshot_has_no_words() -> None:
    assert lost_words(None) == ""
