"""A scale to resume from that is out of bounds, or that nothing can resume from: never in silence."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest

from preamp import Dynamic, PolicyError
from preamp.keras import LossScaleOptimizer

from .driving import Run

RULE = Dynamic(init_scale=8.0, min_scale=4.0, max_scale=64.0)
OUTSIDE = {1.0: r"1\.0 is below min_scale=4\.0 of Dynamic.* Write policy=Dynamic\(min_scale=1\.0\)"}
OUTSIDE[128.0] = r"128\.0 is above max_scale=64\.0 of Dynamic.* Write policy=Dynamic\(max_scale=128\.0\)"
outside = pytest.mark.parametrize("scale", OUTSIDE)


def run_of() -> Run:
    run = Run(LossScaleOptimizer(keras.optimizers.SGD(0.25), policy=RULE), np.ones(2), way="eager")
    run.optimizer.scale_loss(1.0)
    return run


def stored(**numbers: float) -> dict[str, Any]:
    store: dict[str, Any] = {}
    run = run_of()
    run.apply(np.ones(2))
    run.optimizer.save_own_variables(store)
    return {**store, **{name: np.asarray(value) for name, value in numbers.items()}}


@outside
def test_what_is_loaded_warns(scale: float) -> None:
    run = run_of()
    run.apply(np.ones(2))
    with pytest.warns(UserWarning, match=OUTSIDE[scale] + r".*dynamic_scale\.assign\("):
        run.optimizer.load_own_variables(stored(dynamic_scale=scale))
    run.apply(np.ones(2))  # that has been said
    assert run.optimizer.last_step.scale == scale


@outside
def test_weights_that_are_set_warn(scale: float) -> None:
    run = run_of()
    run.apply(np.ones(2))
    place = next(i for i, v in enumerate(run.optimizer.variables) if v is run.optimizer.dynamic_scale)
    weights = [keras.ops.convert_to_numpy(variable) for variable in run.optimizer.variables]
    weights[place] = np.asarray(scale)
    with pytest.warns(UserWarning, match=OUTSIDE[scale]):
        run.optimizer.set_weights(weights)


@outside
def test_what_is_assigned_past_loading_warns_once(scale: float) -> None:
    run = run_of()
    run.apply(np.ones(2))
    run.optimizer.dynamic_scale.assign(scale)
    with pytest.warns(UserWarning, match=OUTSIDE[scale]):
        run.apply(np.ones(2))
    run.apply(np.ones(2))
    assert run.optimizer.last_step.scale == scale


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dynamic_scale", value) for value in (math.nan, math.inf, 0.0, -8.0)),
        *((name, -1.0) for name in ("step_counter", "steps", "skipped_steps")),
    ],
)
def test_what_nothing_can_resume_from_starts_again(name: str, value: float) -> None:
    run = run_of()
    with pytest.warns(UserWarning, match="the loss scale starts"):
        run.optimizer.load_own_variables(stored(**{name: value}))
    assert run.optimizer.loss_scale == 8.0
    assert run.optimizer.skipped_steps == 0
    assert run.optimizer.last_step is None


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -8.0])
def test_a_scale_that_is_assigned_and_cannot_work_is_refused(value: float) -> None:
    run = run_of()
    run.apply(np.ones(2))
    before = keras.ops.convert_to_numpy(run.variables[0]).tolist()
    run.optimizer.dynamic_scale.assign(value)
    with pytest.raises(PolicyError, match="Write scale="):
        run.apply(np.ones(2))
    with pytest.raises(PolicyError, match="Write scale="):
        _ = run.optimizer.last_step
    assert keras.ops.convert_to_numpy(run.variables[0]).tolist() == before
