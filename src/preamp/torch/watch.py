"""Each gradient's norm, taken when autograd has just written it and it still lies in the cache.

A gradient that anyone wrote to afterwards is measured again at the step; autograd's version counter tells,
which writes through `.data` escape. It refuses to watch gradients that are final only after communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preamp.errors import UsageError
from preamp.torch.agreement import number_of_ranks
from preamp.torch.gradients import Gradients, square
from preamp.torch.optimizers import parameters_of

__all__ = ["Watch"]


class _Seen(NamedTuple):
    gradient: Callable[[], Tensor | None]
    version: int
    square: Tensor


class Watch:
    """Hooks on the parameters of one optimizer, until `remove`.

    Raises:
        UsageError: for parameters whose gradients are final only after communication.
    """

    def __init__(self, optimizer: Any) -> None:
        parameters: list[Any] = [p for p in parameters_of(optimizer) if p.requires_grad]
        _refuse_what_comes_later(parameters)
        self._optimizer = weakref.ref(optimizer)
        self._seen: dict[int, _Seen] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._measure) for p in parameters]

    def sees(self, optimizer: Any) -> bool:
        """Return whether this is the optimizer, and nobody has called `remove`."""
        return bool(self._hooks) and self._optimizer() is optimizer

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen.clear()

    def squares(self, gradients: Gradients) -> Tensor:
        """Return the squared norm of each gradient, of shape [gradients], unread."""
        pairs = zip(gradients.parameters, gradients.tensors, strict=True)
        squares = [self._square(parameter, tensor) for parameter, tensor in pairs]
        return torch.stack([one.to(squares[0].device, squares[0].dtype) for one in squares])

    def _measure(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and type(gradient) is Tensor and gradient.layout is torch.strided:
            detached = gradient.detach()
            dense = torch.view_as_real(detached) if gradient.is_complex() else detached
            self._seen[id(parameter)] = _Seen(weakref.ref(gradient), gradient._version, square(dense))

    def _square(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        seen, gradient = self._seen.get(id(parameter)), parameter.grad
        if seen is None or gradient is None or seen.gradient() is not gradient:
            return square(tensor)
        return seen.square if seen.version == gradient._version else square(tensor)


def _refuse_what_comes_later(parameters: list[Tensor]) -> None:
    reason = None
    if any(hasattr(p, "device_mesh") for p in parameters):
        reason = "its parameters are DTensors"
    elif any(hasattr(p, "_is_flat_param") or hasattr(p, "_fsdp_flattened") for p in parameters):
        reason = "its parameters belong to FSDP"
    elif number_of_ranks() > 1:
        reason = f"{number_of_ranks()} ranks train together"
    if reason:
        raise UsageError(
            f"this optimizer cannot be watched: {reason}, and gradients are final only after communication. "
            "Write scaler.step(optimizer, max_norm=...) without watch: one pass reads them at the step."
        )
