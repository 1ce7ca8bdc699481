r"""Record what the dynamic loss scalers of other systems do, as plain numbers in `scalers.json`.

The tests replay this recording through `preamp.dialects`, so they need none of these systems. This
file decides which settings meet which overflow scripts, and how each original is driven; it knows
no rule of any scaler, and nothing of preamp. It is long because it holds every system's settings.
Run it only to extend or renew the recording, on Python 3.11, in an environment of its own; no
accelerator is needed:

    pip install torch==2.13.0
    pip install numpy==2.2.6 jax==0.10.2 equinox==0.13.8 optax==0.2.8 jaxtyping scipy httpx \
        protobuf Pillow opt_einsum safetensors asttokens astunparse packaging psutil dill
    pip install --no-deps megatron-core==0.16.1 fairseq==0.12.2 colossalai==0.5.0 \
        nemo_toolkit==2.7.0 paddlepaddle==3.3.1 mindspore==2.10.0 \
        mixed_precision_for_JAX==0.1.8
    pip install setuptools wheel ninja
    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed==0.16.5
    python tests/recorded/record.py

A newer numpy breaks a log line of Paddle's scaler. MindSpore complains about this numpy and goes
on without it. It takes a minute or two.

An adapter takes the original's own arguments and a script in which "1" is an overflow step. It
gives the scale before each step and one last value after the last step, and the 0-based step at
which the original raised, or None. If it raised at step k, the list ends with entry k + 1: the
scale it held after raising. The scale is the one that the original stores; mpx alone multiplies
the loss by something else, its stored scale rounded to float16.

In the JSON, `changes` holds `[step, scale]` where the scale before `step` differs from the one
before it, and infinity is the string "inf".
"""

import __future__

import ast
import contextlib
import importlib
import io
import itertools
import json
import math
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

Arguments = dict[str, Any]
Scales = tuple[list[float], int | None]

HERE = Path(__file__).parent


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


class Peer(NamedTuple):
    """One original: where it comes from, how it is driven, and the settings it is recorded with.

    `settings` are changes to `defaults`; the defaults themselves are recorded too.
    """

    distribution: str
    adapter: Callable[[Arguments, str], Scales]
    defaults: Arguments
    settings: list[Arguments]


PEERS = {
    "MEGATRON": Peer(
        "megatron-core",
        megatron,
        {
            "initial_scale": 2.0**32,
            "min_scale": 1.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 1000,
            "hysteresis": 2,
        },
        [
            {"growth_interval": 1, "hysteresis": 1},
            {"growth_interval": 2},
            {"growth_interval": 3, "hysteresis": 3, "initial_scale": 2.0**16},
            {"growth_interval": 5, "hysteresis": 4, "initial_scale": 2.0**16},
            {"growth_interval": 7, "hysteresis": 1, "growth_factor": 1.5, "backoff_factor": 0.7},
            {"growth_interval": 3, "growth_factor": 3.0, "backoff_factor": 0.3},
            {"growth_interval": 5, "initial_scale": 1000.0, "min_scale": 100.0},
            {"growth_interval": 2, "initial_scale": 2.0**120, "min_scale": 2.0**110},
        ],
    ),
    "FAIRSEQ": Peer(
        "fairseq",
        fairseq,
        {
            "init_scale": 2.0**15,
            "scale_factor": 2.0,
            "scale_window": 2000,
            "tolerance": 0.0,
            "threshold": None,
            "min_loss_scale": 1e-4,
        },
        [
            {"scale_window": 1, "threshold": 1.0},
            {"scale_window": 2, "min_loss_scale": 1.0},
            {"scale_window": 3, "tolerance": 0.25},
            {"scale_window": 5, "tolerance": 0.5, "threshold": 0.25},
            {"scale_window": 7, "tolerance": 0.05, "scale_factor": 1.5},
            {"scale_window": 3, "scale_factor": 3.0, "threshold": 100.0},
            {"scale_window": 2, "tolerance": 1.0, "init_scale": 4.0},
            {"scale_window": 5, "init_scale": 2.0**7, "min_loss_scale": 2.0**-6},
        ],
    ),
    "DEEPSPEED_016": Peer(
        "deepspeed",
        deepspeed_016,
        {
            "init_scale": 2.0**32,
            "scale_factor": 2.0,
            "scale_window": 1000,
            "min_scale": 1.0,
            "hysteresis": 1,
            "consecutive_hysteresis": False,
            "raise_error_at_min_scale": True,
        },
        [
            {"scale_window": 1, "hysteresis": 2, "init_scale": 2.0**16},
            {"scale_window": 2, "hysteresis": 2, "consecutive_hysteresis": True},
            {"scale_window": 3, "scale_factor": 3.0, "raise_error_at_min_scale": False},
            {"scale_window": 5, "hysteresis": 4, "min_scale": 0.25, "init_scale": 2.0**10},
            {"scale_window": 7, "scale_factor": 1.1, "min_scale": 100.0, "init_scale": 2.0**12},
            {"scale_window": 2, "init_scale": 1.0, "min_scale": 4.0},
            {"scale_window": 3, "hysteresis": 3, "scale_factor": 10.0, "raise_error_at_min_scale": False},
            {"scale_window": 5, "hysteresis": 3, "consecutive_hysteresis": True, "init_scale": 1000.1},
        ],
    ),
    "COLOSSALAI": Peer(
        "colossalai",
        colossalai,
        {
            "initial_scale": 2.0**16,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 1000,
            "min_scale": None,
            "max_scale": None,
            "hysteresis": 2,
        },
        [
            {"min_scale": 1.0, "max_scale": 2.0**32, "growth_interval": 1},
            {"growth_interval": 2, "hysteresis": 1},
            {"growth_interval": 3, "hysteresis": 3, "max_scale": 2.0**18},
            {"growth_interval": 5, "hysteresis": 4, "min_scale": 100.0},
            {"growth_interval": 7, "hysteresis": 1, "growth_factor": 1.5, "backoff_factor": 0.7},
            {"growth_interval": 3, "growth_factor": 3.0, "backoff_factor": 0.3},
            {"growth_interval": 2, "min_scale": 1000.0, "max_scale": 1e6, "initial_scale": 1e5},
            {"growth_interval": 1, "hysteresis": 1, "initial_scale": 2.0**120},
        ],
    ),
    "PADDLE": Peer(
        "paddlepaddle",
        paddle,
        {
            "init_loss_scaling": 2.0**16,
            "incr_ratio": 2.0,
            "decr_ratio": 0.5,
            "incr_every_n_steps": 2000,
            "decr_every_n_nan_or_inf": 1,
        },
        [
            {"incr_every_n_steps": 1},
            {"incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 2},
            {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 3},
            {"incr_every_n_steps": 5, "decr_every_n_nan_or_inf": 4},
            {"incr_every_n_steps": 7, "incr_ratio": 1.5, "decr_ratio": 0.7},
            {"incr_every_n_steps": 3, "incr_ratio": 3.0, "decr_ratio": 0.3},
            {"incr_every_n_steps": 5, "decr_every_n_nan_or_inf": 2, "init_loss_scaling": 1.0},
            {"incr_every_n_steps": 1, "init_loss_scaling": 2.0**120},
        ],
    ),
    "PADDLE_STATIC": Peer(
        "paddlepaddle",
        paddle_static,
        {
            "init_loss_scaling": 2.0**15,
            "incr_every_n_steps": 1000,
            "decr_every_n_nan_or_inf": 2,
            "incr_ratio": 2.0,
            "decr_ratio": 0.8,
        },
        [
            {"incr_every_n_steps": 1, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5},
            {"incr_every_n_steps": 2, "decr_ratio": 0.5},
            {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 3},
            {"incr_every_n_steps": 5, "decr_every_n_nan_or_inf": 4, "decr_ratio": 0.5},
            {"incr_every_n_steps": 7, "decr_every_n_nan_or_inf": 1, "incr_ratio": 1.5},
            {"incr_every_n_steps": 3, "incr_ratio": 3.0, "decr_ratio": 0.3},
            {"incr_every_n_steps": 5, "decr_every_n_nan_or_inf": 1, "init_loss_scaling": 0.5},
            {"incr_every_n_steps": 1, "decr_ratio": 0.5, "init_loss_scaling": 2.0**120},
        ],
    ),
    "MINDSPORE": Peer(
        "mindspore",
        mindspore,
        {"init_loss_scale": 2.0**24, "scale_factor": 2, "scale_window": 2000},
        [
            {"scale_window": 1},
            {"scale_window": 2, "init_loss_scale": 2.0**10},
            {"scale_window": 3, "scale_factor": 3},
            {"scale_window": 5, "scale_factor": 4},
            {"scale_window": 7, "scale_factor": 1.5},
            {"scale_window": 3, "scale_factor": 10, "init_loss_scale": 1000.0},
            {"scale_window": 2, "init_loss_scale": 1.0},
        ],
    ),
    "MINDSPORE_AMP": Peer(
        "mindspore",
        mindspore_amp,
        {"scale_value": 2.0**16, "scale_factor": 2, "scale_window": 1000},
        [
            {"scale_window": 1},
            {"scale_window": 2, "scale_value": 2.0**10},
            {"scale_window": 3, "scale_factor": 3},
            {"scale_window": 5, "scale_factor": 4},
            {"scale_window": 7, "scale_factor": 7},
            {"scale_window": 3, "scale_factor": 10, "scale_value": 1000.0},
            {"scale_window": 2, "scale_value": 1.0},
            {"scale_window": 1, "scale_factor": 5, "scale_value": 2.0**120},
        ],
    ),
    "NEMO": Peer(
        "nemo_toolkit",
        nemo,
        {
            "init_scale": 2.0**16,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "hysteresis": 1,
        },
        [
            {"growth_interval": 1},
            {"growth_interval": 2, "hysteresis": 2},
            {"growth_interval": 3, "hysteresis": 3},
            {"growth_interval": 5, "hysteresis": 4},
            {"growth_interval": 7, "growth_factor": 1.5, "backoff_factor": 0.7},
            {"growth_interval": 3, "growth_factor": 3.0, "backoff_factor": 0.3, "hysteresis": 2},
            {"growth_interval": 5, "hysteresis": 2, "init_scale": 1.0},
            {"growth_interval": 1, "hysteresis": 2, "init_scale": 2.0**120},
        ],
    ),
    "MPX": Peer(
        "mixed_precision_for_JAX",
        mpx,
        {"loss_scaling": 2.0**15, "min_loss_scaling": 1.0, "factor": 2, "period": 2000},
        [
            {"period": 1},
            {"period": 2, "loss_scaling": 2.0**16},
            {"period": 3, "factor": 3},
            {"period": 5, "factor": 4, "min_loss_scaling": 100.0},
            {"period": 7, "factor": 1.5, "min_loss_scaling": 0.5},
            {"period": 3, "factor": 10, "loss_scaling": 1000.0},
            {"period": 2, "loss_scaling": 2.0, "min_loss_scaling": 16.0},
            {"period": 5, "loss_scaling": 2.0**20, "factor": 3},
        ],
    ),
}


def randomly(density: float, length: int, seed: int) -> str:
    """Give a script whose steps overflow independently with probability `density`."""
    draw = random.Random(seed)
    return "".join("1" if draw.random() < density else "0" for _ in range(length))


SHORT_SCRIPTS = {
    "rare": randomly(0.04, 250, seed=1),
    "some": randomly(0.12, 220, seed=2),
    "many": randomly(0.35, 200, seed=3),
    "most": randomly(0.70, 200, seed=4),
    "overflow": "1" * 200,
    "clean": "0" * 200,
    "alternating": "10" * 100,
    "bursts": "".join("0" * gap + "1" * burst for gap in (3, 8, 21) for burst in range(1, 7)),
}

LONG_SCRIPTS = {
    "defaults": "1".join("0" * gap for gap in (999, 1000, 1024, 1999, 2000)),
    "endless": "1" * 1010,
}

BOUNDARIES = "".join(
    "0" * gap + burst
    for burst in ("1", "11")
    for window in (1, 2, 3, 5, 7)
    for gap in (window - 1, window, window + 1)
)

SCRIPTS = {**LONG_SCRIPTS, **SHORT_SCRIPTS, "boundaries": BOUNDARIES}


def plain(value: Any) -> Any:
    """Make `value` fit for strict JSON: infinity becomes a string."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return "inf" if value == math.inf else value


def dense(value: Any) -> str:
    """Write strict JSON without spaces."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def changes(scales: list[float]) -> list[list[Any]]:
    """Keep the first scale and each one that differs from the one before it."""
    return [
        [step, plain(scale)] for step, scale in enumerate(scales) if step == 0 or scale != scales[step - 1]
    ]


def cases(peer: Peer) -> Iterator[tuple[Arguments, str]]:
    """Pair the defaults with the long scripts, each other setting with three of the rest."""
    for name in LONG_SCRIPTS:
        yield peer.defaults, name
    names = list(SHORT_SCRIPTS)
    for turn, setting in enumerate(peer.settings):
        for name in ["boundaries", *names[turn % 4 :: 4]]:
            yield {**peer.defaults, **setting}, name


def recordings(dialect: str) -> list[dict[str, Any]]:
    """Run one peer through its cases."""
    peer = PEERS[dialect]
    system = f"{peer.distribution} {metadata.version(peer.distribution)}"
    done = []
    for arguments, name in cases(peer):
        with contextlib.redirect_stdout(io.StringIO()):
            scales, raised = peer.adapter(arguments, SCRIPTS[name])
        done.append(
            {
                "dialect": dialect,
                "system": system,
                "arguments": plain(arguments),
                "script": name,
                "changes": changes(scales),
                "raises_at": raised,
            }
        )
    return done


def main() -> None:
    """Write `scalers.json` beside this file, one recording a line.

    Each peer gets a fresh process, because their shared libraries do not load side by side.
    """
    with ProcessPoolExecutor(mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        done = itertools.chain.from_iterable(pool.map(recordings, PEERS))
        lines = ",\n".join(map(dense, done))
    text = f'{{"scripts": {dense(SCRIPTS)},\n"recordings": [\n{lines}\n]}}\n'
    (HERE / "scalers.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
