"""What a lens adds to a training step. On one thread.

Run: python benchmarks/lens.py [--device cuda] [--quick]. Reports; asserts nothing.

Whole steps take turns: without a lens, with a lens on a pass that it does not sample, and with a lens on a
pass that it samples, including the reading. The cost of sampling one pass in a hundred follows from these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from rows import Area, Options, Row, main
from torch import Tensor, nn

from preamp.torch import GradScaler, Lens

NEVER, EVERY = 10**9, 100
WITHOUT, IDLE, SAMPLED = "without a lens", "a pass that is not sampled", "a pass that is sampled"


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

    def step(self) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.batch), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def measure(options: Options) -> Iterator[Row]:
    """Yield three rows for each network."""
    torch.set_num_threads(1)
    area, sampled_run = Area("torch Lens", options.device), f"a run that samples 1 pass in {EVERY}"
    for name in list(PROBLEMS)[: 1 if options.quick else None]:
        kinds = {WITHOUT: None, IDLE: NEVER, SAMPLED: 1}
        times = options.interleaved(
            {kind: Training(name, options.device, every).step for kind, every in kinds.items()}
        )
        pairs = zip(times[WITHOUT], times[SAMPLED], strict=True)
        times[sampled_run] = [plain + (sampled - plain) / EVERY for plain, sampled in pairs]
        for kind in (IDLE, SAMPLED, sampled_run):
            yield from area.timed(f"{name}: {kind}", times, kind, floors=[WITHOUT])


if __name__ == "__main__":
    main(measure, __doc__)
