"""One of two ranks that train compiled blocks in an edited region with rules for modules.

It prints, as JSON, what the losses, the gradients and the precision of each module were.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from preamp import casting
from preamp.torch import autocast
from tests.torch.real_models import WIDTH, Einsum

TABLE = casting.DEFAULT.module("1", "float32").module("head", "float16").lower("softmax")
STEPS, ROWS = 2, 4


class Net(nn.Module):
    """Blocks of attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Einsum() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(kind: str, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Train; each rank has its rows of each batch, and one process, which compiles nothing, has all."""
    torch.manual_seed(0)
    model = Net()
    counter = CompileCounterWithBackend("aot_eager")
    region = autocast("cpu", torch.bfloat16, casting=TABLE, model=model)
    for block in model.blocks if kind else ():
        block.compile(backend=counter, fullgraph=True)
    wrapped: Any = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    elif kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, dtypes = [], set()
    for step in range(STEPS):
        batch = torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(ranks)[rank]
        optimizer.zero_grad()
        with region if step % 2 else autocast("cpu", torch.bfloat16, casting=TABLE, model=model):
            loss = wrapped(mine).float().square().mean()
        loss.backward()
        dtypes |= {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    with torch.compiler.set_stance("force_eager"), region:
        ran_in = precisions(model, wrapped, mine)
    return {
        "losses": losses,
        "gradients": sorted(dtypes),
        "ran in": ran_in,
        "frames": counter.frame_count,
        "parameters": torch.cat([p.detach().flatten() for p in whole]).tolist(),
    }


def precisions(model: nn.Module, wrapped: nn.Module, x: Tensor) -> dict[str, str]:
    """Return in which precision some modules run."""
    seen: dict[str, str] = {}
    for name in ("blocks.0.out", "blocks.1.out", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda _, args, result, name=name: seen.update({name: str(result.dtype)})
        )
    wrapped(x)
    return seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    rank, ranks, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(
        "gloo", f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    results = {}
    for kind in ("ddp", "fsdp2") if torch.__version__ >= (2, 9) else ("ddp",):
        torch._dynamo.reset()
        results[kind] = train(kind, rank, ranks)
    print(json.dumps(results), file=answers, flush=True)
    dist.destroy_process_group()
