"""PyTorch's private names: what subclasses of its scaler override, and training libraries read and write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from preamp.arrays import torch as arithmetic
from preamp.arrays.torch import gather
from preamp.arrays.torch_devices import widest
from preamp.errors import PolicyError
from preamp.policy import Policy
from preamp.torch.scaling.loss_scale import LossScale
from preamp.torch.scaling.measure import Meter, OptimizerState, number
from preamp.torch.scaling.optimizers import OptimizerLike
from preamp.torch.scaling.shared_gradients import AlreadyUnscaled
from preamp.torch.scaling.torch_settings import changed_policy, setting_of


def _setting(name: str) -> Any:
    """Return a property that shows a setting of the policy, and of a disabled scaler its argument."""
    return property(
        lambda scaler: (
            setting_of(scaler._loss_scale.policy, name) if scaler._enabled else scaler._settings[name]
        ),
        lambda scaler, value: scaler._set(name, value),
    )


class TorchPrivateNames(torch.amp.GradScaler):
    """The part of `GradScaler` that has PyTorch's private names.

    Attributes:
        every_rank_scales: whether every rank scales a loss of its own, although they agree on each step. If
            not, a step without one may be that of a pipeline's first stage.
    """

    every_rank_scales: ClassVar[bool] = False
    _loss_scale: LossScale
    _states: defaultdict[int, OptimizerState]
    _meter: Meter
    _already: AlreadyUnscaled
    _settings: dict[str, Any]
    _capturable: bool

    _growth_factor = _setting("growth_factor")
    _backoff_factor = _setting("backoff_factor")
    _growth_interval = _setting("growth_interval")

    def _set(self, name: str, value: Any) -> None:
        """Change a setting of the policy."""
        if self._enabled and value != setting_of(self._loss_scale.policy, name):
            if not hasattr(self._loss_scale.policy, name):
                raise PolicyError(
                    f"{name}={value!r} cannot be set: {self._loss_scale.policy!r} has no {name}."
                )
            self._set_policy(changed_policy(self._loss_scale.policy, **{name: value}))
        self._settings[name] = value

    def _set_policy(self, policy: Policy[Any]) -> None:
        """Put a policy in force."""
        self._loss_scale.set_policy(policy)
        # Computed outside of torch.compile, where a policy may do what it likes.
        self._gives_up, self._meter.needs_amax = policy.gives_up, policy.needs_amax

    @property
    def _per_optimizer_states(self) -> defaultdict[int, Any]:  # where PyTorch has dicts
        return self._states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Mapping[int, Any]) -> None:
        """End the iteration: PyTorch's `update`, whose body subclasses copy, ends by replacing the states."""
        measured = self._measured_states()
        self._loss_scale.adopt()  # the scale that was written
        self._close_without_policy(measured)

    def _measured_states(self) -> dict[int, OptimizerState]:
        raise NotImplementedError

    def _close_without_policy(self, states: dict[int, OptimizerState]) -> None:
        raise NotImplementedError

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
        self._loss_scale.set(good=float(good))

    def _get_growth_tracker(self) -> int:
        return self._loss_scale.good if self._enabled else 0

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        return self._require_scale(funcname), self._loss_scale.tracker  # type: ignore[return-value]

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._loss_scale.make_tensor(dev)
        if self._capturable:
            self._loss_scale.move(to_device=True)
            self._loss_scale.steps = torch.full((), int(self._loss_scale.steps), device=dev)

    def _require_scale(self, caller: str) -> Tensor:
        """Return the scale's tensor.

        Raises:
            AssertionError: as PyTorch, if no loss was scaled yet, on this rank or perhaps on another.
        """
        if self._loss_scale.tensor is None and self._loss_may_be_elsewhere():
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        scale = self._loss_scale.tensor
        if scale is None:
            raise AssertionError(
                f"Attempted {caller} but _scale is None.  This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )
        return scale

    def _loss_may_be_elsewhere(self) -> bool:
        return self._meter.agreement.always and not self.every_rank_scales

    def _inverse(self, scale: Tensor) -> Tensor:
        """Return what to multiply by to unscale, as a float32."""
        known = self._loss_scale.scale_on_host
        if known is None:
            return scale.to(widest(scale.device)).reciprocal().float()
        return number(1.0 / known, scale.device)

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: OptimizerLike, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Multiply an optimizer's gradients; return a flag per device of this rank.

        float16 is always allowed. Subclasses may override this, as they do PyTorch's.
        """
        gradients = self._states[id(optimizer)].gradients or gather(optimizer)
        done = self._already.among(gradients)
        tensors = gradients.tensors
        if done:
            pairs = zip(gradients.parameters, tensors, strict=True)
            tensors = [t for p, t in pairs if not self._already.unscale_rest_(p, t)]
        found = arithmetic.unscale_(tensors, inv_scale, found_inf)
        arithmetic.note_writing(gradients.tensors)
        scale = self._loss_scale.scale_on_host
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

    @torch.no_grad()
    def _check_inf_per_device(self, optimizer: OptimizerLike) -> dict[Any, Any]:
        """Note whether an optimizer's gradients are finite, and leave them as they are."""
        scale, state = self._require_scale("_check_inf_per_device"), self._states[id(optimizer)]
        gradients = gather(optimizer)
        flags = OptimizerState(gradients=gradients, divisor=torch.ones_like(scale))
        found, _ = self._meter.measure(flags, scale, scale.device, norm=False, on_host=False)
        needed = self._meter.agreement.needed(gradients.meshes)
        if needed:
            ranks, amax = (gradients.meshes, scale.device), self._meter.needs_amax
            found = self._meter.agree(found, *ranks, norm=False, amax=amax, on_host=False)
        state.unscaled = found
        flag = found.finite.logical_not().float()
        state.found_inf_per_device = {scale.device: flag} if gradients.tensors or needed else {}
        return state.found_inf_per_device

    def _scale_by_hand(self, new_scale: float | Tensor) -> float:
        """Return the number that `update` was given, after PyTorch's own checks of a tensor."""
        if isinstance(new_scale, Tensor):
            here = new_scale.device.type == str(self._device).partition(":")[0]
            if not here or new_scale.numel() != 1 or new_scale.requires_grad:
                raise AssertionError(
                    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                    "torch.FloatTensor with requires_grad=False."
                )
            return float(new_scale)
        return new_scale
