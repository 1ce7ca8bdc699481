"""Who may write a trace's file, what is left of it when that fails, and the files of several ranks."""

from __future__ import annotations

import copy
import errno
import math
import pickle
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp import PreampError, Snapshot, Step, Trace, TraceError

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def a_step(index: int, **values: Any) -> Step:
    return Step(index, 2.0, finite=True, skipped=False, **values)


@pytest.fixture(autouse=True)
def _outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# One writer

WRITER = """
import sys, time
from preamp import Step, Trace
trace = Trace(path=sys.argv[1], mode=sys.argv[2])
for index in range(int(sys.argv[3])):
    trace(Step(len(trace), 2.0, True, False))
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def writer(path: Path, steps: int = 3) -> Iterator[subprocess.Popen[str]]:
    """Have another process write a trace, until it is killed."""
    command = [sys.executable, "-c", WRITER, str(path), "append", str(steps)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("mode", ["new", "append", "replace"])
def test_a_second_trace_of_a_process_is_refused(path: Path, mode: Any) -> None:
    with Trace(path=path) as first:
        first(a_step(0))
        before = path.read_bytes()
        with pytest.raises(
            TraceError, match=r"run\.jsonl is being written by another Trace of this process.*close"
        ):
            Trace(path=path, mode=mode)
        assert path.read_bytes() == before
        first(a_step(1))
    with Trace(path=path, mode="append") as then:
        then(a_step(2))
    assert [step.index for step in Trace.read(path)] == [0, 1, 2]


@pytest.mark.parametrize("mode", ["append", "replace"])
def test_a_second_process_is_refused_until_the_first_is_gone(path: Path, mode: Any) -> None:
    with writer(path) as process:
        before = path.read_bytes()
        with pytest.raises(TraceError) as refused:
            Trace(path=path, mode=mode)
        message = str(refused.value)
        assert str(path) in message
        linux = Path("/proc/locks").exists()  # which says who holds a lock
        assert (f"process {process.pid}," if linux else "another process") in message
        assert "run.{rank}.jsonl" in message
        assert "only_rank=0" in message
        assert path.read_bytes() == before
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Trace(path=path, mode=mode) as trace:
            trace(a_step(9))
        assert [step.index for step in Trace.read(path)] == ([0, 1, 2, 9] if mode == "append" else [9])


def test_the_trace_that_is_being_written_can_be_read_and_is_not_written_over(path: Path) -> None:
    with writer(path), pytest.raises(TraceError, match="is being written"):
        Trace([a_step(7)]).write(path)
    with Trace(path=path, mode="append") as trace:
        trace(a_step(3))
        assert len(Trace.read(path)) == 4
        with pytest.raises(TraceError, match="is being written"):
            trace.write(path)
        trace(a_step(4))
    assert len(Trace.read(path)) == 5


FORKING = """
import os, sys, time
from preamp import Step, Trace, TraceError
trace = Trace(path=sys.argv[1])
trace(Step(0, 2.0, True, False))
if os.fork():
    os.wait() if sys.argv[2] == "wait" else os._exit(0)
    trace(Step(1, 2.0, True, False))
    trace.close()
else:
    try:
        trace(Step(7, 2.0, True, False))
    except TraceError as error:
        print(error, flush=True)
    assert len(trace) == 1
    trace.close()
    if sys.argv[2] != "wait":
        sys.stdin.read()
"""


def test_a_forked_process_cannot_write(path: Path) -> None:
    command = [sys.executable, "-c", FORKING, str(path), "wait"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert str(path) in said
    assert "forked" in said
    assert [step.index for step in Trace.read(path)] == [0, 1]


def test_a_forked_process_does_not_keep_the_file_locked(path: Path) -> None:
    """A worker of a DataLoader may live longer than the training that was killed."""
    command = [sys.executable, "-c", FORKING, str(path), "leave"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as parent:
        assert "forked" in parent.stdout.readline()  # the child is alive
        assert parent.wait() == 0
        with Trace(path=path, mode="append") as trace:
            trace(a_step(1))
        parent.stdin.close()
    assert len(Trace.read(path)) == 2


def test_a_file_system_without_locks_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(
        UserWarning, match=r"run\.jsonl cannot be locked on its file system \(No locks.*only_rank=0"
    ):
        trace = Trace(path=path)
    with trace:
        trace(a_step(0))
    assert len(Trace.read(path)) == 1


# Copies and closed traces


@pytest.mark.parametrize("to_copy", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_trace_with_a_file_can_be_read_and_raises_if_it_is_called(
    path: Path, to_copy: Any
) -> None:
    with Trace(path=path) as trace:
        trace(a_step(0))
        twin = to_copy(trace)
        trace(a_step(1))
    assert list(twin) == [a_step(0)]
    for call in (
        lambda: twin(a_step(1)),
        lambda: twin.stop("why"),
        lambda: twin.add_snapshot(Snapshot(1, 2.0, "float16", ())),
    ):
        with pytest.raises(TraceError, match=r"copy of the trace that writes .*run\.jsonl"):
            call()
    assert list(twin) == [a_step(0)]
    assert (twin.stopped, twin.snapshots) == (None, [])
    twin.write(path.with_name("twin.jsonl"))
    assert Trace.read(path.with_name("twin.jsonl")) == twin
    assert len(Trace.read(path)) == 2
    in_memory = to_copy(Trace([a_step(0)]))
    in_memory(a_step(1))
    assert len(in_memory) == 2


def train(scaler: Any, weight: Any = None) -> Any:
    """Take one step."""
    import torch

    weight = torch.nn.Parameter(torch.ones(1)) if weight is None else weight
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return weight


def test_a_closed_trace_raises_if_it_is_called(path: Path) -> None:
    trace = Trace(path=path)
    trace(a_step(0))
    trace.close()
    trace.close()
    for call in (
        lambda: trace(a_step(1)),
        lambda: trace.stop("why"),
        lambda: trace.add_snapshot(Snapshot(1, 2.0, "float16", ())),
    ):
        with pytest.raises(TraceError, match=r"run\.jsonl is closed.*mode='append'"):
            call()
    assert list(trace) == [a_step(0)] == list(pickle.loads(pickle.dumps(trace)))
    with pytest.raises(TraceError, match="is closed"):
        copy.deepcopy(trace)(a_step(1))
    with Trace() as in_memory:
        in_memory(a_step(0))
    in_memory(a_step(1))


# Full disks


def test_a_full_disk_raises_an_error_that_names_the_file_and_loses_nothing_else(path: Path) -> None:
    with Trace(path=path) as trace:
        trace(a_step(0))
        size = path.stat().st_size
        for room in (0, 1, 40):
            with full_disk(size + room):
                for _ in range(2):
                    with pytest.raises(OSError, match=r"run\.jsonl") as refused:
                        trace(a_step(1))
            assert refused.value.filename == str(path)
            assert path.stat().st_size == size
            assert list(trace) == list(Trace.read(path)) == [a_step(0)]
        trace(a_step(1))
    assert list(Trace.read(path)) == [a_step(0), a_step(1)]


def test_training_goes_on_with_a_full_disk_if_it_was_told_to(path: Path) -> None:
    from preamp.torch import GradScaler

    with Trace(path, on_error="warn") as trace:
        scaler = GradScaler("cpu", on_step=trace)
        weight = train(scaler)
        size = path.stat().st_size
        with full_disk(size + 10):
            with pytest.warns(
                UserWarning, match=r"run\.jsonl cannot be written: File too large.*trace\.write"
            ):
                train(scaler, weight)
            for _ in range(3):
                train(scaler, weight)  # silent: warnings are errors here
            assert path.stat().st_size == size
            assert len(trace) == 5
            assert len(Trace.read(path)) == 1
        assert weight.item() == 1.0 - 5 * 0.5
        train(scaler, weight)  # there is room again
        assert list(Trace.read(path)) == list(trace)
        assert len(trace) == 6
        with full_disk(path.stat().st_size), pytest.warns(UserWarning, match="cannot be written"):
            train(scaler, weight)
    assert list(Trace.read(path)) == list(trace)  # closing wrote it


def test_closing_on_a_full_disk_says_what_is_missing(path: Path) -> None:
    trace = Trace(path, on_error="warn")
    with full_disk(path.stat().st_size):
        with pytest.warns(UserWarning, match="cannot be written"):
            trace(a_step(0))
        trace(a_step(1))
        with pytest.warns(UserWarning, match=r"run\.jsonl lacks the last 2 lines.*trace\.write"):
            trace.close()
    assert len(trace) == 2
    with pytest.raises(TraceError, match="closed"):
        trace(a_step(2))


class Unclosable:
    """A file on a network that says only on closing that nothing arrived."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        self._file.close()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_a_failed_close_names_the_file_and_the_next_step_says_that_it_is_closed(path: Path) -> None:
    trace = Trace(path)
    trace._file._file = Unclosable(trace._file._file)  # type: ignore[union-attr, assignment]
    with pytest.raises(OSError, match=r"Disk quota exceeded: .*run\.jsonl"):
        trace.close()
    with pytest.raises(TraceError, match="is closed"):
        trace(a_step(0))
    trace.close()
    Trace(path, mode="append").close()  # the lock is gone


def test_writing_to_a_full_disk_leaves_what_was_there(path: Path) -> None:
    Trace([a_step(0)]).write(path)
    before = path.read_bytes()
    with full_disk(2000), pytest.raises(OSError, match=r"run\.jsonl"):
        Trace(map(a_step, range(100))).write(path)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["run.jsonl"]


def test_folders_are_made(tmp_path: Path) -> None:
    with Trace(tmp_path / "a" / "b" / "run.jsonl") as trace:
        trace(a_step(0))
    trace.write(tmp_path / "c" / "d.jsonl")
    assert Trace.read(tmp_path / "c" / "d.jsonl") == trace
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Trace(tmp_path / "file" / "run.jsonl")


# What a trace cannot be made of


@pytest.mark.parametrize(
    ("arguments", "named", "why"),
    [
        ((3,), {}, r"steps=3 is not a series of Step.*Trace\('run\.jsonl'\)"),
        ((), {"object": object()}, r"object=<object object.* is not something JSON can hold.*Write object="),
        ((), {"object": ...}, r"object=Ellipsis is not something JSON can hold"),
        ((), {"seed": math.nan}, r"seed=nan is not something JSON can hold"),
        ((), {"on_error": "ignore"}, r"on_error='ignore' is unknown.*'raise' or 'warn'"),
        ((), {"mode": "w"}, r"mode='w' is unknown"),
        ((), {"only_rank": -1}, r"only_rank=-1"),
        ((), {"preamp_trace": 1}, r"first line begins with preamp_trace"),
        (("a.jsonl",), {"path": "b.jsonl"}, r"path is given twice: 'a\.jsonl' and path='b\.jsonl'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, named: Any, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ({}, {"path": "run.jsonl"}):
        if more and (arguments or "path" in named):
            continue
        with pytest.raises(PreampError, match=why):
            Trace(*arguments, **{**named, **more})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unfit", [None, 3, (0, 2.0, True, False), {"index": 0}])
def test_what_is_not_a_step_is_refused(path: Path, unfit: Any) -> None:
    for recording in (Trace(), Trace(path)):
        with recording as trace:
            with pytest.raises(TypeError, match="is not a Step"):
                trace(unfit)
            assert len(trace) == 0
    assert len(Trace.read(path)) == 0


# Ranks


@pytest.mark.parametrize("name", RANK_VARIABLES)
def test_each_rank_writes_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for number in range(3):
        monkeypatch.setenv(name, str(number))
        with Trace(tmp_path / "run.{rank}.jsonl") as trace:
            trace(a_step(0, loss=float(number)))
    names = [f"run.{number}.jsonl" for number in range(3)]
    assert {one.name for one in tmp_path.iterdir()} == {*names}
    read = Trace.read(tmp_path / "run.{rank}.jsonl")
    assert [Path(one).name for one in read.about["merged"]["files"]] == names
    assert read[0].loss == pytest.approx(1.0)


def test_the_only_process_is_rank_0(tmp_path: Path) -> None:
    with Trace(path=str(tmp_path / "{rank}/run.jsonl"), only_rank=0) as trace:
        trace(a_step(0))
    assert list(Trace.read(tmp_path / "0" / "run.jsonl")) == list(
        Trace.read(tmp_path / "{rank}" / "run.jsonl")
    )


def test_an_initialized_group_knows_better_than_the_environment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    monkeypatch.setenv("RANK", "5")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with Trace(path.with_name("run.{rank}.jsonl")) as trace:
            trace(a_step(0))
    finally:
        dist.destroy_process_group()
    assert [one.name for one in path.parent.iterdir()] == ["run.0.jsonl"]


def test_one_rank_writes_and_the_others_remember(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 0, 2):
        monkeypatch.setenv("RANK", str(number))
        with Trace(path, only_rank=0) as trace:
            trace(a_step(number))
        assert [step.index for step in trace] == [number]
    assert [step.index for step in Trace.read(path)] == [0]


_maybe = st.none() | st.floats(-1e6, 1e6)
_rank = st.dictionaries(
    st.integers(0, 6),
    st.builds(Step, st.just(0), st.sampled_from([1.0, 2.0]), st.booleans(), st.booleans(),
              new_scale=st.none() | st.floats(0.0, 1e6), loss=_maybe, grad_norm=_maybe,
              amax=_maybe, zeros=_maybe, seconds=_maybe,
              culprits=st.lists(st.sampled_from("abc"), max_size=2, unique=True).map(tuple),
              buffers=st.lists(st.sampled_from("mv"), unique=True).map(tuple),
              restored=st.lists(st.sampled_from("mv"), unique=True).map(tuple)),
    max_size=6,
)  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(ranks=st.lists(_rank, min_size=1, max_size=4))
def test_files_of_ranks_are_read_as_one_run(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    paths = [folder / f"{number}.jsonl" for number in range(len(ranks))]
    for path, rank in zip(paths, ranks, strict=True):
        Trace((rank[index]._replace(index=index) for index in sorted(rank)), name="job").write(path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = Trace.read(paths)
    assert [step.index for step in run] == sorted(set().union(*ranks))
    assert run.about["name"] == "job"
    differ = 0
    for step in run:
        those = [rank[step.index] for rank in ranks if step.index in rank]
        known = {
            name: [v for one in those if (v := getattr(one, name)) is not None]
            for name in ("new_scale", "loss", "grad_norm", "amax", "zeros", "seconds")
        }
        assert step.scale == those[0].scale
        assert step.finite == all(one.finite for one in those)
        assert step.skipped == any(one.skipped for one in those)
        assert set(step.culprits) == set().union(*(one.culprits for one in those))
        lost = {name for one in those for name in one.buffers if name not in one.restored}
        assert set(step.restored) == set().union(*(one.restored for one in those)) - lost
        assert step.new_scale == (known["new_scale"] or [None])[0]
        for name in ("grad_norm", "amax", "seconds"):
            assert getattr(step, name) == max(known[name], default=None)
        for name in ("loss", "zeros"):
            assert (getattr(step, name) is None) == (not known[name])
            assert not known[name] or getattr(step, name) == pytest.approx(fmean(known[name]), abs=1e-6)
        differ += len({one.scale for one in those}) > 1 or len({one.skipped for one in those}) > 1
    lacks = any(len(rank) < len(run) - 1 or (len(run) and not rank) for rank in ranks)
    assert bool(run.disagreements) == bool(told) == bool(differ or lacks)
    run.write(folder / "run.jsonl")
    assert Trace.read(folder / "run.jsonl").disagreements == run.disagreements


def test_ranks_that_disagree_are_named_with_the_first_step(tmp_path: Path) -> None:
    for number in range(3):
        scales = [4.0, 4.0, 2.0 if number == 2 else 4.0, 4.0]
        Trace(
            Step(index, scale, True, skipped=number == 1 and index == 3) for index, scale in enumerate(scales)
        ).write(tmp_path / f"run.{number}.jsonl")
    with pytest.warns(UserWarning, match="the ranks of this run disagree"):
        run = Trace.read(tmp_path / "run.{rank}.jsonl")
    first, second = run.disagreements
    assert "run.1.jsonl differs" in first
    assert "first step 3, which it skipped and they did not" in first
    assert "run.2.jsonl differs" in second
    assert "1 of its steps, first of step 2: 2.0 instead of 4.0" in second


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([0, 2], r"run\.1\.jsonl is missing, although there is a file of rank 2"),
        ([2], r"run\.0\.jsonl, \S*run\.1\.jsonl are missing"),
        ([9], r"run\.2\.jsonl and 6 more are missing, although there is a file of rank 9"),
    ],
)
def test_the_missing_file_of_a_rank_is_named(ranks: list[int], said: str, tmp_path: Path, here: Any) -> None:
    for number in ranks:
        Trace([a_step(0), a_step(1)]).write(tmp_path / f"run.{number}.jsonl")
    with pytest.warns(UserWarning, match="the record of this run is incomplete: .*" + said):
        run = Trace.read(tmp_path / "run.{rank}.jsonl")
    assert len(run) == 2
    (found,) = run.disagreements
    assert re.search(said, found)
    for command in ("doctor", "report"):
        printed = here(command, "run.{rank}.jsonl").stdout  # folds lines
        assert re.search(said, " ".join(printed.split()))


def test_a_rank_that_ends_early_is_named_with_its_last_step(tmp_path: Path) -> None:
    for number, steps in ((0, 100), (1, 7), (2, 99)):
        Trace(map(a_step, range(steps))).write(tmp_path / f"run.{number}.jsonl")
    with pytest.warns(UserWarning, match="the record of this run is incomplete"):
        run = Trace.read(tmp_path / "run.{rank}.jsonl")
    (found,) = run.disagreements
    assert found == (
        f"{tmp_path / 'run.1.jsonl'} ends at step 6, and the run at step 99: it has 7 of 100 steps"
    )


@pytest.mark.parametrize("word", ["{Rank}", "{RANK}", "{foo}", "{}", "{rank:02d}", "{ rank }"])
def test_another_word_in_braces_is_refused_with_the_right_one(word: str, tmp_path: Path) -> None:
    name = str(tmp_path / "runs" / f"run.{word}.jsonl")
    right = re.escape(f"Write {name.replace(word, '{rank}')!r}")
    for call in (Trace, Trace.read, Trace([a_step(0)]).write, lambda path: Trace(path, only_rank=0)):
        with pytest.raises(TraceError, match=rf"{re.escape(word)} in .* is not replaced.*{right}"):
            call(name)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_in_memory_is_written_to_the_file_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "4")
    Trace([a_step(0)]).write(tmp_path / "run.{rank}.jsonl")
    assert [one.name for one in tmp_path.iterdir()] == ["run.4.jsonl"]


def test_folders_and_files_that_have_braces_in_their_names_already_are_used(tmp_path: Path) -> None:
    (tmp_path / "{a}").mkdir()
    with Trace(tmp_path / "{a}" / "run.jsonl") as trace:
        trace(a_step(0))
    (tmp_path / "{a}" / "run.jsonl").rename(tmp_path / "{b}.jsonl")
    assert len(Trace.read(tmp_path / "{b}.jsonl")) == 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "x"}, r"RANK='x' in the environment is not a number from 0.*unset RANK"),
        ({"RANK": "-1"}, r"RANK='-1' in the environment is not a number from 0"),
        ({"RANK": "1.0"}, r"RANK='1\.0' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 in the environment is not one of WORLD_SIZE=2 processes"),
        ({"RANK": "0", "WORLD_SIZE": "all"}, r"WORLD_SIZE='all' in the environment"),
        ({"OMPI_COMM_WORLD_RANK": "x"}, r"OMPI_COMM_WORLD_RANK='x'"),
        (
            {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "4"},
            r"OMPI_COMM_WORLD_RANK=4 .* OMPI_COMM_WORLD_SIZE=4 processes",
        ),
        ({"SLURM_PROCID": "x"}, r"SLURM_PROCID='x'"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(
    environment: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for path, more in (("run.{rank}.jsonl", {}), ("run.jsonl", {"only_rank": 0})):
        with pytest.raises(TraceError, match=said):
            Trace(tmp_path / path, **more)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    with Trace(tmp_path / "run.jsonl") as trace:  # which needs no rank
        trace(a_step(0))


def test_an_empty_variable_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("SLURM_PROCID", "3")
    with Trace(tmp_path / "run.{rank}.jsonl"):
        assert [one.name for one in tmp_path.iterdir()] == ["run.3.jsonl"]


def test_no_file_of_any_rank(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.\{rank\}\.jsonl"):
        Trace.read(tmp_path / "run.{rank}.jsonl")
    with pytest.raises(TraceError, match="no files"):
        Trace.read([])


# Going on


def test_a_run_that_is_loaded_from_an_older_checkpoint_counts_each_step_once(path: Path) -> None:
    with Trace(path) as trace:
        for index in range(10):
            trace(Step(index, 4.0, index != 7, index == 7, loss=1.0))
    for start, loss in ((5, 2.0), (6, 3.0)):
        with Trace(path, mode="append") as trace:
            for index in range(start, 8):
                trace(a_step(index, loss=loss))
    for run in (trace, Trace.read(path)):
        assert [step.index for step in run] == list(range(8))
        assert list(run.column("loss")) == [1.0] * 5 + [2.0] + [3.0] * 2
        summary = run.summary()
        assert (summary.steps, summary.skipped, summary.resumed) == (8, 0, (5, 6))
    assert path.read_bytes().count(b"\n") == 1 + 10 + 3 + 2  # nothing is taken from the file


@pytest.mark.parametrize(
    "tail",
    ["", '{"index": 2, "scale": 2.0, "fini', '{"index": 2, "scale": 2.0, "finite": true, "skipped": false}'],
)
@pytest.mark.parametrize("wide", [1, 70_000])
def test_a_file_is_gone_on_with_after_its_last_whole_line(path: Path, tail: str, wide: int) -> None:
    Trace(a_step(index, culprits=("x" * wide,)) for index in range(2)).write(path)
    with path.open("a") as file:
        file.write(tail)
    with Trace(path, mode="append") as trace:
        trace(a_step(5))
    expected = [0, 1, 2, 5] if tail.endswith("}") else [0, 1, 5]
    assert [step.index for step in trace] == [step.index for step in Trace.read(path)] == expected
