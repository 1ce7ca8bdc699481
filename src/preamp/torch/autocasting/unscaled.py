"""Warn once when float16 autocast trains without a loss scaler and gradients underflow.

The evidence is in the gradients. Every float16 number is a multiple of 2**-24, so a float32 gradient that
backward computed in float16, from a loss that was not scaled, has multiples of 2**-24 only. One that a scaler
has divided by its scale has smaller parts, and so has one that float32 or bfloat16 computed. Among such
gradients, entries of at most four times 2**-24 have one or two bits left, and beside them are as many that
became 0. The warning is given if these are a tenth of the nonzero entries or more.

docs/check.md has the measurements behind the threshold; with a scaler, in bfloat16 and in float32 the
share was 0 in all of them. Zeros are not counted: gradients of unused weights, of ReLU and of a loss that is
satisfied are 0 as well. So a model whose gradients are all 0 is not warned of, and neither is one whose
gradients were clipped: they are not multiples of 2**-24 any more.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor

from preamp.arrays.torch_compat import (
    HooksAndOneMore,
    has_compiled_step,
    local_part,
    optimizer_hooks,
    outside_of_graphs,
)
from preamp.arrays.torch_devices import is_capturing
from preamp.checks import level_of_caller
from preamp.errors import UnscaledFloat16
from preamp.torch.scaling.optimizers import OptimizerLike, parameters_of
from preamp.torch.scaling.ranks import number_of_ranks

LOOKS = (1, 2, 10, 100, 1000)  # after these float16 regions the next step of an optimizer is looked at
PATIENCE = 256  # regions that it waits for a step
SMALL = 4.0  # times float16's smallest number
SHARE = 0.1  # of the nonzero entries
TENSORS, ROWS, ENTRIES, FEWEST = 16, 64, 4096, 100  # how much is looked at
FLOAT16_SMALLEST = 2.0**-24
PRE_HOOKS = optimizer_hooks._global_optimizer_pre_hooks  # PyTorch's
SCALERS = ("torch.amp.grad_scaler", "preamp.torch.scaling.")


class Watch:
    """Decides when to look: at the next step of an optimizer after some of the float16 regions.

    Attributes:
        is_on: whether there is anything left to look at; False as soon as a scaler is seen at work.
        pre_hooks: what belongs in the place of PyTorch's hooks outside of regions: those, or while it waits
            for a step, one more. In regions the weight cache has hooks there, which call `look_at`.
    """

    __slots__ = ("_regions", "_waited", "is_on", "pre_hooks")

    def __init__(self) -> None:
        self.is_on, self.pre_hooks = True, PRE_HOOKS
        self._regions = self._waited = 0

    def region_left(self) -> None:
        """Look at the next step of an optimizer, if this is a region after which to look.

        To be called when a float16 region has been left, in eager code. Regions are not counted while it
        waits for a step, so that it looks as often where gradients are accumulated over several.
        """
        if not torch.is_grad_enabled():
            return
        if self.pre_hooks is not PRE_HOOKS:
            self._waited += 1
            if self._waited == PATIENCE:  # nothing is trained here, or not by PyTorch's optimizers
                self.stop_looking()
            return
        self._regions += 1
        if self._regions not in LOOKS:
            self.is_on = self._regions < LOOKS[-1]
        elif has_compiled_step():  # which would be compiled once more
            self.is_on = False
        else:
            self.pre_hooks, self._waited = _hooks, 0
            if optimizer_hooks._global_optimizer_pre_hooks is PRE_HOOKS:  # not while a thread is in a region
                optimizer_hooks._global_optimizer_pre_hooks = _hooks

    def look_at(self, optimizer: OptimizerLike) -> None:
        """Warn if it is time to look and gradients underflow that an optimizer is about to step with."""
        if self.pre_hooks is PRE_HOOKS:
            return
        with _examining:  # once, where several threads train
            if self.pre_hooks is _hooks and self.is_on:
                self.stop_looking()
                _examine(optimizer)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look at nothing inside, and count no regions."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def stop_looking(self) -> None:
        """Take the hook away."""
        self.pre_hooks = PRE_HOOKS
        if optimizer_hooks._global_optimizer_pre_hooks is _hooks:
            optimizer_hooks._global_optimizer_pre_hooks = PRE_HOOKS


@outside_of_graphs
def _look(optimizer: OptimizerLike, *_: object) -> None:
    watch.look_at(optimizer)


def _examine(optimizer: OptimizerLike) -> None:
    """Warn if gradients underflow without a scaler."""
    if _in_step_of_scaler():
        watch.is_on = False
        return
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    share = small_share(gradients)
    if share < SHARE:
        return
    watch.is_on = False
    warnings.warn(
        f"float16 autocast is used without a loss scaler, and gradients underflow: {share:.0%} of the "
        f"nonzero entries that {type(optimizer).__name__} steps with are below 2.4e-7, where float16 has two "
        f"bits or less, and smaller ones are 0. Write scaler = GradScaler({gradients[0].device.type!r}), "
        "and in each step scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(); or "
        "autocast(..., dtype=torch.bfloat16), which needs no scaler. To silence this: "
        'warnings.filterwarnings("ignore", category=preamp.errors.UnscaledFloat16).',
        UnscaledFloat16,
        stacklevel=level_of_caller("torch"),
    )


def small_share(gradients: list[Tensor], ranks: int | None = None) -> float:
    """Return the share of small entries among the nonzero entries of gradients that float16 computed.

    Reads a device once, and a sample: at most 16 gradients and 4096 entries of each.

    Args:
        gradients: of any kind; all but dense float32 ones on the device of the first are left out.
        ranks: over which gradients were averaged. [those of the default process group]

    Returns:
        0.0 where nothing can be said: without enough such entries, or if all have the same magnitude.
    """
    unit = FLOAT16_SMALLEST / (number_of_ranks() if ranks is None else ranks)
    found = [local_part(gradient.detach()) for gradient in gradients]
    found = [g for g in found if type(g) is Tensor and g.dtype is torch.float32 and g.numel() >= FEWEST // 2]
    found = [g for g in found if g.layout is torch.strided and g.device == found[0].device and not g.is_meta]
    if not found or is_capturing(found[0]):
        return 0.0
    with torch.no_grad(), torch.autocast(found[0].device.type, enabled=False):
        rows = torch.stack([_counts(g, unit) for g in found[:: -(-len(found) // TENSORS)]]).tolist()
    rows = [row for row in rows if row[0]]
    nonzero, small = sum(row[1] for row in rows), sum(row[2] for row in rows)
    if nonzero < FEWEST or min(row[3] for row in rows) == max(row[4] for row in rows):
        return 0.0
    return float(small / nonzero)


def _counts(gradient: Tensor, unit: float) -> Tensor:
    """Return whether all are multiples of a unit, how many are not 0 and small, the least and the largest."""
    some = gradient[:: max(1, gradient.shape[0] // ROWS)].flatten()
    size = some[:: max(1, some.numel() // ENTRIES)][:ENTRIES].abs()
    multiples, nonzero = size / unit, size > 0.0
    return torch.stack(
        [
            (multiples == multiples.round()).all().float(),
            nonzero.sum().float(),
            (nonzero & (size <= SMALL * FLOAT16_SMALLEST)).sum().float(),
            size.where(nonzero, torch.inf).amin(),
            size.amax(),
        ]
    )


def _in_step_of_scaler() -> bool:
    """Return whether an enabled scaler, PyTorch's or ours, has called the optimizer's step."""
    frame: FrameType | None = sys._getframe(1)
    while frame:
        # Only of a scaler's own frames: what `f_locals` returns keeps the variables of a frame until it ends.
        if frame.f_globals.get("__name__", "").startswith(SCALERS):
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.amp.GradScaler) and owner.is_enabled():
                return True
        frame = frame.f_back
    return False


_hooks = HooksAndOneMore(PRE_HOOKS, _look, compiled=False)
_examining = threading.Lock()
watch = Watch()
