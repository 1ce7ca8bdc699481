"""`TraceCallback`: the trace is what happened."""

from __future__ import annotations

import gc
import math
import resource
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import pytest

from preamp import Dynamic, Reading, ScaleExhausted, Step, Trace, TraceError, UsageError
from preamp.guards import SpikeGuard
from preamp.keras import LossScaleOptimizer, TraceCallback
from tests.seeing import Remembering

from .driving import BACKEND, dtype_policy, each_backend, with_jax
from .test_training import BATCH, OVERFLOWING, ROWS, adam, data, fit, model_of, usual

STEPS = ROWS // BATCH
POLICY = Dynamic(init_scale=64.0, growth_interval=2)


def expected(policy: Any, epochs: int) -> list[Step]:
    """Return the steps that a policy takes in epochs of which one step overflows."""
    state, steps = policy.start(), []
    for index in range(epochs * STEPS):
        finite = index % STEPS != OVERFLOWING
        after = policy.step(state, Reading(finite))
        steps.append(Step(index, state.scale, finite, not finite, after.scale))
        state = after
    return steps


def without_measures(trace: Trace) -> list[Step]:
    """Return steps without losses and norms, which are there for every step that was taken."""
    assert all((step.grad_norm is None) == step.skipped for step in trace)
    return [step._replace(loss=None, grad_norm=None) for step in trace]


@each_backend
@usual
def test_the_trace_is_what_happened(jit_compile: bool) -> None:
    model = model_of(LossScaleOptimizer(adam(), policy=POLICY), jit_compile=jit_compile)
    callback = TraceCallback()
    history = fit(model, 2, callbacks=[callback])
    assert without_measures(callback.trace) == expected(POLICY, 2)
    summary = callback.trace.summary()
    assert history["skipped_steps"] == [1, 2]
    assert history["loss_scale"] == [step.new_scale for step in expected(POLICY, 2)][STEPS - 1 :: STEPS]
    assert summary.final_scale == model.optimizer.loss_scale
    assert model.optimizer.last_step._replace(loss=None, grad_norm=None) == expected(POLICY, 2)[-1]


def test_batch_logs_have_the_scale_and_the_skipped_steps() -> None:
    seen: list[tuple[float, int]] = []

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((logs["loss_scale"], logs["skipped_steps"]))

    fit(model_of(LossScaleOptimizer(adam(), policy=POLICY)), 1, callbacks=[TraceCallback(), Logs()])
    steps = expected(POLICY, 1)
    assert seen == [(step.new_scale, sum(s.skipped for s in steps[: step.index + 1])) for step in steps]


def test_a_file_is_written_line_by_line(tmp_path: Path) -> None:
    path, lengths = tmp_path / "run.jsonl", []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            lengths.append(len(Trace.read(path)))

    callback = TraceCallback(path, model="small")
    fit(model_of(LossScaleOptimizer(adam())), 1, callbacks=[callback, Look()])
    assert lengths == list(range(1, STEPS + 1))
    assert Trace.read(path) == callback.trace
    assert Trace.read(path).about == {"model": "small"}


def test_a_file_that_is_there_is_refused_appended_to_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = model_of(LossScaleOptimizer(adam()))
    fit(model, 1, callbacks=[TraceCallback(path)])
    with pytest.raises(TraceError):
        TraceCallback(path)
    assert len(Trace.read(path)) == STEPS
    fit(model, 1, callbacks=[TraceCallback(path, mode="append")])
    assert [step.index for step in Trace.read(path)] == list(range(2 * STEPS))
    fit(model, 1, callbacks=[TraceCallback(path, mode="replace")])
    assert [step.index for step in Trace.read(path)] == list(range(2 * STEPS, 3 * STEPS))


def test_a_trace_has_the_rules_of_the_optimizer(tmp_path: Path) -> None:
    path, guard = tmp_path / "run.jsonl", SpikeGuard(patience=5)
    optimizer = LossScaleOptimizer(adam(), policy=POLICY, guard=guard)
    model, callback = model_of(optimizer), TraceCallback(path)
    fit(model, 1, callbacks=[callback])
    with Trace(tmp_path / "loop.jsonl") as looped:
        looped(optimizer.last_step._replace(loss=0.5))
    for trace in (callback.trace, Trace.read(path), looped, Trace.read(tmp_path / "loop.jsonl")):
        assert (trace.policy, trace.guard, trace.about) == (repr(POLICY), repr(guard), {})
    optimizer.dynamic_growth_steps = 7
    model.make_train_function(force=True)
    fit(model, 1, callbacks=[callback])
    assert Trace.read(path).policy == repr(replace(POLICY, growth_interval=7))
    lines = path.read_text().splitlines()
    assert [sum(f'{{"{name}"' in line for line in lines) for name in ("policy", "guard")] == [2, 1]


def test_a_file_that_is_given_open_stays_open(tmp_path: Path) -> None:
    model = model_of(LossScaleOptimizer(adam()))
    with Trace(path=tmp_path / "run.jsonl") as trace:
        for _ in range(2):
            fit(model, 1, callbacks=[TraceCallback(trace)])
    assert [step.index for step in Trace.read(tmp_path / "run.jsonl")] == list(range(2 * STEPS))


def test_tensorboard_shows_the_scale(tmp_path: Path) -> None:
    for needed in ("tensorflow", "tensorboard"):
        pytest.importorskip(needed, reason=f"Keras's TensorBoard callback needs {needed}")
    model = model_of(LossScaleOptimizer(adam(), policy=POLICY))
    board = keras.callbacks.TensorBoard(str(tmp_path), update_freq="epoch")
    fit(model, 1, callbacks=[TraceCallback(), board])
    files = [path for path in tmp_path.rglob("*tfevents*") if path.is_file()]
    written = b"".join(path.read_bytes() for path in files)
    assert b"loss_scale" in written
    assert b"skipped_steps" in written


GIVES_UP = Dynamic(init_scale=4.0, min_scale=2.0, at_floor="raise", growth_interval=100)


@with_jax
@usual
def test_a_policy_that_gives_up_ends_fit(jit_compile: bool, tmp_path: Path) -> None:
    model = model_of(LossScaleOptimizer(adam(), policy=GIVES_UP), jit_compile=jit_compile)
    callback = TraceCallback(tmp_path / "run.jsonl")
    with pytest.raises(ScaleExhausted) as exhausted:
        fit(model, 3, callbacks=[callback])
    assert exhausted.value.scale == 2.0
    assert model.optimizer.loss_scale == 2.0
    written = Trace.read(tmp_path / "run.jsonl")
    eager = BACKEND != "tensorflow" and not jit_compile  # the step itself raises; Keras tells no callback
    assert len(written) == STEPS + OVERFLOWING + (not eager)
    assert written.stopped == (None if eager else str(exhausted.value))


def test_a_fit_that_is_interrupted_leaves_a_file_that_is_closed(tmp_path: Path) -> None:
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise KeyboardInterrupt

    model, callback = model_of(LossScaleOptimizer(adam())), TraceCallback(tmp_path / "run.jsonl")
    with pytest.raises(KeyboardInterrupt):
        fit(model, 1, callbacks=[callback, Interrupt()])
    assert len(Trace.read(tmp_path / "run.jsonl")) == 3
    fit(model, 1, callbacks=[callback])
    assert [step.index for step in Trace.read(tmp_path / "run.jsonl")] == list(range(3 + STEPS))
    del model, callback
    gc.collect()  # a file that nobody closed would warn here, and warnings are errors


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(UsageError, match=r"preamp\.keras\.LossScaleOptimizer"):
        fit(model_of(adam()), 1, callbacks=[TraceCallback()])


@with_jax
def test_peaks_are_recorded_where_the_policy_sees_them() -> None:
    optimizer, recorder = LossScaleOptimizer(adam(), policy=Remembering()), TraceCallback()
    fit(model_of(optimizer, jit_compile=BACKEND == "jax"), 1, callbacks=[recorder])
    amaxes = [step.amax for step in recorder.trace]
    assert [number for number, amax in enumerate(amaxes) if amax is None] == [OVERFLOWING]
    assert optimizer.last_step.amax == amaxes[-1] > 0.0


def test_a_second_fit_goes_on_with_the_settings_of_the_file(tmp_path: Path) -> None:
    """The file is closed after a fit and opened again in the next."""
    model = model_of(LossScaleOptimizer(adam()))
    callback = TraceCallback(tmp_path / "run.jsonl", on_error="warn")
    fit(model, 1, callbacks=[callback])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "run.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.warns(UserWarning, match="cannot be written|lacks the last"):
            fit(model, 1, callbacks=[callback])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(callback.trace) == 2 * STEPS
    with pytest.raises(UsageError, match=r"on_error, only_rank: this applies to a file"):
        TraceCallback(Trace(), on_error="warn", only_rank=0)


@with_jax
@pytest.mark.parametrize("steps", [1] if BACKEND == "torch" else [3])  # Keras allows 1 on torch
def test_a_skipped_step_that_no_callback_follows_is_told_of_once(steps: int) -> None:
    callback = TraceCallback()
    model = model_of(LossScaleOptimizer(adam(), policy=POLICY), steps_per_execution=steps)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = fit(model, 2, callbacks=[callback])
    recorded = range(steps - 1, 2 * STEPS, steps)
    missing = OVERFLOWING not in recorded
    assert [step.index for step in callback.trace] == list(recorded)
    assert sum(step.skipped for step in callback.trace) == (0 if missing else 2)
    messages = [str(each.message) for each in told if "are not in the trace" in str(each.message)]
    assert [message.startswith(f"1 of {steps - 1} steps") for message in messages] == [True] * missing
    assert history["skipped_steps"] == [1, 2]


@with_jax
@pytest.mark.parametrize("settings", [{}, {"run_eagerly": True}], ids=str)
def test_nothing_is_missing_between_fits(settings: dict[str, Any]) -> None:
    """And steps that are taken without callbacks, between two fits, are none of the next."""
    callback, x_y = TraceCallback(), data(True)
    model = model_of(LossScaleOptimizer(adam(), policy=POLICY), **settings)
    fit(model, 1, callbacks=[callback])
    for _ in range(2):
        model.train_on_batch(x_y[0][:BATCH] * math.inf, x_y[1][:BATCH])
    fit(model, 3, initial_epoch=1, validation_data=data(False), callbacks=[callback])
    assert [step.index for step in callback.trace] == [*range(STEPS), *range(STEPS + 2, 3 * STEPS + 2)]
    assert sum(step.skipped for step in callback.trace) == model.optimizer.skipped_steps - 2 == 3


@pytest.mark.parametrize("optimizer", ["adam", keras.optimizers.Adam(0.1)], ids=["name", "optimizer"])
def test_keras_own_wrapper_is_told_from_this_one(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile` does not look up the name that others replace."""
    monkeypatch.setattr(keras.optimizers, "LossScaleOptimizer", LossScaleOptimizer)
    with dtype_policy("mixed_float16"):
        model = model_of(optimizer)
    with pytest.raises(UsageError, match=r"compile wraps .* Write compile\(optimizer=preamp\.keras"):
        fit(model, 1, callbacks=[TraceCallback()])
