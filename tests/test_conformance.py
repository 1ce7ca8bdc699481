"""A script of overflows through every adapter: one trace, and skipped steps leave no mark.

Each backend of Keras runs in a process of its own (`conformance_worker.py`), and with it what else is on that
framework; the core plays the same script here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from preamp import Reading, ScaleExhausted

from .conformance_worker import (
    EXHAUSTING,
    GIVES_UP_TWICE,
    POLICIES,
    ROWS,
    SCRIPT,
    Row,
    factors,
)


def each(rows):
    return pytest.mark.parametrize(
        "row",
        [pytest.param(row, id=" ".join(row[:3]), marks=[pytest.mark.slow] * row.is_repeated) for row in rows],
    )


each_row = each(ROWS)
each_row_of_all_policies = each([row for row in ROWS if not row.only])


def trace_of_the_core(policy):
    """Return (scale, finite, skipped, new_scale) of every step; None for the one at which it gives up."""
    state, trace = policy.start(), []
    for number, mark in enumerate(SCRIPT):
        reading = seen(policy, state.scale, factors(number, mark))
        try:
            after = policy.step(state, reading)
        except ScaleExhausted:
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
    return Reading(finite, float(entries.max()))


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """Return what an adapter did under each policy; the process of its backend is started once."""
    found = {}

    def ask(row: Row):
        if row not in found:
            together = [other for other in ROWS if process_of(other) == process_of(row)]
            walked = run_worker(row.backend, tmp_path_factory.mktemp("walks") / "walks.json", together)
            found.update(zip(together, walked, strict=True))
        return found[row]

    return ask


# Processes share JAX's cache, and one may read what another has not written to the end.
HALF_FILE = "ignore:Error reading persistent compilation cache entry:UserWarning"


def process_of(row: Row):
    return row.backend, row.is_repeated


def run_worker(backend: str, file: Path, rows: list[Row]):
    worker = str(Path(__file__).with_name("conformance_worker.py"))
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "OMP_NUM_THREADS": "1"}
    numbers = [str(ROWS.index(row)) for row in rows]
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-W", HALF_FILE, worker, str(file), *numbers],
        env={**quick, **os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@each_row
def test_the_trace_is_the_cores(walks, row):
    walked = walks(row)[0]
    traces = {policy: [step["trace"] for step in steps] for policy, steps in walked.items()}
    assert traces == {name: trace_of_the_core(policy) for name, policy in row.policies().items()}


@each_row
def test_a_skipped_step_leaves_every_bit_and_others_move_weights_and_state(walks, row):
    for steps in walks(row)[0].values():
        moved = [step["moved"] for step in steps]
        assert moved == [{"weights": mark == "0", "state": mark == "0"} for mark in SCRIPT[: len(steps)]]


def norm_of(number, mark):
    """Return the norm of a step's unscaled gradients; None after an overflow."""
    entries = np.concatenate([one.ravel() for one in factors(number, "0")])
    return None if mark == "1" else pytest.approx(float(np.linalg.norm(entries)), rel=1e-6)


@each_row
def test_the_record_has_the_norm_of_the_gradients(walks, row):
    norms = [norm_of(*step) for step in enumerate(SCRIPT)] if row.takes_norm else [None] * len(SCRIPT)
    for steps in walks(row)[0].values():
        given_up = [step["trace"] is None for step in steps]
        expected = [None if none else norm for norm, none in zip(norms, given_up, strict=False)]
        assert [step["norm"] for step in steps] == expected


@each_row_of_all_policies
def test_a_policy_that_has_given_up_goes_on_saying_where_it_did_first(walks, row):
    found, state = [], GIVES_UP_TWICE.start()
    for number, mark in enumerate(EXHAUSTING):
        try:
            state = GIVES_UP_TWICE.step(state, Reading(mark == "0"))
        except ScaleExhausted as error:
            found.append([number, error.scale, error.overflows])
    assert found == [[2, 8.0, 3], [9, 8.0, 2]]
    walked = walks(row)[1]
    assert walked["raised"] == (found if row.raises else [])
    assert walked["can say"] or row.raises
    assert walked["said"] == (found[0][1:] if walked["can say"] else None)


def test_the_script_tells_the_policies_apart():
    traces = {name: trace_of_the_core(policy) for name, policy in POLICIES.items()}
    assert len({str(trace) for trace in traces.values()}) == len(POLICIES)
    for name in set(POLICIES) - {"fixed"}:
        steps = [step for step in traces[name] if step]
        assert any(new > old for old, _, _, new in steps), name
        assert any(new < old for old, _, _, new in steps), name
    assert [name for name, trace in traces.items() if trace[-1] is None] == ["gives up"]
