"""The amax that policies use, on all devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from preamp import Dynamic, Headroom
from preamp.jax import apply_gradients, last_step, loss_scaled, step, value_and_grad
from tests.seeing import Remembering, amax_of, scales_after

from .trainings import batches, enable_x64, handed, loss, parameters, shard_map

POLICY = Remembering()
OPTIMIZER = loss_scaled(optax.sgd(0.5), POLICY)
SHAPES = {"half": (3, 2), "short": (2,), "pairs": (2, 2), "empty": (0, 2)}
DTYPES = {"half": "float16", "short": "bfloat16", "pairs": "float32", "empty": "float32"}
COUNT = 12

pytestmark = pytest.mark.usefixtures("quick_compiler")

entries = st.lists(st.floats(-6e4, 6e4, width=16), min_size=COUNT, max_size=COUNT)


def tree_of(entries: list[float]) -> dict[str, Any]:
    """Return gradients of four dtypes: a pair is the parts of one complex entry."""
    left = iter(entries)
    tree = {
        name: np.reshape([next(left) for _ in range(int(np.prod(shape)))], shape).astype(DTYPES[name])
        for name, shape in SHAPES.items()
    }
    return {**tree, "pairs": tree["pairs"].view("complex64")}


def remembered(state: Any) -> list[float]:
    return [float(number) for number in (state.scale, state.amax)]


update = jax.jit(lambda scaled, state: OPTIMIZER.update(*handed(scaled, state)))


@settings(max_examples=20, deadline=None)
@given(entries)
@example([0.0] * COUNT)
def test_the_peak_is_that_of_all_scaled_gradients(entries: list[float]) -> None:
    gradients = tree_of(entries)
    amax = amax_of(gradients.values())
    _, state = update(gradients, OPTIMIZER.init(gradients))
    assert float(state.policy_state.amax) == amax
    assert last_step(state).amax == amax


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_overflow_says_nothing_and_leaves_the_next_step_as_it_was(bad: float) -> None:
    gradients = tree_of([1.0] * COUNT)
    spoilt = tree_of([*[1.0] * (COUNT - 1), bad])
    _, state = update(gradients, OPTIMIZER.init(gradients))
    _, state = update(spoilt, state)
    assert remembered(state.policy_state) == [2.0, 1.0]
    assert last_step(state).amax is None


def test_what_float32_cannot_hold_is_no_infinite_peak() -> None:
    with enable_x64(True):
        gradients = jnp.array([1e100, 0.0])
        _, state = OPTIMIZER.update(*handed(gradients, OPTIMIZER.init(gradients)))
    assert state.policy_state.amax == np.finfo(np.float32).max
    assert state.policy_state.amax.dtype == jnp.float32


def test_a_compiled_step_sees_what_it_cuts_off() -> None:
    """Gradients of float16 products become float32 inside the conditional: their entries are the same."""

    def low(params: Any, x: Any) -> Any:
        return loss(jax.tree.map(lambda leaf: leaf.astype("float16"), params), x.astype("float16"))

    params, (x, _) = parameters(), next(batches("0"))
    state = OPTIMIZER.init(params)
    _, gradients, pending = value_and_grad(low)(params, state, x)
    train = jax.jit(step(low, OPTIMIZER), donate_argnums=(0, 1))
    _, params, state = train(params, state, x)
    expected = pytest.approx(amax_of(jax.tree.leaves(gradients)) * last_step(state).scale, rel=1e-6)
    assert last_step(state).amax == expected
    assert float(pending.amax) == expected
    train(params, state, x)
    assert train._cache_size() == 1


@pytest.mark.parametrize("checked", [True, False])
def test_shards_of_gradients_are_seen_as_one(checked: bool) -> None:
    """Each device has a row of one gradient. All have the other."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("d",))
    whole, split = PartitionSpec(), PartitionSpec("d")
    optimizer = loss_scaled(optax.sgd(1.0), POLICY, axis_name="d")
    gradients = {"row": np.array([[1.0], [-7.0], [3.0], [0.5]], "float32"), "all": np.full(4, 5.0, "float32")}
    places = {"row": split, "all": whole}

    def update(params: Any, state: Any, scaled: Any) -> Any:
        return apply_gradients(optimizer, *handed(scaled, state), params)

    state = optimizer.init(gradients)
    train = jax.jit(shard_map(update, mesh, (places, whole, places), (places, whole), checked))
    _, state = train(gradients, state, gradients)
    assert remembered(state.policy_state) == [4.0, 7.0]


def test_a_policy_that_sees_nothing_has_no_more_to_remember() -> None:
    state = loss_scaled(optax.sgd(1.0), Dynamic()).init(parameters())
    assert state.amax is None
    assert len(jax.tree.leaves(state)) == 11


def test_headroom_moves_in_compiled_steps_as_on_floats() -> None:
    """Gradients are float16 and of all sizes; what overflows is for the rule to find out."""
    policy = Headroom(init_scale=2.0**30, margin=1)

    def low(w: Any, x: Any) -> Any:
        return jnp.sum(w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32) * 2.0**-8

    optimizer = loss_scaled(optax.sgd(2.0**-10), policy)
    w = jnp.ones(4)
    state, train, steps = optimizer.init(w), jax.jit(step(low, optimizer)), []
    for x in np.random.default_rng(0).lognormal(-6.0, 1.5, (60, 4)).astype("float32"):
        _, w, state = train(w, state, x)
        steps.append(last_step(state))
    assert [one.new_scale for one in steps] == scales_after(policy, steps)
    assert {one.skipped for one in steps} == {True, False}
    assert len({one.scale for one in steps}) > 3
