"""The small trainings that `policies.py` runs its rules on. They overflow and underflow as large ones do."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from preamp.cli.lab.data import digits

__all__ = ["PROBLEMS", "Problem"]

# Modules of the standard library that every supported Python has: about a million characters.
MODULES = (
    "argparse", "ast", "configparser", "csv", "datetime", "difflib", "doctest", "enum", "ftplib",
    "functools", "heapq", "inspect", "locale", "mailbox", "optparse", "pathlib", "pickle", "platform",
    "random", "shutil", "smtplib", "socket", "statistics", "subprocess", "tarfile", "tempfile", "textwrap",
    "threading", "tokenize", "traceback", "typing", "uuid", "zipfile",
)  # fmt: skip
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
LENGTH, BATCH = 8, 32

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """What to train.

    Attributes:
        model: makes the network; torch's generator decides its weights.
        data: the arrays: inputs, labels, test inputs, test labels.
        learning_rate: Adam's.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    learning_rate: float

    def batches(self, seed: int, steps: int) -> list[Batch]:
        """Return the batches of a run; rows are drawn at random."""
        inputs, labels, *_ = self.data()
        rows = torch.randint(len(inputs), (steps, BATCH), generator=torch.Generator().manual_seed(seed))
        return [(inputs[chosen], labels[chosen]) for chosen in rows]

    def accuracy(self, model: nn.Module) -> float:
        """Return the accuracy on the test rows, from 0 to 1."""
        *_, inputs, labels = self.data()
        with torch.no_grad():
            return float((model(inputs).argmax(-1) == labels).float().mean())


class Gate(nn.Module):
    """The part of a gated recurrent unit after its two matrix products (Cho et al. 2014, arXiv 1406.1078)."""

    def forward(self, seen: Tensor, remembered: Tensor, state: Tensor) -> Tensor:
        """Return the next state, (rows, units), of two products of shape (rows, 3 * units) and a state."""
        keep, reset, new = seen.chunk(3, -1)
        keep_too, reset_too, new_too = remembered.chunk(3, -1)
        update = torch.sigmoid(keep + keep_too)
        candidate = torch.tanh(new + torch.sigmoid(reset + reset_too) * new_too)
        return torch.lerp(candidate, state, update)


class Characters(nn.Module):
    """A gated recurrent unit that predicts the next character at every position."""

    def __init__(self, units: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(CHARACTERS), 32)
        self.seen = nn.Linear(32, 3 * units)
        self.remembered = nn.Linear(units, 3 * units)
        self.gate = Gate()
        self.head = nn.Linear(units, len(CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of shape (rows, length, characters) for whole numbers of shape (rows, length)."""
        state = torch.zeros(len(text), self.remembered.in_features)
        states = []
        for seen in self.seen(self.embed(text)).unbind(1):
            state = self.gate(seen, self.remembered(state), state)
            states.append(state)
        return self.head(torch.stack(states, 1))


def _dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )  # fmt: skip


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = digits()
    parts = (table.train, table.train_labels, table.test, table.test_labels)
    return tuple(map(torch.from_numpy, parts))  # type: ignore[return-value]


@cache
def _text() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return windows of the standard library's own source, the last tenth of them for testing."""
    codes = np.array([CHARACTERS.find(c) for c in "".join(map(_source, MODULES))])
    usable = codes[codes >= 0]
    rows = torch.from_numpy(usable[: len(usable) // LENGTH * LENGTH - LENGTH + 1])
    windows = rows[:-1].view(-1, LENGTH), rows[1:].view(-1, LENGTH)
    test = len(windows[0]) // 10
    return windows[0][:-test], windows[1][:-test], windows[0][-1000:], windows[1][-1000:]


def _source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


PROBLEMS = {
    "digits": Problem(_dense, _digits, 1e-3),
    "characters": Problem(Characters, _text, 3e-3),
    "convolutions": Problem(_convolutions, _digits, 1e-3),
}
