"""One rank of several, started as torchrun starts one: trains with the engine, and writes what it saw.

All scenarios run one after the other on every rank. The arguments are the rank's number and where answers go.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from preamp import Trace, guards
from preamp.deepspeed import Engine, initialize
from preamp.errors import PreampError
from tests.deepspeed import guards_script

RANKS, ROWS, STEPS = 2, 4, 6
FLOAT16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
CONFIGS = {"fp16": FLOAT16, "bf16": {"bf16": {"enabled": True}}, "float32": {}}
OVERFLOW = 3  # the micro-step in which a gradient overflows on the last rank


class Net(nn.Module):
    """A net whose second half only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, inputs: Tensor, both: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.second(hidden) if both else hidden


def made(config: dict[str, Any], ranks: int, seed: int = 0, micro_steps: int = 2, **more: Any) -> Engine:
    torch.manual_seed(seed)
    batch = {"train_micro_batch_size_per_gpu": ROWS // ranks, "gradient_accumulation_steps": micro_steps}
    optimizer = {"type": "SGD", "params": {"lr": 0.125, "momentum": 0.5}}
    return initialize(model=Net(), config={**config, **batch, "optimizer": optimizer}, **more)[0]


def loss_of(engine: Engine, number: int, rank: int, ranks: int, both: bool = True) -> Tensor:
    """Return the loss of one rank's rows."""
    random = torch.Generator().manual_seed(number)
    rows = torch.randn(ROWS, 3, generator=random)[rank * ROWS // ranks : (rank + 1) * ROWS // ranks]
    outputs: Tensor = engine(rows.to(engine.module.first.weight.dtype), both)
    return outputs.float().square().mean()


def train(
    engine: Engine, rank: int, ranks: int, overflow: bool = False, seldom: bool = False
) -> dict[str, Any]:
    """Train, and return what there is to see."""
    steps = []
    for number in range(STEPS):
        loss = loss_of(engine, number, rank, ranks, both=not (seldom and rank == 0))
        planted = overflow and number == OVERFLOW and rank == ranks - 1
        engine.backward(loss * (math.inf if planted else 1.0))
        engine.step()
        if engine.last_step is not None:
            steps.append([engine.was_step_applied(), engine.cur_scale, engine.get_global_grad_norm()])
    optimizer: Any = engine.optimizer
    weights = [p.detach().float().flatten().tolist() for p in optimizer.param_groups[0]["params"]]
    states = [sorted(optimizer.state.get(p, {})) for p in optimizer.param_groups[0]["params"]]
    counters = [engine.global_steps, engine.skipped_steps]
    return {"steps": steps, "weights": weights, "states": states, "counters": counters}


def guarded(config: dict[str, Any], rank: int) -> list[list[Any]]:
    """Train with a guard by a script of losses and norms; the losses of ranks differ, and have its mean."""
    trace, model = Trace(), guards_script.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    guard = guards_script.RULES["spike"]()
    engine = initialize(model=model, optimizer=optimizer, config=config, on_step=trace, guard=guard)[0]
    for loss, norm in guards_script.script():
        engine.backward(engine(loss * 2 * rank, norm))
        engine.step()
    return guards_script.decisions(trace)


def refused(call: Any) -> str:
    try:
        call()
    except PreampError as error:
        return str(error)
    return ""


def initial(engine: Engine) -> list[float]:
    return [value for p in engine.parameters() for value in p.detach().float().flatten().tolist()]


def scenarios(rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        seen[name] = train(made(config, RANKS), rank, RANKS)
    records: list[logging.LogRecord] = []
    logging.getLogger("preamp.deepspeed").addFilter(lambda record: records.append(record) or True)
    seen["overflow"] = train(made(FLOAT16, RANKS), rank, RANKS, overflow=True)
    seen["records"] = [record.getMessage() for record in records]
    seen["seldom"] = train(made(FLOAT16, RANKS), rank, RANKS, seldom=True)
    seen["initial"] = initial(made(FLOAT16, RANKS, seed=rank))

    for name, config in {**CONFIGS, "fp16": {"fp16": guards_script.FP16}}.items():
        seen[f"guarded {name}"] = guarded(config, rank)
    seen["other guard"] = refused(lambda: made(FLOAT16, RANKS, guard=guards.NormLimit(1.0 + rank)))
    seen["other configuration"] = refused(lambda: made(FLOAT16, RANKS, micro_steps=1 + rank))
    model = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True)])
    engine = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config={})[0]
    engine.backward(model[rank](torch.tensor([[1, 2], [1.0, 2.0]][1 - rank])).sum())
    seen["sparse"] = refused(engine.step)

    engine = made(FLOAT16, RANKS)
    first = train(engine, rank, RANKS)
    resumed = made(FLOAT16, RANKS, seed=5)
    resumed.load_state_dict(copy.deepcopy(engine.state_dict()))
    seen["resumed"] = (
        train(resumed, rank, RANKS)["weights"] == train(engine, rank, RANKS)["weights"] != first["weights"]
    )
    return seen


if __name__ == "__main__":
    number, place = int(sys.argv[1]), Path(sys.argv[2])
    try:
        answer = scenarios(number)
    except BaseException:
        answer = {"error": traceback.format_exc()}
    (place / f"{number}.json").write_text(json.dumps(answer))
    if "error" not in answer:
        dist.destroy_process_group()
