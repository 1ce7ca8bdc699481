"""The bench of planted faults: a case of each kind here, all of them with `-m slow`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from blame_cases import run

    cases, healthy = run.bench("torch")
    yield SimpleNamespace(cases=cases, healthy=healthy, judge=run.judge, acquit=run.acquit)
    torch.set_num_threads(threads)
    for name in [each for each in sys.modules if each.startswith("blame_cases")]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore")
def test_a_fault_of_each_kind_is_named_first_and_a_healthy_step_of_each_model_acquitted(bench: Any) -> None:
    kinds: dict[str, list[Any]] = {}
    for case in bench.cases:
        kinds.setdefault(case.kind, []).append(case)
    assert len(kinds) == 11
    for cases in kinds.values():
        outcome = bench.judge(cases[0], 1)
        assert outcome.first, (cases[0].name, outcome.named)
        assert outcome.guilty, (cases[0].name, outcome.named)
    for each in bench.healthy[::16]:
        assert bench.acquit(each, 1).clean, each.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_of_all_faults_90_percent_are_first_and_98_among_three_and_98_of_healthy_steps_acquitted(
    bench: Any,
) -> None:
    outcomes = [bench.judge(case, 0) for case in bench.cases]
    acquitted = [bench.acquit(each, 0).clean for each in bench.healthy]
    assert sum(each.first for each in outcomes) >= 0.9 * len(outcomes)
    assert sum(each.top for each in outcomes) >= 0.98 * len(outcomes)
    assert sum(acquitted) >= 0.98 * len(acquitted)
