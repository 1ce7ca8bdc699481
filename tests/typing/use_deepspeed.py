"""A user's code with DeepSpeed's names."""

from pathlib import Path
from typing import Any, assert_type

import torch

from preamp import Dynamic, Step, Trace
from preamp.deepspeed import (
    Attached,
    CreateLossScaler,
    DynamicLossScaler,
    Engine,
    LossScaler,
    LossScalerBase,
    OverflowLog,
    attach,
    initialize,
)
from preamp.systems.deepspeed_config import load


def train(model: torch.nn.Module, x: torch.Tensor) -> Step | None:
    engine, optimizer, *_ = initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config=load(Path("ds.json")),
        on_step=Trace(path="trace.jsonl"),
    )
    assert_type(engine, Engine)
    assert_type(engine.backward(engine(x).mean()), torch.Tensor)
    engine.step()
    assert_type(engine.cur_scale, float)
    assert_type(engine.skipped_steps, int)
    assert_type(engine.global_steps, int)
    assert_type(engine.get_global_grad_norm(), float | None)
    assert_type(engine.state_dict(), dict[str, Any])
    assert_type(optimizer, torch.optim.Optimizer | None)
    return engine.last_step


def steer(engine: Any) -> Step | None:
    attached = attach(engine, Dynamic(), on_step=print)
    assert_type(attached, Attached)
    attached.detach()
    return attached.last_step


def scale(parameters: list[torch.nn.Parameter]) -> LossScalerBase:
    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, consecutive_hysteresis=False)
    assert_type(scaler.loss_scale, float)
    assert_type(scaler.has_overflow(parameters), bool)
    scaler.update_scale(False)
    OverflowLog(limit=3, period=1.0)(Step(0, 1.0, False, True))
    assert_type(CreateLossScaler(torch.half, 1.0, False, None), LossScalerBase)
    return LossScaler(8)


def mistakes(model: torch.nn.Module) -> None:
    initialize(model=3)  # type: ignore[arg-type]
    initialize(model=model, config=3)  # type: ignore[arg-type]
    initialize(model=model, on_step="trace.jsonl")  # type: ignore[arg-type]
    initialize(model=model, zero=True)  # type: ignore[arg-type]
    attach(model, policy=3)  # type: ignore[arg-type]
    DynamicLossScaler(2.0**16)  # type: ignore[call-arg]
    CreateLossScaler("float16", 1.0, False, None)  # type: ignore[arg-type]
    OverflowLog(3)  # type: ignore[call-arg]
