"""What `GradScaler` refuses, and what it says."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from preamp.checks import level_of_caller
from preamp.errors import PolicyError, UsageError
from preamp.torch.scaling.measure import OptimizerState
from preamp.torch.scaling.optimizers import OptimizerLike, parameters_of
from preamp.torch.scaling.ranks import number_of_ranks
from preamp.torch.scaling.steps import NO_CLIP, Clip


def needs_reads(setting: str, instead: str) -> PolicyError:
    """Return the error for a setting that `capturable` excludes."""
    return PolicyError(
        f"capturable=True reads nothing, but {setting} needs a read at every step. "
        f"Write GradScaler(...) without capturable=True, or {instead}."
    )


def is_there(device: Any, kind: str) -> bool:
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


def warn_of_shards(optimizer: OptimizerLike) -> None:
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


def nothing_checked(states: Iterable[OptimizerState]) -> str:
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


def no_gradients(optimizer: OptimizerLike) -> str:
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


def refuse_second_unscale(state: OptimizerState) -> None:
    """Refuse to unscale what was unscaled, as PyTorch."""
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


def refuse_passing(optimizer: OptimizerLike, guard: Any, clip: Clip) -> None:
    """Refuse what an optimizer cannot do whose `step` takes the scaler; warn, as PyTorch, that it does."""
    kind = type(optimizer).__name__
    if guard is not None:
        raise UsageError(
            f"guard={guard!r} cannot skip: {kind}.step takes grad_scaler= and unscales the "
            "gradients itself. Write GradScaler(...) without guard, or use another optimizer."
        )
    if clip != NO_CLIP:
        name = "max_norm" if clip.max_norm is not None else "max_value"
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
