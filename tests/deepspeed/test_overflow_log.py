"""One record per skipped step, with its numbers; from rank 0 alone; and no more than a reader can bear."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import preamp
from preamp import PolicyError, Step
from preamp.deepspeed import OverflowLog

WORKER = Path(__file__).with_name("scaler_worker.py")
NUMBERS = ("step", "scale", "new_scale", "hysteresis_left", "culprits", "left_out")
SKIPPED = Step(5, 8.0, False, True, 4.0)


@contextmanager
def listening() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("preamp.deepspeed")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.fixture
def written() -> Iterator[list[logging.LogRecord]]:
    """What the logger has written."""
    with listening() as records:
        yield records


def skip(index: int, **others: Any) -> Step:
    return SKIPPED._replace(index=index, **others)


class Clock:
    """Seconds that pass when they are told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


MESSAGES = [
    (skip(7), None, "step 7 skipped: loss scale 8 -> 4"),
    (skip(7), 1, "step 7 skipped: loss scale 8 -> 4, hysteresis left 1"),
    (skip(7, new_scale=8.0), 3, "step 7 skipped: loss scale stays 8, hysteresis left 3"),
    (skip(7, new_scale=8.0), None, "step 7 skipped: loss scale stays 8"),
    (skip(7, new_scale=None), None, "step 7 skipped: loss scale stays 8"),
    (skip(7, scale=2.0**32, new_scale=2.0**31), None, "step 7 skipped: loss scale 4294967296 -> 2147483648"),
    (skip(7, scale=0.5, new_scale=0.25), None, "step 7 skipped: loss scale 0.5 -> 0.25"),
    (skip(7, culprits=("a", "b")), None, "step 7 skipped: loss scale 8 -> 4; not finite: a, b"),
    (
        skip(7, culprits=(*"abcde",)),
        None,
        "step 7 skipped: loss scale 8 -> 4; not finite: a, b, c and 2 more",
    ),
    (skip(7, culprits=("100%s",)), None, "step 7 skipped: loss scale 8 -> 4; not finite: 100%s"),
]


@pytest.mark.parametrize(("step", "left", "message"), MESSAGES, ids=[message for *_, message in MESSAGES])
def test_a_record_says_it_and_has_the_numbers(
    written: list[logging.LogRecord], step: Step, left: int | None, message: str
) -> None:
    OverflowLog()(step, hysteresis_left=left)
    (record,) = written
    assert (record.getMessage(), record.levelname, record.name) == (message, "WARNING", "preamp.deepspeed")
    seen = {name: getattr(record, name) for name in NUMBERS}
    expected = (step.index, step.scale, step.new_scale, left, step.culprits, 0)
    assert seen == dict(zip(NUMBERS, expected, strict=True))


def test_only_skipped_steps_are_logged(written: list[logging.LogRecord]) -> None:
    log = OverflowLog(limit=1)
    for index in range(3):
        log(Step(index, 8.0, True, False, 8.0))
    log(Step(3, 8.0, False, False, 8.0))
    log(skip(4))
    assert [record.step for record in written] == [4]


@settings(max_examples=40)
@given(st.lists(st.sampled_from([0, 0, 0, 1, 3, 10]), max_size=60), st.integers(1, 5))
def test_every_skipped_step_is_written_or_counted(pauses: list[int], limit: int) -> None:
    clock, times = Clock(), []
    log = OverflowLog(limit=limit, period=10.0, clock=clock)
    with listening() as written:
        for index, pause in enumerate(pauses):
            clock.now += pause
            times.append(clock.now)
            log(skip(index))
    shown = [record.step for record in written]
    assert shown[:limit] == list(range(min(limit, len(pauses))))
    assert {index for index, pause in enumerate(pauses) if pause == 10} <= set(shown)
    for first, beyond in zip(shown, shown[2 * limit :], strict=False):
        assert times[beyond] - times[first] >= 10.0
    for earlier, later in itertools.pairwise(written):
        assert later.left_out == later.step - earlier.step - 1
        assert ("not logged" in later.getMessage()) == bool(later.left_out)


def test_the_last_record_of_a_period_says_so(written: list[logging.LogRecord]) -> None:
    clock = Clock()
    log = OverflowLog(limit=2, period=30.0, clock=clock)
    for index in range(5):
        log(skip(index))
    clock.now += 30.0
    log(skip(5))
    assert [record.getMessage().partition("4; ")[2] for record in written] == [
        "",
        "the last of 2 records in 30 s",
        "skipped before it and not logged: 3",
    ]


def test_another_computers_clock_does_not_silence_it(written: list[logging.LogRecord]) -> None:
    clock = Clock()
    log = OverflowLog(limit=1, clock=clock)
    log(skip(0))
    clock.now = 0.0  # as after a pickle, on a computer that started later
    log(skip(1))
    assert [record.step for record in written] == [0, 1]


def test_it_can_be_pickled(written: list[logging.LogRecord]) -> None:
    log = OverflowLog(limit=1)
    log(skip(0))
    pickle.loads(pickle.dumps(log))(skip(1))
    assert [record.step for record in written] == [0]


@pytest.mark.parametrize(
    ("name", "value"), [("limit", 0), ("limit", 2.5), ("period", 0.0), ("period", "1 min")]
)
def test_limits_that_cannot_work_are_refused(name: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=f"{name}={value!r}.*Write {name}="):
        OverflowLog(**{name: value})


def test_two_ranks_agree_and_one_of_them_logs(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(Path(preamp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(tmp_path / "meeting")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], env={**os.environ, **variables}, text=True, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    first, second = (json.loads(rank.communicate(timeout=60)[0]) for rank in ranks)
    assert [first["alone"], second["alone"]] == [[False, False, False], [False, True, False]]
    assert [first["in_a_group_of_its_own"], second["in_a_group_of_its_own"]] == [
        first["alone"],
        second["alone"],
    ]
    assert first["agreed"] == second["agreed"] == [False, True, False]
    assert first["scales"] == second["scales"] == [8.0, 4.0, 4.0]
    assert (len(first["logged"]), second["logged"]) == (1, [])
    assert first["logged"][0].startswith("step 1 skipped: loss scale 8 -> 4")
    assert not first["deepspeed"]  # what was imported does not need it
