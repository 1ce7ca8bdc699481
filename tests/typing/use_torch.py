"""A user's code on PyTorch."""

from typing import Any, assert_type

import torch

from preamp import Dynamic, Policy, Snapshot, Step, Trace, casting
from preamp.autocasting.report import CastReport
from preamp.record.mismatch import Mismatch
from preamp.torch import (
    GradScaler,
    Lens,
    MasterWeights,
    ShardedGradScaler,
    amp,
    autocast,
    cpu,
    cuda,
    custom_bwd,
    custom_fwd,
    mismatch,
)


def train(model: torch.nn.Module, x: torch.Tensor) -> Step | None:
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler("cpu", policy=Dynamic(), on_step=Trace(path="trace.jsonl"))
    with autocast("cpu", dtype=torch.float16):
        loss: torch.Tensor = model(x).square().mean()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # as with PyTorch's own
    scaler.unscale_(optimizer)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert_type(scaler.get_scale(), float)
    assert_type(scaler.state_dict(), dict[str, Any])
    assert_type(scaler.last_step_of(optimizer), Step | None)
    assert_type(scaler.policy, Policy[Any])
    return scaler.last_step


def keep_scales(outputs: tuple[torch.Tensor, list[torch.Tensor]], scaler: GradScaler) -> None:
    assert_type(scaler.scale(torch.ones(1)), torch.Tensor)
    assert_type(scaler.scale(outputs), tuple[torch.Tensor, list[torch.Tensor]])


def goes_where_torch_expects_its_own(scaler: GradScaler) -> torch.amp.GradScaler:
    sharded = ShardedGradScaler("cpu", 2.0**10, process_group=None, policy=Dynamic())
    plain: list[GradScaler] = [
        sharded,
        cpu.amp.GradScaler(),
        cuda.amp.GradScaler(enabled=False),
        amp.GradScaler(),
    ]
    return plain[0] if plain else scaler


def cast(x: torch.Tensor) -> CastReport:
    with autocast(
        "cpu", dtype=torch.bfloat16, casting=casting.DEFAULT.lower("softmax"), report=True
    ) as region:
        torch.softmax(x @ x, -1)
    assert_type(region, autocast)
    return region.report()


@autocast("cpu")
def decorated(x: torch.Tensor, times: int = 1) -> torch.Tensor:
    return x * times


class Square(torch.autograd.Function):
    """Functions whose precision is said."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def half(model: torch.nn.Module, scaler: GradScaler) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer)
    masters.take_gradients()
    scaler.step(optimizer)
    masters.write_back()
    masters.load_state_dict(masters.state_dict())
    assert_type(masters.weights, list[tuple[torch.Tensor, torch.Tensor]])
    return masters.state_dict()


def snapshot(model: torch.nn.Module, scaler: GradScaler) -> None:
    with Lens(model, 10, scaler=scaler, on_snapshot=Trace().add_snapshot, low_dtype=torch.float16) as lens:
        assert_type(lens.last, Snapshot | None)
        assert_type(lens.every, int)


def measure(logp: torch.Tensor, drawn: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    measured = mismatch(logp, drawn, mask, clip_high=0.28)
    assert_type(measured, Mismatch[torch.Tensor])
    assert_type(measured.k3, torch.Tensor)
    return measured._asdict()


def mistakes(model: torch.nn.Module, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    GradScaler(init_scale="big")  # type: ignore[arg-type]
    GradScaler(policy=Dynamic)  # type: ignore[arg-type]
    GradScaler(hysteresis=2)  # type: ignore[call-arg]
    GradScaler(on_step=print, policy=3)  # type: ignore[arg-type]
    GradScaler(on_step="trace.jsonl")  # type: ignore[arg-type]
    scaler.step(model)  # type: ignore[arg-type]
    scaler.step(optimizer, max_norm="1")  # type: ignore[arg-type]
    scaler.policy = Dynamic()  # type: ignore[misc]
    autocast("cpu", casting="lower")  # type: ignore[arg-type]
    autocast("cpu", dtype="float16")  # type: ignore[arg-type]
    autocast()  # type: ignore[call-arg]
    decorated("x")  # type: ignore[arg-type]
    custom_fwd()  # type: ignore[call-overload]
    MasterWeights(model)  # type: ignore[arg-type]
    MasterWeights(optimizer, unknown=1)  # type: ignore[call-arg]
    Lens(scaler)  # type: ignore[arg-type]
    Lens(model, on_snapshot=3)  # type: ignore[arg-type]
    mismatch([0.0], torch.zeros(1))  # type: ignore[arg-type]
    mismatch(torch.zeros(1), torch.zeros(1), clip=0.2)  # type: ignore[call-arg]
