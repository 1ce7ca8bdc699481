"""Advice is written for the framework of the run."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tf_keras

import preamp.doctor
import preamp.jax
from preamp import Static, Trace
from preamp.doctor import Diagnosis, diagnose
from preamp.doctor.frameworks import KNOWN, PHRASES, framework_of, in_framework
from preamp.keras import LossScaleOptimizer, TraceCallback
from preamp.scaling import STEPS
from preamp.tensorflow import LossScaleOptimizer as TensorFlowOptimizer

OTHERS = KNOWN[1:]
OF_TORCH = re.compile(
    r"torch|Lens|\.isfinite\(\)|\.float\(\)|GradScaler|scaler\.|zero_grad|state_dict|\.to\(|parameters\(\)|"
    r"reset_running|cross_entropy_with|no_grad|detach"
)
OF_CASTING = re.compile(r"autocast|casting|max_norm|optax|jnp|opt_state")


def texts() -> Iterator[str]:
    """Yield all strings of the doctor's modules but docstrings, with {} for what is filled in."""
    for path in sorted(Path(preamp.doctor.__file__).parent.glob("*.py")):
        if path.stem == "frameworks":
            continue
        tree = ast.parse(path.read_text())
        apart = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        apart |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in apart:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("framework", OTHERS)
def test_no_text_of_the_doctor_has_the_code_of_another_framework(framework: str) -> None:
    seen = list(texts())
    assert sum(bool(OF_TORCH.search(text)) for text in seen) > 15
    for text in seen:
        worded = in_framework(text, framework)
        assert not OF_TORCH.search(worded), worded
        assert framework == "jax" or not OF_CASTING.search(worded), worded


@pytest.mark.parametrize("phrase", PHRASES, ids=lambda phrase: phrase.torch[:40])
def test_every_phrase_is_one_that_findings_have(phrase: Any) -> None:
    assert any(re.search(phrase.torch, text) for text in texts())


def test_advice_for_pytorch_and_for_an_unknown_framework_is_left_as_it_is() -> None:
    for text in texts():
        assert in_framework(text, "torch") == in_framework(text, None) == text


def lost_in_jax() -> Trace:
    trace = Trace()
    optimizer = preamp.jax.loss_scaled(optax.sgd(0.1))
    train = preamp.jax.step(lambda w, x: (w * x) ** 2, optimizer)
    state = optimizer.init(jnp.ones(()))
    for number in range(200):
        *_, state = train(jnp.ones(()), state, jnp.asarray(math.inf if number > 100 else 1.0))
        trace(preamp.jax.last_step(state)._replace(loss=math.inf if number > 100 else 1.0))
    return trace


def lost_in_keras() -> Trace:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD()), loss="mse")
    callback, x = TraceCallback(), np.ones((400, 2), np.float32)
    x[100:] = math.nan
    model.fit(x, np.ones((400, 1)), verbose=0, shuffle=False, batch_size=4, callbacks=[callback])
    return callback.trace


def lost_in_tensorflow() -> Trace:
    trace = Trace()
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    optimizer = TensorFlowOptimizer(tf_keras.optimizers.SGD())
    model.compile(optimizer, loss="mse")
    for number in range(60):
        bad = math.nan if number > 20 else 1.0
        loss = model.train_on_batch(np.full((4, 2), bad, np.float32), np.ones((4, 1), np.float32))
        trace(optimizer.last_step._replace(loss=float(loss)))
    return trace


@pytest.mark.parametrize(
    ("lost", "command"), [(lost_in_jax, " --framework jax"), (lost_in_keras, ""), (lost_in_tensorflow, "")]
)
def test_a_real_run_gets_the_advice_of_its_framework(lost: Any, command: str) -> None:
    found = diagnose(lost())
    assert found.findings[0].severity == "problem"
    said = " ".join([finding.sentence + finding.advice for finding in found.findings])
    assert not OF_TORCH.search(said)
    assert found.search().count("--framework jax") == bool(command)
    assert bool(found.search()) == bool(command)


def everything_skipped(made_by: Any, **about: Any) -> Diagnosis:
    steps = [STEPS[made_by](n, 2.0**-14, False, True, 2.0**-14, loss=math.inf) for n in range(200)]
    return diagnose(Trace(steps, policy=repr(Static(2.0**-14)), **about))


def test_the_framework_is_that_of_the_steps_or_as_given() -> None:
    for framework in KNOWN:
        assert framework_of(everything_skipped(framework).record) == framework
        assert framework_of(everything_skipped(None, framework=framework).record) == framework
    for given in ("theano", 3, ["jax"], None):
        assert framework_of(everything_skipped(None, framework=given).record) is None


def test_only_a_run_of_jax_is_told_to_blame_in_jax() -> None:
    assert "--dtype float16 --framework jax says" in everything_skipped("jax").search()
    assert "--dtype float16 says" in everything_skipped("torch").search()
    assert "--dtype float16 says" in everything_skipped(None).search()
    assert everything_skipped("keras").search() == everything_skipped("tensorflow").search() == ""
