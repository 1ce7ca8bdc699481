"""One optimizer's step: on the host, on the device, or with a closure.

This room owns the way from gradients to an optimizer that steps or does not. It refuses to know what comes of
the scale, and when a user may call what: that is `scaler`'s.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from preamp.arrays import torch as arithmetic
from preamp.arrays.torch import Gradients, gather
from preamp.arrays.torch_devices import widest
from preamp.checks import to_float32
from preamp.errors import UsageError
from preamp.scaling import Step
from preamp.torch.scaling import launches
from preamp.torch.scaling.buffers import Buffers
from preamp.torch.scaling.culprits import culprits
from preamp.torch.scaling.loss_scale import LossScale
from preamp.torch.scaling.losses import Losses
from preamp.torch.scaling.optimizers import (
    begins_with_garbage,
    evaluates_often,
    is_fused,
    is_of_torch,
    parameters_of,
    preset,
)
from preamp.torch.scaling.outcome import Outcome
from preamp.torch.scaling.ranks import number_of_ranks
from preamp.torch.scaling.readings import Readings
from preamp.torch.scaling.shared_gradients import AlreadyUnscaled
from preamp.torch.scaling.sight import Sight
from preamp.torch.scaling.undo import Snapshot, prime, step_where

# PyTorch's: "stage", "found_inf_per_device"; ours: "optimizer", "outcome", "sight", "meshes", "looked" (on
# this rank alone), "divided" (in place, by what), "failed".
Ledger: TypeAlias = dict[str, Any]
LARGE = 2.0**100  # the reciprocal of a larger number loses digits in float32, or is 0


class Clip(NamedTuple):
    """How `step` clips; None does not."""

    max_norm: float | None = None
    max_value: float | None = None


class _Failed(NamedTuple):
    """What was read for a step that raised, for when it is tried again: its gradients may be clipped by then.

    Attributes:
        gradients: each with its version, as they were left.
        looked: what this rank saw in the scaled gradients, if the policy uses them.
        norm: the norm that was taken, if any.
        divisor: what it has to be divided by.
    """

    gradients: list[tuple[weakref.ref[Tensor], int]]
    looked: Sight | None
    norm: Any
    divisor: Any

    def is_of(self, parameters: list[Tensor]) -> bool:
        """Return whether these parameters still have those gradients, and nobody has written to them."""
        present = [p.grad for p in parameters if p.grad is not None]
        return len(present) == len(self.gradients) and all(
            before() is gradient and version == gradient._version
            for (before, version), gradient in zip(self.gradients, present, strict=True)
        )


class _Overflow(Exception):  # a signal, not an error: it leaves a closure and goes no further
    """A closure's gradients were not finite."""


class Stepping(torch.amp.GradScaler):
    """The half of `GradScaler` that deals with one optimizer; below is what the other half gives it."""

    _require_scale: Callable[[str], Tensor]
    _tell: Callable[[Outcome], None]
    _loss_scale: LossScale
    _readings: Readings
    _capturable: bool
    _gives_up: bool
    on_step: Callable[[Step], object] | None
    _per_optimizer_states: defaultdict[int, Ledger]

    def __init__(self) -> None:  # not the one of PyTorch: our state lives elsewhere
        self._loss_factor = 1.0  # a constant in every loss, besides the scale
        self._always_reads = False
        self._warns_of_small_eps = True
        self._inspected: set[int] = set()  # ids of optimizers
        self._scalings = 0
        self._is_pending = False  # whether a loss was scaled since the last update
        self._changed_by: str | None = None  # what changed the scale after a loss was scaled with another
        self._losses = Losses()
        self._buffers: Buffers | None = None
        self._how_to_scale = "scaler.scale(loss).backward()"  # what the user of this scaler writes
        self._already = AlreadyUnscaled()
        self._order: dict[int, int] | None = None  # in which backward reaches parameters, by their id

    def _step_on_host(self, optimizer: Any, ledger: Ledger, clip: Clip, args: Any, kwargs: Any) -> Any:
        """Read one flag and decide here: on a CPU, and wherever no fused optimizer decides by itself."""
        fused, began = is_fused(optimizer), ledger["stage"]
        gradients, divisor = self._settle(optimizer, ledger, clip, together=fused)
        if self.on_step is not None or self._always_reads:
            self._losses.read()  # beside the flag: later the host would wait for the optimizer
        if ledger["outcome"].finite and fused:
            where = self._device_of_scale()
            optimizer.grad_scale = None if divisor == 1.0 else _number(divisor, where)
            optimizer.found_inf = None if is_of_torch(optimizer) else _number(0.0, where)
        elif divisor != 1.0:
            arithmetic.multiply_(gradients.tensors, 1.0 / divisor)
            ledger["divided"].append(divisor)
        self._note_flag(ledger)  # subclasses decide by it in _maybe_opt_step
        step = partial(self._maybe_opt_step, optimizer, ledger, *args, **kwargs)
        result = self._let(optimizer, ledger, step, began, gradients)
        arithmetic.note_writing(gradients.tensors if fused else ())
        self._stepped(optimizer, ledger)
        return result

    @torch.no_grad()
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
        ledger["divided"] = []
        together = together or clip != Clip() or self._readings.watches(optimizer)
        if ledger["stage"] is OptState.READY and not together:
            self._require_gradients(optimizer)
            self.unscale_(optimizer)
        gradients = gather(optimizer) if together else Gradients([], [])
        ready = self._is_ready(optimizer, ledger, gradients, clip)

        scale = self._loss_scale.state.scale
        divisor = (scale * self._loss_factor if ready else 1.0) * float(preset(optimizer))
        clips_norm = clip.max_norm is not None
        wants_norm = clips_norm or self._readings.watches(optimizer)
        measure = partial(self._readings.on_host, device=self._device_of_scale(), norm=wants_norm)
        finite, norm = ready or _flags_are_clear(ledger), None
        sight = self._look(optimizer, gradients, read=True) if ready else self._seen(ledger)
        if ready or clips_norm:
            finite, norm, sight, _ = measure(optimizer, gradients, divisor, finite=finite, sight=sight)
        if not finite:
            twice = clips_norm and clip.max_value is not None
            if twice and self._readings.agreement.needed(gradients.meshes):
                measure(None, gradients, divisor)  # in company with ranks that read nothing
            seen = gradients if together else gather(optimizer)
            named = self._culprits(optimizer, seen.parameters, seen.peaks())
            ledger["outcome"] = Outcome(scale, False, culprits=lambda: named, sight=sight)
            return gradients, divisor
        ledger["outcome"] = self._as_first(
            optimizer, ledger, Outcome(scale, True, norm, divisor, sight=sight and sight.read())
        )
        if clip.max_value is not None:
            arithmetic.clamp_(gradients.tensors, clip.max_value * divisor)
            if clips_norm:
                norm = measure(None, gradients, divisor).norm
        if clip.max_norm is not None and norm is not None:
            divisor = max(divisor, norm / clip.max_norm)
        if divisor > LARGE:
            arithmetic.multiply_(gradients.tensors, 1.0 / LARGE)
            ledger["divided"].append(LARGE)
            divisor /= LARGE
        return gradients, divisor

    @torch.no_grad()
    def _step_on_device(self, optimizer: Any, ledger: Ledger, clip: Clip, args: Any, kwargs: Any) -> Any:
        """Read nothing: what is seen goes to the optimizer and to the policy on the device."""
        self._loss_scale.to_device()
        self._loss_scale.adopt()
        began = ledger["stage"]
        gradients = gather(optimizer)
        ready = self._is_ready(optimizer, ledger, gradients, clip)
        divisor = self._prepare_in_one_launch(optimizer, ledger, gradients, clip) if ready else None
        if divisor is None:
            divisor = self._prepare(optimizer, ledger, gradients, clip, ready=ready)

        outcome: Outcome = ledger["outcome"]
        ledger["found_inf_per_device"] = {divisor.device: outcome.found_inf}
        if self._capturable:
            prime(optimizer)
        if is_fused(optimizer):
            optimizer.grad_scale, optimizer.found_inf = divisor, outcome.found_inf
            reads = self.on_step is not None and not self._capturable
            skips = reads and not outcome.finite  # who listens can tell a skipped step by no call
            if reads:
                self._losses.read()
            step = (lambda: None) if skips else partial(optimizer.step, *args, **kwargs)
        else:
            arithmetic.multiply_(gradients.tensors, divisor.reciprocal())
            ledger["divided"].append(divisor)
            finite: Any = outcome.finite
            step = partial(step_where, optimizer, finite, *args, **kwargs)
        result = self._let(optimizer, ledger, step, began, gradients)
        arithmetic.note_writing(gradients.tensors)
        self._stepped(optimizer, ledger)
        return result

    def _prepare(
        self, optimizer: Any, ledger: Ledger, gradients: Gradients, clip: Clip, *, ready: bool
    ) -> Tensor:
        """Note the outcome of a step that reads nothing; return what the gradients have to be divided by."""
        scale = self._require_scale("step").clone()
        constant = preset(optimizer) * (self._loss_factor if ready else 1.0)
        divisor = scale if ready else torch.ones_like(scale)
        if isinstance(constant, Tensor) or constant != 1.0:
            divisor = divisor * constant
        measure = partial(self._readings.on_device, norm=clip.max_norm is not None)
        alone = not self._readings.agreement.needed(gradients.meshes)
        agreed = not ready and clip.max_norm is None and not alone  # when they were unscaled
        sight = self._look(optimizer, gradients, read=False) if ready else self._seen(ledger)
        finite, norm, sight, sizes = measure(optimizer, gradients, divisor, agree=not agreed, sight=sight)
        if not ready:
            unscaled = no_flag(ledger, scale.device)
            finite = unscaled if agreed else finite & unscaled
        name = partial(self._culprits, optimizer, gradients.parameters, sizes)  # keeps no gradient alive
        told = norm if alone or clip.max_norm is not None else None  # other ranks may have told none
        found_inf = finite.logical_not().to(scale.dtype)
        outcome = Outcome(scale, finite, told, divisor, name, sight, found_inf=found_inf)
        ledger["outcome"], ledger["divided"] = self._as_first(optimizer, ledger, outcome), []
        if clip.max_value is not None:
            limit = torch.where(finite, divisor * clip.max_value, math.inf)  # a skipped step clips nothing
            arithmetic.clamp_(gradients.tensors, limit)
            if clip.max_norm is not None:
                norm = measure(None, gradients, divisor).norm
        if clip.max_norm is not None:
            clipping = torch.maximum(divisor, (norm / clip.max_norm).to(divisor.dtype))
            skips_itself = is_fused(optimizer) and is_of_torch(optimizer)  # and then divides by nothing
            divisor = clipping if skips_itself else torch.where(finite, clipping, divisor)
        return divisor

    def _prepare_in_one_launch(
        self, optimizer: Any, ledger: Ledger, gradients: Gradients, clip: Clip
    ) -> Tensor | None:
        """Do what `_prepare` does for scaled gradients of one rank; None where there is no kernel for it."""
        scale, constant = self._require_scale("step"), preset(optimizer)
        usual = clip.max_value is None and not isinstance(constant, Tensor)
        if not usual or self._loss_scale.policy.needs or self._readings.agreement.needed(gradients.meshes):
            return None
        if not launches.can_prepare(scale):
            return None
        norm, sizes = self._readings.norm_on_device(optimizer, gradients, scale.device)
        made = launches.prepare(norm, scale, constant * self._loss_factor, clip.max_norm)
        if made is None:
            return None
        name = partial(self._culprits, optimizer, gradients.parameters, sizes)
        outcome = Outcome(made.scale, made.finite, norm, made.divisor, name, found_inf=made.found_inf)
        ledger["outcome"], ledger["divided"] = self._as_first(optimizer, ledger, outcome), []
        return made.multiplier

    def _let(
        self,
        optimizer: Any,
        ledger: Ledger,
        step: Callable[[], Any],
        began: OptState,
        gradients: Gradients,
    ) -> Any:
        """Let an optimizer step. If it raises, the step may be tried again, or left out without `update`.

        Gradients are then what they were before, but for the entries that `max_value` has clipped.
        """
        try:
            return step()
        except BaseException:
            for divisor in reversed(ledger["divided"]):
                arithmetic.multiply_(gradients.tensors, divisor)
            if ledger["stage"] is OptState.UNSCALED and began is OptState.READY:
                self._scale_again(optimizer)
            ledger["stage"] = began
            self._note_failure(optimizer, ledger)
            raise
        finally:
            for name in ("grad_scale", "found_inf"):
                if is_fused(optimizer) and hasattr(optimizer, name):
                    delattr(optimizer, name)

    def _require_gradients(self, optimizer: Any) -> None:
        """Refuse an optimizer with nothing to unscale, unless other ranks may have something."""
        present = any(parameter.grad is not None for parameter in parameters_of(optimizer))
        if not present and not self._readings.agreement.needed(()):
            raise AssertionError(_no_gradients(optimizer))

    def _scale_again(self, optimizer: Any) -> None:
        """Multiply gradients that were unscaled for a step which then failed."""
        factor = self._require_scale("step") * self._loss_factor
        arithmetic.multiply_(gather(optimizer).tensors, factor)
        ledger = self._per_optimizer_states[id(optimizer)]
        ledger["stage"] = OptState.READY
        self._note_failure(optimizer, ledger)

    def _note_failure(self, optimizer: Any, ledger: Ledger) -> None:
        """Keep what was read for a step that raised."""
        outcome: Outcome | None = ledger.get("outcome")
        if outcome is not None:
            present = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
            marks = [(weakref.ref(gradient), gradient._version) for gradient in present]
            ledger["failed"] = _Failed(marks, ledger.get("looked"), outcome.norm, outcome.divisor)

    def _before(self, optimizer: Any, ledger: Ledger) -> _Failed | None:
        """Return what was read when the same step was tried and raised."""
        failed: _Failed | None = ledger.get("failed")
        return failed if failed is not None and failed.is_of(parameters_of(optimizer)) else None

    def _as_first(self, optimizer: Any, ledger: Ledger, outcome: Outcome) -> Outcome:
        """Return an outcome with the norm from before the step was tried and its gradients clipped."""
        before = self._before(optimizer, ledger)
        if before is None or before.norm is None:
            return outcome
        return replace(outcome, norm=before.norm, divisor=before.divisor)

    def _step_with_closure(self, optimizer: Any, ledger: Ledger, clip: Clip, args: Any, kwargs: Any) -> Any:
        """Let the optimizer evaluate the loss as often as it likes; take all back if one overflows."""
        if self._capturable:
            raise UsageError("a closure is evaluated on the host. Write GradScaler(...) without capturable.")
        closure = args[0] if args else kwargs.pop("closure")
        before: list[Snapshot] = []
        losses = copy.copy(self._losses)

        def evaluate() -> Any:
            scalings = self._scalings
            self._losses = copy.copy(losses)  # the last evaluation counts
            ledger.update(fresh())  # before the closure, which may call unscale_ itself
            with torch.enable_grad():
                loss = closure()
            if self._scalings == scalings:
                raise UsageError(f"the closure did not scale its loss. Write {self._how_to_scale} in it.")
            gradients, divisor = self._settle(optimizer, ledger, clip, together=True)
            if not ledger["outcome"].finite:
                arithmetic.multiply_(gradients.tensors, 1.0 / divisor)
                raise _Overflow
            arithmetic.multiply_(gradients.tensors, float(preset(optimizer)) / divisor)
            if not before and evaluates_often(optimizer):
                before.append(Snapshot(optimizer))  # nothing has moved before the first evaluation
            return loss

        result = None
        try:
            result = optimizer.step(evaluate, *args[1:], **kwargs)
        except BaseException as reason:
            for snapshot in before:
                snapshot.restore()
            if not isinstance(reason, _Overflow):
                ledger.clear()
                ledger.update(fresh())
                raise
        if is_fused(optimizer) and hasattr(optimizer, "grad_scale"):
            del optimizer.grad_scale
        if "outcome" in ledger:
            self._note_flag(ledger)
            self._stepped(optimizer, ledger)
        return result

    def _clip_unscaled(self, optimizer: Any, clip: Clip) -> tuple[bool, float | None]:
        """Clip gradients that are not scaled; return whether they are finite on all ranks, and their norm."""
        gradients = gather(optimizer)
        scale = self._loss_scale.tensor
        where = torch.device(self._device) if scale is None else scale.device
        measure = partial(self._readings.on_host, None, gradients, 1.0, where)
        finite = True
        if clip.max_value is not None:
            finite = measure(norm=False).finite  # clamping hides an inf
            arithmetic.clamp_(gradients.tensors, clip.max_value)
        finite, norm, _, _ = measure(finite=finite, norm=clip.max_norm is not None)
        if clip.max_norm is not None and norm is not None and norm > clip.max_norm:
            arithmetic.multiply_(gradients.tensors, clip.max_norm / norm)
        return finite, norm

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
        outcome: Outcome = ledger["outcome"]
        ledger["stage"] = OptState.STEPPED
        self._tell(outcome)
        decides = is_fused(optimizer) and isinstance(outcome.finite, Tensor)
        self._already.mark(optimizer, outcome if decides else None)

    def _note_flag(self, ledger: Ledger) -> None:
        """Give a decision made on the host the form that PyTorch keeps it in."""
        where = self._device_of_scale()
        ledger["found_inf_per_device"] = {where: _number(float(not ledger["outcome"].finite), where)}

    def _refuse_other_scale(self, optimizer: Any, ledger: Ledger) -> None:
        """Refuse gradients that would be divided by another scale than the one in them."""
        if self._changed_by is None or ledger["stage"] is not OptState.READY:
            return
        if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            raise UsageError(
                f"{self._changed_by} changed the scale after the loss was scaled, so the gradients would be "
                f"divided by another number than they were multiplied by. Write {self._changed_by} after "
                "scaler.step(optimizer), or scale the loss again: scaler.scale(loss).backward()."
            )

    def _unscale(self, optimizer: Any, ledger: Ledger, *, agree: bool = True) -> None:
        """Unscale an optimizer's gradients and note what was found, on this rank or on all."""
        self._loss_scale.adopt()
        scale = self._require_scale("unscale_")
        found_inf = _number(0.0, scale.device)
        sight = None
        if self._loss_scale.policy.needs:
            sight = self._look(optimizer, gather(optimizer), read=not self._stays_on_device(optimizer))
        flags = self._unscale_grads_(optimizer, self._inverse(scale), found_inf, True)
        meshes = ledger.pop("meshes", [])
        if not flags and self._readings.agreement.needed(meshes):
            flags = {found_inf.device: found_inf}  # this rank has nothing, and still has to take part
        if agree:
            flags, sight = self._readings.flags(flags, meshes, found_inf.device, sight)
        ledger["found_inf_per_device"], ledger["stage"] = flags, OptState.UNSCALED
        ledger["sight"] = sight and sight._replace(each=None)  # of scaled gradients, which is no size now

    @torch.no_grad()
    def _look(self, optimizer: Any, gradients: Gradients, *, read: bool) -> Sight | None:
        """Return the statistics that the policy needs; gradients that were unscaled were measured before."""
        if not self._loss_scale.policy.needs:
            return None
        ledger = self._per_optimizer_states[id(optimizer)]
        before = self._before(optimizer, ledger)
        if before is not None and before.looked is not None:
            return before.looked
        scaled, edge = gradients.without(self._already.among(gradients)), self._loss_scale.edge
        looked = self._readings.look(optimizer, scaled, edge, self._device_of_scale(), read=read)
        ledger["looked"] = looked
        return looked

    def _seen(self, ledger: Ledger) -> Sight | None:
        """Return what was seen when gradients were unscaled; nothing if other code did that."""
        return ledger.get("sight", Sight()) if self._loss_scale.policy.needs else None

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Multiply an optimizer's gradients; return a flag per device of this rank.

        float16 is always allowed. Subclasses may override this, as they do PyTorch's.
        """
        gradients = gather(optimizer)
        if gradients.meshes:
            self._per_optimizer_states[id(optimizer)]["meshes"] = gradients.meshes
        done = self._already.among(gradients)
        tensors = gradients.tensors
        if done:
            pairs = zip(gradients.parameters, tensors, strict=True)
            tensors = [t for p, t in pairs if not self._already.unscale_rest_(p, t)]
        found = arithmetic.unscale_(tensors, inv_scale, found_inf)
        arithmetic.note_writing(gradients.tensors)
        below_one = not self._loss_scale.on_device and self._loss_scale.state.scale * self._loss_factor < 1.0
        if done or below_one:  # neither looked at here, nor dividing by less than 1, which can overflow
            on_device = self._loss_scale.on_device
            overflow = ~gradients.norms().isfinite().all() if on_device else not gradients.fits(1.0)
            found_inf.add_(overflow)
            found.setdefault(found_inf.device, found_inf)
        self._already.mark(optimizer)
        return found

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        """Note whether an optimizer's gradients are finite, and leave them as they are."""
        scale = self._require_scale("_check_inf_per_device")
        gradients = gather(optimizer)
        ledger = self._per_optimizer_states[id(optimizer)]
        ready = ledger["stage"] is OptState.READY
        sight = self._look(optimizer, gradients, read=False) if ready else self._seen(ledger)
        measure = partial(self._readings.on_device, optimizer, gradients, torch.ones_like(scale))
        finite, _, ledger["sight"], _ = measure(norm=False, sight=sight)
        seen = gradients.tensors or self._readings.agreement.needed(gradients.meshes)
        found = {scale.device: finite.logical_not().float()} if seen else {}
        ledger["found_inf_per_device"] = found
        return found

    def _inverse(self, scale: Tensor) -> Tensor:
        if self._loss_scale.on_device:
            wide = scale.to(widest(scale.device))
            return (wide * self._loss_factor).reciprocal().float()
        return _number(1.0 / (self._loss_scale.state.scale * self._loss_factor), scale.device)

    def _device_of_scale(self) -> torch.device:
        return self._require_scale("step").device

    def _stays_on_device(self, optimizer: Any) -> bool:
        """Return whether nothing needs to be read on the host.

        One rank may listen and others not; for copies to stay equal to the bit, all go the same way.
        """
        if self._capturable:
            return True
        if self._buffers is not None and self._buffers.restores:
            return False
        listens = self.on_step is not None and number_of_ranks() == 1
        asked = listens or self._gives_up or self._always_reads or not is_fused(optimizer)
        if asked or _reads_are_free(self._device_of_scale()):
            return False
        return not begins_with_garbage(optimizer)

    def _is_ready(self, optimizer: Any, ledger: Ledger, gradients: Gradients, clip: Clip) -> bool:
        """Return whether the gradients are still to be unscaled; those that need it beforehand are, here.

        Other ranks may not need it: all agree on a flag and a norm together, if there will be a norm.
        """
        early = gradients.aliased or bool(self._already.among(gradients)) or self._is_overridden()
        if self._capturable and not is_fused(optimizer):  # float16 can overflow on the way, unseen
            early = early or any(t.dtype is torch.float16 for t in gradients.tensors)
        if ledger["stage"] is OptState.READY and early:
            self._unscale(optimizer, ledger, agree=clip.max_norm is None)
        ready = ledger["stage"] is OptState.READY
        seen = gradients.tensors if ready else ledger["found_inf_per_device"]
        if not seen and not self._readings.agreement.needed(()):
            raise AssertionError(_no_gradients(optimizer))
        return ready

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
            return Outcome(scale.clone(), no_flag(ledger, scale.device), sight=self._seen(ledger))
        sight = self._seen(ledger)
        finite = _flags_are_clear(ledger)
        return Outcome(self._loss_scale.state.scale, finite, sight=sight and sight.read())

    def _is_overridden(self) -> bool:
        """Return whether a subclass, or someone from outside, unscales in another way."""
        if torch.compiler.is_compiling():
            return False
        return getattr(self._unscale_grads_, "__func__", None) is not Stepping._unscale_grads_


def _number(value: float, device: torch.device) -> Tensor:
    """Return a float32, which kernels want, whatever the user's default dtype is; inf for a larger number."""
    return torch.full((), to_float32(value), dtype=torch.float32, device=device)


def _reads_are_free(device: torch.device) -> bool:
    return device.type == "cpu"


def fresh() -> Ledger:
    """Return what is known of an optimizer before its first call in an iteration."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _flags_are_clear(ledger: Ledger) -> bool:
    return not any([flag.item() for flag in ledger["found_inf_per_device"].values()])


def no_flag(ledger: Ledger, device: torch.device) -> Tensor:
    """Return whether no flag of an optimizer is set, as a 0-dim tensor."""
    flags = torch.stack([flag.to(device) for flag in ledger["found_inf_per_device"].values()])
    return flags.sum() == 0.0


def _no_gradients(optimizer: Any) -> str:
    """Say which optimizer has nothing to step with, and why."""
    parameters = parameters_of(optimizer)
    frozen = sum(not p.requires_grad for p in parameters)
    if any(p.grad is not None for p in parameters):
        return (
            "No inf checks were recorded for this optimizer. Its unscale_() came before backward(), when all "
            "gradients were None. Write scaler.unscale_(optimizer) after backward()."
        )
    return (
        "No inf checks were recorded for this optimizer. "
        f"All {len(parameters)} parameters of {type(optimizer).__name__} have grad None"
        + (f", {frozen} of them have requires_grad=False" if frozen else "")
        + ": backward() did not reach them, or zero_grad() came after it. Leave out scaler.step for this "
        "optimizer in this iteration, or give it the parameters that are trained."
    )
