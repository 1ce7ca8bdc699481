"""`torch.amp.GradScaler` on a preamp policy.

Call order, checks and messages are PyTorch's own; the policy decides the next scale. A step is measured and
agreed on (`measure`), taken in one of three ways (`steps`), and moves the scale at `update` (`loss_scale`).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from preamp.arrays.torch import gather
from preamp.arrays.torch_devices import check_device
from preamp.checks import callable_or_none, check_limit, level_of_caller, shown
from preamp.errors import PolicyError, UsageError
from preamp.guards import Guard
from preamp.policy import Dynamic, Policy
from preamp.scaling import Measured, Step, given_guard, with_rules
from preamp.systems.arguments import warn_if_out_of_bounds
from preamp.torch.nested import map_tensors
from preamp.torch.scaling import optimizers, refusals, torch_settings
from preamp.torch.scaling.buffers import Buffers, Ruined
from preamp.torch.scaling.disabled import step_disabled
from preamp.torch.scaling.guarding import DROPS_GUARD, Guarding, has_guard
from preamp.torch.scaling.loss_scale import LossScale
from preamp.torch.scaling.measure import Meter, OptimizerState, measure, new_state, number
from preamp.torch.scaling.optimizers import OptimizerLike
from preamp.torch.scaling.ranks import Agreement, check_loss_group, number_of_ranks
from preamp.torch.scaling.scaled import SCALES, Scaled
from preamp.torch.scaling.shared_gradients import AlreadyUnscaled
from preamp.torch.scaling.steps import (
    NO_CLIP,
    Clip,
    ClosureStep,
    DeviceStep,
    HostStep,
    Record,
    all_true,
    counts,
    reading_of,
    step_arguments,
)
from preamp.torch.scaling.torch_private_names import TorchPrivateNames

R = TypeVar("R", bound="Step | None")
T = TypeVar("T")


class GradScaler(TorchPrivateNames):
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
            policy that needs the amax [280]. On a device without float64, such as MPS, it is float32, and
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
        max_norm: clip in every step to which no other `max_norm` is given: for trainers that call `step`.
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
        max_norm: float | None = None,
        loss_group: Any = None,
    ) -> None:
        check_device(device)
        callable_or_none("on_step", on_step, "on_step=Trace(), or any function")
        self._device, self._enabled = device, enabled and refusals.is_there(device, type(self).__name__)
        values = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._settings = dict(zip(torch_settings.SETTINGS, values, strict=True))
        self._owns_policy = policy is None
        rule: Policy[Any] = (
            torch_settings.chosen_policy(policy, self._settings) if self._enabled else Dynamic()
        )
        # Not PyTorch's __init__: the scale and its counts live here.
        self._meter = Meter(Agreement(process_group, reduce))
        self._loss_scale = LossScale(rule)
        self._set_policy(rule)
        if given_guard(guard) is not None and not enabled:
            raise PolicyError(
                f"guard={guard!r} has no effect with enabled=False. To guard without scaling, write "
                "GradScaler(policy=Static(1.0), guard=guard)."
            )
        check_loss_group(loss_group, guard)
        self._guarding = None if guard is None else Guarding(guard, loss_group)
        if capturable and on_step is not None:
            instead = "leave out on_step: scaler.last_step is computed when it is read"
            raise refusals.needs_reads(f"on_step={on_step!r}", instead)
        if capturable and rule.gives_up:
            raise refusals.needs_reads(f"policy={policy!r}, which can end the training,", "at_floor='hold'")
        self._capturable = capturable
        self.on_step = on_step
        self._limits = NO_CLIP if max_norm is None else Clip(check_limit("max_norm", max_norm))
        self._buffers = Buffers.of(model, restores=restore_buffers, capturable=capturable)
        self._states: defaultdict[int, OptimizerState] = defaultdict(new_state)  # by the optimizer's id
        self._last: Record | Step | None = None  # a record is read when it is asked for
        self._last_of: dict[int, Record] = {}  # by the optimizer's id, since the last update
        self._scaled = Scaled(
            keeps_in_graphs=self._guarding is not None and self._guarding.uses_loss,
            expects_loss=process_group is None and reduce is None and not capturable,
            warns_of_ruined=not (restore_buffers or capturable),
            model=model,
        )
        self._already = AlreadyUnscaled()  # gradients of parameters that several optimizers share
        self._inspected: set[int] = set()  # ids of the optimizers that were checked for likely mistakes

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
        """The policy's state in floats, read if it is on a device. PyTorch's kernel does not update `bad`."""
        return self._loss_scale.floats()

    @property
    def steps(self) -> int | Tensor:
        """How many steps were taken or skipped. With `capturable=True` an unread tensor."""
        return self._loss_scale.steps  # type: ignore[no-any-return]

    @property
    def last_step(self) -> Step | None:
        """The latest `Step`. If its numbers are on a device, they are read now."""
        last = self._last
        if isinstance(last, Record):
            self._last = last = self._with_rules(last.read())
        return last

    def last_step_of(self, optimizer: OptimizerLike) -> Step | None:
        """Return one optimizer's part of the latest step; None if it took none."""
        state, record = self._states.get(id(optimizer)), self._last_of.get(id(optimizer))
        if state is not None and state.measured is not None:
            record = Record([state], self._loss_scale.steps, None, self._scaled.losses.sum)
        return self._with_rules(record.read()) if record else None

    def has_skipped(self, *, read: bool = True) -> bool:
        """Return whether the latest step was skipped. Unlike `last_step`, this does not read the loss.

        Args:
            read: False to return False where it would have to be read from a device.
        """
        last = self._last
        if isinstance(last, Record):
            is_known = not any([isinstance(state.taken, Tensor) for state in last.states])
            return (read or is_known) and last.skipped()
        return last is not None and last.skipped

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
            self._scaled.losses.add(outputs)
            return outputs
        if isinstance(outputs, Tensor):  # the usual case, as a short cut
            return self._times_scale(outputs)  # type: ignore[return-value]
        return map_tensors(self._times_scale, outputs)

    def _times_scale(self, output: Tensor) -> Tensor:
        if self._loss_scale.tensor is None:
            self._lazy_init_scale_growth_tracker(output.device)
        self._scaled.add(output)
        wide = output.float() if output.dtype is torch.float16 else output
        scale: Any = self._loss_scale.tensor
        return wide * scale.to(output.device, non_blocking=True)  # type: ignore[no-any-return]

    @torch.no_grad()
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
        if not self._enabled:
            return
        device = self._require_scale("unscale_").device
        state = self._state_of(optimizer)
        refusals.refuse_second_unscale(state)
        self._scaled.refuse_other_scale(optimizer)
        self._loss_scale.adopt()
        is_in_step = state.gradients is not None  # of a subclass that has its own `unscale_`
        on_host = _sync_is_free(device) and not self._capturable
        self._unscale(state, on_host=on_host)
        self._measure_unscaled(state, device, on_host=on_host)
        if not is_in_step:
            state.gradients = None

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
        limits = {"max_norm": max_norm, "max_value": max_value}
        clip, kwargs = step_arguments(optimizer, limits, self._limits, optimizer_kwargs, kwargs)
        if not self._enabled:
            result, state = step_disabled(optimizer, clip, self._meter, self._device, args, kwargs)
            self._last = Record([state], self._loss_scale.steps, 1.0, self._scaled.losses.sum)
            return result
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
        if not evaluates:
            if self._scaled.changed_by is not None and state.stage is OptState.READY:
                self._scaled.refuse_other_scale(optimizer)
            if state.fused and optimizers.step_takes(type(optimizer), "grad_scaler"):
                return self._step_passing_itself(state, clip, args, kwargs)
        way = self._way_of(state, evaluates=evaluates)
        result = way.step(partial(self._prepare, state, clip, way), args, kwargs)
        if state.measured is not None:  # None if a closure was never evaluated
            self._record_step(state)
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
            self._scaled.losses.take()
            if self.on_step is not None:
                step = self.last_step
                if step is not None and step.index == self._loss_scale.steps - 1:  # else no optimizer stepped
                    self.on_step(step)
            return
        if self._loss_scale.tensor is None:
            self._require_scale("update")
        states = self._measured_states()
        if new_scale is None and not states:
            raise AssertionError(refusals.nothing_checked(self._states.values()))
        if new_scale is None:
            self._advance_policy(states)
            return
        before = self._loss_scale.scale_on_host
        self._loss_scale.set_scale(self._scale_by_hand(new_scale))
        self._scaled.change_scale("scaler.update(new_scale)", before, self._loss_scale.scale_on_host)
        self._close_without_policy(states)

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
        state |= {name: getattr(self, f"_{name}") for name in torch_settings.SETTINGS[1:]}
        state["_growth_tracker"] = self._get_growth_tracker()
        more: dict[str, Any] = {}
        if not torch_settings.fits_torch_checkpoint(self.policy):
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
        if not self._enabled:
            return
        numbers, chosen = torch_settings.numbers_and_settings(state_dict)
        policy_state, before = self.policy.restore(numbers), self._loss_scale.scale_on_host
        tracks = None if self._guarding is None else self._guarding.check(numbers)
        if self._owns_policy:
            self._set_policy(
                torch_settings.changed_policy(self.policy, **chosen)
            )  # raises for what cannot work
        if self._guarding is not None and tracks is not None:
            self._guarding.load(tracks)
        self._loss_scale.set_state(policy_state)
        self._loss_scale.set_steps(numbers["steps"])
        after = self._loss_scale.scale_on_host
        self._scaled.change_scale("scaler.load_state_dict(state_dict)", before, after)
        if self._buffers is not None and self._buffers.restores:
            self._buffers.keep()  # those of the checkpoint, if the model was loaded first
        warn_if_out_of_bounds(
            self.policy, float(policy_state.scale), 'state_dict["scale"] = {bound!r} before loading'
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        return {**self.__dict__, "_last": self.last_step, "_last_of": {}, "_inspected": set()}

    # ---- The step ------------------------------------------------------------------------------------------

    def _state_of(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        if not hasattr(optimizer, "param_groups"):
            raise UsageError(
                f"{shown(optimizer)} is not an optimizer: it has no param_groups. "
                "Write scaler.step(optimizer), once for each optimizer."
            )
        if not torch.compiler.is_compiling() and id(optimizer) not in self._inspected:
            self._inspected.add(id(optimizer))
            if not self._meter.agreement.always:
                refusals.warn_of_shards(optimizer)
            optimizers.warn_of_small_eps(optimizer)
        state: OptimizerState = self._states[id(optimizer)]
        state.optimizer = optimizer
        supports = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        state.fused = supports and isinstance(optimizer, torch.optim.Optimizer)
        return state

    def _way_of(self, state: OptimizerState, *, evaluates: bool) -> HostStep:
        """Return how a step is taken."""
        if evaluates:
            if self._capturable:
                raise UsageError(
                    "a closure is evaluated on the host. Write GradScaler(...) without capturable."
                )
            return ClosureStep(state, self._scaled)
        if self._stays_on_device(state):
            return DeviceStep(state, self._loss_scale, makes_state=self._capturable)
        return HostStep(state, self._maybe_opt_step)

    def _stays_on_device(self, state: OptimizerState) -> bool:
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
        device = self._require_scale("step").device
        return not (_sync_is_free(device) or optimizers.uninitialized_on_skip(state.optimizer))

    def _maybe_opt_step(
        self, optimizer: OptimizerLike, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        taken = optimizer_state.taken  # None in a subclass with PyTorch's own `step`
        if taken is None:
            taken = optimizer_state.flags_are_clear(on_host=True)
        return optimizer.step(*args, **kwargs) if taken else None

    @torch.no_grad()
    def _prepare(self, state: OptimizerState, clip: Clip, way: HostStep) -> None:
        """Measure the gradients, agree with other ranks, decide, clip and divide.

        One division unscales and clips, so it comes last; until then limits are multiplied by the divisor.
        """
        loss_scale, on_host, guarding = self._loss_scale, way.on_host, self._guarding
        loss_scale.move(to_device=not on_host)
        state.divided, state.measured, state.gradients = (), None, gather(state.optimizer)
        device: torch.device = loss_scale.tensor.device  # type: ignore[union-attr]  # a loss was scaled
        norm = clip.max_norm is not None
        if guarding is not None and guarding.uses_norm:
            norm = norm or state.unscaled is None or state.unscaled.grad_norm is None
        is_plain = clip == NO_CLIP and not (norm or state.fused or guarding or self._meter.needs_amax)
        self._unscale_first(state, on_host=on_host, with_kernel=is_plain and type(way) is HostStep)

        scale = loss_scale.snapshot()
        state.set_divisor(scale, on_host=on_host, device=device)
        mine, sizes = self._meter.measure(state, scale, device, norm=norm, on_host=on_host)
        measured = self._agreed(state, mine, device, norm=norm, on_host=on_host)
        self._decide(state, measured, sizes)
        divisor = state.divisor
        if clip != NO_CLIP:
            again = partial(self._meter.norm_again, state, device, on_host=on_host)
            divisor = way.clip(clip, measured.grad_norm, again)
        if self.on_step is not None:
            way.read_beside(self._scaled.losses)
        way.divide(divisor, device)

    def _unscale_first(self, state: OptimizerState, *, on_host: bool, with_kernel: bool) -> None:
        """Unscale gradients that have to be before they are measured, or that PyTorch's kernel can.

        Other ranks may not need it: all agree later, on what was found here too.

        Raises:
            AssertionError: as PyTorch, if there is nothing to check, and other ranks have nothing either.
        """
        gradients = state.gradients
        is_scaled = state.stage is OptState.READY
        present = gradients.tensors if is_scaled else state.found_inf_per_device
        if not present and not self._meter.agreement.always:
            raise AssertionError(refusals.no_gradients(state.optimizer))
        if not is_scaled:
            return
        early, own = gradients.aliased or (self._already.unscaled and self._already.among(gradients)), False
        if not torch.compiler.is_compiling():  # a subclass, or someone from outside, unscales differently
            kernel = getattr(self._unscale_grads_, "__func__", None)
            early = early or kernel is not TorchPrivateNames._unscale_grads_
            own = getattr(self.unscale_, "__func__", None) is not GradScaler.unscale_ and not state.fused
        if own:  # as in PyTorch, whose fused optimizers unscale themselves
            self.unscale_(state.optimizer)
        elif with_kernel or early:
            self._unscale(state, on_host=on_host)
        else:
            return
        state.divided = (self._loss_scale.tensor,)

    def _unscale(self, state: OptimizerState, *, on_host: bool) -> None:
        """Unscale gradients and note what this rank found."""
        scale = self._require_scale("unscale_")
        gradients = state.gradients = state.gradients or gather(state.optimizer)
        state.unscaled, state.agreed, state.measured = Measured[Any](True, None), False, None
        if self._meter.needs_amax:
            rest = OptimizerState(gradients=gradients.without(self._already.among(gradients)))
            rest.set_divisor(1.0, on_host=on_host, device=scale.device)
            state.unscaled, _ = measure(rest, None, scale.device, norm=False, amax=True, on_host=on_host)
        flag = number(0.0, scale.device)
        flags = self._unscale_grads_(state.optimizer, self._inverse(scale), flag, True)
        if not flags and self._meter.agreement.needed(gradients.meshes):
            flags = {flag.device: flag}  # this rank has nothing, and still has to take part
        state.found_inf_per_device, state.stage = flags, OptState.UNSCALED

    def _measure_unscaled(self, state: OptimizerState, device: torch.device, *, on_host: bool) -> None:
        """Agree on what was found while unscaling; take the norm before other code clips."""
        flags, meshes = state.found_inf_per_device, state.gradients.meshes
        if not flags:
            return
        norm = len(meshes) < 2 or (self._guarding is not None and self._guarding.uses_norm)
        state.set_divisor(1.0, on_host=on_host, device=device)
        found, sizes = self._meter.measure(state, None, device, norm=norm, on_host=on_host)
        if self._meter.agreement.needed(meshes):
            amax = self._meter.needs_amax
            found = self._meter.agree(found, meshes, device, norm=norm, amax=amax, on_host=on_host)
            state.agreed = True
        self._scaled.note_culprits(state, found, found.finite, sizes)
        state.unscaled = found
        overflow = torch.as_tensor(found.finite, device=device).logical_not().to(torch.float32)
        state.found_inf_per_device = {place: overflow.to(place) for place in flags}

    def _agreed(
        self, state: OptimizerState, mine: Measured[Any], device: torch.device, *, norm: bool, on_host: bool
    ) -> Measured[Any]:
        """Agree with other ranks, also on a guard's loss; on what was unscaled only if there is a norm."""
        agreement, meshes, loss, losses = self._meter.agreement, state.gradients.meshes, None, None
        joins = (agreement.always or bool(meshes)) and (norm or not state.agreed)
        if self._guarding is not None and self._guarding.uses_loss:
            loss, losses = self._guarding.loss(
                self._scaled.losses,
                device,
                joins=joins and agreement.is_over(self._guarding.loss_group, meshes),
                may_lack=self._loss_may_be_elsewhere(),
                on_host=on_host,
            )
        if joins:
            how: Any = {"norm": norm, "amax": self._meter.needs_amax and not state.agreed, "on_host": on_host}
            mine = self._meter.agree(mine, meshes, device, losses=losses, **how)
        if losses is not None and mine.loss is None:
            raise UsageError(
                f"{self.guard!r} needs the loss, and no rank has scaled one. Write {SCALES} on "
                "the ranks that compute it."
            )
        if loss is not None:  # not by _replace, which PyTorch 2.6 does not compile
            mine = Measured(mine.finite, mine.scale, mine.grad_norm, mine.amax, loss)
        return mine

    def _decide(self, state: OptimizerState, measured: Measured[Any], sizes: Tensor | None) -> None:
        """Note what was measured, and whether the step is to be taken; nothing keeps gradients alive."""
        if state.failed_attempt is not None or state.unscaled is not None:
            measured = state.with_norm_before_clipping(measured)
        state.measured, state.judged, state.taken = measured, None, measured.finite
        if self._guarding is not None:
            state.judged = self._guarding.judge(state.optimizer, measured)
            state.taken = state.judged.taken
        if state.taken is not True:
            self._scaled.note_culprits(state, measured, state.taken, sizes)

    def _record_step(self, state: OptimizerState) -> None:
        """Note that an optimizer has had its step, taken or skipped."""
        state.stage, state.stepped, state.failed_attempt = OptState.STEPPED, True, None
        optimizer = state.optimizer
        if self._buffers is not None and self._buffers.restores and not state.taken:
            self._buffers.put_back()
        self._last = Record([state], self._loss_scale.steps, None, self._scaled.losses.sum)
        if self._already.only_owner != id(optimizer) or self._already.unscaled:
            decides = state.fused and isinstance(state.taken, Tensor)
            self._already.mark(optimizer, state if decides else None)

    def _step_passing_itself(
        self, state: OptimizerState, clip: Clip, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step an optimizer whose `step` takes the scaler, and unscales and skips itself."""
        refusals.refuse_passing(state.optimizer, self.guard, clip)
        self._loss_scale.adopt()
        result = state.optimizer.step(*args, **kwargs, grad_scaler=self)
        state.stage = OptState.STEPPED
        return result

    # ---- The scale and the record --------------------------------------------------------------------------

    def _measured_states(self) -> dict[int, OptimizerState]:
        """Return what is known of the optimizers that were unscaled or have stepped."""
        states = {}
        for key, state in self._states.items():
            if state.found_inf_per_device:
                states[key] = state
                if state.measured is None:
                    state.adopt_flags(self._loss_scale.snapshot())
        return states

    def _advance_policy(self, states: dict[int, OptimizerState]) -> None:
        """Advance the policy and record the step; raise if the policy gives up."""
        found, taken = list(states.values()), None
        reading = reading_of(found, self._loss_scale.policy, needs_amax=self._meter.needs_amax)
        if self._guarding is not None:
            self._guarding.commit()
            taken = all_true([state.taken for state in found])
        flags = [flag for state in found for flag in state.found_inf_per_device.values()]
        new_scale, gave_up = self._loss_scale.advance(reading, taken, counts=counts(found), flags=flags)
        self._close_iteration(states, new_scale)  # a policy that gives up leaves a record too
        if gave_up:
            # Unlike `raise_if_exhausted`, which names the first step that should have ended the training.
            raise self.policy.exhaustion_from(self._loss_scale.floats())

    def _close_without_policy(self, states: dict[int, OptimizerState]) -> None:
        """End an iteration whose next scale was not for the policy to decide."""
        if states:
            self._loss_scale.steps += counts(list(states.values()))
            if self._guarding is not None:
                self._guarding.commit()
        self._close_iteration(states, self._loss_scale.snapshot())

    def _close_iteration(self, states: dict[int, OptimizerState], new_scale: Any) -> None:
        """Forget the iteration, and record it if an optimizer stepped, or would have been skipped."""
        self._states.clear()
        if self._guarding is not None:
            self._guarding.forget()
        if self._already.unscaled:
            self._already.forget()
        counting: dict[int, OptimizerState] = {}
        stepped = is_skipped = False
        for key, state in states.items():
            state.optimizer = None  # a record keeps nobody alive
            if state.stepped or state.taken is not True:
                counting[key] = state
                stepped, is_skipped = stepped or state.stepped, is_skipped or state.taken is False
        loss: Any = self._scaled.next_iteration(stepped=len(counting) > 0)
        if not counting:
            return
        found = list(counting.values())
        if self._guarding is not None and self._guarding.uses_loss and number_of_ranks() > 1:
            loss = loss if found[-1].judged is None else found[-1].judged.loss  # the mean over ranks
        buffers = Ruined if self._buffers is None else self._buffers.after([one.taken for one in found])
        before = None if stepped else self._last
        if isinstance(before, Record):  # unread as well: not a chain of them
            before.before = None
        index, owners = self._loss_scale.steps - 1, self._buffers is None  # a model has a name for each
        self._last = last = Record(found, index, new_scale, loss, buffers, owners, before)
        self._last_of = dict.fromkeys(counting, last)
        if len(found) > 1:
            self._last_of = {key: replace(last, states=[one]) for key, one in counting.items()}
        if is_skipped:
            self._scaled.warn_of_ruined(buffers, type(self).__name__)
        if self.on_step is not None and (step := self.last_step) is not before:
            self.on_step(step)  # type: ignore[arg-type]  # there is one now


def _sync_is_free(device: torch.device) -> bool:
    return device.type == "cpu"
