"""A trace knows the framework of its run, from the adapter that made the steps."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tf_keras
import torch

import preamp.jax
import preamp.keras
import preamp.tensorflow
import preamp.torch
from preamp import Step, Trace, TraceError
from preamp.scaling import STEPS


class _Adapters:
    """One step of each adapter, as it records it."""

    @staticmethod
    def of_torch(trace: Trace) -> None:
        weight = torch.ones((), requires_grad=True)
        scaler, optimizer = preamp.torch.GradScaler("cpu", on_step=trace), torch.optim.SGD([weight], 0.1)
        scaler.scale(weight * 1.0).backward()
        scaler.step(optimizer)
        scaler.update()

    @staticmethod
    def of_jax(trace: Trace) -> None:
        optimizer = preamp.jax.loss_scaled(optax.sgd(0.1))
        train = preamp.jax.step(lambda w: w * w, optimizer)
        trace(preamp.jax.last_step(train(jnp.ones(()), optimizer.init(jnp.ones(())))[2])._replace(loss=1.0))

    @staticmethod
    def of_keras(trace: Trace) -> None:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(preamp.keras.LossScaleOptimizer(keras.optimizers.SGD()), loss="mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[preamp.keras.TraceCallback(trace)])

    @staticmethod
    def of_tensorflow(trace: Trace) -> None:
        model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
        model.compile(preamp.tensorflow.LossScaleOptimizer(tf_keras.optimizers.SGD()), loss="mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        trace(model.optimizer.last_step)


@pytest.mark.parametrize("framework", ["torch", "jax", "keras", "tensorflow"])
def test_a_trace_knows_the_framework_of_its_steps(framework: str, tmp_path: Path) -> None:
    path, twin = tmp_path / "run.jsonl", tmp_path / "twin.jsonl"
    steps: list[Step] = []
    with Trace(path) as trace:
        getattr(_Adapters, f"of_{framework}")(trace)
        steps += trace
    assert trace.framework == framework
    assert trace.about == {}
    assert "framework" not in repr(trace)
    read = Trace.read(path)
    assert (read.framework, read.about, list(read)) == (framework, {}, steps)
    read.write(twin)
    assert Trace.read(twin).framework == framework
    assert Trace.read(twin) == read == Trace(steps)
    with Trace(path, mode="append") as continued:
        continued(STEPS[framework](*steps[-1])._replace(index=steps[-1].index + 1))
    assert [*path.read_text().splitlines()].count(json.dumps({"framework": framework})) == 1
    assert Trace.read([path, twin]).framework == framework


def test_a_step_of_an_adapter_is_a_step() -> None:
    plain = Step(3, 2.0, True, False, loss=0.5)
    for framework in ("torch", "jax", "keras", "tensorflow"):
        own = STEPS[framework](*plain)
        assert own == plain
        assert hash(own) == hash(plain)
        assert repr(own) == repr(plain)
        for copied in (pickle.loads(pickle.dumps(own)), copy.deepcopy(own), own._replace(loss=0.5)):
            assert (copied, copied.framework) == (plain, framework)
    assert plain.framework is None
    assert Trace([plain]).framework is None


def test_a_framework_that_is_no_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"preamp_trace": 1}\n{"framework": 3}\n')
    with pytest.raises(TraceError, match="line 2"):
        Trace.read(path)
