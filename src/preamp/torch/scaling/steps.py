"""One optimizer's step: what is known of it, the three ways to take it, and its record.

    way           synchronizes                  divides                      decides
    HostStep      to read a few numbers         in place, or the optimizer   the host, before
    DeviceStep    never                         in place, or the optimizer   `found_inf`, or `where` after
    ClosureStep   as HostStep, per evaluation   in place                     the host, in each evaluation

"Or the optimizer": a fused one is given one number to divide by. A way is made for one step. Its `step` calls
`prepare`, in which the scaler measures, decides and calls `divide`, and then takes the step or skips it.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from preamp.arrays.torch import clamp_, multiply_, note_writing
from preamp.checks import check_limit, shown
from preamp.errors import PolicyError, UsageError
from preamp.policy import Policy, Reading
from preamp.scaling import STEPS, Spike, Step, spike_in
from preamp.torch.scaling.buffers import Ruined
from preamp.torch.scaling.culprits import Culprits
from preamp.torch.scaling.loss_scale import LossScale
from preamp.torch.scaling.measure import OptimizerState, number, read
from preamp.torch.scaling.optimizers import (
    OptimizerLike,
    is_of_torch,
    may_reevaluate_closure,
    step_takes,
)
from preamp.torch.scaling.scaled import Scaled, ScaledLosses, read_loss
from preamp.torch.scaling.undo import Snapshot, init_optimizer_state, step_where

MAX_DIVISOR = 2.0**100  # well below 2**126, above which a float32 reciprocal is subnormal, and flushed to 0


# ---- What a step is given ----------------------------------------------------------------------------------


class Clip(NamedTuple):
    """Limits for clipping. None: no limit."""

    max_norm: float | None = None
    max_value: float | None = None


NO_CLIP = Clip()


def step_arguments(
    optimizer: OptimizerLike,
    limits: Mapping[str, Any],
    usual: Clip,
    optimizer_kwargs: Mapping[str, Any] | None,
    kwargs: dict[str, Any],
) -> tuple[Clip, dict[str, Any]]:
    """Return how to clip, and the keyword arguments for an optimizer's own `step`.

    Args:
        optimizer: whose step it is.
        limits: the arguments that are the scaler's, which `step` of this optimizer may have as well.
        usual: how to clip without them.
        optimizer_kwargs: as in `GradScaler.step`.
        kwargs: the other keyword arguments.
    """
    max_norm, max_value = limits["max_norm"], limits["max_value"]
    if optimizer_kwargs is not None:
        kwargs = _with_own(optimizer_kwargs, kwargs)
    elif not torch.compiler.is_compiling():  # signatures cannot be read there; an earlier step has done it
        for name, value in limits.items():
            if value is not None and step_takes(type(optimizer), name):
                kind, said = type(optimizer).__name__, shown(value)
                raise UsageError(
                    f"{name}={said} clips in scaler.step, and {kind}.step has an argument {name} too. "
                    f'Write optimizer_kwargs={{"{name}": {said}}} to give it to the optimizer, or '
                    f"{name}={said}, optimizer_kwargs={{}} to clip here."
                )
    if max_norm is None and max_value is None:
        return usual, kwargs
    if max_norm is None:
        max_norm = usual.max_norm
    elif type(max_norm) is not float or not max_norm > 0.0:
        max_norm = check_limit("max_norm", max_norm)
    return Clip(max_norm, None if max_value is None else check_limit("max_value", max_value)), kwargs


def _with_own(given: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise UsageError(
            f'optimizer_kwargs={shown(given)} is not a dict. Write optimizer_kwargs={{"name": value}}.'
        )
    twice = sorted(set(given) & set(kwargs))
    if twice:
        raise UsageError(
            f"{twice[0]} is given twice, in optimizer_kwargs and beside it. Write it in one place."
        )
    return {**kwargs, **given}


# ---- The ways ----------------------------------------------------------------------------------------------


class HostStep:
    """Read whether to step, before it.

    Args:
        state: of the optimizer.
        take: PyTorch's `_maybe_opt_step`, which subclasses may have replaced.

    Attributes:
        on_host: whether the host may synchronize.
    """

    on_host = True

    def __init__(self, state: OptimizerState, take: Callable[..., Any]) -> None:
        self.state, self._take = state, take

    def step(self, prepare: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the step or skip it; return what the optimizer returns."""
        began = self.state.stage
        try:
            prepare()
            return self._take(self.state.optimizer, self.state, *args, **kwargs)
        except BaseException:
            self.state.undo(began)
            raise
        finally:
            self.state.gradients = None
            if self.state.fused:
                self.state.clear_fused_inputs()

    def clip(self, limits: Clip, norm: Any, norm_again: Callable[[], Any]) -> Any:
        """Clip entries in place; return the divisor that unscales the gradients and clips their norm.

        Args:
            limits: of the unscaled gradients.
            norm: of the unscaled gradients, as they are.
            norm_again: measures it after entries are clipped. All ranks call it, also where the step is
                skipped: those that read nothing do not know.
        """
        if limits.max_value is not None:
            self._clamp(self.state.divisor * limits.max_value)
            norm = norm if limits.max_norm is None else norm_again()
        return self.state.divisor if limits.max_norm is None else self._clipping(norm, limits.max_norm)

    def _clamp(self, limit: Any) -> None:
        if self.state.taken:
            clamp_(self.state.gradients.tensors, limit)

    def _clipping(self, norm: Any, max_norm: float) -> Any:
        divisor = self.state.divisor
        if not self.state.taken:
            return divisor
        return max(divisor, min(norm * divisor / max_norm, sys.float_info.max))

    def read_beside(self, losses: ScaledLosses) -> None:
        """Read the losses beside the flag: later the host would wait for the optimizer."""
        losses.read()

    def divide(self, divisor: Any, device: torch.device) -> None:
        """Divide the gradients in place, or give the number to a fused optimizer."""
        state = self.state
        if state.fused and state.taken:
            divisor = divide_down(state, divisor)
            grad_scale = None if divisor == 1.0 else number(divisor, device)
            give(state.optimizer, grad_scale, None if is_of_torch(state.optimizer) else number(0.0, device))
            note_writing(state.gradients.tensors)
        elif divisor != 1.0:
            divide(state, divisor)
        state.set_flag(device)


class DeviceStep(HostStep):
    """Read nothing: a fused optimizer is given `found_inf`; what another one does is undone afterwards.

    Args:
        state: of the optimizer.
        loss_scale: of the scaler.
        makes_state: whether the optimizer has to have its state before the step, as for a captured graph.
    """

    on_host = False

    def __init__(self, state: OptimizerState, loss_scale: LossScale, *, makes_state: bool) -> None:
        super().__init__(state, self._take_or_undo)
        self._loss_scale, self._makes_state = loss_scale, makes_state

    def _clamp(self, limit: Any) -> None:
        clamp_(self.state.gradients.tensors, torch.where(self.state.taken, limit, math.inf))

    def _clipping(self, norm: Tensor, max_norm: float) -> Tensor:
        state, divisor = self.state, self.state.divisor
        in_place = not state.fused or any([t.dtype is torch.float64 for t in state.gradients.tensors])
        clipping = norm / max_norm * divisor
        if in_place:
            clipping = torch.maximum(clipping, divisor)
        else:  # the optimizer's kernel takes a float32, of which inf would make every gradient 0
            largest = self._loss_scale.float32_max
            clipping = torch.clamp(clipping, divisor, largest).to(torch.float32)
        if in_place or not is_of_torch(state.optimizer):  # PyTorch's divide by nothing when they skip
            clipping = torch.where(state.taken, clipping, divisor)
        if in_place and state.fused:
            divide(state, clipping)
            return torch.ones_like(divisor)
        return clipping

    def read_beside(self, losses: ScaledLosses) -> None:
        pass

    def divide(self, divisor: Tensor, device: torch.device) -> None:
        state = self.state
        found_inf = self._loss_scale.found_inf(state.taken)
        state.found_inf_per_device = {divisor.device: found_inf}
        if self._makes_state:
            init_optimizer_state(state.optimizer, fused=state.fused)
        if state.fused:
            give(state.optimizer, divisor, found_inf)
        else:
            divide(state, divisor)
        note_writing(state.gradients.tensors)

    def _take_or_undo(self, optimizer: Any, state: OptimizerState, *args: Any, **kwargs: Any) -> Any:
        if state.fused:
            return optimizer.step(*args, **kwargs)
        return step_where(optimizer, state.taken, *args, **kwargs)


class ClosureStep(HostStep):
    """Let the optimizer evaluate the loss as often as it likes; undo everything if one overflows.

    Args:
        state: of the optimizer.
        scaled: by the scaler.
    """

    def __init__(self, state: OptimizerState, scaled: Scaled) -> None:
        super().__init__(state, lambda *_: None)
        self._scaled = scaled

    def step(self, prepare: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, before, losses = self.state, list[Snapshot](), copy.copy(self._scaled.losses)
        closure = args[0] if args else kwargs.pop("closure")

        def evaluate() -> Any:
            state.forget()  # before the closure, which may call unscale_ itself
            with self._scaled.evaluation(losses), torch.enable_grad():
                loss = closure()
            prepare()
            state.gradients = None
            if not state.taken:
                raise _Overflow
            if not before and may_reevaluate_closure(state.optimizer):
                before.append(Snapshot(state.optimizer))  # nothing has moved before the first evaluation
            return loss

        try:
            return state.optimizer.step(evaluate, *args[1:], **kwargs)
        except BaseException as reason:
            for snapshot in before:
                snapshot.restore()
            if isinstance(reason, _Overflow):
                return None
            state.forget()
            raise
        finally:
            state.gradients = None
            if state.fused:
                state.clear_fused_inputs()

    def divide(self, divisor: float, device: torch.device) -> None:
        """Divide in place, but for what the user has preset: by that a fused optimizer divides."""
        state = self.state
        preset = float(state.user_grad_scale()) if state.fused and state.taken else 1.0
        divide(state, divisor / preset)
        state.set_flag(device)


class _Overflow(Exception):  # a signal, not an error: it leaves a closure and goes no further
    """A closure's gradients were not finite, or a guard skips the step."""


def divide(state: OptimizerState, divisor: Any) -> None:
    """Divide the gradients in place, and note by what."""
    if not isinstance(divisor, Tensor):
        divisor = divide_down(state, divisor)
    inverse = divisor.reciprocal() if isinstance(divisor, Tensor) else 1.0 / divisor
    multiply_(state.gradients.tensors, inverse)
    state.divided += (divisor,)


def divide_down(state: OptimizerState, divisor: float) -> float:
    """Divide the gradients in place until the reciprocal of the divisor is normal; return what is left."""
    while divisor > MAX_DIVISOR:
        multiply_(state.gradients.tensors, 1.0 / MAX_DIVISOR)
        state.divided += (MAX_DIVISOR,)
        divisor /= MAX_DIVISOR
    return divisor


def give(optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Give a fused optimizer what to divide by, and whether to skip, as PyTorch's scaler does."""
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf


# ---- The record --------------------------------------------------------------------------------------------


def reading_of(states: Sequence[OptimizerState], policy: Policy[Any], *, needs_amax: bool) -> Reading:
    """Return what the policy sees of the steps of one or several optimizers.

    Raises:
        PolicyError: for a policy that needs the amax, where other code has checked the gradients.
    """
    measured: Any = states[0].measured
    finite, amax = measured.finite, measured.amax
    if len(states) > 1:
        found: list[Any] = [state.measured for state in states]
        amaxes, finite = [one.amax for one in found], all_true([one.finite for one in found])
        amax = None if None in amaxes else reduce(_larger, amaxes)
    if needs_amax and amax is None:
        raise PolicyError(
            f"{policy!r} needs the amax of the gradients, but other code has checked them and reports only "
            "whether they are finite. Write scaler.unscale_(optimizer) or scaler.step(optimizer) as they are "
            "in GradScaler, or policy=Dynamic(), which needs no more."
        )
    return Reading(finite, amax)


def counts(states: Sequence[OptimizerState]) -> Any:
    """Return whether an iteration counts as a step: an optimizer stepped, or would have been skipped."""
    for state in states:
        if state.stepped:
            return True
    finite = all_true([state.taken for state in states])
    return finite.logical_not() if isinstance(finite, Tensor) else not finite


def all_true(flags: Sequence[Any]) -> Any:
    """Return whether all flags are true, as a tensor if one of them is."""
    for flag in flags:
        if isinstance(flag, Tensor):
            return torch.stack([torch.as_tensor(one, device=flag.device) for one in flags]).all()
    return all(flags)


def _larger(a: Any, b: Any) -> Any:
    if isinstance(b, Tensor):
        a, b = b, a
    if not isinstance(a, Tensor):
        return max(a, b)
    return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))


@dataclass
class Record:
    """A step of one or several optimizers, until it is read.

    Attributes:
        states: what is known of the optimizers.
        index: of the step.
        new_scale: the scale of the next step, if it is known.
        loss: the loss, not scaled: a number or `UnreadLoss` or, over ranks, a tensor.
        buffers: names the model's buffers that are not finite; called if the step was skipped.
        owners: whether a culprit tells which optimizer has it, if there are several.
        before: the record before, which stays the latest if no optimizer has stepped or would have skipped.
    """

    states: list[OptimizerState]
    index: Any
    new_scale: Any
    loss: Any = None
    buffers: Callable[[], Ruined] = Ruined
    owners: bool = True
    before: Record | Step | None = None

    def skipped(self) -> bool:
        """Return whether the step was skipped. Nothing else is read."""
        if any([state.stepped or not state.taken for state in self.states]):
            return any([state.skips and not state.taken for state in self.states])
        before = self.before
        return before.skipped() if isinstance(before, Record) else before is not None and before.skipped

    def read(self) -> Step | None:
        """Return the step, after reading its numbers from the device; of a skipped one more."""
        states, norms, amaxes = list[OptimizerState](), list[Any](), list[Any]()
        finite, taken, skipped = True, True, False
        for unread in self.states:
            state = unread.read()
            found: Any = state.measured
            if not (state.stepped or not found.finite):
                continue
            states.append(state)
            norms.append(found.grad_norm)
            amaxes.append(found.amax)
            finite, taken = finite and found.finite, taken and state.taken
            skipped = skipped or (state.skips and not state.taken)
        if not states:
            return self.before.read() if isinstance(self.before, Record) else self.before
        index, new_scale = self.index, self.new_scale
        if isinstance(index, Tensor) or isinstance(new_scale, Tensor):
            index, new_scale = read(index, new_scale)
        step = STEPS["torch"](
            int(index),
            states[0].measured.scale,  # type: ignore[union-attr]
            finite,
            skipped,
            new_scale,
            read_loss(self.loss),
            grad_norm=None if None in norms else math.hypot(*norms),
            amax=None if None in amaxes else max(amaxes),
        )
        return step if taken else self._with_reasons(step, states)

    def _with_reasons(self, step: Step, states: list[OptimizerState]) -> Step:
        """Return a step that was not taken with what was wrong."""
        ruined, lost = self.buffers(), [state for state in states if not state.taken]
        named = [Culprits() if one.taken else one.named() for one in states]
        if self.owners and len(states) > 1:
            named = [
                Culprits(*[tuple(f"optimizers[{place}].{name}" for name in names) for names in one])
                for place, one in enumerate(named)
            ]
        having = [one for one in named if one.names]
        return step._replace(
            culprits=tuple([name for one in having for name in one.names]),
            buffers=ruined.names,
            spike=_spike(lost[0]) if step.finite else None,
            restored=ruined.restored,
            first_culprits=having[0].first if len(having) == 1 else (),
        )


def _spike(state: OptimizerState) -> Spike | None:
    if state.judged is None or state.measured is None:
        return None
    return spike_in(state.judged, state.measured.grad_norm)
