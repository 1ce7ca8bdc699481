"""The training loop in PyTorch, as a user of `preamp.torch` would write it.

`autocast(emulate=True)` rehearses a GPU, because a CPU's own float16 products are up to 200 times
slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, linear, mse_loss

from preamp.cli.lab import SNAPSHOT_EVERY, Precision
from preamp.cli.lab.loop import Loop, Trained
from preamp.cli.lab.problem import Problem
from preamp.errors import ScaleExhausted
from preamp.policy import Policy
from preamp.scaling import Step
from preamp.torch import GradScaler, Lens, autocast
from preamp.torch.autocasting.unscaled import watch


class Dense(torch.nn.Module):
    """A layer with an initial weight of shape (out, in), with or without a sigmoid after it."""

    def __init__(self, weight: NDArray[np.float32], *, sigmoid: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(weight))
        self.bias = torch.nn.Parameter(torch.zeros(len(weight)))
        self.sigmoid = sigmoid

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        sums = linear(values, self.weight, self.bias)
        return torch.sigmoid(sums) if self.sigmoid else sums


class TorchLoop(Loop):
    """One training of one problem."""

    def __init__(
        self, problem: Problem, precision: Precision, policy: Policy[Any] | None, seed: int, **settings: bool
    ) -> None:
        super().__init__(problem, precision, policy, seed, **settings)
        self.region: AbstractContextManager[Any] = nullcontext()
        if precision != "float32":
            self.region = autocast("cpu", getattr(torch, precision), emulate=self.emulate)
        *hidden, last = problem.initial_weights(seed)
        layers = [Dense(weight, sigmoid=True) for weight in hidden]
        layers.append(Dense(last, sigmoid=problem.loss == "squared"))
        self.weights = [layer.weight for layer in layers]
        self.model = torch.nn.Sequential()
        for number, layer in enumerate(layers, start=1):
            self.model.add_module(f"layer{number}", layer)
        parameters = list(self.model.named_parameters())
        self.optimizer = torch.optim.Adam(parameters, lr=problem.learning_rate, fused=True)
        self.scaler = GradScaler("cpu", policy=policy, enabled=policy is not None)
        self.lens = Lens(self.model, SNAPSHOT_EVERY, scaler=self.scaler, low_dtype=precision)

    def steps(self) -> Iterator[Step]:
        """Train, yielding one `Step` after each update."""
        torch.set_num_threads(1)  # layers this small are slower on two
        with self.lens, watch.paused():  # what float16 loses without a scaler is what is shown
            yield from super().steps()

    def train_on(self, rows: NDArray[np.int64], index: int) -> Trained:
        table = self.problem.table
        loss = self._loss(torch.from_numpy(table.train[rows]), torch.from_numpy(table.train_labels[rows]))
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        amax = _amax(gradients)
        self.scaler.step(self.optimizer)
        try:
            self.scaler.update()
        except ScaleExhausted as error:
            return Trained(loss.detach(), gradients, amax, error)
        return Trained(loss.detach(), gradients, amax)

    def last_step(self) -> Step | None:
        return self.scaler.last_step

    def outputs(self) -> NDArray[np.float32]:
        with torch.no_grad():
            return self._forward(torch.from_numpy(self.problem.table.test)).float().numpy()

    def _forward(self, values: torch.Tensor) -> torch.Tensor:
        with self.region:
            outputs: torch.Tensor = self.model(values)
        return outputs

    def _loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs = self._forward(inputs).float()
        return mse_loss(outputs, inputs) if self.problem.loss == "squared" else cross_entropy(outputs, labels)


def _amax(gradients: list[torch.Tensor]) -> float:
    """Return the largest finite magnitude."""
    amax = torch.stack([end for g in gradients for end in torch.aminmax(g)]).abs().amax().item()
    if math.isfinite(amax):
        return amax
    return max(float(g.nan_to_num(0.0, 0.0, 0.0).abs().amax()) for g in gradients)
