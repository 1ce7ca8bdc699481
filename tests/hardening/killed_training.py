"""A training that may be killed at any moment, and goes on from its last checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from preamp import Dynamic, Trace
from preamp.torch import GradScaler

POLICY = Dynamic(init_scale=2.0**10, growth_interval=5)
EVERY = 7  # steps from one checkpoint to the next


def overflows(number: int) -> bool:
    return number % 13 == 4


class Training:
    """A small model, its optimizer and its scaler."""

    def __init__(self, on_step: Any = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", policy=POLICY, on_step=on_step)
        self.done = 0

    def step(self) -> None:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.done))
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean() * (float("inf") if overflows(self.done) else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()
        self.done += 1

    def save(self, path: Path) -> None:
        """Write a checkpoint whole or not at all."""
        unfinished = path.with_suffix(".unfinished")
        torch.save({**self.parts(), "done": self.done}, unfinished)
        os.replace(unfinished, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        self.done = saved["done"]

    def parts(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler")}


def main(folder: Path, steps: int) -> None:
    """Train, from the last checkpoint if there is one."""
    checkpoint = folder / "checkpoint.pt"
    training = Training(Trace(path=folder / "trace.jsonl", mode="append", name="killed"))
    if checkpoint.exists():
        training.load(checkpoint)
    while training.done < steps:
        training.step()
        if training.done % EVERY == 0:
            training.save(checkpoint)
    training.save(checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
