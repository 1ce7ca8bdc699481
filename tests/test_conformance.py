"""One overflow script through every adapter: one trace, and skipped steps that leave no mark.

Each framework runs in a process of its own (`conformance_worker.py`); the core plays the same script here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from preamp import Reading, Starved

from .conformance_worker import PEERS as ADAPTERS
from .conformance_worker import POLICIES, SCRIPT, factors, policies

# Framework, backend of Keras, adapter.
PEERS = [
    ("torch", "torch", "GradScaler"),
    ("torch", "torch", "GradScaler, fused"),
    ("torch", "torch", "LossScaleOptimizer"),
    ("torch", "torch", "DeepSpeed's scaler"),
    ("torch", "torch", "DeepSpeed's engine"),
    ("jax", "jax", "step, compiled"),
    ("jax", "jax", "apply_gradients, compiled"),
    ("jax", "jax", "update, eager"),
    ("jax", "jax", "step, in one scan"),
    ("jax", "jax", "LossScale, compiled"),
    ("keras", "jax", "eager"),
    ("keras", "jax", "compiled"),
    ("keras", "torch", "eager"),
    ("keras", "tensorflow", "eager"),
    ("keras", "tensorflow", "compiled"),
    ("tensorflow", "tensorflow", "legacy, eager"),
    ("tensorflow", "tensorflow", "legacy, compiled"),
    ("tensorflow", "tensorflow", "tf_keras, eager"),
    ("tensorflow", "tensorflow", "tf_keras, compiled"),
    ("tensorflow", "tensorflow", "keras, eager"),
    ("tensorflow", "tensorflow", "keras, compiled"),
]
# What these do is done in a graph as well, which is quicker.
ALSO = [
    ("keras", "jax", "eager"),
    ("keras", "tensorflow", "eager"),
    ("tensorflow", "tensorflow", "legacy, eager"),
    ("tensorflow", "tensorflow", "tf_keras, eager"),
    ("tensorflow", "tensorflow", "keras, eager"),
]
each_peer = pytest.mark.parametrize(
    "peer",
    [pytest.param(peer, id=" ".join(peer), marks=[pytest.mark.slow] * (peer in ALSO)) for peer in PEERS],
)


def trace_of_the_core(policy):
    """Return (scale, finite, skipped, new_scale) of every step; None for the one at which it gives up."""
    state, trace = policy.start(), []
    for number, mark in enumerate(SCRIPT):
        reading = seen(policy, state.scale, factors(number, mark == "1"))
        try:
            after = policy.step(state, reading)
        except Starved:
            return [*trace, None]
        trace.append([state.scale, reading.finite, not reading.finite, after.scale])
        state = after
    return trace


def seen(policy, scale, gradients):
    """Return what there is to see in gradients times a scale."""
    entries = np.concatenate([np.abs(one).ravel() * scale for one in gradients])
    finite = bool(np.isfinite(entries).all())
    if not finite:
        return Reading(finite)
    return Reading(finite, float(entries.max()), float((entries >= policy.edge).mean()))


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """Return what an adapter did under each policy; the process of its framework is asked once."""
    found = {}

    def ask(peer):
        if peer not in found:
            file = tmp_path_factory.mktemp(peer[0]) / "walks.json"
            together = [
                other for other in PEERS if other[:2] == peer[:2] and (other in ALSO) == (peer in ALSO)
            ]
            walked = run_worker(*peer[:2], file, [adapter for *_, adapter in together])
            found.update(zip(together, walked, strict=True))
        return found[peer]

    return ask


def run_worker(framework, backend, file, adapters):
    worker = str(Path(__file__).with_name("conformance_worker.py"))
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", worker, framework, str(file), *adapters],
        env={**os.environ, **quick, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@each_peer
def test_the_trace_is_the_cores(walks, peer):
    traces = {policy: [step["trace"] for step in steps] for policy, steps in walks(peer).items()}
    assert traces == {name: trace_of_the_core(policy) for name, policy in policies(peer[-1]).items()}


@each_peer
def test_a_skipped_step_leaves_every_bit_and_others_move_weights_and_state(walks, peer):
    for steps in walks(peer).values():
        moved = [step["moved"] for step in steps]
        assert moved == [{"weights": mark == "0", "state": mark == "0"} for mark in SCRIPT[: len(steps)]]


def test_every_adapter_is_in_the_table():
    named = {framework: set(adapters) for framework, adapters in ADAPTERS.items()}
    assert named == {one: {adapter for other, _, adapter in PEERS if other == one} for one in named}


def test_the_script_tells_the_policies_apart():
    traces = {name: trace_of_the_core(policy) for name, policy in POLICIES.items()}
    assert len({str(trace) for trace in traces.values()}) == len(POLICIES)
    for name in set(POLICIES) - {"fixed"}:
        steps = [step for step in traces[name] if step]
        assert any(new > old for old, _, _, new in steps), name
        assert any(new < old for old, _, _, new in steps), name
    assert [name for name, trace in traces.items() if trace[-1] is None] == ["gives up"]
