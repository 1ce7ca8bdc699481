"""Guards in our engine and, by `attach`, in the real DeepSpeed: the decisions of a simulation.

What the ranks of DeepSpeed play is in `guards_worker.py`. Two ranks of our engine are in
`test_engine_ranks.py`.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from preamp import PolicyError, Static, Trace, UsageError, guards
from preamp.deepspeed import Engine, initialize

from . import guards_script
from .guards_script import (
    ALL,
    CONFIGURED,
    CUT,
    HALVES,
    RESUMED,
    RULES,
    TWO,
    Script,
    decisions,
    script,
    simulated,
)
from .test_attach import Play, playing

WORKER = Path(__file__).parent / "guards_worker.py"
SPIKES = {"spike": 5, "norm": 2, "olmo": 2}  # how many steps of the script each rule skips


# ---- The engine of preamp ----------------------------------------------------------------------------------

FP16 = {"fp16": guards_script.FP16}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp16": FP16,
    "bf16": {"bf16": {"enabled": True}},
    "float32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
POLICIES = {"fp16": CONFIGURED}


class Run:
    """Our engine, which trains by a script."""

    def __init__(self, config: dict[str, Any], guard: Any = None, clip: float = 0.0, **more: Any) -> None:
        model, self.trace = guards_script.Net(), Trace()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5)
        self.engine: Engine = initialize(
            model=model,
            optimizer=optimizer,
            config={**config, "gradient_clipping": clip, **more},
            on_step=self.trace,
            guard=guard,
        )[0]

    def step(self, loss: float, norm: float) -> None:
        number = self.engine.gradient_accumulation_steps()
        for micro in range(number):
            mine = loss * 2 * micro if number == 2 else loss
            self.engine.backward(self.engine(mine, norm))
            self.engine.step()

    def contents(self) -> Any:
        saved = self.engine.state_dict()
        return copy.deepcopy([saved[name] for name in ("module", "optimizer", "masters")])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def policy_of(precision: str) -> Any:
    return POLICIES.get(precision, Static(1.0))


@pytest.mark.parametrize(
    ("precision", "rule", "accumulation"),
    [
        *(("fp16", rule, 1) for rule in RULES),
        ("bf16", "spike", 2),
        ("float32", "norm", 1),
        ("autocast", "olmo", 2),
    ],
)
def test_our_engine_decides_as_a_simulation(precision: str, rule: str, accumulation: int) -> None:
    run = Run(CONFIGS[precision], RULES[rule](), gradient_accumulation_steps=accumulation)
    for index, step in enumerate(script()):
        run.step(*step)
        assert run.engine.global_steps == index + 1
    assert decisions(run.trace) == decisions(simulated(policy_of(precision), rule, script()))
    reasons = [step.reason for step in run.trace]
    assert (reasons.count("spike"), reasons.count("overflow")) == (SPIKES[rule], 3)
    assert run.engine.skipped_steps == SPIKES[rule] + 3


@pytest.mark.parametrize("precision", CONFIGS)
def test_a_spike_leaves_our_engine_as_it_was(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(CONFIGS[precision], RULES["spike"](), clip=0.5)
    for loss, norm in script():
        before = run.contents()
        with caplog.at_level(logging.WARNING, "preamp.deepspeed"):
            caplog.clear()
            run.step(loss, norm)
        step = run.engine.last_step
        assert step is not None
        assert run.engine.was_step_applied() == (step.reason is None) == (not same(before, run.contents()))
        assert all(parameter.grad is None for parameter in run.engine.parameters())
        norms = run.engine.get_global_grad_norm(), step.grad_norm
        expected = (math.inf, None) if step.reason == "overflow" else (pytest.approx(norm, rel=1e-2),) * 2
        assert norms == expected
        if step.spike is not None:
            assert step.culprits[0] == "one"  # six of ten entries
            of = step.spike.of.replace("_", " ")
            assert (
                f"{of} {step.spike.value:.6g}, limit {step.spike.limit:.6g}; loss scale stays" in caplog.text
            )
            assert "largest: one" in caplog.text
            assert caplog.records[0].__dict__["reason"] == "spike"


@pytest.mark.parametrize("precision", ["fp16", "float32"])
def test_our_checkpoints_hold_the_guards_state(precision: str) -> None:
    run, later = (Run(CONFIGS[precision], RULES["olmo"]()) for _ in range(2))
    for step in script()[:CUT]:
        run.step(*step)
    saved = copy.deepcopy(run.engine.state_dict())
    for step in script(1)[:3]:
        later.step(*step)
    later.engine.load_state_dict(saved)
    for step in script()[CUT:]:
        run.step(*step)
        later.step(*step)
    tail = decisions(simulated(policy_of(precision), "olmo", script()))[CUT:]
    assert decisions(run.trace)[CUT:] == decisions(later.trace)[3:] == tail
    assert same(run.contents(), later.contents())


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_guard_clips_as_the_engine_does_without(precision: str) -> None:
    guarded, plain = (Run(CONFIGS[precision], guard, clip=0.5) for guard in (guards.NormLimit(1e3), None))
    for loss, _ in script()[:6]:
        guarded.step(loss, 3.0)
        plain.step(loss, 3.0)
    for one, other in zip(guarded.engine.parameters(), plain.engine.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if precision == "bf16" else 1e-5, atol=1e-5)


def test_our_engine_refuses_a_guard_that_cannot_work() -> None:
    with pytest.raises(PolicyError, match=r"guard=6\.0 is not a guard"):
        Run(FP16, 6.0)
    with pytest.raises(UsageError, match="for updates that are skipped, and here none is"):
        initialize(model=guards_script.Net(), config=FP16, guard=guards.SpikeGuard())
    run = Run({}, guards.SpikeGuard())
    loss = run.engine(2.0, 1.0)
    run.engine.backward(loss)
    loss.detach().mul_(2.0)
    with pytest.raises(UsageError, match="needs the loss, which is not known"):
        run.engine.step()


# ---- DeepSpeed's engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Return what a scenario came to on all ranks."""
    yield from playing(tmp_path_factory, WORKER)


def check(answer: Any, policy: Any, rule: str, steps: Script, *, norm_is_exact: bool = True) -> None:
    """Compare what a rank has seen with a simulation."""
    expected = simulated(policy, rule, steps)
    assert answer["decisions"] == decisions(expected)
    assert [step.reason for step in expected].count("spike") == SPIKES[rule]
    skipped = 0
    for index, (step, seen, (_, norm)) in enumerate(zip(expected, answer["seen"], steps, strict=True)):
        is_same, applied, count, updates, norm_told = seen
        skipped += step.skipped
        assert (is_same, applied, count, updates) == (step.skipped, not step.skipped, skipped, index + 1)
        assert norm_told == (None if math.isinf(norm) else pytest.approx(norm, rel=1e-2))


@pytest.mark.parametrize(
    ("ranks", "kind", "rule"), [(1, *case) for case in ALL] + [(2, *case) for case in TWO]
)
def test_an_attached_guard_decides_as_a_simulation(play: Play, ranks: int, kind: str, rule: str) -> None:
    """On two ranks with other losses, too. After a spike all is bit for bit as before."""
    answers = play(ranks, f"guarded {kind} {rule}")
    for answer in answers:
        check(answer, CONFIGURED, rule, script())
        assert answer["rules"] == [True, True]
        for _, culprits, of, value, limit in answer["spikes"]:
            assert value > limit
            assert of in ("loss", "grad_norm")
            assert culprits == ["one"]  # six of ten entries
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(("ranks", "kind"), [(1, kind) for kind in HALVES] + [(2, "1")])
def test_a_guard_can_be_attached_in_bfloat16(play: Play, ranks: int, kind: str) -> None:
    """What is not finite is skipped, too, which DeepSpeed alone does not do."""
    for answer in play(ranks, f"half {kind}"):
        check(answer, Static(1.0), "spike", script())


@pytest.mark.parametrize(("ranks", "kind"), [(1, "0"), (1, "1"), (1, "3"), (2, "1")])
def test_an_attached_guard_is_told_the_mean_of_the_micro_steps(play: Play, ranks: int, kind: str) -> None:
    for answer in play(ranks, f"accumulated {kind}"):
        check(answer, CONFIGURED, "spike", script())


@pytest.mark.parametrize("kind", RESUMED)
def test_deepspeeds_checkpoints_hold_the_guards_state(play: Play, kind: str) -> None:
    [answer] = play(1, f"resumed {kind}")
    expected = decisions(simulated(CONFIGURED, "spike", script()))[CUT:]
    assert answer["traces"] == [expected, expected]
    assert not answer["left"]
    assert answer["alone"] is None  # step 31 is a spike


def test_a_guard_of_the_loss_needs_no_norm(play: Play) -> None:
    assert play(1, "without_a_norm") == [[1, 3]]


def test_an_attached_guard_that_skips_on_and_on_warns_once(play: Play) -> None:
    [[[step, message, file]]] = play(1, "skips_on")
    assert step == 100
    assert "NormLimit(threshold=0.5) has skipped 100 steps in a row" in message
    assert file == WORKER.name


def test_what_cannot_be_guarded_is_refused(play: Play) -> None:
    [answer] = play(1, "refused")
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
