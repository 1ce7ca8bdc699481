"""How the systems installed here are driven through an overflow script: `recorded/drivers.py`, live.

Each function takes the original's own arguments and a script; `recorded/record.py` says what it returns. A
class drives an original one step at a time, and can also save and load it. Nothing here uses preamp, and a
framework is imported only where it is needed.
"""

from __future__ import annotations

import atexit
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest

from .recorded.drivers import Arguments, Scales, walk

HERE = Path(__file__).parent


class Original(ABC):
    """A scaler made from its own arguments."""

    halt: ClassVar[tuple[type[Exception], ...]] = ()

    @abstractmethod
    def scale(self) -> float:
        """Return the scale of the next step."""

    @abstractmethod
    def update(self, overflow: bool) -> None:
        """Take one step."""

    @abstractmethod
    def save(self) -> Any:
        """Return what the system itself would write into a checkpoint."""

    @abstractmethod
    def load(self, saved: Any) -> None:
        """Go on from what `save` returned, or from entries of the same names."""

    def walk(self, script: str) -> Scales:
        return walk(script, self.scale, self.update, self.halt)


class Torch(Original):
    """torch.amp.GradScaler on real gradients."""

    def __init__(self, **arguments: Any) -> None:
        import torch

        self.scaler = torch.amp.GradScaler("cpu", **arguments)
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)
        self.one, self.gradients = torch.ones(1), [torch.zeros(1), torch.full((1,), math.inf)]
        self.scale()  # PyTorch makes its tensors at the first use

    def scale(self) -> float:
        return self.scaler.scale(self.one).item()

    def update(self, overflow: bool) -> None:
        self.parameter.grad = self.gradients[overflow].clone()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self) -> Any:
        return self.scaler.state_dict()

    def load(self, saved: Any) -> None:
        self.scaler.load_state_dict(saved)


def torch(arguments: Arguments, script: str) -> Scales:
    return Torch(**arguments).walk(script)


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


class Keras(Original):
    """The same on the backend of this process."""

    def __init__(self, **arguments: Any) -> None:
        import keras
        import numpy as np

        self.variable = keras.Variable(np.zeros(1, "float32"))
        self.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), **arguments)
        self.optimizer.build([self.variable])
        self.gradients = [keras.ops.convert_to_tensor([x], "float32") for x in (0.0, math.inf)]

    def scale(self) -> float:
        return float(self.optimizer.dynamic_scale)

    def update(self, overflow: bool) -> None:
        self.optimizer.apply([self.gradients[overflow]], [self.variable])

    def save(self) -> Any:
        store: dict[str, Any] = {}
        self.optimizer.save_own_variables(store)
        return store

    def load(self, saved: Any) -> None:
        self.optimizer.dynamic_scale.assign(saved["dynamic_scale"])
        self.optimizer.step_counter.assign(saved["step_counter"])


class TfKeras(Original):
    """The update of tf_keras' LossScaleOptimizer; not compiled, as XLA divides differently."""

    def __init__(self, **arguments: Any) -> None:
        import tensorflow as tf
        import tf_keras

        self.optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(0.0), **arguments
        )
        self.gradients = [tf.constant([0.0]), tf.constant([math.inf])]

    def scale(self) -> float:
        return float(self.optimizer.loss_scale)

    def update(self, overflow: bool) -> None:
        if self.optimizer.dynamic:
            self.optimizer._loss_scale.update([self.gradients[overflow]])

    def save(self) -> Any:
        import tensorflow as tf

        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(optimizer=self.optimizer).write(f"{folder}/saved")
            reader = tf.train.load_checkpoint(path)
            names = [name for name in reader.get_variable_to_shape_map() if "loss_scale/" in name]
            return {name.split("/")[-3]: reader.get_tensor(name) for name in names}

    def load(self, saved: Any) -> None:
        self.optimizer._loss_scale.current_loss_scale.assign(saved["current_loss_scale"])
        self.optimizer._loss_scale.counter.assign(saved["good_steps"])


def tf_keras(arguments: Arguments, script: str) -> Scales:
    return TfKeras(**arguments).walk(script)


@cache
def _flax_step() -> Callable[..., Any]:
    import jax

    return jax.jit(lambda scaler, gradient: scaler.value_and_grad(lambda x: x * gradient)(0.0)[0])


class Flax(Original):
    """DynamicScale of flax through its compiled value_and_grad."""

    def __init__(self, **arguments: Any) -> None:
        import jax.numpy as jnp
        from flax.training.dynamic_scale import DynamicScale

        fresh = DynamicScale(**arguments)
        self.scaler = fresh.replace(fin_steps=jnp.int32(0), scale=jnp.float32(fresh.scale))

    def scale(self) -> float:
        return float(self.scaler.scale)

    def update(self, overflow: bool) -> None:
        self.scaler = _flax_step()(self.scaler, math.inf if overflow else 0.0)

    def save(self) -> Any:
        from flax import serialization

        return serialization.msgpack_restore(serialization.to_bytes(self.scaler))

    def load(self, saved: Any) -> None:
        import jax.numpy as jnp
        from flax import serialization

        loaded = serialization.from_state_dict(self.scaler, saved)
        self.scaler = loaded.replace(fin_steps=jnp.int32(loaded.fin_steps), scale=jnp.float32(loaded.scale))


def flax(arguments: Arguments, script: str) -> Scales:
    return Flax(**arguments).walk(script)


class Jmp(Original):
    """DynamicLossScale of jmp, not compiled: under jit it divides differently and loses its floor."""

    def __init__(self, **arguments: Any) -> None:
        import jax.numpy as jnp

        self.finite = [jnp.asarray(True), jnp.asarray(False)]
        self.load({"loss_scale": 2.0**15, **arguments})

    def scale(self) -> float:
        return float(self.scaler.loss_scale)

    def update(self, overflow: bool) -> None:
        self.scaler = self.scaler.adjust(self.finite[overflow])

    def save(self) -> Any:
        return self.scaler

    def load(self, saved: Any) -> None:
        import jax.numpy as jnp
        import jmp

        kinds = {"loss_scale": jnp.float32, "min_loss_scale": jnp.float32, "counter": jnp.int32}
        self.scaler = jmp.DynamicLossScale(
            **{name: kinds.get(name, lambda x: x)(value) for name, value in saved.items()}
        )


def jmp(arguments: Arguments, script: str) -> Scales:
    return Jmp(**arguments).walk(script)


class DeepSpeed(Original):
    """DeepSpeed's DynamicLossScaler, without its process group and its log."""

    halt = (Exception,)

    def __init__(self, **arguments: Any) -> None:
        from deepspeed.runtime.fp16 import loss_scaler

        settings = dict(arguments)
        self.scaler = loss_scaler.DynamicLossScaler(delayed_shift=settings.pop("hysteresis"), **settings)
        self.alone = {"dist": SimpleNamespace(get_rank=lambda: 1), "logger": mock.Mock()}
        self.module = loss_scaler

    def scale(self) -> float:
        return self.scaler.loss_scale

    def update(self, overflow: bool) -> None:
        self.scaler.update_scale(overflow)

    def walk(self, script: str) -> Scales:
        with mock.patch.multiple(self.module, **self.alone):
            return Original.walk(self, script)

    def save(self) -> Any:
        return {"loss_scaler": copy.deepcopy(self.scaler), "dynamic_loss_scale": True, "overflow": False}

    def load(self, saved: Any) -> None:
        vars(self.scaler).update(saved)


def deepspeed(arguments: Arguments, script: str) -> Scales:
    return DeepSpeed(**arguments).walk(script)


class DeepSpeedFused(Original):
    """The methods by which DeepSpeed's FP16_Optimizer moves and saves its scale, without the optimizer."""

    module, name = "fused_optimizer", "FP16_Optimizer"

    def __init__(self, **arguments: Any) -> None:
        from importlib import import_module

        import torch
        from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig

        self.config = LossScaleConfig(torch.float16, True, 0.0, arguments)
        self.kind = getattr(import_module(f"deepspeed.runtime.fp16.{self.module}"), self.name)
        inner = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
        self.rest = {"fp32_groups_flat": [], "fp32_groups": [], "clip_grad": 0.0}
        self.optimizer = SimpleNamespace(
            loss_scale_config=self.config, verbose=False, optimizer=inner, **self.rest
        )

    def scale(self) -> float:
        return self.config.cur_scale

    def update(self, overflow: bool) -> None:
        self.kind._update_scale(self.optimizer, overflow)

    def save(self) -> Any:
        return self.kind.state_dict(self.optimizer)

    def load(self, saved: Any) -> None:
        self.kind.load_state_dict(self.optimizer, {"optimizer_state_dict": {}, **self.rest, **saved})


class DeepSpeedUnfused(DeepSpeedFused):
    """The same of FP16_UnfusedOptimizer."""

    module, name = "unfused_optimizer", "FP16_UnfusedOptimizer"


def deepspeed_fused(arguments: Arguments, script: str) -> Scales:
    return DeepSpeedFused(**arguments).walk(script)


def deepspeed_unfused(arguments: Arguments, script: str) -> Scales:
    return DeepSpeedUnfused(**arguments).walk(script)
