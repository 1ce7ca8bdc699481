"""`deepspeed.initialize` on plain PyTorch: make an engine from a model and a configuration.

What only DeepSpeed itself can do is refused, with the line to write instead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from preamp.arrays.torch import HALF_DTYPES
from preamp.checks import callable_or_none
from preamp.deepspeed.engine.engine import Engine
from preamp.deepspeed.engine.precision import cast_model, dtype_named
from preamp.deepspeed.engine.sections import DEEPSPEED_ITSELF, optimizer_of, scheduler_of
from preamp.deepspeed.ranks import begin_alike, join, rank
from preamp.errors import ConfigError, MissingExtra, UsageError
from preamp.guards import Guard
from preamp.policy import Static
from preamp.scaling import Step, given_guard
from preamp.systems.deepspeed_config import Settings, load
from preamp.torch import GradScaler, LossScaleOptimizer
from preamp.torch.scaling.optimizers import parameters_of
from preamp.torch.scaling.ranks import number_of_ranks

PORT = 29500  # where DeepSpeed's rank 0 listens by default

OFF: tuple[Any, ...] = ({}, {"enabled": False})
# Sections and keys that are not supported, and the values with which they have no effect.
HARMLESS: dict[str, tuple[Any, ...]] = {
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
    training_data: object = None,
    lr_scheduler: object = None,
    distributed_port: int = PORT,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | Settings | None = None,
    mesh_param: object = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | Settings | None = None,
    *,
    on_step: Callable[[Step], object] | None = None,
    guard: Guard[Any] | None = None,
    restore_buffers: bool = False,
) -> tuple[Engine, LossScaleOptimizer | None, DataLoader[Any] | None, Any]:
    """Return an engine for a model, with the arguments and by the configuration of DeepSpeed 0.19.8.

    DeepSpeed is not needed. This does what its stage 0 does: each rank holds the whole model. Gradients of
    half-precision parameters are accumulated in float32 and their updates are made in float32; gradients are
    averaged over ranks when an update is due. A model on the CPU moves to this rank's accelerator if there is
    one. If no batch size is configured, a micro-step counts as one sample.

    Args:
        args: may hold `deepspeed_config`, a path, and `local_rank`.
        model: the bare model, the same on every rank. With `fp16` or `bf16` its parameters are cast; its
            buffers stay as they are, as in DeepSpeed, apart from batch norms'.
        optimizer: any optimizer of its parameters, or a function that makes one of `model_parameters`. It
            takes precedence over the configuration's.
        model_parameters: what to train: tensors or parameter groups. None: what needs a gradient.
        training_data: a dataset; the third value returned is then a loader of its micro-batches.
        lr_scheduler: a scheduler, or a function that makes one of the optimizer; it takes precedence over the
            configuration's.
        distributed_port: where rank 0 listens if the launcher does not set a port.
        mpu: refused: model parallelism is DeepSpeed's.
        dist_init_required: False: `torch.distributed` is left alone. None: it is initialized if a launcher
            started several processes.
        collate_fn: for the loader of `training_data`.
        config: a path, a dict, or `preamp.systems.deepspeed_config.Settings`.
        mesh_param: refused, as `mpu`.
        config_params: an older name of `config`.
        on_step: called with a `Step` after every update; a `Trace` is such a callable.
        guard: any guard of `preamp.guards`, to skip updates whose loss or gradient norm is a spike. It
            decides by the norm of the averaged gradients before clipping and by the loss of the update: the
            mean over its micro-steps and, in one more all-reduce, over all ranks. In bfloat16 and float32 an
            update whose gradients are not finite is then skipped, too.
        restore_buffers: after a skipped update give all buffers of the model, such as BatchNorm's statistics,
            the values that they had after the last update that was applied, or when the engine was made or
            loaded, if that was later; as for `preamp.torch.GradScaler`. Costs a copy of all buffers per
            update, on their device.

    Returns:
        The engine, its optimizer, a loader or None, its scheduler or None.

    Raises:
        ConfigError: for an invalid configuration.
        PolicyError: for an `on_step` that cannot be called, and for what is not a guard.
        UsageError: for what only DeepSpeed itself can do, for arguments that contradict each other, and for
            `restore_buffers` where no update is ever skipped.

    >>> import torch
    >>> from preamp.deepspeed import initialize
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> config = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8}}
    >>> engine, optimizer, _, _ = initialize(
    ...     model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    ... )
    >>> loss = engine.backward(engine(torch.ones(4, 2)).mean())
    >>> engine.step()
    >>> engine.was_step_applied(), engine.cur_scale
    (True, 256.0)
    """
    callable_or_none("on_step", on_step, "on_step=Trace(), or any function")
    given_guard(guard)
    settings = _settings(args, config if config is not None else config_params)
    _refuse_others(mpu=mpu, mesh_param=mesh_param)
    bare = _bare(model)
    casts = settings.precision != "float32" and not settings.autocast
    if casts or any(parameter.dtype in HALF_DTYPES for parameter in bare.parameters()):
        engine_in_half = "an engine of preamp.deepspeed with half-precision parameters"
        MissingExtra.refuse_older("torch", torch.__version__, "2.10", engine_in_half)  # for Tensor.grad_dtype
    device = _place(bare, args)
    join(device, dist_init_required, distributed_port)
    batch = _batch(settings, number_of_ranks())
    inner = _inner(optimizer, model_parameters, bare, settings)
    if inner is None and guard is not None:
        raise UsageError(
            f"guard={guard!r} skips steps of an optimizer, and none was given. Write initialize(..., "
            "optimizer="
            'torch.optim.AdamW(model.parameters())), or an "optimizer" section in the configuration.'
        )
    if restore_buffers:
        _check_restores(inner, settings, guard)
    begin_alike(
        [*bare.parameters(), *bare.buffers()], about=(settings.precision, settings.autocast, batch, guard)
    )
    if casts:
        data_types = settings.ignored.get("data_types") or {}
        wanted = data_types.get("buffer_dtype")
        cast_model(bare, getattr(torch, settings.precision), None if wanted is None else dtype_named(wanted))
    bare.zero_grad()  # older gradients may be in another precision
    wrapped = None if inner is None else _wrapped(inner, settings, bare, guard, restores=restore_buffers)
    if wrapped is not None and not wrapped.scaler.is_enabled() and on_step is None:
        wrapped.scaler._losses.stop()  # no step reads the device here, so losses must not be read either
    scheduler = None if inner is None else _scheduler(lr_scheduler, inner, settings)
    engine = Engine(bare, wrapped, scheduler, settings, batch, on_step)
    if training_data is not None:
        engine.training_dataloader = _loader(training_data, batch[1], collate_fn)
    return engine, wrapped, engine.training_dataloader, scheduler


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


def _refuse_others(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UsageError(
                f"{name}= splits the model, which only DeepSpeed itself does. Write {DEEPSPEED_ITSELF}."
            )


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
            "Write preamp.torch.LossScaleOptimizer(...), which works with them."
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


def _batch(settings: Settings, ranks: int) -> tuple[int, int, int]:
    """Return the samples in an update and in a micro-step, and the micro-steps in an update.

    Values that are not given follow from the others as in DeepSpeed; where neither size is given, a
    micro-step has one sample.
    """
    train, micro = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
    steps = settings.gradient_accumulation_steps
    if steps is None:
        steps = train // (micro * ranks) if train and micro else 1
    if micro is None:
        micro = train // (ranks * steps) if train else 1
    if train is None:
        train = micro * steps * ranks
    if train != micro * steps * ranks:
        raise ConfigError(
            f"train_batch_size: {train} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {ranks} ranks. "
            f'Write "train_batch_size": {max(1, micro) * max(1, steps) * ranks}.'
        )
    return train, micro, steps


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
    if isinstance(inner, LossScaleOptimizer):
        raise UsageError("the optimizer scales the loss already. Write optimizer=optimizer.inner_optimizer.")
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


def _check_restores(inner: object, settings: Settings, guard: Guard[Any] | None) -> None:
    """Refuse to restore buffers where no update is skipped."""
    if inner is None:
        raise UsageError(
            "restore_buffers=True restores buffers after a skipped update, and there is no optimizer. Write "
            "initialize(..., optimizer=torch.optim.AdamW(model.parameters())), or leave it out."
        )
    if settings.policy is None and guard is None:
        raise UsageError(
            f"restore_buffers=True has no effect in {settings.precision} without a guard: no update is "
            "skipped. Leave it out, or write guard=SpikeGuard() with from preamp.guards import SpikeGuard."
        )


def _wrapped(
    inner: torch.optim.Optimizer,
    settings: Settings,
    model: nn.Module,
    guard: Guard[Any] | None,
    *,
    restores: bool,
) -> LossScaleOptimizer:
    """Return the optimizer with the configured loss scale, clipping, master weights, and the guard."""
    policy = settings.policy
    if policy is None and guard is not None:
        policy = Static(1.0)  # only a scaler at work skips steps
    scaled = LossScaleOptimizer(
        inner,
        policy=policy,
        global_clipnorm=settings.max_norm,
        master_weights=True,
        model=model,
        restore_buffers=restores,
        guard=guard,
    )
    scaled.scaler._how_to_restore = "initialize(..., restore_buffers=True)"
    if policy is None:
        scaled.scaler, scaled.global_clipnorm = GradScaler("cpu", enabled=False), None
    elif settings.max_norm is None:
        scaled.global_clipnorm = math.inf  # measured, not clipped
    return scaled


def _scheduler(given: object, inner: torch.optim.Optimizer, settings: Settings) -> Any:
    if given is not None:
        return given(inner) if callable(given) else given
    return None if settings.scheduler is None else scheduler_of(settings.scheduler, inner)


def _loader(dataset: Any, size: int, collate_fn: Callable[[Any], Any] | None) -> DataLoader[Any]:
    """Return a loader of shuffled micro-batches, different on each rank."""
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, size, collate_fn=collate_fn)
    ranks = number_of_ranks()
    sampler: Any = DistributedSampler(dataset, ranks, rank()) if ranks > 1 else None
    return DataLoader(dataset, size, shuffle=sampler is None, sampler=sampler, collate_fn=collate_fn)
