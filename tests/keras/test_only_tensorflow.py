"""What concerns TensorFlow alone: graphs, `IndexedSlices`, XLA, replicas, and `tf.train.Checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from preamp import UsageError
from preamp.keras import LossScaleOptimizer, TraceCallback
from tests.seeing import Remembering

from .driving import INF, Run, Stock, array, close, same
from .test_training import BATCH, ROWS, adam, data, fit, model_of, weights

CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")


def sgd(**arguments: Any) -> Any:
    return keras.optimizers.SGD(0.25, **arguments)


def nodes(function: Any) -> list[str]:
    """Return the operators of a graph and of every function that it calls."""
    graph = function.graph.as_graph_def()
    called = [node.op for inner in graph.library.function for node in inner.node_def]
    return [*(node.op for node in graph.node), *called]


def train_step(make: Any, inner: Any) -> Any:
    """Return a training step of `fit` as a graph."""
    model = model_of(make(inner))
    model.optimizer.build(model.trainable_variables)
    rows, targets = (tf.constant(part[:BATCH]) for part in data(overflow=False))
    return tf.function(model.train_step).get_concrete_function((rows, targets))


def test_a_training_step_has_as_many_conditionals_as_stock_keras() -> None:
    """Stock Keras's second one is for the counter, ours for squares that do not fit."""
    makes = (lambda bare: bare, Stock, LossScaleOptimizer)
    graphs = [nodes(train_step(make, sgd())) for make in makes]
    assert [sum(op in CONDITIONALS for op in graph) for graph in graphs] == [0, 2, 2]


def test_a_policy_that_sees_adds_no_conditional() -> None:
    graph = nodes(train_step(lambda inner: LossScaleOptimizer(inner, policy=Remembering()), sgd()))
    assert sum(op in CONDITIONALS for op in graph) == 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_the_rows_of_indexed_slices_are_seen(compiled: bool) -> None:
    optimizer, variable = LossScaleOptimizer(sgd(), policy=Remembering()), keras.Variable(np.ones((5, 2)))
    optimizer.build([variable])
    optimizer.scale_loss(1.0)
    rows = tf.IndexedSlices(tf.constant([[0.5, -2.0], [0.25, 1.0]]), tf.constant([1, 3]), tf.constant([5, 2]))
    apply = lambda: optimizer.apply([rows], [variable])  # noqa: E731
    (tf.function(apply) if compiled else apply)()
    state = optimizer._scaler.state.policy_state
    assert float(array(state.amax)) == 2.0


def test_a_step_is_traced_once_whatever_happens() -> None:
    run = Run(LossScaleOptimizer(adam(), dynamic_growth_steps=2), np.ones(2), np.ones((2, 3)))
    traces = []

    @tf.function
    def step(*gradients: Any) -> None:
        traces.append(1)
        run.optimizer.apply([run.optimizer.scale_loss(g) for g in gradients], run.variables)

    before = run.everything()
    for number, mark in enumerate("00100100"):
        step(*(tf.constant(g) for g in run.gradients(number, mark == "1")))
        run.optimizer.learning_rate = 0.5 ** (number + 1)
    assert len(traces) == step.experimental_get_tracing_count() == 1
    compiled = run.everything()

    run.restore(before)
    for number, mark in enumerate("00100100"):
        run.step(*run.gradients(number, mark == "1"))
        run.optimizer.learning_rate = 0.5 ** (number + 1)
    assert close(compiled, run.everything())
    assert run.optimizer.skipped_steps == 2


def test_the_scale_in_a_graph_is_the_scale_of_the_moment() -> None:
    optimizer = LossScaleOptimizer(sgd(), 4.0)
    scaled = tf.function(optimizer.scale_loss)
    assert scaled(tf.constant(1.0)).numpy() == 4.0
    optimizer.dynamic_scale.assign(16.0)
    assert scaled(tf.constant(1.0)).numpy() == 16.0


def test_an_embedding_trains_as_under_a_bare_optimizer() -> None:
    """XLA, `fit` and `IndexedSlices` together."""
    x = np.random.default_rng(0).integers(0, 7, (ROWS, 3))
    targets = np.ones((ROWS, 2), "float32")

    def model(optimizer: Any) -> Any:
        keras.utils.set_random_seed(0)
        embedding = keras.layers.Embedding(7, 4)
        made = keras.Sequential([keras.Input((3,)), embedding, keras.layers.Flatten(), keras.layers.Dense(2)])
        made.compile(optimizer, "mse", jit_compile=True)
        return made

    ours, plain = model(LossScaleOptimizer(adam())), model(adam())
    for each in (ours, plain):
        each.fit(x, targets, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert close(weights(ours), weights(plain))
    before = weights(ours)
    ours.train_on_batch(x[:BATCH], targets[:BATCH] * INF)
    assert same(weights(ours), before)
    assert ours.optimizer.skipped_steps == 1


def test_a_step_that_xla_compiles_skips_and_moves_the_scale() -> None:
    run = Run(LossScaleOptimizer(adam(), dynamic_growth_steps=2), np.ones(2), np.ones(()))
    other = Run(LossScaleOptimizer(adam(), dynamic_growth_steps=2), np.ones(2), np.ones(()))
    run._apply = tf.function(run._eager, jit_compile=True)
    for each in (run, other):
        each.walk("0010001")
    assert close(run.everything(), other.everything())
    assert run.optimizer.last_step._replace(loss=None) == other.optimizer.last_step._replace(loss=None)


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_an_empty_gradient_is_finite(way: str) -> None:
    shape = (3, 0)
    run = Run(LossScaleOptimizer(keras.optimizers.SGD(1.0)), np.zeros(shape), np.ones(2), way=way)
    run.step(np.zeros(shape), [1.0, 0.0])
    assert run.weights()[1].tolist() == [0.0, 1.0]
    run.step(np.zeros(shape), [INF, 0.0])
    assert run.optimizer.skipped_steps == 1


@pytest.fixture(scope="module")
def strategy() -> Any:
    """Return a strategy of two replicas."""
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    assert mirrored.num_replicas_in_sync == 2
    return mirrored


class Replicas:
    """One variable on two replicas, stepped with a gradient of each."""

    def __init__(self, strategy: Any, make: Any, *, compiled: bool, size: int = 2, **arguments: Any) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.variable = keras.Variable(np.ones(size, "float32"))
            self.optimizer = make(keras.optimizers.SGD(0.25, momentum=0.5), **arguments)
            self.optimizer.build([self.variable])
        step = lambda gradient: strategy.run(self._step, args=(gradient,))  # noqa: E731
        self._run = tf.function(step) if compiled else step

    def _step(self, gradient: Any) -> None:
        scaled = self.optimizer.scale_loss(gradient)
        self.optimizer.apply([tf.fill(self.variable.shape, scaled)], [self.variable])

    def step(self, first: float, second: float) -> list[list[float]]:
        """Take a step; return the variable on each replica."""
        values = [tf.constant(first), tf.constant(second)]
        self._run(
            self.strategy.experimental_distribute_values_from_function(
                lambda context: values[context.replica_id_in_sync_group]
            )
        )
        return [v.numpy().tolist() for v in self.strategy.experimental_local_results(self.variable.value)]


@pytest.mark.parametrize(
    ("where", "bad", "compiled"), [("first", INF, True), ("second", float("nan"), True), ("both", INF, False)]
)
def test_an_overflow_on_any_replica_skips_on_all(
    strategy: Any, where: str, bad: float, compiled: bool
) -> None:
    """Stock Keras looks at the first replica alone, and writes inf or NaN into the weights."""
    spoiled = {"first": (bad, 1.0), "second": (1.0, bad), "both": (bad, bad)}[where]
    ours = Replicas(
        strategy, LossScaleOptimizer, compiled=compiled, initial_scale=8.0, dynamic_growth_steps=2
    )
    assert ours.step(1.0, 3.0) == [[0.0, 0.0]] * 2  # 1 - 0.25 x (1 + 3): Keras sums over replicas
    before = [array(v) for v in ours.optimizer.inner_optimizer.variables]
    assert ours.step(*spoiled) == [[0.0, 0.0]] * 2
    assert same([array(v) for v in ours.optimizer.inner_optimizer.variables], before)
    assert (ours.optimizer.loss_scale, ours.optimizer.skipped_steps) == (4.0, 1)
    assert ours.step(1.0, 1.0) == [[-1.0, -1.0]] * 2  # momentum 0.5: -0.5 - 0.5
    ours.step(0.0, 0.0)
    assert (ours.optimizer.loss_scale, array(ours.optimizer.iterations)) == (8.0, 3)
    if where == "second" and compiled:
        stock = Replicas(strategy, Stock, compiled=compiled, initial_scale=8.0)
        assert not np.isfinite(stock.step(*spoiled)).any()


def test_a_sum_that_overflows_is_no_step(strategy: Any) -> None:
    """Finite on each replica, and not once they are summed."""
    ours = Replicas(strategy, LossScaleOptimizer, compiled=True, size=1, loss_scale_factor=1.0)
    assert ours.step(1.75e38, 1.75e38) == [[1.0]] * 2
    assert ours.optimizer.skipped_steps == 1
    assert np.allclose(ours.step(1e38, 1e38), -0.5e38)


def test_replicas_keep_one_record(strategy: Any) -> None:
    ours = Replicas(strategy, LossScaleOptimizer, compiled=True, initial_scale=8.0)
    for gradients in ((1.0, 1.0), (1.0, INF)):
        ours.step(*gradients)
    step = ours.optimizer.last_step
    assert (step.index, step.scale, step.skipped, step.new_scale) == (1, 8.0, True, 4.0)
    for variable in ours.optimizer._scaler.variables.values():
        copies = [float(v) for v in strategy.experimental_local_results(variable.value)]
        assert len(np.unique(copies)) == 1


def test_the_peak_is_that_of_the_replica_that_has_it(strategy: Any) -> None:
    """Keras sums the replicas' gradients; each of them has been through float16 by itself."""
    ours = Replicas(strategy, LossScaleOptimizer, compiled=True, policy=Remembering(8.0))
    ours.step(1.0, -3.0)
    state = ours.optimizer._scaler.state.policy_state
    assert [float(array(part)) for part in (state.scale, state.amax)] == [8.0, 24.0]
    assert ours.optimizer.last_step.amax == 24.0


def test_apply_wants_the_context_of_a_replica(strategy: Any) -> None:
    with strategy.scope():
        ours = LossScaleOptimizer(sgd())
        variable = keras.Variable([1.0])
        ours.build([variable])
        ours.scale_loss(1.0)
        with pytest.raises(ValueError, match=r"strategy\.run"):
            ours.apply([tf.constant([1.0])], [variable])


def test_two_replicas_train_and_are_traced_as_one(strategy: Any) -> None:
    with strategy.scope():
        two = model_of(LossScaleOptimizer(adam()), jit_compile=False)
    one = model_of(LossScaleOptimizer(adam()), jit_compile=False)
    traces = TraceCallback(), TraceCallback()
    for model, trace in zip((one, two), traces, strict=True):
        fit(model, callbacks=[trace])
    assert all(np.allclose(a, b, atol=1e-4) for a, b in zip(weights(one), weights(two), strict=True))
    steps = [[step._replace(loss=None, grad_norm=None) for step in callback.trace] for callback in traces]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 2 * ROWS // BATCH
    assert all((step.grad_norm is None) == step.skipped for step in traces[0].trace)
    assert all(step.grad_norm is None for step in traces[1].trace)  # Keras alone has the sum over replicas


@pytest.fixture
def walked() -> Run:
    return Run(LossScaleOptimizer(adam(), dynamic_growth_steps=3), np.ones(2)).walk("00100")


def test_a_checkpoint_restores_scale_counter_and_the_next_step(walked: Run, tmp_path: Path) -> None:
    saved = tf.train.Checkpoint(optimizer=walked.optimizer, variable=walked.variables[0])
    path = saved.save(tmp_path / "at")
    other = Run(LossScaleOptimizer(adam(), dynamic_growth_steps=3), np.zeros(2))
    restored = tf.train.Checkpoint(optimizer=other.optimizer, variable=other.variables[0]).restore(path)
    restored.assert_existing_objects_matched()
    assert (other.scale, other.counter) == (2.0**14, 2)
    for each in (walked, other):
        each.walk("001")
    assert same(walked.everything(), other.everything())
    assert walked.optimizer.last_step._replace(loss=None) == other.optimizer.last_step._replace(loss=None)


def test_stateless_apply_is_refused_as_by_keras(walked: Run) -> None:
    state = [v.value for v in walked.optimizer.variables]
    with pytest.raises(ValueError, match="stateless_apply"):
        walked.optimizer.stateless_apply(state, [tf.ones(2)], [tf.ones(2)])


@pytest.mark.parametrize("name", ["loss_scale", "skipped_steps", "last_step"])
def test_what_a_step_came_to_cannot_be_read_in_a_graph(name: str) -> None:
    optimizer = LossScaleOptimizer(sgd())
    with pytest.raises(UsageError, match=r"outside tf\.function, after the step"):
        tf.function(lambda: getattr(optimizer, name), autograph=False)()
