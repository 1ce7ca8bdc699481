"""What concerns torch alone: operators and host reads of a step, what is written in place, compiling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from preamp import Static
from preamp.keras import LossScaleOptimizer
from tests.seeing import Remembering

from .driving import INF, Run, Stock, array, close, same
from .test_training import BATCH, adam, data, model_of, weights

READS = ("tolist", "item", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")


def bare(inner: Any) -> Any:
    return inner


class Operators(TorchDispatchMode):
    """Counts the operators that reach ATen."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts what brings numbers to the host."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


class Cost(NamedTuple):
    operators: int
    reads: int


def built(
    make: Callable[..., Any], *starts: Any, inner: Any = None, **arguments: Any
) -> tuple[Any, list[Any]]:
    """Return an optimizer that believes a loss was scaled, and its variables."""
    optimizer = make(inner or keras.optimizers.SGD(1.0), **arguments)
    variables = [keras.Variable(np.asarray(start, "float32")) for start in starts]
    optimizer.build(variables)
    optimizer.scale_loss(1.0)
    return optimizer, variables


def cost(
    make: Callable[..., Any], inner: str, count: int, *, own: bool = True, overflow: bool = False
) -> Cost:
    """Count the second step; with `own`, each gradient is its parameter's `.grad`."""
    starts = [np.ones(4)] * count
    optimizer, variables = built(make, *starts, inner=getattr(keras.optimizers, inner)(0.125))

    def step(spoiled: bool) -> None:
        gradients = [torch.full((4,), INF if spoiled and i == 1 else 1.0) for i in range(count)]
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.value.grad = gradient if own else None
        optimizer.apply(gradients, variables)

    step(False)
    with Operators() as operators:
        step(overflow)
    with Reads() as reads:
        step(overflow)
    made = count  # torch.full
    return Cost(operators.count - made, reads.count)


# Operators that ours adds to a clean step, however many variables there are: three of them read the norm into
# the record, the one that takes it runs over all gradients at once.
ADDED = 13


@pytest.mark.parametrize(("inner", "count"), [("SGD", 2), ("Adam", 6)])
def test_a_step_costs_a_few_operators_and_one_read(inner: str, count: int) -> None:
    """Stock Keras looks at every gradient by itself, and reads twice: `if finite`, `if counter ==`."""
    plain, stock, ours = (cost(make, inner, count) for make in (bare, Stock, LossScaleOptimizer))
    assert plain.reads == 0
    assert stock == (plain.operators + 9 + 6 * count, 2)
    assert ours == (plain.operators + ADDED, 1)


@pytest.mark.parametrize("count", [2, 6])
def test_a_policy_that_sees_looks_at_each_gradient_and_reads_no_more(count: int) -> None:
    blind, seeing = (
        cost(lambda inner, policy=policy: LossScaleOptimizer(inner, policy=policy), "SGD", count)
        for policy in (Static(4.0), Remembering())
    )
    assert seeing == (blind.operators + 6 + count, 1)


@pytest.mark.parametrize("count", [2, 6])
def test_gradients_that_are_not_the_parameters_own_are_copied(count: int) -> None:
    own, others = (cost(LossScaleOptimizer, "SGD", count, own=own) for own in (True, False))
    assert others == (own.operators + 2 * count, 1)  # detach, clone


@pytest.mark.parametrize("count", [2, 6])
def test_a_skipped_step_updates_nothing_and_reads_once(count: int) -> None:
    plain = cost(bare, "Adam", count)
    ours = cost(LossScaleOptimizer, "Adam", count, overflow=True)
    assert ours.reads == 1
    assert ours.operators < plain.operators


def test_a_norm_that_overflows_is_looked_at_again() -> None:
    """Dividing by a scale below 1 can overflow; that costs a second read, and an inf does not."""
    optimizer, variables = built(LossScaleOptimizer, np.ones(2), initial_scale=0.5)
    for gradient, expected, reads in ((1.0, -1.0, 1), (3e38, -1.0, 2), (INF, -1.0, 1)):
        with Reads() as counted:
            optimizer.apply([torch.full((2,), gradient)], variables)
        assert counted.count == reads
        assert array(variables[0]).tolist() == [expected, expected]
    assert optimizer.skipped_steps == 2
    assert optimizer.loss_scale == 0.125


def test_the_parameters_own_gradient_is_unscaled_in_place() -> None:
    """As PyTorch's GradScaler does; whoever looks at `.grad` afterwards sees true gradients."""
    optimizer, (variable,) = built(LossScaleOptimizer, np.ones(2), initial_scale=8.0)
    variable.value.grad = torch.tensor([8.0, 16.0])
    version = variable.value.grad._version
    optimizer.apply([variable.value.grad], [variable])
    assert variable.value.grad.tolist() == [1.0, 2.0]
    assert variable.value.grad._version > version
    assert array(variable).tolist() == [0.0, -1.0]


@pytest.mark.parametrize("own", [True, False])
def test_one_gradient_of_two_variables_is_divided_once_for_each(own: bool) -> None:
    optimizer, variables = built(LossScaleOptimizer, np.ones(2), np.zeros(2), initial_scale=8.0)
    gradient = torch.tensor([8.0, 16.0])
    for variable in variables:
        variable.value.grad = gradient if own else None
    optimizer.apply([gradient, gradient], variables)
    assert [array(v).tolist() for v in variables] == [[0.0, -1.0], [-1.0, -2.0]]


def test_views_of_one_tensor_are_divided_once() -> None:
    """Whole and part in one memory: what is divided for one must not be divided again for the other."""
    optimizer, variables = built(LossScaleOptimizer, np.zeros(4), np.zeros(2), np.zeros(2), initial_scale=8.0)
    whole = torch.full((4,), 8.0)
    gradients = [whole, whole[:2], whole[2:]]
    optimizer.apply(gradients, variables)
    assert [set(array(v).tolist()) for v in variables] == [{-1.0}] * 3
    assert whole.tolist() == [8.0] * 4


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_gradient_is_finite(shape: tuple[int, ...]) -> None:
    run = Run(LossScaleOptimizer(keras.optimizers.SGD(1.0)), np.zeros(shape), np.zeros(shape), np.ones(2))
    run.step(np.zeros(shape), np.zeros(shape), [1.0, 0.0])
    assert run.weights()[2].tolist() == [0.0, 1.0]
    run.step(np.zeros(shape), np.zeros(shape), [INF, 0.0])
    assert run.optimizer.skipped_steps == 1


def test_a_layout_that_is_not_contiguous_is_unscaled_too() -> None:
    optimizer, (variable,) = built(LossScaleOptimizer, np.zeros((2, 3)), initial_scale=8.0)
    gradient = torch.arange(6.0).reshape(3, 2).T * 8.0
    variable.value.grad = gradient
    optimizer.apply([gradient], [variable])
    assert array(variable).tolist() == [[0.0, -2.0, -4.0], [-1.0, -3.0, -5.0]]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    ("own", "layout"), [(True, torch.sparse_coo), (False, torch.sparse_coo), (False, torch.sparse_csr)]
)
def test_a_sparse_gradient_is_unscaled_in_place_if_it_is_the_parameters_own(own: bool, layout: Any) -> None:
    optimizer, (variable,) = built(LossScaleOptimizer, np.zeros((3, 2)), initial_scale=8.0)
    with torch.sparse.check_sparse_tensor_invariants(True):
        gradient = torch.tensor([[0.0, 0.0], [8.0, -16.0], [0.0, 0.0]]).to_sparse(layout=layout)
    variable.value.grad = gradient if own else None
    optimizer.apply([gradient], [variable])
    assert array(variable).tolist() == [[0.0, 0.0], [-1.0, 2.0], [0.0, 0.0]]
    assert gradient.to_dense()[1].tolist() == ([1.0, -2.0] if own else [8.0, -16.0])
    assert gradient.layout is layout


def test_stateless_apply_writes_none_of_its_inputs() -> None:
    """Stock Keras, and every bare optimizer of Keras on torch, writes in the weights it is given."""
    for make, writes in ((Stock, True), (LossScaleOptimizer, False)):
        for gradient in (1.0, INF):
            optimizer, variables = built(make, np.ones(2), inner=keras.optimizers.Adam(0.125))
            state = [v.value.detach().clone() for v in optimizer.variables]
            inputs = (state, [torch.full((2,), gradient)], [torch.ones(2)])
            before = [array(tensor) for part in inputs for tensor in part]
            held = [array(v) for v in [*optimizer.variables, *variables]]
            new_weights, new_state = optimizer.stateless_apply(*inputs)
            untouched = same([array(tensor) for part in inputs for tensor in part], before)
            assert untouched is (not writes or gradient == INF)
            if not writes:
                assert same([array(v) for v in [*optimizer.variables, *variables]], held)
                assert same([array(w) for w in new_weights], [np.ones(2, "float32")]) is (gradient == INF)
                scale = [v is optimizer.dynamic_scale for v in optimizer.variables].index(True)
                assert array(new_state[scale]) == (2.0**14 if gradient == INF else 2.0**15)


def test_a_loop_of_pytorchs_own_with_backward() -> None:
    """The custom loop of Keras's guide: `loss.backward()`, gradients from `.grad`, `apply`."""
    ours, plain = model_of(LossScaleOptimizer(adam())), model_of(adam())
    for model in (ours, plain):
        model.optimizer.build(model.trainable_variables)
        for mark in "0010":
            spoiled = mark == "1"
            if spoiled and model is plain:
                continue
            rows, targets = (torch.from_numpy(part[:BATCH].copy()) for part in data(overflow=False))
            targets[0] += INF if spoiled else 0.0
            model.zero_grad()
            loss = keras.ops.mean((model(rows) - targets) ** 2)
            model.optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                gradients = [v.value.grad for v in model.trainable_weights]
                model.optimizer.apply(gradients, model.trainable_weights)
    assert close(weights(ours), weights(plain))
    assert ours.optimizer.skipped_steps == 1


def test_no_step_is_recorded_by_autograd() -> None:
    optimizer, (variable,) = built(LossScaleOptimizer, np.ones(2))
    leaf = torch.ones(2, requires_grad=True)
    optimizer.apply([leaf * 2.0], [variable])  # a gradient with a history, as of create_graph=True
    tensors: list[Tensor] = [variable.value, *(v.value for v in optimizer.variables)]
    assert all(tensor.grad_fn is None for tensor in tensors)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo
def test_a_compiled_training_step_is_the_plain_one_and_is_compiled_once(monkeypatch) -> None:
    """Stock Keras compiles anew with every step, until torch gives up at the recompile limit."""
    from torch._dynamo.utils import counters

    # PyTorch's own backend needs a C++ compiler, which is not everywhere.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    x, y = data(overflow=False)
    compiled, plain = (
        model_of(LossScaleOptimizer(adam(), dynamic_growth_steps=3), jit_compile=jit) for jit in (True, False)
    )
    for model in (compiled, plain):
        for number in range(8):
            if number == 3:
                assert counters["frames"] or model is plain
                counters.clear()
            targets = y[:BATCH] * (INF if number in (1, 5) else 1.0)
            model.train_on_batch(x[:BATCH], targets)
    assert sum(counters["frames"].values()) == sum(counters["graph_break"].values()) == 0
    assert close(weights(compiled), weights(plain))
    assert compiled.optimizer.skipped_steps == plain.optimizer.skipped_steps == 2
    steps = [model.optimizer.last_step for model in (compiled, plain)]
    assert steps[0] == steps[1]._replace(loss=None)
