"""An optimizer's step that can be taken back.

Two places need it: a step that must not read whether it may happen, and a closure that overflows half-way.
This room copies and restores parameters and state. It refuses to know gradients and scales.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from preamp.errors import UsageError

__all__ = ["Snapshot", "prime", "step_where"]

# What the state that an optimizer makes at its first step starts from; everything else starts as it is.
FIRST = {"step": 0.0, "mu_product": 1.0}
PRIMED = "_preamp_primed"


class Snapshot:
    """The parameters and the state of an optimizer at this moment."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parameters = [(p, p.detach().clone()) for p in _parameters(optimizer)]
        self._state = {p: copy.deepcopy(optimizer.state[p]) for p in optimizer.state}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for parameter, before in self._parameters:
            parameter.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


@torch.no_grad()
def step_where(optimizer: Any, finite: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Step an optimizer if a 0-dim boolean tensor is true, without reading it.

    The step is taken and, where it should not have been, every tensor gets its old value back.
    """
    tensors = [*_parameters(optimizer), *_state_tensors(optimizer, finite.device)]
    before = [tensor.detach().clone() for tensor in tensors]
    result = _plain_step(optimizer)(*args, **kwargs)
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(finite, tensor, old))
    return result


@torch.no_grad()
def prime(optimizer: Any) -> None:
    """Let an optimizer make its state, by a step on zeros that moves nothing.

    Raises:
        UsageError: inside `torch.compile`, where this is too late.
    """
    if getattr(optimizer, PRIMED, False) or any(optimizer.state.values()):
        return
    if torch.compiler.is_compiling():
        raise UsageError("this optimizer has not made its state yet. Take one step before torch.compile.")
    saved = [(p, p.detach().clone(), p.grad) for p in _parameters(optimizer)]
    for parameter, _, gradient in saved:
        parameter.zero_()
        parameter.grad = None if gradient is None else torch.zeros_like(gradient)
    _plain_step(optimizer)()
    for parameter, before, gradient in saved:
        parameter.copy_(before)
        parameter.grad = gradient
    for state in optimizer.state.values():
        for name, first in FIRST.items():
            if isinstance(state.get(name), Tensor):
                state[name].fill_(first)
    setattr(optimizer, PRIMED, True)  # plain SGD has no state to tell it by


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_tensors(optimizer: Any, device: torch.device) -> list[Tensor]:
    tensors = []
    for parameter in _parameters(optimizer):
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.device != device:
                kind = type(optimizer).__name__
                raise UsageError(
                    f"{kind} keeps {name!r} on {value.device}, where nothing can depend on gradients on "
                    f"{device} unless they are read. Write {kind}(..., capturable=True) or fused=True."
                )
            tensors.append(value)
    return tensors


def _plain_step(optimizer: Any) -> Callable[[], Any]:
    """Return the step to call: inside `torch.compile` without the wrapper that breaks its graph."""
    if not torch.compiler.is_compiling():
        return optimizer.step  # type: ignore[no-any-return]
    inner = inspect.unwrap(type(optimizer).step)
    return partial(inner, optimizer)
