"""The record of a run: in memory, on disk while it grows, and back."""

from __future__ import annotations

import json
import math
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import Snapshot, Step, Summary, Trace, TraceError
from tests.strategies import runs, steps

few = settings(deadline=None, max_examples=15)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
reserved = {"self", "steps", "path", "mode", "on_error", "only_rank", "preamp_trace"}
abouts = st.dictionaries(st.text().filter(lambda key: key not in reserved), json_values, max_size=4)


@pytest.fixture(scope="module")
def path() -> Any:
    """A path that Hypothesis may write to again and again."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "run.jsonl"


def exactly(trace: Trace) -> str:
    """Return all that a trace holds; unlike `==`, this finds NaN equal to NaN and 1 unequal to 1.0."""
    return repr((list(trace), trace.about, trace.stopped, trace.resumed))


# Writing and reading


@few
@given(recorded=runs, about=abouts, reason=st.none() | st.text())
def test_a_trace_read_back_is_the_trace_written(
    path: Path, recorded: list[Step], about: dict[str, Any], reason: str | None
) -> None:
    trace = Trace(recorded, **about)
    if reason is not None:
        trace.stop(reason)
    trace.write(path)
    assert exactly(Trace.read(path)) == exactly(trace)
    trace.write(str(path))  # a path as text, over what is there
    assert exactly(Trace.read(str(path))) == exactly(trace)


@few
@given(recorded=runs)
def test_a_streamed_trace_can_be_read_after_every_step(path: Path, recorded: list[Step]) -> None:
    with Trace(path=path, mode="replace", task="écrire") as trace:
        assert exactly(Trace.read(path)) == exactly(trace)
        for step in recorded:
            trace(step)
            assert exactly(Trace.read(path)) == exactly(trace)
        trace.stop("out of patience")
        assert exactly(Trace.read(path)) == exactly(trace)
        streamed = path.read_text(encoding="utf-8")
    assert path.read_text(encoding="utf-8") == streamed
    trace.write(path)
    assert path.read_text(encoding="utf-8") == streamed


@few
@given(recorded=runs, about=abouts)
def test_every_line_is_strict_json(path: Path, recorded: list[Step], about: dict[str, Any]) -> None:
    Trace(recorded, **about).write(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(recorded)
    entries = [
        json.loads(line, parse_constant=pytest.fail) for line in lines
    ]  # Infinity and NaN are not JSON
    assert entries[0] == {"preamp_trace": 1, **about}
    assert all(value not in (None, []) for entry in entries[1:] for value in entry.values())


@pytest.mark.parametrize("unfit", [float("nan"), object()])
def test_what_json_cannot_hold_is_refused_before_the_file_is_touched(tmp_path: Path, unfit: Any) -> None:
    path = tmp_path / "precious.jsonl"
    path.write_text("precious")
    with pytest.raises((ValueError, TypeError), match="JSON"):
        Trace(path=path, mode="replace", unfit=unfit)
    assert path.read_text() == "precious"


FOREVER = """
import itertools, sys
from preamp import Step, Trace
trace = Trace(path=sys.argv[1])
for index in itertools.count():
    trace(Step(index, 2.0, True, False, culprits=("x" * (index % 20000),)))
"""


def test_the_trace_of_a_killed_process_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    with subprocess.Popen([sys.executable, "-c", FOREVER, str(path)]) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 200_000):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    read = list(Trace.read(path))
    assert len(read) > 100
    assert [(step.index, len(step.culprits[0])) for step in read] == [
        (i, i % 20000) for i in range(len(read))
    ]


# Files that are no trace

HEAD = '{"preamp_trace": 1}\n'
STEP = {"index": 0, "scale": 2.0, "finite": True, "skipped": False}


def line(**changes: Any) -> str:
    return (
        json.dumps({name: value for name, value in {**STEP, **changes}.items() if value != "ABSENT"}) + "\n"
    )


NO_TRACE: dict[str, tuple[str | bytes, int, str]] = {
    "empty": ("", 1, "found nothing"),
    "blank": ("\n", 1, "found nothing"),
    "words": ("step,scale\n0,2.0\n", 1, "found 'step,scale'"),
    "a step first": (line(), 1, "a trace of this release begins with"),
    "another release": ('{"preamp_trace": 99}\n', 1, "a trace of this release begins with"),
    "a list first": ("[1]\n", 1, "a trace of this release begins with"),
    "binary": (b"\x89PNG\r\n\x1a\n\x00\x00", 1, "not text"),
    "binary later": (HEAD.encode() + line().encode() + b"\xff\xfe", 3, "not text"),
    "cut short in the middle": (HEAD + line()[:-9] + "\n" + line(), 2, "not JSON"),
    "zeros in the middle": (HEAD + "\0" * 512 + "\n" + line(), 2, "not JSON"),
    "a head cut short": (HEAD[:9], 1, "a trace of this release begins with"),
    "two at once": (HEAD + line().strip() + line(), 2, "not JSON"),
    "a gap": (HEAD + "\n" + line(), 2, "not JSON"),
    "a number": (HEAD + "17\n", 2, "expected an object"),
    "endless digits": (HEAD + "1" * 5000 + "\n", 2, "not JSON"),
    "endless depth": (HEAD + line() + "[" * 100_000 + "\n", 3, "not JSON"),
    **{
        f"{token} for a number": (HEAD + line().replace("2.0", token), 2, f"{token} is not a number of JSON")
        for token in ("NaN", "Infinity", "-Infinity")
    },
    **{
        f"{name} is the word {word!r}": (HEAD + line(**{name: word}), 2, f"{name} is {word}, but")
        for name in ("scale", "new_scale")
        for word in ("nan", "-inf")
    },
    "unknown entry": (HEAD + line(colour="red"), 2, "'colour'"),
    "stopped for no reason": (HEAD + '{"stopped": 3}\n', 2, "without"),
    **{f"no {name}": (HEAD + line() + line(**{name: "ABSENT"}), 3, f"without {name}") for name in STEP},
    **{
        f"{name} is {value!r}": (HEAD + line(**{name: value}), 2, f"{name} is {value!r}"[:40])
        for name, values in {
            "index": ["0", 0.5, True, None, 10**400, -1],
            "scale": ["2", None, True, [2.0], "Infinity", 10**400, -2.0],
            "new_scale": ["2", -2.0],
            "finite": [1, "true", None],
            "skipped": [0, "false", None],
            "loss": ["low", False, {}, None],
            "seconds": ["1s", []],
            "culprits": ["layer", [1], {"layer": 1}, None],
            "buffers": ["layer", [1], {"layer": 1}, None],
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("name", NO_TRACE)
def test_a_file_that_is_no_trace_is_refused_with_the_line(tmp_path: Path, name: str) -> None:
    content, number, why = NO_TRACE[name]
    path = tmp_path / "no-trace.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TraceError) as refused:
        Trace.read(path)
    assert isinstance(refused.value, ValueError)
    assert str(refused.value).startswith(f"{path}, line {number}: ")
    assert why in str(refused.value)


@few
@given(recorded=runs.filter(bool), zeros=st.booleans(), data=st.data())
def test_a_trace_cut_anywhere_lacks_the_step_that_was_cut_and_no_other(
    path: Path, recorded: list[Step], zeros: bool, data: Any
) -> None:
    """Killed within a line, which a disk may have filled up with zeros."""
    Trace(recorded).write(path)
    whole = path.read_bytes()
    part = whole[: data.draw(st.integers(len(HEAD), len(whole)))]
    ends = list(accumulate(map(len, whole.splitlines(keepends=True))))  # the heading's, and those of steps
    kept = sum(len(part) >= end - 1 for end in ends) - 1  # without a line break it is whole, too
    path.write_bytes(part + b"\0" * 9 * (zeros and len(part) + 1 not in ends))
    assert repr(list(Trace.read(path))) == repr(recorded[:kept])
    with Trace(path=path, mode="append") as trace:
        trace(recorded[0]._replace(index=recorded[-1].index + 1))
    more = recorded[0]._replace(index=recorded[-1].index + 1)
    assert repr(list(Trace.read(path))) == repr([*recorded[:kept], more])


@pytest.mark.parametrize(
    "record",
    [
        lambda trace, step: trace(step),
        lambda trace, step: trace.extend([tuple(step)]),
        lambda trace, step: Trace([*trace, step]),
    ],
    ids=["call", "extend", "construct"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"index": -1},
        {"index": -(2**80)},
        {"scale": math.nan},
        {"scale": -2.0},
        {"scale": -2},  # not a float: taken the slow way
        {"scale": -math.inf},
        {"new_scale": math.nan},
        {"new_scale": -1.0},
        {"new_scale": math.nan, "culprits": ("weight",)},
    ],
    ids=str,
)
def test_a_step_that_cannot_be_is_refused_and_not_written(
    tmp_path: Path, changes: dict[str, Any], record: Callable[[Trace, Step], object]
) -> None:
    good = Step(0, 2.0, finite=True, skipped=False)
    (name, value), *_ = changes.items()
    path = tmp_path / "run.jsonl"
    for trace in (Trace([good]), Trace([good], path=path)):
        with trace, pytest.raises(TraceError, match=rf"^a step's {name} is {value}(\.0)?, but "):
            record(trace, good._replace(**{"index": 1, **changes}))
        assert list(trace) == [good]
    assert list(Trace.read(path)) == [good]


def test_a_missing_file_is_the_operating_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace.read(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("key", sorted(reserved - {"preamp_trace"}))
def test_reading_a_file_opens_no_other(tmp_path: Path, key: str) -> None:
    """Whoever made the file must not choose what is written to."""
    victim, path = tmp_path / "victim", tmp_path / "trace.jsonl"
    victim.write_text("precious")
    path.write_text(json.dumps({"preamp_trace": 1, key: str(victim)}) + "\n")
    assert Trace.read(path).about == {key: str(victim)}
    assert victim.read_text() == "precious"


# Reading it in memory


@few
@given(runs)
def test_a_trace_is_a_sequence_of_the_steps_it_was_called_with(recorded: list[Step]) -> None:
    trace = Trace()
    on_step: Any = trace
    assert [on_step(step) for step in recorded] == [None] * len(recorded)
    assert repr(list(trace)) == repr(recorded)  # which finds NaN equal to NaN, and 1 unequal to 1.0 and True
    assert len(trace) == len(recorded)
    assert repr([trace[index] for index in range(len(trace))]) == repr(recorded)
    assert all(type(step) is Step for step in trace)
    assert not recorded or trace[-1] is not None is not trace[0]
    assert trace == Trace(recorded)
    assert trace != Trace([*recorded, Step(2**80, 1.0, True, False)])
    assert trace != Trace(recorded, task="other")


@few
@given(
    st.lists(
        st.builds(
            Step,
            index=st.just(0),
            scale=st.sampled_from([0.5, 1.0, 2.0, float("inf")]),
            finite=st.booleans(),
            skipped=st.booleans(),
            new_scale=st.sampled_from([None, 0.25, 1.0, 4.0]),
        ),
        max_size=30,
    )
)
def test_the_summary_is_what_a_reader_would_count(recorded: list[Step]) -> None:
    recorded = [step._replace(index=index) for index, step in enumerate(recorded)]
    summary = Trace(recorded).summary()
    if not recorded:
        assert summary == Summary(0, 0, 0.0, 0, None, None, None, 0, 0)
        return
    skips = [step.skipped for step in recorded]
    last = recorded[-1]
    scales = [step.scale for step in recorded] + [last.scale if last.new_scale is None else last.new_scale]
    assert summary == Summary(
        steps=len(recorded),
        skipped=sum(skips),
        skip_rate=sum(skips) / len(skips),
        longest_streak=max(len(list(streak)) * skipped for skipped, streak in groupby(skips)),
        min_scale=min(scales),
        max_scale=max(scales),
        final_scale=scales[-1],
        growths=[before < after for before, after in pairwise(scales)].count(True),
        backoffs=[before > after for before, after in pairwise(scales)].count(True),
        spikes=sum(step.spike is not None for step in recorded),
    )


def test_a_file_that_is_there_is_neither_lost_nor_mixed_up(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first, second = (Step(index, 2.0, finite=True, skipped=False) for index in range(2))
    with Trace(path=path, name="one", seed=1) as trace:
        trace(first)
        trace.stop("interrupted")
    with pytest.raises(TraceError, match=r"exists already.*mode='append'.*mode='replace'"):
        Trace(path=path)
    with Trace(path=path, mode="append", seed=2) as trace:
        assert list(trace) == [first]
        assert trace.about == {"name": "one", "seed": 1}
        trace(second)
    assert list(Trace.read(path)) == [first, second]
    assert Trace.read(path).stopped is None
    Trace(path=path, mode="replace").close()
    assert len(Trace.read(path)) == 0
    with pytest.raises(TraceError, match="mode='a'"):
        Trace(path=path, mode="a")  # type: ignore[arg-type]


def test_scalars_of_any_framework_are_recorded(tmp_path: Path) -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    step = Step(
        numpy.int64(3), torch.tensor(8.0), numpy.bool_(True), numpy.bool_(False), loss=numpy.float32(0.5)
    )
    with Trace(path=tmp_path / "run.jsonl") as trace:
        trace(step)
        with pytest.raises(TypeError, match=r"step's loss is 'low'"):
            trace(step._replace(loss="low"))
        assert len(trace) == 1
    assert list(Trace.read(tmp_path / "run.jsonl")) == [Step(3, 8.0, True, False, loss=0.5)]


# Many steps


@pytest.mark.filterwarnings("ignore:.*replace:UserWarning")  # some go back to 0, or repeat a step
@few
@given(recorded=st.lists(steps, max_size=12), data=st.data())
def test_a_step_that_goes_back_replaces_what_was_lost(path: Path, recorded: list[Step], data: Any) -> None:
    """Against the plain rule: whatever is not below the new step's index is gone."""
    kept: list[Step] = []
    resumed = []
    for step in recorded:
        if kept and step.index <= kept[-1].index:
            resumed.append(step.index)
            kept = [before for before in kept if before.index < step.index]
        kept.append(step)
    with Trace(path=path, mode="replace") as streamed:
        streamed.extend(recorded)
    for trace in (Trace(recorded), streamed, Trace.read(path), pickle.loads(pickle.dumps(Trace(recorded)))):
        assert repr(list(trace)) == repr(kept)
        assert trace.resumed == resumed
        assert trace.summary().resumed == tuple(resumed)
        for name in Step._fields:
            assert repr(list(trace.column(name))) == repr([getattr(step, name) for step in kept])
    first, last, every = (data.draw(st.none() | st.integers(-15, 15)) for _ in range(3))
    part = slice(first, last, every or None)
    assert repr(Trace(recorded)[part]) == repr(kept[part])


def test_a_step_that_is_hardly_resumed_is_told_of() -> None:
    """Two scalers that share a trace, and a run whose scaler was not loaded, would lose what was recorded."""
    steps = [Step(index, 2.0, finite=True, skipped=False) for index in range(5)]
    trace = Trace(steps)
    with pytest.warns(UserWarning, match=r"step 4 is recorded a second time.* a trace of its own") as caught:
        trace(steps[4])
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"begin at 0 again, and what was recorded up to step 4 is replaced"):
        trace(steps[0])
    resumed = Trace(steps)
    resumed(steps[2])
    assert resumed.resumed == [2]


def test_a_disk_that_is_full_from_the_start_ends_no_training() -> None:
    step = Step(0, 2.0, finite=True, skipped=False)
    with pytest.warns(UserWarning, match="/dev/full"):
        trace = Trace("/dev/full", on_error="warn", mode="replace")
    with warnings.catch_warnings(action="ignore"):
        trace(step)
        trace.close()
    assert list(trace) == [step]


def test_a_field_that_no_step_has_is_refused() -> None:
    with pytest.raises(TraceError, match=r"column\('color'\).*grad_norm"):
        Trace().column("color")


@pytest.mark.parametrize("place", [3, -4])
def test_a_place_beyond_the_end_is_an_index_error(place: int) -> None:
    with pytest.raises(IndexError):
        Trace(Step(index, 2.0, True, False) for index in range(3))[place]


def test_many_steps_take_little_memory_and_are_read_as_a_stream(tmp_path: Path) -> None:
    """65 bytes a step are 65 MB for a million; a tuple of Python floats took 400."""
    count, path, told = 20_000, tmp_path / "long.jsonl", []
    Trace(
        Step(n, 2.0**16, True, False, 2.0**16, 1 / (n + 1), 0.5, 3e4, 0.1, ("w",) * (n % 99 == 0))
        for n in range(count)
    ).write(path)
    tracemalloc.start()
    trace = Trace.read(path, lambda done, size: told.append((done, size)))
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(trace) == count
    assert kept < 90 * count
    assert most < kept + 200_000 < path.stat().st_size
    size = path.stat().st_size
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) == 1 + size // 2**20


def test_snapshots_of_lost_steps_go_with_them() -> None:
    trace = Trace()

    def run(indices: Iterable[int], loss: float) -> None:
        for index in indices:
            if index % 5 == 0:
                trace.add_snapshot(Snapshot(index, loss, "float16", ()))
            trace(Step(index, 2.0, True, False, loss=loss))

    run(range(12), 1.0)
    run(range(5, 8), 2.0)
    assert [(snapshot.index, snapshot.scale) for snapshot in trace.snapshots] == [(0, 1.0), (5, 2.0)]
    assert list(trace.column("loss")) == [1.0] * 5 + [2.0] * 3


def test_names_of_buffers_are_recorded(tmp_path: Path) -> None:
    step = Step(0, 2.0, False, True, 1.0, culprits=("w",), buffers=("bn.running_mean", "bn.running_var"))
    with Trace(path=tmp_path / "run.jsonl") as trace:
        trace(step)
    assert list(Trace.read(tmp_path / "run.jsonl")) == [step] == list(trace)
    with pytest.raises(TypeError, match="a step's buffers is 'bn', which is not a tuple of names"):
        Trace()(step._replace(buffers="bn"))  # type: ignore[arg-type]
