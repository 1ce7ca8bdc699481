"""One rank that trains with the real DeepSpeed and a guard, and then all of `attach_worker.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attach_worker import FOLDER, RANK, RANKS, SCENARIOS, Seen, made, main, weights

from preamp import Dynamic, PreampError, Trace, guards
from preamp.deepspeed import attach
from tests.deepspeed.guards_script import (
    ALL,
    CUT,
    FP16,
    HALVES,
    RESUMED,
    RULES,
    TWO,
    Net,
    Script,
    decisions,
    script,
)
from tests.guarding import LossLimit

BF16 = {"fp16": {"enabled": False}, "bf16": {"enabled": True}}


def engine_of(kind: str, **more: Any) -> Any:
    engine = made(kind, net=Net(), momentum=0.5, **{"fp16": FP16, **more})
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1, gamma=0.99)
    return engine


def contents(engine: Any) -> Any:
    """Return all that a step changes: weights, float32 weights, momentum, learning rate."""
    inner = engine.optimizer.optimizer
    state = [value.tolist() for one in inner.state.values() for value in one.values()]
    masters = [p.tolist() for group in inner.param_groups for p in group["params"]]
    return weights(engine), masters, state, engine.get_lr(), engine.lr_scheduler.last_epoch


def update(engine: Any, loss: float, norm: float) -> None:
    """Train for one step: ranks and micro-steps have other losses, of this mean."""
    number = engine.gradient_accumulation_steps()
    for micro in range(number):
        mine = loss * (2 * RANK if RANKS == 2 else 1) * (2 * micro if number == 2 else 1)
        engine.backward(engine(mine, norm))
        engine.step()


def play(engine: Any, handle: Any, steps: Script) -> Seen:
    seen: list[Any] = []
    for loss, norm in steps:
        before = contents(engine)
        update(engine, loss, norm)
        same = before == contents(engine)
        step = handle.last_step
        norm_told = None if step.reason == "overflow" else float(engine.get_global_grad_norm())
        seen.append([same, engine.was_step_applied(), engine.skipped_steps, engine.global_steps, norm_told])
    return {"seen": seen}


def guarded(kind: str, rule: str, **more: Any) -> Seen:
    trace = Trace()
    engine = engine_of(kind, **more)
    handle = attach(engine, on_step=trace, guard=RULES[rule]())
    seen = play(engine, handle, script())
    spikes = [[step.index, step.culprits, *(step.spike or ())] for step in trace if step.reason == "spike"]
    rules = [trace.policy == repr(handle.policy), trace.guard == repr(RULES[rule]())]
    return {**seen, "decisions": decisions(trace), "spikes": spikes, "rules": rules}


def half(kind: str) -> Seen:
    return guarded(kind, "spike", **BF16)


def accumulated(kind: str) -> Seen:
    return guarded(kind, "spike", accumulation=2)


def resumed(kind: str) -> Seen:
    """Save in the middle, and resume in an engine that has seen something else."""
    folder, tail = str(FOLDER / f"guarded {kind}"), script()[CUT:]
    first, others = engine_of(kind), [engine_of(kind) for _ in range(2)]
    handle = attach(first, guard=RULES["spike"]())
    play(first, handle, script()[:CUT])
    first.save_checkpoint(folder)
    traces = []
    for engine in (first, others[0]):
        if engine is not first:
            handle = attach(engine, guard=RULES["spike"]())
            play(engine, handle, script(1)[:3])
            engine.load_checkpoint(folder)
        handle.on_step = trace = Trace()
        play(engine, handle, tail)
        traces.append(decisions(trace))
    alone = attach(others[1])  # without a guard, which then is in no checkpoint of this engine
    others[1].load_checkpoint(folder)
    play(others[1], alone, tail[:3])
    left = "preamp_guard" in attributes(others[1])
    step = alone.last_step
    return {"traces": traces, "left": left, "alone": step and step.reason}


def attributes(engine: Any) -> dict[str, Any]:
    """Return what DeepSpeed's loss scaler holds."""
    held = engine.optimizer
    return vars(held.loss_scaler if hasattr(held, "loss_scaler") else held.loss_scale_config)


def without_a_norm() -> list[int]:
    """A guard that uses the loss only, where DeepSpeed computes no norm."""
    trace = Trace()
    engine = engine_of("1", zero_optimization={"stage": 1, "compute_grad_norm": False})
    attach(engine, on_step=trace, guard=LossLimit(5.0))
    for loss in (2.0, 20.0, 2.0, 20.0):
        before = contents(engine)
        update(engine, loss, 1.0)
        assert (before == contents(engine)) == (loss > 5.0)
    return [step.index for step in trace if step.reason == "spike"]


def skips_on() -> list[list[Any]]:
    """A guard that skips every step: in which steps there was a warning, which, and of which file."""
    engine, told = engine_of("1"), []
    attach(engine, guard=guards.NormLimit(0.5))
    for step in range(1, 211):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            update(engine, 2.0, 1.0)
        ours = [one for one in caught if "in a row" in str(one.message)]
        told += [[step, str(one.message), Path(one.filename).name] for one in ours]
    return told


def another_guards_state() -> None:
    engine = engine_of("1")
    attach(engine, guard=RULES["spike"]())
    update(engine, 2.0, 1.0)
    engine.optimizer.loss_scaler.preamp_guard = {"mean": 0.0, "steps": 1.0}
    update(engine, 2.0, 1.0)


def unknown_loss() -> None:
    engine = engine_of("1")
    attach(engine, guard=RULES["spike"]())
    loss = engine(2.0, 1.0)
    engine.backward(loss)
    loss.detach().mul_(2.0)
    engine.step()


def said(case: Callable[[], Any]) -> str:
    try:
        case()
    except PreampError as error:
        return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "nothing"


def refused() -> dict[str, str]:
    without_norm = {"zero_optimization": {"stage": 1, "compute_grad_norm": False}}
    muon = engine_of("3")
    muon.optimizer.use_muon = True
    guard = guards.SpikeGuard()
    later = engine_of("1")
    handle = attach(later, guard=guard)
    handle.detach()
    cases: dict[str, Callable[[], Any]] = {
        "no guard": lambda: attach(engine_of("1"), guard=3),  # type: ignore[arg-type]
        "bfloat16, stage 0": lambda: attach(engine_of("0", **BF16), guard=guard),
        "bfloat16, no guard": lambda: attach(engine_of("1", **BF16)),
        "bfloat16, a policy": lambda: attach(engine_of("1", **BF16), Dynamic(), guard=guard),
        "float32": lambda: attach(engine_of("1", fp16={"enabled": False}), guard=guard),
        "no norm": lambda: attach(engine_of("1", **without_norm), guard=guard),
        "muon": lambda: attach(muon, guard=guard),
        "another guard": another_guards_state,
        "unknown loss": unknown_loss,
    }
    seen = {name: said(case) for name, case in cases.items()}
    update(later, 2.0, 1.0)
    return {
        **seen,
        "detached": str(later.was_step_applied() and "scaled_global_norm" not in vars(later.optimizer)),
    }


def scenarios() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for kind, rule in ALL if RANKS == 1 else TWO:
        found[f"guarded {kind} {rule}"] = partial(guarded, kind, rule)
    for kind in ("1", "3") if RANKS == 1 else ("1",):
        found[f"half {kind}"] = partial(half, kind)
        found[f"accumulated {kind}"] = partial(accumulated, kind)
    if RANKS == 1:
        found |= {f"half {kind}": partial(half, kind) for kind in HALVES}
        found["accumulated 0"] = partial(accumulated, "0")
        found |= {f"resumed {kind}": partial(resumed, kind) for kind in RESUMED}
        found["refused"] = refused
        found["without_a_norm"] = without_a_norm
        found["skips_on"] = skips_on
    return found


if __name__ == "__main__":
    guarded_ones = {f"guards: {name}": scenario for name, scenario in scenarios().items()}
    main({**guarded_ones, **SCENARIOS})  # the last of which changes DeepSpeed
