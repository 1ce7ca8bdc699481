"""What the guides list and no example shows."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from preamp import processes, simulate
from tests.torch.operators import DIFFERENCES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_guide_to_autocast_lists_how_the_release_differs_from_its_document():
    lines = (DOCS / "autocast.md").read_text().splitlines()
    assert [line for line in lines if line.startswith(("| cpu |", "| cuda |"))] == [
        f"| {d.device} | {d.document} | {d.release} | {d.reason} | `{'` `'.join(d.names.split())}` |"
        for d in DIFFERENCES
    ]


def load_benchmark(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS.parent / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_what_overflow_costs_on_many_ranks_is_what_is_computed():
    page, computed = (DOCS / "distributed.md").read_text(), load_benchmark("at_scale")
    assert "\n".join(computed.distance_table()) in page
    for name in ("Dynamic", "dialects.MEGATRON"):
        assert f"{computed.A_YEAR * computed.skipped_share(name):,.0f}" in page


def test_growing_costs_in_simulation_what_it_does_on_paper():
    """Where the top is sharp, to one growth."""
    computed = load_benchmark("at_scale")
    process = processes.Stationary(jitter=0.01, steps=24_000)
    for name, rule in computed.RULES.items():
        plain = getattr(rule, "policy", rule)
        at_the_top = replace(plain, init_scale=process.best_scale)
        skipped = simulate(at_the_top, process).summary().skipped
        assert skipped == pytest.approx(computed.skipped_share(name) * 24_000, abs=plain.hysteresis), name


def test_the_mismatch_of_two_programs_is_ordered_as_its_page_says():
    """Of two seeds and steps. In float32 the programs agree, so both compute the same function."""
    computed = load_benchmark("rl_mismatch")
    assert f"`python benchmarks/{computed.__name__}.py`" in (DOCS / "recipes/rl_float16.md").read_text()
    runs = {name: [computed.train(pair, seed, 2) for seed in (0, 1)] for name, pair in computed.PAIRS.items()}
    for when in ("first", "average"):
        float32, float16, bfloat16, mixed = (computed.values_of(runs[name], when, "k3") for name in runs)
        assert max(computed.values_of(runs["float32"], when, "max_abs_diff")) < 1e-5
        for seed in range(2):
            assert 0.0 < float32[seed] < 1e-5 * float16[seed]
            assert 20.0 < bfloat16[seed] / float16[seed] < 200.0
            assert mixed[seed] > 0.5 * bfloat16[seed]
    assert computed.rounded(2_113_000.0) == "2,100,000"
    assert (computed.rounded(8.3), computed.rounded(9.97), computed.with_error([0.002, 0.004])) == (
        "8.3",
        "10",
        "(3.00 ± 1.00)e-3",
    )


def test_the_page_of_guards_measures_every_guard_and_process():
    page, computed = (DOCS / "guards.md").read_text(), load_benchmark("guard_tables")
    one = computed.Total(1, 1, 1, 1)
    found = {(guard, process): one for guard in computed.GUARDS for process in computed.PROCESSES}
    for heading in ("missed spikes", "false alarms", "longest run of skips"):
        head, *_ = computed.table(found, heading, lambda total: total.spikes)
        assert head in page
    for guard in computed.GUARDS:
        assert page.count(f"\n| `{guard}` | ") >= 3
    for losses in computed.PROCESSES.values():
        assert f"`{losses.__name__}`" in page


def test_the_page_of_guards_has_what_is_measured_of_the_first():
    """Of SpikeGuard: the other rows take minutes."""
    page, computed = (DOCS / "guards.md").read_text(), load_benchmark("guard_tables")
    seeds = range(computed.FIRST_SEED, computed.FIRST_SEED + computed.SEEDS)
    totals = [
        [computed.played(("SpikeGuard()", process, seed)) for seed in seeds]
        for process in ("falling", "shifts")
    ]
    missed, alarms = [[sum(one[place] for one in each) for each in totals] for place in (1, 2)]
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `SpikeGuard()`")]
    assert [[int(row[2]), int(row[5])] for row in rows[:2]] == [missed, alarms]


@pytest.mark.slow
def test_the_page_of_guards_has_what_is_simulated():
    page, computed = (DOCS / "guards.md").read_text(), load_benchmark("guard_tables")
    seeds = range(computed.FIRST_SEED, computed.FIRST_SEED + computed.SEEDS)
    jobs = [
        (guard, process, seed)
        for guard in computed.GUARDS
        for process in computed.PROCESSES
        for seed in seeds
    ]
    assert computed.tables(computed.summed(jobs, map(computed.played, jobs))) in page
