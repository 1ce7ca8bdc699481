"""Training steps of PyTorch without a fault, of which blame should find nobody guilty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from blame_cases import Healthy, by_hand
from blame_cases.faults import BOTH, SHORT, Builder

__all__ = ["HEALTHY", "Healthy"]


def _in_both(model: str, *, trained: int = 0, rate: float = 0.1, **options: Any) -> Iterator[Healthy]:
    yield from _in(BOTH, model, trained=trained, rate=rate, **options)


def _by_hand() -> Iterator[Healthy]:
    """Return the codes of `by_hand` without their faults."""
    for model, code, dtypes, _, options in by_hand.CODES:
        if by_hand.is_healthy(code):
            for healthy in _in(dtypes, model, code=code, **options):
                yield healthy._replace(name=f"by hand: {healthy.name}")


def _in(
    dtypes: tuple[torch.dtype, ...], model: str, *, trained: int = 0, rate: float = 0.1, **options: Any
) -> Iterator[Healthy]:
    given = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
    after = f" after {trained} steps" if trained else ""
    for dtype in dtypes:
        builder = Builder(model, dtype, options, trained=trained, rate=rate)
        yield Healthy(f"{model}({given}) {SHORT[dtype]}{after}", builder)


HEALTHY: tuple[Healthy, ...] = (
    *_in_both("gpt"),
    *_in_both("gpt", width=128, layers=1),
    *_in_both("gpt", dropout=0.1),
    *_in_both("gpt", tied=True),
    *_in_both("gpt", upcast=True, upcast_head=True, trained=10),
    *_in_both("gpt", activation="relu", layers=4, width=32),
    *_in_both("gpt", offset=4.0),
    *_in_both("llama"),
    *_in_both("llama", width=96, layers=3),
    *_in_both("llama", grown=8.0, upcast_head=False),
    *_in_both("llama", trained=10),
    *_in_both("t5"),
    *_in_both("t5", activation="gelu", width=128),
    *_in_both("t5", bias=2.0, trained=5),
    *_in_both("perceptron"),
    *_in_both("perceptron", activation=torch.sigmoid, depth=8),
    *_in_both("perceptron", activation=F.relu, width=128, trained=20),
    *_in_both("cnn"),
    *_in_both("cnn", activation=F.silu, channels=32, size=8),
    *_in_both("cnn", contrast=50.0),
    *_in_both("resnet"),
    *_in_both("resnet", depth=4, channels=32),
    *_in_both("resnet", trained=10),
    *_in_both("recurrent"),
    *_in_both("recurrent", width=64, length=16, level=5.0),
    *_in_both("state_space"),
    *_in_both("state_space", pace=2.0, layers=1, length=96),
    *_in_both("autoencoder"),
    *_in_both("autoencoder", level=5.0, trained=20, activation=torch.tanh),
    *_in_both("clip"),
    *_in_both("clip", temperature=0.2, width=128, trained=5),
    *_in_both("mixture"),
    *_in_both("mixture", experts=8, layers=1),
    *_in_both("variational"),
    *_in_both("variational", latent=32, width=96, trained=10),
    *_in_both("summing", chunks=50),
    *_in_both("bags"),
    *_in_both("bags", activation=F.gelu, classes=20, trained=10, rate=1.0),
    *_by_hand(),
)
