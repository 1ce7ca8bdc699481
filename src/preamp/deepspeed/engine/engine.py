"""DeepSpeed's engine on plain PyTorch: a model, its optimizer and its loss scale behind one object.

A `GradScaler` unscales the gradients and moves the scale; `MasterWeights` keeps what float16 would lose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from preamp.arrays.torch import HALF_DTYPES
from preamp.checks import shown
from preamp.deepspeed.engine.precision import explain, to_precision
from preamp.deepspeed.overflow_log import OverflowLog
from preamp.deepspeed.ranks import average_gradients
from preamp.errors import UsageError
from preamp.policy import Dynamic
from preamp.scaling import Step
from preamp.systems.deepspeed_config import Settings
from preamp.torch import GradScaler, MasterWeights, autocast
from preamp.torch.nested import how_to_write
from preamp.torch.scaling.optimizers import parameters_of

COUNTERS = ("global_steps", "skipped_steps", "micro_steps")


class Engine(nn.Module):
    """A model in training, with the methods of DeepSpeed's engine. `initialize` returns it.

    It is called like the model, and attributes that it does not have are looked up in the model.

    Attributes:
        module: the model.
        optimizer: the optimizer, or None. Its groups hold float32 copies of half-precision parameters;
            between `backward` and `step` the gradients, scaled, are there and not in the model.
        scaler: the `GradScaler` at work.
        settings: the configuration.
        device: where the model is.
        global_steps: updates, skipped ones included.
        skipped_steps: updates that were skipped.
        micro_steps: calls of `step`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: GradScaler,
        settings: Settings,
        device: torch.device,
        accumulation: int,
    ) -> None:
        super().__init__()
        self.module: nn.Module = module
        self.optimizer: torch.optim.Optimizer | None = optimizer
        self.scaler: GradScaler = scaler
        self.settings: Settings = settings
        self.device: torch.device = device
        self.global_steps: int = 0
        self.skipped_steps: int = 0
        self.micro_steps: int = 0
        self._accumulation = accumulation
        self._is_scaled = self._step_applied = False
        self._log = OverflowLog()
        self._masters = None if optimizer is None else MasterWeights(optimizer)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or not hasattr(self.module, name):
                raise
            return getattr(self.module, name)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the model returns, under autocast or with inputs cast if the configuration says so."""
        dtype = getattr(torch, self.settings.precision)
        if self.settings.cast_inputs:
            inputs, options = to_precision((inputs, options), dtype)
        if self.settings.autocast:
            with autocast(self.device.type, dtype=dtype):
                return self.module(*inputs, **options)
        try:
            return self.module(*inputs, **options)
        except RuntimeError as error:
            explain(error, (inputs, options), dtype)
            raise

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Scale a loss and accumulate its gradients, in float32.

        Args:
            loss: of one micro-step, with one element.
            retain_graph: as for `Tensor.backward`.
            scale_wrt_gas: whether to divide by the number of micro-steps in an update.

        Returns:
            The divided loss, not scaled.

        Raises:
            UsageError: for a loss that is not a scalar, and without an optimizer.
        """
        _, masters = self._needed("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
            raise UsageError(
                f"the loss is not a scalar: it is {found}. {how_to_write(loss, 'engine.backward({})')}"
            )
        if scale_wrt_gas and self._accumulation > 1:
            loss = (loss.float() if loss.dtype in HALF_DTYPES else loss) / self._accumulation
        self.scaler.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        masters.take_gradients()
        self._is_scaled = True
        return loss

    def step(self) -> None:
        """End a micro-step; after the last one of an update, apply the update and move the scale.

        Raises:
            UsageError: if no loss was scaled since the latest step.
            ScaleExhausted: if the policy gives up. The parameters are unchanged, and the step is counted.
            AssertionError: as in PyTorch, if no parameter of the optimizer has a gradient.
        """
        optimizer, masters = self._needed("step")
        if not self._is_scaled:
            raise UsageError(
                "no loss was scaled since the last step. Write engine.backward(loss), not loss.backward()."
            )
        if not self.is_gradient_accumulation_boundary():
            self._is_scaled = self._step_applied = False
            self.micro_steps += 1
            return
        average_gradients(parameters_of(optimizer))
        max_norm = self.settings.max_norm
        if max_norm is None and self.scaler.is_enabled():
            max_norm = math.inf  # measured, not clipped
        self.scaler.step(optimizer, max_norm=max_norm, optimizer_kwargs={})
        masters.write_back()
        try:
            self.scaler.update()
        finally:  # a policy that gives up, too
            self._finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model and of the optimizer's parameters."""
        self.module.zero_grad(set_to_none)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next call of `step` ends an update."""
        return (self.micro_steps + 1) % self._accumulation == 0

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-steps in an update."""
        return self._accumulation

    def was_step_applied(self) -> bool:
        """Return whether the latest call of `step` changed parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the latest update's gradients, unscaled, of all ranks, before clipping.

        It is inf where they were not finite; None before the first update, and where nothing is checked or
        clipped.
        """
        step = self.last_step
        return None if step is None else step.grad_norm if step.finite else math.inf

    @property
    def last_step(self) -> Step | None:
        """The record of the latest update. None before the first."""
        return self.scaler.last_step

    @property
    def cur_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        return self.scaler.get_scale()

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model, the optimizer, the float32 copies, the loss scale and the counters.

        It is for `torch.save`, and `torch.load` reads it with `weights_only`. The gradients of an unfinished
        update are not in it: training resumes with its first micro-step.
        """
        state: dict[str, Any] = {name: getattr(self, name) for name in COUNTERS}
        state["micro_steps"] -= self.micro_steps % self._accumulation
        state |= {"module": self.module.state_dict(*args, **options), "scaler": self.scaler.state_dict()}
        if self.optimizer is not None and self._masters is not None:
            state |= {"optimizer": self.optimizer.state_dict(), "masters": self._masters.state_dict()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Resume from what `state_dict` returned, of an engine of the same model and optimizer.

        Raises:
            KeyError: for a missing entry.
            ValueError: as PyTorch, and for other float32 copies or another guard.
            RuntimeError: as PyTorch, for another model and for a checkpoint without a loss scale.
        """
        result = self.module.load_state_dict(state_dict["module"], *args, **options)
        if self.optimizer is not None and self._masters is not None:
            self.optimizer.load_state_dict(state_dict["optimizer"])
            self._masters.load_state_dict(state_dict["masters"])
        self.scaler.load_state_dict(state_dict["scaler"])
        for name in COUNTERS:
            setattr(self, name, state_dict[name])
        self.zero_grad()
        self._is_scaled = False
        return result

    def _finish(self) -> None:
        """Count an update, clear its gradients, and report one that was skipped."""
        skipped = self.scaler.is_enabled() and self.scaler.has_skipped()
        self.zero_grad()
        self._is_scaled, self._step_applied = False, not skipped
        self.micro_steps += 1
        self.global_steps += 1
        self.skipped_steps += skipped
        if skipped and self.last_step is not None:
            policy = self.scaler.policy
            left = policy.overflows_left(self.scaler.policy_state) if isinstance(policy, Dynamic) else None
            self._log(self.last_step, left)

    def _needed(self, caller: str) -> tuple[torch.optim.Optimizer, MasterWeights]:
        if self.optimizer is None or self._masters is None:
            raise UsageError(
                f"engine.{caller}() needs an optimizer. Write initialize(..., optimizer="
                'torch.optim.AdamW(model.parameters())), or an "optimizer" section in the configuration.'
            )
        return self.optimizer, self._masters
