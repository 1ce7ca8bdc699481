"""`deepspeed.initialize` on plain PyTorch: make an engine from a model and a configuration.

What only DeepSpeed itself can do is refused, with the line to write instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from preamp.checks import callable_or_none
from preamp.deepspeed.engine.engine import Engine
from preamp.deepspeed.engine.precision import cast_model
from preamp.deepspeed.engine.sections import DEEPSPEED_ITSELF, optimizer_of
from preamp.deepspeed.ranks import begin_alike, join
from preamp.errors import ConfigError, UsageError
from preamp.guards import Guard
from preamp.policy import Static
from preamp.scaling import Step, given_guard
from preamp.systems.deepspeed_config import Settings, load
from preamp.torch import GradScaler
from preamp.torch.scaling.optimizers import parameters_of
from preamp.torch.scaling.ranks import number_of_ranks

OFF: tuple[Any, ...] = ({}, {"enabled": False})
# Sections and keys that change the training and are not supported, and the values with which they do not.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "scheduler": ({},),
    "data_types": ({}, {"grad_accum_dtype": "fp32"}),
    "gradient_allreduce_op": ("mean",),
    "managed_gradient_accumulation": (True,),
    "sequence_parallel_size": (1,),
    "tensor_parallel": ({}, {"autotp_size": 0}, {"autotp_size": 1}),
    "expert_parallel": OFF,
    "hybrid_engine": OFF,
    "data_efficiency": OFF,
    "weight_quantization": OFF,
}


def initialize(
    args: object = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | Settings | None = None,
    on_step: Callable[[Step], object] | None = None,
    guard: Guard[Any] | None = None,
    restore_buffers: bool = False,
    **others: None,
) -> tuple[Engine, torch.optim.Optimizer | None, None, None]:
    """Return an engine for a model, with the arguments and by the configuration of DeepSpeed 0.19.8.

    DeepSpeed is not needed. This does what its stage 0 does: each rank holds the whole model. Gradients of
    half-precision parameters are accumulated in float32 and their updates are made in float32; gradients are
    averaged over ranks when an update is due. A model on the CPU moves to this rank's accelerator if there is
    one. If a launcher started several processes, `torch.distributed` is initialized.

    Args:
        args: may hold `deepspeed_config`, a path, and `local_rank`.
        model: the bare model, the same on every rank. With `fp16` or `bf16` its parameters are cast; its
            buffers stay as they are, as in DeepSpeed, apart from batch norms'.
        optimizer: any optimizer of its parameters, or a function that makes one of `model_parameters`. It
            takes precedence over the configuration's.
        model_parameters: what to train: tensors or parameter groups. None: what needs a gradient.
        config: a path, a dict, or `preamp.systems.deepspeed_config.Settings`.
        on_step: as for `preamp.torch.GradScaler`, after every update.
        guard: as for `preamp.torch.GradScaler`. It decides about updates, by the norm of the averaged
            gradients before clipping and by the mean loss of the micro-steps and ranks. In bfloat16 and
            float32 an update whose gradients are not finite is then skipped, too.
        restore_buffers: as for `preamp.torch.GradScaler`, after an update that was skipped.
        **others: DeepSpeed's other arguments; only None is accepted.

    Returns:
        The engine, its optimizer, and None twice, where DeepSpeed returns a loader and a scheduler.

    Raises:
        ConfigError: for an invalid configuration.
        PolicyError: for an `on_step` that cannot be called, and for what is not a guard.
        UsageError: for what only DeepSpeed itself can do, for arguments that contradict each other, and for
            `guard` and `restore_buffers` where no update is ever skipped.

    >>> import torch
    >>> from preamp.deepspeed import initialize
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> engine, optimizer, _, _ = initialize(
    ...     model=model,
    ...     model_parameters=model.parameters(),
    ...     config={
    ...         "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    ...         "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8},
    ...     },
    ... )
    >>> loss = engine.backward(engine(torch.ones(4, 2)).mean())
    >>> engine.step()
    >>> engine.was_step_applied(), engine.cur_scale
    (True, 256.0)
    """
    callable_or_none("on_step", on_step, "on_step=Trace(), or any function")
    given_guard(guard)
    settings = _settings(args, config)
    for name, value in others.items():
        if value is not None:
            raise UsageError(f"{name}= is not supported here. Leave it out, or write {DEEPSPEED_ITSELF}.")
    bare = _bare(model)
    device = _place(bare, args)
    join(device)
    accumulation = _accumulation(settings)
    inner = _inner(optimizer, model_parameters, bare, settings)
    skips = inner is not None and (settings.policy is not None or guard is not None)
    if not skips and (guard is not None or restore_buffers):
        raise UsageError(
            "guard= and restore_buffers= are for updates that are skipped, and here none is. Leave them out, "
            'or write an "optimizer" section and "fp16": {"enabled": true} in the configuration.'
        )
    about = (settings.precision, settings.autocast, accumulation, guard)
    begin_alike([*bare.parameters(), *bare.buffers()], about)
    if settings.precision != "float32" and not settings.autocast:
        cast_model(bare, getattr(torch, settings.precision))
    bare.zero_grad()  # older gradients may be in another precision
    scaler = GradScaler(
        device.type,
        policy=settings.policy or Static(1.0),
        enabled=skips,
        on_step=on_step,
        model=bare,
        restore_buffers=restore_buffers,
        guard=guard,
    )
    return Engine(bare, inner, scaler, settings, device, accumulation), inner, None, None


def _settings(args: object, config: str | os.PathLike[str] | Mapping[str, Any] | Settings | None) -> Settings:
    """Return the settings, from either of the two places for them."""
    given = getattr(args, "deepspeed_config", None)
    if given is not None and config is not None:
        raise UsageError(
            f"args.deepspeed_config={str(given)!r} and config= are both given. Write only one of them."
        )
    chosen = given if config is None else config
    if chosen is None:
        raise UsageError('no configuration is given. Write config={"fp16": {"enabled": True}}.')
    settings = chosen if isinstance(chosen, Settings) else load(chosen)
    if settings.zero_stage > 0:
        raise ConfigError(
            f"zero_optimization.stage: {settings.zero_stage} shards the training, which only DeepSpeed "
            f"itself does. Write {DEEPSPEED_ITSELF}; or remove zero_optimization."
        )
    for name, value in settings.ignored.items():
        if value not in HARMLESS.get(name, (value,)):
            raise ConfigError(
                f"{name}: {value!r} needs DeepSpeed itself. Write {DEEPSPEED_ITSELF}; or remove {name}."
            )
    return settings


def _bare(model: object) -> nn.Module:
    """Return the model, unless a wrapper already averages or shards its gradients."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model={model!r} is not a torch.nn.Module. Write initialize(model=model, config=...)."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            f"the model is in {type(model).__name__}, and its gradients would be averaged twice. "
            "Write model=model.module."
        )
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise UsageError(
            "the model's parameters are DTensors, of which each rank has a part. "
            "Write preamp.torch.GradScaler(), which works with them."
        )
    return model


def _place(model: nn.Module, args: object) -> torch.device:
    """Move a model on the CPU to this rank's accelerator, if there is one; return where the model is."""
    devices = {parameter.device for parameter in model.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise UsageError(
            f"the model is on several devices, {sorted(map(str, devices))}. Write model.to(device) with one."
        )
    device = devices.pop()
    if device.type != "cpu" or not torch.accelerator.is_available():  # 2.6 has no check_available=
        return device
    accelerator: Any = torch.accelerator.current_accelerator()
    given = getattr(args, "local_rank", None)
    local = int(os.environ.get("LOCAL_RANK", "0")) if given is None or given < 0 else int(given)
    device = torch.device(accelerator.type, local)
    torch.accelerator.set_device_index(local)
    model.to(device)
    return device


def _accumulation(settings: Settings) -> int:
    """Return the number of micro-steps in an update; if not given, it follows from the batch sizes."""
    train, micro = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
    steps, ranks = settings.gradient_accumulation_steps, number_of_ranks()
    if steps is None:
        steps = max(1, train // (micro * ranks)) if train and micro else 1
    if train and train != (micro or train // (steps * ranks)) * steps * ranks:
        raise ConfigError(
            f"train_batch_size: {train} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {ranks} ranks. "
            f'Write "train_batch_size": {(micro or 1) * steps * ranks}.'
        )
    return steps


def _inner(
    given: object, model_parameters: Iterable[Any] | None, model: nn.Module, settings: Settings
) -> torch.optim.Optimizer | None:
    """Return the optimizer that was given or configured, or None."""
    trainable = (parameter for parameter in model.parameters() if parameter.requires_grad)
    chosen = list(trainable if model_parameters is None else model_parameters)
    if given is None and settings.optimizer is None:
        return None
    if not isinstance(given, torch.optim.Optimizer) and not chosen:
        raise UsageError(
            "there is nothing to train: no parameter of the model needs a gradient. "
            "Write initialize(model=model, config=...) without an optimizer to evaluate it."
        )
    if given is None:
        inner: Any = optimizer_of(settings.optimizer or {}, chosen)
    else:
        inner = given(chosen) if callable(given) else given
    _check_inner(inner, model, settings)
    return inner  # type: ignore[no-any-return]


def _check_inner(inner: object, model: nn.Module, settings: Settings) -> None:
    """Refuse an optimizer with which training would not work."""
    if not isinstance(inner, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer={inner!r} neither is nor makes a torch.optim.Optimizer. "
            "Write optimizer=torch.optim.AdamW(model.parameters())."
        )
    if isinstance(inner, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss itself, and engine.step() cannot evaluate it. "
            "Write optimizer=torch.optim.AdamW(model.parameters())."
        )
    known = {id(parameter) for parameter in model.parameters()}
    if not all(id(parameter) in known for parameter in parameters_of(inner)):
        raise UsageError(
            "the optimizer has parameters that are not the model's: of a copy of it, of an engine, or of "
            "another module, and no checkpoint would have them. Write optimizer=torch.optim.AdamW("
            "model.parameters()); of several modules, make one model: nn.ModuleList([...])."
        )
    unscaled = settings.policy is None and settings.precision == "float32"
    if unscaled and any(parameter.dtype is torch.float16 for parameter in parameters_of(inner)):
        raise UsageError(
            "the model's parameters are float16, and no loss scale is configured. "
            'Write config={"fp16": {"enabled": True}}, or model.float().'
        )
