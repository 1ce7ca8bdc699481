"""Each gradient's norm and peak, taken in backward when autograd has just written it to the cache.

A gradient that anyone wrote to afterwards is measured again at the step.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preamp.arrays.torch import Gradients, Stamp, largest, square
from preamp.arrays.torch_devices import widest
from preamp.errors import UsageError
from preamp.torch.scaling.optimizers import OptimizerLike, parameters_of
from preamp.torch.scaling.ranks import number_of_ranks


class _Norm(NamedTuple):
    stamp: Stamp
    square: Tensor
    peak: Tensor | None


class BackwardNorms:
    """Hooks on the parameters of one optimizer, until `remove`. What `GradScaler.watch` returns.

    Args:
        optimizer: whose gradients to measure.
        peaks: whether peaks are wanted too.

    Raises:
        UsageError: for parameters whose gradients are final only after communication.
    """

    def __init__(self, optimizer: OptimizerLike, *, peaks: bool = False) -> None:
        parameters: list[Any] = [p for p in parameters_of(optimizer) if p.requires_grad]
        _refuse_what_comes_later(parameters)
        self._optimizer, self._peaks = weakref.ref(optimizer), peaks
        self._norms: dict[int, _Norm] = {}  # by the parameter's id
        self._hooks = [p.register_post_accumulate_grad_hook(self._measure) for p in parameters]

    def covers(self, optimizer: OptimizerLike) -> bool:
        """Return whether this is the optimizer, and nobody has called `remove`."""
        return bool(self._hooks) and self._optimizer() is optimizer

    def remove(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._norms.clear()

    def squares(self, gradients: Gradients) -> Tensor:
        """Return the squared norm of each gradient, of shape [gradients], unread."""
        pairs = zip(map(self._unwritten, gradients.parameters), gradients.tensors, strict=True)
        squares = [square(tensor) if norm is None else norm.square for norm, tensor in pairs]
        return torch.stack([one.to(squares[0].device, squares[0].dtype) for one in squares])

    def peaks(self, gradients: Gradients) -> Tensor | None:
        """Return the largest magnitude in each gradient, of shape [gradients], unread; None if not wanted."""
        if not self._peaks:
            return None
        pairs = zip(map(self._unwritten, gradients.parameters), gradients.tensors, strict=True)
        peaks = [largest([t])[0] if norm is None or norm.peak is None else norm.peak for norm, t in pairs]
        first = peaks[0].device
        wide = widest(first) if any(one.dtype is torch.float64 for one in peaks) else torch.float32
        return torch.stack([one.to(first, wide) for one in peaks])

    def _measure(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and type(gradient) is Tensor and gradient.layout is torch.strided:
            detached = gradient.detach()
            dense = torch.view_as_real(detached) if gradient.is_complex() else detached
            peak = largest([dense])[0] if self._peaks else None
            self._norms[id(parameter)] = _Norm(Stamp.of(gradient), square(dense), peak)

    def _unwritten(self, parameter: Tensor) -> _Norm | None:
        """Return what was measured of a parameter's gradient, unless it was replaced or written to since."""
        norm = self._norms.get(id(parameter))
        return norm if norm is not None and norm.stamp.fits(parameter.grad) else None


def _refuse_what_comes_later(parameters: list[Tensor]) -> None:
    reason = None
    if any(hasattr(p, "device_mesh") for p in parameters):
        reason = "its parameters are DTensors"
    elif any(hasattr(p, "_is_flat_param") or hasattr(p, "_fsdp_flattened") for p in parameters):
        reason = "its parameters are managed by FSDP"
    elif number_of_ranks() > 1:
        reason = f"{number_of_ranks()} ranks train together"
    if reason:
        raise UsageError(
            f"this optimizer cannot be watched: {reason}, and gradients are final only after communication. "
            "Write scaler.step(optimizer, max_norm=...) without watch: one pass reads them at the step."
        )
