"""The bench of planted faults: one of the cases here, all of them with `-m slow`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from blame_cases import jax_faults, run

    yield SimpleNamespace(
        cases=jax_faults.CASES, healthy=jax_faults.HEALTHY, judge=run.judge, acquit=run.acquit, harm=run.harm
    )
    for name in [each for each in sys.modules if each.startswith("blame_cases")]:
        del sys.modules[name]


def test_a_fault_in_a_small_model_is_named_first_and_its_healthy_step_acquitted(bench: Any) -> None:
    """Faults of each kind: `test_blame_faults.py`."""
    case = next(each for each in bench.cases if each.model == "perceptron")
    outcome = bench.judge(case, 0)
    assert outcome.first, (case.name, outcome.named)
    assert outcome.guilty, (case.name, outcome.named)
    healthy = next(each for each in bench.healthy if each.name.startswith("perceptron()"))
    assert bench.acquit(healthy, 0).clean


@pytest.mark.slow
def test_of_faults_that_hurt_90_percent_are_first_and_98_among_three_and_98_of_healthy_steps_acquitted(
    bench: Any,
) -> None:
    outcomes = [bench.judge(case, 0) for case in bench.cases if bench.harm(case, 0).hurts]
    acquitted = [bench.acquit(each, 0).clean for each in bench.healthy]
    assert sum(each.first for each in outcomes) >= 0.9 * len(outcomes)
    assert sum(each.top for each in outcomes) >= 0.98 * len(outcomes)
    assert sum(acquitted) >= 0.98 * len(acquitted)
