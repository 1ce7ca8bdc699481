"""Guards: steps that are skipped because of a spike, on every backend, in loops and in `fit`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from preamp import PolicyError, Static, guards
from preamp.guards import SpikeGuard
from preamp.keras import LossScaleOptimizer, TraceCallback
from tests.guarding import POLICY, QUICK, RULES, LossLimit, batches, check_simulated, script
from tests.keras.driving import BACKEND, INF, WAYS, Run, array, each_backend, same, tensor, with_jax


class Guarded(Run):
    """A run whose steps have a loss and one gradient, in one program where it is compiled."""

    def __init__(self, optimizer: Any, way: str = "eager") -> None:
        super().__init__(optimizer, [1.0, -2.0], way="eager")
        self._take = {"eager": self._eager_step, "compiled": getattr(self, f"_{BACKEND}_step")}[way]

    def take(self, loss: float, gradient: float) -> None:
        """Take a step with this loss, and this gradient of both entries."""
        self._take(tensor(loss), tensor([gradient, gradient]))

    def _eager_step(self, loss: Any, gradient: Any) -> None:
        self.optimizer.scale_loss(loss)
        self.optimizer.apply([gradient * self.optimizer.dynamic_scale.value], self.variables)

    _torch_step = _eager_step

    def _tensorflow_step(self, loss: Any, gradient: Any) -> None:
        import tensorflow as tf

        if not hasattr(self, "function"):
            self.function = tf.function(self._eager_step)
        self.function(loss, gradient)

    def _jax_step(self, loss: Any, gradient: Any) -> None:
        import jax

        def program(state: Any, weights: Any, loss: Any, gradient: Any) -> Any:
            def scaled(weights: Any) -> Any:
                apart = weights[0] - jax.lax.stop_gradient(weights[0])
                return self.optimizer.stateless_scale_loss(state, loss + apart.sum())  # derivatives of 1

            (scaled_ones,) = jax.grad(scaled)(weights)
            return self.optimizer.stateless_apply(state, [scaled_ones * gradient], weights)

        if not hasattr(self, "function"):
            self.function = jax.jit(program)
        state = [v.value for v in self.optimizer.variables]
        weights, state = self.function(state, [v.value for v in self.variables], loss, gradient)
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value)
        for variable, value in zip(self.optimizer.variables, state, strict=True):
            variable.assign(value)


def wrapped(guard: Any, **settings: Any) -> LossScaleOptimizer:
    return LossScaleOptimizer(keras.optimizers.Adam(0.01), guard=guard, policy=POLICY, **settings)


WAY = WAYS[BACKEND != "torch"]
IN_FIT = BACKEND == "jax"  # the usual `jit_compile`


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=each_backend if rule == "olmo" else ()) for rule in RULES]
)
def test_decisions_are_those_of_a_simulation(rule: str) -> None:
    run = Guarded(wrapped(RULES[rule]), WAY)
    steps, played = [], script(len(rule))
    for loss, gradient in played:
        before = run.trained()
        run.take(loss, gradient)
        step = run.optimizer.last_step
        steps.append(step)
        assert same(run.trained(), before) == step.skipped
    check_simulated(steps, RULES[rule], played, entries=2)
    assert run.optimizer.skipped_steps == sum(s.skipped for s in steps)
    if BACKEND == "tensorflow":
        assert run.function.experimental_get_tracing_count() == 1
    if BACKEND == "jax":
        assert run.function._cache_size() == 1


def model_of(guard: Any, *, norm: bool = False, **settings: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.BatchNormalization()] if norm else []
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), guard=guard)
    model.compile(optimizer, loss="mse", **settings)
    return model


def fit(model: keras.Model, *callbacks: keras.callbacks.Callback, steps: int = 20) -> None:
    x, y = map(np.concatenate, zip(*batches(12, steps), strict=True))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks))


SKIPS_ON = r"has skipped 100 steps in a row, and nothing was trained"


def test_a_guard_that_skips_on_and_on_warns_once() -> None:
    run = Guarded(wrapped(guards.NormLimit(1.0)))
    for number in range(60):
        run.take(1.0, 1.0 if number != 20 else INF)  # an overflow is no spike, and ends no row of them
    run.take(1.0, 0.5)
    for _ in range(99):
        run.take(1.0, 1.0)
    with pytest.warns(UserWarning, match=SKIPS_ON) as caught:
        run.take(1.0, 1.0)
    assert [one.filename for one in caught if "in a row" in str(one.message)] == [__file__]
    for _ in range(120):
        run.take(1.0, 1.0)


@with_jax
def test_fit_warns_of_a_guard_that_skips_on_and_on() -> None:
    model, callback = model_of(guards.NormLimit(1e-6)), TraceCallback()
    fit(model, callback, steps=99)
    with pytest.warns(UserWarning, match=SKIPS_ON) as caught:
        fit(model, callback, steps=1)
    assert [one.filename for one in caught if "in a row" in str(one.message)] == [__file__]
    fit(model, callback, steps=120)


@with_jax
@pytest.mark.skipif(BACKEND == "torch", reason="has no steps_per_execution")
def test_steps_that_were_taken_between_the_recorded_ones_count() -> None:
    model = model_of(LossLimit(100.0), steps_per_execution=2)
    pairs = [pair for spike in [False, True] * 105 for pair in batches(0 if spike else 9, 1)]
    x, y = map(np.concatenate, zip(*pairs, strict=True))
    callback = TraceCallback()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    assert model.optimizer.skipped_steps == 105
    assert all(step.skipped for step in callback.trace if step.index % 2)


@pytest.mark.parametrize("watch", [pytest.param("both", marks=with_jax), "loss", "grad_norm"])
def test_fit_skips_the_spike(watch: str) -> None:
    model = model_of(SpikeGuard(warmup=8, watch=watch), jit_compile=IN_FIT)
    callback = TraceCallback()
    fit(model, callback)
    reasons = {step.index: step.reason for step in callback.trace if step.skipped}
    assert reasons == {12: "spike"}
    step = callback.trace[12]
    assert step.spike.of == ("grad_norm" if watch == "grad_norm" else "loss")
    assert step.spike.value > 100.0 > step.spike.limit
    if step.spike.of == "loss":
        assert step.spike.value == pytest.approx(step.loss, rel=1e-3)
    assert int(model.optimizer.iterations) == 19
    assert model.optimizer.skipped_steps == 1


@pytest.mark.parametrize("restores", [True, False])
def test_moving_statistics_after_a_spike(restores: bool) -> None:
    model = model_of(SpikeGuard(warmup=8), norm=True)
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hasattr(model, "jax_state_sync"):
                model.jax_state_sync()
            seen.append([array(v) for v in model.layers[0].non_trainable_variables])

    callback = TraceCallback(restore_buffers=restores)
    fit(model, callback, Watch())
    assert callback.trace[12].reason == "spike"
    assert callback.trace[12].buffers == ()
    assert same(seen[12], seen[11]) == restores
    assert not same(seen[13], seen[12])


@pytest.mark.parametrize("rule", ["spike", "dialect", "norm"])
def test_saved_files_continue(rule: str, tmp_path: Path) -> None:
    guard = {**RULES, "dialect": guards.LEVANTER}[rule]
    model = model_of(guard)
    fit(model, TraceCallback(), steps=10)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert repr(again.optimizer.guard) == repr(guard)
    assert same([array(v) for v in again.optimizer.variables], [array(v) for v in model.optimizer.variables])
    assert again.optimizer.last_step._replace(loss=None) == model.optimizer.last_step._replace(loss=None)
    json.dumps(model.optimizer.get_config())


def states(model: keras.Model) -> dict[str, np.ndarray]:
    return {name: array(v) for name, v in model.optimizer._scaler.guard_leaves.items()}


def test_files_with_and_without_a_guard(tmp_path: Path) -> None:
    with_guard, without = model_of(QUICK), model_of(None)
    fit(with_guard, TraceCallback(), steps=10)
    fit(without, TraceCallback(), steps=10)
    with_guard.save_weights(tmp_path / "with.weights.h5")
    without.save_weights(tmp_path / "without.weights.h5")
    start = states(model_of(QUICK))
    assert not same(list(states(with_guard).values()), list(start.values()))
    with_guard.load_weights(tmp_path / "without.weights.h5")
    assert same(list(states(with_guard).values()), list(start.values()))
    with pytest.warns(UserWarning, match=r"holds the state of a guard, and this optimizer has none") as told:
        without.load_weights(tmp_path / "with.weights.h5")
    assert [one.filename for one in told if "guard" in str(one.message)] == [__file__]
    assert without.optimizer.last_step.index == 9
    other = model_of(guards.OLMO(rolling_interval_length=30))
    other.optimizer.build(other.trainable_variables)
    with pytest.warns(UserWarning, match="starts again: the saved state belongs to another guard"):
        other.load_weights(tmp_path / "with.weights.h5")


@keras.saving.register_keras_serializable("test_guards")
@dataclass(frozen=True, repr=False)
class Mine(guards.NormLimit):
    """A guard of a user's own."""


@dataclass(frozen=True, repr=False)
class Unknown(guards.NormLimit):
    """One that is not registered."""


def test_configurations() -> None:
    for guard in (
        Mine(3.0),
        QUICK,
        guards.OLMO,
        guards.MEGATRON_NORM(4.0),
        SpikeGuard(watch="loss"),
    ):
        config = LossScaleOptimizer(keras.optimizers.SGD(0.1), guard=guard).get_config()
        again = LossScaleOptimizer.from_config(json.loads(json.dumps(config)))
        assert repr(again.guard) == repr(guard)
        assert type(again.guard) is type(guard)
    assert "guard" not in LossScaleOptimizer(keras.optimizers.SGD(0.1)).get_config()
    with pytest.raises(PolicyError, match="could not be found again"):
        LossScaleOptimizer(keras.optimizers.SGD(0.1), guard=Unknown()).get_config()
    config["guard"] = {"class": "Nobody", "settings": {}}
    with pytest.raises(PolicyError, match="'Nobody' of a saved optimizer is not known"):
        LossScaleOptimizer.from_config(config)
    config["guard"] = {"class": "SpikeGuard", "settings": {"nothing": 1}}
    with pytest.raises(PolicyError, match="Make a new guard"):
        LossScaleOptimizer.from_config(config)
    config["guard"] = "SpikeGuard"
    with pytest.raises(PolicyError, match="not a saved guard"):
        LossScaleOptimizer.from_config(config)


def test_what_is_refused() -> None:
    with pytest.raises(PolicyError, match="is not a guard"):
        LossScaleOptimizer(keras.optimizers.SGD(0.1), guard=0.5)
    with pytest.raises(PolicyError, match="watch='norm' is unknown"):
        SpikeGuard(watch="norm")
    run = Run(wrapped(QUICK), [1.0])
    before = run.everything()
    with pytest.raises(PolicyError, match=r'no loss was scaled since.*watch="grad_norm"'), pytest.warns():
        run.apply([1.0])
    run.optimizer.scale_loss(tensor([1.0, 2.0]))
    mean = r"optimizer.scale_loss\(keras.ops.mean\(loss\)\)"
    with pytest.raises(
        PolicyError, match=rf"has shape \(2,\) and type \w+, and is not a .*scalar\. Write {mean}"
    ):
        run.apply([1.0])
    assert same(run.everything(), before)
    run.optimizer.scale_loss(np.float32(1.0))
    run.apply([1.0])
    with pytest.raises(PolicyError, match="no loss was scaled"):  # that one was of the step before
        run.apply([1.0])


@each_backend
@pytest.mark.skipif(BACKEND == "torch", reason="nothing is compiled by itself")
def test_a_loss_of_another_program_is_refused() -> None:
    run = Run(wrapped(QUICK), [1.0], way="compiled")
    run.optimizer.scale_loss(tensor(1.0))  # would be a constant of the program
    # AutoGraph raises an error of its own with the message of ours.
    with pytest.raises(Exception, match="another program"):
        run.apply([1.0])


def test_a_fixed_scale() -> None:
    run = Guarded(
        LossScaleOptimizer(keras.optimizers.SGD(0.1), policy=Static(1.0), guard=guards.NormLimit(2.0))
    )
    run.take(1.0, 2.0)
    assert run.optimizer.last_step.reason == "spike"
    assert run.scale == 1.0
    assert run.optimizer.last_step.spike == ("grad_norm", pytest.approx(2.0 * np.sqrt(2.0)), 2.0)
