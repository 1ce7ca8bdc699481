"""Keras's LossScaleOptimizer for any PyTorch optimizer: one object to scale, clip, accumulate and average.

A `GradScaler` unscales the gradients and moves the scale.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from preamp.arrays.torch import gather, multiply_
from preamp.arrays.torch_compat import is_of_transform
from preamp.arrays.torch_devices import is_capturing
from preamp.checks import ScaledLosses, callable_or_none, warn_if_inexact, whole
from preamp.errors import InexactScale, PolicyError, UsageError
from preamp.guards import Guard
from preamp.policy import Policy
from preamp.scaling import Step
from preamp.systems.arguments import (
    INITIAL_SCALE,
    INTERVAL,
    check_averaging,
    check_limits,
    check_scale,
    given_policy,
)
from preamp.torch.nested import check_shapes, map_tensors, require_tensor
from preamp.torch.scaling.accumulation import Accumulation
from preamp.torch.scaling.grad_scaler import Clip, GradScaler
from preamp.torch.scaling.guarding import loss_of
from preamp.torch.scaling.master_weights import MasterWeights
from preamp.torch.scaling.optimizers import parameters_of, warn_of_small_eps
from preamp.torch.scaling.weight_averages import Averages

OURS = "loss_scale_optimizer"
SAVED = ("scaler", "iterations", "skipped_steps", "averages", "accumulation", "masters")


class LossScaleOptimizer(torch.optim.Optimizer):
    """An optimizer that scales the loss, skips the steps that overflow and moves the scale.

    It is a `torch.optim.Optimizer`: learning-rate schedulers, hooks and `state_dict` work as on the inner
    one, whose parameter groups it shares. The arguments are those of `keras.optimizers.LossScaleOptimizer`.

    Args:
        inner_optimizer: the optimizer to wrap.
        initial_scale: the scale of the first step.
        dynamic_growth_steps: finite steps in a row after which the scale is doubled.
        policy: any preamp policy or dialect instead of these two.
        name: what to call it; nothing depends on it.
        weight_decay: decoupled: before an update every weight loses this share, times the learning rate.
        clipnorm: each parameter's gradient is clipped to this L2 norm.
        clipvalue: each entry of a gradient is clipped to [-clipvalue, clipvalue].
        global_clipnorm: all gradients together are clipped to this L2 norm. One of the three at most.
        use_ema: keep an exponential moving average of the weights.
        ema_momentum: new average = ema_momentum * old average + (1 - ema_momentum) * weight.
        ema_overwrite_frequency: overwrite the weights with their averages every so many updates,
            accumulated micro-steps not counted. None: call `finalize_variable_values` at the end.
        loss_scale_factor: a constant the loss is multiplied by as well, and gradients divided by.
        gradient_accumulation_steps: update once in so many calls of `step`, with the mean of their
            gradients. A call whose gradients overflow is dropped; the mean is over the others.
        master_weights: keep float32 copies of float16 and bfloat16 parameters and update those. The
            parameter groups then hold the copies.
        on_step: called with a `Step` after every call of `step`; a `Trace` is such a callable.
        process_group: as for `GradScaler`.
        reduce: as for `GradScaler`.
        model: as for `GradScaler`.
        restore_buffers: as for `GradScaler`.
        guard: as for `GradScaler`. With `gradient_accumulation_steps` it decides about updates, by the mean
            of the gradients and of the losses.
        loss_group: as for `GradScaler`.

    Attributes:
        inner_optimizer: the wrapped optimizer.
        scaler: the `GradScaler` at work.
        iterations: updates made.
        skipped_steps: calls of `step` whose gradients overflowed, and those that a guard skipped.
        last_step: the record of the latest `step`. None before.

    Raises:
        PolicyError: for arguments that cannot work, alone or together.
        UserWarning: a warning, for a parameter group whose `eps` is 0 in the dtype of its parameters, such as
            Adam's 1e-8 in float16.

    >>> import torch
    >>> from preamp.torch import LossScaleOptimizer
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5), global_clipnorm=1.0)
    >>> optimizer.backward(2 * weight.sum())
    >>> optimizer.step()
    >>> weight.item(), optimizer.last_step.skipped, optimizer.loss_scale
    (0.5, False, 32768.0)
    """

    def __init__(
        self,
        inner_optimizer: torch.optim.Optimizer,
        initial_scale: float = INITIAL_SCALE,
        dynamic_growth_steps: int = INTERVAL,
        *,
        policy: Policy[Any] | None = None,
        name: str | None = None,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        master_weights: bool = False,
        on_step: Callable[[Step], object] | None = None,
        process_group: Any = None,
        reduce: Callable[[Tensor], Tensor | None] | None = None,
        model: torch.nn.Module | None = None,
        restore_buffers: bool = False,
        guard: Guard[Any] | None = None,
        loss_group: Any = None,
    ) -> None:
        apart = (gradient_accumulation_steps, master_weights, clipnorm, weight_decay)
        _check_inner(inner_optimizer, weight_decay, steps_apart=any(apart))
        check_limits(
            clipnorm=clipnorm,
            clipvalue=clipvalue,
            global_clipnorm=global_clipnorm,
            weight_decay=weight_decay,
            loss_scale_factor=loss_scale_factor,
        )
        callable_or_none("on_step", on_step, "on_step=Trace(), or any function")
        check_averaging(ema_momentum, ema_overwrite_frequency, gradient_accumulation_steps)
        self.inner_optimizer: torch.optim.Optimizer = inner_optimizer
        self.name: str | None = name
        self.scaler: GradScaler = _scaler(
            inner_optimizer,
            initial_scale,
            dynamic_growth_steps,
            policy,
            process_group=process_group,
            reduce=reduce,
            model=model,
            restore_buffers=restore_buffers,
            guard=guard,
            loss_group=loss_group,
        )
        self.scaler._loss_factor = 1.0 if loss_scale_factor is None else float(loss_scale_factor)
        self.scaler._always_reads = True  # whether a step was taken decides what follows here
        self.scaler._how_to_scale = "optimizer.backward(loss)"
        self.scaler._how_to_restore = "LossScaleOptimizer(..., model=model, restore_buffers=True)"
        self.scaler._warns_of_small_eps = False  # that is done here
        self.scaler._notices_unscaled = False  # so is that, and it raises
        self._scaled = _Scaled()
        self._scaled_losses = ScaledLosses()
        self.on_step: Callable[[Step], object] | None = on_step
        self.last_step: Step | None = None
        self.weight_decay: float | None = weight_decay
        self.clipnorm: float | None = clipnorm
        self.clipvalue: float | None = clipvalue
        self.global_clipnorm: float | None = global_clipnorm
        self.ema_overwrite_frequency: int | None = ema_overwrite_frequency
        self.gradient_accumulation_steps: int | None = gradient_accumulation_steps
        self.iterations: int = 0
        self.skipped_steps: int = 0
        self._averages = Averages(ema_momentum) if use_ema else None
        self._is_averaged = False  # True inside `averaged`
        self._accumulation = Accumulation() if gradient_accumulation_steps else None
        self._masters = MasterWeights() if master_weights else None
        if self._masters is not None:
            for group in inner_optimizer.param_groups:
                self._masters.replace(inner_optimizer, group)
        super().__init__(inner_optimizer.param_groups, inner_optimizer.defaults)
        self._share()
        self._warn_of_small_eps(range(len(self.param_groups)))

    @property
    def policy(self) -> Policy[Any]:
        """The rule for the loss scale."""
        return self.scaler.policy

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by, `loss_scale_factor` apart."""
        return self.scaler.get_scale()

    def model_parameters(self) -> list[Tensor]:
        """Return the model's own parameters, where the groups hold float32 copies of them too."""
        pairs = [] if self._masters is None else self._masters.weights
        originals = {id(master): parameter for parameter, master in pairs}
        return [originals.get(id(parameter), parameter) for parameter in parameters_of(self)]

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, to call `backward` on.

        For a loss of 1, this is the factor by which to multiply gradients made by hand. `step` raises
        if `backward` was called on the loss itself and not on what is returned here.

        Raises:
            UsageError: for a loss that this optimizer has scaled already.
        """
        self._require_own_weights("scale_loss(loss)")
        self._scaled_losses.check(loss, "optimizer.scale_loss(loss).backward(), or optimizer.backward(loss)")
        scaled: Tensor = self.scaler.scale(loss)
        self._scaled.note(self.scaler, loss)
        if not self.scaler.is_enabled():
            return scaled
        expected: Tensor = self._scaled_losses.note(map_tensors(self._scaled.expect, scaled))
        return expected

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Scale a loss and compute its gradients.

        Args:
            loss: 0-dim, or with `gradient=` in the options.
            **options: for `Tensor.backward`.

        Raises:
            UsageError: for a loss that is not a tensor, or that this optimizer has scaled already.
        """
        require_tensor(loss, "optimizer.backward({})")
        self._require_own_weights("backward(loss)")
        self._scaled_losses.check(loss, "optimizer.scale_loss(loss).backward(), or optimizer.backward(loss)")
        scaled = self.scaler.scale(loss)
        self._scaled.note(self.scaler, loss)
        torch.autograd.backward(scaled, **_renamed(options))
        self._scaled.gradients = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless a gradient is not finite, and move the scale.

        Gradients are taken to be scaled. So a loss has to be scaled for every step, by `backward` or
        `scale_loss`; one `backward` that comes after `zero_grad` suffices, however many losses are added up.

        Args:
            closure: evaluates the loss, calling `backward` of this optimizer; returns it.

        Returns:
            The closure's loss; None without a closure, and from an inner optimizer that was not called.

        Raises:
            UsageError: if no loss was scaled since the last step, if none has been since `zero_grad` cleared
                the gradients, or if `backward` was not called on what `scale_loss` returned. With
                `process_group` or `reduce` only once this rank has had a loss, because a pipeline's first
                stages have none. Nothing was changed.
            AssertionError: as PyTorch, if no parameter has a gradient.
            ScaleExhausted: if the policy gives up. The parameters are not changed.
        """
        self._require_own_weights("step()")
        if closure is None:
            self._require_scaled()
        if not self._evaluates_first():
            result = self._full_step(*([] if closure is None else [partial(self._evaluate, closure)]))
        else:
            result = None if closure is None else self._evaluate(closure)
            if self._masters is not None:
                self._masters.take_gradients()
            if self._accumulation is None:
                self._full_step()
            else:
                self._micro_step(self._accumulation)
        if self.on_step is not None:
            self.on_step(self.last_step)  # type: ignore[arg-type]  # there is one now
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Sums of accumulated micro-steps stay."""
        self.inner_optimizer.zero_grad(set_to_none)
        if self._masters is not None:
            self._masters.zero_grad(set_to_none)
        self._scaled.gradients = False

    def finalize_variable_values(self) -> None:
        """Overwrite the weights with their moving averages, if there are any."""
        self._require_own_weights("finalize_variable_values()")
        if self._averages is not None:
            self._follow_model()
            self._averages.overwrite(parameters_of(self))
            self._write_back()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving averages in the weights' place for a `with` block, such as an evaluation.

        Nothing can be trained, saved or loaded there: `backward`, `scale_loss`, `step`, `state_dict`,
        `load_state_dict` and `finalize_variable_values` raise a `UsageError`.
        `model.state_dict()` has the averages.

        Raises:
            PolicyError: without `use_ema`.
            UsageError: at the end of the block, if weights were written in it. They are as before the block.
        """
        if self._averages is None:
            raise PolicyError("there are no averages. Write LossScaleOptimizer(..., use_ema=True).")
        self._follow_model()
        outside, self._is_averaged = self._is_averaged, True
        try:
            with self._averages.swapped_in(parameters_of(self)):
                self._write_back()
                yield
                self._follow_model()  # so that it is noticed
        finally:
            self._is_averaged = outside
            self._write_back()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer. It may warn, as the constructor does."""
        if "param_groups" in self.__dict__ and self.param_groups is self.inner_optimizer.param_groups:
            self.inner_optimizer.add_param_group(param_group)
            if self._masters is not None:
                self._masters.replace(self.inner_optimizer, self.param_groups[-1])
            self._warn_of_small_eps([len(self.param_groups) - 1])
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with one more entry."""
        self._require_own_weights("state_dict()")
        self._follow_model()
        state = super().state_dict()
        accumulation, averages, masters = self._accumulation, self._averages, self._masters
        state[OURS] = {
            "scaler": self.scaler.state_dict(),
            "iterations": self.iterations,
            "skipped_steps": self.skipped_steps,
            "averages": [] if averages is None else [value.clone() for value in averages.values],
            "accumulation": None if accumulation is None else accumulation.saved(),
            "masters": [] if masters is None else masters.saved(),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or one of the inner optimizer alone.

        Raises:
            ValueError: as PyTorch, for other parameter groups.
            PolicyError: for other master weights or averages. Nothing was changed.
        """
        self._require_own_weights("load_state_dict(state_dict)")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        ours = state_dict.get(OURS)
        if ours is not None:
            self._check_saved(ours)
        before_loading = [group.get("eps") for group in self.param_groups]
        self.inner_optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != OURS})
        self._share()
        pairs = zip(self.param_groups, before_loading, strict=True)
        self._warn_of_small_eps([n for n, (group, eps) in enumerate(pairs) if group.get("eps") != eps])
        if ours is not None:
            self._load(ours)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _warn_of_small_eps(self, groups: Iterable[int]) -> None:
        """Warn of groups, given by their numbers, whose `eps` is 0 in their parameters' dtype."""
        warn_of_small_eps(self.inner_optimizer, groups, "LossScaleOptimizer(..., master_weights=True)")

    def _require_own_weights(self, call: str) -> None:
        """Refuse a call while the averages are in the weights' place."""
        if self._is_averaged:
            raise UsageError(
                f"optimizer.{call} is inside `with optimizer.averaged():`, where the averages are in the "
                "place of the weights until the end of the block. Write it before or after the block."
            )

    def _evaluates_first(self) -> bool:
        """Return whether something is to be done between a closure's gradients and the inner optimizer."""
        works = (self._accumulation, self._masters, self.clipnorm, self.weight_decay or None)
        return any(work is not None for work in works)

    def _require_scaled(self) -> None:
        """Refuse gradients that nobody has scaled: they would be divided by the scale all the same."""
        scaled, scaler = self._scaled, self.scaler
        elsewhere = scaler._loss_is_elsewhere() and not scaled.ever
        if scaled.now(scaler) or elsewhere or not scaler.is_enabled():
            return
        if scaled.is_expected:
            raise UsageError(
                "optimizer.scale_loss(loss) was called, but backward was not called on what it returned, and "
                f"step would divide the gradients by {self.loss_scale:g}. Write "
                "optimizer.scale_loss(loss).backward() or optimizer.backward(loss) instead of "
                "loss.backward()."
            )
        raise UsageError(
            "no loss was scaled since the last step, and step would divide the gradients by "
            f"{self.loss_scale:g}. Write optimizer.backward(loss) instead of loss.backward(). Gradients made "
            "by hand have to be multiplied by optimizer.scale_loss(torch.ones(()))."
        )

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Return what a closure returns, which has to scale its own loss."""
        before, self._scaled = self._scaled, self._scaled.nothing(self.scaler)
        try:
            with torch.enable_grad():
                result = closure()
            self._require_scaled()
        except BaseException:
            self._scaled = before
            raise
        return result

    def _full_step(self, *closure: Callable[[], Any]) -> Any:
        if self.clipnorm is not None:
            self._unscale()
            self._clip_each()
        limits = {"max_norm": self.global_clipnorm, "max_value": self.clipvalue}
        try:
            result = self.scaler.step(self.inner_optimizer, *closure, **limits, optimizer_kwargs={})
        except BaseException:
            if self.clipnorm is not None:
                self.scaler._scale_again(self.inner_optimizer)
            raise
        if self._update_scale():
            self._updated()
        return result

    def _unscale(self) -> None:
        """Unscale the gradients; nothing is changed where there are none."""
        self.scaler._require_gradients(self.inner_optimizer)
        self.scaler._unscale_checked(self.inner_optimizer, norm=self.scaler.guard is not None)

    def _update_scale(self) -> bool:
        """Move the scale; return whether the gradients were finite."""
        before = self.scaler.last_step
        try:
            self.scaler.update()
        finally:
            self.last_step = self.scaler.last_step
            if self.last_step is not before and self.last_step is not None:
                self.skipped_steps += self.last_step.skipped
                self._scaled = self._scaled.nothing(self.scaler)
        return self.last_step is not None and not self.last_step.skipped

    def _micro_step(self, accumulation: Accumulation) -> None:
        """Sum the gradients up or drop them; with enough of them, update."""
        self.scaler._require_gradients(self.inner_optimizer)
        if self.scaler.is_enabled():
            self.scaler._unscale_checked(self.inner_optimizer)
            self.scaler._states[id(self.inner_optimizer)].stage = OptState.STEPPED  # each is recorded
        accumulation.calls += 1
        loss = self._loss_for_guard()
        finite = False
        try:
            finite = self._update_scale()
        finally:
            if not finite:
                self.inner_optimizer.zero_grad()
        if finite:
            accumulation.add(parameters_of(self))
            accumulation.add_loss(loss)
        if accumulation.calls >= (self.gradient_accumulation_steps or 0):
            self._update_with_mean(accumulation)

    def _update_with_mean(self, accumulation: Accumulation) -> None:
        if not accumulation.summed:
            accumulation.calls = 0
            return
        accumulation.mean_to(parameters_of(self))
        finite, norm, spike = True, None, None
        if self.scaler.guard is not None:  # the norm from before any clipping
            finite, norm = self.scaler._clip_unscaled(self.inner_optimizer, Clip(max_norm=math.inf))
            spike = self.scaler._judge_mean(self.inner_optimizer, finite, norm, accumulation.take_loss())
        if finite and spike is None:
            if self.clipnorm is not None:
                self._clip_each()
            limits = Clip(self.global_clipnorm, self.clipvalue)
            finite, clipped = self.scaler._clip_unscaled(self.inner_optimizer, limits)
            norm = clipped if norm is None else norm
        if finite and spike is None:
            self.inner_optimizer.step()
            self._updated()
        if self.last_step is not None:
            self.last_step = self.last_step._replace(grad_norm=norm)
            if not finite or spike is not None:  # a sum of finite numbers need not be finite
                self.skipped_steps += not self.last_step.skipped
                self.last_step = self.last_step._replace(finite=finite, skipped=True, spike=spike)

    def _loss_for_guard(self) -> float | None:
        """Return the loss of a micro-step, for the guard."""
        guarding = self.scaler._guarding
        if guarding is None or not guarding.uses_loss:
            return None
        self.scaler._losses.read()
        loss = loss_of(self.scaler._losses, "optimizer.backward(loss)", guarding.guard, may_lack=False)
        return None if loss is None else float(loss)

    def _clip_each(self) -> None:
        """Clip each parameter's gradient to the norm `clipnorm`."""
        assert self.clipnorm is not None  # the caller asked
        gradients = gather(self.inner_optimizer)
        if gradients.tensors:
            norms = self.scaler._meter.norm_of_each(gradients)
            factors = self.clipnorm / norms.clamp(min=self.clipnorm)
            for tensor, factor in zip(gradients.tensors, factors.unbind(), strict=True):
                multiply_([tensor], factor)

    def _decay(self) -> None:
        """Shrink the weights; called just before the inner optimizer steps."""
        for group in self.param_groups if self.weight_decay else ():
            weights = [p.detach() for p in group["params"] if p.grad is not None]
            if weights:
                multiply_(weights, 1.0 - float(group["lr"]) * float(self.weight_decay or 0.0))

    def _updated(self) -> None:
        """Average, overwrite and round what an update made."""
        self.iterations += 1
        parameters, every = parameters_of(self), self.ema_overwrite_frequency
        if self._averages is not None:
            self._averages.update(parameters)
            if every and self.iterations % every == 0:
                self._averages.overwrite(parameters)
        self._write_back()

    def _write_back(self) -> None:
        if self._masters is not None:
            self._masters.write_back()

    def _follow_model(self) -> None:
        """Take over what was loaded into the model since the last step."""
        if self._masters is not None:
            self._masters.follow()

    def _check_saved(self, ours: Any) -> None:
        """Refuse what another optimizer saved, and what none did."""
        missing = [name for name in SAVED if not isinstance(ours, Mapping) or name not in ours]
        if missing:
            raise PolicyError(
                f"state_dict[{OURS!r}] has no {missing[0]}: no LossScaleOptimizer saved it. Leave it out to "
                "load the inner optimizer alone."
            )
        if self.scaler.is_enabled():  # a disabled one loads nothing
            self.scaler._saved(ours["scaler"])
        for name in ("iterations", "skipped_steps"):
            whole(name, ours[name], least=0, instead=f"{name}=0")
        if self._masters is not None:
            self._masters.check(ours["masters"])
        if ours["averages"] and self._averages is None:
            raise PolicyError(
                "the checkpoint has averages of the weights, which would be lost. "
                f"Write use_ema=True, or state_dict[{OURS!r}]['averages'] = [] to drop them."
            )
        check_shapes("averages", ours["averages"], parameters_of(self))
        if self._accumulation is not None:
            self._accumulation.check(ours["accumulation"], parameters_of(self))

    def _load(self, ours: dict[str, Any]) -> None:
        self.scaler.load_state_dict(ours["scaler"])
        self._scaled = self._scaled.nothing(self.scaler)  # gradients from before have another scale
        if self._masters is not None:
            self._masters.load(ours["masters"])
        self.iterations, self.skipped_steps = ours["iterations"], ours["skipped_steps"]
        if self._averages is not None:
            self._averages.load(ours["averages"], parameters_of(self))
        if self._accumulation is not None:
            self._accumulation.load(ours["accumulation"], parameters_of(self))

    def _share(self) -> None:
        """Have the inner optimizer's groups and state, and be asked before it steps."""
        self.param_groups: list[dict[str, Any]] = self.inner_optimizer.param_groups
        self.state: defaultdict[Tensor, Any] = self.inner_optimizer.state
        hooks = self.inner_optimizer._optimizer_step_pre_hooks
        if not any(isinstance(hook, _Decay) and hook.owner() is self for hook in hooks.values()):
            self.inner_optimizer.register_step_pre_hook(_Decay(self))


@dataclass(slots=True)
class _Scaled:
    """What has been scaled for the next step.

    Attributes:
        by_hand: by `scale_loss`, for gradients made by hand: what was scaled has no graph. They may come at
            any time, after `zero_grad` as well. Also a loss scaled in compiled code, where nothing is heard
            of its backward.
        gradients: by `backward`, of the optimizer or of what `scale_loss` returned, and not cleared since.
        is_expected: whether `scale_loss` returned a loss to call `backward` on.
        ever: whether anything was scaled before.
        captured: whether it was scaled while a CUDA graph was captured, which replays it unheard.
        count: how many times the scaler has scaled, as far as is known here. Beyond that others called it.
    """

    by_hand: bool = False
    gradients: bool = False
    is_expected: bool = False
    ever: bool = False
    captured: bool = False
    count: int = 0

    def note(self, scaler: GradScaler, loss: Any) -> None:
        """Note that the scaler has scaled a loss."""
        self.ever, self.count = True, scaler._scalings
        self.captured = self.captured or _is_captured(loss)

    def expect(self, scaled: Tensor) -> Tensor:
        """Return a scaled loss that tells, when its gradients are computed."""
        if not scaled.requires_grad or torch.compiler.is_compiling() or is_of_transform(scaled):
            self.by_hand = True
        else:
            self.is_expected = True
            scaled.register_hook(self._has_gradients)  # type: ignore[no-untyped-call]
        return scaled

    def _has_gradients(self, gradient: Tensor) -> None:
        self.gradients = True

    def now(self, scaler: GradScaler) -> bool:
        """Return whether gradients can be scaled ones."""
        return self.by_hand or self.gradients or self.captured or scaler._scalings > self.count

    def nothing(self, scaler: GradScaler) -> _Scaled:
        """Return what there is after a step."""
        return _Scaled(ever=self.ever, captured=self.captured, count=scaler._scalings)


def _is_captured(loss: Any) -> bool:
    """Return whether what is computed now is recorded into a CUDA graph."""
    return isinstance(loss, Tensor) and is_capturing(loss)


class _Decay:
    """What the inner optimizer calls before it steps; keeps nobody alive."""

    def __init__(self, owner: LossScaleOptimizer) -> None:
        self.owner = weakref.ref(owner)

    def __call__(self, *_: Any) -> None:
        owner = self.owner()
        if owner is not None:
            owner._decay()


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `Tensor.backward` as `torch.autograd.backward` calls them."""
    return {"grad_tensors" if name == "gradient" else name: value for name, value in options.items()}


def _scaler(inner: Any, scale: float, steps: int, policy: Policy[Any] | None, **options: Any) -> GradScaler:
    device = next((p.device.type for p in parameters_of(inner)), "cpu")
    check_scale(scale, steps)
    if policy is None:
        warn_if_inexact("initial_scale", scale)
        with warnings.catch_warnings(action="ignore", category=InexactScale):  # said just now
            return GradScaler(device, init_scale=scale, growth_interval=steps, **options)
    rule = {"initial_scale": (scale, INITIAL_SCALE), "dynamic_growth_steps": (steps, INTERVAL)}
    return GradScaler(device, policy=given_policy(policy, rule), **options)


def _check_inner(inner: Any, weight_decay: float | None, steps_apart: bool) -> None:
    if not isinstance(inner, torch.optim.Optimizer):
        raise PolicyError(
            f"inner_optimizer={inner!r} is not a torch.optim.Optimizer. "
            "Write LossScaleOptimizer(torch.optim.AdamW(model.parameters()))."
        )
    if isinstance(inner, LossScaleOptimizer):
        raise PolicyError("inner_optimizer scales the loss already. Write LossScaleOptimizer(SGD(...)).")
    if any(parameter.is_meta for parameter in parameters_of(inner)):
        raise PolicyError(
            "the optimizer's parameters are on the device meta, which has no numbers to train. Make the "
            'optimizer after model.to_empty(device="cuda"), or whatever puts the model on its device.'
        )
    if steps_apart and isinstance(inner, torch.optim.LBFGS):
        raise PolicyError(
            "LBFGS evaluates its closure itself: nothing can be done between its gradients and its step. "
            "Leave out gradient_accumulation_steps, master_weights, clipnorm and weight_decay."
        )
    decays = [group["weight_decay"] for group in inner.param_groups if group.get("weight_decay")]
    if weight_decay and decays:
        raise PolicyError(
            f"weight_decay={weight_decay!r} would come on top of the {decays[0]!r} that "
            f"{type(inner).__name__} applies. Write it in one place, and 0 in the other."
        )
