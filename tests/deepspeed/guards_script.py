"""What the ranks of `guards_worker.py` train by, and what the tests know of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from preamp import Policy, Reading, Trace, dialects, guards, simulate
from tests.deepspeed.attach_script import KINDS

Script = list[tuple[float, float]]  # losses and norms

FP16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 8, "hysteresis": 2}
CONFIGURED = dialects.DEEPSPEED(init_scale=2.0**4, scale_window=8, hysteresis=2)
RULES: dict[str, Callable[[], guards.Guard[Any]]] = {
    "spike": lambda: guards.SpikeGuard(warmup=8, patience=3),
    "norm": lambda: guards.NormLimit(5.0),
    "olmo": lambda: guards.OLMO(rolling_interval_length=24),
}
ALL = [(kind, "spike") for kind in KINDS] + [("0", "norm"), ("2", "olmo"), ("3", "norm")]
TWO = [("0", "spike"), ("3", "spike"), ("1", "olmo")]
RESUMED = ("0 fused", "1", "3")
HALVES = ("1", "2", "3", "3 offloaded")  # bfloat16
SPIKES = {"spike": 5, "norm": 2, "olmo": 2}  # how many steps of the script each rule skips
ENTRIES = 10  # of the gradients
CUT = 29  # after which step it is saved


class Given(torch.autograd.Function):
    """A loss and the norm of a gradient that are given."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor, loss: float, norm: float) -> Tensor:
        ctx.norm = norm
        return torch.tensor(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        each = gradient * ctx.norm / math.sqrt(ENTRIES)
        return each.expand(6), each.expand(4), None, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.linspace(-1.0, 1.0, 6))
        self.two = nn.Parameter(torch.linspace(0.0, 1.0, 4))

    def forward(self, loss: float, norm: float) -> Tensor:
        made: Tensor = Given.apply(self.one.float(), self.two.float(), loss, norm)  # type: ignore[no-untyped-call]
        return made


def script(seed: int = 0, steps: int = 44) -> Script:
    """Return ordinary steps; spikes of the loss and of the norm, one after the other; and overflows."""
    drawn = random.Random(seed)
    made = [(2.0 + 0.1 * drawn.gauss(0.0, 1.0), math.exp(0.2 * drawn.gauss(0.0, 1.0))) for _ in range(steps)]
    for place in (5, 27, 33):
        made[place] = (made[place][0], math.inf)
    for place in (26, 36, 37, 38, 39, 40):
        made[place] = (made[place][0] * 10.0, made[place][1])
    for place in (28, 31):
        made[place] = (made[place][0], made[place][1] * 20.0)
    return made


def simulated(policy: Policy[Any], rule: str, steps: Script) -> Trace:
    readings = [
        Reading(math.isfinite(norm), loss=loss, grad_norm=norm if math.isfinite(norm) else None)
        for loss, norm in steps
    ]
    return simulate(policy, readings, guard=RULES[rule]())


def decisions(trace: Trace) -> list[list[Any]]:
    return [[step.reason, step.spike and step.spike.of, step.scale, step.new_scale] for step in trace]
