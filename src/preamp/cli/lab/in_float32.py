"""Runs a user's step of PyTorch in float32, although the program itself asks for low precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from preamp.torch.blaming.recorder import source_line

LOW = (torch.float16, torch.bfloat16)


class InFloat32(TorchFunctionMode):
    """Gives float32 wherever the program asks for float16 or bfloat16, as by `half()` and `dtype=`.

    Attributes:
        lines: where it asked, such as "train.py:41".
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.half, Tensor.bfloat16):
            self.lines[source_line()] = None
            return args[0].float(**kwargs)
        if func is not Tensor.view and any(_is_low(value) for value in (*args, *kwargs.values())):
            self.lines[source_line()] = None
            args = tuple(torch.float32 if _is_low(value) else value for value in args)
            kwargs = {name: torch.float32 if _is_low(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def widen(model: torch.nn.Module | None) -> str:
    """Make weights and buffers in low precision float32, in place; return the dtype that the first had.

    Optimizers and references to a weight keep it, because it stays the same object.
    """
    found = ""
    for tensor in [] if model is None else [*model.parameters(), *model.buffers()]:
        if tensor.dtype in LOW:
            found = found or str(tensor.dtype).removeprefix("torch.")
            tensor.data = tensor.data.float()
    return found


def _is_low(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in LOW
