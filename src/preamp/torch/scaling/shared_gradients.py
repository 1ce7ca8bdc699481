"""Gradients that several optimizers share, so that each is divided by the scale once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from preamp.arrays.torch import Gradients, multiply_
from preamp.torch.scaling.optimizers import parameters_of
from preamp.torch.scaling.outcome import Outcome


class AlreadyUnscaled:
    """Which gradients were unscaled in this iteration and not written to since.

    A scaler that knows only one optimizer remembers nothing, to save time. One that joins later and shares
    parameters takes its first step as in PyTorch. Autograd's version counter tells who wrote; writes
    through `.data` escape it.
    """

    def __init__(self) -> None:
        self._optimizers: set[int] = set()
        # By the parameter's id: the gradient, its version and, if a kernel decided alone, on what.
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Outcome | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizers": set(), "_seen": {}}  # ids mean nothing elsewhere

    def mark(self, optimizer: Any, decided: Outcome | None = None) -> None:
        """Remember the gradients of an optimizer, unless it is the only one.

        Args:
            optimizer: their owner.
            decided: what a fused step on the device heeded, which leaves gradients as they are if it skips.
        """
        alone = self._optimizers == {id(optimizer)} and not self._seen
        if torch.compiler.is_compiling() or alone:
            return
        self._optimizers.add(id(optimizer))
        for p in parameters_of(optimizer):
            if p.grad is not None:
                self._seen[id(p)] = (weakref.ref(p.grad), p.grad._version, decided)

    def among(self, gradients: Gradients) -> set[int]:
        """Return the ids of the parameters whose gradients need no unscaling any more."""
        if torch.compiler.is_compiling() or not self._seen:
            return set()
        return {id(p) for p in gradients.parameters if self._is_as_it_was(p)}

    def unscale_rest_(self, parameter: Tensor, tensor: Tensor) -> bool:
        """Return whether a gradient needs no unscaling any more, after what a skipped step left to do."""
        if not self._is_as_it_was(parameter):
            return False
        _, _, decided = self._seen[id(parameter)]
        if decided is not None:
            finite, divisor = torch.as_tensor(decided.finite), torch.as_tensor(decided.divisor)
            multiply_([tensor], torch.where(finite, 1.0, divisor.reciprocal()))
        return True

    def forget(self) -> None:
        """Begin a new iteration."""
        self._seen.clear()

    def _is_as_it_was(self, parameter: Tensor) -> bool:
        if id(parameter) not in self._seen or parameter.grad is None:
            return False
        gradient, version, _ = self._seen[id(parameter)]
        return gradient() is parameter.grad and version == parameter.grad._version
