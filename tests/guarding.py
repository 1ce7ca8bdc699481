"""What the tests of guards over Keras and tf_keras have in common: rules, losses with spikes, and a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from preamp import Dynamic, Reading, guards, simulate
from preamp.guards import Guard, SpikeGuard, Verdict
from preamp.policy import choose
from preamp.scaling import Step


class NoState(NamedTuple):
    """What a guard remembers that remembers nothing."""


@dataclass(frozen=True, repr=False)
class LossLimit(Guard[NoState]):
    """Skip a step whose loss is above a limit."""

    uses: ClassVar[frozenset[str]] = frozenset(["loss"])

    limit: float = 5.0

    def start(self) -> NoState:
        return NoState()

    def judge(self, state: NoState, reading: Reading, where: Any = choose) -> Verdict:
        self.require(reading)
        if reading.loss is None:
            return Verdict(reading.finite, self.limit)
        return Verdict(True).also("loss", where(reading.loss > self.limit, False, True), self.limit)

    def advance(self, state: NoState, reading: Reading, where: Any = choose) -> NoState:
        return state


INF = float("inf")
POLICY = Dynamic(init_scale=64.0, growth_interval=7)
QUICK = SpikeGuard(warmup=4, patience=3)
RULES: dict[str, guards.Guard[Any]] = {
    "spike": QUICK,
    "norm": guards.NormLimit(6.0),
    "olmo": guards.OLMO(rolling_interval_length=24),
    "levanter": guards.LEVANTER(rolling_interval_length=8),
    "maxtext": guards.MAXTEXT(interval=9),
}


def script(seed: int, steps: int = 60) -> list[tuple[float, float]]:
    """Return losses and gradients: noise, single spikes of either, three in a row, overflows, a NaN loss."""
    draw = np.random.default_rng(seed)
    losses = 3.0 - 0.01 * np.arange(steps) + 0.1 * draw.normal(size=steps)
    gradients = np.exp(0.1 * draw.normal(size=steps))
    losses[[20, 30, 31, 32]] = 40.0
    gradients[[25, 40, 41]] = 50.0
    gradients[[15, 45]] = INF
    losses[50] = np.nan
    return list(zip(losses.astype("float32").tolist(), gradients.astype("float32").tolist(), strict=True))


def check_simulated(
    steps: Sequence[Step], guard: guards.Guard[Any], played: Sequence[tuple[float, float]], entries: int = 1
) -> None:
    """Check that steps were decided as a simulation with `POLICY` decides them.

    Args:
        steps: what was recorded.
        guard: the rule.
        played: of `script`.
        entries: how many entries of the gradient had the same value.
    """
    norms = [float(np.float32(gradient * entries**0.5)) for _, gradient in played]
    readings = [
        Reading(step.finite, loss=loss, grad_norm=norm if step.finite else None)
        for step, (loss, _), norm in zip(steps, played, norms, strict=True)
    ]
    expected = simulate(POLICY, readings, guard=guard)
    assert [s.reason for s in steps] == [s.reason for s in expected]
    assert [s.new_scale for s in steps] == [s.new_scale for s in expected]
    assert {"overflow", "spike"} <= {s.reason for s in steps}
    for ours, theirs in zip(steps, expected, strict=True):
        if ours.spike:
            assert ours.spike.of == theirs.spike.of
            assert ours.spike[1:] == pytest.approx(theirs.spike[1:], rel=1e-3, nan_ok=True)


def batches(spike_at: int, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches of 8 with nearly the same rows, of which one has targets that are far away."""
    x = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
    shifts = [1000.0 if place == spike_at else 0.1 for place in range(steps)]
    return [(x * (1.0 + 0.01 * (i % 3)), x.sum(1, keepdims=True) + shift) for i, shift in enumerate(shifts)]
