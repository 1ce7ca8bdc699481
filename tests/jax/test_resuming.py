"""A state to resume from that is out of bounds, or that nothing can resume from."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from preamp import Dynamic, Headroom, PolicyError, Static, UsageError, dialects
from preamp.jax import apply_gradients, check_exhausted, last_step, loss_scaled, step, value_and_grad

RULE = Dynamic(init_scale=8.0, min_scale=4.0, max_scale=64.0)


def state_with(scale: float = 8.0, good: float = 0.0, **counts: int) -> Any:
    """Return a state after one step, as a checkpoint with these numbers is restored."""
    optimizer = loss_scaled(optax.sgd(0.25), RULE)
    params = jnp.ones(2)
    _, _, state = step(lambda w: w.sum(), optimizer)(params, optimizer.init(params))
    policy_state = state.policy_state._replace(scale=jnp.float32(scale), good=jnp.float32(good))
    return state._replace(
        policy_state=policy_state, **{name: jnp.int32(count) for name, count in counts.items()}
    )


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (1.0, r"1\.0 is below min_scale=4\.0 of Dynamic.* Write policy=Dynamic\(min_scale=1\.0\)"),
        (128.0, r"128\.0 is above max_scale=64\.0 of Dynamic.* Write policy=Dynamic\(max_scale=128\.0\)"),
    ],
)
def test_a_scale_out_of_bounds_warns(scale: float, said: str) -> None:
    with pytest.warns(UserWarning, match=said + r".*restart_loss_scale\(opt_state, policy\)"):
        check_exhausted(state_with(scale), RULE)


@pytest.mark.parametrize("scale", [4.0, 8.0, 64.0])
def test_a_scale_in_bounds_says_nothing(scale: float) -> None:
    with warnings.catch_warnings(action="error"):
        check_exhausted(state_with(scale), RULE)


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -8.0])
def test_a_scale_that_cannot_work_is_refused(scale: float) -> None:
    for check in (last_step, lambda state: check_exhausted(state, RULE)):
        with pytest.raises(PolicyError, match="Write scale="):
            check(state_with(scale))


@pytest.mark.parametrize("numbers", [{"good": -1.0}, {"steps": -1}, {"skipped_steps": -1}], ids=str)
def test_a_count_below_0_is_refused(numbers: Any) -> None:
    with pytest.raises(PolicyError, match="-1"):
        check_exhausted(state_with(**numbers), RULE)


@pytest.mark.parametrize(("made_by", "compiled"), [(Static(8.0), False), (dialects.FLAX, True)], ids=repr)
def test_a_static_policy_keeps_its_own_scale_whatever_was_saved(made_by: Any, compiled: bool) -> None:
    params = jnp.ones(2)
    inner, policy = optax.sgd(0.25), Static(128.0)
    saved = loss_scaled(inner, made_by).init(params)
    train = step(lambda w: w.sum(), loss_scaled(inner, policy))
    train = jax.jit(train) if compiled else train
    _, params, state = train(params, saved)
    assert last_step(state).scale == float(saved.policy_state.scale)  # what was in the loss
    _, params, state = train(params, state)
    assert (last_step(state).scale, last_step(state).new_scale) == (128.0, 128.0)
    assert params.tolist() == [0.5, 0.5]  # both steps were unscaled with the scale in their loss
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, saved)
    assert not state.policy_state.scale.weak_type


def test_another_policy_with_the_same_state_continues_at_the_scale_that_was_saved() -> None:
    saved = loss_scaled(optax.sgd(0.25), Static(8.0)).init(jnp.ones(2))
    _, _, state = step(lambda w: w.sum(), loss_scaled(optax.sgd(0.25), Dynamic()))(jnp.ones(2), saved)
    assert last_step(state).new_scale == 8.0


def cast(state: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), state)


@pytest.mark.parametrize(
    ("dtype", "policy"), [(jnp.bfloat16, RULE), (jnp.int32, Headroom()), (jnp.bool_, Static(8.0))], ids=repr
)
def test_a_state_that_was_cast_is_refused(dtype: Any, policy: Any) -> None:
    optimizer = loss_scaled(optax.sgd(0.25), policy)
    state = optimizer.init(jnp.ones(2))
    only = state._replace(policy_state=cast(state.policy_state, dtype))
    for wrong in (cast(state, dtype), only):
        for ask in (
            lambda state: check_exhausted(state, policy),
            lambda state: step(lambda w: w.sum(), optimizer)(jnp.ones(2), state),
            lambda state: jax.jit(step(lambda w: w.sum(), optimizer))(jnp.ones(2), state),
        ):
            name = jnp.dtype(dtype).name
            with pytest.raises(UsageError, match=rf"opt_state\.policy_state\.scale has dtype {name}.* Write"):
                ask(wrong)
        restored = jax.tree.map(lambda old, new: old.astype(new.dtype), wrong, optimizer.init(jnp.ones(2)))
        step(lambda w: w.sum(), optimizer)(jnp.ones(2), restored)


@pytest.mark.parametrize(
    ("name", "dtype"), [("steps", jnp.float32), ("skipped_steps", jnp.int8), ("loss", jnp.float16)]
)
def test_a_field_of_another_dtype_is_named(name: str, dtype: Any) -> None:
    state = state_with()
    with pytest.raises(UsageError, match=rf"opt_state\.{name} has dtype {jnp.dtype(dtype).name}"):
        check_exhausted(state._replace(**{name: getattr(state, name).astype(dtype)}), RULE)


def test_a_state_is_checked_with_its_own_kind_of_policy() -> None:
    with pytest.raises(
        UsageError, match=r"is not that of Headroom\(\)\. Write check_exhausted.*loss_scaled was given"
    ):
        check_exhausted(state_with(), Headroom())


def test_a_line_search_without_value_fn_is_told_what_to_write() -> None:
    optimizer, params = loss_scaled(optax.lbfgs()), jnp.ones(2)
    _, *found = value_and_grad(lambda w: (w**2).sum())(params, optimizer.init(params))
    for told in ({}, {"value": 2.0}):
        with pytest.raises(
            UsageError, match=r"'value_fn'\. Write step\(loss_fn, optimizer\).*value_fn=lambda"
        ):
            apply_gradients(optimizer, *found, params, **told)
