"""The loss of the last step: known where `scale_loss` got it, and of no other step."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from preamp.keras import LossScaleOptimizer

from .driving import BACKEND, INF, Run, each_backend, tensor

pytestmark = each_backend


def run_of(way: str = "eager") -> Run:
    return Run(LossScaleOptimizer(keras.optimizers.SGD(0.25)), np.ones(2), way=way)


def step(run: Run, loss: float, gradient: float = 1.0) -> None:
    scaled = run.optimizer.scale_loss(tensor(loss))
    run.apply(np.full(2, float(keras.ops.convert_to_numpy(scaled)) * gradient))


@pytest.mark.parametrize("gradient", [1.0, INF])
def test_the_last_step_has_its_loss(gradient: float) -> None:
    run = run_of()
    for loss in (3.0, 0.5):
        step(run, loss, gradient)
        assert run.optimizer.last_step.loss == loss
    assert run.optimizer.last_step.index == 1


def test_a_step_whose_loss_is_not_known_has_none() -> None:
    run = run_of()
    step(run, 3.0)
    run.apply(np.ones(2))
    assert run.optimizer.last_step.loss is None
    run.optimizer.scale_loss(tensor([1.0, 2.0]))
    run.apply(np.ones(2))
    assert (run.optimizer.last_step.index, run.optimizer.last_step.loss) == (2, None)


def test_a_call_that_raises_leaves_the_record_as_it_was() -> None:
    run = run_of()
    step(run, 3.0)
    run.optimizer.scale_loss(tensor(5.0))
    with pytest.raises(ValueError, match="all gradients are None"):
        run.optimizer.apply([None], run.variables)
    assert (run.optimizer.last_step.index, run.optimizer.last_step.loss) == (0, 3.0)


def test_a_compiled_step_has_no_loss_of_an_earlier_one() -> None:
    compiled, eager = run_of("compiled"), run_of()
    compiled.optimizer.scale_loss(tensor(1.0))
    compiled.apply(np.ones(2))
    eager.optimizer, eager.variables = compiled.optimizer, compiled.variables
    step(eager, 3.0)
    assert compiled.optimizer.last_step.loss == 3.0
    compiled.apply(np.ones(2))
    assert (compiled.optimizer.last_step.index, compiled.optimizer.last_step.loss) == (2, None)


def test_a_loss_keeps_no_graph_alive() -> None:
    run = run_of()
    if BACKEND == "torch":
        loss = run.variables[0].value.sum()
        run.optimizer.scale_loss(loss).backward()
        run.apply(np.ones(2))
        assert run.optimizer._loss_of_step[0].grad_fn is None
        assert run.optimizer.last_step.loss == 2.0
    else:
        run.optimizer.scale_loss(2.0)
        run.apply(np.ones(2))
        assert run.optimizer.last_step.loss == 2.0
