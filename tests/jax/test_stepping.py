"""A step under JAX's transformations and modes: compiled, ahead of time, donated, scanned, mapped, strict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from preamp import Dynamic, Static, UsageError
from preamp.jax import (
    autocast,
    last_step,
    loss_scaled,
    step,
    value_and_grad,
)

from .trainings import SCRIPT, batches, identical, loss, off_by, parameters

POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)
OPTIMIZER = loss_scaled(optax.adamw(0.05), POLICY, max_norm=1.0)
XS = np.stack([x for x, _ in batches()])


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    """Return parameters and state after the script, one compiled step after another."""
    return walk(jax.jit(step(loss, OPTIMIZER)))


def walk(train: Callable[..., Any], optimizer: Any = OPTIMIZER) -> tuple[Any, Any]:
    params = parameters()
    state = optimizer.init(params)
    for x in XS:
        _, params, state = train(params, state, x)
    return params, state


def same(after: tuple[Any, Any], trained: tuple[Any, Any]) -> None:
    """Check that programs compiled apart skipped alike, and came to the same but for rounding."""
    assert identical(after[1].policy_state, trained[1].policy_state)
    assert (int(after[1].skipped_steps), int(after[1].steps)) == (SCRIPT.count("1"), len(SCRIPT))
    assert off_by(after[0], trained[0]) < 1e-5
    assert off_by(after[1].inner_state, trained[1].inner_state) < 1e-5


@pytest.fixture(params=["strict promotion", "64 bits", "NaNs are errors", "leaks are errors"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    option, value, before = {
        "strict promotion": ("jax_numpy_dtype_promotion", "strict", "standard"),
        "64 bits": ("jax_enable_x64", True, False),
        "NaNs are errors": ("jax_debug_nans", True, False),
        "leaks are errors": ("jax_check_tracer_leaks", True, False),
    }[request.param]
    jax.config.update(option, value)
    yield request.param
    jax.config.update(option, before)


def test_a_step_in_every_mode_of_jax(mode: str) -> None:
    inner = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.05, momentum=0.9))
    optimizer = loss_scaled(inner, POLICY, max_norm=1.0)
    dtype = "bfloat16" if mode == "strict promotion" else "float32"
    params = parameters(dtype)
    state, train = optimizer.init(params), jax.jit(step(loss, optimizer))
    for x, overflowed in batches():
        before = params
        _, params, state = train(params, state, np.where(np.isfinite(x), x, np.float32(1e30)))
        assert identical(params, before) is overflowed
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32", "bool"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    assert train._cache_size() == 1


def test_a_step_that_is_not_compiled(trained: Any) -> None:
    same(walk(step(loss, OPTIMIZER)), trained)


def test_a_step_compiled_ahead_of_time(trained: Any) -> None:
    params = parameters()
    compiled = jax.jit(step(loss, OPTIMIZER)).lower(params, OPTIMIZER.init(params), XS[0]).compile()
    same(walk(compiled), trained)


def test_a_step_whose_arguments_are_donated() -> None:
    optimizer = loss_scaled(optax.adamw(0.05), Static(8.0))
    kept = walk(jax.jit(step(loss, optimizer)), optimizer)
    donated = walk(jax.jit(step(loss, optimizer), donate_argnums=(0, 1), keep_unused=True), optimizer)
    assert identical(kept, donated)


def test_a_scan_over_steps(trained: Any) -> None:
    train = step(loss, OPTIMIZER)

    @jax.jit
    def run(params: Any, state: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            value, *carry = train(*carry, x)
            return tuple(carry), (value, carry[1].finite)

        return jax.lax.scan(body, (params, state), XS)

    params = parameters()
    after, (_, finite) = run(params, OPTIMIZER.init(params))
    same(after, trained)
    assert "".join("10"[int(one)] for one in finite) == SCRIPT


def test_an_ensemble_in_which_each_member_skips_for_itself(trained: Any) -> None:
    params = parameters()
    members = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), (params, OPTIMIZER.init(params)))
    clean = np.nan_to_num(XS, nan=0.5, posinf=0.5, neginf=0.5)
    train = jax.jit(jax.vmap(step(loss, OPTIMIZER)))
    for number, x in enumerate(XS):
        _, *members = train(*members, np.stack([x, clean[number], x]))
    first, second, third = (jax.tree.map(lambda leaf, i=i: leaf[i], tuple(members)) for i in range(3))
    same(first, trained)
    assert identical(first, third)
    assert int(second[1].skipped_steps) == 0
    assert last_step(second[1]).new_scale == 2.0**15


def test_aux_and_arguments_by_name_go_through() -> None:
    def with_aux(params: Any, x: Any, *, train: bool) -> Any:
        return loss(params, x), {"mean": x.mean(), "train": jnp.int32(train)}

    params = parameters()
    train = jax.jit(step(with_aux, OPTIMIZER, has_aux=True), static_argnames="train")
    (value, aux), _, state = train(params, OPTIMIZER.init(params), x=XS[0], train=True)
    assert float(value) == pytest.approx(float(loss(params, XS[0])))
    assert int(aux["train"]) == 1
    assert not last_step(state).skipped


def test_an_autocast_loss_in_float16_trains_where_gradients_would_vanish() -> None:
    """The gradient of 1e-5 * w is far below what a float16 product of two such numbers can hold."""

    def small(params: Any, x: Any) -> Any:
        hidden = (x @ params["first"]) @ params["second"]
        return jnp.mean(hidden.astype(jnp.float32)) * 1e-7

    params = {"first": jnp.full((4, 4), 1e-2), "second": jnp.full((4, 1), 1e-2)}
    low, x = autocast(small, jnp.float16), jnp.full((8, 4), 1e-1)
    vanished = jax.grad(low)(params, x)
    optimizer = loss_scaled(optax.sgd(1.0), Static(2.0**16))
    _, gradients, _ = value_and_grad(low)(params, optimizer.init(params), x)
    exact = jax.grad(small)(params, x)
    assert not np.any(vanished["first"])
    assert np.allclose(gradients["first"], exact["first"], rtol=1e-2, atol=0.0)


@pytest.mark.parametrize(
    ("where", "wrap"),
    [("step", jax.jit), ("loss_scaled", lambda f: jax.vmap(f, (None, None, 0), axis_name="d"))],
)
def test_an_axis_that_is_not_bound_is_named(where: str, wrap: Any) -> None:
    axis = {"axis_name": "data"}
    optimizer = loss_scaled(optax.sgd(0.1), **(axis if where == "loss_scaled" else {}))
    train = step(lambda w, x: (w * x).sum(), optimizer, **(axis if where == "step" else {}))
    params = jnp.ones(2)
    with pytest.raises(
        UsageError, match=r"axis_name='data' is not the name of an axis here.* Write jax\.shard_map"
    ):
        wrap(train)(params, optimizer.init(params), jnp.ones((4, 2)))
