"""Access to the loss scale and the scaled gradients of DeepSpeed's optimizers, one class for each kind.

All names of DeepSpeed that are used are in `uses`, and checked before anything changes. Read from deepspeed
0.19.8 (runtime/zero, runtime/fp16).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from preamp.arrays.torch import Gradients
from preamp.arrays.torch_devices import widest
from preamp.deepspeed.attributes import GUARD, RECORD
from preamp.deepspeed.scalers import DynamicLossScaler
from preamp.errors import MissingExtra, UsageError
from preamp.torch.scaling.culprits import largest_of

TESTED = "0.19.8"
COMPRESSED = "deepspeed.runtime.fp16.onebit"

Combination: TypeAlias = Literal["MAX", "SUM"]


class DeepSpeedEngine(Protocol):
    """What `attach` uses of DeepSpeed's engine, which has no types."""

    optimizer: Any
    global_steps: int
    param_names: Mapping[Tensor, str]
    _config: Any

    def gradient_accumulation_steps(self) -> int: ...

    def fp16_enabled(self) -> bool: ...

    def bfloat16_enabled(self) -> bool: ...

    def zero_optimization_stage(self) -> int: ...


def require(owner: object, names: tuple[str, ...]) -> None:
    """Refuse a release of DeepSpeed that has renamed something."""
    for name in names:
        if not hasattr(owner, name):
            raise UsageError(
                f"{type(owner).__name__} has no {name}, which attach needs: it was tested with "
                f"deepspeed {TESTED}. Write pip install deepspeed=={TESTED}."
            )


class EngineAccess(ABC):
    """An engine and its optimizer: the attributes of the loss scaler, and the scaled gradients.

    Attributes:
        uses: the attributes of the optimizer that are read, called or replaced.
        engine_uses: those of the engine.
        norm_at: which argument of `unscale_and_clip_grads` is the norm of the scaled gradients.
        measures_first: whether statistics have to be taken before the step, which moves the gradients.
        norm_from: the method that computes the norm of the scaled gradients before `_update_scale`. None:
            the norm is known first when `unscale_and_clip_grads` is called, after it.
    """

    uses: ClassVar[tuple[str, ...]] = (
        "step",
        "_update_scale",
        "unscale_and_clip_grads",
        "override_loss_scale",
        "_global_grad_norm",
    )
    engine_uses: ClassVar[tuple[str, ...]] = ("backward", "global_steps", "param_names", "_config")
    norm_at: ClassVar[int] = 1
    measures_first: ClassVar[bool] = False
    norm_from: ClassVar[str | None] = None

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine: DeepSpeedEngine = engine
        self.optimizer: Any = engine.optimizer
        require(engine, self.engine_uses)
        require(self.optimizer, self.uses)

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by and its gradients are divided by."""
        return float(self.saved()["cur_scale"])

    @abstractmethod
    def saved(self) -> dict[str, Any]:
        """Return the attributes of the loss scaler, under the names they have in ZeRO."""

    @abstractmethod
    def save(self, attributes: Mapping[str, Any]) -> None:
        """Set the attributes of the loss scaler."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Return this rank's parameters and gradients, or its parts of them, while they are scaled."""

    @abstractmethod
    def combine(self, numbers: Tensor, how: Combination = "MAX") -> None:
        """Replace numbers by their maximum or sum over the ranks that have agreed on the overflow."""

    def hides_gradients(self) -> bool:
        """Return whether some gradients are offloaded and unreadable."""
        return False

    def require_guardable(self, needs_norm: bool) -> None:
        """Refuse a guard where it could not decide, or a skipped step would leave something behind.

        Args:
            needs_norm: whether the guard uses the norm of the gradients.
        """
        require(self.optimizer, ("overflow", *([] if self.norm_from is None else [self.norm_from])))

    def norm_of(self, result: Any) -> float:
        """Return the norm of the scaled gradients, from what DeepSpeed's methods call the norm or norms."""
        found = result if isinstance(result, list | tuple) else [result]
        device = device_of_ranks()
        norms = torch.stack([torch.as_tensor(one).to(device, widest(device)).view(()) for one in found])
        norms = torch.where(norms >= 0.0, norms, math.nan)  # DeepSpeed writes -1 for one that is not finite
        return float(torch.linalg.vector_norm(norms))

    def amax(self) -> float:
        """Return the largest magnitude among the scaled gradients of all ranks. Every rank has to call it."""
        tensors = [gradient for _, gradient in self.gradients() if gradient is not None]
        device = device_of_ranks()
        mine = max(Gradients([], tensors).amaxes(), default=0.0)
        amax = torch.tensor([mine], dtype=widest(device), device=device)
        self.combine(amax)
        return amax.item()

    def culprits(self) -> tuple[str, ...]:
        """Return the parameters whose gradients are not finite on any rank, last of the model first.

        Every rank has to call. One byte per parameter of the model is sent.
        """
        names = self.engine.param_names
        places = {id(parameter): place for place, parameter in enumerate(names)}
        flags = torch.zeros(len(places), dtype=torch.uint8, device=device_of_ranks())
        for parameter, gradient in self.gradients():
            if gradient is not None and id(parameter) in places:
                flags[places[id(parameter)]] |= DynamicLossScaler._has_inf_or_nan(gradient).to(flags)
        self.combine(flags)
        return tuple(name for name, flag in zip(names.values(), flags.tolist(), strict=True) if flag)[::-1]

    def largest(self) -> tuple[str, ...]:
        """Return the parameters that have the largest shares of the norm, over all ranks.

        Every rank has to call, and the gradients have to be finite. One number per parameter is sent.
        """
        names = self.engine.param_names
        places = {id(parameter): place for place, parameter in enumerate(names)}
        squares = torch.zeros(len(places), dtype=torch.float32, device=device_of_ranks())
        for parameter, gradient in self.gradients():
            if gradient is not None and id(parameter) in places:
                squares[places[id(parameter)]] += gradient.float().norm().square().to(squares)
        self.combine(squares, "SUM")
        return largest_of(list(names.values()), squares.tolist())


class _Zero(EngineAccess):
    """ZeRO keeps a scaler object, and saves it whole."""

    uses = (
        *EngineAccess.uses,
        "loss_scaler",
        "dynamic_loss_scale",
        "dtype",
        "dp_process_group",
        "_model_parallel_all_reduce",
        "averaged_gradients",
        "needs_scaler",
    )
    engine_uses = (*EngineAccess.engine_uses, "gradient_accumulation_steps", "scale")

    def saved(self) -> dict[str, Any]:
        return dict(vars(self.optimizer.loss_scaler))

    def save(self, attributes: Mapping[str, Any]) -> None:
        scaler = self._scaler_that_is(attributes["dynamic"])
        for name in (RECORD, GUARD):
            vars(scaler).pop(name, None)
        vars(scaler).update(attributes)
        self.optimizer.loss_scaler, self.optimizer.dynamic_loss_scale = scaler, scaler.dynamic

    def combine(self, numbers: Tensor, how: Combination = "MAX") -> None:
        operation = _all_reduce(numbers, how, self.optimizer.dp_process_group)
        self.optimizer._model_parallel_all_reduce(tensor=numbers, op=operation)

    def require_guardable(self, needs_norm: bool) -> None:
        super().require_guardable(needs_norm)
        if needs_norm and not getattr(self.optimizer, "compute_grad_norm", True):
            raise UsageError(
                'a guard needs the norm of the gradients, and "zero_optimization" has "compute_grad_norm": '
                "false. Write true."
            )
        keeps_momentum = hasattr(self.optimizer, "_commit_muon_momentum")
        if getattr(self.optimizer, "use_muon", False) and not keeps_momentum:
            raise UsageError(
                "ZeRO 3 moves Muon's momentum before the norm is known, so a step that a guard skips would "
                'leave that behind. Write "stage": 2, or attach without guard=.'
            )

    def _scaler_that_is(self, dynamic: bool) -> Any:
        """Return a scaler of DeepSpeed's own class, so that DeepSpeed can load it without preamp."""
        scaler = self.optimizer.loss_scaler
        if scaler.dynamic == dynamic:
            return scaler
        scalers = import_module("deepspeed.runtime.fp16.loss_scaler")
        if not dynamic:
            return scalers.LossScaler(1.0)
        return scalers.DynamicLossScaler(1.0, 1000, 1.0, 1, False, dtype=self.optimizer.dtype)


class _Zero12(_Zero):
    norm_from = "scaled_global_norm"
    uses = (*_Zero.uses, "params_in_partition")

    def gradients(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for group, parameters in enumerate(self.optimizer.params_in_partition):
            held = self.optimizer.averaged_gradients.get(group) or ()
            parts = (part for part in held if not getattr(part, "_zero_padding", False))
            yield from zip(parameters, parts, strict=False)  # a last part can be padding without that mark


class _Zero12Offloaded(_Zero):
    norm_from = "scaled_global_norm"
    uses = (
        *_Zero.uses,
        "params_in_partition",
        "single_partition_of_fp32_groups",
        "grad_position",
        "get_param_id",
    )

    def gradients(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        optimizer = self.optimizer
        for group, parameters in enumerate(optimizer.params_in_partition):
            flat = optimizer.single_partition_of_fp32_groups[group].grad
            for parameter in parameters:
                _, _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                yield parameter, None if flat is None else flat.view(-1).narrow(0, start, length)


class _Zero3(_Zero):
    norm_from = "_get_norm_groups"
    uses = (*_Zero.uses, "fp16_groups")

    def gradients(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for group, parameters in enumerate(self.optimizer.fp16_groups):
            yield from zip(parameters, self.optimizer.averaged_gradients.get(group) or (), strict=False)


class _Zero3Offloaded(_Zero):
    norm_from = "_get_norm_groups"
    uses = (
        *_Zero.uses,
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "grad_position",
        "get_param_id",
        "swap_optimizer",
    )

    def hides_gradients(self) -> bool:
        return bool(self.optimizer.swap_optimizer)  # on a disk

    def gradients(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        optimizer = self.optimizer
        for parameters in optimizer.fp16_groups:
            for parameter in parameters:
                group, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                flat = optimizer.fp32_partitioned_groups_flat[group].grad
                on_disk = flat is None or flat.numel() < start + length
                yield parameter, None if on_disk else flat.narrow(0, start, length)


class Stage0(EngineAccess):
    """Without ZeRO the scale is in a configuration object, and there is no hysteresis.

    Attributes:
        names: attributes that have another name than in ZeRO.
        unsaved: attributes that DeepSpeed's state dict leaves out.
        entry: the entry that we add for them.
    """

    uses = (*EngineAccess.uses, "loss_scale_config", "fp16_groups", "mpu", "state_dict", "load_state_dict")
    engine_uses = (*EngineAccess.engine_uses, "gradient_accumulation_steps")
    names: ClassVar[dict[str, str]] = {"dynamic": "dynamic_loss_scale", "min_scale": "min_loss_scale"}
    unsaved: ClassVar[tuple[str, ...]] = ("delayed_shift", "cur_hysteresis", RECORD, GUARD)
    entry: ClassVar[str] = "preamp"
    measures_first = True

    def saved(self) -> dict[str, Any]:
        return dict(vars(self.optimizer.loss_scale_config))

    def save(self, attributes: Mapping[str, Any]) -> None:
        kept = vars(self.optimizer.loss_scale_config)
        for name in (RECORD, GUARD):
            kept.pop(name, None)
        kept.update({self.names.get(name, name): value for name, value in attributes.items()})

    def gradients(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """As in the base class; the fused optimizer moves them to flat tensors in the course of its step."""
        flats = getattr(self.optimizer, "fp32_groups_flat", None)
        for number, group in enumerate(self.optimizer.fp16_groups):
            moved, start = None if flats is None else flats[number].grad, 0
            for parameter in group:
                length = parameter.numel()
                if parameter.grad is None and moved is not None:
                    yield parameter, moved.narrow(0, start, length)
                else:
                    yield parameter, parameter.grad
                start += length

    def require_guardable(self, needs_norm: bool) -> None:
        super().require_guardable(needs_norm)
        require(self.optimizer, ("optimizer",))

    def hold(self) -> Callable[[], None]:
        """Make the inner optimizer skip its steps until the function that is returned is called.

        DeepSpeed then copies the float32 weights to the model's, which are rounded from them already.
        """
        inner = self.optimizer.optimizer
        before = {"step": vars(inner)["step"]} if "step" in vars(inner) else {}
        inner.step = _no_step

        def release() -> None:
            del inner.step
            vars(inner).update(before)

        return release

    def combine(self, numbers: Tensor, how: Combination = "MAX") -> None:
        if self.optimizer.mpu is not None:  # all other ranks have the same gradients
            _all_reduce(numbers, how, self.optimizer.mpu.get_model_parallel_group())

    def state_dict(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's state dict, with one more entry, which DeepSpeed ignores."""
        kept = self.saved()
        return {**original(), self.entry: {name: kept[name] for name in self.unsaved if name in kept}}

    def load_state_dict(
        self, original: Callable[..., object], state_dict: dict[str, Any], *rest: object, **named: object
    ) -> None:
        """Load such a state dict, or one without our entry: then the hysteresis starts again."""
        original(state_dict, *rest, **named)
        kept = vars(self.optimizer.loss_scale_config)
        for name in self.unsaved:
            kept.pop(name, None)
        kept.update(state_dict.get(self.entry, {}))


def _no_step(*_: object, **__: object) -> None:
    """Take the place of the step of an optimizer."""


class _Unfused(Stage0):
    norm_at = 0


KINDS: dict[tuple[str, bool], type[EngineAccess]] = {
    ("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", False): _Zero12,
    ("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", True): _Zero12Offloaded,
    ("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", False): _Zero3,
    ("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", True): _Zero3Offloaded,
    ("deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer", False): Stage0,
    ("deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer", False): _Unfused,
}


def _all_reduce(numbers: Tensor, how: Combination, group: object) -> Any:
    """Combine numbers over a group of ranks; return DeepSpeed's name for the operation."""
    communication = import_module("deepspeed.comm")
    operation = getattr(communication.ReduceOp, how)
    communication.all_reduce(numbers, op=operation, group=group)
    return operation


def device_of_ranks() -> torch.device:
    return torch.device(import_module("deepspeed.accelerator").get_accelerator().current_device_name())


def access_to(engine: Any, *, guarded: bool = False) -> EngineAccess:
    """Return the access to an engine.

    Args:
        engine: DeepSpeed's.
        guarded: whether a guard is attached, which works in bfloat16, too.

    Raises:
        UsageError: for an engine that a policy cannot be attached to. The engine is unchanged.
        MissingExtra: without DeepSpeed.
    """
    _check_engine(engine)
    _check_precision(engine, guarded)
    optimizer = engine.optimizer
    own = type(optimizer)
    offloads = any(getattr(optimizer, name, False) for name in ("cpu_offload", "offload_optimizer"))
    kind = KINDS.get((f"{own.__module__}.{own.__qualname__}", offloads))
    if kind is None:
        raise UsageError(
            f"{own.__name__} moves its scale in a way that attach does not support: it was tested "
            f"with ZeRO 0 to 3 of deepspeed {TESTED}, offloading included. Write a configuration without "
            "ZenFlow, SuperOffload, MiCS and the like, or do not call attach."
        )
    inner = type(getattr(optimizer, "optimizer", None))
    if inner.__module__.startswith(COMPRESSED):
        raise UsageError(
            f"{inner.__name__} exchanges gradients between ranks itself, which attach was not tested with. "
            'Write "type": "Adam" or "Lamb" in the section "optimizer", or do not call attach.'
        )
    if getattr(optimizer, "custom_loss_scaler", False):
        raise UsageError(
            f"override_loss_scale({optimizer.external_loss_scale!r}) has overridden the scale. "
            f"Write attach(engine, policy=Static({optimizer.external_loss_scale!r})) in its place."
        )
    return kind(engine)


def _check_engine(engine: object) -> None:
    try:
        engines = import_module("deepspeed.runtime.engine")
        pipelines = import_module("deepspeed.runtime.pipe.engine")
    except ImportError as error:
        raise MissingExtra.of(error, "deepspeed") from error
    if not isinstance(engine, engines.DeepSpeedEngine):
        raise UsageError(
            f"{type(engine).__name__} is not DeepSpeed's engine. "
            "Write engine, *_ = deepspeed.initialize(...) and then attach(engine)."
        )
    if isinstance(engine, pipelines.PipelineEngine):
        raise UsageError(
            "a PipelineEngine scales only the loss of its last stage, without engine.backward. "
            "Write model=... without PipelineModule, or do not call attach."
        )


def _check_precision(engine: DeepSpeedEngine, guarded: bool) -> None:
    scalers = ((engine, "torch_autocast_z0_gradscaler"), (engine.optimizer, "torch_autocast_gradscaler"))
    if any(getattr(owner, name, None) is not None for owner, name in scalers):
        raise UsageError(
            'the section "torch_autocast" scales with a torch.amp.GradScaler of its own. '
            'Write "fp16": {"enabled": true} instead, or "dtype": "bfloat16", which needs no loss scale.'
        )
    if guarded and not engine.fp16_enabled():
        if engine.bfloat16_enabled() and engine.zero_optimization_stage() > 0:
            return
        raise UsageError(
            "attach cannot guard this engine: it guards float16 at every ZeRO stage, and bfloat16 at stages "
            '1 to 3. Write "bf16": {"enabled": true} and "zero_optimization": {"stage": 1}, or '
            "preamp.deepspeed.initialize(..., guard=...), which guards every precision without ZeRO."
        )
    if not engine.fp16_enabled():
        raise UsageError(
            'this engine does not train in float16, and nothing else needs a loss scale. Write "fp16": '
            '{"enabled": true} in the configuration, or do not call attach.'
        )
