"""A batch norm after an overflow in forward: a skipped step returns its statistics as they were."""

from __future__ import annotations

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
from preamp.jax import (
    autocast,
    loss_scaled,
    step,
    value_and_grad,
)

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
    """Return logits and a metric beside the state."""
    params, stats, loss = of_linen()

    def with_more(params: Any, stats: Any, x: Any) -> Any:
        value, new = loss(params, stats, x)
        return value, (new, {"logits": x * value, "accuracy": value})

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


@pytest.mark.parametrize(
    ("model", "compiled"), [("flax", False), ("flax, more in aux", True), ("nnx", True), ("equinox", True)]
)
def test_a_skipped_step_returns_the_statistics_as_they_were(model: str, compiled: bool) -> None:
    params, stats, loss = MODELS[model]()
    more = model == "flax, more in aux"
    train: Any = step(loss, OPTIMIZER, has_state=True, has_aux=more)
    train = jax.jit(train) if compiled else train
    state = OPTIMIZER.init(params)

    (_, moved), params, state = train(params, state, stats, CLEAN)
    moved, aux = moved if more else (moved, None)
    assert jax.tree.structure(moved) == jax.tree.structure(stats)
    assert not identical(moved, stats)  # a step that is taken returns the new ones

    (value, after), kept, state = train(params, state, moved, OVERFLOWS)
    after, aux = after if more else (after, aux)
    assert not np.isfinite(value)
    assert identical(kept, params)
    assert identical(after, moved)
    assert aux is None or not np.isfinite(aux["logits"]).all()  # as it was computed

    (value, _), _, state = train(kept, state, after, CLEAN)
    assert np.isfinite(value)
    assert int(state.skipped_steps) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_state_that_comes_back_short_is_kept_as_long_as_it_was(dtype: str) -> None:
    def loss(w: Any, state: Any, x: Any) -> Any:
        return jnp.sum(w * x), [(state[0][0] * x).astype(dtype)]

    w, old = jnp.ones(()), [(jnp.float32(70000.0),)]
    with pytest.raises(UsageError, match=r"structure.*Return the new state as it came"):
        step(loss, OPTIMIZER, has_state=True)(w, OPTIMIZER.init(w), old, 1.0)

    def returned(w: Any, state: Any, x: Any) -> Any:
        value, (new,) = loss(w, state, x)
        return value, [(new,)]

    (_, new), _, _ = step(returned, OPTIMIZER, has_state=True)(w, OPTIMIZER.init(w), old, jnp.inf)
    assert identical(new, old)


def test_a_state_that_is_not_given_or_changes_its_shape_is_refused() -> None:
    w = jnp.ones(2)
    state = OPTIMIZER.init(w)
    with pytest.raises(UsageError, match=r"was given no state. Write step\(params, opt_state, state"):
        step(lambda w: (jnp.sum(w), 0.0), OPTIMIZER, has_state=True)(w, state)
    longer = step(lambda w, stats: (jnp.sum(w), {"mean": jnp.ones(4)}), OPTIMIZER, has_state=True)
    with pytest.raises(UsageError, match=r"state\['mean'\] is returned in the shape \(4,\), and was \(3,\)"):
        longer(w, state, {"mean": jnp.ones(3)})


def closed_over(aux_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a step in the manner of Flax's examples, whose loss finds the old statistics outside."""

    def train(w: Any, stats: Any, state: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            new = jax.tree.map(lambda leaf: leaf * 0.9 + jnp.mean(x * w, 0), stats)
            return jnp.mean(x * w), aux_of(new)

        return step(loss, OPTIMIZER, has_aux=True)(w, state)

    return train


OLD4 = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
VARIABLE = nnx.BatchStat(jnp.zeros(4))
LOST: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "Flax's collection": (
        {"n": {"average": jnp.zeros(4)}},
        lambda new: {"batch_stats": new, "accuracy": 1.0},
    ),
    "a layer of Flax": ({"BatchNorm_0": OLD4}, lambda new: new),
    "a layer of Haiku": (
        {"mean_ema": {"hidden": jnp.zeros(4), "average": jnp.zeros(4), "counter": jnp.zeros((), int)}},
        lambda new: (new, 1.0),
    ),
    "variables of NNX": ({"average": VARIABLE}, lambda new: new),
    "a state of Equinox": (
        equinox.nn.make_with_state(equinox.nn.BatchNorm)(4, "b", mode="ema")[1],
        lambda new: [new],
    ),
}


@pytest.mark.parametrize("where", LOST)
def test_statistics_in_aux_are_warned_of(where: str) -> None:
    stats, aux_of = LOST[where]
    train, w = closed_over(aux_of), jnp.ones(4)
    with pytest.warns(UserWarning, match=r"(?s)aux.*running statistics.*has_state=True"):
        jax.jit(train)(w, stats, OPTIMIZER.init(w), OVERFLOWS)


@pytest.mark.parametrize(
    "aux",
    [{"mean": 1.0, "var": 2.0}, {"mean": CLEAN[0], "var": CLEAN[0, :2]}, {"mean": CLEAN}, {"batch_stats": 3}],
    ids=["scalars", "other shapes", "no variance", "integers"],
)
def test_what_only_resembles_statistics_is_returned(aux: Any) -> None:
    w = jnp.ones(2)
    (_, after), _, _ = step(lambda w: (jnp.sum(w), aux), OPTIMIZER, has_aux=True)(w, OPTIMIZER.init(w))
    assert identical(jax.tree.map(jnp.asarray, after), jax.tree.map(jnp.asarray, aux))


def test_statistics_that_are_returned_as_they_were_are_no_new_state() -> None:
    w, batch = jnp.ones(2), {"x": jnp.ones(2), "batch_stats": OLD4}
    loss = lambda w, batch: (jnp.sum(w * batch["x"]), {"batch_stats": batch["batch_stats"]})  # noqa: E731
    (_, aux), _, _ = jax.jit(step(autocast(loss), OPTIMIZER, has_aux=True))(w, OPTIMIZER.init(w), batch)
    assert identical(aux["batch_stats"], OLD4)


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
        lambda: value_and_grad(loss_of)(module, state, x),
    ):
        with pytest.raises(UsageError, match=rf"{named}.*nnx\.split\(model, nnx\.Param, \.\.\.\)"):
            call()
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.state(module, nnx.BatchStat)))


class Both(Dropped):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(super().__call__(x))


def test_the_state_of_a_split_module_is_kept() -> None:
    """The program that the error of a whole module names."""
    graphdef, params, rest = nnx.split(Both(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        return jnp.mean((model(x) - 1.0) ** 2), nnx.state(model, nnx.Not(nnx.Param))

    train = jax.jit(step(loss, OPTIMIZER, has_state=True))
    state = OPTIMIZER.init(params)
    (_, moved), params, state = train(params, state, rest, CLEAN)
    assert not identical(moved["norm"], rest["norm"])
    (_, after), kept, state = train(params, state, moved, OVERFLOWS)
    assert int(state.skipped_steps) == 1
    assert identical((after, kept), (moved, params))


def test_a_module_of_parameters_alone_is_trained() -> None:
    module, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
    optimizer = loss_scaled(optax.sgd(0.1))
    train = nnx.jit(step(lambda model, x: jnp.mean((model(x) - 1.0) ** 2), optimizer))
    values, state = [], optimizer.init(module)
    for _ in range(3):
        value, module, state = train(module, state, x)
        values.append(float(value))
    assert values == sorted(values, reverse=True) != [values[0]] * 3
