"""The loss of an iteration, for the record: kept as it is, and read when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch_compat import is_of_transform


@dataclass(frozen=True, slots=True)
class UnreadLoss:
    """A loss that is still on its device, in the tensor that the user has as well.

    Attributes:
        tensor: of one element.
        version: how often the tensor had been written to when the loss was scaled; None for an inference
            tensor, which does not count.
    """

    tensor: Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> UnreadLoss:
        """Return the loss that a tensor holds now."""
        return cls(tensor, None if tensor.is_inference() else tensor._version)

    def is_unchanged(self) -> bool:
        """Return whether nobody has written to the tensor since, as `loss.mul_(0)` does.

        PyTorch does not count what is written through `.data` or NumPy, or by a collective.
        """
        return self.version is None or self.tensor._version == self.version

    def read(self) -> float | None:
        """Read the loss; None if the tensor was written to since."""
        return float(self.tensor) if self.is_unchanged() else None


class Losses:
    """The sum of the losses on this rank that were scaled since the last update, not scaled themselves.

    That is the loss whose gradients the step applies, where each is scaled once. One loss is kept as it is;
    every further one costs an addition. Of a closure that is evaluated several times, the last evaluation
    counts. The sum is not known if one of the losses is not a
    single number, is a tensor of another class (a DTensor may be read by all ranks together only), was
    scaled inside a function transform, or was changed in place before it was read; of a loss in compiled
    code nothing is known.
    """

    def __init__(self) -> None:
        self._sum: UnreadLoss | float | None = None
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
        if type(loss) is not Tensor or loss.numel() != 1 or loss.is_complex() or is_of_transform(loss):
            self._is_known = False
            return
        if isinstance(self._sum, UnreadLoss) and not self._sum.is_unchanged():
            self._is_known = False
        number = loss.detach() if loss.requires_grad else loss  # keeps no graph alive, and copies nothing
        if loss._is_view():
            number = number.clone()  # or all of the tensor that it is a part of would be kept
        self._sum = UnreadLoss.of(number if self._sum is None else _total(self._sum, number))

    def so_far(self) -> UnreadLoss | float | None:
        """Return the sum, unread; None if it is not known."""
        return self._sum if self._is_known else None

    def read(self) -> None:
        """Read the sum now, such as beside a flag that the host waits for anyway."""
        if isinstance(self._sum, UnreadLoss):
            self._sum = self._sum.read()
            self._is_known = self._is_known and self._sum is not None

    def take(self) -> UnreadLoss | float | None:
        """Return the sum, unread, and begin with the next iteration."""
        total = self.so_far()
        self._sum, self._is_known = None, True
        return total


@torch.no_grad()
def _total(total: UnreadLoss | float, loss: Tensor) -> Tensor:
    """Return a sum in float32 at least."""
    if not isinstance(total, UnreadLoss):
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) + total
    before = total.tensor
    wide = torch.promote_types(before.dtype, torch.float32)
    return before.view(()).to(wide) + loss.view(()).to(before.device, non_blocking=True)
