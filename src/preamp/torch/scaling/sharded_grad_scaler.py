"""The scaler for the first version of FSDP, under PyTorch's name and argument order."""

from __future__ import annotations

from typing import Any

from preamp.torch.scaling.grad_scaler import GradScaler
from preamp.torch.scaling.ranks import WORLD


class ShardedGradScaler(GradScaler):
    """`GradScaler` under the name and argument order of the one for FSDP's first version.

    Ranks agree on every step, fused or not, and the scale stays within the policy's bounds. A scaled
    float16 loss is float32.

    Args:
        device: as for `GradScaler`.
        init_scale: as for `GradScaler`.
        backoff_factor: as for `GradScaler`, where it comes after `growth_factor`.
        growth_factor: as for `GradScaler`.
        growth_interval: as for `GradScaler`.
        enabled: as for `GradScaler`.
        process_group: the ranks that hold shards of one model; None for all ranks.
        **options: the further arguments of `GradScaler`.
    """

    every_rank_scales = True  # each has the whole model

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        self.process_group = process_group
        group = WORLD if process_group is None else process_group
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            process_group=group,
            **options,
        )
