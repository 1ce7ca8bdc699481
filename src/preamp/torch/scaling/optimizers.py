"""Inspect arbitrary optimizers: their parameters, and how they step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch

from preamp.arrays.torch import HALF_DTYPES
from preamp.checks import is_number, level_of_caller


class OptimizerLike(Protocol):
    """What a scaler can step: PyTorch's optimizers, and what wraps one."""

    param_groups: list[dict[str, Any]]
    state: Any

    def step(self, *args: Any, **kwargs: Any) -> Any: ...


SMALL_EPS = 2.0**-24  # float16's smallest number above 0; nothing that is larger rounds to 0


def parameters_of(optimizer: OptimizerLike) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_of_torch(optimizer: object) -> bool:
    """Return whether the optimizer is PyTorch's own, not a subclass of it."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def uninitialized_on_skip(optimizer: OptimizerLike) -> bool:
    """Return whether a step that `found_inf` stops would leave memory that nobody wrote in the state.

    The fused SGD's first step with momentum does: its kernel is to fill the new buffers, and does not.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        present = [p for p in group["params"] if p.grad is not None]
        buffers = [optimizer.state.get(p, {}).get("momentum_buffer") for p in present]
        if group["momentum"] != 0 and present and all([buffer is None for buffer in buffers]):
            return True
    return False


def may_reevaluate_closure(optimizer: OptimizerLike) -> bool:
    """Return whether `step` may move parameters and evaluate its closure again after that."""
    return not is_of_torch(optimizer) or isinstance(optimizer, torch.optim.LBFGS)


def warn_of_small_eps(optimizer: OptimizerLike) -> None:
    """Warn of parameter groups whose `eps` is 0 in the dtype of their parameters.

    Adam and its relatives keep squares of gradients in that dtype. In float16 those of gradients below 1.7e-4
    are 0; only `eps` then keeps the update from being a division by 0.
    """
    for number, group in enumerate(optimizer.param_groups):
        eps: Any = group.get("eps")
        computes_wide = is_of_torch(optimizer) and group.get("fused")  # in float32, rounded when stored
        if computes_wide or not (is_number(eps) and 0.0 < eps < SMALL_EPS):
            continue
        for dtype in {parameter.dtype for parameter in group["params"] if parameter.dtype in HALF_DTYPES}:
            if torch.tensor(eps, dtype=dtype).item() == 0.0:
                name = str(dtype).removeprefix("torch.")
                warnings.warn(
                    f"eps={eps!r} of {type(optimizer).__name__}.param_groups[{number}] is 0 in {name}, the "
                    "dtype of its parameters: where squares of gradients are 0 as well, the update divides "
                    "by 0 and the weights become NaN. Write eps=1e-4, or MasterWeights(optimizer) with from "
                    "preamp.torch import MasterWeights.",
                    UserWarning,
                    stacklevel=level_of_caller(),
                )


def _step_takes(kind: Any, name: str) -> bool:
    """Return whether the `step` of a class of optimizers has an argument of this name."""
    try:
        return name in inspect.signature(kind.step).parameters
    except (AttributeError, TypeError, ValueError):  # found elsewhere by a wrapper, or not written in Python
        return False


step_takes: Callable[[Any, str], bool] = lru_cache(_step_takes)


def step_after(
    optimizer: OptimizerLike, clip: Callable[[], None] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Clip and step an optimizer; with a closure, clip after each evaluation."""
    closure = args[0] if args else kwargs.get("closure")
    if clip is None:
        return optimizer.step(*args, **kwargs)
    if not callable(closure):
        clip()
        return optimizer.step(*args, **kwargs)

    def evaluate() -> Any:
        with torch.enable_grad():
            loss = closure()
        clip()
        return loss

    return optimizer.step(evaluate, *args[1:], **{k: v for k, v in kwargs.items() if k != "closure"})
