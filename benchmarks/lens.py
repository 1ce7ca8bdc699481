"""What a lens adds to a training run. Reports; asserts nothing.

Run: python benchmarks/lens.py [--rounds 200] [--device cpu] [--every 100]

One step of each kind is timed in turn: without a lens, with a lens on a pass that it does not sample, and
with one that samples every pass, whose reading is included. The last column is what follows at `--every`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from preamp.torch import GradScaler, Lens

NEVER = 10**9


class Transformer(nn.Module):
    """A small language model: embedding, two layers, a head."""

    def __init__(self, words: int = 96, width: int = 64, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, words)."""
        return self.head(self.layers(self.words(tokens) + self.places.weight)).flatten(0, 1)


def mlp(width: int) -> nn.Module:
    """Return a network with two hidden layers for the 64 pixels of a digit."""
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    """Return a small network of convolutions for images of 16 x 16."""
    blocks: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 32)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "MLP 64-256-256-10, batch 128": (lambda: mlp(256), lambda: torch.randn(128, 64), 10),
    "MLP 64-2048-2048-10, batch 128": (lambda: mlp(2048), lambda: torch.randn(128, 64), 10),
    "3 convolutions, batch 64": (convolutions, lambda: torch.randn(64, 1, 16, 16), 10),
    "transformer of 2 layers, 16 x 64 tokens": (Transformer, lambda: torch.randint(96, (16, 64)), 96),
}


class Training:
    """A model in training, with or without a lens."""

    def __init__(self, name: str, device: str, every: int | None) -> None:
        torch.manual_seed(0)
        make, batch, classes = PROBLEMS[name]
        self.model, self.batch, self.device = make().to(device), batch().to(device), device
        with torch.no_grad():
            count = len(self.model(self.batch))
        self.labels = torch.randint(classes, (count,), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.scaler = GradScaler(device, init_scale=2.0**10)
        if every:
            Lens(self.model, every, scaler=self.scaler)

    def step(self) -> float:
        """Train on one batch; return the seconds it took."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.batch), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(name: str, device: str, rounds: int) -> tuple[float, float, float]:
    """Return median seconds of a step: without a lens, not sampled, sampled."""
    trainings = [Training(name, device, every) for every in (None, NEVER, 1)]
    for training in trainings:
        training.step(), training.step()
    times = [[training.step() for training in trainings] for _ in range(rounds)]
    plain, idle, sampled = zip(*times, strict=True)
    return median(plain), median(idle), median(sampled)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':42}{'step':>10}{'idle lens':>11}{'sampled':>10}{'adds at 1 in ' + str(args.every):>19}")
    for name in PROBLEMS:
        plain, idle, sampled = measure(name, args.device, args.rounds)
        added = (sampled - plain) / (args.every * plain)
        print(
            f"{name:42}{plain * 1e3:8.2f}ms{idle / plain:10.3f}x{sampled / plain:9.2f}x{added:19.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
