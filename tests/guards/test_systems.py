"""Other systems' guards against programs written from `facts/guards.md` alone, decision for decision."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pytest

from preamp import PolicyError, Reading, Static, guards, simulate

Values = tuple[float, float]  # a loss and a norm


class Oracle(Protocol):
    """Another system's rule: told every step's values, it says which steps are taken."""

    def takes(self, loss: float, norm: float | None) -> bool: ...


class Olmo:
    """abs(x - mean) <= factor * std of past values, unbiased; the current value counts as history."""

    def __init__(self, window: int, factor: float) -> None:
        self.window, self.factor = window, factor
        self.history: dict[str, list[float]] = {"loss": [], "norm": []}

    def enough(self, past: list[float]) -> bool:
        return len(past) + 1 >= max(20, self.window // 2)

    def fits(self, value: float, past: list[float]) -> bool:
        return bool(abs(value - np.mean(past)) <= self.factor * np.std(past, ddof=1))

    def takes(self, loss: float, norm: float | None) -> bool:
        taken = True
        for name, value in (("loss", loss), ("norm", norm)):
            if value is None:
                continue
            past = self.history[name]
            if self.enough(past):
                taken = taken and self.fits(value, past)
            self.history[name] = [*past, value][-self.window :]
        return taken


class Levanter(Olmo):
    """x <= mean + factor * std of past values, of the population and at least 1e-6."""

    def enough(self, past: list[float]) -> bool:
        return len(past) >= max(2, self.window // 2)

    def fits(self, value: float, past: list[float]) -> bool:
        return bool(value <= np.mean(past) + self.factor * np.maximum(np.std(past), 1e-6))


class MaxText(Olmo):
    """x - mean <= factor * std of past values, unbiased."""

    def enough(self, past: list[float]) -> bool:
        return len(past) + 1 >= max(2, self.window // 2) and len(past) >= 1

    def fits(self, value: float, past: list[float]) -> bool:
        # Of one value there is no unbiased deviation: NaN, and nothing is at most NaN.
        std = np.std(past, ddof=1) if len(past) > 1 else math.nan
        return bool(value - np.mean(past) <= self.factor * std)


class Threshold:
    """Skip when the norm is above a threshold."""

    def __init__(self, most: float) -> None:
        self.most = most

    def takes(self, loss: float, norm: float | None) -> bool:
        assert norm is not None
        return not norm > self.most


CASES: dict[str, tuple[Any, Callable[[], Oracle]]] = {
    "olmo": (guards.OLMO, lambda: Olmo(128, 6.0)),
    "olmo-20": (guards.OLMO(rolling_interval_length=20, sigma_factor=3), lambda: Olmo(20, 3.0)),
    "olmo-2": (guards.OLMO(rolling_interval_length=64, sigma_factor=4.5), lambda: Olmo(64, 4.5)),
    "levanter": (guards.LEVANTER, lambda: Levanter(128, 6.0)),
    "levanter-2": (guards.LEVANTER(rolling_interval_length=2, sigma_factor=2), lambda: Levanter(2, 2.0)),
    "levanter-33": (guards.LEVANTER(rolling_interval_length=33), lambda: Levanter(33, 6.0)),
    "maxtext": (guards.MAXTEXT, lambda: MaxText(128, 6.0)),
    "maxtext-16": (guards.MAXTEXT(interval=16, scaling_factor=3.0), lambda: MaxText(16, 3.0)),
    "maxtext-100": (guards.MAXTEXT(100, 4.0), lambda: MaxText(100, 4.0)),
    "megatron": (guards.MEGATRON_NORM(2.0), lambda: Threshold(2.0)),
    "megatron-without": (guards.MEGATRON_NORM, lambda: Threshold(math.inf)),
}
ROLLING = {"OLMO": guards.OLMO, "LEVANTER": guards.LEVANTER, "MAXTEXT": guards.MAXTEXT}


def script(steps: int, seed: int = 0) -> Iterator[Values]:
    """Yield losses and norms: stretches of noise, of a fall and of a plateau, with spikes and NaN."""
    rng = np.random.default_rng(seed)
    made = 0
    while made < steps:
        kind, size = int(rng.integers(4)), int(rng.integers(20, 400))
        level, width = float(rng.uniform(1.0, 4.0)), float(rng.uniform(0.01, 0.3))
        for step in range(min(size, steps - made)):
            made += 1
            loss = level + width * rng.normal()
            norm = float(np.exp(0.3 * rng.normal()))
            if kind == 1:  # a plateau to the last bit
                loss, norm = 2.5, 1.0
            elif kind == 2:
                loss += 8.0 * math.exp(-step / 40.0)
            draw = rng.random()
            if draw < 0.01 or (kind == 3 and 100 <= step < 106):
                loss, norm = 10.0 * loss, 12.0 * norm
            elif draw < 0.015:
                norm = 2.0  # just what some thresholds are
            elif draw < 0.02:
                loss = 0.1 * loss
            elif draw < 0.0215:
                loss = [math.nan, math.inf, 1e20][int(rng.integers(3))]
                norm = [math.nan, math.inf, norm][int(rng.integers(3))]
            yield float(loss), norm


def decisions(guard: Any, values: list[Values], *, with_norm: bool) -> list[bool]:
    state, found = guard.start(), []
    for loss, norm in values:
        reading = Reading(finite=True, loss=loss, grad_norm=norm if with_norm else None)
        found.append(guard.takes(state, reading))
        state = guard.advance(state, reading)
    return found


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("steps", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("case", "with_norm"),
    [
        (case, with_norm)
        for case, (guard, _) in CASES.items()
        for with_norm in (True, False)
        if with_norm or "loss" in guard.uses  # something to decide by
    ],
)
def test_every_decision_is_that_of_the_system(case: str, with_norm: bool, steps: int) -> None:
    guard, make_oracle = CASES[case]
    values = list(script(steps, seed=len(case)))
    oracle = make_oracle()
    expected = [oracle.takes(loss, norm if with_norm else None) for loss, norm in values]
    found = decisions(guard, values, with_norm=with_norm)
    assert [step for step in range(steps) if found[step] != expected[step]] == []
    assert (0 < sum(expected) < steps) if "without" not in case else all(expected)


def settled(steps: int = 300) -> list[float]:
    rng = np.random.default_rng(3)
    return [float(2.0 + 0.02 * rng.normal()) for _ in range(steps)]


@pytest.mark.parametrize("guard", ROLLING.values(), ids=ROLLING)
def test_one_nan_costs_129_steps(guard: Any) -> None:
    losses = [*settled(), math.nan, *settled()]
    trace = simulate(Static(1.0), [Reading(True, loss=loss) for loss in losses], guard=guard)
    skipped = [step.index for step in trace if step.skipped]
    assert skipped == list(range(300, 429))


@pytest.mark.parametrize("guard", ROLLING.values(), ids=ROLLING)
def test_one_nan_that_overflowed_as_well_costs_129_steps(guard: Any) -> None:
    losses = [*settled(), math.nan, *settled()]
    readings = [Reading(not math.isnan(loss), loss=loss) for loss in losses]
    trace = simulate(Static(1.0), readings, guard=guard)
    reasons = [step.reason for step in trace if step.skipped]
    assert reasons == ["overflow"] + ["spike"] * 128


def test_one_nan_costs_spike_guard_one_step() -> None:
    losses = [*settled(), math.nan, *settled()]
    trace = simulate(Static(1.0), [Reading(True, loss=loss) for loss in losses], guard=guards.SpikeGuard())
    assert [step.index for step in trace if step.skipped] == [300]


@pytest.mark.parametrize("guard", ROLLING.values(), ids=ROLLING)
def test_of_six_equal_spikes_in_a_row_four_are_skipped(guard: Any) -> None:
    losses = [*settled(), *[20.0] * 6, *settled()]
    trace = simulate(Static(1.0), [Reading(True, loss=loss) for loss in losses], guard=guard)
    assert [step.index for step in trace if step.skipped] == [300, 301, 302, 303]


def test_spike_guard_skips_all_six() -> None:
    losses = [*settled(), *[20.0] * 6, *settled()]
    trace = simulate(Static(1.0), [Reading(True, loss=loss) for loss in losses], guard=guards.SpikeGuard())
    assert [step.index for step in trace if step.skipped] == list(range(300, 306))


def test_olmo_alone_skips_a_loss_that_is_unusually_low() -> None:
    losses = [*settled(), 1.0]
    lows = {
        name: decisions(guard, [(x, 1.0) for x in losses], with_norm=False)[-1]
        for name, guard in ROLLING.items()
    }
    assert lows == {"OLMO": False, "LEVANTER": True, "MAXTEXT": True}


def test_what_a_rolling_rule_is_not_told_does_not_enter_its_windows() -> None:
    start = guards.OLMO.start()
    of_norm = guards.OLMO.advance(start, Reading(True, grad_norm=1.0))
    assert (of_norm.loss, of_norm.grad_norm.known) == (start.loss, 1)


def test_a_nan_norm_is_not_above_a_threshold_of_others_but_above_ours() -> None:
    nan = Reading(True, grad_norm=math.nan)
    found = {
        repr(guard): guard.takes(guard.start(), nan)
        for guard in (guards.MEGATRON_NORM, guards.NormLimit(2.0))
    }
    assert found == {
        "guards.MEGATRON_NORM": True,
        "guards.NormLimit(threshold=2.0)": False,
    }


@pytest.mark.parametrize("guard", guards.ALL, ids=repr)
def test_a_dialect_is_named_described_and_pickled_by_name(guard: guards.GuardDialect[Any]) -> None:
    assert repr(guard) == f"guards.{guard.name}"
    assert getattr(guards, guard.name) is guard
    assert guard.system
    assert guard.odd.endswith(".")
    assert pickle.loads(pickle.dumps(guard)) is guard
    made = guard()
    assert pickle.loads(pickle.dumps(made)) == made == guard.guard
    assert made.start() == guard.start()
    assert made.uses == guard.uses


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: guards.OLMO(rolling_interval_length=1), "rolling_interval_length=1 must be a whole number"),
        (lambda: guards.LEVANTER(rolling_interval_length=2.5), "rolling_interval_length=2.5"),
        (lambda: guards.MAXTEXT(interval=0), "interval=0"),
        (lambda: guards.OLMO(sigma_factor=-1), "sigma_factor=-1"),
        (lambda: guards.MAXTEXT(scaling_factor=math.inf), "scaling_factor=inf"),
        (lambda: guards.MEGATRON_NORM(0.0), "grad_norm_skip_threshold=0.0 is not a number above 0"),
        (lambda: guards.MEGATRON_NORM(math.nan), "grad_norm_skip_threshold=nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        make()
