"""The training loop in PyTorch, as a user of `preamp.torch` would write it.

`autocast(emulate=True)` rehearses low precision, because a CPU's own float16 products are up to 200 times
slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, linear, mse_loss

from preamp.cli.lab import LOOK_EVERY, ZEROS_EVERY, Precision
from preamp.cli.lab.problem import Problem
from preamp.errors import ScaleExhausted
from preamp.policy import Policy
from preamp.scaling import Step
from preamp.torch import GradScaler, Lens, autocast


class Dense(torch.nn.Module):
    """A layer of the network, a sigmoid behind it unless it is the last of a classifier.

    Args:
        weight: its first weight, of shape (out, in). Biases begin at 0.
        sigmoid: whether there is one.
    """

    def __init__(self, weight: NDArray[np.float32], *, sigmoid: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(weight))
        self.bias = torch.nn.Parameter(torch.zeros(len(weight)))
        self.sigmoid = sigmoid

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        sums = linear(values, self.weight, self.bias)
        return torch.sigmoid(sums) if self.sigmoid else sums


class TorchLoop:
    """One training of one problem. The arguments are those of `preamp.cli.lab.runs.Loop`.

    Attributes:
        lens: inspects some of the steps.
    """

    def __init__(
        self,
        problem: Problem,
        precision: Precision,
        policy: Policy[Any] | None,
        seed: int,
        *,
        emulate: bool = True,
    ) -> None:
        self.problem, self.seed = problem, seed
        self.region: AbstractContextManager[Any] = nullcontext()
        if precision != "float32":
            self.region = autocast("cpu", getattr(torch, precision), emulate=emulate)
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
        self.lens = Lens(self.model, LOOK_EVERY, scaler=self.scaler, low_dtype=precision)

    def steps(self) -> Iterator[Step]:
        """Train, yielding one `Step` after each update."""
        with self.lens:
            yield from self._steps()

    def _steps(self) -> Iterator[Step]:
        inputs = torch.from_numpy(self.problem.table.train)
        labels = torch.from_numpy(self.problem.table.train_labels)
        torch.set_num_threads(1)  # layers this small are slower on two
        for index, rows in enumerate(map(torch.from_numpy, self.problem.batches(self.seed))):
            start = time.perf_counter()
            loss = self._loss(inputs[rows], labels[rows])
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            zeros, peak = self._zeros() if index % ZEROS_EVERY == 0 else None, self._peak()
            self.scaler.step(self.optimizer)
            gives_up = self._update()
            step = self.scaler.last_step or Step(index, 1.0, finite=True, skipped=False)
            step = step._replace(loss=loss.item(), peak=peak, zeros=zeros)
            yield step._replace(seconds=time.perf_counter() - start)
            if gives_up:
                raise gives_up

    def outputs(self) -> NDArray[np.float32]:
        """Return what the network answers on the test rows, in the precision it was trained in."""
        with torch.no_grad():
            return self._forward(torch.from_numpy(self.problem.table.test)).float().numpy()

    def _update(self) -> ScaleExhausted | None:
        try:
            self.scaler.update()
        except ScaleExhausted as reason:
            return reason
        return None

    def _forward(self, values: torch.Tensor) -> torch.Tensor:
        with self.region:
            outputs: torch.Tensor = self.model(values)
        return outputs

    def _loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs = self._forward(inputs).float()
        return mse_loss(outputs, inputs) if self.problem.loss == "squared" else cross_entropy(outputs, labels)

    def _peak(self) -> float:
        """Return the largest finite magnitude among the gradient entries of the weights."""
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        peak = torch.stack([end for g in gradients for end in torch.aminmax(g)]).abs().amax().item()
        if math.isfinite(peak):
            return peak
        return max(float(g.nan_to_num(0.0, 0.0, 0.0).abs().amax()) for g in gradients)

    def _zeros(self) -> float:
        """Return the share of gradient entries of the weights that are exactly zero."""
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        return 1.0 - sum(int(g.count_nonzero()) for g in gradients) / sum(g.numel() for g in gradients)


LOOP = TorchLoop
