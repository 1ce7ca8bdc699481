"""DeepSpeed's warm-up schedules as PyTorch schedulers.

They give the learning rates of `deepspeed.runtime.lr_schedules` in release 0.19.8 step by step, including its
oddities: the schedule counts from -1, so that the first update, and with a warm-up the second too, is made at
the lowest rate.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from preamp.checks import is_number
from preamp.errors import ConfigError

Warmup = Literal["log", "linear"]


class _Warmup(torch.optim.lr_scheduler.LRScheduler):
    """The progress from a low to a high learning rate, as a function of the number of updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_num_steps: int, warmup_type: Warmup) -> None:
        _check_count("warmup_num_steps", warmup_num_steps)
        if warmup_type not in get_args(Warmup):
            raise ConfigError(f'warmup_type: {warmup_type!r} is unknown. Write "log" or "linear".')
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return only the position in the schedule, as DeepSpeed does: a training may be extended."""
        return {name: getattr(self, name) for name in ("last_epoch", "_step_count", "_last_lr")}

    def _share(self) -> float:
        """Return the progress: from 0 to 1 in the warm-up."""
        iteration = self.last_epoch - 1
        if iteration < 0:
            return 0.0
        if iteration >= self.warmup_num_steps:
            return self._after(iteration)
        if self.warmup_type == "linear":
            return iteration / self.warmup_num_steps
        return 1.0 / math.log(self.warmup_num_steps) * math.log(iteration + 1)

    def _after(self, iteration: int) -> float:
        return 1.0


class WarmupLR(_Warmup):
    """From `warmup_min_lr` to `warmup_max_lr`, and stay there.

    Args:
        optimizer: whose learning rates are set.
        warmup_min_lr: one number, or one for each parameter group.
        warmup_max_lr: likewise; None takes each group's own learning rate.
        warmup_num_steps: updates of the warm-up.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Warmup = "log",
    ) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _each("warmup_min_lr", warmup_min_lr, len(rates))
        self.max_lrs = rates if warmup_max_lr is None else _each("warmup_max_lr", warmup_max_lr, len(rates))
        super().__init__(optimizer, warmup_num_steps, warmup_type)

    def get_lr(self) -> list[float | Tensor]:
        """Return each group's learning rate for the next update."""
        share = self._share()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then linearly down to `warmup_min_lr` at update `total_num_steps`.

    Args:
        optimizer: whose learning rates are set.
        total_num_steps: updates of the whole training.
        warmup_min_lr: as for `WarmupLR`.
        warmup_max_lr: as for `WarmupLR`, but 0.001 if it is not given.
        warmup_num_steps: as for `WarmupLR`.
        warmup_type: as for `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: Warmup = "log",
    ) -> None:
        _check_count("total_num_steps", total_num_steps)
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _after(self, iteration: int) -> float:
        rest = max(1.0, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - iteration) / rest)


class WarmupCosineLR(_Warmup):
    """Up to each group's own learning rate, then along a cosine to a share of it.

    Args:
        optimizer: whose learning rates are set.
        total_num_steps: updates of the whole training.
        warmup_min_ratio: the share of the learning rate that the warm-up begins at.
        warmup_num_steps: updates of the warm-up.
        cos_min_ratio: the share of the learning rate at the end.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: Warmup = "log",
    ) -> None:
        _check_count("total_num_steps", total_num_steps)
        self.total_num_steps, self.cos_min_ratio = total_num_steps, cos_min_ratio
        self.warmup_min_ratio = warmup_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type)

    def get_lr(self) -> list[float | Tensor]:
        """Return each group's learning rate for the next update."""
        share = self._share()
        if 0 < self.last_epoch <= self.warmup_num_steps:
            share = self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        return [float(rate) * share for rate in self.base_lrs]

    def _after(self, iteration: int) -> float:
        rest = max(1, self.total_num_steps - self.warmup_num_steps)
        way = min(1.0, (iteration - self.warmup_num_steps + 1) / rest)
        cosine = (1.0 + math.cos(math.pi * way)) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


SCHEDULES = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count <= 0:
        raise ConfigError(f'{name}: {count!r} is not a whole number above 0. Write "{name}": 1000.')


def _each(name: str, rate: float | list[float], groups: int) -> list[float]:
    """Return a learning rate for each parameter group."""
    rates: Any = [rate] * groups if is_number(rate) else rate
    if not isinstance(rates, list | tuple) or len(rates) != groups or not all(map(is_number, rates)):
        raise ConfigError(
            f"{name}: {rate!r} is neither a number nor one for each of {groups} parameter groups. "
            f'Write "{name}": 0.001.'
        )
    return [float(one) for one in rates]
