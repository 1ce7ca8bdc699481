"""Ranks that train together, each a process of its own: they skip together and train as one process does.

What the ranks do is in `distributed_worker.py`. In each training a gradient, or a loss, overflows on one rank
in the second step.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as OriginalSharded

import preamp
from preamp.torch import ShardedGradScaler

from . import distributed_worker as worker
from .distributed_training import OVERFLOW, STEPS, Seen, alone, net

WORKER = Path(worker.__file__)
PATIENCE = 180.0  # seconds to wait for an answer
CLIP = {"max_norm": 0.1}
BINS = 128 + 149 + 1  # the exponents of an amax in float32
SKIPPED = [False, True, False, False, False]

SGD: dict[str, Any] = {"optimizer": "SGD", "options": {"momentum": 0.9, "foreach": True}}
PLAIN_SGD: dict[str, Any] = {"optimizer": "SGD", "options": {"momentum": 0.9, "foreach": False}}
FUSED_SGD: dict[str, Any] = {"optimizer": "SGD", "options": {"momentum": 0.9, "fused": True}}
FUSED_ADAMW: dict[str, Any] = {"optimizer": "AdamW", "options": {"fused": True}}


class Ranks:
    """Processes that train together. They start when they are first asked, and again after a failure."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.folder, self.starts = count, folder, 0
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self, scenario: str, **how: Any) -> list[Seen]:
        """Let all ranks do the same, and return what each has seen. Skips what PyTorch cannot do."""
        if not self.processes:
            self._start()
        for process in self.processes:
            process.stdin.write(json.dumps([scenario, how]) + "\n")
            process.stdin.flush()
        answers = {rank: self._answer(rank) for rank in self._as_they_answer()}
        if "lacking" in answers[0]:
            pytest.skip(answers[0]["lacking"])
        return [answers[rank]["seen"] for rank in range(self.count)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.processes = []

    def _start(self) -> None:
        self.starts += 1
        meeting = str(self.folder / f"{self.count}-{self.starts}")
        paths = Path(preamp.__file__).parents[1], WORKER.parents[2]
        variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        for rank in range(self.count):
            command = [sys.executable, str(WORKER), str(rank), str(self.count), meeting]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = subprocess.Popen(command, env={**os.environ, **variables}, text=True, **pipes)
            self.processes.append(process)

    def _as_they_answer(self) -> Iterator[int]:
        waiting = {process.stdout: rank for rank, process in enumerate(self.processes)}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], PATIENCE)
            if not ready:
                self.stop()
                pytest.fail(f"ranks {sorted(waiting.values())} of {self.count} do not answer")
            for pipe in ready:
                yield waiting.pop(pipe)

    def _answer(self, rank: int) -> dict[str, Any]:
        line = self.processes[rank].stdout.readline()
        answer = json.loads(line or '{"error": "died"}')
        if "error" in answer:
            self.stop()  # the other ranks wait for this one
            pytest.fail(f"rank {rank} of {self.count}: {answer['error']}")
        return answer


def ranks_for_the_tests(count: int) -> Any:
    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
        processes = Ranks(count, tmp_path_factory.mktemp("ranks"))
        yield processes
        processes.stop()

    return ranks


two, four = ranks_for_the_tests(2), ranks_for_the_tests(4)


def agreed(seen: list[Seen], *also: str) -> Seen:
    """Return what all ranks have seen, after a look that it is the same."""
    for one in seen:
        for name in ("scales", "skipped", "norms", "state", *also):
            assert one[name] == seen[0][name], name
        assert one["moved"] == [not skipped for skipped in one["skipped"]]
    assert seen[0]["skipped"] == SKIPPED
    return seen[0]


def culprits(seen: list[Seen]) -> list[list[str]]:
    """Return what each rank names in the step that overflowed."""
    return [one["culprits"][OVERFLOW] for one in seen]


def assert_trained_as(seen: Seen, reference: Seen, norms: bool = True) -> None:
    """Check that ranks, which sum in another order, came to what one process came to."""
    for name in ("scales", "skipped"):
        assert seen[name] == reference[name]
    state = dict(seen["state"])
    if "preamp_state" not in reference["state"]:  # PyTorch's scaler counts no steps
        state.pop("preamp_state", None)
    assert state == reference["state"]
    if norms:
        assert seen["norms"] == [norm and pytest.approx(norm, rel=1e-5) for norm in reference["norms"]]
    assert list(seen["parameters"]) == list(reference["parameters"])
    for name, values in reference["parameters"].items():
        assert seen["parameters"][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


def joined(seen: list[Seen]) -> Seen:
    """Return what all ranks have seen, with the parameters of each rank after those of the one before."""
    parameters: dict[str, list[float]] = {}
    for one in seen:
        for name, values in one["parameters"].items():
            parameters[name] = parameters.get(name, []) + values
    return {**agreed(seen), "parameters": parameters}


# Gradients that are the same everywhere.


@pytest.mark.parametrize(("how", "clip"), [(SGD, {}), (FUSED_SGD, CLIP), (FUSED_ADAMW, {})])
def test_under_ddp_nothing_needs_to_be_said(two, how, clip):
    seen = agreed(two("ddp", clip=clip, **how), "parameters", "culprits")
    assert_trained_as(seen, alone(clip=clip, **how))
    original = two("ddp", scaler="original", clip=clip, **how)[0]
    assert_trained_as(seen, original)
    if not clip:
        assert seen["parameters"] == original["parameters"]


@pytest.mark.parametrize("clip", [{}, CLIP], ids=["", "clipped"])
def test_copies_stay_equal_to_the_bit_where_one_rank_listens(two, clip):
    seen = two("ddp", first_listens=True, clip=clip, **FUSED_ADAMW)
    agreed(seen, "parameters")
    assert [one["stepped"] for one in seen] == [STEPS, STEPS]  # the optimizer skips


# DTensors.


@pytest.mark.parametrize(
    ("how", "unscale", "clip", "mesh"),
    [
        (SGD, False, {}, None),
        (SGD, True, CLIP, [2]),
        (SGD, False, {**CLIP, "max_value": 0.05}, [2]),
        (FUSED_ADAMW, False, CLIP, None),
        (FUSED_ADAMW, True, {**CLIP, "max_value": 0.05}, None),
    ],
)
def test_fsdp2_trains_as_one_process_does(two, how, unscale, clip, mesh):
    seen = two("fsdp2", mesh=mesh, unscale=unscale, clip=clip, **how)
    assert culprits(seen) == [[], ["0.weight"]]
    norms = "max_value" not in clip  # ours are of what comes before all clipping
    assert_trained_as(agreed(seen, "parameters"), alone(clip=clip, unscale=unscale, **how), norms)


@pytest.mark.parametrize(
    ("how", "clip", "unscale"), [(SGD, CLIP, False), (SGD, {}, True), (FUSED_ADAMW, CLIP, False)]
)
def test_fsdp2_does_so_where_nothing_is_read(two, how, clip, unscale):
    seen = two("fsdp2", clip=clip, unscale=unscale, capturable=True, **how)
    assert culprits(seen) == [[], ["0.weight"]]
    assert_trained_as(agreed(seen, "parameters"), alone(clip=clip, unscale=unscale, **how))


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("how", [{}, {"clip": CLIP}, {"unscale": True}], ids=["", "clipped", "unscaled"])
def test_a_rank_whose_shards_are_all_empty_takes_part(two, how, capturable):
    seen = two("fsdp2", small=True, planted_on=0, capturable=capturable, **how)
    assert culprits(seen) == [["0.weight"], []]
    agreed(seen, "parameters")


@pytest.mark.parametrize(
    ("how", "planted", "capturable"),
    [
        ({"clip": CLIP}, "0.weight", False),  # in a shard
        ({"unscale": True}, "4.weight", False),  # in a copy
        ({"clip": CLIP}, "4.weight", True),
    ],
)
def test_copies_beside_dtensors_count_once_and_are_checked(two, how, planted, capturable):
    how = {**PLAIN_SGD, **how}
    seen = two("fsdp2", plain=["4.weight", "2.bias"], planted=planted, capturable=capturable, **how)
    assert culprits(seen) == [[], [planted]]
    assert_trained_as(agreed(seen, "parameters"), alone(**how))


@pytest.mark.parametrize(("how", "planted_on"), [(SGD, 3), (FUSED_ADAMW, 0)])
def test_of_a_mesh_with_copies_and_shards_the_copies_count_once(four, how, planted_on):
    seen = four("fsdp2", mesh=[2, 2], clip=CLIP, planted_on=planted_on, **how)
    assert [bool(names) for names in culprits(seen)] == [rank == planted_on for rank in range(4)]
    assert_trained_as(agreed(seen, "parameters"), alone(clip=CLIP, **how))


@pytest.mark.parametrize("how", [{"clip": CLIP}, {"unscale": True}], ids=["clipped", "unscaled"])
def test_tensor_parallel_beside_a_layer_that_is_not(two, how):
    seen = agreed(two("tensor_parallel", shape=[2], **PLAIN_SGD, **how), "parameters")
    assert_trained_as(seen, alone(net(6), **PLAIN_SGD, **how))


def test_a_mesh_within_a_mesh_has_copies_on_the_rest(four):
    how = {"clip": CLIP}
    seen = agreed(four("tensor_parallel", shape=[2, 2], **PLAIN_SGD, **how), "parameters")
    assert_trained_as(seen, alone(net(6), **PLAIN_SGD, **how))


@pytest.mark.parametrize("how", [{"clip": CLIP}, {"unscale": True}], ids=["clipped", "unscaled"])
def test_what_is_still_a_sum_over_ranks_is_summed_first(two, how):
    seen = two("sums_of_dtensors", **PLAIN_SGD, **how)
    assert culprits(seen) == [["0.weight"], ["0.weight"]]
    assert_trained_as(agreed(seen, "parameters"), alone(**PLAIN_SGD, **how))


def test_on_meshes_that_cross_all_skip_together_and_no_norm_is_invented(four):
    agreed(four("crossed_meshes"))
    seen = four("crossed_meshes", clip=CLIP)
    assert all("are on 2 meshes" in one["refused"] for one in seen)
    assert agreed(four("crossed_meshes", capturable=True))["norms"] == [None] * STEPS


# Plain tensors that differ from rank to rank.


@pytest.mark.parametrize(
    ("how", "capturable", "clip", "agree"),
    [
        (PLAIN_SGD, False, {}, "group"),
        (PLAIN_SGD, True, CLIP, "in place"),
        (FUSED_SGD, False, CLIP, "returned"),
        (FUSED_SGD, True, {}, "group"),
        (FUSED_ADAMW, False, CLIP, "group"),
        (FUSED_ADAMW, True, CLIP, "returned"),
    ],
)
def test_plain_shards_train_as_one_process_does(two, how, capturable, clip, agree):
    seen = two("split", agree=agree, clip=clip, capturable=[capturable] * 2, **how)
    assert culprits(seen) == [[], ["into"]]
    assert_trained_as(joined(seen), alone(worker.Split(), clip=clip, **how))
    for one in seen:
        assert one["calls"] == [["torch.float64 [2]"] * (agree != "group")] * STEPS


@pytest.mark.parametrize("clip", [{}, CLIP], ids=["", "clipped"])
def test_ranks_agree_on_what_a_closure_evaluated(two, clip):
    seen = joined(two("split", clip=clip, closure=True, **PLAIN_SGD))
    assert_trained_as(seen, alone(worker.Split(), clip=clip, **PLAIN_SGD))


@pytest.mark.parametrize("clip", [{**CLIP, "max_value": 0.5}], ids=["twice"])
def test_a_disabled_scaler_clips_by_the_norm_of_all_ranks(two, clip):
    how = {"clip": clip, "enabled": False, **FUSED_ADAMW}
    seen = two("split", planted_on=None, **how)
    parameters = {name: seen[0]["parameters"][name] + seen[1]["parameters"][name] for name in ("into", "out")}
    reference = alone(worker.Split(), planted=False, **how)
    assert_trained_as({**seen[0], "parameters": parameters}, reference, norms=False)


def test_ranks_agree_in_a_compiled_graph(two):
    clip = CLIP
    how = {"clip": clip, "compiled": True, **SGD}
    assert_trained_as(
        joined(two("split", capturable=[True] * 2, **how)), alone(worker.Split(), clip=clip, **SGD)
    )
    assert_trained_as(agreed(two("fsdp2", capturable=True, **how), "parameters"), alone(clip=clip, **SGD))


def test_four_ranks_agree_as_two_do(four):
    seen = four("split", clip=CLIP, planted_on=2, **FUSED_ADAMW)
    assert_trained_as(joined(seen), alone(worker.Split(), clip=CLIP, **FUSED_ADAMW))


BOTH = {**CLIP, "max_value": 0.5}


@pytest.mark.parametrize(
    ("how", "clip", "unscale", "planted_on"),
    [
        (PLAIN_SGD, {}, False, 0),
        (PLAIN_SGD, BOTH, True, 1),
        (FUSED_SGD, CLIP, False, 1),
        (FUSED_SGD, BOTH, False, 0),
        (FUSED_SGD, {}, True, 0),
    ],
)
def test_a_rank_that_reads_agrees_with_one_that_does_not(two, how, clip, unscale, planted_on):
    how = {"clip": clip, "unscale": unscale, **how}
    reads, last = two("split", agree="in place", planted_on=planted_on, capturable=[False, True], **how)
    assert reads["calls"] == last["calls"]
    assert last["norms"] == [norm and pytest.approx(norm) for norm in reads["norms"]]
    seen = joined([reads, {**last, "norms": reads["norms"]}])
    assert_trained_as(seen, alone(worker.Split(), **how), norms="max_value" not in clip)


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
def test_what_overflows_after_all_have_agreed_does_not_part_the_ranks(two, capturable):
    seen = two("split", late=True, unscale=True, capturable=[capturable] * 2)
    assert [one["skipped"] for one in seen] == [[False] * STEPS] * 2  # as in PyTorch


@pytest.mark.parametrize(
    ("how", "clip", "capturable"),
    [(PLAIN_SGD, CLIP, False), (FUSED_SGD, {}, False), (PLAIN_SGD, {}, True), (FUSED_SGD, CLIP, True)],
)
def test_a_gradient_that_two_parameters_share_on_one_rank_does_not_part_the_ranks(two, how, clip, capturable):
    seen = two("split", twins=True, agree="in place", clip=clip, capturable=[capturable] * 2, **how)
    agreed(seen)
    for one in seen:
        assert one["calls"] == [["torch.float64 [2]"]] * STEPS


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("how", [{"clip": BOTH}, {"unscale": True}, FUSED_SGD], ids=str)
def test_a_rank_without_gradients_takes_part(two, how, capturable):
    first, last = two("split", bare=1, planted_on=0, capturable=[capturable] * 2, **how)
    assert not any(last["moved"])
    agreed([first, {**last, "moved": first["moved"]}])


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("how", [{"clip": CLIP}, {"unscale": True}, FUSED_ADAMW], ids=str)
def test_a_stage_of_a_pipeline_needs_no_loss(two, how, capturable):
    first, last = two("pipeline", capturable=capturable, **how)
    agreed([first, last])
    seen = {**first, "parameters": first["parameters"] | last["parameters"]}
    assert_trained_as(seen, alone(**how))


def test_a_frozen_stage_of_a_pipeline_takes_part(two):
    first, last = two("pipeline", frozen=True, **FUSED_ADAMW)
    assert not any(first["moved"])
    agreed([{**first, "moved": last["moved"]}, last])


# FSDP's first version.


@pytest.mark.parametrize(
    ("how", "clip", "original_parameters"),
    [(PLAIN_SGD, CLIP, False), (PLAIN_SGD, {}, True), (FUSED_ADAMW, CLIP, True)],
)
def test_the_sharded_scaler_trains_as_one_process_does(two, how, clip, original_parameters):
    how = {"clip": clip, "original_parameters": original_parameters, **how}
    seen = agreed(two("fsdp1", scaler="ours, sharded", **how), "whole")
    del how["original_parameters"]
    reference = alone(**how)
    flat = [value for values in reference["parameters"].values() for value in values]
    assert seen["whole"] == pytest.approx(flat, rel=1e-4, abs=1e-6)
    assert_trained_as({**seen, "parameters": {}}, {**reference, "parameters": {}})


def test_unfused_it_does_what_the_original_does(two):
    ours = agreed(two("fsdp1", scaler="ours, sharded", **PLAIN_SGD), "whole")
    original = agreed(two("fsdp1", scaler="original, sharded", **PLAIN_SGD), "whole")
    assert ours["state"].pop("preamp_state") == {"steps": STEPS}
    for name in ("scales", "state", "whole"):
        assert ours[name] == original[name]


def test_fused_the_original_lets_one_rank_step_alone(two):
    first, last = two("fsdp1", scaler="original, sharded", **FUSED_ADAMW)
    assert (first["skipped"], last["skipped"]) == ([False] * STEPS, SKIPPED)
    assert first["scales"] != last["scales"]
    agreed(two("fsdp1", scaler="ours, sharded", **FUSED_ADAMW))


@pytest.mark.parametrize("how", [{"clip": CLIP}, {"unscale": True}, FUSED_ADAMW], ids=str)
def test_the_sharded_scaler_works_on_a_rank_without_a_shard(two, how):
    how = {"scaler": "ours, sharded", "small": True, "original_parameters": True, "planted_on": 0, **how}
    first, last = two("fsdp1", **how)
    agreed([first, {**last, "moved": first["moved"]}], "whole")


def test_the_sharded_scaler_takes_arguments_in_the_order_of_the_original():
    original = list(inspect.signature(OriginalSharded).parameters)
    assert list(inspect.signature(ShardedGradScaler).parameters)[: len(original)] == original
    scaler = ShardedGradScaler("cpu", 2.0**8, 0.25, 4.0, 7, True, None)
    rule = (scaler.get_scale(), scaler.get_backoff_factor(), scaler.get_growth_factor())
    assert (*rule, scaler.get_growth_interval()) == (2.0**8, 0.25, 4.0, 7)


# A policy that uses the amax.


SEEING: dict[str, Any] = {"seeing": True, **PLAIN_SGD}


def assert_saw_as(seen: Seen, reference: Seen) -> None:
    """Check that ranks saw the amax that one process sees, to the next power of two above."""
    assert seen["amaxes"] == [amax and 2.0 ** math.ceil(math.log2(amax)) for amax in reference["amaxes"]]
    assert seen["amaxes"][OVERFLOW] is None
    assert seen["state"]["preamp_state"]["amax"] == seen["amaxes"][-1]
    assert seen["scales"] == reference["scales"]


@pytest.mark.parametrize(
    ("how", "capturable"),
    [
        ({"clip": BOTH}, [False] * 2),
        ({"twins": True}, [False] * 2),
        ({}, [True] * 2),
        ({"clip": BOTH}, [False, True]),
        ({"unscale": True}, [False, True]),
    ],
)
def test_all_ranks_are_shown_the_peak_of_all(two, how, capturable):
    seen = two("split", agree="in place", capturable=capturable, **how, **SEEING)
    assert seen[0]["state"] == seen[1]["state"]
    how.pop("twins", None)
    assert_saw_as(seen[0], alone(worker.Split(), scaler="ours", **how, **SEEING))
    lengths = [2 + BINS] + [2] * ("max_value" in how.get("clip", {}))
    assert seen[0]["calls"] == [[f"torch.float64 [{length}]" for length in lengths]] * STEPS


# What is refused.


GUARDED: dict[str, tuple[dict[str, Any], int]] = {  # and how many all-reduces a step costs
    "DDP, whose gradients need none": ({"agree": None, "sharded": False}, 1),
    "shards, in the all-reduce of the norm": ({"agree": "world", "sharded": True}, 1),
    "a function of the user's": ({"agree": "reduce", "sharded": True}, 2),
    "a function over the shards of a copy": ({"agree": "reduce alone", "sharded": False}, 1),
    "groups that hold copies of each other": ({"agree": "half", "sharded": False}, 2),
}


@pytest.mark.parametrize(
    ("kind", "capturable"),
    [*((kind, False) for kind in GUARDED), ("shards, in the all-reduce of the norm", True)],
)
def test_ranks_with_other_losses_skip_the_same_spikes(two: Ranks, kind: str, capturable: bool) -> None:
    check_guarded(two, *GUARDED[kind], capturable)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_group_of_ranks_trains_with_a_guard_while_the_others_do_something_else(
    four: Ranks, sharded: bool
) -> None:
    check_guarded(four, {"agree": "trainers", "sharded": sharded}, 1, False)


def check_guarded(ranks: Ranks, how: dict[str, Any], calls: int, capturable: bool) -> None:
    """Have two ranks train with losses of their own, and compare with a simulation."""
    losses = [[2.0 + 0.1 * (step % 3), 2.5 - 0.1 * (step % 2)] for step in range(14)]
    norms = [1.0 + 0.1 * (step % 4) for step in range(14)]
    losses[8][1] = 60.0  # on one rank only
    losses[10] = [1.5, -1.5]  # whose mean is 0
    norms[10] = 30.0
    losses[12][0] = math.nan
    first, second, *_ = ranks("guarded", losses=losses, norms=norms, capturable=capturable, **how)
    assert repr(first["seen"]) == repr(second["seen"])
    means = [sum(pair) / 2 for pair in losses]
    readings = [
        preamp.Reading(True, loss=loss, grad_norm=norm) for loss, norm in zip(means, norms, strict=True)
    ]
    expected = preamp.simulate(preamp.Dynamic(), readings, guard=preamp.guards.SpikeGuard(warmup=4))
    assert [row[:2] for row in first["seen"]] == [
        [step.reason, step.spike and step.spike.of] for step in expected
    ]
    assert [step.index for step in expected if step.skipped] == [8, 10, 12]
    assert set(first["calls"]) == {calls}
    # The record has the loss that the guard was given, so that the trace of one rank can be replayed.
    assert repr(first["losses"]) == repr(second["losses"])
    assert first["losses"] == pytest.approx(means, rel=1e-6, nan_ok=True)
