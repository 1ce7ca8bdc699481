"""A training that is killed with SIGKILL at random moments ends as one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from preamp import Trace, simulate

from . import killed_training
from .killed_training import POLICY, Training, overflows

STEPS = 1_000_000  # more than it gets to


def trained_until(folder: Path, lines: int) -> None:
    """Start the training, and kill it when its trace has so many lines."""
    path = folder / "trace.jsonl"
    command = [sys.executable, killed_training.__file__, str(folder), str(STEPS)]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        deadline = time.monotonic() + 120
        while not (path.exists() and path.read_bytes().count(b"\n") >= lines):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_killed_training_goes_on_as_if_it_had_not_been(tmp_path: Path, kills: int) -> None:
    draw, lines = random.Random(), 1
    for _ in range(kills):
        lines += draw.randint(20, 120)
        trained_until(tmp_path, lines)
        read = Trace.read(tmp_path / "trace.jsonl")
        lines = (tmp_path / "trace.jsonl").read_bytes().count(b"\n")
        resumed = Training()
        resumed.load(tmp_path / "checkpoint.pt")

        # Every step is there once, with the scale that the policy gives it, whatever was lost and done again.
        last = read[-1].index
        alone = simulate(POLICY, [overflows(number) for number in range(last + 1)])
        assert [step.index for step in read] == list(range(last + 1))
        assert [step.scale for step in read] == [step.scale for step in alone]
        assert [step.skipped for step in read] == [overflows(number) for number in range(last + 1)]

        # What was saved is what an unbroken training has after as many steps. (`policy_state` may differ:
        # overflows in a row decide nothing under this policy, so a checkpoint leaves them out.)
        unbroken = Training()
        for _ in range(resumed.done):
            unbroken.step()
        assert resumed.scaler.state_dict() == unbroken.scaler.state_dict()
        for ours, theirs in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
