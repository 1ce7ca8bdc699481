"""Extreme gradients and scales: each way takes the same steps, with the norm and the clipping of float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from preamp import Static
from preamp.jax import all_finite, apply_gradients, last_step, loss_scaled, step
from tests.extremes import EXTREMES, Extreme, off_by

from .trainings import enable_x64, handed, handing, shard_map

FAR = 1e36  # a norm to clip to that is itself beyond the range of squares

pytestmark = pytest.mark.usefixtures("quick_compiler")
each_row = pytest.mark.parametrize("row", EXTREMES, ids=lambda row: row.name)
each_limit = pytest.mark.parametrize("max_norm", [None, 1.0, FAR])
are_finite = jax.jit(all_finite)


def gradients(row: Extreme) -> list[jax.Array]:
    return [jnp.asarray(leaf, row.dtype) for leaf in row.leaves]


def check(row: Extreme, max_norm: float | None, updated: Any, state: Any) -> None:
    """Check a step of SGD with a learning rate of 1 from zeros."""
    record = last_step(state)
    assert record.skipped is not row.finite()
    assert record.finite is row.finite()
    if row.finite():
        assert record.grad_norm == pytest.approx(row.norm(), rel=1e-5, abs=1e-37)
        assert off_by(row, max_norm, [-np.asarray(one, np.float64) for one in updated]) < 1e-5
    else:
        assert not any(np.any(np.asarray(one)) for one in updated)


@cache
def update(max_norm: float | None) -> tuple[Any, Any]:
    """Return an optimizer and a compiled step of it, which serve all rows: the scale is in the state."""
    optimizer = loss_scaled(optax.sgd(1.0), Static(1.0), max_norm=max_norm)

    def updated(params: Any, state: Any, gradients: Any) -> Any:
        return optimizer.update(*handed(gradients, state), params)

    return optimizer, jax.jit(updated)


@cache
def stepped(max_norm: float | None) -> tuple[Any, Any]:
    optimizer = loss_scaled(optax.sgd(1.0), Static(1.0), max_norm=max_norm)
    return optimizer, jax.jit(lambda *args: step(handing, optimizer)(*args, 0.0)[1:])


@cache
def sharded(max_norm: float | None, tracked: bool) -> tuple[Any, Any]:
    optimizer = loss_scaled(optax.sgd(1.0), Static(1.0), max_norm=max_norm, axis_name="model")
    places: Any = [P("model"), P("model"), P()][: 2 + tracked]

    def apply(params: Any, state: Any, gradients: Any) -> Any:
        return apply_gradients(optimizer, *handed(gradients, state), params)

    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    return optimizer, jax.jit(shard_map(apply, mesh, (places, P(), places), (places, P()), tracked))


def take(row: Extreme, max_norm: float | None, way: tuple[Any, Any]) -> None:
    """Take a step with the scale of the row, and check it."""
    optimizer, run = way
    params = [jnp.zeros(leaf.shape, row.wide) for leaf in row.leaves]
    state = optimizer.init(params)
    state = state._replace(policy_state=state.policy_state._replace(scale=jnp.float32(row.scale)))
    check(row, max_norm, *run(params, state, gradients(row)))


@each_row
@each_limit
@pytest.mark.parametrize("way", [update, stepped])
def test_each_way_does_with_extreme_gradients_what_float64_would(
    row: Extreme, max_norm: float | None, way: Callable[..., Any]
) -> None:
    with enable_x64(row.dtype == "float64"):
        take(row, max_norm, way(max_norm))


@each_row
@each_limit
@pytest.mark.parametrize("tracked", [True, False])
def test_devices_with_shards_agree_on_the_largest_entry_and_on_the_norm(
    row: Extreme, max_norm: float | None, tracked: bool
) -> None:
    if not tracked:  # a leaf that all have counts once only where JAX knows it
        row = row._replace(leaves=row.leaves[:2])
    with enable_x64(row.dtype == "float64"):
        take(row, max_norm, sharded(max_norm, tracked))


@each_row
def test_all_finite_is_about_entries(row: Extreme) -> None:
    with enable_x64(row.dtype == "float64"):
        assert bool(are_finite(gradients(row))) == row._replace(scale=1.0).finite(row.dtype)
