"""The machinery of `make bench`: turns, rows and the page. What things cost is for `make bench` to say."""

import doctest
import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("timing", "rows", "page", "run")


@pytest.fixture(scope="module")
def bench():
    """Return the modules, which import each other as scripts in one folder do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def core(bench):
    """Return what `core.py --quick` comes to, in a process of its own."""
    return bench.run.run(bench.run.Job("core"), "cpu", quick=True)


@pytest.fixture
def done(bench, core):
    """Return a run of one benchmark."""
    return bench.page.Run(core[0], [], "2026-11-22", 1.0, 0.0, "a machine", "Python", quick=True)


def test_a_benchmark_yields_rows(core):
    rows, well = core
    assert well
    assert len(rows) == len(set(rows)) == 8
    for row in rows:
        assert (row.area, row.device, row.verdict) == ("core", "cpu", "cost")
        assert 0.0 < row.low <= row.ratio <= row.high < math.inf


def test_a_benchmark_that_fails_is_named_and_keeps_its_rows(bench, done):
    rows, well = bench.run.run(bench.run.Job("there_is_none"), "cpu", quick=True)
    assert (rows, well) == ([], False)
    page = bench.page.page([replace(done, failed=["there_is_none, cpu"])])
    assert "Did not run to the end: there_is_none, cpu" in page
    assert "Did not run" not in bench.page.page([done])


def test_the_page_sums_up_the_rows_and_says_where_they_are_from(bench, done):
    quick, full = (bench.page.page([replace(done, quick=quick)]) for quick in (True, False))
    low, high = (bench.rows.number(end(row.ratio for row in done.rows)) for end in (min, max))
    line = f"| core: growth and backoff by hand | cost 8 | {low} to {high} |"
    assert quick.splitlines().count(line) == 1
    assert "`core.py`" in quick
    assert "Measured on 2026-11-22, on a machine." in quick
    assert "not measurements" in quick
    assert "not measurements" not in full


def test_the_page_of_the_documentation_shows_the_recorded_runs(bench):
    assert (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text() == bench.page.page(bench.page.read())


def test_every_row_is_in_one_section_which_names_benchmarks_that_exist(bench):
    newest = bench.page.read()[-1]
    for row in newest.rows:
        assert sum(section.shows(row) for section in bench.page.SECTIONS) <= 1
    for section in bench.page.SECTIONS:
        assert any(map(section.shows, newest.rows))
        assert all((BENCHMARKS / command.split()[0]).exists() for command in section.commands)


def test_a_recorded_run_is_read_back(bench, done, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.page, "RECORDED", tmp_path)
    noise = bench.rows.Area("core").row(
        "what", "other", bench.timing.Spread(math.nan, -math.inf, math.inf), 1.0, "ms"
    )
    runs = [done, replace(done, rows=[*done.rows, noise])]
    assert [bench.page.record(run).name for run in runs] == ["2026-11-22.jsonl", "2026-11-22-2.jsonl"]
    assert list(map(repr, bench.page.read())) == list(map(repr, runs))  # NaN equals nothing


def test_what_was_timed_in_several_runs_has_a_range(bench):
    def timed(*ratios):
        return [bench.rows.Area("any").row("a", "b", (r, r - 0.01, r + 0.01), 8.0 * r, "ms") for r in ratios]

    def line(*ratios):
        return list(bench.rows.markdown([timed(*ratios)]))[1]

    assert line(0.5, 0.75) == "| b | wins 1 | 0.500 to 0.750 |"
    assert line(1.5, 1.25) == "| **b**; highest: a | loses 1 | 1.25 to 1.50 |"
    assert line(0.5, 1.0) == "| b | even 1 | 0.500 to 1.000 |"
    assert line(1.0, 1.5) == "| **b**; highest: a | loses 1 | 1.000 to 1.50 |"
    assert line(0.5, 1.5) == "| b | even 1 | 0.500 to 1.50 |"


def test_every_benchmark_is_run(bench):
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if "    main(measure" in path.read_text()}
    assert scripts == {job.script for job in bench.run.JOBS}


def test_works_take_turns(bench):
    calls = []
    works = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = bench.timing.interleaved(works, bench.timing.Effort(rounds=30, seconds=math.inf, turn=0.0))
    assert "".join(calls[:6]) == "aabbcc"  # twice to warm up
    rounds = ["".join(calls[start : start + 3]) for start in range(6, len(calls), 3)]
    assert len(rounds) == 30
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}  # no work always follows the same one
    assert {name: len(taken) for name, taken in times.items()} == {"a": 30, "b": 30, "c": 30}


def test_time_that_is_up_leaves_five_rounds(bench):
    effort = bench.timing.Effort(rounds=1000, seconds=0.0, turn=0.0)
    assert len(bench.timing.interleaved({"a": lambda: None}, effort)["a"]) == 5


def test_what_goes_before_a_turn_goes_before_every_call(bench):
    calls = []
    works = {name: lambda name=name: calls.append(name) for name in "ab"}
    effort = bench.timing.Effort(rounds=2, turn=60.0)
    bench.timing.interleaved(works, effort, before=lambda name: calls.append(name.upper()))
    assert sorted(zip(calls[::2], calls[1::2], strict=True)) == [("A", "a")] * 4 + [("B", "b")] * 4


seconds = st.floats(1e-6, 1e3)
few = settings(max_examples=25)


@few
@given(st.lists(seconds, min_size=2, max_size=8), st.integers(-10, 10), st.booleans())
def test_what_takes_a_times_as_long_has_the_ratio_a(bench, theirs, power, peer):
    times = {"preamp": [2.0**power * taken for taken in theirs], "other": theirs}
    kind = {"peers" if peer else "floors": ["other"]}
    (row,) = bench.rows.Area("any").timed("what", times, "preamp", **kind)
    assert row.low == row.ratio == row.high == 2.0**power
    side = "even" if power == 0 else "wins" if power < 0 else "loses"
    assert row.verdict == (side if peer else "cost")


@few
@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=8))
def test_quartiles_on_both_sides_of_1_are_even(bench, pairs):
    both = pairs + [(theirs, ours) for ours, theirs in pairs]
    times = {"preamp": [ours for ours, _ in both], "other": [theirs for _, theirs in both]}
    (row,) = bench.rows.Area("any").timed("what", times, "preamp", ["other"])
    assert row.verdict == "even"


def test_rows_that_are_lost_come_first_and_in_bold(bench):
    area = bench.rows.Area("any")
    rows = [[area.counted("calls", "peer", ours, 8, "calls")] for ours in (7, 8, 9)]
    rows.insert(0, [area.counted("calls", "floor", 8, 4, "calls", peer=False)])
    rows.insert(0, [area.counted("calls", "slower", 1, 2, "calls")])
    _, *lines = bench.rows.markdown(rows)
    assert lines == [
        "| **peer**; highest: calls | loses 1, even 1, wins 1 | 0.875 to 1.12 |",
        "| slower | wins 1 | 0.500 |",
        "| floor | cost 1 | 2.00 |",
    ]


def test_what_is_added_is_compared(bench):
    times = {"base": [1.0, 2.0], "preamp": [1.5, 2.5], "other": [2.0, 3.0]}
    row = bench.rows.Area("any").added("what", times, "base", "other")
    assert (row.low, row.ratio, row.high, row.ours, row.unit) == (0.5, 0.5, 0.5, 500.0, "ms")


def test_a_difference_that_drowns_in_noise_has_no_verdict(bench):
    times = {"base": [1.0, 2.0], "preamp": [0.5, 1.0], "other": [0.9, 2.1]}
    row = bench.rows.Area("any").added("what", times, "base", "other")
    assert (row.verdict, row.ratio, row.high) == ("even", pytest.approx(math.nan, nan_ok=True), math.inf)
    assert list(bench.rows.markdown([[row]]))[1].endswith("| even 1 | noise |")


@few
@given(st.lists(seconds, min_size=2, max_size=8), st.lists(seconds, min_size=2, max_size=8))
def test_figures_with_spreads_of_their_own_have_a_wider_ratio(bench, ours, theirs):
    ours, theirs = bench.timing.spread(ours), bench.timing.spread(theirs)
    row = bench.rows.Area("any").over("what", "other", ours, theirs)
    assert row.ratio == ours.middle / theirs.middle
    assert row.low == ours.low / theirs.high
    assert row.high == ours.high / theirs.low


def test_the_examples_of_the_machinery(bench):
    for module in (bench.timing, bench.rows):
        found = doctest.testmod(module)
        assert found.attempted
        assert not found.failed
