"""What concerns JAX alone: programs that are compiled once, tracers, and what XLA makes of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.errors import UnexpectedTracerError
from jax.experimental.sparse import BCOO, BCSR

from preamp import UsageError
from preamp.keras import LossScaleOptimizer

from .driving import INF, Run, Stock, array, dtype_policy, record_shardings, same
from .test_training import BATCH, adam, data, fit, model_of, weights


def sgd() -> Any:
    return keras.optimizers.SGD(1.0)


def of(*starts: Any, make: Any = LossScaleOptimizer, **arguments: Any) -> tuple[Any, list[Any]]:
    """Return an optimizer and the variables it is built with."""
    optimizer = make(sgd(), **arguments)
    variables = [keras.Variable(np.asarray(start, "float32")) for start in starts]
    optimizer.build(variables)
    return optimizer, variables


def values(variables: list[Any]) -> list[Any]:
    return [variable.value for variable in variables]


def tracers(optimizer: Any, variables: list[Any]) -> int:
    return sum(isinstance(v.value, jax.core.Tracer) for v in [*optimizer.variables, *variables])


def test_eager_apply_leaves_no_tracers() -> None:
    """Stock Keras's leaves them in the weights and in the scale."""
    stock, theirs = of(np.ones(2), make=Stock)
    with pytest.raises(UnexpectedTracerError):
        stock.apply([jnp.ones(2)], theirs)
    assert tracers(stock, theirs) > 0
    with jax.checking_leaks():
        ours, variables = of(np.ones(2))
        for gradient in ([1.0, 2.0], [INF, 0.0], [0.0, 1.0]):
            ours.apply([ours.scale_loss(jnp.asarray(gradient))], variables)
    assert tracers(ours, variables) == 0
    assert array(variables[0]).tolist() == [0.0, -2.0]
    assert ours.loss_scale == 2.0**14


def test_a_scale_that_jit_would_bake_in_is_refused() -> None:
    """Under stock Keras the scaled loss stays what it was, and updates shrink step by step."""

    def losses(optimizer: Any, scaled: Callable[..., Any]) -> Iterator[float]:
        compiled = jax.jit(scaled)
        state, weights = values(optimizer.variables), [jnp.ones(1)]
        for _ in range(4):
            yield float(compiled(state, 1.0))
            weights, state = optimizer.stateless_apply(state, [jnp.ones(1)], weights)

    stock, _ = of(np.ones(1), make=Stock, initial_scale=4.0, dynamic_growth_steps=1)
    assert list(losses(stock, lambda state, loss: stock.scale_loss(loss))) == [4.0, 4.0, 4.0, 4.0]
    ours, _ = of(np.ones(1), initial_scale=4.0, dynamic_growth_steps=1)
    with pytest.raises(UsageError, match="stateless_scale_loss"):
        next(losses(ours, lambda state, loss: ours.scale_loss(loss)))
    assert list(losses(ours, ours.stateless_scale_loss)) == [4.0, 8.0, 16.0, 32.0]


@pytest.mark.parametrize(
    ("call", "eagerly", "factor"), [("scale_loss", False, None), ("apply", True, None), ("apply", False, 8.0)]
)
def test_fit_has_taken_the_scale_away_from_a_train_step(
    call: str, eagerly: bool, factor: float | None
) -> None:
    class Net(keras.Sequential):  # type: ignore[misc]  # Keras has no types
        def train_step(self, state: Any, data: Any) -> Any:
            if call == "scale_loss":
                self.optimizer.scale_loss(jnp.ones(()))
            self.optimizer.apply(state[0], self.trainable_variables)

    net = Net([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(sgd(), loss_scale_factor=factor)
    net.compile(optimizer, "mse", run_eagerly=eagerly)
    with pytest.raises(UsageError, match=f"^{call} inside jit .*stateless_{call}"):
        net.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)


def test_a_fixed_scale_may_be_compiled_in() -> None:
    ours, _ = of(np.ones(1), loss_scale_factor=8.0)
    assert float(jax.jit(ours.scale_loss)(2.0)) == 16.0


def test_apply_under_jit_is_refused_and_leaves_no_tracers() -> None:
    ours, variables = of(np.ones(2))
    before = [array(v) for v in [*ours.variables, *variables]]

    @jax.jit
    def step(gradient: Any) -> Any:
        ours.apply([gradient], variables)
        return gradient

    ours.scale_loss(1.0)
    with pytest.raises(UsageError, match="stateless_apply"):
        step(jnp.ones(2))
    assert tracers(ours, variables) == 0
    assert same([array(v) for v in [*ours.variables, *variables]], before)


def loop(optimizer: Any) -> Callable[..., Any]:
    """Return a training step of a custom loop: minimize the mean of (weights x row - target) squared."""

    def loss(weights: Any, state: Any, row: Any, target: Any) -> Any:
        return optimizer.stateless_scale_loss(state, jnp.mean((weights[0] * row - target) ** 2))

    def step(weights: Any, state: Any, row: Any, target: Any) -> Any:
        return optimizer.stateless_apply(state, jax.grad(loss)(weights, state, row, target), weights)

    return step


def batches(script: str) -> Iterator[tuple[Any, Any]]:
    for number, mark in enumerate(script):
        row = jnp.arange(1.0, 4.0) + number
        yield row, jnp.full(3, INF if mark == "1" else 0.5)


def walked(step: Any, optimizer: Any, variables: list[Any], script: str) -> list[np.ndarray]:
    weights, state = values(variables), values(optimizer.variables)
    for row, target in batches(script):
        weights, state = step(weights, state, row, target)
    return [array(value) for value in [*weights, *state]]


def test_a_custom_loop_is_compiled_once_and_is_the_eager_loop() -> None:
    optimizer, variables = of(np.ones(3), initial_scale=4.0, dynamic_growth_steps=2)
    traces = []

    def step(*arguments: Any) -> Any:
        traces.append(1)
        return loop(optimizer)(*arguments)

    program = jax.jit(step)
    with jax.checking_leaks():
        compiled = walked(program, optimizer, variables, "001000")
    assert len(traces) == program._cache_size() == 1
    assert tracers(optimizer, variables) == 0
    assert optimizer.last_step is None  # nothing was written to its variables
    eager = walked(loop(optimizer), optimizer, variables, "001000")
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(compiled, eager, strict=True))
    scale = [v.path for v in [*variables, *optimizer.variables]].index(optimizer.dynamic_scale.path)
    assert compiled[scale] == 8.0


def test_many_steps_in_one_scan_are_the_steps_one_by_one() -> None:
    optimizer, variables = of(np.ones(3), initial_scale=4.0, dynamic_growth_steps=2)
    stacked = [jnp.stack(column) for column in zip(*batches("0110000"), strict=True)]

    @jax.jit
    def scan(carry: Any, rows: Any, targets: Any) -> Any:
        step = loop(optimizer)
        return jax.lax.scan(lambda c, xs: (tuple(step(*c, *xs)), None), carry, (rows, targets))[0]

    weights, state = scan((values(variables), values(optimizer.variables)), *stacked)
    one_by_one = walked(jax.jit(loop(optimizer)), optimizer, variables, "0110000")
    assert all(np.allclose(a, b) for a, b in zip([*weights, *state], one_by_one, strict=True))


def test_grad_and_vmap_alone_read_the_scale_of_the_moment() -> None:
    optimizer, _ = of(np.ones(1), initial_scale=4.0)
    for scale in (4.0, 2.0):
        optimizer.dynamic_scale.assign(scale)
        assert float(jax.grad(lambda x: optimizer.scale_loss(x * x))(3.0)) == 6.0 * scale
        assert jax.vmap(optimizer.scale_loss)(jnp.arange(3.0)).tolist() == [0.0, scale, 2.0 * scale]
        rows = jax.vmap(jax.grad(lambda x: optimizer.scale_loss(x * x)))(jnp.arange(2.0))
        assert rows.tolist() == [0.0, 2.0 * scale]


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_an_empty_gradient_is_finite(way: str) -> None:
    shape = (3, 0)
    alone = Run(LossScaleOptimizer(sgd()), np.zeros(shape), way=way)
    alone.step(np.zeros(shape))
    assert alone.optimizer.skipped_steps == 0
    run = Run(LossScaleOptimizer(sgd()), np.zeros(shape), np.ones(2), way=way)
    run.step(np.zeros(shape), [1.0, 0.0])
    assert run.weights()[1].tolist() == [0.0, 1.0]
    run.step(np.zeros(shape), [INF, 0.0])
    assert run.weights()[1].tolist() == [0.0, 1.0]
    assert run.scale == 2.0**14


def test_a_kind_of_sparse_array_that_keras_cannot_apply_is_named() -> None:
    optimizer, variables = of(np.ones((5, 3)))
    optimizer.scale_loss(1.0)
    before = array(variables[0]).tolist()
    with pytest.raises(UsageError, match=r"is a BCSR, .*Write gradient\.to_bcoo\(\)"):
        optimizer.apply([BCSR.fromdense(jnp.ones((5, 3)))], variables)
    assert (array(variables[0]).tolist(), optimizer.last_step) == (before, None)


def test_a_sparse_gradient_that_is_being_traced_is_noticed() -> None:
    """Its parts are tracers, it is none itself."""
    optimizer, variables = of(np.ones((5, 3)))
    optimizer.scale_loss(1.0)
    rows = jnp.ones((2, 1, 3))

    def step(rows: Any) -> None:
        optimizer.apply([BCOO((rows, jnp.array([[1]])), shape=(5, 3))], variables)

    with pytest.raises(UsageError, match="stateless_apply"):
        jax.vmap(step)(rows)
    assert optimizer.last_step is None


def test_an_eager_step_has_the_loss_that_was_scaled_inside_of_grad() -> None:
    optimizer, variables = of(np.ones(2))

    def scaled_loss(weights: Any) -> Any:
        return optimizer.scale_loss(jnp.sum(weights) * 1.5)

    with jax.checking_leaks():
        optimizer.apply([jax.grad(scaled_loss)(variables[0].value)], variables)
    assert (optimizer.last_step.index, optimizer.last_step.loss) == (0, 3.0)


def test_inputs_may_be_tuples() -> None:
    weights, gradients = [jnp.ones(1), jnp.ones(1)], [jnp.ones(1), jnp.ones(1)]
    ours, _ = of(np.ones(1), np.ones(1))
    state = values(ours.variables)
    ours.scale_loss(1.0)
    for sequence in (list, tuple):  # stock Keras fails on tuples
        new, _ = jax.jit(ours.stateless_apply)(sequence(state), sequence(gradients), sequence(weights))
        assert [array(value).tolist() for value in new] == [[1.0 - 2.0**-15]] * 2


def cost(make: Any, inner: str, width: int) -> tuple[int, float, int]:
    """Return the conditionals in a training step as XLA compiles it, and the bytes it accesses.

    And, last, the bytes of the gradients.
    """
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((width,)), dense(2 * width, activation="relu"), dense(8)])
    model.compile(make(getattr(keras.optimizers, inner)(0.125)), "mse")
    rows, targets = np.ones((16, width), "float32"), np.ones((16, 8), "float32")
    model.optimizer.build(model.trainable_variables)
    record_shardings(model)
    kinds = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    state = model._get_jax_state(**dict.fromkeys(kinds, True))
    compiled = jax.jit(model.train_step, donate_argnums=0).lower(state, (rows, targets)).compile()
    accessed = compiled.cost_analysis()["bytes accessed"]
    gradients = sum(variable.value.nbytes for variable in model.trainable_variables)
    return compiled.as_text().count(" conditional("), accessed, gradients


@pytest.fixture
def optimized() -> Iterator[None]:
    """Let XLA do its best."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_training_step_accesses_hardly_more_than_stocks(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA counts the branch that accesses most: where squares do not fit, another pass over the gradients."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # or gradients are laid out as XLA likes
    with dtype_policy(policy):
        ours, stock = (cost(make, "Adam", 256) for make in (LossScaleOptimizer, Stock))
    assert (ours[0], stock[0]) == (2, 2)
    assert ours[1] <= 1.05 * stock[1]


@pytest.mark.usefixtures("optimized")
def test_what_the_record_adds_does_not_grow_with_the_model() -> None:
    """Stock Keras remembers two numbers, ours eleven; on a tiny model that is what there is to see."""
    (_, ours, gradients), (_, stock, _) = (cost(make, "Adam", 8) for make in (LossScaleOptimizer, Stock))
    assert ours - stock - 3 * gradients <= 1024


@pytest.fixture
def two_devices() -> Iterator[None]:
    """Divide batches between two devices."""
    devices = keras.distribution.list_devices()
    assert len(devices) == 2
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    yield
    keras.distribution.set_distribution(None)


@pytest.mark.usefixtures("two_devices")
def test_an_overflow_on_the_second_device_skips_the_step() -> None:
    x, y = data(overflow=False)
    y[BATCH - 1] = INF
    model = model_of(LossScaleOptimizer(adam(), 8.0), jit_compile=True)
    before = weights(model)
    # Not train_on_batch: that of Keras 3.10 fails on two devices without sample weights, for any optimizer.
    model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
    assert same(weights(model), before)
    assert model.optimizer.loss_scale == 4.0
    model.fit(x[BATCH : 2 * BATCH], y[BATCH : 2 * BATCH], batch_size=BATCH, verbose=0)
    assert not same(weights(model), before)


def test_two_devices_train_as_one(two_devices: None) -> None:
    two = model_of(LossScaleOptimizer(adam()), jit_compile=True)
    fit(two)
    assert len(two.trainable_variables[0].value.sharding.device_set) == 2
    keras.distribution.set_distribution(None)
    one = model_of(LossScaleOptimizer(adam()), jit_compile=True)
    fit(one)
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(weights(one), weights(two), strict=True))
    assert (two.optimizer.skipped_steps, two.optimizer.loss_scale) == (2, 2.0**13)


def test_a_step_can_be_mapped() -> None:
    optimizer, variables = of([1.0, 2.0])

    def step(state: Any, gradient: Any) -> Any:
        scaled = optimizer.stateless_scale_loss(state, gradient)
        return optimizer.stateless_apply(state, [scaled], values(variables))

    gradients = jnp.asarray([[0.5, 1.0], [INF, 0.0]])
    weights, state = jax.jit(jax.vmap(step, in_axes=(None, 0)))(values(optimizer.variables), gradients)
    assert np.array_equal(weights[0], [[0.5, 1.0], [1.0, 2.0]])
    names = [variable.name for variable in optimizer.variables]
    assert np.array_equal(state[names.index("dynamic_scale")], [2.0**15, 2.0**14])
    assert not tracers(optimizer, variables)


@pytest.mark.parametrize("name", ["loss_scale", "skipped_steps", "last_step"])
def test_what_a_step_came_to_cannot_be_read_in_a_transformed_one(name: str) -> None:
    optimizer, _ = of([1.0])

    def read(state: Any) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            return getattr(optimizer, name)

    with pytest.raises(UsageError, match="outside, after the step"):
        jax.jit(read)(values(optimizer.variables))
