"""`torch.amp.GradScaler` on a preamp policy.

Call order, checks and messages are PyTorch's own; the policy decides the next scale. The parts: the policy's
state (`loss_scale`), what is measured in gradients (`gradient_stats`), gradients of two owners
(`shared_gradients`), and steps that are taken back (`undo`).
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from preamp.arrays import torch as arithmetic
from preamp.arrays.torch import Gradients, Stamp, gather
from preamp.arrays.torch_devices import check_device, is_capturing, widest
from preamp.checks import (
    FLOAT32_MAX,
    callable_or_none,
    is_number,
    level_of_caller,
    shown,
    some_of,
    to_float32,
)
from preamp.errors import PolicyError, UsageError
from preamp.guards import Guard
from preamp.policy import Dynamic, Policy
from preamp.scaling import Measured, Step, given_guard, with_rules
from preamp.systems.arguments import warn_if_out_of_bounds
from preamp.torch.nested import map_tensors
from preamp.torch.scaling.buffers import Buffers, Ruined, some_are_ruined, statistics_in
from preamp.torch.scaling.culprits import Culprits, backward_order, culprits, largest, names
from preamp.torch.scaling.gradient_stats import (
    Found,
    GradientMeter,
    GradientStats,
    Losses,
    MeasuredGradients,
    Number,
    all_true,
    gradient_stats,
    mean_in,
    measured_of,
    step_of,
)
from preamp.torch.scaling.guarding import (
    DROPS_GUARD,
    Guarding,
    has_guard,
    loss_and_count,
    loss_of,
    mean_over_ranks,
)
from preamp.torch.scaling.loss_scale import (
    SETTINGS,
    DeviceScale,
    HostScale,
    changed_policy,
    chosen_policy,
    five_numbers_suffice,
    numbers_and_settings,
    set_scale,
    setting_of,
)
from preamp.torch.scaling.optimizers import (
    OptimizerLike,
    begins_with_garbage,
    evaluates_often,
    is_of_torch,
    parameters_of,
    step_after,
    step_takes,
    warn_of_small_eps,
)
from preamp.torch.scaling.ranks import Agreement, check_loss_group, number_of_ranks
from preamp.torch.scaling.shared_gradients import AlreadyUnscaled
from preamp.torch.scaling.undo import Snapshot, init_optimizer_state, step_where

R = TypeVar("R", bound="Step | None")
T = TypeVar("T")
SCALES = "scaler.scale(loss).backward()"  # what the user of this scaler writes
MAX_DIVISOR = 2.0**100  # well below 2**126, above which a float32 reciprocal is subnormal, and flushed to 0


class Clip(NamedTuple):
    """Limits for clipping. None: no limit."""

    max_norm: float | None = None
    max_value: float | None = None


NO_CLIP = Clip()


class FailedStep(NamedTuple):
    """Measurements of a step that raised, reused if it is tried again: the gradients may be clipped by then.

    Attributes:
        gradients: as they were left.
        stats: what this rank measured in the scaled gradients, if the policy uses them.
        norm: the norm that was taken, if any.
        divisor: what it has to be divided by.
    """

    gradients: list[Stamp]
    stats: GradientStats | None
    norm: Number | None
    divisor: Number

    def is_of(self, parameters: list[Tensor]) -> bool:
        """Return whether these parameters still have those gradients, and nobody has written to them."""
        present = [p.grad for p in parameters if p.grad is not None]
        return len(present) == len(self.gradients) and all(
            [stamp.fits(gradient) for stamp, gradient in zip(self.gradients, present, strict=True)]
        )


@dataclass(slots=True, eq=False)
class OptimizerState:
    """One optimizer in one iteration, from its first use to `update`.

    PyTorch keeps a dict. Its keys, and keys that other code adds, work here too.

    Attributes:
        stage: whether it was unscaled or has stepped.
        found_inf_per_device: PyTorch's flags.
        optimizer: kept until `update`, so that its id cannot be reused.
        fused: whether its `step` divides by `grad_scale` and skips by `found_inf`. False for a wrapper around
            such an optimizer: attributes that are set on the wrapper do not reach it.
        measured: what its step found.
        stats: the policy's statistics over all ranks, measured when the gradients were unscaled.
        stats_here: the same of this rank alone.
        meshes: of its DTensors, when they were unscaled.
        divided: what its gradients were divided by in place.
        failed: what was measured for a step that raised.
        norm: of the gradients when `unscale_` was called, for a guard: they may be clipped by now.
        culprits: names the parameters whose gradients were not finite then: they may be zeroed by now.
        others: what other code has put here.
    """

    stage: OptState = OptState.READY
    found_inf_per_device: dict[torch.device, Tensor] = field(default_factory=dict)
    optimizer: OptimizerLike | None = None
    fused: bool = False
    measured: MeasuredGradients | None = None
    stats: GradientStats | None = None
    stats_here: GradientStats | None = None
    meshes: list[Any] = field(default_factory=list)
    divided: list[Number] = field(default_factory=list)
    failed: FailedStep | None = None
    norm: Number | None = None
    culprits: Callable[[], Culprits] = Culprits
    others: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in PYTORCHS_KEYS else self.others[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in PYTORCHS_KEYS:
            setattr(self, name, value)
        else:
            self.others[name] = value

    def __contains__(self, name: object) -> bool:
        return name in PYTORCHS_KEYS or name in self.others

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, as of a dict."""
        return getattr(self, name) if name in PYTORCHS_KEYS else self.others.get(name, default)

    def preset(self) -> Any:
        """Return what a user set as `grad_scale` of a fused optimizer, 1.0 without it."""
        given = getattr(self.optimizer, "grad_scale", None) if self.fused else None
        return 1.0 if given is None else given


PYTORCHS_KEYS = ("stage", "found_inf_per_device")


class _Overflow(Exception):  # a signal, not an error: it leaves a closure and goes no further
    """A closure's gradients were not finite, or a guard skips the step."""


def _setting(name: str) -> Any:
    """Return a property that shows a setting of the policy, and of a disabled scaler its argument."""
    return property(
        lambda scaler: setting_of(scaler.policy, name) if scaler._enabled else scaler._settings[name],
        lambda scaler, value: scaler._set(name, value),
    )


class GradScaler(torch.amp.GradScaler):
    """Scale the loss, unscale the gradients, skip the steps that overflowed, move the scale.

    A drop-in for `torch.amp.GradScaler`: same arguments, methods, call order, `state_dict` and errors.
    The default rule is PyTorch's with a floor and a ceiling, and the scale still grows if `growth_interval`
    is lowered below the clean steps already counted; `policy=dialects.TORCH` has no bounds.

    Args:
        device: the device type the scaler works on, such as "cuda" or "cpu".
        init_scale: the scale of the first step.
        growth_factor: what a growth multiplies the scale by.
        backoff_factor: what an overflow multiplies the scale by.
        growth_interval: clean steps in a row before the scale grows.
        enabled: False makes every method a no-op and `step` a plain `optimizer.step`, clipped if asked.
        policy: any preamp policy or dialect, instead of the four settings above.
        on_step: called with a `Step` at the end of every `update` that ends a step, also with
            `enabled=False`. A `Trace` is such a callable. On an accelerator this costs one read a step.
        process_group: the ranks that hold different gradients of one model (tensor, pipeline or fully
            sharded parallel), so that all of them skip together. DDP needs none, and DTensors have theirs.
        reduce: instead of a group, a function that sums a float64 tensor over ranks: of shape [2], for a
            policy that needs the peak [280]. On a device without float64, such as MPS, it is float32, and
            one longer.
        capturable: never synchronize with the device: for `torch.compile(fullgraph=True)` and CUDA graphs.
            The state stays on the device, and `last_step` is copied from there when it is read. A step that
            must not happen is undone with `torch.where`, unless the optimizer is fused. Take one step before
            capturing a graph.
        model: the model whose buffers are checked after a skipped step: an overflow in forward reaches
            BatchNorm's running statistics before the step can be skipped. `last_step.buffers` names those
            that are not finite; on an accelerator without `on_step`, at the time when it is read. Costs
            nothing while steps are taken.
        restore_buffers: in a skipped step give all buffers the values that they had after the last step that
            was taken, or when the scaler was made or its state or the model's was loaded, if that was later.
            Costs a copy of all buffers of `model` per step, on their device, and on an accelerator one read.
        guard: any guard of `preamp.guards`, to skip steps whose loss or gradient norm is a spike. Measures
            the norm as `max_norm` does. To guard without scaling: `policy=Static(1.0)`.
        loss_group: the ranks over which a guard takes the mean of the losses: all that have to make the same
            decision, such as every replica and every shard of one model. None: all ranks of the job, which
            then all have to step. It costs one all-reduce per step, unless that of the gradients is over the
            same ranks.

    Attributes:
        policy: the rule in force.
        last_step: the latest `Step`: available after `step`, complete after `update`. None before. Its `loss`
            is the sum of the losses that were scaled on this rank since the previous update; if a closure is
            evaluated several times, as by LBFGS, those of the last evaluation. With a guard that uses the
            loss it is the mean over ranks, which the guard was given. It is None if one of them was
            not a single number, or was changed in place (`loss.mul_(2)`) before it was read. With
            `enabled=False`, `skipped` is False, and `finite` is True unless `max_norm` found a norm that is
            not finite; `grad_norm` is that norm.

    Raises:
        AssertionError: as PyTorch, for a growth factor <= 1 or a backoff factor >= 1.
        PolicyError: for settings that PyTorch accepts and that cannot work, and for a device that never
            computes ("meta") or does not exist ("gpu").
        InexactScale: a warning, for a scale or factor that is not a power of two.
        ScaleExhausted: from `update`, if the policy gives up, as it may at its floor.
        UserWarning: a warning, once, if a skipped step left inf or NaN in buffers of `model`, or without
            `model` in BatchNorm's statistics, and nothing restores them. Not where the host does not know
            that the step was skipped.

    >>> import torch
    >>> from preamp.torch import GradScaler
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler = GradScaler("cpu", init_scale=8.0)
    >>> scaler.scale(2 * weight.sum()).backward()
    >>> scaler.step(optimizer, max_norm=1.0)
    >>> scaler.update()
    >>> weight.item(), scaler.last_step.skipped, scaler.last_step.grad_norm, scaler.get_scale()
    (0.5, False, 2.0, 8.0)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy[Any] | None = None,
        on_step: Callable[[Step], object] | None = None,
        process_group: Any = None,
        reduce: Callable[[Tensor], Tensor | None] | None = None,
        capturable: bool = False,
        model: torch.nn.Module | None = None,
        restore_buffers: bool = False,
        guard: Guard[Any] | None = None,
        loss_group: Any = None,
    ) -> None:
        check_device(device)
        callable_or_none("on_step", on_step, "on_step=Trace(), or any function")
        self._device, self._enabled = device, enabled and _is_there(device, type(self).__name__)
        values = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._settings = dict(zip(SETTINGS, values, strict=True))
        self._owns_policy = policy is None
        rule: Policy[Any] = chosen_policy(policy, self._settings) if self._enabled else Dynamic()
        self._loss_scale: HostScale | DeviceScale = HostScale(rule)
        self._set_policy(rule)
        self._meter = GradientMeter(Agreement(process_group, reduce))
        if given_guard(guard) is not None and not enabled:
            raise PolicyError(
                f"guard={guard!r} has no effect with enabled=False. To guard without scaling, write "
                "GradScaler(policy=Static(1.0), guard=guard)."
            )
        check_loss_group(loss_group, guard)
        self._guarding = None if guard is None else Guarding(guard, loss_group)
        self._capturable = capturable
        if capturable and on_step is not None:
            raise _needs_reads(
                f"on_step={on_step!r}", "leave out on_step: scaler.last_step is computed when it is read"
            )
        if capturable and rule.gives_up:
            raise _needs_reads(
                f"policy={policy!r}, which can end the training,",
                "at_floor='hold'",
            )
        # Not PyTorch's __init__: the scale and its counts live in `_loss_scale`.
        self._buffers = _buffers_of(model, restore_buffers, capturable)
        self.on_step = on_step
        self._states: defaultdict[int, OptimizerState] = defaultdict(_new_state)  # by the optimizer's id
        self._last: partial[Step | None] | Step | None = None  # a partial reads it
        self._last_of: dict[int, Callable[[], Step | None]] = {}  # by the id, since the last update
        self._losses = Losses()
        self._losses.keeps_in_graphs = self._guarding is not None and self._guarding.uses_loss
        self._already = AlreadyUnscaled()  # gradients of parameters that several optimizers share
        self._inspected: set[int] = set()  # ids of the optimizers that were checked for likely mistakes
        self._order: dict[int, int] | None = None  # in which backward reaches parameters, by their id
        self._scalings = 0  # counts `scale`, so that a closure that never calls it is noticed
        self._is_pending = False  # whether a loss was scaled since the last update
        self._was_scaled = False  # whether one was since the last update after a step
        # Other ranks may scale the loss, and graphs do without being heard of: then it cannot be told.
        self._notices_unscaled = process_group is None and reduce is None and not capturable
        self._changed_by: str | None = None  # what changed the scale after a loss was scaled with another
        self._statistics: list[weakref.ref[Tensor]] = []  # of batch norms, where there is no model to ask
        self._warns_of_ruined = not (restore_buffers or capturable)

    @property
    def policy(self) -> Policy[Any]:
        """The rule in force."""
        return self._loss_scale.policy

    @property
    def guard(self) -> Guard[Any] | None:
        """The rule that skips spikes; None without one."""
        return None if self._guarding is None else self._guarding.guard

    @property
    def policy_state(self) -> Any:
        """The policy's state in floats. If it is on a device, it is read.

        On a device a `bad` that the rule does not use stays as it is.
        """
        return self._loss_scale.floats()

    @property
    def last_step(self) -> Step | None:
        """The latest `Step`. If its numbers are on a device, they are read now."""
        last: Any = self._last
        if isinstance(last, partial):
            self._last = last = self._with_rules(last())
        step: Step | None = last
        return step

    @property
    def _steps(self) -> int | Tensor:  # for the lens
        return self._loss_scale.steps  # type: ignore[no-any-return]

    def _has_skipped(self) -> bool:
        """Return whether the latest step was skipped. Unlike `last_step`, it does not read the loss."""
        step = self._last(loss=None) if isinstance(self._last, partial) else self._last
        return step is not None and bool(step.skipped)

    def last_step_of(self, optimizer: OptimizerLike) -> Step | None:
        """Return one optimizer's part of the latest step; None if it took none."""
        state = self._states.get(id(optimizer))
        read: Callable[[], Step | None] | None = self._last_of.get(id(optimizer))
        if state is not None and state.measured is not None:
            read = partial(step_of, [state.measured], self._loss_scale.steps, None, self._losses.sum)
        return self._with_rules(read()) if read else None

    def _with_rules(self, step: R) -> R:
        return with_rules(step, self.policy, self.guard) if self._enabled else step

    def scale(self, outputs: T) -> T:
        """Multiply by the scale: a tensor, or all tensors in lists, tuples, dicts and other iterables.

        Returns:
            The same structure; tensors of the dtype that a product with a float32 scalar has, and
            float32 for float16, so that a scaled loss does not overflow.

        Raises:
            ValueError: as PyTorch, for what holds something else.
        """
        if not self._enabled:
            self._losses.add(outputs)
            return outputs
        if isinstance(outputs, Tensor):  # the usual case, as a short cut
            return self._times_scale(outputs)  # type: ignore[return-value]
        return map_tensors(self._times_scale, outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, and note whether all are finite.

        Gradients may have any float or complex dtype, and may be sparse. One that two parameters or two
        optimizers share is divided once. Call this only to look at gradients or to change them: otherwise
        `step` does it, and clips on the way if asked.

        Raises:
            AssertionError: as PyTorch, before the first `scale`.
            RuntimeError: as PyTorch, for a second call before `update`.
            UsageError: as `step`, if the scale was changed after the loss was scaled.
        """
        if self._enabled:
            self._unscale_checked(optimizer, norm=True)

    def _unscale_checked(self, optimizer: torch.optim.Optimizer, *, norm: bool = False) -> None:
        """Unscale gradients, after the checks that `unscale_` documents; take their norm if it is wanted."""
        self._require_scale("unscale_")
        state = self._state_of(optimizer)
        if state.stage is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Call it once "
                "for each optimizer and iteration, after the last backward(), and update() at the end. For "
                "an optimizer that evaluates the loss several times, such as SAM or LBFGS, write "
                "scaler.step(optimizer, closure), where the closure scales the loss."
            )
        if state.stage is OptState.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step(). Write scaler.unscale_(optimizer) between "
                "backward() and scaler.step(optimizer), and scaler.update() at the end of each iteration."
            )
        self._refuse_other_scale(optimizer, state)
        self._unscale(optimizer, state, norm=norm)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        max_value: float | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer unless a gradient is not finite; unscale and clip first.

        One pass over the gradients gives their norm and tells whether all are finite; a fused optimizer gets
        the factor to multiply them by as one number. Afterwards `.grad` holds the gradients that were applied
        or, after a skipped step, the unscaled ones. Where nothing is read and a fused optimizer skipped, they
        are still scaled, as in PyTorch.

        Args:
            optimizer: any optimizer, fused or not.
            *args: for `optimizer.step`. A closure is evaluated with gradients that are unscaled and
                checked each time; it has to call `scaler.scale(loss).backward()`.
            max_norm: clip the unscaled gradients so that their global L2 norm is at most this.
                `math.inf` only measures it.
            max_value: clip every unscaled entry to [-max_value, max_value] before that.
            optimizer_kwargs: keyword arguments for `optimizer.step`, of any name. The only way to give it a
                `max_norm`, `max_value` or `optimizer_kwargs` of its own.
            **kwargs: for `optimizer.step`.

        Returns:
            What `optimizer.step` returns, None when it was skipped. `last_step.skipped` tells them apart.

        Raises:
            PolicyError: if other code wrote a scale of 0, inf or NaN, or if `reduce` returned something other
                than None or the sum. No parameter was changed.
            AssertionError: as PyTorch, when there is nothing to check.
            RuntimeError: as PyTorch, for a second call before `update`.
            UsageError: if `update(new_scale)` or `load_state_dict` changed the scale after scaling the loss;
                for a closure that does not scale its loss, for what is not an optimizer, and for a
                `max_norm` or `max_value` that `optimizer.step` takes as well, without `optimizer_kwargs` to
                say whose it is.
        """
        kwargs = _for_optimizer(optimizer, optimizer_kwargs, kwargs, max_norm=max_norm, max_value=max_value)
        clip = NO_CLIP
        if max_norm is not None or max_value is not None:
            clip = Clip(_limit("max_norm", max_norm), _limit("max_value", max_value))
        if not self._enabled:
            return self._step_disabled(optimizer, clip, args, kwargs)
        evaluates = callable(args[0] if args else kwargs.get("closure"))
        if not evaluates and self._loss_scale.tensor is None:  # a closure scales later
            self._require_scale("step")
        state = self._state_of(optimizer)
        if state.stage is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call scaler.update() once per "
                "iteration, after scaler.step(optimizer); with several optimizers, step each of them once "
                "before it."
            )
        if evaluates:
            return self._step_with_closure(optimizer, state, clip, args, kwargs)
        if self._changed_by is not None:
            self._refuse_other_scale(optimizer, state)
        if state.fused and step_takes(type(optimizer), "grad_scaler"):
            return self._step_passing_grad_scaler(optimizer, state, clip, args, kwargs)

        on_device = self._stays_on_device(optimizer, state)
        began = state.stage
        gradients, divisor = self._measure_and_clip(optimizer, state, clip, on_device=on_device)
        # Divide, in place or in a fused kernel, and let the optimizer step where all gradients are finite.
        prepare = self._prepare_on_device if on_device else self._prepare_on_host
        step = prepare(optimizer, state, gradients, divisor, args, kwargs)
        try:
            result = step()
        except BaseException:
            self._undo_division(optimizer, state, gradients, began)
            raise
        finally:
            if state.fused:
                for name in ("grad_scale", "found_inf"):
                    if hasattr(optimizer, name):
                        delattr(optimizer, name)
        if state.fused or on_device:
            arithmetic.note_writing(gradients.tensors)
        self._note_step(optimizer, state)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Advance the policy by the results of the steps of this iteration, or set a scale.

        Args:
            new_scale: the scale of the next step, as a number or a one-element tensor.

        Raises:
            AssertionError: as PyTorch, when no optimizer was unscaled or stepped.
            PolicyError: for a scale that would turn gradients into 0, inf or NaN.
            ScaleExhausted: if the policy gives up. The scaler remains usable.
        """
        if not self._enabled:
            self._loss_scale.steps += 1
            self._losses.take()
            if self.on_step is not None:
                step = self.last_step
                if step is not None and step.index == self._loss_scale.steps - 1:  # else no optimizer stepped
                    self.on_step(step)
            return
        if self._loss_scale.tensor is None:
            self._require_scale("update")
        steps = self._measured_steps()
        if new_scale is None and not steps:
            raise AssertionError(_nothing_checked(self._states.values()))
        if new_scale is not None:
            before, scale = self._known_scale(), self._scale_by_hand(new_scale)
            set_scale(self._loss_scale, scale)
            self._note_change("scaler.update(new_scale)", before)
            self._end(steps)
        else:
            self._advance(steps)

    def get_scale(self) -> float:
        """Return the current scale, or 1.0 if scaling is disabled. Reads a device."""
        return self._loss_scale.scale if self._enabled else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's five entries and, where there is more to remember, one of ours.

        That is "preamp_state": the number of steps, once it is not 0, and what the policy remembers besides
        its scale. PyTorch's scaler loads the checkpoint without it.
        """
        if not self._enabled:
            return {}
        numbers = self._loss_scale.floats()._asdict()
        state: dict[str, Any] = {"scale": self.get_scale()}
        state |= {name: getattr(self, f"_{name}") for name in SETTINGS[1:]}
        state["_growth_tracker"] = self._get_growth_tracker()
        more: dict[str, Any] = {}
        if not five_numbers_suffice(self.policy):
            more = {name: value for name, value in numbers.items() if name not in ("scale", "good")}
        steps = int(self._loss_scale.steps)
        if self._guarding is not None:
            more |= self._guarding.state_dict()
        if steps or more:
            state["preamp_state"] = {**more, "steps": steps}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this scaler or of `torch.amp.GradScaler`.

        As in PyTorch, the checkpoint's growth and backoff settings replace those of the constructor;
        a `policy` that was given stays as it is.

        Raises:
            RuntimeError: for the empty state of a disabled scaler.
            KeyError: for a missing entry.
            PolicyError: for an invalid scale or setting. The scaler is not changed.
            UserWarning: a warning, for a scale outside the policy's bounds, which is kept, and for the state
                of a guard where there is none.
        """
        if self._guarding is None and has_guard(state_dict):
            warnings.warn(DROPS_GUARD, stacklevel=level_of_caller("torch", "deepspeed"))
        if self._enabled:
            numbers, settings = self._saved(state_dict)
            before = self._known_scale()
            policy_state = self.policy.restore(numbers)
            if self._guarding is not None:
                self._guarding.load(self._guarding.check(numbers))
            if self._owns_policy:
                self._set_policy(changed_policy(self.policy, **settings))
            self._loss_scale.set_state(policy_state)
            self._note_change("scaler.load_state_dict(state_dict)", before)
            if self._buffers is not None and self._buffers.restores:
                self._buffers.keep()  # those of the checkpoint, if the model was loaded first
            warn_if_out_of_bounds(
                self.policy, float(policy_state.scale), 'state_dict["scale"] = {bound!r} before loading'
            )
            if isinstance(self._loss_scale.steps, Tensor):  # in place: a captured graph counts in it
                self._loss_scale.steps.fill_(numbers["steps"])
            else:
                self._loss_scale.steps = numbers["steps"]

    def _known_scale(self) -> float | None:
        """Return the scale, or None if it would have to be read from a device."""
        return float(self._loss_scale.now.scale) if isinstance(self._loss_scale, HostScale) else None

    def _note_change(self, by: str, before: float | None) -> None:
        """Note that the scale was changed, for gradients that have the one from before in them."""
        if self._is_pending and (before is None or before != self._known_scale()):
            self._changed_by = by

    def _saved(self, state_dict: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the numbers and the settings in a checkpoint; raise what `load_state_dict` raises."""
        numbers, settings = numbers_and_settings(state_dict)
        self.policy.restore(numbers)
        if self._guarding is not None:
            self._guarding.check(numbers)
        if self._owns_policy:
            changed_policy(self.policy, **settings)
        return numbers, settings

    def _state_of(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        if not hasattr(optimizer, "param_groups"):
            raise UsageError(
                f"{shown(optimizer)} is not an optimizer: it has no param_groups. "
                "Write scaler.step(optimizer), once for each optimizer."
            )
        if not torch.compiler.is_compiling() and id(optimizer) not in self._inspected:
            self._inspect(optimizer)
        state: OptimizerState = self._states[id(optimizer)]
        state.optimizer = optimizer
        supports = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        state.fused = supports and isinstance(optimizer, torch.optim.Optimizer)
        return state

    def _inspect(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of likely mistakes the first time that an optimizer is used."""
        self._inspected.add(id(optimizer))
        if not self._meter.agreement.always:
            _warn_of_shards(optimizer)
        warn_of_small_eps(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        if self._states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        read: dict[str, Any] = {"_last": self.last_step, "_last_of": {}, "_order": None, "_inspected": set()}
        read["_statistics"] = []
        return {**self.__dict__, **read, "_loss_scale": self._loss_scale.without_tensors()}

    # Private names of PyTorch's class that subclasses and other libraries use.

    @property
    def _per_optimizer_states(self) -> defaultdict[int, Any]:  # where PyTorch has dicts
        return self._states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Mapping[int, Any]) -> None:
        """End the iteration: PyTorch's `update`, whose body subclasses copy, ends by replacing the states."""
        steps = self._measured_steps()
        self._loss_scale.adopt()  # the scale that was written
        self._end(steps)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        return self._require_scale(funcname), self._loss_scale.tracker  # type: ignore[return-value]

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._loss_scale.place(dev)
        if self._capturable:
            self._loss_scale = self._loss_scale.to_device()
            self._loss_scale.steps = torch.full((), int(self._loss_scale.steps), device=dev)

    def _get_growth_tracker(self) -> int:
        return self._loss_scale.good if self._enabled else 0

    @property
    def _scale(self) -> Tensor | None:
        return self._loss_scale.tensor

    @_scale.setter
    def _scale(self, scale: Tensor | None) -> None:
        self._loss_scale.tensor = scale

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._loss_scale.tracker

    @_growth_tracker.setter
    def _growth_tracker(self, tracker: Tensor | None) -> None:
        self._loss_scale.tracker = tracker

    @property
    def _init_scale(self) -> float:
        return self._loss_scale.scale

    @_init_scale.setter
    def _init_scale(self, scale: float) -> None:
        set_scale(self._loss_scale, scale)

    @property
    def _init_growth_tracker(self) -> int:
        return self._loss_scale.good

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, good: int) -> None:
        self._loss_scale.set(good=float(good))

    _growth_factor = _setting("growth_factor")
    _backoff_factor = _setting("backoff_factor")
    _growth_interval = _setting("growth_interval")

    def _maybe_opt_step(
        self, optimizer: OptimizerLike, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        measured = optimizer_state.measured  # None in a subclass with PyTorch's own `step`
        taken = _flags_are_clear(optimizer_state) if measured is None else measured.taken
        return optimizer.step(*args, **kwargs) if taken else None

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: OptimizerLike, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Multiply an optimizer's gradients; return a flag per device of this rank.

        float16 is always allowed. Subclasses may override this, as they do PyTorch's.
        """
        gradients = gather(optimizer)
        if gradients.meshes:
            self._states[id(optimizer)].meshes = gradients.meshes
        done = self._already.among(gradients)
        tensors = gradients.tensors
        if done:
            pairs = zip(gradients.parameters, tensors, strict=True)
            tensors = [t for p, t in pairs if not self._already.unscale_rest_(p, t)]
        found = arithmetic.unscale_(tensors, inv_scale, found_inf)
        arithmetic.note_writing(gradients.tensors)
        scale = self._known_scale()
        if gradients.tensors and (done or (scale is not None and scale < 1.0)):
            # The kernel has not checked what was unscaled before, nor the results of dividing by less than 1.
            if scale is None:
                fits: Any = gradients.fit(gradients.largest(), torch.ones_like(found_inf))
                found_inf.add_(fits.logical_not().to(found_inf))
            else:
                found_inf.add_(not gradients.fits(1.0))
            found.setdefault(found_inf.device, found_inf)
        self._already.mark(optimizer)
        return found

    def _check_inf_per_device(self, optimizer: OptimizerLike) -> dict[Any, Any]:
        """Note whether an optimizer's gradients are finite, and leave them as they are."""
        scale = self._require_scale("_check_inf_per_device")
        gradients = gather(optimizer)
        state: OptimizerState = self._states[id(optimizer)]
        found = self._meter.measure(
            gradients,
            torch.ones_like(scale),
            scale.device,
            read=False,
            norm=False,
            stats=self._policy_stats(optimizer, state, gradients, read=False),
        )
        state.stats = found.stats
        present = gradients.tensors or self._meter.agreement.needed(gradients.meshes)
        state.found_inf_per_device = {scale.device: found.finite.logical_not().float()} if present else {}
        return state.found_inf_per_device

    # How a step is taken. Every way measures the gradients, divides and clips them, and steps or skips:
    #
    #   way               where                                        divides    decides
    #   disabled          enabled=False                                -          -
    #   closure           the optimizer evaluates the loss             scaler     host, at each evaluation
    #   grad_scaler=      the optimizer's `step` takes the scaler      optimizer  optimizer
    #   PyTorch's kernel  host; not fused, no limit, no norm wanted    kernel     host
    #   host              host, otherwise                              scaler*    host
    #   device            device; a fused optimizer                    optimizer  optimizer
    #   undone            device; capturable, not fused                scaler     torch.where, afterwards
    #
    # * A fused optimizer divides itself. On the host a flag is read, which decides. On a device nothing is
    # read: the flag goes to the optimizer and to the policy there. `_stays_on_device` chooses.

    @torch.no_grad()
    def _measure_and_clip(
        self,
        optimizer: OptimizerLike,
        state: OptimizerState,
        clip: Clip,
        *,
        on_device: bool,
        together: bool = False,
    ) -> tuple[Gradients, Any]:
        """Measure the gradients and clip them; return them and what they are still to be divided by.

        One division unscales and clips, so it comes last; until then limits are multiplied by the divisor.

        Args:
            optimizer: their owner.
            state: of the optimizer. What was measured is noted there.
            clip: how to clip.
            on_device: whether nothing is read.
            together: whether one division has to unscale and clip. If not, PyTorch's kernel may unscale.
        """
        if on_device is not self._loss_scale.on_device:
            self._loss_scale = self._loss_scale.to_device() if on_device else self._loss_scale.to_host()
        self._loss_scale.adopt()
        state.divided = []
        guarding = self._guarding
        needs_norm = self._needs_norm(state, clip)
        if not on_device and not (together or state.fused or clip != NO_CLIP or guarding):
            # Nothing but PyTorch's kernel is needed, which unscales and checks in one pass.
            if state.stage is OptState.READY:
                has_none = all(parameter.grad is None for parameter in parameters_of(optimizer))
                if has_none and not self._meter.agreement.always:  # other ranks may have some
                    raise AssertionError(_no_gradients(optimizer))
                is_own = getattr(self.unscale_, "__func__", None) is GradScaler.unscale_
                unscale: Any = self._unscale_checked if is_own else self.unscale_
                unscale(optimizer)  # no norm: the user has not asked for these gradients
            return self._measured_by_kernel(optimizer, state)

        gradients = gather(optimizer)
        scaled = self._unscale_if_early(optimizer, state, gradients, clip)
        self._require_checked(optimizer, state, gradients)

        # Measure, and agree with other ranks. Where nothing is read, one pass always measures: gradients
        # that were unscaled may have been changed since, and their flags are not known here.
        scale, divisor = self._scale_and_divisor(state, scaled=scaled)
        device = divisor.device if on_device else self._loss_scale.tensor.device  # type: ignore[union-attr]
        measure = partial(self._meter.measure, gradients, divisor, device, read=not on_device)
        alone = not (self._meter.agreement.always or gradients.meshes)
        agreed = not scaled and not needs_norm and not alone  # when they were unscaled
        joins = not agreed and (scaled or needs_norm)
        loss, losses = self._loss_for_guard(gradients, device, joins=joins, read=not on_device)
        measure_all = measure if losses is None else partial(measure, losses=losses)
        stats = self._policy_stats(optimizer, state, gradients, read=not on_device)
        if on_device:
            found = measure_all(norm=needs_norm, agree=not agreed, stats=stats)
            finite = found.finite
            if not scaled:
                clear = none_is_set(state.found_inf_per_device, device)
                finite = clear if agreed else finite & clear
        else:
            finite = scaled or _flags_are_clear(state)
            found = Found(finite, None, stats)
            if scaled or needs_norm:
                found = measure_all(norm=needs_norm, finite=finite, stats=stats)
                finite = found.finite
        norm = found.norm
        if losses is not None and found.loss is None:
            raise UsageError(
                f"{self.guard!r} needs the loss, and no rank has scaled one. Write {SCALES} on "
                "the ranks that compute it."
            )
        found = Found(finite, norm, found.stats, found.sizes, loss if losses is None else found.loss)
        self._note_measured(optimizer, state, gradients, scale, divisor, found)
        assert state.measured is not None  # just now
        finite = state.measured.taken
        if not on_device and not finite:
            if clip.max_value is not None and clip.max_norm is not None and not alone:
                measure(norm=True)  # as the ranks do that clip on a device
            return gradients, divisor

        # Clip. Entries come first, as their limit changes the norm.
        if clip.max_value is not None:
            limit = divisor * clip.max_value
            if on_device:  # a skipped step clips nothing
                limit = torch.where(finite, limit, math.inf)  # type: ignore[arg-type]
            arithmetic.clamp_(gradients.tensors, limit)
            if clip.max_norm is not None:
                norm = measure(norm=True).norm
        if clip.max_norm is not None and norm is not None:
            if on_device:
                clipping = torch.maximum(divisor, norm / clip.max_norm)
                skips_itself = state.fused and is_of_torch(optimizer)  # and then divides by nothing
                divisor = clipping if skips_itself else torch.where(finite, clipping, divisor)  # type: ignore[arg-type]
                if any([t.dtype is torch.float64 for t in gradients.tensors]):
                    arithmetic.multiply_(gradients.tensors, divisor.reciprocal())
                    state.divided.append(divisor)
                    divisor = torch.ones_like(divisor)
                if state.fused:  # its kernel takes a float32, and inf would make every gradient 0
                    divisor = divisor.clamp(max=FLOAT32_MAX).to(torch.float32)
            else:
                divisor = max(divisor, norm / clip.max_norm)
        while not on_device and divisor > MAX_DIVISOR:  # divide in several steps
            arithmetic.multiply_(gradients.tensors, 1.0 / MAX_DIVISOR)
            state.divided.append(MAX_DIVISOR)
            divisor /= MAX_DIVISOR
        return gradients, divisor

    def _measured_by_kernel(self, optimizer: OptimizerLike, state: OptimizerState) -> tuple[Gradients, float]:
        """Note what PyTorch's kernel has found while it unscaled; nothing is left to divide by."""
        self._require_checked(optimizer, state, Gradients([], []))
        scale, stats = self._loss_scale.snapshot(), self._policy_stats_before(state)
        finite = _flags_are_clear(state)
        gradients = Gradients([], []) if finite else gather(optimizer)
        self._note_measured(optimizer, state, gradients, scale, 1.0, Found(finite, None, stats))
        return Gradients([], []), 1.0

    def _note_measured(
        self,
        optimizer: OptimizerLike,
        state: OptimizerState,
        gradients: Gradients,
        scale: Number,
        divisor: Number,
        found: Found,
    ) -> None:
        """Keep what was measured for `update` and for the record, without keeping gradients alive."""
        parameters, finite, stats = gradients.parameters, found.finite, found.stats
        if isinstance(finite, Tensor):
            named = partial(self._culprits, optimizer, parameters, found.sizes)  # keeps no gradient alive
            measured = MeasuredGradients(scale, finite, found.norm, divisor, named, stats)
        else:
            stats = None if stats is None else stats.read()
            measured = MeasuredGradients(scale, finite, found.norm, divisor, stats=stats)
        self._keep_measured(optimizer, state, measured)
        if state.norm is not None:  # on the host read beside the flag: later it would wait for the optimizer
            norm = state.norm if isinstance(finite, Tensor) else float(state.norm)
            measured.norm, measured.divisor = norm, 1.0
        if self._guarding is not None:
            measured.guard = self._guarding.judge(optimizer, measured, found.loss)
        if isinstance(measured.taken, Tensor):
            measured.found_inf = measured.taken.logical_not().to(torch.float32)
        elif not finite:
            measured.culprits = partial(Culprits, *self._culprits(optimizer, parameters, gradients.peaks()))
        elif not measured.taken and gradients.tensors:
            sizes = gradients.norms().tolist()
            measured.culprits = partial(Culprits, *largest(self._names(optimizer), parameters, sizes))

    def _keep_measured(
        self, optimizer: OptimizerLike, state: OptimizerState, measured: MeasuredGradients
    ) -> None:
        """Keep what a step found; for a step that is tried again, the norm from before the first clipping."""
        state.measured = measured
        before = self._failed_before(optimizer, state) if state.failed else None
        if before is not None and before.norm is not None and measured.finite is not False:
            measured.norm, measured.divisor = before.norm, before.divisor

    def _scale_and_divisor(self, state: OptimizerState, *, scaled: bool) -> tuple[Any, Any]:
        """Return the scale, and what is in the gradients: if they were unscaled, only a user's factor."""
        constant = state.preset()
        if isinstance(self._loss_scale, HostScale):
            host: float = self._loss_scale.state.policy_state.scale
            return host, (host if scaled else 1.0) * float(constant)
        scale = self._loss_scale.snapshot()
        divisor = scale if scaled else torch.ones_like(scale)
        if isinstance(constant, Tensor) or constant != 1.0:
            divisor = divisor * constant
        return scale, divisor

    def _prepare_on_host(
        self,
        optimizer: OptimizerLike,
        state: OptimizerState,
        gradients: Gradients,
        divisor: float,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[], Any]:
        """Divide the gradients, or let a fused optimizer do it; return a callable that steps, or skips."""
        if self.on_step is not None:
            self._losses.read()  # beside the flag: later the host would wait for the optimizer
        taken = state.measured is not None and bool(state.measured.taken)
        if taken and state.fused:
            where = self._require_scale("step").device
            grad_scale = None if divisor == 1.0 else _number(divisor, where)
            _give(optimizer, grad_scale, None if is_of_torch(optimizer) else _number(0.0, where))
        elif divisor != 1.0:
            arithmetic.multiply_(gradients.tensors, 1.0 / divisor)
            state.divided.append(divisor)
        self._note_flag(state)  # subclasses decide by it in _maybe_opt_step
        return partial(self._maybe_opt_step, optimizer, state, *args, **kwargs)

    def _prepare_on_device(
        self,
        optimizer: OptimizerLike,
        state: OptimizerState,
        gradients: Gradients,
        divisor: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[], Any]:
        """As `_prepare_on_host`, without a read: a fused optimizer gets the flag; other steps are undone."""
        assert state.measured is not None  # by _measure_and_clip
        finite, found_inf = state.measured.taken, state.measured.found_inf
        state.found_inf_per_device = {divisor.device: found_inf}  # type: ignore[dict-item]
        if self._capturable:
            init_optimizer_state(optimizer, fused=state.fused)
        if not state.fused:
            arithmetic.multiply_(gradients.tensors, divisor.reciprocal())
            state.divided.append(divisor)
            return partial(step_where, optimizer, finite, *args, **kwargs)  # type: ignore[arg-type]
        _give(optimizer, divisor, found_inf)
        if self.on_step is not None and not self._capturable:
            # The listener needs the flag read anyway, so a skipped step need not call the optimizer.
            skips = not finite
            self._losses.read()
            if skips:
                return lambda: None
        return partial(optimizer.step, *args, **kwargs)

    def _step_disabled(
        self, optimizer: OptimizerLike, clip: Clip, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Clip and step without a scale."""
        measured = MeasuredGradients(1.0, finite=True, skips=False)
        clips = None if clip == NO_CLIP else partial(self._clip, optimizer, clip, measured)
        result = step_after(optimizer, clips, args, kwargs)
        self._last = partial(step_of, [measured], self._loss_scale.steps, 1.0, loss=self._losses.sum)
        return result

    def _step_with_closure(
        self,
        optimizer: OptimizerLike,
        state: OptimizerState,
        clip: Clip,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Let the optimizer evaluate the loss as often as it likes; undo everything if one overflows."""
        if self._capturable:
            raise UsageError("a closure is evaluated on the host. Write GradScaler(...) without capturable.")
        closure = args[0] if args else kwargs.pop("closure")
        before: list[Snapshot] = []
        losses = copy.copy(self._losses)

        def evaluate() -> Any:
            scalings = self._scalings
            self._losses = copy.copy(losses)  # the last evaluation counts
            # Before the closure, which may call unscale_ itself.
            state.stage, state.found_inf_per_device, state.norm = OptState.READY, {}, None
            with torch.enable_grad():
                loss = closure()
            if self._scalings == scalings:
                raise UsageError(f"the closure did not scale its loss. Write {SCALES} in it.")
            gradients, divisor = self._measure_and_clip(
                optimizer, state, clip, on_device=False, together=True
            )
            if not (state.measured and state.measured.taken):
                arithmetic.multiply_(gradients.tensors, 1.0 / divisor)
                raise _Overflow
            arithmetic.multiply_(gradients.tensors, float(state.preset()) / divisor)
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
                self._states[id(optimizer)] = OptimizerState()
                raise
        if state.fused and hasattr(optimizer, "grad_scale"):
            del optimizer.grad_scale
        if state.measured is not None:
            self._note_flag(state)
            self._note_step(optimizer, state)
        return result

    def _clip_unscaled(self, optimizer: OptimizerLike, clip: Clip) -> tuple[bool, float | None]:
        """Clip gradients that are not scaled; return whether they are finite on all ranks, and their norm."""
        gradients = gather(optimizer)
        measure = partial(self._meter.measure, gradients, 1.0, torch.device(self._device), read=True)
        finite = True
        if clip.max_value is not None:
            finite = measure(norm=False).finite  # clamping hides an inf
            arithmetic.clamp_(gradients.tensors, clip.max_value)
        found = measure(finite=finite, norm=clip.max_norm is not None)
        finite, norm = found.finite, found.norm
        if clip.max_norm is not None and norm is not None and norm > clip.max_norm:
            arithmetic.multiply_(gradients.tensors, clip.max_norm / norm)
        return finite, norm

    def _step_passing_grad_scaler(
        self,
        optimizer: OptimizerLike,
        state: OptimizerState,
        clip: Clip,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step an optimizer whose `step` takes the scaler, and unscales and skips itself."""
        if self._guarding is not None:
            kind = type(optimizer).__name__
            raise UsageError(
                f"guard={self.guard!r} cannot skip: {kind}.step takes grad_scaler= and unscales the "
                "gradients itself. Write GradScaler(...) without guard, or use another optimizer."
            )
        if clip != NO_CLIP:
            name = "max_norm" if clip.max_norm is not None else "max_value"
            kind = type(optimizer).__name__
            raise UsageError(
                f"{name}={getattr(clip, name)} cannot clip: {kind}.step takes grad_scaler= and unscales the "
                f"gradients itself. Clip in {kind}.step, and write scaler.step(optimizer) without {name}."
            )
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
            FutureWarning,
            stacklevel=level_of_caller(),
        )
        self._loss_scale.adopt()
        result = optimizer.step(*args, **kwargs, grad_scaler=self)
        state.stage = OptState.STEPPED
        return result

    def _undo_division(
        self, optimizer: OptimizerLike, state: OptimizerState, gradients: Gradients, began: OptState
    ) -> None:
        """Make gradients what they were before a step that raised, except entries that `max_value` clipped.

        So the step may be tried again, or left out without `update`.
        """
        for divisor in reversed(state.divided):
            arithmetic.multiply_(gradients.tensors, divisor)
        if state.stage is OptState.UNSCALED and began is OptState.READY:
            arithmetic.multiply_(gather(optimizer).tensors, self._require_scale("step"))
        state.stage = began
        self._note_failure(optimizer, state)

    def _note_failure(self, optimizer: OptimizerLike, state: OptimizerState) -> None:
        """Keep what was measured for a step that raised."""
        if state.measured is not None:
            stamps = [Stamp.of(p.grad) for p in parameters_of(optimizer) if p.grad is not None]
            state.failed = FailedStep(stamps, state.stats_here, state.measured.norm, state.measured.divisor)

    def _failed_before(self, optimizer: OptimizerLike, state: OptimizerState) -> FailedStep | None:
        """Return what was measured when the same step was tried and raised."""
        failed = state.failed
        return failed if failed is not None and failed.is_of(parameters_of(optimizer)) else None

    def _note_step(self, optimizer: OptimizerLike, state: OptimizerState) -> None:
        """Note that an optimizer has had its step, taken or skipped."""
        assert state.measured is not None  # by _measure_and_clip
        state.stage = OptState.STEPPED
        if self._buffers is not None and self._buffers.restores and not state.measured.taken:
            self._buffers.put_back()
        index, loss = self._loss_scale.steps, self._losses.sum
        self._last = partial(step_of, [state.measured], index, None, loss=loss)
        if self._already.only_owner != id(optimizer) or self._already.unscaled:
            decides = state.fused and isinstance(state.measured.finite, Tensor)
            self._already.mark(optimizer, state.measured if decides else None)

    def _note_flag(self, state: OptimizerState) -> None:
        """Convert a decision made on the host to the form in which PyTorch keeps it."""
        where = self._require_scale("step").device
        flag = 0.0 if state.measured is not None and state.measured.taken else 1.0
        state.found_inf_per_device = {where: torch.full((), flag, dtype=torch.float32, device=where)}

    def _refuse_other_scale(self, optimizer: OptimizerLike, state: OptimizerState) -> None:
        """Refuse gradients that would be divided by another scale than the one in them."""
        if self._changed_by is None or state.stage is not OptState.READY:
            return
        if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            raise UsageError(
                f"{self._changed_by} changed the scale after the loss was scaled, so the gradients would be "
                f"divided by another number than they were multiplied by. Write {self._changed_by} after "
                "scaler.step(optimizer), or zero the gradients and scale the loss again."
            )

    @torch.no_grad()
    def _unscale(
        self, optimizer: OptimizerLike, state: OptimizerState, *, agree: bool = True, norm: bool = False
    ) -> None:
        """Unscale an optimizer's gradients and note what was found, on this rank or on all.

        Args:
            optimizer: their owner.
            state: of the optimizer.
            agree: whether ranks agree on it.
            norm: whether to take the norm, before other code clips; nothing is read for it on an accelerator.
        """
        self._loss_scale.adopt()
        scale = self._require_scale("unscale_")
        found_inf = torch.full((), 0.0, dtype=torch.float32, device=scale.device)
        stats = None
        if self.policy.needs_peak:
            read = not self._stays_on_device(optimizer, state)
            stats = self._policy_stats(optimizer, state, gather(optimizer), read=read)
        flags = self._unscale_grads_(optimizer, self._inverse(scale), found_inf, True)
        meshes, state.meshes = state.meshes, []
        if not flags and self._meter.agreement.needed(meshes):
            flags = {found_inf.device: found_inf}  # this rank has nothing, and still has to take part
        if norm and flags and (len(meshes) < 2 or self._needs_norm(state, NO_CLIP)):
            stats = None if stats is None else stats._replace(each=None)  # peaks of scaled gradients
            flags, stats = self._measure_unscaled(optimizer, state, flags, stats, found_inf.device)
        elif agree:
            flags, stats = self._meter.flags(flags, meshes, found_inf.device, stats)
        state.found_inf_per_device, state.stage = flags, OptState.UNSCALED
        state.measured = None  # in a step that failed, of gradients that may have been added to
        state.stats = None if stats is None else stats._replace(each=None)  # peaks of scaled gradients

    @torch.no_grad()
    def _policy_stats(
        self, optimizer: OptimizerLike, state: OptimizerState, gradients: Gradients, *, read: bool
    ) -> GradientStats | None:
        """Return the statistics that the policy uses, of the gradients while they are or were scaled."""
        if not self.policy.needs_peak:
            return None
        if state.stage is not OptState.READY:
            return self._policy_stats_before(state)
        before = self._failed_before(optimizer, state) if state.failed else None
        if before is not None and before.stats is not None:
            return before.stats
        scaled = gradients
        if self._already.unscaled:
            scaled = gradients.without(self._already.among(gradients))
        where = self._require_scale("step").device
        state.stats_here = gradient_stats(scaled, where, read=read)
        return state.stats_here

    def _policy_stats_before(self, state: OptimizerState) -> GradientStats | None:
        """Return the statistics from when gradients were unscaled; no peak if other code did that."""
        return (state.stats or GradientStats()) if self.policy.needs_peak else None

    def _needs_norm(self, state: OptimizerState, clip: Clip) -> bool:
        """Return whether the step has to measure the norm."""
        for_guard = self._guarding is not None and self._guarding.uses_norm and state.norm is None
        return clip.max_norm is not None or for_guard

    def _measure_unscaled(
        self,
        optimizer: OptimizerLike,
        state: OptimizerState,
        flags: dict[torch.device, Tensor],
        stats: GradientStats | None,
        device: torch.device,
    ) -> tuple[dict[torch.device, Tensor], GradientStats | None]:
        """Note the norm of unscaled gradients; return flags and statistics that all ranks agree on."""
        read = _reads_are_free(device) and not self._capturable
        preset, gradients = state.preset(), gather(optimizer)
        divisor = float(preset) if read else torch.ones((), device=device) * preset
        finite: Any = none_is_set(flags, device)
        finite = finite.item() if read else finite
        found = self._meter.measure(
            gradients, divisor, device, read=read, norm=True, finite=finite, stats=stats
        )
        state.norm = math.inf if found.norm is None else found.norm / divisor
        sizes = found.sizes if not read else [] if found.finite else gradients.peaks()
        state.culprits = partial(self._culprits, optimizer, gradients.parameters, sizes)
        if not read or self._meter.agreement.needed(gradients.meshes):
            overflow = torch.as_tensor(found.finite, device=device).logical_not().to(torch.float32)
            flags = {place: overflow.to(place) for place in flags}
        return flags, found.stats

    def _loss_for_guard(
        self, gradients: Gradients, device: torch.device, *, joins: bool, read: bool
    ) -> tuple[Number | None, Tensor | None]:
        """Return the mean loss over ranks or, if it is to join an all-reduce of gradients, its addends.

        It joins where the ranks of the gradients are those of the loss. Ranks that hold copies of a model see
        other losses, and have to make the same decision: then the loss has an all-reduce of its own.
        """
        guarding = self._guarding
        if guarding is None or not guarding.uses_loss:
            return None, None
        if read:
            self._losses.read()
        agreement = self._meter.agreement
        group = guarding.loss_group
        lacks = self._loss_is_elsewhere() and number_of_ranks(group) > 1
        loss = loss_of(self._losses, SCALES, guarding.guard, may_lack=lacks)
        if joins and agreement.needed(gradients.meshes) and agreement.is_over(group, gradients.meshes):
            return None, loss_and_count(loss, device)
        return mean_over_ranks(loss, device, group), None

    def _inverse(self, scale: Tensor) -> Tensor:
        known = self._known_scale()
        if known is None:
            return scale.to(widest(scale.device)).reciprocal().float()
        return _number(1.0 / known, scale.device)

    def _stays_on_device(self, optimizer: OptimizerLike, state: OptimizerState) -> bool:
        """Return whether nothing needs to be read on the host.

        One rank may listen and others not; for copies to stay equal to the bit, all take the same path.
        """
        if self._capturable:
            return True
        if not state.fused or self._gives_up:
            return False
        if self._buffers is not None and self._buffers.restores:
            return False
        if self.on_step is not None and number_of_ranks() == 1:
            return False
        return not (_reads_are_free(self._require_scale("step").device) or begins_with_garbage(optimizer))

    def _unscale_if_early(
        self, optimizer: OptimizerLike, state: OptimizerState, gradients: Gradients, clip: Clip
    ) -> bool:
        """Unscale gradients that have to be before they are measured; return whether they are still scaled.

        Other ranks may not need it: all agree on a flag and a norm together, if there will be a norm.
        """
        if state.stage is OptState.READY:
            early = gradients.aliased or bool(self._already.unscaled and self._already.among(gradients))
            if not torch.compiler.is_compiling():  # a subclass, or someone from outside, unscales differently
                unscales = getattr(self._unscale_grads_, "__func__", None)
                early = early or unscales is not GradScaler._unscale_grads_
            if early:
                self._unscale(optimizer, state, agree=not self._needs_norm(state, clip))
        return state.stage is OptState.READY

    def _require_checked(self, optimizer: OptimizerLike, state: OptimizerState, gradients: Gradients) -> None:
        """Raise, as PyTorch, if there is nothing to check, and other ranks have nothing either."""
        present = gradients.tensors if state.stage is OptState.READY else state.found_inf_per_device
        if not present and not self._meter.agreement.always:
            raise AssertionError(_no_gradients(optimizer))

    def _culprits(
        self, optimizer: OptimizerLike, parameters: list[Tensor], sizes: list[float] | Tensor
    ) -> Culprits:
        listed = sizes.tolist() if isinstance(sizes, Tensor) else sizes
        if self._guarding is not None and all(map(math.isfinite, listed)):  # a spike that was not read before
            return largest(self._names(optimizer), parameters, listed)
        order, self._order = self._order or {}, None  # a graph that changes is learnt again
        return culprits(self._names(optimizer), parameters, listed, order)

    def _names(self, optimizer: OptimizerLike) -> dict[int, str]:
        return names(optimizer, None if self._buffers is None else self._buffers.model)

    def _measured_by_flags(self, state: OptimizerState) -> MeasuredGradients:
        """Return what is known of an optimizer whose gradients other code than `step` has checked."""
        stats, scale = self._policy_stats_before(state), self._loss_scale.snapshot()
        finite: bool | Tensor
        named = state.culprits
        if isinstance(scale, Tensor):
            finite = none_is_set(state.found_inf_per_device, scale.device)
        else:
            finite, stats = _flags_are_clear(state), stats and stats.read()
            named = partial(Culprits, *(() if finite else named()))
        stepped = state.stage is OptState.STEPPED
        return MeasuredGradients(scale, finite, state.norm, culprits=named, stats=stats, stepped=stepped)

    # The scale and the record.

    def _set_policy(self, policy: Policy[Any]) -> None:
        """Put a policy in force."""
        self._loss_scale.set_policy(policy)
        # Computed outside of torch.compile, where a policy may do what it likes.
        self._gives_up = policy.gives_up

    def _set(self, name: str, value: Any) -> None:
        """Change a setting of the policy."""
        if self._enabled and value != setting_of(self.policy, name):
            if not hasattr(self.policy, name):
                raise PolicyError(f"{name}={value!r} cannot be set: {self.policy!r} has no {name}.")
            self._set_policy(changed_policy(self.policy, **{name: value}))
        self._settings[name] = value

    def _times_scale(self, output: Tensor) -> Tensor:
        if self._loss_scale.tensor is None:
            self._lazy_init_scale_growth_tracker(output.device)
        self._losses.add(output)
        self._is_pending, self._was_scaled, self._changed_by = True, True, None
        if not torch.compiler.is_compiling():
            self._scalings += 1
            # A graph that is captured now scales whenever it is replayed, and nothing is heard of it here.
            self._is_pending = output.is_cpu or not is_capturing(output)
            self._notices_unscaled &= self._is_pending
            if self._order is None and output.grad_fn is not None:
                self._order = backward_order(output.grad_fn)
                if self._warns_of_ruined and self._buffers is None:
                    self._statistics = statistics_in(output.grad_fn)
        wide = output.float() if output.dtype is torch.float16 else output
        scale: Any = self._loss_scale.tensor
        return wide * scale.to(output.device, non_blocking=True)  # type: ignore[no-any-return]

    def _require_scale(self, caller: str) -> Tensor:
        if self._loss_scale.tensor is None and self._loss_is_elsewhere():
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        scale = self._loss_scale.tensor
        if scale is None:
            raise AssertionError(
                f"Attempted {caller} but _scale is None.  This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )
        return scale

    def _loss_is_elsewhere(self) -> bool:
        """Return whether other ranks may be those that scale, as for a pipeline's first stages."""
        return self._meter.agreement.always

    def _scale_by_hand(self, new_scale: float | Tensor) -> float:
        """Return the number, after PyTorch's own checks of a tensor."""
        if isinstance(new_scale, Tensor):
            here = new_scale.device.type == str(self._device).partition(":")[0]
            if not here or new_scale.numel() != 1 or new_scale.requires_grad:
                raise AssertionError(
                    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                    "torch.FloatTensor with requires_grad=False."
                )
            return float(new_scale)
        return new_scale

    def _advance(self, steps: dict[int, MeasuredGradients]) -> None:
        """Advance the policy and record the step; raise if the policy gives up."""
        measured_steps = list(steps.values())
        measured: Measured[Any] = measured_of(measured_steps, self._loss_scale.policy)
        if self._guarding is not None:
            self._guarding.commit()
        counts = _counts(measured_steps)
        if isinstance(measured.finite, Tensor):  # of some optimizer nothing was read
            self._loss_scale = self._loss_scale.to_device()
        found_inf = measured_steps[0].found_inf if len(steps) == 1 else None
        new_scale: Number
        if isinstance(self._loss_scale, DeviceScale):
            held = None if self._guarding is None else held_of(measured_steps, measured.finite)
            flag = found_inf if held is None else None
            new_scale, gave_up = self._loss_scale.advance(measured, flag, held, counts=counts)
        elif measured.finite and not all(step.taken for step in measured_steps):
            new_scale, gave_up = self._loss_scale.hold(measured), False
        else:
            new_scale, gave_up = self._loss_scale.advance(measured, counts=bool(counts))
        self._finish(steps, new_scale)  # a policy that gives up leaves a record too
        if gave_up:
            # Unlike `raise_if_exhausted`, which names the first step that should have ended the training.
            now = self._loss_scale.floats()
            raise self.policy.exhaustion_from(now)

    def _clip(self, optimizer: OptimizerLike, clip: Clip, measured: MeasuredGradients) -> None:
        """Clip where there is no scale: as PyTorch, unless other ranks have parts of the norm.

        With `max_norm` the norm from before any clipping, and whether it is finite, are noted in `measured`.
        """
        gradients, both = gather(optimizer), None not in clip
        if self._meter.agreement.needed(gradients.meshes):
            before_clipping = self._clip_unscaled(optimizer, Clip(max_norm=math.inf)) if both else None
            clipped = self._clip_unscaled(optimizer, clip)
            if clip.max_norm is not None:
                measured.finite, measured.norm = before_clipping or clipped
            return
        before = torch.linalg.vector_norm(gradients.norms()) if both and gradients.tensors else None
        parameters = parameters_of(optimizer)
        if clip.max_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip.max_value)
        if clip.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip.max_norm)
            measured.norm = norm if before is None else before
            measured.finite = measured.norm.isfinite()  # read when `last_step` is

    def _warn_of_unscaled(self) -> None:
        self._notices_unscaled = False
        warnings.warn(
            "no loss was scaled before this step, so it divided the gradients by a scale that they were not "
            f"multiplied with. Write {SCALES}. With several optimizers, call update() once, "
            "after the last of their steps. If you multiply the loss by get_scale() yourself, ignore this.",
            UserWarning,
            stacklevel=level_of_caller("torch", "deepspeed"),
        )

    def _measured_steps(self) -> dict[int, MeasuredGradients]:
        """Return what was found in the gradients of each optimizer that was unscaled or has stepped."""
        return {
            key: state.measured or self._measured_by_flags(state)
            for key, state in self._states.items()
            if state.found_inf_per_device
        }

    def _end(self, steps: dict[int, MeasuredGradients]) -> None:
        """End an iteration whose next scale was not for the policy to decide."""
        if steps:
            self._loss_scale.steps += _counts(list(steps.values()))
            if self._guarding is not None:
                self._guarding.commit()
        self._finish(steps, self._loss_scale.snapshot())

    def _finish(self, steps: dict[int, MeasuredGradients], new_scale: Number) -> None:
        """Forget the iteration, and record it if an optimizer stepped, or would have been skipped.

        Args:
            steps: what was found in the gradients of each optimizer that was unscaled or has stepped.
            new_scale: the scale of the next step.
        """
        self._states.clear()
        if self._guarding is not None:
            self._guarding.forget()
        self._is_pending = False
        if self._already.unscaled:
            self._already.forget()
        loss = self._losses.take()
        steps = {key: step for key, step in steps.items() if step.stepped or step.finite is not True}
        if not steps:
            return
        if not self._was_scaled and self._notices_unscaled:
            self._warn_of_unscaled()
        self._was_scaled = False
        if self._guarding is not None and self._guarding.uses_loss and number_of_ranks() > 1:
            mean = mean_in(list(steps.values())[-1])
            loss = loss if mean is None else mean
        index = self._loss_scale.steps - 1
        buffers = Ruined if self._buffers is None else self._buffers_after(self._buffers, steps)
        owners = self._buffers is None  # a model has a name for each parameter
        record = partial(step_of, index=index, new_scale=new_scale, loss=loss, buffers=buffers, owners=owners)
        before = None if any([step.stepped for step in steps.values()]) else self._last
        self._last = partial(record, list(steps.values()), before=before)
        self._last_of = {}
        for key, step in steps.items():
            self._last_of[key] = partial(record, [step])
        if self._warns_of_ruined and any(step.taken is False for step in steps.values()):
            self._warn_of_ruined(buffers)
        if self.on_step is not None and (last := self.last_step) is not before:
            self.on_step(last)  # type: ignore[arg-type]  # there is one now

    def _warn_of_ruined(self, buffers: Callable[[], Ruined]) -> None:
        """Warn, once, if a skipped step has left inf or NaN in buffers and nothing puts them back."""
        names = buffers().names
        if not names and not some_are_ruined(self._statistics):
            return
        self._warns_of_ruined = False
        found = some_of(names) or "the running statistics of BatchNorm"
        remedy = "restore_buffers=True beside model=model"
        if self._buffers is None:
            remedy = f"{type(self).__name__}(..., model=model, restore_buffers=True)"
        warnings.warn(
            f"a skipped step left inf or NaN in {found}, and nothing restores them. The weights are "
            "unharmed, but in evaluation the model gives NaN, and so does an average of it that takes over "
            f"its buffers, such as AveragedModel. Write {remedy}.",
            UserWarning,
            stacklevel=level_of_caller("torch", "deepspeed"),
        )

    def _buffers_after(self, buffers: Buffers, steps: dict[int, MeasuredGradients]) -> Callable[[], Ruined]:
        """Return a callable that names the buffers that are not finite; restore or keep them if asked to."""
        taken = [step.taken for step in steps.values()]
        if any(isinstance(one, Tensor) for one in taken):
            return buffers.ruined  # when it is asked for
        if all(taken):
            if buffers.restores:
                buffers.keep()
            return Ruined
        ruined = buffers.ruined()
        return lambda: ruined


def held_of(steps: list[MeasuredGradients], finite: bool | Tensor) -> Tensor:
    """Return whether a guard has skipped a step of an optimizer although all gradients are finite."""
    device = next(step.taken.device for step in steps if isinstance(step.taken, Tensor))
    taken = [torch.as_tensor(step.taken, device=device) for step in steps]
    held: Tensor = torch.as_tensor(finite, device=device) & torch.stack(taken).all().logical_not()
    return held


def _needs_reads(setting: str, instead: str) -> PolicyError:
    """Return the error for a setting that `capturable` excludes."""
    return PolicyError(
        f"capturable=True reads nothing, but {setting} needs a read at every step. "
        f"Write GradScaler(...) without capturable=True, or {instead}."
    )


def _buffers_of(model: Any, restores: bool, capturable: bool) -> Buffers | None:
    """Return the buffers to check, or None without a model."""
    if restores and model is None:
        raise PolicyError(
            "restore_buffers=True needs the model whose buffers they are. Write model=model, too."
        )
    if restores and capturable:
        raise PolicyError(
            "restore_buffers=True reads whether a step was skipped, and capturable=True reads nothing. "
            "Write only one of them."
        )
    return None if model is None else Buffers(model, restores=restores)


def _is_there(device: Any, kind: str) -> bool:
    """Warn as PyTorch does of a CUDA that is not there, and say what to write for a CPU."""
    if device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():  # type: ignore[no-untyped-call]
        warnings.warn(
            "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling. No loss will be "
            f'scaled and no step skipped. Write {kind}("cpu") to train on a CPU, or {kind}(enabled=False) to '
            "train without scaling.",
            stacklevel=level_of_caller(),
        )
        return False
    return True


def _for_optimizer(
    optimizer: OptimizerLike, given: Mapping[str, Any] | None, kwargs: dict[str, Any], **limits: Any
) -> dict[str, Any]:
    """Return the keyword arguments for an optimizer's own `step`.

    Args:
        optimizer: whose step it is.
        given: `optimizer_kwargs`.
        kwargs: the other keyword arguments.
        limits: the arguments that are the scaler's, which `step` of this optimizer may have as well.
    """
    if given is None:
        if torch.compiler.is_compiling():  # signatures cannot be read there; an earlier step has done it
            return kwargs
        for name, limit in limits.items():
            if limit is not None and step_takes(type(optimizer), name):
                kind, value = type(optimizer).__name__, shown(limit)
                raise UsageError(
                    f"{name}={value} clips in scaler.step, and {kind}.step has an argument {name} too. "
                    f'Write optimizer_kwargs={{"{name}": {value}}} to give it to the optimizer, or '
                    f"{name}={value}, optimizer_kwargs={{}} to clip here."
                )
        return kwargs
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


def _warn_of_shards(optimizer: OptimizerLike) -> None:
    """Warn of parameters of FSDP's first version, of which each rank has another part."""
    flat = ("_is_flat_param", "_fsdp_flattened")
    if number_of_ranks() > 1 and any(hasattr(p, name) for p in parameters_of(optimizer) for name in flat):
        warnings.warn(
            "the parameters belong to FSDP's first version, where every rank has different gradients, so "
            "each rank would skip and clip by its own. Write ShardedGradScaler() instead of GradScaler(), or "
            'process_group="world". With NO_SHARD for all of them, gradients are the same everywhere and '
            "nothing is wrong.",
            UserWarning,
            stacklevel=level_of_caller(),
        )


def _limit(name: str, value: Any) -> float | None:
    """Refuse what nothing can be clipped to. inf clips nothing."""
    if value is None or (type(value) is float and value > 0.0):
        return value
    limit = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
    is_infinite = isinstance(limit, Real) and limit == math.inf
    if not is_infinite and not (is_number(limit) and limit > 0.0):
        raise PolicyError(
            f"{name}={shown(value)} is not a number above 0. Write {name}=1.0, or None not to clip."
        )
    return float(limit)


def _give(optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Give a fused optimizer what to divide by, and whether to skip, as PyTorch's scaler does."""
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf


def _number(value: float, device: torch.device) -> Tensor:
    """Return a float32, which kernels want, whatever the user's default dtype is; inf for a larger number."""
    return torch.full((), to_float32(value), dtype=torch.float32, device=device)


def _reads_are_free(device: torch.device) -> bool:
    return device.type == "cpu"


def _counts(steps: Sequence[MeasuredGradients]) -> bool | Tensor:
    """Return whether an iteration counts as a step: an optimizer stepped, or would have been skipped."""
    if any([step.stepped for step in steps]):
        return True
    finite: Any = all_true([step.finite for step in steps])
    return finite.logical_not() if isinstance(finite, Tensor) else not finite


def _new_state() -> OptimizerState:  # torch.compile does not accept a class as default_factory
    return OptimizerState()


def _flags_are_clear(state: OptimizerState) -> bool:
    return not any([flag.item() for flag in state.found_inf_per_device.values()])


def none_is_set(flags: Mapping[torch.device, Tensor], device: torch.device) -> Tensor:
    """Return whether none of an optimizer's flags is set, as a 0-dim tensor."""
    return torch.stack([flag.to(device) for flag in flags.values()]).sum() == 0.0


def _nothing_checked(states: Iterable[OptimizerState]) -> str:
    """Say why `update` has nothing to decide by."""
    said = "No inf checks were recorded prior to update."
    for state in states:
        parameters = [] if state.optimizer is None else parameters_of(state.optimizer)
        lacks = state.stage is OptState.READY and all(p.grad is None for p in parameters)
        if lacks or state.stage is OptState.UNSCALED:
            return (
                f"{said} All gradients of {type(state.optimizer).__name__} were None. Write "
                "scaler.step(optimizer) or scaler.unscale_(optimizer) after backward(), before zero_grad()."
            )
    return (
        f"{said} No optimizer was stepped or unscaled through the scaler since the last update(). Write "
        "scaler.step(optimizer) instead of optimizer.step(), before scaler.update(), and call update() once "
        "per iteration."
    )


def _no_gradients(optimizer: OptimizerLike) -> str:
    """Say which optimizer has nothing to step with, and why."""
    parameters = parameters_of(optimizer)
    frozen = sum(not p.requires_grad for p in parameters)
    if any(p.grad is None and hasattr(p, "master_of") and p.master_of.grad is not None for p in parameters):
        return (
            "No inf checks were recorded for this optimizer: its float32 copies have no gradients yet. "
            "Write masters.take_gradients() after backward()."
        )
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
