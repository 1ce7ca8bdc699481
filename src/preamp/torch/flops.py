"""The floating-point operations of products."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from preamp.arrays.torch_compat import DispatchMode, OpOverload

aten = torch.ops.aten
SAME_WORK = {aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention}


def flops_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of a call; 0 unless it is a product."""
    formula = flop_registry.get(SAME_WORK.get(func.overloadpacket, func.overloadpacket))
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


class FlopCounter(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of products while it is entered.

    Attributes:
        flops: their number so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, result)
        return result
