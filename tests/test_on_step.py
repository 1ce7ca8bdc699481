"""One function hears the same steps from each adapter that calls one, by docs/recipes/index.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras
import torch

import preamp.deepspeed
import preamp.keras
import preamp.tensorflow
import preamp.torch
from preamp import Dynamic, PolicyError, Step, simulate
from preamp.keras import TraceCallback

POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)
FACTORS = [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0]  # what the losses are multiplied by

Log = Callable[[Step], object]
Words = tuple[Any, Any, Any]  # the rule, the scale of the next loss, and how many steps were skipped


def torch_scaler(log: Log) -> Words:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = preamp.torch.GradScaler("cpu", policy=POLICY, on_step=log)
    for factor in FACTORS:
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.policy, scaler.get_scale(), None


def deepspeed(log: Log) -> Words:
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 10, "loss_scale_window": 2}
    model = torch.nn.Linear(1, 1)
    engine, *_ = preamp.deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"fp16": fp16 | {"hysteresis": 1}},
        on_step=log,
    )
    for factor in FACTORS:
        engine.backward(engine(torch.ones(1, 1)).float().sum() * factor)
        engine.step()
    return engine.scaler.policy, engine.cur_scale, engine.skipped_steps


def fit(library: Any, optimizer: Any, callback: Any) -> None:
    model = library.Sequential([library.layers.Input((1,)), library.layers.Dense(1)])
    model.compile(optimizer, loss=lambda factor, out: factor * out)
    factors = np.array(FACTORS, "float32")[:, None]
    model.fit(np.ones_like(factors), factors, batch_size=1, shuffle=False, verbose=0, callbacks=[callback])


def keras_fit(log: Log) -> Words:
    optimizer = preamp.keras.LossScaleOptimizer(keras.optimizers.SGD(0.1), policy=POLICY)
    fit(keras, optimizer, TraceCallback(on_step=log))
    return optimizer.policy, optimizer.loss_scale, optimizer.skipped_steps


def tf_keras_fit(log: Log) -> Words:
    optimizer = preamp.tensorflow.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1), policy=POLICY)
    callbacks = tf_keras.callbacks
    fit(
        tf_keras,
        optimizer,
        callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: log(optimizer.last_step)),
    )
    return optimizer.policy, optimizer.loss_scale, optimizer.skipped_steps


TRAININGS = [torch_scaler, deepspeed, keras_fit, tf_keras_fit]


def facts(steps: Iterable[Step]) -> list[tuple[Any, ...]]:
    """Return what any record of a step says."""
    return [(one.index, one.scale, one.finite, one.skipped, one.new_scale) for one in steps]


@pytest.mark.parametrize("train", TRAININGS)
def test_one_function_hears_the_same_steps(train: Callable[[Log], Words]) -> None:
    heard: list[Step] = []
    policy, scale, skipped = train(heard.append)
    assert facts(heard) == facts(simulate(policy, [factor != 1.0 for factor in FACTORS]))
    assert (float(scale), skipped) == (heard[-1].new_scale, None if train is torch_scaler else 1)
    assert policy == POLICY or train is deepspeed  # whose rule is DeepSpeed's own


def initialize(**arguments: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    try:
        return preamp.deepspeed.initialize(model=model, config={"bf16": {"enabled": True}}, **arguments)
    finally:
        assert model.weight.dtype is torch.float32  # nothing has been cast


@pytest.mark.parametrize("make", [TraceCallback, initialize])
def test_what_cannot_be_called_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(PolicyError, match=r"on_step=3 cannot be called\. Write on_step="):
        make(on_step=3)
