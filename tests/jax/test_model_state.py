"""A batch norm after an overflow in forward: a skipped step returns its statistics as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from preamp import Dynamic, UsageError
from preamp.jax import LossScale, ScaledGradients, loss_scaled, scaled_value_and_grad, step, value_and_grad

from .trainings import identical

OPTIMIZER = loss_scaled(optax.adam(0.05), Dynamic(init_scale=2.0**10))
CLEAN = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
OVERFLOWS = np.where(np.arange(4) == 1, np.float32(3e38), CLEAN)


def of_linen() -> tuple[Any, Any, Callable[..., Any]]:
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x: Any) -> Any:
            return flax.linen.Dense(1)(flax.linen.BatchNorm(use_running_average=False)(x))

    model = Model()
    variables = model.init(jax.random.key(0), CLEAN)

    def loss(params: Any, stats: Any, x: Any) -> Any:
        out, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jnp.mean(out**2), new["batch_stats"]

    return variables["params"], variables["batch_stats"], loss


def of_linen_with_more() -> tuple[Any, Any, Callable[..., Any]]:
    """Return all collections in aux, beside logits and a metric."""
    params, stats, loss = of_linen()

    def with_more(params: Any, stats: Any, x: Any) -> Any:
        value, new = loss(params, stats, x)
        return value, {"logits": x * value, "updates": {"batch_stats": new}, "accuracy": value}

    return params, stats, with_more


def of_nnx() -> tuple[Any, Any, Callable[..., Any]]:
    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.norm, self.layer = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.layer(self.norm(x))

    graph, params, stats = nnx.split(Model(), nnx.Param, nnx.BatchStat)

    def loss(params: Any, stats: Any, x: Any) -> Any:
        model = nnx.merge(graph, params, stats, copy=True)
        return jnp.mean(model(x) ** 2), nnx.state(model, nnx.BatchStat)

    return params, stats, loss


def of_equinox() -> tuple[Any, Any, Callable[..., Any]]:
    class Model(equinox.Module):
        norm: equinox.nn.BatchNorm
        layer: equinox.nn.Linear

        def __init__(self) -> None:
            self.norm = equinox.nn.BatchNorm(4, "batch", mode="batch")
            self.layer = equinox.nn.Linear(4, 1, key=jax.random.key(0))

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.norm(x, state)
            return self.layer(x), state

    model, state = equinox.nn.make_with_state(Model)()
    arrays, static = equinox.partition(model, equinox.is_inexact_array)

    def loss(arrays: Any, state: Any, x: Any) -> Any:
        model = equinox.combine(arrays, static)
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean(out**2), state

    return arrays, state, loss


MODELS = {"flax": of_linen, "flax, more in aux": of_linen_with_more, "nnx": of_nnx, "equinox": of_equinox}


def stats_in(aux: Any) -> Any:
    return aux["updates"]["batch_stats"] if isinstance(aux, dict) and "updates" in aux else aux


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_skipped_step_returns_the_statistics_as_they_were(model: str, compiled: bool) -> None:
    params, stats, loss = MODELS[model]()
    plain = jax.jit(step(loss, OPTIMIZER, has_aux=True, keep_state=False))
    train = step(loss, OPTIMIZER, has_aux=True)
    train = jax.jit(train) if compiled else train
    state = OPTIMIZER.init(params)

    (_, aux), params, state = train(params, state, stats, CLEAN)
    moved = stats_in(aux)
    assert jax.tree.structure(moved) == jax.tree.structure(stats)
    assert not identical(moved, stats)  # a step that is taken returns the new ones

    (value, aux), after, state = train(params, state, moved, OVERFLOWS)
    assert not np.isfinite(value)
    assert identical(after, params)
    assert identical(stats_in(aux), moved)
    (_, spoilt), _, _ = plain(params, state, moved, OVERFLOWS)
    assert not all(np.isfinite(leaf).all() for leaf in map(np.asarray, jax.tree.leaves(spoilt)))

    (value, aux), _, state = train(after, state, stats_in(aux), CLEAN)
    assert np.isfinite(value)
    assert int(state.skipped_steps) == 1


def test_what_is_not_state_comes_back_as_it_was_computed() -> None:
    """Logits of the shape of labels, and tuples of arrays, are not taken for new state of an argument."""

    def loss(w: Any, x: Any, batch: Any) -> Any:
        return jnp.sum(w * x), (x * 2.0, (x * 3.0, x * 4.0))

    w, x = jnp.ones(2), jnp.array([1.0, jnp.inf])
    (_, (double, pair)), _, state = step(loss, OPTIMIZER, has_aux=True)(w, OPTIMIZER.init(w), x, (x, x))
    assert not state.finite
    assert (double.tolist(), pair[0].tolist()) == ([2.0, np.inf], [3.0, np.inf])


def test_state_that_could_be_that_of_two_arguments_is_refused() -> None:
    def loss(w: Any, first: Any, second: Any) -> Any:
        return jnp.sum(w), {"mean": first["mean"] + second["mean"]}

    w, stats = jnp.ones(2), {"mean": jnp.ones(3)}
    train = step(loss, OPTIMIZER, has_aux=True)
    with pytest.raises(UsageError, match=r"new state of args\[0\] and of args\[1\].*keep_state=False"):
        train(w, OPTIMIZER.init(w), stats, {"mean": jnp.zeros(3)})
    whole = step(loss, OPTIMIZER, has_aux=True, keep_state=False)
    (_, aux), _, _ = whole(w, OPTIMIZER.init(w), stats, stats)
    assert aux["mean"].tolist() == [2.0, 2.0, 2.0]


def test_keep_state_is_held_to_its_word() -> None:
    w = jnp.ones(2)
    train = step(lambda w, x: (jnp.sum(w * x), x), OPTIMIZER, has_aux=True, keep_state=True)
    with pytest.raises(UsageError, match="nothing in aux has the names and shapes of an argument"):
        train(w, OPTIMIZER.init(w), 1.0)
    with pytest.raises(UsageError, match="without has_aux=True"):
        step(jnp.sum, OPTIMIZER, keep_state=True)
    with pytest.raises(UsageError, match="keep_state='yes' is not a boolean"):
        step(jnp.sum, OPTIMIZER, has_aux=True, keep_state="yes")  # type: ignore[arg-type]


# Modules of NNX as parameters


class Normalized(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.linear(x))


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.linear(x))


@pytest.mark.parametrize(("kind", "named"), [(Normalized, "BatchStat norm.mean"), (Dropped, "drop.rngs")])
def test_a_module_whose_state_would_be_lost_is_refused_as_parameters(kind: Any, named: str) -> None:
    """JAX differentiates a copy: running statistics would never move, and every dropout mask be the same."""

    def loss_of(model: Any, x: Any) -> Any:
        return jnp.mean((model(x) - 1.0) ** 2)

    module, x = kind(nnx.Rngs(0)), jnp.ones((8, 4))
    optimizer = loss_scaled(optax.sgd(0.1))
    state = optimizer.init(nnx.state(module, nnx.Param))
    before = jax.tree.map(jnp.copy, nnx.state(module, nnx.BatchStat))
    for call in (
        lambda: optimizer.init(module),
        lambda: step(loss_of, optimizer)(module, state, x),
        lambda: nnx.jit(step(loss_of, optimizer))(module, state, x),
        lambda: scaled_value_and_grad(loss_of)(state, module, x),
        lambda: value_and_grad(loss_of)(LossScale(), {"model": module}["model"], x),
    ):
        with pytest.raises(UsageError, match=rf"{named}.*nnx\.split\(model, nnx\.Param, \.\.\.\)"):
            call()
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.state(module, nnx.BatchStat)))


def test_a_module_of_parameters_alone_is_trained() -> None:
    module, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
    optimizer = loss_scaled(optax.sgd(0.1))
    train = nnx.jit(step(lambda model, x: jnp.mean((model(x) - 1.0) ** 2), optimizer))
    values, state = [], optimizer.init(module)
    for _ in range(3):
        value, module, state = train(module, state, x)
        values.append(float(value))
    assert values == sorted(values, reverse=True) != [values[0]] * 3


@pytest.mark.parametrize("scale", [0.0, -2.0, math.inf, math.nan])
def test_a_scale_that_no_loss_can_have_is_refused(scale: float) -> None:
    with pytest.raises(UsageError, match="positive and finite"):
        ScaledGradients(jnp.ones(2), scale)
