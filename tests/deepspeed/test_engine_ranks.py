"""The engine on two ranks, each a process of its own: they train as one does, and skip together."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from preamp import Static

from . import engine_worker as worker
from . import guards_script

PATIENCE = 120.0  # seconds


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = {"WORLD_SIZE": str(worker.RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    paths = (Path(inspect.getfile(preamp)).parents[1], Path(__file__).parents[2])
    library = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(rank), str(folder)],
            env={**os.environ, **library, **launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(worker.RANKS)
    ]
    try:
        for process in processes:
            process.wait(PATIENCE)
    finally:
        for process in processes:
            process.kill()
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(worker.RANKS)]
    for answer in answers:
        assert "error" not in answer, answer["error"]
    return answers


@pytest.mark.parametrize("precision", worker.CONFIGS)
def test_two_ranks_train_as_one_does(ranks, precision):
    first, second = (answer[precision] for answer in ranks)
    assert first == second
    alone = worker.train(worker.made(worker.CONFIGS[precision], 1), 0, 1)
    assert first["counters"] == alone["counters"] == [3, 0]
    for theirs, ours in zip(first["weights"], alone["weights"], strict=True):
        # Each rank rounds its own gradient to half precision.
        assert theirs == pytest.approx(ours, abs={"fp16": 1e-4, "bf16": 2e-3, "float32": 1e-6}[precision])
    for theirs, ours in zip(first["steps"], alone["steps"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-2)


def test_an_overflow_on_one_rank_skips_on_all(ranks):
    first, second = (answer["overflow"] for answer in ranks)
    assert first == second
    assert first["counters"] == [3, 1]
    assert [step[0] for step in first["steps"][::2]] == [True, False, True]
    assert [step[1] for step in first["steps"][::2]] == [2.0**8, 2.0**7, 2.0**7]
    (record,), others = (answer["records"] for answer in ranks)
    assert record.startswith("step 1 skipped: loss scale 256 -> 128")
    assert others == []


@pytest.mark.parametrize("precision", worker.CONFIGS)
def test_ranks_with_other_losses_skip_the_same_spikes(ranks, precision):
    first, second = (answer[f"guarded {precision}"] for answer in ranks)
    policy = guards_script.CONFIGURED if precision == "fp16" else Static(1.0)
    expected = guards_script.simulated(policy, "spike", guards_script.script())
    assert first == second == guards_script.decisions(expected)
    assert [reason for reason, *_ in first].count("spike") == 5


def test_a_parameter_that_one_rank_does_not_use_is_trained(ranks):
    first, second = (answer["seldom"] for answer in ranks)
    assert first == second
    used, never = first["states"][:4], first["states"][4:]
    assert used == [["momentum_buffer"]] * 4
    assert never == [[], []]  # without a gradient anywhere


def test_all_ranks_begin_with_rank_0s_weights(ranks):
    torch.manual_seed(0)
    assert ranks[0]["initial"] == ranks[1]["initial"]
    expected = torch.cat([p.detach().half().flatten() for p in worker.Net().parameters()])
    assert ranks[0]["initial"] == expected.tolist()


def test_what_would_drift_apart_or_hang_is_refused_on_all_ranks(ranks):
    for answer in ranks:
        assert "on ranks [1] differs from that on rank 0" in answer["other configuration"]
        assert "on ranks [1] differs from that on rank 0" in answer["other guard"]
        assert "Write Embedding(..., sparse=False)" in answer["sparse"]


def test_ranks_go_on_from_a_checkpoint(ranks):
    assert all(answer["resumed"] for answer in ranks)
