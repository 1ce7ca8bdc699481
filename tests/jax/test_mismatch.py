"""`mismatch` of arrays that lie on several devices. Its numbers: `tests/record/test_mismatch.py`."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from preamp.jax import mismatch
from preamp.record.mismatch import Mismatch

from .trainings import shard_map


@pytest.fixture
def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    sampler = -random.exponential(2.0, (8, 5)).astype(np.float32)
    return (
        (sampler + 0.1 * random.normal(size=(8, 5))).astype(np.float32),
        sampler,
        random.random((8, 5)) < 0.5,
    )


def test_sharded_arrays_are_measured_as_a_whole(drawn: tuple[np.ndarray, ...]) -> None:
    rows = NamedSharding(Mesh(jax.devices(), "rows"), PartitionSpec("rows"))
    found = jax.jit(mismatch)(*(jax.device_put(one, rows) for one in drawn))
    for one, other in zip(found, mismatch(*drawn), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_inside_shard_map_each_device_measures_its_own(drawn: tuple[np.ndarray, ...]) -> None:
    mesh, rows = Mesh(jax.devices(), "rows"), PartitionSpec("rows")

    def here(*parts: jax.Array) -> Mismatch[jax.Array]:
        return jax.tree.map(lambda value: value[None], mismatch(*parts))

    found = jax.jit(shard_map(here, mesh, (rows, rows, rows), rows))(*drawn)
    for row in range(8):
        for one, other in zip(found, mismatch(*(part[row] for part in drawn)), strict=True):
            np.testing.assert_allclose(one[row], other, rtol=1e-5, atol=1e-7)
