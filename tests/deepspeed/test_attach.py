"""`attach` in the real DeepSpeed on one rank and on two, and the faults it ends, in DeepSpeed alone.

What the ranks play is in `attach_worker.py`, and with guards in `guards_worker.py`: all of it in one process
a rank, which takes seconds to import DeepSpeed. The loss is such that every gradient is 1, and so is the
learning rate: a step that is right moves every weight by exactly -1, whatever the scale does.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import preamp
from preamp import Policy, Reading, State, Static

from . import guards_script
from .attach_script import CONFIGURED, ESSENTIAL, FOREIGN, KINDS, ON_TWO_RANKS, SCRIPT, STAGE_0, ZERO

WORKER = Path(__file__).parent / "guards_worker.py"
PATIENCE = 240.0  # seconds for all that a rank plays
NORM = pytest.approx(math.sqrt(10.0), rel=1e-6)

Play = Callable[[int, str], Any]


def start(folder: Path, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    variables = {
        "PYTHONPATH": os.pathsep.join(
            map(str, (Path(inspect.getfile(preamp)).parents[1], WORKER.parents[2]))
        ),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # asked for, not used
    }
    with (folder / f"{rank}.out").open("w") as out:
        return subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)],
            env={**os.environ, **variables},
            stdout=out,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Return what a scenario came to on all ranks, which have played every one of them by then."""
    folders = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2)}
    processes = [start(folder, rank, ranks) for ranks, folder in folders.items() for rank in range(ranks)]

    def ask(ranks: int, scenario: str) -> list[Any]:
        answers = []
        for rank in range(ranks):
            file = folders[ranks] / f"{rank}.json"
            if not file.exists():
                pytest.fail((folders[ranks] / f"{rank}.out").read_text()[-2000:])
            answer = json.loads(file.read_text()).get(scenario, {"error": "another scenario failed first"})
            if "error" in answer:
                pytest.fail(f"rank {rank} of {ranks}: {answer['error']}")
            answers.append(answer["seen"])
        return answers

    try:
        for process in processes:
            process.wait(PATIENCE)
        yield ask
    finally:
        for process in processes:
            process.kill()
            process.wait()


def on_ranks(two: tuple[str, ...], kinds: tuple[str, ...] = KINDS) -> Any:
    """Test all kinds on one rank and some on two."""
    cases = [(1, kind) for kind in kinds] + [(2, kind) for kind in two]
    return pytest.mark.parametrize(("ranks", "kind"), cases)


def scales(policy: Policy[Any], script: str, state: Any = None) -> list[float]:
    """Return the scale that is in the loss of each step."""
    state = policy.start() if state is None else state
    seen = []
    for sign in script:
        seen.append(state.scale)
        state = policy.step(state, Reading(sign == "0"))
    return seen


def moves(seen: list[dict[str, Any]]) -> list[list[float]]:
    return [one["moves"] for one in seen]


def right(script: str) -> list[list[float]]:
    return [[-1.0] if sign == "0" else [0.0] for sign in script]


@on_ranks(("1", "3"), ZERO)
def test_deepspeed_alone_divides_by_the_new_scale(play: Play, ranks: int, kind: str) -> None:
    """When this fails DeepSpeed is mended, and the documentation wants a line."""
    for seen in play(ranks, f"unattached {kind}"):
        assert [one["scale"] for one in seen] == [16.0, 16.0, 16.0, 32.0]
        assert moves(seen) == [[-1.0], [-1.0], [-0.5], [-1.0]]
        third = pytest.approx(math.sqrt(10.0) / 2, rel=1e-6) if kind.startswith("3") else NORM
        assert [one["norm"] for one in seen] == [NORM, NORM, third, NORM]


@on_ranks(("0",), STAGE_0)
def test_deepspeed_alone_does_not_scale_at_stage_0(play: Play, ranks: int, kind: str) -> None:
    """As above."""
    for seen in play(ranks, f"unattached {kind}"):
        assert moves(seen) == [[-1 / 16], [-1 / 16], [-1 / 32], [-1 / 32]]


@on_ranks(ESSENTIAL)
def test_every_step_is_right(play: Play, ranks: int, kind: str) -> None:
    """Also where the scale grows; with hysteresis; and an overflow on one rank skips on all."""
    answers = play(ranks, f"attached {kind}")
    expected = scales(CONFIGURED, SCRIPT + "0")
    assert max(expected[6:]) > min(expected), "the script has the scale grow and back off"
    for answer in answers:
        seen, steps = answer["seen"], answer["steps"]
        assert moves(seen) == right(SCRIPT)
        assert [one["scale"] for one in seen] == [step["scale"] for step in steps] == expected[:-1]
        assert [step["new_scale"] for step in steps] == expected[1:]
        assert [one["norm"] for one in seen] == [NORM if sign == "0" else math.inf for sign in SCRIPT]
        assert [step["grad_norm"] for step in steps] == [NORM if sign == "0" else None for sign in SCRIPT]
        assert [step["skipped"] for step in steps] == [sign == "1" for sign in SCRIPT]
        assert [step["loss"] for step in steps] == [pytest.approx(one["loss"], nan_ok=True) for one in seen]
        assert [step["index"] for step in steps] == list(range(len(SCRIPT)))
        assert [one["skipped"] for one in seen] == [
            SCRIPT[: place + 1].count("1") for place in range(len(SCRIPT))
        ]


@on_ranks(ON_TWO_RANKS)
def test_a_policy_that_sees_is_shown_the_scaled_gradients_of_all_ranks(
    play: Play, ranks: int, kind: str
) -> None:
    """Six entries are 4, four are -12."""
    for seen in play(ranks, f"shown {kind}"):
        assert seen["amaxes"] == [12.0, None, 12.0]
        assert seen["readings"] == [[True, 12.0], [False, None], [True, 12.0]]


@pytest.mark.parametrize("kind", ["0", "1"])
def test_checkpoints_hold_what_a_policy_has_seen(play: Play, kind: str) -> None:
    [[whole, *later]] = play(1, f"resumed_with_eyes {kind}")
    assert len(set(whole)) > 2
    assert later == [whole[cut:] for cut in range(1, len(SCRIPT))]


@on_ranks(ESSENTIAL)
def test_a_skipped_step_is_one_record_on_rank_0(play: Play, ranks: int, kind: str) -> None:
    """On two ranks `last` overflows on rank 1 alone; with ZeRO 1 and 2 only rank 1 has its gradient."""
    answers = play(ranks, f"attached {kind}")
    expected = scales(CONFIGURED, SCRIPT + "0")
    left = iter([2, 1, 1, 2])  # the scale grew before the last one
    records = [
        [place, expected[place], expected[place + 1], next(left), ["last"]]
        for place, sign in enumerate(SCRIPT)
        if sign == "1"
    ]
    assert [answer["records"] for answer in answers] == [records, []][:ranks]
    for answer in answers:
        assert [step["culprits"] for step in answer["steps"]] == [
            [] if sign == "0" else ["last"] for sign in SCRIPT
        ]


@on_ranks(ON_TWO_RANKS, ESSENTIAL)
def test_clipping_sees_the_norm_of_the_unscaled_gradients(play: Play, ranks: int, kind: str) -> None:
    """The limit is 2, on growth steps too, where the norms are 1.6 and 3.2."""
    for seen in play(ranks, f"clipped {kind}"):
        clipped = -2.0 / math.sqrt(10.0)
        wanted = [-0.5, clipped, clipped, -0.5, clipped]
        assert [one["moves"] for one in seen] == [[pytest.approx(move, abs=2**-8)] for move in wanted]
        assert [one["norm"] for one in seen] == pytest.approx(
            [math.sqrt(10.0) * g for g in (0.5, 1.0, 1.0, 0.5, 1.0)]
        )


@on_ranks(ON_TWO_RANKS, ESSENTIAL)
def test_accumulated_gradients_have_one_scale(play: Play, ranks: int, kind: str) -> None:
    for answer in play(ranks, f"accumulated {kind}"):
        seen = answer["seen"]
        pairs = zip(seen[::2], seen[1::2], strict=True)  # DeepSpeed returns losses divided by the steps
        assert answer["losses"] == [pytest.approx(a["loss"] + b["loss"], nan_ok=True) for a, b in pairs]
        assert moves(seen) == [[0.0], [-2.0]] * 3 + [[0.0], [0.0]] + [[0.0], [-2.0]]
        assert [one["scale"] for one in seen[::2]] == [one["scale"] for one in seen[1::2]]
        assert [one["scale"] for one in seen[::2]] == scales(CONFIGURED, "00010")


@on_ranks((), ESSENTIAL)
def test_accumulated_gradients_can_be_a_sum(play: Play, ranks: int, kind: str) -> None:
    """Hugging Face's Trainer asks for it. DeepSpeed alone gives the mean at stage 0."""
    [seen] = play(ranks, f"summed {kind}")
    assert seen["moves"] == [-4.0]
    assert seen["loss"] == sum(seen["losses"])


@on_ranks((), ("1", "2", "3"))
def test_a_loss_that_nothing_has_scaled_is_refused(play: Play, ranks: int, kind: str) -> None:
    """With ZeRO DeepSpeed alone refuses it under a dynamic scale only, and at stage 0 in any case."""
    [seen] = play(ranks, f"backward_of_the_loss {kind}")
    assert seen["moves"] == [-2.0]
    assert seen["loss"] == sum(seen["losses"]) / 2
    assert "Loss scaling is required" in seen["unscaled"]


@on_ranks(("3",), ("0", "1", "3"))
def test_checkpoints_go_on_from_every_step(play: Play, ranks: int, kind: str) -> None:
    whole = scales(CONFIGURED, SCRIPT)
    for cuts in play(ranks, f"resumed {kind}"):
        assert cuts == [whole[cut:] for cut in range(len(SCRIPT))]


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("kind", ["0", "1"])
def test_checkpoints_hold_policies_that_deepspeed_does_not_have(play: Play, kind: str, name: str) -> None:
    whole = scales(FOREIGN[name], SCRIPT)
    [answer] = play(1, f"resumed_with_foreign_policies {kind}")
    assert answer[name] == [whole[cut:] for cut in range(len(SCRIPT))]


@on_ranks((), ESSENTIAL)
def test_checkpoints_are_deepspeeds(play: Play, ranks: int, kind: str) -> None:
    """DeepSpeed alone goes on from ours by its rule, which is ours, and ours from one of DeepSpeed's."""
    [seen] = play(ranks, f"plain_deepspeed {kind}")
    assert not seen["mentions preamp"]
    assert (seen["cur_scale"], seen["cur_iter"], seen["last_overflow_iter"]) == (32.0, 5, 3)
    whole = "00010" + "0100000"
    assert seen["ours"] == scales(CONFIGURED, whole)[5:]
    if kind in STAGE_0:  # which has not counted hysteresis
        assert seen["late"] == scales(CONFIGURED, "0111", State(seen["saved"], 1.0, 0.0))
    else:
        assert seen["late"] == scales(CONFIGURED, whole + "0111")[len(whole) :]
        assert seen["cur_hysteresis"] == 2
        assert seen["theirs"] == seen["ours"]


@on_ranks(("0", "1"), ESSENTIAL)
def test_the_floor_ends_the_training(play: Play, ranks: int, kind: str) -> None:
    for seen in play(ranks, f"exhausted {kind}"):
        assert seen == {"scales": [2.0, 1.0], "same": True, "skipped": True, "named": True}


@on_ranks((), ESSENTIAL)
def test_detach_gives_everything_back(play: Play, ranks: int, kind: str) -> None:
    [seen] = play(ranks, f"detached {kind}")
    assert seen["same"]
    assert seen["moves"] == right("000")
    [alone] = play(ranks, f"unattached {kind}")
    assert seen["bystander"] == alone[:3]


@on_ranks((), ESSENTIAL)
def test_a_scale_that_is_set_counts_from_then_on(play: Play, ranks: int, kind: str) -> None:
    [seen] = play(ranks, f"set_by_hand {kind}")
    state = CONFIGURED.step(CONFIGURED.start(), Reading(True))._replace(scale=64.0)
    assert [one["scale"] for one in seen] == [16.0, *scales(CONFIGURED, "00110", state)]
    assert moves(seen) == right("000110")


@on_ranks((), ESSENTIAL)
def test_a_static_scale(play: Play, ranks: int, kind: str) -> None:
    [seen] = play(ranks, f"static {kind}")
    assert [one["scale"] for one in seen] == [128.0] * 4
    assert moves(seen) == right("0010")


def test_the_schedule_waits_for_steps_that_were_taken(play: Play) -> None:
    assert play(1, "schedule") == [[0.5, 0.5, 0.25]]


REFUSED = {
    "twice": "UsageError: DeepSpeedZeroOptimizer.step was replaced by an earlier attach",
    "override": "UsageError: override_loss_scale(4.0) would override the policy",
    "overridden": "UsageError: override_loss_scale(4.0) has overridden the scale",
    "replaced": "UsageError: DeepSpeedZeroOptimizer.step was replaced again after attach",
    "no engine": "UsageError: DeepSpeedZeroOptimizer is not DeepSpeed's engine",
    "pipeline": "UsageError: a PipelineEngine scales only the loss of its last stage",
    "float32": "UsageError: this engine does not train in float16",
    "bfloat16": "UsageError: this engine does not train in float16",
    "subclass": "UsageError: Mine moves its scale in a way that attach does not support",
    "on a disk": "UsageError: Headroom() needs the amax of the gradients",
    "onebit": "UsageError: OnebitAdam exchanges gradients between ranks itself",
    "no policy": "PolicyError: policy=3 is not a policy",
    "no on_step": "PolicyError: on_step=3 cannot be called",
    "hysteresis": "ConfigError: fp16.hysteresis: 0 is not a whole number",
    "name": "UsageError: DeepSpeedZeroOptimizer has no _update_scale, which attach needs",
    "renamed": "UsageError: DeepSpeed has stepped without calling _update_scale",
    "mended": "UsageError: the gradient of the loss is 16 where 1 was expected",
    "zero": "PolicyError: scale=0.0 is not a valid state",
    "autocast, stage 0": 'UsageError: the section "torch_autocast" scales with a torch.amp.GradScaler',
    "autocast, stage 1": 'UsageError: the section "torch_autocast" scales with a torch.amp.GradScaler',
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_says_so(play: Play, case: str) -> None:
    [said] = play(1, "refused")
    assert said[case].startswith(REFUSED[case])
    assert " Write " in said[case]


def test_what_was_refused_changed_nothing(play: Play) -> None:
    [said] = play(1, "refused")
    assert said["then"] == "[-1.0]"
    assert set(said) == {*REFUSED, "then"}


# Guards.


def check(
    answer: Any, policy: Any, rule: str, steps: guards_script.Script, *, norm_is_exact: bool = True
) -> None:
    """Compare what a rank has seen with a simulation."""
    expected = guards_script.simulated(policy, rule, steps)
    assert answer["decisions"] == guards_script.decisions(expected)
    assert [step.reason for step in expected].count("spike") == guards_script.SPIKES[rule]
    skipped = 0
    for index, (step, seen, (_, norm)) in enumerate(zip(expected, answer["seen"], steps, strict=True)):
        is_same, applied, count, updates, norm_told = seen
        skipped += step.skipped
        assert (is_same, applied, count, updates) == (step.skipped, not step.skipped, skipped, index + 1)
        assert norm_told == (None if math.isinf(norm) else pytest.approx(norm, rel=1e-2))


@pytest.mark.parametrize(
    ("ranks", "kind", "rule"),
    [(1, *case) for case in guards_script.ALL] + [(2, *case) for case in guards_script.TWO],
)
def test_an_attached_guard_decides_as_a_simulation(play: Play, ranks: int, kind: str, rule: str) -> None:
    """On two ranks with other losses, too. After a spike all is bit for bit as before."""
    answers = play(ranks, f"guards: guarded {kind} {rule}")
    for answer in answers:
        check(answer, guards_script.CONFIGURED, rule, guards_script.script())
        assert answer["rules"] == [True, True]
        for _, culprits, of, value, limit in answer["spikes"]:
            assert value > limit
            assert of in ("loss", "grad_norm")
            assert culprits == ["one"]  # six of ten entries
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(("ranks", "kind"), [(1, kind) for kind in guards_script.HALVES] + [(2, "1")])
def test_a_guard_can_be_attached_in_bfloat16(play: Play, ranks: int, kind: str) -> None:
    """What is not finite is skipped, too, which DeepSpeed alone does not do."""
    for answer in play(ranks, f"guards: half {kind}"):
        check(answer, Static(1.0), "spike", guards_script.script())


@pytest.mark.parametrize(("ranks", "kind"), [(1, "0"), (1, "1"), (1, "3"), (2, "1")])
def test_an_attached_guard_is_told_the_mean_of_the_micro_steps(play: Play, ranks: int, kind: str) -> None:
    for answer in play(ranks, f"guards: accumulated {kind}"):
        check(answer, guards_script.CONFIGURED, "spike", guards_script.script())


@pytest.mark.parametrize("kind", guards_script.RESUMED)
def test_deepspeeds_checkpoints_hold_the_guards_state(play: Play, kind: str) -> None:
    [answer] = play(1, f"guards: resumed {kind}")
    expected = guards_script.decisions(
        guards_script.simulated(guards_script.CONFIGURED, "spike", guards_script.script())
    )[guards_script.CUT :]
    assert answer["traces"] == [expected, expected]
    assert not answer["left"]
    assert answer["alone"] is None  # step 31 is a spike


def test_a_guard_of_the_loss_needs_no_norm(play: Play) -> None:
    assert play(1, "guards: without_a_norm") == [[1, 3]]


def test_an_attached_guard_that_skips_on_and_on_warns_once(play: Play) -> None:
    [[[step, message, file]]] = play(1, "guards: skips_on")
    assert step == 100
    assert "NormLimit(threshold=0.5) has skipped 100 steps in a row" in message
    assert file == WORKER.name


def test_what_cannot_be_guarded_is_refused(play: Play) -> None:
    [answer] = play(1, "guards: refused")
    for name, said in {
        "no guard": "PolicyError: guard=3 is not a guard",
        "bfloat16, stage 0": "UsageError: attach cannot guard this engine",
        "bfloat16, no guard": "nothing else needs a loss scale",
        "bfloat16, a policy": "so policy=Dynamic() cannot be attached. Write attach(engine, guard=",
        "float32": "UsageError: attach cannot guard this engine",
        "no norm": '"compute_grad_norm": false. Write true.',
        "muon": 'Write "stage": 2, or attach without guard=.',
        "another guard": "write del engine.optimizer.loss_scaler.preamp_guard.",
        "unknown loss": "needs the loss, which is not known",
    }.items():
        assert said in answer[name], name
    assert answer["detached"] == "True"
