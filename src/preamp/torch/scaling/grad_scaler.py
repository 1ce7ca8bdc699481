"""`torch.amp.GradScaler` on a preamp policy.

This room owns PyTorch's idiom: one object between the loss and the optimizer. Its call order, checks and
messages are PyTorch's own; what decides the next scale is the policy. It refuses to know any rule. One
optimizer's step is made in `stepping`, the policy's state is kept in `loss_scale`.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from preamp.arrays.torch import gather
from preamp.arrays.torch_devices import check_device, is_capturing
from preamp.checks import callable_or_none, is_number, level_of_caller, shown
from preamp.errors import PolicyError, ScaleExhausted, UsageError
from preamp.policy import Dynamic, Policy
from preamp.scaling import Step
from preamp.systems.arguments import warn_if_out_of_bounds
from preamp.torch.nested import map_tensors
from preamp.torch.scaling.buffers import Buffers
from preamp.torch.scaling.culprits import backward_order
from preamp.torch.scaling.loss_scale import SETTINGS, LossScale, numbers_and_settings
from preamp.torch.scaling.optimizers import is_fused, parameters_of, step_after, takes, warn_of_small_eps
from preamp.torch.scaling.outcome import Outcome, reading_of, step_of
from preamp.torch.scaling.ranks import Agreement, number_of_ranks
from preamp.torch.scaling.readings import Readings
from preamp.torch.scaling.stepping import Clip, Ledger, Stepping, fresh
from preamp.torch.scaling.watch import Watch

T = TypeVar("T")


def _setting(name: str) -> Any:
    """Return a property that shows a setting of the policy, and of a disabled scaler its argument."""
    return property(
        lambda scaler: scaler._loss_scale.setting(name) if scaler._enabled else scaler._settings[name],
        lambda scaler, value: scaler._set(name, value),
    )


class GradScaler(Stepping):
    """Scale the loss, unscale the gradients, skip the steps that overflowed, move the scale.

    A drop-in for `torch.amp.GradScaler`: same arguments, methods, call order, `state_dict` and errors.
    The default rule is PyTorch's, with a floor and a ceiling, and it grows even where its interval was
    lowered below the steps already counted; `policy=dialects.TORCH` has no bounds.

    Args:
        device: the device type the scaler works on, such as "cuda" or "cpu".
        init_scale: the scale of the first step.
        growth_factor: what a growth multiplies the scale by.
        backoff_factor: what an overflow multiplies the scale by.
        growth_interval: clean steps in a row before the scale grows.
        enabled: False makes every method a no-op and `step` a plain `optimizer.step`, clipped if asked.
        policy: any preamp policy or dialect, instead of the four settings above.
        on_step: called with a `Step` at the end of every `update` that ends a step. A `Trace` is such
            a callable. On an accelerator this costs one read a step.
        process_group: the ranks that hold different gradients of one model (tensor, pipeline or fully
            sharded parallel), so that all of them skip together. DDP needs none, and DTensors know theirs.
        reduce: instead of a group, a function that sums a float64 tensor over ranks: of shape [2], for a
            policy that uses gradient statistics [282]. On a device without float64, such as MPS, it is
            float32.
        capturable: read nothing, ever: for `torch.compile(fullgraph=True)` and CUDA graphs. The state
            stays on the device, `last_step` is read when it is asked for, and a step that must not happen
            is taken back by a `where`, unless the optimizer is fused. Take a step before you capture a graph:
            of Triton's kernels only those are captured that were launched before.
        model: whose buffers to look at after a skipped step: an overflow in forward is in BatchNorm's running
            statistics before the step can be skipped. `last_step.buffers` names those that are not finite.
            Costs nothing while steps are taken.
        restore_buffers: give such a buffer the value that it had after the last step that was taken, or when
            the scaler was made or loaded, if that was later. Costs a copy of all floating-point buffers of
            `model` a step, on their device, and on an accelerator one read.

    Attributes:
        policy: the rule in force.
        last_step: the latest `Step`: available after `step`, complete after `update`. None before. Its `loss`
            is the sum of all losses that were scaled since the update before, on this rank; of a closure that
            is evaluated several times, as LBFGS does, those of the last evaluation. None if one of them was
            not a single number, or was changed in place (`loss.mul_(2)`) before it was read. Of a disabled
            scaler `skipped` is False, and `finite` is True unless `max_norm` found a norm that is not finite;
            `grad_norm` is that norm. They are read when you ask for `last_step`.

    Raises:
        AssertionError: as PyTorch, for a growth factor <= 1 or a backoff factor >= 1.
        PolicyError: for settings that PyTorch accepts and that cannot work, and for a device that never
            computes ("meta") or does not exist ("gpu").
        InexactScale: a warning, for a scale or factor that is not a power of two.
        ScaleExhausted: from `update`, if the policy was told to give up at its floor.

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
    ) -> None:
        check_device(device)
        callable_or_none("on_step", on_step, "on_step=Trace(), or any function")
        self._device, self._enabled = device, enabled and _is_there(device)
        values = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._settings = dict(zip(SETTINGS, values, strict=True))
        if self._enabled:
            self._loss_scale = LossScale(policy, self._settings)
        else:
            self._loss_scale = LossScale(Dynamic(), {})
        self._readings = Readings(Agreement(process_group, reduce))
        self._capturable = capturable
        self._gives_up = self._loss_scale.policy.gives_up
        if capturable and (on_step is not None or self._gives_up):
            needed, instead = (
                (f"on_step={on_step!r}", "leave out on_step: scaler.last_step is read when you ask for it")
                if on_step is not None
                else (
                    f"policy={policy!r}, which can end the training,",
                    "a policy with neither at_floor='raise' nor max_consecutive_overflows",
                )
            )
            raise PolicyError(
                f"capturable=True reads nothing, but {needed} needs a read at every step. "
                f"Write GradScaler(...) without capturable=True, or {instead}."
            )
        super().__init__()
        self._buffers = _buffers_of(model, restore_buffers, capturable)
        self.on_step = on_step
        self._per_optimizer_states: defaultdict[int, Ledger] = defaultdict(fresh)
        self._last: partial[Step] | Step | None = None
        self._last_of: dict[int, Callable[[], Step]] = {}
        self._steps_seen: Any = 0  # a tensor if capturable

    @property
    def policy(self) -> Policy[Any]:
        """The rule in force."""
        return self._loss_scale.policy

    @property
    def policy_state(self) -> Any:
        """The policy's state in floats. If it lies on a device, it is read."""
        return self._loss_scale.floats()

    @property
    def last_step(self) -> Step | None:
        """The latest `Step`. If its numbers lie on a device, they are read now."""
        if callable(self._last):
            self._last = self._last()
        return self._last

    def _has_skipped(self) -> bool:
        """Return whether the latest step was skipped. Unlike `last_step`, it does not read the loss."""
        told = self._last(loss=None) if callable(self._last) else self._last
        return told is not None and told.skipped

    def last_step_of(self, optimizer: Any) -> Step | None:
        """Return one optimizer's part of the latest step; None if it took none."""
        ledger = self._per_optimizer_states.get(id(optimizer), {})
        if "outcome" in ledger:
            return step_of([ledger["outcome"]], self._steps_seen, None, self._losses.so_far())
        step = self._last_of.get(id(optimizer))
        return step() if step else None

    def scale(self, outputs: T) -> T:
        """Multiply by the scale: a tensor, or all tensors in lists, tuples, dicts and other iterables.

        Returns:
            The same structure; tensors of the dtype that a product with a float32 scalar has, and
            float32 for float16, so that a scaled loss does not overflow.

        Raises:
            ValueError: as PyTorch, for what holds something else.
        """
        if self._enabled:
            return map_tensors(self._times_scale, outputs)
        self._losses.add(outputs)
        return outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, and note whether all are finite.

        Gradients of any float or complex dtype, sparse or not; one that two parameters or two
        optimizers share is divided once. Only needed to look at gradients or change them: `step` does it
        otherwise, and clips on the way if asked.

        Raises:
            AssertionError: as PyTorch, before the first `scale`.
            RuntimeError: as PyTorch, for a second call before `update`.
            UsageError: as `step`, if the scale was changed after the loss was scaled.
        """
        if not self._enabled:
            return
        self._require_scale("unscale_")
        ledger = self._ledger_of(optimizer)
        if ledger["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if ledger["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._refuse_other_scale(optimizer, ledger)
        self._unscale(optimizer, ledger)

    def watch(self, optimizer: torch.optim.Optimizer) -> Watch:
        """Take each gradient's norm in backward, right when it is written; `step` then reads nothing.

        For `max_norm`. Call it once, after the optimizer has all its parameters. A gradient that is written
        to afterwards is measured again; only writes through `.data` or NumPy go unnoticed.

        Returns:
            A handle whose `remove()` stops it.

        Raises:
            UsageError: where gradients are final only after communication (DDP, FSDP, DTensor).
        """
        return self._readings.watch(optimizer, peaks=bool(self.policy.needs))

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

        One pass over the gradients gives their norm and tells whether all are finite; what they have to
        be multiplied by reaches a fused optimizer as one number. Afterwards `.grad` holds what was applied
        or, after a skipped step, the unscaled gradients; scaled ones where nothing is read and a fused
        optimizer skipped, as in PyTorch.

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
        clip = Clip(_limit("max_norm", max_norm), _limit("max_value", max_value))
        if not self._enabled:
            outcome = Outcome(1.0, finite=True, skips=False)
            clips = None if clip == Clip() else partial(self._clip, optimizer, clip, outcome)
            result = step_after(optimizer, clips, args, kwargs)
            self._last = partial(step_of, [outcome], self._steps_seen, 1.0, loss=self._losses.so_far())
            return result
        evaluates = callable(args[0] if args else kwargs.get("closure"))
        if not evaluates:  # a closure scales later
            self._require_scale("step")
        ledger = self._ledger_of(optimizer)
        if ledger["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if evaluates:
            return self._step_with_closure(optimizer, ledger, clip, args, kwargs)
        self._refuse_other_scale(optimizer, ledger)
        if is_fused(optimizer) and takes(optimizer, "grad_scaler"):
            return self._step_of_old_kind(optimizer, ledger, args, kwargs)
        if self._stays_on_device(optimizer):
            return self._step_on_device(optimizer, ledger, clip, args, kwargs)
        return self._step_on_host(optimizer, ledger, clip, args, kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Advance the policy by what the optimizers of this iteration saw, or set a scale by hand.

        Args:
            new_scale: the scale to go on with, as a number or a one-element tensor.

        Raises:
            AssertionError: as PyTorch, when no optimizer was unscaled or stepped.
            PolicyError: for a scale that would turn gradients into 0, inf or NaN.
            ScaleExhausted: if the policy was told to give up at its floor. The scaler can be used further.
        """
        if not self._enabled:
            self._steps_seen += 1
            self._losses.take()
            return
        self._require_scale("update")
        ledgers = {key: one for key, one in self._per_optimizer_states.items() if one["found_inf_per_device"]}
        if new_scale is None and not ledgers:
            raise AssertionError("No inf checks were recorded prior to update.")
        outcomes = {key: one.get("outcome") or self._outcome_of_flags(one) for key, one in ledgers.items()}
        if new_scale is None:
            self._loss_scale.adopt()
            self._advance(outcomes)
        else:
            before, scale = self._known_scale(), self._scale_by_hand(new_scale)
            self._loss_scale.set_scale(scale)
            self._note_change("scaler.update(new_scale)", before)
            self._finish(outcomes, self._loss_scale.snapshot())
        self._is_pending = False

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
        if not self._loss_scale.five_numbers_suffice():
            more = {name: value for name, value in numbers.items() if name not in ("scale", "good")}
        steps = int(self._steps_seen)
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
            PolicyError: for a scale or setting that cannot work. The scaler is left as it was.
            UserWarning: a warning, for a scale outside the policy's bounds, which is kept.
        """
        if self._enabled:
            numbers, settings = self._saved(state_dict)
            before = self._known_scale()
            scale = self._loss_scale.restore(numbers, settings)
            self._note_change("scaler.load_state_dict(state_dict)", before)
            if self._buffers is not None and self._buffers.restores:
                self._buffers.keep()  # those of the checkpoint, if the model was loaded first
            warn_if_out_of_bounds(self.policy, scale, 'state_dict["scale"] = {bound!r} before loading')
            self._steps_seen = self._steps_seen * 0 + numbers["steps"]  # stays a tensor if it is one

    def _known_scale(self) -> float | None:
        """Return the scale, None where it would have to be read from a device."""
        return None if self._loss_scale.on_device else float(self._loss_scale.state.scale)

    def _note_change(self, by: str, before: float | None) -> None:
        """Note that the scale was changed, for gradients that have the one from before in them."""
        if self._is_pending and (before is None or before != self._known_scale()):
            self._changed_by = by

    def _saved(self, state_dict: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the numbers and the settings in a checkpoint; raise what `load_state_dict` raises."""
        numbers, settings = numbers_and_settings(state_dict)
        self._loss_scale.restored(numbers, settings)
        return numbers, settings

    def _ledger_of(self, optimizer: torch.optim.Optimizer) -> Ledger:
        if not hasattr(optimizer, "param_groups"):
            raise UsageError(
                f"{shown(optimizer)} is not an optimizer: it has no param_groups. "
                "Write scaler.step(optimizer), once for each optimizer."
            )
        if not torch.compiler.is_compiling():
            self._inspect(optimizer)
        ledger = self._per_optimizer_states[id(optimizer)]
        ledger["optimizer"] = optimizer  # which lives until `update`, so that no other has its id
        return ledger

    def _inspect(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn, the first time an optimizer comes, of what would train wrongly."""
        if id(optimizer) in self._inspected:
            return
        self._inspected.add(id(optimizer))
        if not self._readings.agreement.needed(()):
            _warn_of_shards(optimizer)
        if self._warns_of_small_eps:
            instead = "train float32 weights, or LossScaleOptimizer(..., master_weights=True)"
            warn_of_small_eps(optimizer, range(len(optimizer.param_groups)), instead)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        told: dict[str, Any] = {"_last": self.last_step, "_last_of": {}, "_order": None, "_inspected": set()}
        kept = {"_steps_seen": int(self._steps_seen), "_loss_scale": self._loss_scale.without_tensors()}
        return {**self.__dict__, **told, **kept}

    # What PyTorch's class offers to those who look inside.

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        return self._require_scale(funcname), self._loss_scale.tracker  # type: ignore[return-value]

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._loss_scale.place(dev)
        if self._capturable:
            self._loss_scale.to_device()
            self._steps_seen = torch.full((), int(self._steps_seen), device=dev)

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
        self._loss_scale.set_scale(scale)

    @property
    def _init_growth_tracker(self) -> int:
        return self._loss_scale.good

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, good: int) -> None:
        self._loss_scale.set_good(good)

    _growth_factor = _setting("growth_factor")
    _backoff_factor = _setting("backoff_factor")
    _growth_interval = _setting("growth_interval")

    # The rest is for this class alone.

    def _set(self, name: str, value: Any) -> None:
        if self._enabled:
            self._loss_scale.change(name, value)
        self._settings[name] = value

    def _times_scale(self, output: Tensor) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        self._losses.add(output)
        self._is_pending, self._changed_by = True, None
        if not torch.compiler.is_compiling():
            self._scalings += 1
            # A graph that is captured now scales whenever it is replayed, and nothing is heard of it here.
            self._is_pending = not is_capturing(output)
            if self._order is None and output.grad_fn is not None:
                self._order = backward_order(output.grad_fn)
        wide = output.float() if output.dtype is torch.float16 else output
        scaled = wide * self._require_scale("scale").to(output.device, non_blocking=True)
        return scaled if self._loss_factor == 1.0 else scaled * self._loss_factor

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
        return self._readings.agreement.needed(())

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

    def _advance(self, outcomes: dict[int, Outcome]) -> None:
        steps = list(outcomes.values())
        found_inf = steps[0].found_inf if len(steps) == 1 else None
        try:
            new_scale = self._loss_scale.advance(reading_of(steps, self.policy), found_inf)
        except ScaleExhausted:
            self._finish(outcomes, self._loss_scale.snapshot())  # who gives up leaves a record too
            raise
        self._finish(outcomes, new_scale)

    def _clip(self, optimizer: Any, clip: Clip, outcome: Outcome) -> None:
        """Clip where there is no scale: as PyTorch, unless other ranks have parts of the norm.

        With `max_norm` the norm from before any clipping, and whether it is finite, are noted in `outcome`.
        """
        gradients, both = gather(optimizer), None not in clip
        if self._readings.agreement.needed(gradients.meshes):
            seen = self._clip_unscaled(optimizer, Clip(max_norm=math.inf)) if both else None
            clipped = self._clip_unscaled(optimizer, clip)
            if clip.max_norm is not None:
                outcome.finite, outcome.norm = seen or clipped
            return
        before = torch.linalg.vector_norm(gradients.norms()) if both and gradients.tensors else None
        parameters = parameters_of(optimizer)
        if clip.max_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip.max_value)
        if clip.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip.max_norm)
            outcome.norm = norm if before is None else before
            outcome.finite = outcome.norm.isfinite()  # read when `last_step` is

    def _tell(self, outcome: Outcome) -> None:
        self._last = partial(step_of, [outcome], self._steps_seen, None, loss=self._losses.so_far())

    def _finish(self, outcomes: dict[int, Outcome], new_scale: float | Tensor) -> None:
        """Forget the iteration, and record it if it had a step."""
        self._per_optimizer_states.clear()
        self._already.forget()
        loss = self._losses.take()
        if not outcomes:
            return
        index = self._steps_seen.clone() if self._capturable else self._steps_seen
        self._steps_seen += 1
        buffers = self._buffers_after(outcomes)
        tell = partial(step_of, index=index, new_scale=new_scale, loss=loss, buffers=buffers)
        self._last = partial(tell, list(outcomes.values()))
        self._last_of = {key: partial(tell, [outcome]) for key, outcome in outcomes.items()}
        if self.on_step is not None:
            self.on_step(self.last_step)  # type: ignore[arg-type]  # there is one now

    def _buffers_after(self, outcomes: dict[int, Outcome]) -> Callable[[], tuple[str, ...]]:
        """Return what names the buffers that a skipped step has ruined; restore or keep them if asked to."""
        buffers = self._buffers
        if buffers is None:
            return tuple
        finite = [outcome.finite for outcome in outcomes.values()]
        if any(isinstance(one, Tensor) for one in finite):
            return buffers.non_finite  # when it is asked for
        if all(finite):
            if buffers.restores:
                buffers.keep()
            return tuple
        names = buffers.non_finite()
        if buffers.restores:
            buffers.restore(names)
        return lambda: names


def _buffers_of(model: Any, restores: bool, capturable: bool) -> Buffers | None:
    """Return the buffers to look after, or None without a model."""
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


def _is_there(device: Any) -> bool:
    """Warn as PyTorch does of a CUDA that is not there."""
    if device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():  # type: ignore[no-untyped-call]
        warnings.warn(
            "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=3
        )
        return False
    return True


def _for_optimizer(
    optimizer: Any, given: Mapping[str, Any] | None, kwargs: dict[str, Any], **limits: Any
) -> dict[str, Any]:
    """Return the keyword arguments for an optimizer's own `step`.

    Args:
        optimizer: whose step it is.
        given: `optimizer_kwargs`.
        kwargs: the other keyword arguments.
        limits: the arguments that are the scaler's, which `step` of this optimizer may have as well.
    """
    if given is None:
        if torch.compiler.is_compiling():  # signatures cannot be looked up there; a step before has done that
            return kwargs
        for name in [name for name, limit in limits.items() if limit is not None]:
            if takes(optimizer, name):
                kind, value = type(optimizer).__name__, shown(limits[name])
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


def _warn_of_shards(optimizer: Any) -> None:
    """Warn of parameters of FSDP's first version, of which each rank has another part."""
    flat = ("_is_flat_param", "_fsdp_flattened")
    if number_of_ranks() > 1 and any(hasattr(p, name) for p in parameters_of(optimizer) for name in flat):
        warnings.warn(
            "the parameters belong to FSDP's first version, where every rank has other gradients: each would "
            "skip and clip by its own alone. Write ShardedGradScaler() instead of GradScaler(), or "
            'process_group="world". With NO_SHARD alone they are the same everywhere, and nothing is wrong.',
            UserWarning,
            stacklevel=level_of_caller(),
        )


def _limit(name: str, value: Any) -> float | None:
    """Refuse what nothing can be clipped to. inf clips nothing."""
    if value is None:
        return None
    limit = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
    is_infinite = isinstance(limit, Real) and limit == math.inf
    if not is_infinite and not (is_number(limit) and limit > 0.0):
        raise PolicyError(
            f"{name}={shown(value)} is no number above 0. Write {name}=1.0, or None not to clip."
        )
    return float(limit)
