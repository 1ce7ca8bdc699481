"""A trace knows the framework and the rules of its run, from the adapter that made the steps."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

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
from preamp import Dynamic, Policy, Static, Step, Trace, TraceError
from preamp.doctor import diagnose
from preamp.guards import Guard, SpikeGuard
from preamp.scaling import STEPS, with_rules


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


def test_steps_of_pytorch_carry_the_rules_in_force() -> None:
    policy, guard = Dynamic(growth_interval=7), SpikeGuard()
    weight = torch.ones((), requires_grad=True)
    optimizer, trace = torch.optim.SGD([weight], 0.1), Trace()
    scaler = preamp.torch.GradScaler("cpu", policy=policy, guard=guard, on_step=trace)
    scaler.scale(weight * 1.0).backward()
    scaler.step(optimizer)
    of_one = scaler.last_step_of(optimizer)
    scaler.update()
    assert of_one is not None
    assert (of_one.policy, of_one.guard) == (policy, guard)
    assert (trace.policy, trace.guard) == (repr(policy), repr(guard))
    scaler.set_growth_interval(9)
    assert trace.policy == repr(policy)
    scaler.scale(weight * 1.0).backward()
    scaler.step(optimizer)
    scaler.update()
    assert trace.policy == repr(Dynamic(growth_interval=9))


def test_a_disabled_scaler_records_each_step_once_and_has_no_rules() -> None:
    weight = torch.ones((), requires_grad=True)
    optimizer, trace = torch.optim.SGD([weight], 0.1), Trace()
    scaler = preamp.torch.GradScaler("cpu", enabled=False, on_step=trace)
    scaler.update()
    for loss in (3.0, 4.0):
        scaler.scale(weight * 0.0 + loss).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler.update()
    assert [(step.index, step.scale, step.skipped, step.loss) for step in trace] == [
        (1, 1.0, False, 3.0),
        (2, 1.0, False, 4.0),
    ]
    assert (trace.framework, trace.policy, trace.guard) == ("torch", None, None)


def test_a_framework_that_is_no_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"preamp_trace": 1}\n{"framework": 3}\n')
    with pytest.raises(TraceError, match="line 2"):
        Trace.read(path)


class _Unpicklable(Dynamic):
    def __reduce__(self) -> str:
        raise TypeError("this policy cannot be pickled")


def ruled(index: int, policy: Policy[Any] | None, guard: Guard[Any] | None = None) -> Step:
    return with_rules(STEPS["keras"](index, 2.0, True, False), policy, guard)


def test_a_step_with_rules_is_a_step() -> None:
    plain, policy = Step(3, 2.0, True, False), _Unpicklable(growth_interval=7)
    own = ruled(3, policy, SpikeGuard())
    assert own == plain
    assert hash(own) == hash(plain)
    assert repr(own) == repr(plain)
    assert len(own) == len(plain)
    assert pickle.loads(pickle.dumps(own)) == copy.deepcopy(own) == plain
    changed = own._replace(loss=0.5)
    assert (changed, changed.policy, changed.guard) == (plain._replace(loss=0.5), policy, SpikeGuard())
    assert with_rules(None, policy, None) is None
    assert (plain.policy, plain.guard) == (with_rules(plain, policy, None).policy, None) == (None, None)


def test_a_trace_writes_rules_where_they_change(tmp_path: Path) -> None:
    path, twin = tmp_path / "run.jsonl", tmp_path / "twin.jsonl"
    first, second = Dynamic(growth_interval=7), Static(2.0)
    with Trace(path) as trace:
        for index, policy in enumerate([first, first, None, Dynamic(growth_interval=7), second, second]):
            trace(ruled(index, policy))
        trace(Step(6, 2.0, True, False))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [place for place, line in enumerate(lines) if "policy" in line] == [2, 7]
    assert (trace.policy, trace.guard) == (repr(second), None)
    read = Trace.read(path)
    assert (read.policy, read.about, read) == (repr(second), {}, trace)
    read.write(twin)
    assert (Trace.read(twin).policy, Trace.read([path, twin]).policy) == (repr(second), repr(second))
    with Trace(path, mode="append") as continued:
        continued(ruled(7, second))
        continued(ruled(8, first, SpikeGuard()))
    assert path.read_text().count('{"policy"') == 3
    assert (Trace.read(path).policy, Trace.read(path).guard) == (repr(first), repr(SpikeGuard()))


def test_a_trace_of_rules_that_cannot_be_pickled_can_be() -> None:
    policy = _Unpicklable(growth_interval=7)
    trace = Trace([ruled(0, policy)])
    copied = pickle.loads(pickle.dumps(trace))
    assert (copied, copied.policy) == (trace, repr(policy))


def test_the_doctor_trusts_the_adapter_and_else_the_description() -> None:
    steps = [ruled(0, Dynamic(growth_interval=7), SpikeGuard())]
    described = diagnose(Trace(steps, policy="Static(8.0)", guard="guards.OLMO")).record
    assert (described.policy, described.guard) == (Dynamic(growth_interval=7), repr(SpikeGuard()))
    unknown = diagnose(Trace([ruled(0, _Unpicklable())], policy="Static(8.0)")).record
    assert (unknown.policy, unknown.guard) == (Static(8.0), None)


@pytest.mark.parametrize("name", ["policy", "guard"])
def test_a_rule_that_is_no_text_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(f'{{"preamp_trace": 1}}\n{{"{name}": 3}}\n')
    with pytest.raises(TraceError, match="line 2"):
        Trace.read(path)
