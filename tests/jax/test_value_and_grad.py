"""True gradients of a scaled loss, and the state that holds what their backward pass measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from preamp import Dynamic, Headroom, Static, UsageError
from preamp.guards import NormLimit
from preamp.jax import (
    accumulate,
    all_finite,
    apply_gradients,
    check_exhausted,
    last_step,
    loss_scaled,
    restart_loss_scale,
    step,
    value_and_grad,
    zero_grads,
)
from tests.strategies import quietly

from .trainings import SCRIPT, batches, identical, loss, off_by, parameters, shard_map

POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)
OPTIMIZER = loss_scaled(optax.adamw(0.05), POLICY, max_norm=1.0)
X = next(batches("0"))[0]
FLOATS = ("float16", "bfloat16", "float32")


def at(scale: float, params: Any = None) -> Any:
    """Return an optimizer's state with a scale."""
    return loss_scaled(optax.sgd(1.0), quietly(Static, scale=scale)).init(params)


# The gradients


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=5), st.integers(-14, 32))
def test_gradients_are_those_of_jax_at_any_scale(entries: list[float], exponent: int) -> None:
    w = jnp.array(entries, jnp.float32)
    value, gradient = jax.value_and_grad(lambda w: jnp.sum(w * w * 0.5))(w)
    ours, mine, state = value_and_grad(lambda w: jnp.sum(w * w * 0.5))(w, at(2.0**exponent))
    assert ours == value
    assert mine.tolist() == gradient.tolist()
    assert state.finite


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [("float16", -30), ("float16", 15), ("float16", 16), ("bfloat16", 60), ("float32", 60)],
)
def test_a_loss_of_any_dtype_has_exact_gradients_at_any_scale(dtype: str, exponent: int) -> None:
    """The seed is in the dtype of the loss: what that cannot hold of the scale is multiplied later."""
    w = jnp.array([0.5, -0.25], dtype)
    value, gradient, state = value_and_grad(lambda w: (w * w).sum())(w, at(2.0**exponent))
    assert (value.dtype, gradient.dtype) == (dtype, jnp.float32)
    assert float(value) == 0.3125
    assert state.finite
    assert gradient.tolist() == [1.0, -0.5]


def test_an_inexact_scale_rounds_gradients_of_a_short_loss_no_more_than_others() -> None:
    _, gradient, _ = value_and_grad(lambda w: w * w)(jnp.float16(1.0), at(1000.3))
    assert float(gradient) == pytest.approx(2.0, rel=2e-7)


def test_arguments_are_those_of_jax() -> None:
    def f(a: Any, b: Any, *, c: Any) -> Any:
        return (a * b["x"] * c).sum(), {"b": b}

    a, b = jnp.arange(3.0), {"x": jnp.ones(3), "none": None}
    for argnums in (0, 1, -1, (0, 1), [1], (1, 0)):
        (value, aux), gradients = jax.value_and_grad(f, argnums, has_aux=True)(a, b, c=2.0)
        (mine, my_aux), ours, _ = value_and_grad(f, argnums, has_aux=True)(a, at(8.0), b, c=2.0)
        assert identical([mine, my_aux], [value, aux])
        assert identical(ours, tuple(gradients) if isinstance(argnums, list) else gradients)


def test_integers_among_the_parameters_have_no_gradient_and_do_no_harm() -> None:
    params = {"w": jnp.ones(2), "n": jnp.int32(3), "empty": jnp.zeros((0, 3))}
    _, gradients, state = jax.jit(value_and_grad(lambda p: p["w"].sum() * p["n"]))(params, at(8.0))
    assert gradients["w"].tolist() == [3.0, 3.0]
    assert gradients["n"].dtype == jax.dtypes.float0
    assert state.finite


def test_complex_parameters_have_the_gradients_of_jax() -> None:
    def f(w: Any) -> Any:
        return jnp.sum(jnp.abs(w) ** 2)

    w = jnp.array([1 + 2j, -3j], jnp.complex64)
    _, gradient, state = value_and_grad(f)(w, at(8.0))
    assert gradient.tolist() == jax.grad(f)(w).tolist()
    assert state.finite
    assert not value_and_grad(f)(w.at[0].set(complex(0.0, np.inf)), at(8.0))[2].finite


def test_double_precision_stays(request: pytest.FixtureRequest) -> None:
    jax.config.update("jax_enable_x64", True)
    request.addfinalizer(lambda: jax.config.update("jax_enable_x64", False))
    for dtype in (jnp.float32, jnp.float64):
        w = jnp.array([1e-3], dtype)
        value, gradient, state = value_and_grad(lambda w: jnp.sum(w**2))(w, at(2.0**16))
        assert value.dtype == gradient.dtype == dtype
        assert gradient.tolist() == jax.grad(lambda w: jnp.sum(w**2))(w).tolist()
        assert state.finite
    assert all_finite({"a": jnp.full(3, 1e100), "b": jnp.ones(3, jnp.float32)})


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_overflow_in_one_entry_leaves_no_gradient_that_could_be_used(bad: float, dtype: str) -> None:
    params = {"a": jnp.ones(3, dtype), "b": jnp.ones((2, 2), dtype)}
    _, gradients, state = value_and_grad(lambda p, x: p["a"].sum() + (p["b"] * x).sum())(
        params, at(8.0), jnp.ones((2, 2), dtype).at[1, 0].set(bad)
    )
    assert not state.finite
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64"])
def test_all_finite_sees_one_entry_that_is_not(dtype: str) -> None:
    good = {"x": jnp.ones((3, 2), dtype), "n": jnp.int32(7), "empty": jnp.zeros((0, 2), dtype), "none": None}
    assert all_finite(good)
    assert not all_finite({**good, "x": good["x"].at[2, 1].set(np.inf)})
    assert not all_finite({**good, "x": good["x"].at[0, 1].set(np.nan)})
    assert all_finite({})
    assert all_finite(None)


# The state: only that of a backward pass is updated, and only once updated it begins another

RESTING: dict[str, Callable[[Any, Any, Any], Any]] = {
    "update": lambda gradients, state, params: OPTIMIZER.update(gradients, state, params),
    "compiled update": lambda *args: jax.jit(OPTIMIZER.update)(*args),
    "swapped": lambda gradients, state, params: OPTIMIZER.update(state, gradients, params),
    "apply_gradients": lambda gradients, state, params: apply_gradients(OPTIMIZER, gradients, state, params),
    "accumulate": lambda gradients, state, _: accumulate((gradients, state), (gradients, state)),
    "TrainState": lambda gradients, _, params: TrainState.create(
        apply_fn=None, params=params, tx=OPTIMIZER
    ).apply_gradients(grads=gradients),
}


@pytest.mark.parametrize("way", RESTING)
def test_gradients_of_jax_grad_are_refused(way: str) -> None:
    """They were not scaled: what underflowed in them is lost."""
    params = parameters()
    message = "holds no loss scale" if way == "swapped" else r"not from a backward pass.*value_and_grad\("
    with pytest.raises(UsageError, match=f"(?s){message}"):
        RESTING[way](jax.grad(loss)(params, X), OPTIMIZER.init(params), params)


PENDING: dict[str, Callable[[Any, Any], Any]] = {
    "value_and_grad": lambda params, state: value_and_grad(loss)(params, state, X),
    "compiled": lambda params, state: jax.jit(value_and_grad(loss))(params, state, X),
    "step": lambda params, state: step(loss, OPTIMIZER)(params, state, X),
    "zero_grads": zero_grads,
    "last_step": lambda _, state: last_step(state),
    "check_exhausted": lambda _, state: check_exhausted(state, POLICY),
    "restart_loss_scale": lambda _, state: restart_loss_scale(state, POLICY),
}


@pytest.mark.parametrize("way", PENDING)
def test_a_forgotten_update_is_noticed(way: str) -> None:
    params = parameters()
    *_, pending = value_and_grad(loss)(params, OPTIMIZER.init(params), X)
    with pytest.raises(UsageError, match=r"backward pass whose update is missing.*accumulate"):
        PENDING[way](params, pending)


def test_gradients_of_each_example_are_true_and_not_one_step() -> None:
    params = parameters()
    state = OPTIMIZER.init(params)
    _, each, pending = jax.vmap(value_and_grad(loss), (None, None, 0))(params, state, X)
    assert off_by(each, jax.vmap(jax.grad(loss), (None, 0))(params, X)) < 1e-6
    with pytest.raises(UsageError, match=r"has shape \(8,\) and must be a scalar"):
        OPTIMIZER.update(jax.tree.map(lambda leaf: leaf.mean(0), each), pending, params)


def test_what_hides_an_overflow_does_not_hide_the_verdict() -> None:
    """`nan_to_num` by hand, between the backward pass and the update."""
    params = parameters()
    state = OPTIMIZER.init(params)
    _, gradients, pending = value_and_grad(loss)(params, state, np.full_like(X, np.inf))
    updates, after = OPTIMIZER.update(jax.tree.map(jnp.nan_to_num, gradients), pending, params)
    assert last_step(after).skipped
    assert identical(optax.apply_updates(params, updates), params)
    assert identical(after.inner_state, state.inner_state)


def test_an_overflow_that_comes_after_the_backward_pass_is_skipped_too() -> None:
    params = parameters()
    _, gradients, pending = value_and_grad(loss)(params, OPTIMIZER.init(params), X)
    after = OPTIMIZER.update({**gradients, "b": gradients["b"].at[0].set(jnp.inf)}, pending, params)[1]
    assert last_step(after).skipped


def test_the_norm_and_the_guard_are_those_of_the_gradients_before_other_code() -> None:
    """A clip outside does not hide a spike, nor the amax that a policy uses."""
    params = parameters()
    norm = float(optax.tree.norm(jax.grad(loss)(params, X)))
    optimizer = loss_scaled(optax.sgd(0.1), Headroom(), guard=NormLimit(norm / 2))
    whole = optax.chain(optax.clip_by_global_norm(norm / 4), optimizer)
    _, gradients, pending = value_and_grad(loss)(params, whole.init(params), X)
    record = last_step(whole.update(gradients, pending, params)[1][-1])
    assert (record.skipped, record.spike.of) == (True, "grad_norm")
    assert record.grad_norm == pytest.approx(norm, rel=1e-6)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))
    assert record.amax == pytest.approx(largest * record.scale, rel=1e-6)


# Several backward passes for one step

PARTS = np.split(next(batches("0"))[0], 4)


def accumulated(parts: Any, params: Any, state: Any) -> Any:
    """Return the mean of the gradients of some batches, and the state, of a compiled scan."""

    @jax.jit
    def run(params: Any, state: Any, parts: Any) -> Any:
        def one(total: Any, x: Any) -> Any:
            value, *new = value_and_grad(loss)(params, state, x)
            return accumulate(total, new), value

        (gradients, pending), _ = lax.scan(one, zero_grads(params, state), parts)
        return jax.tree.map(lambda leaf: leaf / len(parts), gradients), pending

    return run(params, state, jnp.stack(parts))


@pytest.mark.parametrize("dtype", FLOATS)
def test_accumulated_gradients_are_those_of_the_whole_batch(dtype: str) -> None:
    params = parameters(dtype)
    state = OPTIMIZER.init(params)
    gradients, pending = accumulated(PARTS, params, state)
    value, whole, _ = value_and_grad(loss)(params, state, X)
    assert off_by(gradients, whole) < (1e-6 if dtype == "float32" else 1e-2)
    record = last_step(OPTIMIZER.update(gradients, pending, params)[1])
    assert record.loss == pytest.approx(float(value), rel=1e-6)
    assert record.grad_norm == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-6)


@pytest.mark.parametrize("number", [0, 2, 3])
def test_an_overflow_in_one_of_the_passes_skips_the_step(number: int) -> None:
    params = parameters()
    state = OPTIMIZER.init(params)
    spoilt = [part * np.inf if place == number else part for place, part in enumerate(PARTS)]
    gradients, pending = accumulated(spoilt, params, state)
    updates, after = OPTIMIZER.update(gradients, pending, params)
    assert identical(optax.apply_updates(params, updates), params)
    assert last_step(after).skipped
    assert last_step(after).new_scale == 2.0**9


# Trainers that call `update` themselves


@functools.cache
def trained() -> Any:
    """Return parameters after the script, of `step`."""
    params, train = parameters(), jax.jit(step(loss, OPTIMIZER))
    state = OPTIMIZER.init(params)
    for x, _ in batches():
        _, params, state = train(params, state, x)
    return params


def test_flaxs_train_state_trains_as_step_does() -> None:
    state = TrainState.create(apply_fn=None, params=parameters(), tx=OPTIMIZER)

    @jax.jit
    def train(state: Any, x: Any) -> Any:
        _, gradients, pending = value_and_grad(loss)(state.params, state.opt_state, x)
        return state.replace(opt_state=pending).apply_gradients(grads=gradients)

    for x, _ in batches():
        state = train(state, x)
    assert off_by(state.params, trained()) < 1e-5
    assert int(state.opt_state.skipped_steps) == SCRIPT.count("1")


class Layer(nnx.Module):
    def __init__(self) -> None:
        start = parameters()
        self.w, self.b = nnx.Param(start["w"]), nnx.Param(start["b"])


def test_nnxs_optimizer_trains_as_step_does() -> None:
    model = Layer()
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def of(params: Any, x: Any) -> Any:
        return loss(nnx.to_pure_dict(params), x)

    @nnx.jit
    def train(model: Any, optimizer: Any, x: Any) -> None:
        weights = nnx.state(model, nnx.Param)
        _, gradients, pending = value_and_grad(of)(weights, optimizer.opt_state, x)
        optimizer.update(model, gradients, pending=pending)

    for x, _ in batches():
        train(model, optimizer, x)
    assert off_by(nnx.to_pure_dict(nnx.state(model, nnx.Param)), trained()) < 1e-5
    assert last_step(optimizer.opt_state).index == len(SCRIPT) - 1
    with pytest.raises(UsageError, match=r"In flax\.nnx: optimizer\.update\(model, gradients, pending="):
        optimizer.update(model, nnx.state(model, nnx.Param))


# Devices

TWO = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
BY_SGD = loss_scaled(optax.sgd(0.1), POLICY, guard=NormLimit(1e6))
WHOLE, SPLIT = PartitionSpec(), PartitionSpec("data")


def both_halves(train: Any, way: str, x: Any) -> list[Any]:
    """Return what each of two devices comes to with its half of a batch."""
    params = parameters()
    args = params, BY_SGD.init(params)
    if way == "pmap":
        stacked = [jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arg) for arg in args]
        found = jax.device_get(
            jax.pmap(train, "data", devices=jax.devices("cpu")[:2])(*stacked, x.reshape(2, 4, -1))
        )
        return [jax.tree.map(lambda leaf, number=number: leaf[number], found) for number in (0, 1)]
    mapped = shard_map(train, TWO, (WHOLE, WHOLE, SPLIT), WHOLE, way == "checked")
    return [jax.jit(mapped)(*args, x)]


@pytest.mark.parametrize("way", ["pmap", "checked", "unchecked"])
@pytest.mark.parametrize("bad", [False, True])
def test_devices_average_and_decide_alike(way: str, bad: bool) -> None:
    """Only one of them overflows."""
    x = X.copy()
    x[0] *= np.inf if bad else 1.0

    def train(params: Any, state: Any, x: Any) -> Any:
        _, gradients, pending = value_and_grad(loss, axis_name="data")(params, state, x)
        return apply_gradients(BY_SGD, gradients, pending, params)

    params = parameters()
    _, expected, state = step(loss, BY_SGD)(params, BY_SGD.init(params), x)
    for found, after in both_halves(train, way, x):
        assert off_by(found, expected) < 1e-6
        assert last_step(after).skipped is bad
        assert np.allclose(last_step(after).loss, last_step(state).loss, equal_nan=True)


@pytest.mark.parametrize("way", ["pmap", "unchecked"])
def test_a_mean_by_hand_is_right_and_skips_on_all_devices(way: str) -> None:
    def train(params: Any, state: Any, x: Any) -> Any:
        _, gradients, pending = value_and_grad(loss, axis_name=())(params, state, x)
        return apply_gradients(BY_SGD, lax.pmean(gradients, "data"), pending, params)[0]

    params, spoilt = parameters(), X * np.where(np.arange(8)[:, None] == 0, np.inf, 1.0)
    for found in both_halves(train, way, X):
        assert off_by(found, step(loss, BY_SGD)(params, BY_SGD.init(params), X)[1]) < 1e-6
    for found in both_halves(train, way, spoilt):
        assert identical(found, params)


@pytest.mark.parametrize(("way", "said"), [("unchecked", "trains alone"), ("checked", "has summed")])
def test_devices_that_are_not_told_to_average_are_warned_of(way: str, said: str) -> None:
    def train(params: Any, state: Any, x: Any) -> Any:
        return jax.tree.map(jnp.sum, value_and_grad(loss)(params, state, x)[1])

    with pytest.warns(UserWarning, match=rf"{said}.*value_and_grad\(loss_fn, axis_name='data'\)"):
        both_halves(train, way, X)
