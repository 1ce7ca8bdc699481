"""Gradients that several optimizers share, so that each is divided by the scale once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from preamp.torch.gradients import Gradients

__all__ = ["AlreadyUnscaled"]


class AlreadyUnscaled:
    """Which gradients were unscaled in this iteration and not written to since.

    A scaler that knows only one optimizer remembers nothing.
    """

    def __init__(self) -> None:
        self._optimizers: set[int] = set()
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by the parameter's id

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizers": set(), "_seen": {}}  # ids mean nothing elsewhere

    def mark(self, optimizer: Any) -> None:
        """Remember the gradients of an optimizer, unless it is the only one."""
        if torch.compiler.is_compiling() or self._optimizers == {id(optimizer)}:
            return
        self._optimizers.add(id(optimizer))
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._seen[id(p)] = (weakref.ref(p.grad), p.grad._version)

    def among(self, gradients: Gradients) -> set[int]:
        """Return the ids of the parameters whose gradients need no unscaling any more."""
        if torch.compiler.is_compiling() or not self._seen:
            return set()
        return {id(p) for p in gradients.parameters if self._is_as_it_was(p)}

    def forget(self) -> None:
        """Begin a new iteration."""
        self._seen.clear()

    def _is_as_it_was(self, parameter: Tensor) -> bool:
        if id(parameter) not in self._seen or parameter.grad is None:
            return False
        gradient, version = self._seen[id(parameter)]
        return gradient() is parameter.grad and version == parameter.grad._version
