"""Gradients that several optimizers share, so that each is divided by the scale once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch import Gradients, Stamp, multiply_
from preamp.torch.scaling.measure import OptimizerState
from preamp.torch.scaling.optimizers import OptimizerLike, parameters_of


class AlreadyUnscaled:
    """Which gradients were unscaled in this iteration and not written to since.

    A scaler with only one optimizer remembers nothing, to save time. One that joins later and shares
    parameters takes its first step as in PyTorch.

    Attributes:
        only_owner: the id of the only optimizer so far, of which nothing is remembered; None if there are
            more, or none.
        unscaled: what is remembered, by the parameter's id.
    """

    def __init__(self) -> None:
        self.only_owner: int | None = None
        self._owners: set[int] = set()
        # By the parameter's id: the gradient's stamp and, where a fused kernel decided, by what.
        self.unscaled: dict[int, tuple[Stamp, OptimizerState | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"only_owner": None, "_owners": set(), "unscaled": {}}  # ids mean nothing elsewhere

    def mark(self, optimizer: OptimizerLike, decided: OptimizerState | None = None) -> None:
        """Remember the gradients of an optimizer, unless it is the only one.

        Args:
            optimizer: their owner.
            decided: what a fused step on the device was given: it leaves gradients as they are if it skips.
        """
        if torch.compiler.is_compiling() or (self.only_owner == id(optimizer) and not self.unscaled):
            return
        self._owners.add(id(optimizer))
        self.only_owner = id(optimizer) if len(self._owners) == 1 else None
        for p in parameters_of(optimizer):
            if p.grad is not None:
                self.unscaled[id(p)] = (Stamp.of(p.grad), decided)

    def among(self, gradients: Gradients) -> set[int]:
        """Return the ids of the parameters whose gradients need no unscaling any more."""
        if torch.compiler.is_compiling() or not self.unscaled:
            return set()
        return {id(p) for p in gradients.parameters if self._is_unwritten(p)}

    def unscale_rest_(self, parameter: Tensor, tensor: Tensor) -> bool:
        """Return whether a gradient needs no unscaling any more, after what a skipped step left to do."""
        if not self._is_unwritten(parameter):
            return False
        _, decided = self.unscaled[id(parameter)]
        if decided is not None:
            finite, divisor = torch.as_tensor(decided.taken), torch.as_tensor(decided.divisor)
            multiply_([tensor], torch.where(finite, 1.0, divisor.reciprocal()))
        return True

    def forget(self) -> None:
        """Begin a new iteration."""
        self.unscaled.clear()

    def _is_unwritten(self, parameter: Tensor) -> bool:
        return id(parameter) in self.unscaled and self.unscaled[id(parameter)][0].fits(parameter.grad)
