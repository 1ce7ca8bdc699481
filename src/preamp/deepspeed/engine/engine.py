"""DeepSpeed's engine on plain PyTorch: a model, its optimizer and its schedule behind one object.

The engine counts micro-steps and updates and calls everything in DeepSpeed's order. Unscaling gradients and
moving the loss scale is done by a `LossScaleOptimizer`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from preamp.arrays.torch import HALF_DTYPES
from preamp.checks import shown
from preamp.deepspeed.engine.checkpoints import load, save
from preamp.deepspeed.engine.precision import explain, to_precision
from preamp.deepspeed.overflow_log import OverflowLog
from preamp.deepspeed.ranks import average_gradients, rank
from preamp.errors import ScaleExhausted, UsageError
from preamp.policy import Dynamic, Static
from preamp.scaling import Step
from preamp.systems.deepspeed_config import Settings
from preamp.torch import LossScaleOptimizer, autocast
from preamp.torch.nested import how_to_write
from preamp.torch.scaling.culprits import names
from preamp.torch.scaling.optimizers import parameters_of
from preamp.torch.scaling.ranks import number_of_ranks


class Engine(nn.Module):
    """A model in training, with the methods of DeepSpeed's engine. `initialize` returns it.

    It is called like the model, and attributes that it does not have are looked up in the model.

    Attributes:
        module: the model.
        optimizer: the `LossScaleOptimizer`, or None without an optimizer.
        lr_scheduler: steps after every update that is applied, or None.
        training_dataloader: the loader of `training_data`, or None.
        settings: the configuration.
        device: where the model is.
        global_steps: updates, skipped ones included.
        skipped_steps: updates that were skipped.
        micro_steps: calls of `step`.
        global_samples: samples that all ranks processed in `global_steps`.
        last_step: the record of the latest update, with `global_steps` as its index. None before the first.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: LossScaleOptimizer | None,
        lr_scheduler: Any,
        settings: Settings,
        batch: tuple[int, int, int],
        on_step: Callable[[Step], object] | None = None,
    ) -> None:
        super().__init__()
        self.module: nn.Module = module
        self.optimizer: LossScaleOptimizer | None = optimizer
        self.lr_scheduler: Any = lr_scheduler
        self.settings: Settings = settings
        self.on_step: Callable[[Step], object] | None = on_step
        self.training_dataloader: Any = None
        self.device: torch.device = next(
            (tensor.device for tensor in module.parameters()), torch.device("cpu")
        )
        self.global_rank: int = rank()
        self.world_size: int = number_of_ranks()
        self.global_steps: int = 0
        self.skipped_steps: int = 0
        self.micro_steps: int = 0
        self.global_samples: int = 0
        self.last_step: Step | None = None
        self._train_batch, self._micro_batch, self._accumulation = batch
        self._calls = 0  # of step since the latest update
        self._boundary: bool | None = None  # set by the user
        self._scaled = self._inside_no_sync = self._step_applied = False
        self._norm: float | Tensor | None = None
        self._log = OverflowLog()
        self._sum_in_float32()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._sum_in_float32()  # copies of parameters do not remember it

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
        """Scale a loss and accumulate its gradients.

        Args:
            loss: of one micro-step, with one element.
            retain_graph: as for `Tensor.backward`.
            scale_wrt_gas: whether to divide by the number of micro-steps in an update.

        Returns:
            The divided loss, not scaled.

        Raises:
            UsageError: for a loss that is not a scalar, and without an optimizer.
        """
        part = self._part_of_update(loss) if scale_wrt_gas else loss
        torch.autograd.backward(self._scale(part), retain_graph=retain_graph)
        return part

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss divided by the number of micro-steps and scaled, to call `backward` on."""
        return self._scale(self._part_of_update(loss))

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-step; after the last one of an update, apply the update and step the schedule.

        Args:
            lr_kwargs: for the scheduler's `step`.

        Raises:
            UsageError: if no loss was scaled since the latest step, and inside `no_sync`.
            ScaleExhausted: if the policy gives up. The parameters are unchanged, and the step is counted.
            AssertionError: as in PyTorch, if no parameter of the optimizer has a gradient.
        """
        if self._inside_no_sync:
            raise UsageError("engine.step() is inside engine.no_sync(). Write it after the with block.")
        optimizer = self._needed("step")
        boundary, self._step_applied = self.is_gradient_accumulation_boundary(), False
        if not self._scaled:
            raise UsageError(
                "no loss was scaled since the last step. Write engine.backward(loss), not loss.backward()."
            )
        if boundary:
            self._update(optimizer, lr_kwargs or {})
        else:
            self.micro_steps += 1
            self._calls += 1
            self._scaled = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model and of the optimizer's parameters."""
        self.module.zero_grad(set_to_none)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run a `with` block without communication. There is none before an update, so this does nothing."""
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next call of `step` ends an update."""
        return self._calls + 1 >= self._accumulation if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next calls of `step` end updates. None: every `gradient_accumulation_steps`."""
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Return whether the latest call of `step` changed parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the latest update's gradients, unscaled, of all ranks, before clipping.

        It is inf where they were not finite; None before the first update, and where nothing is checked or
        clipped.
        """
        return None if self._norm is None else float(self._norm)

    @property
    def cur_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    def loss_scale(self) -> float:
        """Return the configured scale, 0 for a dynamic one, as DeepSpeed does; see `cur_scale`."""
        return self.settings.policy.scale if isinstance(self.settings.policy, Static) else 0.0

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group, or its betas."""
        return self._of_groups("betas" if "betas" in self._groups()[0] else "momentum")

    def train_batch_size(self) -> int:
        """Return the number of samples in an update, over all ranks."""
        return self._train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples in a micro-step of one rank."""
        return self._micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-steps in an update."""
        return self._accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-steps so that an update has this many samples.

        Raises:
            UsageError: for a number that is not a multiple of what all ranks process in a micro-step.
        """
        unit = self._micro_batch * self.world_size
        if train_batch_size < unit or train_batch_size % unit:
            raise UsageError(
                f"{train_batch_size} samples are not a multiple of {self._micro_batch} on each of "
                f"{self.world_size} ranks. Write engine.set_train_batch_size({unit})."
            )
        self._train_batch, self._accumulation = train_batch_size, train_batch_size // unit

    def gradient_clipping(self) -> float:
        """Return the norm that gradients are clipped to, 0 if they are not clipped."""
        return self.settings.max_norm or 0.0

    def fp16_enabled(self) -> bool:
        """Return whether parameters are float16."""
        return self.settings.precision == "float16" and not self.settings.autocast

    def bfloat16_enabled(self) -> bool:
        """Return whether parameters are bfloat16."""
        return self.settings.precision == "bfloat16" and not self.settings.autocast

    def zero_optimization(self) -> bool:
        """Return False: only DeepSpeed itself has ZeRO."""
        return False

    def zero_optimization_stage(self) -> int:
        """Return 0."""
        return 0

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the model, the optimizer with loss scale and master weights, the schedule and the counters.

        Every rank has to call this; rank 0 writes. Random number generators are not saved, and neither are
        the gradients of an unfinished update, of which a warning is logged: training resumes with that
        update's first micro-step.

        Args:
            save_dir: a directory; made if it does not exist.
            tag: a name for this checkpoint and its folder. None: "global_step" and the number of updates.
            client_state: numbers, strings, tensors, lists and dicts that `load_checkpoint` returns.
            save_latest: whether `load_checkpoint` without a tag takes this one.
            exclude_frozen_parameters: leave out parameters that need no gradient; the model must have their
                values already when the checkpoint is loaded.

        Returns:
            True.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write, and for a state that could not be
                loaded.
            UsageError: for a tag that cannot name a folder.
        """
        return save(
            self,
            save_dir,
            tag,
            client_state or {},
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            unfinished=self._calls,
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint of `save_checkpoint`; from DeepSpeed's own, load the model's weights.

        The engine must be of the same model, and may have another number of ranks or micro-steps.

        Args:
            load_dir: the directory that was `save_dir`.
            tag: which checkpoint; None takes the latest.
            load_module_strict: whether the model must have exactly the saved parameters.
            load_optimizer_states: False: the optimizer starts without a state from the saved weights; the
                loss scale is loaded all the same.
            load_lr_scheduler_states: whether to load the schedule.
            load_module_only: load the model's weights and nothing else.

        Returns:
            The path of the file and the `client_state`. (None, None), and a warning in the log, where no tag
            is given and none is the latest.

        Raises:
            CheckpointError: for a file that is missing, unreadable, does not fit, or differs from rank 0's.
                Nothing was changed.
        """
        path, client_state = load(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            module_only=load_module_only,
        )
        if path is not None:
            self._begin_update()
        return path, client_state

    def _update(self, optimizer: LossScaleOptimizer, lr_kwargs: dict[str, Any]) -> None:
        for parameter in optimizer.model_parameters():
            if parameter.dtype in HALF_DTYPES:
                _widen(parameter)  # a gradient that was assigned did not pass the hook
        average_gradients(optimizer.model_parameters())
        norm = self._clip_unchecked(optimizer)
        try:
            optimizer.step()
        except ScaleExhausted:
            self._finish(optimizer, norm, lr_kwargs)
            raise
        self._finish(optimizer, norm, lr_kwargs)

    def _finish(self, optimizer: LossScaleOptimizer, norm: Tensor | None, lr_kwargs: dict[str, Any]) -> None:
        """Count an update, clear its gradients, step the schedule if it was applied, and report it."""
        step = optimizer.last_step
        assert step is not None  # `optimizer.step` was called
        step = step._replace(
            index=self.global_steps,
            culprits=self._named(optimizer, step.culprits),
            first_culprits=self._named(optimizer, step.first_culprits),
        )
        self.last_step, self._step_applied = step, not step.skipped
        self._norm = math.inf if not step.finite else step.grad_norm if norm is None else norm
        self._begin_update()
        self.micro_steps += 1
        self.global_steps += 1
        self.skipped_steps += step.skipped
        self.global_samples += self._train_batch
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        if step.skipped:
            self._log(step, _overflows_left(optimizer))
        if self.on_step is not None:
            self.on_step(step)

    def _begin_update(self) -> None:
        """Clear the accumulated gradients."""
        self.zero_grad()
        self._calls, self._scaled = 0, False

    def _sum_in_float32(self) -> None:
        """Accumulate the gradients of half-precision parameters in float32.

        A gradient that is assigned may be of either dtype.
        """
        for parameter in self.module.parameters():
            if parameter.dtype not in HALF_DTYPES:
                continue
            if parameter.requires_grad:
                parameter.grad_dtype = None
                parameter.register_post_accumulate_grad_hook(_widen)  # type: ignore[no-untyped-call]
            else:  # a parameter that needs no gradient cannot have a hook, and may be trained later
                parameter.grad_dtype = torch.float32

    def _clip_unchecked(self, optimizer: LossScaleOptimizer) -> Tensor | None:
        """Clip gradients that no policy checks, as PyTorch does; return their norm."""
        if optimizer.scaler.is_enabled() or self.settings.max_norm is None:
            return None
        return nn.utils.clip_grad_norm_(optimizer.model_parameters(), self.settings.max_norm)

    def _named(self, optimizer: LossScaleOptimizer, culprits: tuple[str, ...]) -> tuple[str, ...]:
        """Return culprits by the model's names of parameters; the optimizer may have others."""
        if not culprits:
            return culprits
        ours = {id(parameter): name for name, parameter in self.module.named_parameters()}
        theirs = names(optimizer)
        pairs = zip(parameters_of(optimizer), optimizer.model_parameters(), strict=True)
        known = {theirs[id(trained)]: ours.get(id(parameter)) for trained, parameter in pairs}
        return tuple(known.get(culprit) or culprit for culprit in culprits)

    def _part_of_update(self, loss: Tensor) -> Tensor:
        """Return a micro-step's part of the loss of an update."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
            raise UsageError(
                f"the loss is not a scalar: it is {found}. {how_to_write(loss, 'engine.backward({})')}"
            )
        if self._accumulation == 1:
            return loss
        return (loss.float() if loss.dtype in HALF_DTYPES else loss) / self._accumulation

    def _scale(self, loss: Tensor) -> Tensor:
        optimizer = self._needed("backward")
        self._scaled = True
        return optimizer.scale_loss(loss)

    def _needed(self, caller: str) -> LossScaleOptimizer:
        if self.optimizer is None:
            raise UsageError(
                f"engine.{caller}() needs an optimizer. Write initialize(..., optimizer="
                'torch.optim.AdamW(model.parameters())), or an "optimizer" section in the configuration.'
            )
        return self.optimizer

    def _groups(self) -> list[dict[str, Any]]:
        return self._needed("step").param_groups

    def _of_groups(self, name: str) -> list[Any]:
        return [group.get(name, 0.0) for group in self._groups()]


def _widen(parameter: Tensor) -> None:
    """Make a gradient float32, so that what is added to it next is not rounded to half precision."""
    if parameter.grad is not None and parameter.grad.dtype in HALF_DTYPES:
        parameter.grad = parameter.grad.float()


def _overflows_left(optimizer: LossScaleOptimizer) -> int | None:
    policy = optimizer.scaler.policy
    return policy.overflows_left(optimizer.scaler.policy_state) if isinstance(policy, Dynamic) else None
