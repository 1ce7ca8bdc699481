"""Optimizers that take more than gradients, or other trees: inside of ours they train as they do alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from preamp import Dynamic, Static
from preamp.jax import apply_gradients, autocast, last_step, loss_scaled, step, value_and_grad

from .trainings import batches, identical, loss, off_by, parameters

POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)


def whole(optimizer: Any) -> Callable[..., Any]:
    train = step(loss, optimizer)
    return lambda params, state, x: train(params, state, x)[1:]


def applied(optimizer: Any) -> Callable[..., Any]:
    def train(params: Any, state: Any, x: Any) -> Any:
        _, *found = value_and_grad(loss)(params.fast, state, x)
        return apply_gradients(optimizer, *found, params)

    return train


def handed(optimizer: Any) -> Callable[..., Any]:
    def train(params: Any, state: Any, x: Any) -> Any:
        _, *found = value_and_grad(loss)(params.fast, state, x)
        updates, state = optimizer.update(*found, params)
        return optax.apply_updates(params, updates), state

    return train


@pytest.mark.parametrize("make", [whole, applied, handed])
def test_lookahead_trains_as_it_does_alone(make: Callable[..., Any]) -> None:
    alone = optax.lookahead(optax.adam(0.1), sync_period=3, slow_step_size=0.5)
    optimizer = loss_scaled(alone, POLICY)
    mine = theirs = optax.LookaheadParams.init_synced(parameters())
    my_state, their_state = optimizer.init(mine), alone.init(theirs)
    train = jax.jit(make(optimizer))
    for x, overflowed in batches():
        before = mine
        mine, my_state = train(mine, my_state, x)
        if overflowed:
            assert identical(mine, before)
        else:
            gradients = jax.grad(loss)(theirs.fast, x)
            updates, their_state = alone.update(gradients, their_state, theirs)
            theirs = optax.apply_updates(theirs, updates)
        assert off_by(mine, theirs) < 1e-5
    assert not identical(mine.fast, mine.slow)


LINE_SEARCHES = {
    "lbfgs": optax.lbfgs,
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=8, store_grad=True)
    ),
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.1),
}


@pytest.mark.parametrize(
    ("search", "max_norm", "has_aux"),
    [("lbfgs", 1e6, True), ("backtracking", None, False), ("polyak", 1e6, False)],
)
def test_line_searches_are_given_value_gradient_and_function(
    search: str, max_norm: float | None, has_aux: bool
) -> None:
    alone = LINE_SEARCHES[search]()
    optimizer = loss_scaled(alone, POLICY, max_norm)
    train = jax.jit(step(lambda p, x: (loss(p, x), x) if has_aux else loss(p, x), optimizer, has_aux=has_aux))

    @jax.jit
    def stock(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = alone.update(
            gradients, state, params, value=value, grad=gradients, value_fn=lambda p: loss(p, x)
        )
        return optax.apply_updates(params, updates), state

    mine = theirs = parameters()
    my_state, their_state = optimizer.init(mine), alone.init(theirs)
    x = next(batches())[0]
    for overflows in (False, False, True, False, False):
        before = mine, my_state.inner_state
        _, mine, my_state = train(mine, my_state, x * np.inf if overflows else x)
        if overflows:
            assert identical((mine, my_state.inner_state), before)
        else:
            theirs, their_state = stock(theirs, their_state, x)
        assert off_by(mine, theirs) < 1e-3
    assert float(loss(mine, x)) < 0.7 * float(loss(parameters(), x))


def test_gradients_of_a_line_search_do_not_underflow() -> None:
    """The gradient is 1e-9 in float16, where the smallest number is 6e-8."""
    asked: list[Any] = []

    def update(updates: Any, state: Any, params: Any, *, value_fn: Any, **_: Any) -> Any:
        asked.append(jax.grad(value_fn)(params))
        return updates, state

    @autocast(dtype=jnp.float16)
    def small(w: Any, x: Any) -> Any:
        return jnp.mean((w @ x).astype(jnp.float32)) * 1e-9

    w, x = jnp.ones((4, 4)), jnp.ones((4, 4))
    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    optimizer = loss_scaled(inner, Static(2.0**16))
    step(small, optimizer)(w, optimizer.init(w), x)
    assert not np.any(jax.grad(small)(w, x))
    assert np.allclose(asked[0], 1e-9 / 4, rtol=1e-2, atol=0.0)


def test_integers_among_the_parameters_stay() -> None:
    """Their gradients are of the dtype float0, as of `jax.grad(..., allow_int=True)`."""
    inner = optax.masked(optax.sgd(0.5), {"w": True, "table": False})
    optimizer = loss_scaled(inner, POLICY, max_norm=1e6)
    params = {"w": jnp.ones(3), "table": jnp.array([1, 2])}

    def of(params: Any, factor: Any) -> Any:
        return jnp.sum(params["w"]) * factor * params["table"][0]

    def train(params: Any, state: Any, factor: Any) -> Any:
        _, *found = value_and_grad(of)(params, state, factor)
        return apply_gradients(optimizer, *found, params), optimizer.update(*found, params)

    train = jax.jit(train)
    (after, _), (updates, _) = train(params, optimizer.init(params), 2.0)
    assert (after["w"].tolist(), after["table"].tolist()) == ([0.0] * 3, [1, 2])
    assert after["table"].dtype == jnp.int32
    assert updates["w"].tolist() == [-1.0] * 3
    (after, state), (updates, _) = train(params, optimizer.init(params), np.inf)
    assert identical(after, params)
    assert updates["w"].tolist() == [0.0] * 3
    assert last_step(state).skipped


@pytest.mark.parametrize("opaque", [True, False])
def test_an_optimizer_that_takes_no_value_or_gradient_by_name_is_not_given_any(opaque: bool) -> None:
    """`optax.contrib.sam` refuses names that it does not know, and asks for `grad_fn` where it is opaque."""
    alone = optax.contrib.sam(optax.adam(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=opaque)
    optimizer = loss_scaled(alone, POLICY)

    @jax.jit
    def train(params: Any, state: Any, x: Any) -> Any:
        extra = {"grad_fn": lambda params, _: jax.grad(loss)(params, x)} if opaque else {}
        _, *found = value_and_grad(loss)(params, state, x)
        return apply_gradients(optimizer, *found, params, **extra)

    @jax.jit
    def stock(params: Any, state: Any, x: Any) -> Any:
        extra = {"grad_fn": lambda params, _: jax.grad(loss)(params, x)} if opaque else {}
        updates, state = alone.update(jax.grad(loss)(params, x), state, params, **extra)
        return optax.apply_updates(params, updates), state

    mine = theirs = parameters()
    my_state, their_state = optimizer.init(mine), alone.init(theirs)
    for x, overflowed in batches():
        mine, my_state = train(mine, my_state, x)
        if not overflowed:
            theirs, their_state = stock(theirs, their_state, x)
    assert off_by(mine, theirs) < 1e-5
    if not opaque:
        _, after, _ = jax.jit(step(loss, optimizer))(mine, my_state, next(batches("0"))[0])
        assert not identical(after, mine)
