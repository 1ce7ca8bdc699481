"""An optimizer's step that can be taken back.

Two places need it: a step that must not read whether it may happen, and a closure that overflows half-way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from preamp.errors import UsageError
from preamp.torch.scaling.optimizers import OptimizerLike, is_of_torch, parameters_of

# Initial state values that a step on zeros leaves wrong.
FIRST = {"step": 0.0, "mu_product": 1.0}
STATELESS = "_preamp_stateless"  # on an optimizer: the numbers of the groups that make no state


class Snapshot:
    """The parameters and the state of an optimizer at this moment."""

    def __init__(self, optimizer: OptimizerLike) -> None:
        self._optimizer = optimizer
        self._parameters = [(p, p.detach().clone()) for p in parameters_of(optimizer)]
        self._state = {p: copy.deepcopy(optimizer.state[p]) for p in optimizer.state}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for parameter, before in self._parameters:
            parameter.copy_(before)
        torch.clear_autocast_cache()  # a closure may have cast the weights of a step that raised
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


@torch.no_grad()
def step_where(optimizer: OptimizerLike, finite: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Step an optimizer if a 0-dim boolean tensor is true, without reading it.

    The step is taken and, where it should not have been, every tensor gets its old value back.
    """
    tensors = [*parameters_of(optimizer), *_state_tensors(optimizer, finite.device)]
    before = [tensor.detach().clone() for tensor in tensors]
    stepped = False
    try:
        result = _plain_step(optimizer)(*args, **kwargs)
        stepped = True
    finally:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(finite, tensor, old) if stepped else old)
    return result


@torch.no_grad()
def init_optimizer_state(optimizer: OptimizerLike, *, fused: bool) -> None:
    """Have an optimizer make the state that it lacks, by a step on zeros that moves nothing.

    Args:
        optimizer: any optimizer.
        fused: whether it is one that is given `found_inf`.

    Raises:
        UsageError: inside `torch.compile`, where this is too late, and for an optimizer whose first step is
            of another kind than the others.
    """
    late = _without_state(optimizer)
    if not late:
        return
    _refuse_unknown_state(optimizer, fused=fused)
    _step_on_zeros(optimizer, late)
    for parameter, group in late.items():
        state = optimizer.state.get(parameter, {})
        for name, first in {**FIRST, "eta": group["lr"]}.items():
            if isinstance(state.get(name), Tensor):
                state[name].fill_(first)
    rest = _without_state(optimizer).values()  # plain SGD makes none
    groups = enumerate(optimizer.param_groups)
    setattr(optimizer, STATELESS, [n for n, group in groups if any(group is one for one in rest)])


def _refuse_unknown_state(optimizer: OptimizerLike, *, fused: bool) -> None:
    if torch.compiler.is_compiling():
        raise UsageError("this optimizer has not made its state yet. Take one step before torch.compile.")
    if not is_of_torch(optimizer) and not fused:
        kind = type(optimizer).__name__
        raise UsageError(
            f"the initial state of {kind} is not known, so its first step cannot be undone unless a flag is "
            "read. Write GradScaler(...) without capturable."
        )
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        raise UsageError(
            "SGD's first step applies no dampening, and which step that is depends on a flag that is not "
            "read. Write dampening=0, or GradScaler(...) without capturable."
        )


def _step_on_zeros(optimizer: OptimizerLike, late: dict[Tensor, Any]) -> None:
    """Step on parameters and gradients of zero, and put both back."""
    gradients = [(p, p.grad) for p in parameters_of(optimizer)]
    before = {p: p.detach().clone() for p in late}
    for parameter, gradient in gradients:
        parameter.grad = torch.zeros_like(gradient) if gradient is not None and parameter in late else None
    for parameter in late:
        parameter.zero_()
    try:
        _inner_step(optimizer)()
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for parameter in late:
            parameter.copy_(before[parameter])


def _without_state(optimizer: OptimizerLike) -> dict[Tensor, Any]:
    """Return the parameters that have a gradient and lack a state, each with its group."""
    stateless = getattr(optimizer, STATELESS, ())
    return {
        parameter: group
        for number, group in enumerate(optimizer.param_groups)
        if number not in stateless
        for parameter in group["params"]
        if parameter.grad is not None and not optimizer.state.get(parameter)
    }


def _state_tensors(optimizer: OptimizerLike, device: torch.device) -> list[Tensor]:
    tensors = []
    for parameter in parameters_of(optimizer):
        for name, value in optimizer.state.get(parameter, {}).items():
            kind = type(optimizer).__name__
            if isinstance(value, (int, float)):
                raise UsageError(
                    f"{kind} keeps {name!r} as a Python number, which cannot depend on gradients unless they "
                    "are read. Write GradScaler(...) without capturable."
                )
            if not isinstance(value, Tensor):
                continue
            if value.device != device:
                raise UsageError(
                    f"{kind} keeps {name!r} on {value.device}, where nothing can depend on gradients on "
                    f"{device} unless they are read. Write {kind}(..., capturable=True) or fused=True."
                )
            tensors.append(value)
    return tensors


def _plain_step(optimizer: OptimizerLike) -> Callable[[], Any]:
    """Return the step to call: inside `torch.compile` without the wrapper that breaks its graph."""
    return _inner_step(optimizer) if torch.compiler.is_compiling() else optimizer.step


def _inner_step(optimizer: OptimizerLike) -> Callable[[], Any]:
    """Return the step without what is wrapped around it: hooks, profiling, a graph break."""
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__"):  # as inspect.unwrap, which the compiler of 2.6 cannot trace
        step = step.__wrapped__
    return partial(step, optimizer)
