"""What a step costs where it is compiled: one trace, two branches, no more operations than tf_keras."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from preamp import Dynamic, Policy, Static, Tolerant, dialects
from preamp.policy import Reading, State, Where, choose
from preamp.tensorflow import LossScaleOptimizer, tf_keras_state

from .kinds import KINDS, Peer, each_kind, inner, numbers, rules, wrapped

NAMES = ("Const", "NoOp", "Placeholder")  # which compute nothing
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")
POLICIES: list[Policy[Any]] = [dialects.TF_KERAS.policy, Static(8.0), Tolerant(init_scale=8.0)]


def step_of(optimizer: Any, variables: list[Any]) -> Callable[[Any], None]:
    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.add_n([tf.reduce_sum(v * factor) for v in variables]))
        unscaled = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
        optimizer.apply_gradients(zip(unscaled, variables, strict=True))

    return step


def build(optimizer: Any, variables: list[Any]) -> None:
    """Make the inner optimizer's variables: a function that makes some is traced twice."""
    if isinstance(optimizer, KINDS["legacy"].Optimizer):
        optimizer._create_all_weights(variables)
    else:
        optimizer.build(variables)


def operations(optimizer: Any, count: int = 4) -> Counter[str]:
    """Return how many nodes of each operation a compiled step has, those of its branches included.

    Only where squares do not fit does it compute more, which is left out.
    """
    step = tf.function(step_of(optimizer, [tf.Variable(tf.ones([3])) for _ in range(count)]))
    nothing = (tf.constant(True), tf.constant(0.0), tf.zeros(count))
    with mock.patch("preamp.arrays.tensorflow._by_largest", return_value=nothing):
        graph = step.get_concrete_function(tf.TensorSpec([])).graph.as_graph_def()
    nodes = [graph.node, *(function.node_def for function in graph.library.function)]
    return Counter(node.op for each in nodes for node in each)


def branches(found: Counter[str]) -> int:
    return sum(found[name] for name in BRANCHES)


@pytest.mark.parametrize(("kind", "policy"), list(zip(KINDS, POLICIES, strict=True)))
def test_there_is_a_branch_around_the_update_and_one_that_measures_again(kind: str, policy: Any) -> None:
    found = operations(LossScaleOptimizer(inner(kind), policy=policy))
    assert (found["If"], branches(found)) == (1, 2)


@pytest.mark.parametrize(("kind", "optimizer"), [("legacy", "SGD"), ("tf_keras", "Adam")])
def test_tf_keras_has_four_and_computes_no_less(
    kind: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart from the record of the loss and of the norm, which tf_keras does not keep.

    The loss is seven operations on three numbers, the norm one a gradient and five on scalars.
    """
    recorded = operations(LossScaleOptimizer(inner(kind, optimizer)))
    monkeypatch.setattr(tf_keras_state.LossSum, "_can_write", lambda self: False)
    ours = operations(LossScaleOptimizer(inner(kind, optimizer)))
    theirs = operations(Peer(inner(kind, optimizer)))
    assert branches(theirs) == 4
    for name in NAMES:
        del recorded[name], ours[name], theirs[name]
    norm = Counter(L2Loss=4, AddN=1, Mul=1, Sqrt=1, SelectV2=1, AssignVariableOp=1)
    assert norm <= ours
    assert ours.total() - norm.total() <= theirs.total()
    added = {"AssignAddVariableOp": 1, "AssignVariableOp": 3, "ReadVariableOp": 2, "Pack": 1}
    assert recorded - ours == added


@each_kind
def test_each_gradient_is_divided_and_squared(kind: str) -> None:
    """What a fifth to an eighth variable adds, beyond what the bare optimizer does with it."""
    added = operations(wrapped(kind), 8) - operations(wrapped(kind), 4)
    assert added["RealDiv"] == 4
    assert added["L2Loss"] == 4
    assert added["IsFinite"] == 0  # the norm tells
    assert added["Cast"] == 0


@each_kind
def test_many_steps_are_traced_once_and_follow_the_policy(kind: str) -> None:
    arguments = {"initial_scale": 8.0, "dynamic_growth_steps": 2}
    optimizer, variable, traces = wrapped(kind, **arguments), tf.Variable([1.0, 2.0]), []
    build(optimizer, [variable])
    step = step_of(optimizer, [variable])

    @tf.function
    def train(factor: Any) -> None:
        traces.append(1)
        step(factor)

    seen = []
    script = "0010001100"
    for mark in script:
        train(tf.constant(float("inf") if mark == "1" else 1.0))
        seen.append(numbers(optimizer))
    assert seen == rules(dialects.TF_KERAS(**arguments), script)
    assert variable.numpy().tolist() == [1.0 - 7 * 0.5, 2.0 - 7 * 0.5]
    assert len(traces) == train.experimental_get_tracing_count() == 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Watching(Dynamic):
    """Notes how many functions that AutoGraph has rewritten a step is in."""

    seen: list[int] = field(default_factory=list)

    def advance(self, state: State, reading: Reading, where: Where = choose) -> State:
        self.seen.append(sum("autograph_generated" in frame.filename for frame in inspect.stack(0)))
        return super().advance(state, reading, where)


@each_kind
def test_autograph_rewrites_the_users_function_and_none_of_ours(kind: str) -> None:
    policy = Watching(init_scale=8.0)
    operations(wrapped(kind, policy=policy))
    assert policy.seen
    assert set(policy.seen) == {1}


@each_kind
def test_a_callable_loss_may_branch(kind: str) -> None:
    """AutoGraph rewrites it, as it does when it is called from a function of the user's."""
    optimizer, variable = wrapped(kind), tf.Variable(1.0)

    def loss() -> Any:
        return variable * 1.0 if variable > 0.75 else variable * -8.0

    @tf.function
    def train() -> Any:
        scaled = optimizer.get_scaled_loss(loss)
        with tf.GradientTape() as tape:
            value = scaled()
        (gradient,) = optimizer.get_unscaled_gradients([tape.gradient(value, variable)])
        optimizer.apply_gradients([(gradient, variable)])

    train()
    assert float(variable) == 0.5
    train()
    assert float(variable) == 4.5


@each_kind
def test_a_scale_read_in_a_graph_follows(kind: str) -> None:
    optimizer = wrapped(kind, initial_scale=8.0, dynamic_growth_steps=1)
    read = tf.function(lambda: optimizer.loss_scale)
    scaled = tf.function(lambda: optimizer.get_scaled_loss(tf.constant(3.0)))
    assert (float(read()), float(scaled())) == (8.0, 24.0)
    step_of(optimizer, [tf.Variable(1.0)])(tf.constant(1.0))
    assert (float(read()), float(scaled())) == (16.0, 48.0)


@pytest.mark.parametrize("kind", ["tf_keras", "keras"])
def test_jit_compiled(kind: str) -> None:
    optimizer, variable = wrapped(kind, initial_scale=8.0, dynamic_growth_steps=2), tf.Variable([1.0, 2.0])
    build(optimizer, [variable])
    step = tf.function(step_of(optimizer, [variable]), jit_compile=True)
    for factor in (1.0, float("inf"), 1.0, 1.0):
        step(tf.constant(factor))
    assert numbers(optimizer) == (8.0, 0.0)
    assert variable.numpy().tolist() == [-0.5, 0.5]
    assert optimizer.skipped_steps == 1
