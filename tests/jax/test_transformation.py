"""`loss_scaled` around optimizers of every kind: a skip leaves every bit, other steps are those of optax."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

from preamp import Dynamic, ScaleExhausted, Static, Trace
from preamp.jax import (
    LossScaledState,
    apply_gradients,
    check_exhausted,
    last_step,
    loss_scaled,
    restart_loss_scale,
    step,
    value_and_grad,
)

from .agreement import slow
from .trainings import SCRIPT, batches, handed, identical, loss, off_by, parameters

POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)
RATE = 0.05
INNER: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(RATE),
    "adamw": lambda: optax.adamw(RATE, weight_decay=0.1),
    "frozen": lambda: optax.masked(optax.adam(RATE), {"w": True, "b": False}),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(RATE, 0.01, 5)),
    "lion": lambda: optax.lion(RATE),
    "micro-steps": lambda: optax.MultiSteps(optax.adam(RATE), 2),
    "parts": lambda: optax.multi_transform(
        {"fast": optax.adam(RATE), "slow": optax.sgd(RATE, momentum=0.9)}, {"w": "fast", "b": "slow"}
    ),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(RATE, warmup_steps=2),
    "skipping": lambda: optax.apply_if_finite(optax.sgd(RATE), 3),
}
REPEATS = ("adamw", "frozen", "hyperparameters", "lion", "skipping")
each_inner = pytest.mark.parametrize(
    "inner", [*slow(*REPEATS), *(name for name in INNER if name not in REPEATS)]
)


def whole(optimizer: Any) -> Callable[..., Any]:
    return step(loss, optimizer)


def in_parts(optimizer: Any) -> Callable[..., Any]:
    """Return a step that applies updates itself, as flax's `TrainState` does."""

    def train(params: Any, state: Any, x: Any) -> Any:
        value, gradients, state = value_and_grad(loss)(params, state, x)
        updates, state = optimizer.update(gradients, state, params, value=value)
        return value, optax.apply_updates(params, updates), state

    return train


def walk(inner: str, dtype: str, make: Callable[[Any], Any]) -> None:
    """Walk the script: a skip leaves parameters and inner state, and each other step moves the parameters."""
    optimizer = loss_scaled(INNER[inner](), POLICY, max_norm=1.0)
    params = parameters(dtype)
    state = optimizer.init(params)
    train = jax.jit(make(optimizer))
    moved = False
    for x, overflowed in batches():
        before, inner_before = params, state.inner_state
        _, params, state = train(params, state, x)
        assert bool(state.finite) is not overflowed
        if overflowed:
            assert identical(params, before)
            assert identical(state.inner_state, inner_before)
        else:
            moved = moved or not identical(params, before)
    assert moved
    assert train._cache_size() == 1
    assert (int(state.steps), int(state.skipped_steps)) == (len(SCRIPT), SCRIPT.count("1"))


@each_inner
def test_a_skip_leaves_every_bit(inner: str) -> None:
    walk(inner, "float32", whole)


@pytest.mark.parametrize("inner", ["adamw", "micro-steps"])
def test_a_skip_leaves_every_bit_where_updates_are_applied_outside(inner: str) -> None:
    walk(inner, "float32", in_parts)


@pytest.mark.parametrize(
    ("inner", "dtype"), [("adafactor", "float16"), ("adamw", "bfloat16"), ("micro-steps", "bfloat16")]
)
def test_short_parameters_are_trained_by_an_optimizer_of_float32(inner: str, dtype: str) -> None:
    walk(inner, dtype, whole)
    optimizer = loss_scaled(INNER[inner]())
    state = jax.eval_shape(optimizer.init, parameters(dtype)).inner_state
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} <= {"float32", "int32", "bool"}


def test_a_state_keeps_the_dtypes_it_was_given() -> None:
    optimizer = loss_scaled(optax.adam(RATE))
    params = parameters("bfloat16")
    state = optimizer.init(params)
    short = jax.tree.map(lambda x: x.astype("bfloat16") if x.dtype == "float32" else x, state.inner_state)
    _, _, after = jax.jit(step(loss, optimizer))(params, state._replace(inner_state=short), jnp.ones((8, 6)))
    assert jax.tree.map(lambda x: x.dtype, after.inner_state) == jax.tree.map(lambda x: x.dtype, short)


@pytest.mark.parametrize(
    ("inner", "max_norm"), [("adamw", None), ("hyperparameters", 1e6), ("lion", 0.1), ("micro-steps", 0.1)]
)
def test_clean_steps_are_those_of_optax(inner: str, max_norm: float | None) -> None:
    plain = INNER[inner]()
    if max_norm is not None:
        plain = optax.chain(optax.clip_by_global_norm(max_norm), plain)

    @jax.jit
    def stock(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = plain.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    optimizer = loss_scaled(INNER[inner](), POLICY, max_norm)
    ours = jax.jit(step(loss, optimizer))
    mine = theirs = parameters()
    my_state, their_state = optimizer.init(mine), plain.init(theirs)
    for x, overflowed in batches():
        my_value, mine, my_state = ours(mine, my_state, x)
        if not overflowed:
            value, theirs, their_state = stock(theirs, their_state, x)
            assert off_by(my_value, value) < 2e-6
        assert off_by(mine, theirs) < 2e-6


@pytest.mark.parametrize("scale", [2.0**-14, 2.0**30])
def test_without_rounding_in_the_optimizer_steps_are_those_of_optax_to_the_last_bit(scale: float) -> None:
    gradients = {
        "a": jnp.array([0.1, -0.3]),
        "b": jnp.array([[0.7]]),
        "none": None,
        "empty": jnp.zeros((0, 2)),
    }
    params = jax.tree.map(jnp.ones_like, gradients)
    optimizer, plain = loss_scaled(optax.sgd(1.0), Static(scale)), optax.sgd(1.0)
    found = handed(jax.tree.map(lambda leaf: leaf * scale, gradients), optimizer.init(params))
    updates, _ = optimizer.update(*found, params)
    expected, _ = plain.update(gradients, plain.init(params), params)
    assert identical(updates, expected)
    mine, _ = apply_gradients(optimizer, *found, params)
    assert identical(mine, optax.apply_updates(params, expected))


def test_updates_of_a_skip_are_negative_zeros_which_leave_the_sign_of_a_zero() -> None:
    optimizer = loss_scaled(optax.sgd(1.0))
    params = jnp.array([-0.0, 0.0, 1.0], jnp.bfloat16)
    updates, _ = optimizer.update(*handed(jnp.full_like(params, jnp.inf), optimizer.init(params)), params)
    assert jnp.all(jnp.signbit(updates))
    assert not jnp.any(updates)
    assert identical(optax.apply_updates(params, updates), params)


def test_updates_of_a_skip_leave_the_signs_of_complex_zeros() -> None:
    optimizer = loss_scaled(optax.sgd(1.0))
    params = jnp.array([complex(-0.0, -0.0), complex(0.0, -0.0)], jnp.complex64)
    updates, _ = optimizer.update(*handed(jnp.full_like(params, jnp.inf), optimizer.init(params)), params)
    assert identical(optax.apply_updates(params, updates), params)


def test_the_norm_is_that_before_clipping_of_true_gradients_in_float32() -> None:
    optimizer = loss_scaled(optax.sgd(1.0), Static(4.0), max_norm=1.0)
    state = optimizer.init(jnp.zeros(2))
    assert (float(state.grad_norm), last_step(state)) == (0.0, None)
    for dtype in (jnp.float16, jnp.float32):
        updates, after = optimizer.update(*handed(jnp.array([300.0, -400.0], dtype) * 4, state))
        assert float(after.grad_norm) == 500.0
        assert np.allclose(updates, [-0.6, 0.8], rtol=1e-6)
        assert updates.dtype == jnp.float32


def test_a_scale_that_has_reached_zero_skips_and_never_divides() -> None:
    """Without a floor it can; the gradients are lost then, and NaN if unscaled."""
    optimizer = loss_scaled(optax.sgd(1.0))
    state = optimizer.init(jnp.ones(2))
    state = state._replace(policy_state=state.policy_state._replace(scale=jnp.float32(0.0)))
    updates, state = optimizer.update(*handed(jnp.zeros(2), state))
    assert updates.tolist() == [0.0, 0.0]
    assert not state.finite
    assert not np.isfinite(state.grad_norm)


def test_what_each_step_came_to_is_in_the_state() -> None:
    optimizer = loss_scaled(optax.sgd(RATE), POLICY)
    params, trace = parameters(), Trace()
    state, train = optimizer.init(params), jax.jit(step(loss, optimizer))
    for x, _ in batches():
        value, params, state = train(params, state, x)
        trace(last_step(state)._replace(loss=float(value)))
    assert [record.index for record in trace] == list(range(len(SCRIPT)))
    assert "".join("01"[record.skipped] for record in trace) == SCRIPT
    assert [record.scale for record in trace[1:]] == [record.new_scale for record in trace[:-1]]
    assert trace[0].scale == 2.0**10
    assert [record.new_scale for record in trace[:4]] == [2.0**10, 2.0**11, 2.0**10, 2.0**10]
    assert all((record.grad_norm is None) == record.skipped for record in trace)


GIVES_UP = Dynamic(init_scale=8.0, growth_interval=1, min_scale=4.0, at_floor="raise")
GAVE_UP_AT_4 = r"overflowed at a loss scale of 4 \(2 overflows counted\)"


def test_check_exhausted_names_the_scale_at_which_the_policy_gave_up_not_the_latest() -> None:
    optimizer, params = loss_scaled(optax.sgd(RATE), GIVES_UP), parameters()
    state, train = optimizer.init(params), jax.jit(step(loss, optimizer))
    for x, _ in batches("11000"):
        _, params, state = train(params, state, x)
    assert float(state.policy_state.scale) == 32.0
    with pytest.raises(ScaleExhausted, match=GAVE_UP_AT_4) as caught:
        check_exhausted(state, GIVES_UP)
    assert (caught.value.scale, caught.value.overflows) == (4.0, 2)


def test_the_first_exhaustion_is_kept_until_the_loss_scale_is_restarted() -> None:
    optimizer, params = loss_scaled(optax.sgd(RATE), GIVES_UP), parameters()
    state, train = optimizer.init(params), jax.jit(step(loss, optimizer))
    for x, _ in batches("110001111"):
        _, params, state = train(params, state, x)
    with pytest.raises(ScaleExhausted, match=GAVE_UP_AT_4):
        check_exhausted(state, GIVES_UP)
    for again in (restart_loss_scale(state, GIVES_UP), optimizer.init(params)):
        check_exhausted(again, GIVES_UP)
        assert (float(again.exhausted_scale), float(again.exhausted_overflows)) == (0.0, 0.0)


def _orbax(state: Any, folder: Path) -> Any:
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", jax.tree.map(jnp.zeros_like, state))


def _flax(state: Any, folder: Path) -> Any:
    blank = jax.tree.map(jnp.zeros_like, state)
    return flax.serialization.from_bytes(blank, flax.serialization.to_bytes(state))


def _numpy(state: Any, folder: Path) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    np.savez(folder / "state.npz", **dict(zip(names, [leaf for _, leaf in leaves], strict=True)))
    with np.load(folder / "state.npz") as saved:
        return jax.tree.unflatten(structure, [jnp.asarray(saved[name]) for name in names])


def _pickle(state: Any, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("save", [_orbax, _flax, _numpy, _pickle])
def test_a_checkpoint_goes_on_where_it_was_taken(save: Callable[..., Any], tmp_path: Path) -> None:
    optimizer = loss_scaled(optax.adamw(RATE), POLICY, max_norm=1.0)
    params = parameters()
    state, train = optimizer.init(params), jax.jit(step(loss, optimizer))
    for number, (x, _) in enumerate(batches()):
        if number == 5:
            restored = save(state, tmp_path)
            assert isinstance(restored, LossScaledState)
            assert identical(restored, state)
            kept, copy = restored, params
        _, params, state = train(params, state, x)
        if number >= 5:
            _, copy, kept = train(copy, kept, x)
    assert identical((copy, kept), (params, state))


def test_checkpoints_hold_every_number_by_its_name() -> None:
    state = loss_scaled(optax.sgd(RATE)).init(parameters())
    saved = flax.serialization.to_state_dict(state)
    assert set(saved) == {*LossScaledState._fields}
    assert set(saved["policy_state"]) == {"scale", "good", "bad"}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
