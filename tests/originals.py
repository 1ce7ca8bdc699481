"""How the systems installed here are driven through an overflow script: `recorded/drivers.py`, live.

Each function takes the original's own arguments and a script; `recorded/record.py` says what it returns.
Nothing here uses preamp, and a framework is imported only where it is needed.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from .recorded.drivers import Arguments, Scales, walk

HERE = Path(__file__).parent


def torch(arguments: Arguments, script: str) -> Scales:
    """torch.amp.GradScaler on real gradients."""
    import torch

    scaler = torch.amp.GradScaler("cpu", **arguments)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    one, gradients = torch.ones(1), [torch.zeros(1), torch.full((1,), math.inf)]
    scaler.scale(one)  # PyTorch makes its tensors at the first use

    def update(overflow: bool) -> None:
        parameter.grad = gradients[overflow].clone()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return walk(script, lambda: scaler.scale(one).item(), update)


@cache
def keras_worker(backend: str) -> Callable[..., Any]:
    """Start a process with Keras on one backend; return the function that sends it a request.

    The test is skipped where one of them is not installed, or JAX, which the process uses too.
    """
    for name in ("keras", backend, "jax"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    process = subprocess.Popen(
        [sys.executable, str(HERE / "keras_worker.py")],
        env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(HERE.parent / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pipe_in, pipe_out = process.stdin, process.stdout
    assert pipe_in is not None
    assert pipe_out is not None
    atexit.register(process.communicate)  # closes its stdin, which ends it

    def ask(*request: Any) -> Any:
        pipe_in.write(json.dumps(request) + "\n")
        pipe_in.flush()
        return json.loads(pipe_out.readline())

    return ask


def keras(arguments: Arguments, script: str) -> Scales:
    """keras.optimizers.LossScaleOptimizer, on the backend that keeps subnormal numbers."""
    scales, raised = keras_worker("torch")("optimizer", arguments, script)
    return scales, raised


def tf_keras(arguments: Arguments, script: str) -> Scales:
    """The update of tf_keras' LossScaleOptimizer; not compiled, as XLA divides differently."""
    import tensorflow as tf
    import tf_keras

    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.0), **arguments)
    gradients = [tf.constant([0.0]), tf.constant([math.inf])]

    def update(overflow: bool) -> None:
        if optimizer.dynamic:
            optimizer._loss_scale.update([gradients[overflow]])

    return walk(script, lambda: float(optimizer.loss_scale), update)


@cache
def _flax_step() -> Callable[..., Any]:
    import jax

    return jax.jit(lambda scaler, gradient: scaler.value_and_grad(lambda x: x * gradient)(0.0)[0])


def flax(arguments: Arguments, script: str) -> Scales:
    """DynamicScale of flax through its compiled value_and_grad."""
    import jax.numpy as jnp
    from flax.training.dynamic_scale import DynamicScale

    fresh = DynamicScale(**arguments)
    scaler = fresh.replace(fin_steps=jnp.int32(0), scale=jnp.float32(fresh.scale))

    def update(overflow: bool) -> None:
        nonlocal scaler
        scaler = _flax_step()(scaler, math.inf if overflow else 0.0)

    return walk(script, lambda: float(scaler.scale), update)


def jmp(arguments: Arguments, script: str) -> Scales:
    """DynamicLossScale of jmp, not compiled: under jit it divides differently and loses its floor."""
    import jax.numpy as jnp
    import jmp

    kinds = {"loss_scale": jnp.float32, "min_loss_scale": jnp.float32}
    given = {"loss_scale": 2.0**15, **arguments}
    scaler = jmp.DynamicLossScale(**{name: kinds.get(name, lambda x: x)(x) for name, x in given.items()})
    finite = [jnp.asarray(True), jnp.asarray(False)]

    def update(overflow: bool) -> None:
        nonlocal scaler
        scaler = scaler.adjust(finite[overflow])

    return walk(script, lambda: float(scaler.loss_scale), update)


def deepspeed(arguments: Arguments, script: str) -> Scales:
    """DeepSpeed's DynamicLossScaler, without its process group and its log."""
    from deepspeed.runtime.fp16 import loss_scaler

    settings = dict(arguments)
    scaler = loss_scaler.DynamicLossScaler(delayed_shift=settings.pop("hysteresis"), **settings)
    with mock.patch.multiple(loss_scaler, dist=SimpleNamespace(get_rank=lambda: 1), logger=mock.Mock()):
        return walk(script, lambda: scaler.loss_scale, scaler.update_scale, Exception)


def deepspeed_fused(
    arguments: Arguments, script: str, module: str = "fused_optimizer", name: str = "FP16_Optimizer"
) -> Scales:
    """The method by which DeepSpeed's FP16_Optimizer moves its scale, without the optimizer."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig

    config = LossScaleConfig(torch.float16, True, 0.0, arguments)
    update_scale = getattr(import_module(f"deepspeed.runtime.fp16.{module}"), name)._update_scale
    optimizer = SimpleNamespace(loss_scale_config=config, verbose=False)
    return walk(script, lambda: config.cur_scale, lambda overflow: update_scale(optimizer, overflow))


def deepspeed_unfused(arguments: Arguments, script: str) -> Scales:
    """The same of FP16_UnfusedOptimizer."""
    return deepspeed_fused(arguments, script, "unfused_optimizer", "FP16_UnfusedOptimizer")
