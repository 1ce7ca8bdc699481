"""What blame costs: its time and memory on a transformer of 12 layers, compared with a step in float32.

Run: python benchmarks/blame_cost.py

Each runs in a process of its own, because the peak of memory is that of the process. In it, large tensors
return to the system as soon as they are freed, so that the peak is that of live tensors.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, WORDS, BATCH, LENGTH = 256, 8, 12, 8000, 8, 256


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape (batch, length, width)."""
        parts = self.qkv(self.first(x)).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x))))


def main() -> None:
    """Print the table, or with an argument run the row that it names."""
    if len(sys.argv) == 1:
        print(f"{'':24}  seconds  peak of memory above the start, MiB")
        for name in ("step", "blame"):
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc's
            subprocess.run([sys.executable, __file__, name], check=True, env=environment)
        return
    import preamp.torch

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        *[Block() for _ in range(LAYERS)],
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WORDS, bias=False),
    )
    words = torch.randint(WORDS, (BATCH, LENGTH + 1))

    def loss() -> Tensor:
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    before, start = _peak(), time.perf_counter()
    if sys.argv[1] == "step":
        loss().backward()
        model.zero_grad()
        start = time.perf_counter()
        loss().backward()
    else:
        preamp.torch.blame(loss, model=model)
    name = "step" if sys.argv[1] == "step" else f"{sys.argv[1]}, bfloat16"
    print(f"{name:24}  {time.perf_counter() - start:7.1f}  {_peak() - before:,.0f}")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
