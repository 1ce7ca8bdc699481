"""Guards in our engine: the decisions of a simulation.

Two ranks of it are in `test_engine_ranks.py`, guards in the real DeepSpeed in `test_attach.py`.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch

from preamp import PolicyError, Static, Trace, UsageError, guards
from preamp.deepspeed import Engine, initialize

from . import guards_script
from .guards_script import (
    CONFIGURED,
    CUT,
    RULES,
    decisions,
    script,
    simulated,
)

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
    assert (reasons.count("spike"), reasons.count("overflow")) == (guards_script.SPIKES[rule], 3)
    assert run.engine.skipped_steps == guards_script.SPIKES[rule] + 3


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
