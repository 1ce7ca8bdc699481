"""One optimizer's step: on the host, on the device, or with a closure.

This room owns the way from gradients to an optimizer that steps or does not. It refuses to know what comes of
the scale, and when a user may call what: that is `scaler`'s.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from preamp.errors import UsageError
from preamp.torch import gradients as arithmetic
from preamp.torch.culprits import culprits
from preamp.torch.gradients import Gradients, gather
from preamp.torch.guarded import Snapshot, prime, step_where
from preamp.torch.loss_scale import LossScale
from preamp.torch.optimizers import evaluates_often, is_fused, is_of_torch, preset
from preamp.torch.outcome import Outcome
from preamp.torch.readings import Readings
from preamp.torch.shared import AlreadyUnscaled
from preamp.trace import Step

__all__ = ["Clip", "Ledger", "Stepping", "fresh", "no_flag"]

Ledger: TypeAlias = dict[str, Any]  # PyTorch's: "stage" and "found_inf_per_device"; ours: "outcome"


class Clip(NamedTuple):
    """How `step` clips; None does not."""

    max_norm: float | None = None
    max_value: float | None = None


class _Overflow(Exception):  # a signal, not an error: it leaves a closure and goes no further
    """A closure's gradients were not finite."""


class Stepping(torch.amp.GradScaler):
    """What a scaler does with one optimizer."""

    _loss_scale: LossScale
    _readings: Readings
    _capturable: bool
    _gives_up: bool
    on_step: Callable[[Step], object] | None
    _per_optimizer_states: defaultdict[int, Ledger]

    def __init__(self) -> None:  # not the one of PyTorch: our state lives elsewhere
        self._loss_factor = 1.0  # a constant in every loss, besides the scale
        self._scalings = 0
        self._already = AlreadyUnscaled()
        self._order: dict[int, int] | None = None  # in which backward reaches parameters, by their id

    @abstractmethod
    def _require_scale(self, caller: str) -> Tensor:
        """Return the scale as a tensor, or raise PyTorch's error."""

    @abstractmethod
    def _tell(self, outcome: Outcome) -> None:
        """Make an optimizer's outcome the latest step."""

    def _step_on_host(self, optimizer: Any, ledger: Ledger, clip: Clip, args: Any, kwargs: Any) -> Any:
        """Read one flag and decide here: on a CPU, and wherever no fused optimizer decides by itself."""
        fused = is_fused(optimizer)
        gradients, divisor = self._settle(optimizer, ledger, clip, together=fused)
        if ledger["outcome"].finite and fused:
            where = self._device_of_scale()
            optimizer.grad_scale = None if divisor == 1.0 else torch.full((), divisor, device=where)
            optimizer.found_inf = None if is_of_torch(optimizer) else torch.zeros((), device=where)
        elif divisor != 1.0:
            arithmetic.multiply_(gradients.tensors, 1.0 / divisor)
        try:
            return self._maybe_opt_step(optimizer, ledger, *args, **kwargs)
        finally:
            self._stepped(optimizer, ledger)

    def _settle(
        self, optimizer: Any, ledger: Ledger, clip: Clip, *, together: bool
    ) -> tuple[Gradients, float]:
        """Check the gradients; return them and the number they still have to be divided by.

        Args:
            optimizer: their owner.
            ledger: what is known of it in this iteration. The outcome is noted there.
            clip: how to clip.
            together: whether one division can unscale and clip. If not, PyTorch's kernel unscales.
        """
        self._loss_scale.to_host()
        self._loss_scale.adopt()
        together = together or clip != Clip() or self._readings.watches(optimizer)
        if ledger["stage"] is OptState.READY and not together:
            self.unscale_(optimizer)
        gradients = gather(optimizer) if together else Gradients([], [])
        ready = self._is_ready(optimizer, ledger, gradients)

        scale = self._loss_scale.state.scale
        divisor = (scale * self._loss_factor if ready else 1.0) * float(preset(optimizer))
        finite, norm = True, None
        if not ready:
            finite = not any([flag.item() for flag in ledger["found_inf_per_device"].values()])
        if ready or clip.max_norm is not None:
            watched = self._readings.watches(optimizer)
            measure = partial(self._readings.on_host, norm=watched or clip.max_norm is not None)
            finite, norm = measure(optimizer, gradients, divisor, finite=finite)
        if not finite:
            seen = gradients if together else gather(optimizer)
            named = self._culprits(optimizer, seen.parameters, seen.peaks())
            ledger["outcome"] = Outcome(scale, False, culprits=lambda: named)
            return gradients, divisor
        ledger["outcome"] = Outcome(scale, True, norm, divisor)
        if clip.max_value is not None:
            arithmetic.clamp_(gradients.tensors, clip.max_value * divisor)
            if clip.max_norm is not None:
                norm = measure(None, gradients, divisor)[1]
        if clip.max_norm is not None and norm is not None:
            divisor = max(divisor, norm / clip.max_norm)
        return gradients, divisor

    def _step_on_device(self, optimizer: Any, ledger: Ledger, clip: Clip, args: Any, kwargs: Any) -> Any:
        """Read nothing: what is seen goes to the optimizer and to the policy on the device."""
        self._loss_scale.to_device()
        self._loss_scale.adopt()
        gradients = gather(optimizer)
        ready = self._is_ready(optimizer, ledger, gradients)

        scale = self._require_scale("step").clone()
        constant = preset(optimizer) * (self._loss_factor if ready else 1.0)
        divisor = scale if ready else torch.ones_like(scale)
        if isinstance(constant, Tensor) or constant != 1.0:
            divisor = divisor * constant
        measure = partial(self._readings.on_device, norm=clip.max_norm is not None)
        finite, norm, sizes = measure(optimizer, gradients, divisor)
        if not ready:
            finite = finite & no_flag(ledger, scale.device)
        name = partial(self._culprits, optimizer, gradients.parameters, sizes)  # keeps no gradient alive
        ledger["outcome"] = Outcome(scale, finite, norm, divisor, name)
        if clip.max_value is not None:
            arithmetic.clamp_(gradients.tensors, divisor * clip.max_value)
            if clip.max_norm is not None:
                norm = measure(None, gradients, divisor)[1]
        if clip.max_norm is not None:
            divisor = torch.maximum(divisor, norm / clip.max_norm)

        found_inf = finite.logical_not().to(scale.dtype)
        ledger["found_inf_per_device"] = {scale.device: found_inf}
        try:
            if is_fused(optimizer):
                optimizer.grad_scale, optimizer.found_inf = divisor, found_inf
                return optimizer.step(*args, **kwargs)
            prime(optimizer)
            arithmetic.multiply_(gradients.tensors, divisor.reciprocal())
            return step_where(optimizer, finite, *args, **kwargs)
        finally:
            self._stepped(optimizer, ledger)

    def _step_with_closure(self, optimizer: Any, ledger: Ledger, clip: Clip, args: Any, kwargs: Any) -> Any:
        """Let the optimizer evaluate the loss as often as it likes; take all back if one overflows."""
        if self._capturable:
            raise UsageError("a closure is evaluated on the host. Write GradScaler(...) without capturable.")
        closure = args[0] if args else kwargs.pop("closure")
        before: list[Snapshot] = []

        def evaluate() -> Any:
            scalings = self._scalings
            with torch.enable_grad():
                loss = closure()
            if self._scalings == scalings:
                raise UsageError(
                    "the closure did not scale its loss. Write scaler.scale(loss).backward() in it."
                )
            ledger.update(fresh())
            gradients, divisor = self._settle(optimizer, ledger, clip, together=True)
            arithmetic.multiply_(gradients.tensors, 1.0 / divisor)
            if not ledger["outcome"].finite:
                raise _Overflow
            if not before and evaluates_often(optimizer):
                before.append(Snapshot(optimizer))  # nothing has moved before the first evaluation
            return loss

        try:
            return optimizer.step(evaluate, *args[1:], **kwargs)
        except _Overflow:
            for snapshot in before:
                snapshot.restore()
            return None
        finally:
            if "outcome" in ledger:
                self._stepped(optimizer, ledger)

    def _step_of_old_kind(self, optimizer: Any, ledger: Ledger, args: Any, kwargs: Any) -> Any:
        """Step an optimizer whose `step` takes the scaler and does all of this itself."""
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
            FutureWarning,
            stacklevel=4,
        )
        self._loss_scale.adopt()
        result = optimizer.step(*args, **kwargs, grad_scaler=self)
        ledger["stage"] = OptState.STEPPED
        return result

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Ledger, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs) if optimizer_state["outcome"].finite else None

    def _stepped(self, optimizer: Any, ledger: Ledger) -> None:
        """Note that an optimizer has had its step, taken or not."""
        for name in ("grad_scale", "found_inf"):
            if is_fused(optimizer) and hasattr(optimizer, name):
                delattr(optimizer, name)
        outcome: Outcome = ledger["outcome"]
        if not isinstance(outcome.finite, Tensor):
            where = self._device_of_scale()
            flag = torch.full((), float(not outcome.finite), device=where)
            ledger["found_inf_per_device"] = {where: flag}
        ledger["stage"] = OptState.STEPPED
        self._tell(outcome)
        self._already.mark(optimizer)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Multiply an optimizer's gradients and return a flag per device. float16 is always allowed."""
        gradients = gather(optimizer)
        done = self._already.among(gradients)
        tensors = gradients.tensors
        if done:
            pairs = zip(gradients.parameters, tensors, strict=True)
            tensors = [t for p, t in pairs if id(p) not in done]
        found = arithmetic.unscale_(tensors, inv_scale, found_inf)
        below_one = not self._loss_scale.on_device and self._loss_scale.state.scale * self._loss_factor < 1.0
        if done or below_one:  # neither looked at here, nor dividing by less than 1, which can overflow
            on_device = self._loss_scale.on_device
            overflow = ~gradients.norms().isfinite().all() if on_device else not gradients.fits(1.0)
            found_inf.add_(overflow)
            found.setdefault(found_inf.device, found_inf)
        self._already.mark(optimizer)
        if not found and self._readings.agreement.needed(gradients.meshes):
            found = {found_inf.device: found_inf}  # this rank has nothing, and still has to take part
        return self._readings.flags(found, gradients.meshes)

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        """Note whether an optimizer's gradients are finite, and leave them as they are."""
        scale = self._require_scale("_check_inf_per_device")
        gradients = gather(optimizer)
        finite, _, _ = self._readings.on_device(optimizer, gradients, torch.ones_like(scale), norm=False)
        found = {scale.device: finite.logical_not().float()} if gradients.tensors else {}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _inverse(self, scale: Tensor) -> Tensor:
        if self._loss_scale.on_device:
            wide = scale if scale.device.type == "mps" else scale.double()
            return (wide * self._loss_factor).reciprocal().float()
        return torch.full((), 1.0 / (self._loss_scale.state.scale * self._loss_factor), device=scale.device)

    def _device_of_scale(self) -> torch.device:
        return self._require_scale("step").device

    def _stays_on_device(self, optimizer: Any) -> bool:
        """Return whether nothing needs to be read on the host."""
        if self._capturable:
            return True
        asked = self.on_step is not None or self._gives_up
        return is_fused(optimizer) and not asked and not _reads_are_free(self._device_of_scale())

    def _is_ready(self, optimizer: Any, ledger: Ledger, gradients: Gradients) -> bool:
        """Return whether the gradients are still to be unscaled; those that others share are, here."""
        shared = gradients.aliased or self._already.among(gradients)
        if ledger["stage"] is OptState.READY and shared:
            self.unscale_(optimizer)
        if ledger["stage"] is not OptState.READY and ledger["found_inf_per_device"]:
            return False
        if not gradients.tensors and not self._readings.agreement.needed(()):
            raise AssertionError(_no_gradients(optimizer))
        return ledger["stage"] is OptState.READY

    def _culprits(
        self, optimizer: Any, parameters: list[Tensor], sizes: list[float] | Tensor
    ) -> tuple[str, ...]:
        listed = sizes.tolist() if isinstance(sizes, Tensor) else sizes
        order, self._order = self._order or {}, None  # a graph that changes is learnt again
        return culprits(optimizer, parameters, listed, order)

    def _outcome_of_flags(self, ledger: Ledger) -> Outcome:
        """Return what is known of an optimizer that was unscaled and has not stepped."""
        if self._loss_scale.on_device:
            scale = self._require_scale("step")
            return Outcome(scale.clone(), no_flag(ledger, scale.device))
        finite = not any([flag.item() for flag in ledger["found_inf_per_device"].values()])
        return Outcome(self._loss_scale.state.scale, finite)


def _reads_are_free(device: torch.device) -> bool:
    return device.type == "cpu"


def fresh() -> Ledger:
    """Return what is known of an optimizer before its first call in an iteration."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def no_flag(ledger: Ledger, device: torch.device) -> Tensor:
    """Return whether no flag of an optimizer is set, as a 0-dim tensor."""
    flags = torch.stack([flag.to(device) for flag in ledger["found_inf_per_device"].values()])
    return flags.sum() == 0.0


def _no_gradients(optimizer: Any) -> str:
    """Say which optimizer has nothing to step with, and why."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    frozen = sum(not p.requires_grad for p in parameters)
    return (
        "No inf checks were recorded for this optimizer. "
        f"All {len(parameters)} parameters of {type(optimizer).__name__} have grad None"
        + (f", {frozen} of them have requires_grad=False" if frozen else "")
        + ": backward() did not reach them, or zero_grad() came after it. Leave out scaler.step for this "
        "optimizer in this iteration, or give it the parameters that are trained."
    )
