"""One rank of two. In the second step a gradient overflows on rank 1. Prints as JSON what it saw."""

from __future__ import annotations

import json
import logging
import math
import sys
from typing import Any

import torch
import torch.distributed as dist

from preamp.deepspeed import DynamicLossScaler


def main(meeting: str, rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("preamp.deepspeed").addHandler(handler)
    scaler = DynamicLossScaler(8.0, 1000, 1.0, delayed_shift=1, consecutive_hysteresis=False)
    parameter = torch.nn.Parameter(torch.zeros(2))
    own = [dist.new_group([member]) for member in range(2)][rank]
    seen: dict[str, Any] = {"alone": [], "in_a_group_of_its_own": [], "agreed": [], "scales": []}
    for step in range(3):
        parameter.grad = torch.full((2,), math.inf if (step, rank) == (1, 1) else 1.0)
        seen["alone"].append(scaler.has_overflow_serial([parameter]))
        seen["in_a_group_of_its_own"].append(scaler.has_overflow([parameter], own))
        seen["agreed"].append(scaler.has_overflow([parameter]))
        scaler.update_scale(seen["agreed"][-1])
        seen["scales"].append(scaler.loss_scale)
    dist.destroy_process_group()
    return {**seen, "logged": logged, "deepspeed": "deepspeed" in sys.modules}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
