"""The exponential moving average of weights, on multi-tensor operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch_compat import foreach_copy_, foreach_lerp_
from preamp.errors import UsageError


class Averages:
    """Averages of some parameters; the first update copies them.

    Args:
        momentum: how much of the old average stays: new = momentum * old + (1 - momentum) * value.

    Attributes:
        values: the averages, empty before the first update.
    """

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.values: list[Tensor] = []

    def load(self, saved: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Resume from a checkpoint, on the parameters' devices."""
        pairs = zip(saved, parameters, strict=False)
        self.values = [value.to(parameter.device, copy=True) for value, parameter in pairs]

    @torch.no_grad()
    def update(self, parameters: Sequence[Tensor]) -> None:
        """Take the present values in."""
        for late in parameters[len(self.values) :]:
            self.values.append(late.detach().clone())
        foreach_lerp_(_here(self.values), _here(parameters), 1.0 - self.momentum)

    @torch.no_grad()
    def overwrite(self, parameters: Sequence[Tensor]) -> None:
        """Write the averages into the parameters."""
        if self.values:
            foreach_copy_(_here(parameters[: len(self.values)]), _here(self.values))
            torch.clear_autocast_cache()  # casts of what was there before

    @contextmanager
    def swapped_in(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Put the averages in the parameters' place, and the parameters back at the end.

        Raises:
            UsageError: at the end, if other code has written to the parameters. They are put back.
        """
        before = [parameter.detach().clone() for parameter in parameters]
        self.overwrite(parameters)
        shown = [*self.values, *before[len(self.values) :]]
        versions = [local._version for local in _here(parameters)]
        try:
            yield
            trios = zip(_here(parameters), _here(shown), versions, strict=True)
            written = any(
                now._version != version and not torch.equal(now, one) for now, one, version in trios
            )
        finally:
            with torch.no_grad():
                foreach_copy_(_here(parameters), _here(before))
                torch.clear_autocast_cache()
        if written:
            raise UsageError(
                "weights were written inside `with optimizer.averaged():`, as load_state_dict() does. That "
                "was undone: the weights are again those from before the block. Write it after the block."
            )


def _here(tensors: Sequence[Any]) -> list[Tensor]:
    """Return what this rank has of some tensors: PyTorch copies many DTensors only one by one."""
    return [t.to_local() if hasattr(t, "device_mesh") else t for t in tensors]
