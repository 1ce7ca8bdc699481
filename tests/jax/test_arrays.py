"""Arithmetic on JAX arrays, against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from preamp import UsageError

from .inside import arrays as inside
from .trainings import enable_x64

ARRAYS = [
    jnp.array([1.5, -3.0], jnp.float16),
    jnp.array([[2.0, -6.0]], jnp.bfloat16),
    jnp.array([3.0 - 4.0j, 0.5j], jnp.complex64),
    jnp.zeros((0, 2)),
]
ENTRIES = np.concatenate([np.asarray(array, np.complex128).ravel() for array in ARRAYS])


def test_unscaled_arrays_are_float32_or_longer() -> None:
    unscaled = inside.multiply_by_inverse(ARRAYS, jnp.float32(8.0))
    assert [array.dtype.name for array in unscaled] == ["float32", "float32", "complex64", "float32"]
    assert np.array_equal(np.concatenate([array.ravel() for array in unscaled]), ENTRIES / 8.0)


def test_float64_is_unscaled_in_float64() -> None:
    with enable_x64(True):
        (unscaled,) = inside.multiply_by_inverse([jnp.array([1.0], jnp.float64)], jnp.float32(3.0))
        assert float(unscaled[0]) == 1.0 / 3.0


def test_the_norm_is_that_of_all_arrays() -> None:
    assert float(inside.global_norm(ARRAYS)) == pytest.approx(np.linalg.norm(ENTRIES), rel=1e-6)
    assert inside.global_norm([]).dtype == jnp.float32


@pytest.mark.parametrize(("bad", "place"), [(np.inf, 0), (-np.inf, 1), (np.nan, 2)])
def test_one_entry_that_is_not_finite_is_found(bad: float, place: int) -> None:
    arrays = [array.at[..., 0].set(bad) if i == place else array for i, array in enumerate(ARRAYS)]
    assert bool(inside.all_finite(ARRAYS))
    assert not bool(inside.all_finite(arrays))


def test_the_peak_is_the_largest_part_of_any_entry() -> None:
    assert float(inside.amax(ARRAYS)) == 6.0
    assert float(inside.amax(ARRAYS[2:])) == 4.0
    assert float(inside.amax([])) == float(inside.amax([jnp.zeros(0)])) == 0.0
    assert inside.amax(ARRAYS).dtype == jnp.float32


def test_scalars_are_read_together_and_not_while_they_are_traced() -> None:
    assert inside.read([jnp.float32(1.5), jnp.int32(2), jnp.array(True)]) == [1.5, 2.0, 1.0]
    with pytest.raises(UsageError, match="Ask for it outside, after the step"):
        jax.jit(lambda x: inside.read([x]))(1.0)
