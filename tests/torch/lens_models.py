"""What the tests of the lens share: a model, a training of it, what a lens saw, and hooks that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from preamp import ExponentHistogram, Snapshot
from preamp.torch import GradScaler, Lens
from preamp.torch.lens.histograms import CHUNK, add, count, read

__all__ = ["CHUNK", "X", "add", "count", "histogram", "hooks", "mlp", "read", "rows_of", "scalers", "seen"]
__all__ += ["train"]

X = torch.linspace(-2.0, 3.0, 12).reshape(4, 3)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def histogram(*tensors: Tensor) -> ExponentHistogram:
    measured, _ = read([count(tensor) for tensor in tensors])
    return sum((one.histogram for one in measured), ExponentHistogram())


def rows_of(snapshot: Snapshot | None) -> dict[tuple[str, str], ExponentHistogram]:
    """Return the rows by name and kind; no two have the same."""
    assert snapshot is not None
    rows = {(row.name, row.what): row.histogram for row in snapshot.rows}
    assert len(rows) == len(snapshot.rows)
    return rows


def seen(
    model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] = lambda out: out.sum(), **options: Any
) -> Snapshot:
    """Return what a lens sees of one pass."""
    with Lens(model, **options) as lens:
        loss(model(*inputs)).backward()
        assert lens.last is not None
        return lens.last


def hooks(model: nn.Module) -> int:
    """Count the hooks on modules and parameters, and those on all modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    on_parameters = sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())
    everywhere = [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
    return on_modules + on_parameters + sum(map(len, everywhere))


def train(model: nn.Module, steps: int, *, scaler: Any = None, factor: float = 1.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        loss = model(X).sum() * factor
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def scalers() -> dict[str, Callable[[nn.Module], Any]]:
    return {
        "ours": lambda _: GradScaler("cpu", init_scale=2.0**10, growth_interval=1),
        "torch": lambda _: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1),
        "capturable": lambda _: GradScaler("cpu", init_scale=2.0**10, growth_interval=1, capturable=True),
    }
