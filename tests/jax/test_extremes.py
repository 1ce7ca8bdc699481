"""Extreme gradients and scales: each way takes the same steps, with the norm and the clipping of float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from preamp import Static
from preamp.jax import ScaledGradients, all_finite, apply_gradients, last_step, loss_scaled, step
from tests.extremes import EXTREMES, Extreme, off_by

from .trainings import enable_x64, shard_map

FAR = 1e36  # a norm to clip to that is itself beyond the range of squares

pytestmark = pytest.mark.usefixtures("quick_compiler")
each_row = pytest.mark.parametrize("row", EXTREMES, ids=lambda row: row.name)
each_limit = pytest.mark.parametrize("max_norm", [None, 1.0, FAR])


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


@jax.custom_vjp
def handing(params: Any, gradients: Any) -> Any:
    """Return a loss that has these gradients, whatever scale comes in backward."""
    return sum(jnp.sum(one) * 0.0 for one in params)


handing.defvjp(lambda params, gradients: (jnp.float32(0.0), gradients), lambda kept, _: (kept, None))


def transformation(optimizer: Any, row: Extreme, params: Any, state: Any) -> Any:
    scaled = ScaledGradients(gradients(row), state.policy_state.scale)
    return optimizer.update(scaled, state, params)


def compiled_transformation(optimizer: Any, row: Extreme, params: Any, state: Any) -> Any:
    return jax.jit(lambda p, s: transformation(optimizer, row, p, s))(params, state)


def stepped(optimizer: Any, row: Extreme, params: Any, state: Any) -> Any:
    return jax.jit(step(handing, optimizer))(params, state, gradients(row))[1:]


@each_row
@each_limit
@pytest.mark.parametrize("way", [transformation, compiled_transformation, stepped])
def test_each_way_does_with_extreme_gradients_what_float64_would(
    row: Extreme, max_norm: float | None, way: Callable[..., Any]
) -> None:
    with enable_x64(row.dtype == "float64"):
        optimizer = loss_scaled(optax.sgd(1.0), Static(row.scale), max_norm=max_norm)
        params = [jnp.zeros(leaf.shape, row.wide) for leaf in row.leaves]
        check(row, max_norm, *way(optimizer, row, params, optimizer.init(params)))


@each_row
@each_limit
@pytest.mark.parametrize("tracked", [True, False])
def test_devices_with_shards_agree_on_the_largest_entry_and_on_the_norm(
    row: Extreme, max_norm: float | None, tracked: bool
) -> None:
    if not tracked:  # a leaf that all have counts once only where JAX knows it
        row = row._replace(leaves=row.leaves[:2])
    with enable_x64(row.dtype == "float64"):
        optimizer = loss_scaled(optax.sgd(1.0), Static(row.scale), max_norm=max_norm, axis_name="model")
        params = [jnp.zeros(leaf.shape, row.wide) for leaf in row.leaves]
        places: Any = [P("model"), P("model"), P()][: len(params)]

        def apply(params: Any, gradients: Any, state: Any) -> Any:
            scaled = ScaledGradients(gradients, state.policy_state.scale)
            return apply_gradients(optimizer, scaled, state, params)

        mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
        mapped = shard_map(apply, mesh, (places, places, P()), (places, P()), tracked)
        check(row, max_norm, *jax.jit(mapped)(params, gradients(row), optimizer.init(params)))


@each_row
def test_all_finite_is_about_entries(row: Extreme) -> None:
    with enable_x64(row.dtype == "float64"):
        assert bool(jax.jit(all_finite)(gradients(row))) == row._replace(scale=1.0).finite(row.dtype)
