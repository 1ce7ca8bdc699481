"""Each gradient's norm and peak, taken when autograd has just written it and it still lies in the cache.

A gradient that anyone wrote to afterwards is measured again at the step; autograd's version counter tells,
which writes through `.data` escape. It refuses to watch gradients that are final only after communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preamp.arrays.torch import Gradients, largest, square
from preamp.arrays.torch_devices import widest
from preamp.errors import UsageError
from preamp.torch.scaling.optimizers import parameters_of
from preamp.torch.scaling.ranks import number_of_ranks


class _Seen(NamedTuple):
    gradient: Callable[[], Tensor | None]
    version: int
    square: Tensor
    peak: Tensor | None


class Watch:
    """Hooks on the parameters of one optimizer, until `remove`.

    Args:
        optimizer: whose parameters to watch.
        peaks: whether peaks are wanted too.

    Raises:
        UsageError: for parameters whose gradients are final only after communication.
    """

    def __init__(self, optimizer: Any, *, peaks: bool = False) -> None:
        parameters: list[Any] = [p for p in parameters_of(optimizer) if p.requires_grad]
        _refuse_what_comes_later(parameters)
        self._optimizer, self._peaks = weakref.ref(optimizer), peaks
        self._seen: dict[int, _Seen] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._measure) for p in parameters]

    def covers(self, optimizer: Any) -> bool:
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
        pairs = zip(map(self._as_it_was, gradients.parameters), gradients.tensors, strict=True)
        squares = [square(tensor) if seen is None else seen.square for seen, tensor in pairs]
        return torch.stack([one.to(squares[0].device, squares[0].dtype) for one in squares])

    def peaks(self, gradients: Gradients) -> Tensor | None:
        """Return the largest magnitude in each gradient, of shape [gradients], unread; None if not wanted."""
        if not self._peaks:
            return None
        pairs = zip(map(self._as_it_was, gradients.parameters), gradients.tensors, strict=True)
        peaks = [largest([t])[0] if seen is None or seen.peak is None else seen.peak for seen, t in pairs]
        first = peaks[0].device
        wide = widest(first) if any(one.dtype is torch.float64 for one in peaks) else torch.float32
        return torch.stack([one.to(first, wide) for one in peaks])

    def _measure(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and type(gradient) is Tensor and gradient.layout is torch.strided:
            detached = gradient.detach()
            dense = torch.view_as_real(detached) if gradient.is_complex() else detached
            peak = largest([dense])[0] if self._peaks else None
            self._seen[id(parameter)] = _Seen(weakref.ref(gradient), gradient._version, square(dense), peak)

    def _as_it_was(self, parameter: Tensor) -> _Seen | None:
        """Return what was seen of a parameter's gradient, unless it is another one now."""
        seen, gradient = self._seen.get(id(parameter)), parameter.grad
        if seen is None or gradient is None or seen.gradient() is not gradient:
            return None
        return seen if seen.version == gradient._version else None


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
