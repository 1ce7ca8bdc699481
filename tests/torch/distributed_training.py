"""What every rank trains, and one process by itself: a small net in which a gradient overflows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

import preamp.torch
from tests.seeing import Remembering

SETTINGS = {"init_scale": 2.0**10, "growth_interval": 2}
STEPS, OVERFLOW = 5, 1
BATCH = 8
SCALERS = {
    "ours": preamp.torch.GradScaler,
    "ours, sharded": preamp.torch.ShardedGradScaler,
    "original": torch.amp.GradScaler,
    "original, sharded": ShardedGradScaler,
}

Seen = dict[str, Any]


def net(width: int = 5) -> nn.Sequential:
    """Return a net. Of its last layer's one row only one rank can hold something."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Return one rank's rows of a batch."""
    random = torch.Generator().manual_seed(step)
    rows = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    return torch.randn(BATCH, 3, generator=random)[rows], torch.randn(BATCH, 1, generator=random)[rows]


class Training:
    """Some steps of one optimizer with one scaler, and what is seen of them.

    Args:
        model: what is trained; called with a batch.
        optimizer: the name of its class.
        options: for the optimizer.
        scaler: one of `SCALERS`.
        unscale: whether to call `unscale_`.
        closure: whether the optimizer evaluates a closure.
        compiled: whether to compile the end of an iteration, after the first.
        clip: for our `step`; PyTorch's scaler gets clipped by PyTorch's functions.
        seeing: whether the policy uses the amax.
        more: for the scaler.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: str = "SGD",
        options: dict[str, Any] | None = None,
        scaler: str = "ours",
        unscale: bool = False,
        closure: bool = False,
        compiled: bool = False,
        clip: dict[str, float] | None = None,
        seeing: bool = False,
        **more: Any,
    ) -> None:
        self.model, self.unscale, self.closure, self.clip = model, unscale, closure, clip or {}
        self.named = dict(model.named_parameters())
        self.optimizer = getattr(torch.optim, optimizer)(self.named.items(), lr=0.1, **(options or {}))
        self.ours = scaler.startswith("ours")
        rule = {"policy": Remembering(SETTINGS["init_scale"])} if seeing else SETTINGS
        self.scaler = SCALERS[scaler]("cpu", **rule, **more)
        self.finish: Callable[..., None] = self._finish
        self.compiled = compiled

    def run(self, backward: Callable[[int], object], plant: Callable[[], object] = lambda: None) -> Seen:
        """Train; return a list for each of the things seen, and how it ended."""
        rows = []
        for step in range(STEPS):

            def evaluate(step: int = step) -> None:
                self.optimizer.zero_grad()
                backward(step)
                if step == OVERFLOW:
                    plant()

            if not self.closure:
                evaluate()
            rows.append(self._step(*([evaluate] if self.closure else [])))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return {**columns, "state": self.scaler.state_dict(), "parameters": self.values()}

    def values(self) -> dict[str, list[float]]:
        """Return every parameter, whole where PyTorch knows how."""
        return {name: whole(p.detach()).flatten().tolist() for name, p in self.named.items()}

    def _step(self, *closure: Callable[[], None]) -> Seen:
        before, norm = self.values(), None
        if self.unscale or (self.clip and not self.ours):
            self.scaler.unscale_(self.optimizer)
        if not self.ours:
            norm = self._clip_as_torch_does()
        self.finish(*closure)
        if self.compiled:
            self.finish = torch.compile(self._finish, fullgraph=True, backend="eager")
        last = self.scaler.last_step if self.ours else None
        return {
            "scales": self.scaler.get_scale(),
            "moved": before != self.values(),
            "skipped": last.skipped if last else before == self.values(),
            "norms": last.grad_norm if last else norm,
            "culprits": last.culprits if last else (),
            "amaxes": last.amax if last else None,
        }

    def _finish(self, *closure: Callable[[], None]) -> None:
        self.scaler.step(self.optimizer, *closure, **(self.clip if self.ours else {}))
        self.scaler.update()

    def _clip_as_torch_does(self) -> float | None:
        norm = None
        if self.unscale:
            norm = float(nn.utils.get_total_norm(p.grad for p in self.named.values() if p.grad is not None))
        if "max_value" in self.clip:
            nn.utils.clip_grad_value_(self.named.values(), self.clip["max_value"])
        if "max_norm" in self.clip:
            clipped = float(nn.utils.clip_grad_norm_(self.named.values(), self.clip["max_norm"]))
            norm = clipped if norm is None else norm
        return norm if norm is not None and math.isfinite(norm) else None


def alone(model: nn.Module | None = None, *, planted: bool = True, **how: Any) -> Seen:
    """Train in one process, with PyTorch's scaler unless told otherwise."""
    training = Training(net() if model is None else model, **{"scaler": "original", **how})
    first = next(iter(training.named.values()))
    return training.run(
        lambda step: backpropagate(training, step), lambda: spoil(first.grad) if planted else None
    )


def backpropagate(training: Training, step: int, rank: int = 0, ranks: int = 1, factor: float = 1.0) -> None:
    x, y = batch(step, rank, ranks)
    loss = (training.model(x) - y).square().mean()
    training.scaler.scale(loss * factor).backward()


def whole(parameter: Any) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def spoil(gradient: Any, value: float = math.inf) -> None:
    """Write an infinity, or something else, into what this rank holds of a gradient."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    local.view(-1)[0] = value


def entries(gradient: Any) -> int:
    """Return how many entries of a gradient this rank holds."""
    if gradient is None:
        return 0
    return int((gradient.to_local() if isinstance(gradient, DTensor) else gradient).numel())
