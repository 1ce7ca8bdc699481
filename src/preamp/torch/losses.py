"""The loss of an iteration, for the record: kept as it is, and read when somebody asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Losses"]


class Losses:
    """The sum of the losses on this rank that were scaled since the last update, not scaled themselves.

    That is the loss whose gradients the step applies, where each is scaled once. One loss is kept as it is;
    every further one costs an addition. The sum is not known if one of them is not a
    single number, is a tensor of another class (a DTensor may be read by all ranks together only), or was
    scaled inside a function transform; of a loss in compiled code nothing is known.
    """

    def __init__(self) -> None:
        self._sum: Tensor | float | None = None
        self._is_known = self._is_wanted = True

    def __getstate__(self) -> dict[str, Any]:
        return {"_sum": None, "_is_known": True, "_is_wanted": self._is_wanted}

    def __copy__(self) -> Losses:
        twin = Losses()
        twin.__dict__.update(self.__dict__)
        return twin

    def stop(self) -> None:
        """Keep no loss from now on, where asking for it would be a read of its own."""
        self._is_wanted = False

    def add(self, loss: Any) -> None:
        """Add a loss that is about to be scaled. It is not read."""
        if not self._is_wanted or torch.compiler.is_compiling():
            return
        if type(loss) is not Tensor or loss.numel() != 1 or loss.is_complex() or _is_wrapped(loss):
            self._is_known = False
            return
        number = loss.detach() if loss.requires_grad else loss  # keeps no graph alive, and copies nothing
        if loss._is_view():
            number = number.clone()  # or all of the tensor that it is a part of would be kept
        self._sum = number if self._sum is None else _total(self._sum, number)

    def so_far(self) -> Tensor | float | None:
        """Return the sum, unread; None if it is not known."""
        return self._sum if self._is_known else None

    def read(self) -> None:
        """Read the sum now, such as beside a flag that the host waits for anyway."""
        if isinstance(self._sum, Tensor):
            self._sum = float(self._sum)

    def take(self) -> Tensor | float | None:
        """Return the sum, unread, and begin with the next iteration."""
        total = self.so_far()
        self._sum, self._is_known = None, True
        return total


@torch.no_grad()
def _total(total: Tensor | float, loss: Tensor) -> Tensor:
    """Return a sum in float32 at least."""
    if not isinstance(total, Tensor):
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) + total
    wide = torch.promote_types(total.dtype, torch.float32)
    return total.view(()).to(wide) + loss.view(()).to(total.device, non_blocking=True)


def _is_wrapped(loss: Tensor) -> bool:
    """Return whether a tensor is one of `torch.func`, which must not leave the function it belongs to."""
    wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
    return wrapped is not None and bool(wrapped(loss))
