"""How the originals that `record.py` records are driven through an overflow script.

One function makes and drives each original. Nothing here uses preamp.
"""

import __future__

import ast
import contextlib
import importlib
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

Arguments = dict[str, Any]
Scales = tuple[list[float], int | None]


def walk(
    script: str,
    scale: Callable[[], float],
    update: Callable[[bool], object],
    halt: type[Exception] | tuple[()] = (),
) -> Scales:
    """Drive one scaler through `script`; an exception of type `halt` ends the walk."""
    scales = []
    for step, mark in enumerate(script):
        scales.append(scale())
        try:
            update(mark == "1")
        except halt:
            return [*scales, scale()], step
    return [*scales, scale()], None


def original(distribution: str, file: str, *classes: str, **names: object) -> Any:
    """Execute only `classes` of an installed file, unmodified, and return the last one.

    Their modules import accelerator libraries at the top; `names` holds the few globals that the
    classes use, with the accelerator's replaced.
    """
    path = Path(str(metadata.distribution(distribution).locate_file(file)))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in classes]
    scope: dict[str, Any] = {"__name__": path.stem, **names}
    lazy = __future__.annotations.compiler_flag
    exec(compile(tree, path.name, "exec", flags=lazy, dont_inherit=True), scope)
    return scope[classes[-1]]


def megatron_scaler(arguments: Arguments) -> Any:
    """Megatron's DynamicGradScaler, with its tensors on the CPU."""
    import torch

    def tensor(data: list[float], dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype)

    return original(
        "megatron-core",
        "megatron/core/optimizer/grad_scaler.py",
        "MegatronGradScaler",
        "DynamicGradScaler",
        torch=SimpleNamespace(
            tensor=tensor,
            float=torch.float,
            max=torch.max,
            cuda=SimpleNamespace(current_device=lambda: "cpu"),
        ),
        ABC=ABC,
        abstractmethod=abstractmethod,
    )(**arguments)


def megatron(arguments: Arguments, script: str) -> Scales:
    scaler = megatron_scaler(arguments)
    return walk(script, lambda: scaler.scale.item(), scaler.update)


def colossalai(arguments: Arguments, script: str) -> Scales:
    """ColossalAI's DynamicGradScaler, with the CPU as its accelerator."""
    import torch

    cpu = SimpleNamespace(device_count=lambda: 0, get_current_device=lambda: "cpu")
    folder = "colossalai/amp/naive_amp/grad_scaler"
    base = original(
        "colossalai",
        f"{folder}/base_grad_scaler.py",
        "BaseGradScaler",
        torch=torch,
        ABC=ABC,
        abstractmethod=abstractmethod,
        get_accelerator=lambda: cpu,
    )
    scaler = original(
        "colossalai",
        f"{folder}/dynamic_grad_scaler.py",
        "DynamicGradScaler",
        torch=torch,
        BaseGradScaler=base,
        get_accelerator=lambda: cpu,
    )(**arguments)
    return walk(script, lambda: scaler.scale.item(), scaler.update)


def fairseq_scaler(arguments: Arguments) -> Any:
    """The DynamicLossScaler of fairseq."""
    return original("fairseq", "fairseq/optim/dynamic_loss_scaler.py", "DynamicLossScaler")(**arguments)


def fairseq_update(scaler: Any, overflow: bool) -> None:
    """Take a step; fairseq's OverflowError is a skipped one, not a halt."""
    with contextlib.suppress(OverflowError):
        scaler.check_overflow(math.inf if overflow else 1.0)
        scaler.update()


def fairseq(arguments: Arguments, script: str) -> Scales:
    scaler = fairseq_scaler(arguments)
    update = partial(fairseq_update, scaler)
    return walk(script, lambda: scaler.scale(1.0), update, FloatingPointError)


def deepspeed_016(arguments: Arguments, script: str) -> Scales:
    """DeepSpeed's DynamicLossScaler of before 0.17, without its process group and its log."""
    import torch

    settings = dict(arguments)
    scaler = original(
        "deepspeed",
        "deepspeed/runtime/fp16/loss_scaler.py",
        "LossScalerBase",
        "DynamicLossScaler",
        torch=torch,
        DeepSpeedConfigObject=object,
        dist=SimpleNamespace(get_rank=lambda: 1),
        logger=mock.Mock(),
    )(delayed_shift=settings.pop("hysteresis"), **settings)
    return walk(script, lambda: scaler.loss_scale, scaler.update_scale, Exception)


def nemo_scaler(arguments: Arguments) -> Any:
    """NeMo's GradScaler on the CPU and one rank, without apex's kernel."""
    import torch

    class CpuGradScaler(torch.amp.GradScaler):
        def __init__(self, **keywords: Any) -> None:
            super().__init__("cpu", **keywords)

    return original(
        "nemo_toolkit",
        "nemo/collections/common/parts/nlp_overrides.py",
        "GradScaler",
        torch=SimpleNamespace(
            cuda=SimpleNamespace(amp=SimpleNamespace(GradScaler=CpuGradScaler)),
            distributed=mock.MagicMock(),
            stack=torch.stack,
            _amp_update_scale_=torch._amp_update_scale_,
        ),
        parallel_state=mock.MagicMock(),
        defaultdict=defaultdict,
        _refresh_per_optimizer_state=torch.amp.grad_scaler._refresh_per_optimizer_state,
        HAVE_AMP_C=False,
    )(**arguments)


def nemo_update(scaler: Any, overflow: bool) -> None:
    """Take a step on real gradients."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), math.inf if overflow else 0.0)
    scaler.step(torch.optim.SGD([parameter], lr=0.0))
    scaler.update()


def nemo_scale(scaler: Any) -> float:
    """Return the scale that a loss is multiplied by."""
    import torch

    return scaler.scale(torch.ones(1)).item()


def nemo(arguments: Arguments, script: str) -> Scales:
    scaler = nemo_scaler(arguments)
    return walk(script, partial(nemo_scale, scaler), partial(nemo_update, scaler))


def paddle(arguments: Arguments, script: str) -> Scales:
    """Paddle's dygraph GradScaler, told that the CPU is a GPU, else it disables itself."""
    module = importlib.import_module("paddle.amp.grad_scaler")
    gpu = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    with mock.patch.object(module, "_dygraph_tracer", return_value=gpu):
        scaler = module.GradScaler(**arguments)

    def update(overflow: bool) -> None:
        scaler._cache_found_inf = overflow
        scaler.update()

    return walk(script, lambda: float(scaler._scale.item()), update)


def paddle_static(arguments: Arguments, script: str) -> Scales:
    """The operator behind Paddle's static-graph scaler, with its wrapper's argument names."""
    paddle = importlib.import_module("paddle")
    amp_nn = importlib.import_module("paddle.static.amp.amp_nn")
    settings = dict(arguments)
    scale = paddle.to_tensor([settings.pop("init_loss_scaling")], dtype="float32")
    good, bad = (paddle.to_tensor([0], dtype="int32") for _ in range(2))

    def update(overflow: bool) -> None:
        amp_nn.update_loss_scaling(
            [paddle.zeros([1])], paddle.to_tensor([overflow]), scale, good, bad, **settings
        )

    return walk(script, lambda: float(scale.item()), update)


def mindspore(arguments: Arguments, script: str) -> Scales:
    """MindSpore's DynamicLossScaleManager."""
    manager = importlib.import_module("mindspore.amp").DynamicLossScaleManager(**arguments)
    return walk(script, lambda: float(manager.get_loss_scale()), manager.update_loss_scale, RuntimeError)


def mindspore_amp(arguments: Arguments, script: str) -> Scales:
    """MindSpore's functional DynamicLossScaler, on the CPU, not compiled."""
    tensor = importlib.import_module("mindspore").Tensor
    scaler = importlib.import_module("mindspore.amp").DynamicLossScaler(**arguments)
    return walk(
        script,
        lambda: float(scaler.scale_value.asnumpy()),
        lambda overflow: scaler.adjust(tensor(not overflow)),
    )


def mpx(arguments: Arguments, script: str) -> Scales:
    """The DynamicLossScaling of mpx, outside jit; its scales are float32 arrays."""
    import jax.numpy as jnp

    arrays = {name: jnp.float32(arguments[name]) for name in ("loss_scaling", "min_loss_scaling")}
    scaling = importlib.import_module("mpx").DynamicLossScaling(**{**arguments, **arrays})

    def update(overflow: bool) -> None:
        nonlocal scaling
        scaling = scaling.adjust(jnp.asarray(not overflow))

    return walk(script, lambda: scaling.loss_scaling.item(), update)
