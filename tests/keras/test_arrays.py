"""The functions of `preamp.arrays.Arrays` on the backend of this process, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from preamp import UsageError
from preamp.keras.loss_scale_optimizer import arrays

from .conftest import BACKEND
from .driving import each_backend

pytestmark = each_backend

GIVEN = {
    "float16": np.array([1.5, -3.0]),
    "bfloat16": np.array([[2.0, -6.0]]),
    "float32": np.array([[[0.25], [1e19]]]),
}
ENTRIES = np.concatenate([values.ravel() for values in GIVEN.values()])
EMPTY = np.zeros((0, 2))


def tensors(**given: np.ndarray) -> list[Any]:
    return [keras.ops.convert_to_tensor(values, dtype) for dtype, values in (given or GIVEN).items()]


def number(scalar: Any) -> float:
    (read,) = arrays.read([scalar])
    return read


def sparse(values: list[float], rows: list[int]) -> Any:
    """Return a sparse tensor of 8 rows in the backend's own format."""
    entries = np.array(values, np.float32)[:, None]
    if BACKEND == "jax":
        import jax.numpy as jnp
        from jax.experimental.sparse import BCOO

        return BCOO((jnp.asarray(entries), jnp.asarray(rows)[:, None]), shape=(8, 1))
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(tf.constant(entries), tf.constant(rows), tf.constant([8, 1]))
    import torch

    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.tensor(entries), (8, 1)).coalesce()


def dense(tensor: Any) -> np.ndarray:
    for method in ("todense", "to_dense"):
        tensor = getattr(tensor, method, lambda same=tensor: same)()
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(tensor)))


def test_unscaling_divides_in_float32_and_measures() -> None:
    given = tensors()
    unscaled, finite, norm, _ = arrays.unscale(given, keras.ops.convert_to_tensor(8.0))
    assert [keras.backend.standardize_dtype(tensor.dtype) for tensor in unscaled] == ["float32"] * 3
    found = np.concatenate([dense(tensor).ravel() for tensor in unscaled])
    np.testing.assert_array_equal(found, (ENTRIES / 8.0).astype(np.float32))
    assert number(finite) == 1.0
    assert number(norm) == pytest.approx(np.linalg.norm(ENTRIES / 8.0), rel=1e-6)
    for tensor, values in zip(given, GIVEN.values(), strict=True):  # nothing was written to
        np.testing.assert_array_equal(dense(keras.ops.cast(tensor, "float32")), values.astype(np.float32))


def test_what_underflows_in_a_half_type_is_kept() -> None:
    (unscaled,), *_ = arrays.unscale(tensors(float16=np.ones(1)), keras.ops.convert_to_tensor(2.0**25))
    assert dense(unscaled) == [2.0**-25]


@pytest.mark.parametrize(
    ("bad", "dtype"), [(np.inf, "float16"), (-np.inf, "bfloat16"), (np.nan, "float32"), (np.inf, "float32")]
)
def test_one_entry_that_is_not_finite_is_found(bad: float, dtype: str) -> None:
    values = GIVEN[dtype].copy()
    values.flat[-1] = bad
    given = tensors(**{**GIVEN, dtype: values})
    assert number(arrays.all_finite(tensors())) == 1.0
    assert number(arrays.all_finite(given)) == 0.0
    assert number(arrays.unscale(given, keras.ops.convert_to_tensor(8.0)).finite) == 0.0


def test_finite_entries_with_infinite_squares_are_finite() -> None:
    given = tensors(float32=np.array([1e30, 1.0]))
    assert number(arrays.all_finite(given)) == 1.0
    unscaled = arrays.unscale(given, keras.ops.convert_to_tensor(8.0))
    exact = np.inf if BACKEND == "torch" else pytest.approx(1.25e29)  # which the step then computes
    assert (number(unscaled.finite), number(unscaled.norm)) == (1.0, exact)


def test_the_norm_and_the_peak_are_those_of_all_entries() -> None:
    small = {"float16": GIVEN["float16"], "bfloat16": GIVEN["bfloat16"], "float32": EMPTY}
    assert number(arrays.global_norm(tensors(**small))) == pytest.approx(np.sqrt(2.25 + 9 + 4 + 36), rel=1e-6)
    assert number(arrays.amax(tensors(**small))) == 6.0
    assert number(arrays.amax(tensors(float32=EMPTY))) == number(arrays.amax([])) == 0.0
    assert number(arrays.amax(tensors(float32=np.array([3e38, -np.inf])))) == np.finfo(np.float32).max


def test_of_a_sparse_gradient_the_stored_entries_count() -> None:
    given = [sparse([3.0, -4.0], [1, 5])]
    (unscaled,), finite, norm, _ = arrays.unscale(given, keras.ops.convert_to_tensor(2.0))
    assert (dense(unscaled).ravel() == [0.0, 1.5, 0.0, 0.0, 0.0, -2.0, 0.0, 0.0]).all()
    assert (number(finite), number(norm), number(arrays.amax(given))) == (1.0, 2.5, 4.0)
    assert number(arrays.all_finite([sparse([3.0, np.nan], [1, 5])])) == 0.0


def test_scalars_of_any_dtype_are_read_together() -> None:
    scalars = [keras.ops.convert_to_tensor(1.5), keras.ops.convert_to_tensor(2**24 + 1, "int32")]
    assert arrays.read([*scalars, keras.ops.convert_to_tensor(1.0) > 0.0]) == [1.5, 2.0**24 + 1, 1.0]


def test_nothing_is_read_while_it_is_traced() -> None:
    """Except by PyTorch's compiler, which runs the read eagerly."""
    one = keras.ops.convert_to_tensor(1.0)

    def traced(x: Any) -> Any:
        return arrays.read([x])

    if BACKEND == "torch":
        import torch

        assert torch.compile(traced, backend="eager")(one) == [1.0]
        return
    if BACKEND == "jax":
        import jax

        compiled: Any = jax.jit(traced)
    else:
        import tensorflow as tf

        compiled = tf.function(traced, autograph=False)
    with pytest.raises(UsageError, match="after the step"):
        compiled(one)


def test_the_peak_is_a_finite_float32_of_float64_as_well() -> None:
    given = {"float32": np.array([-np.inf])} if BACKEND == "jax" else {"float64": np.array([-1e300])}
    assert number(arrays.amax(tensors(**given))) == np.finfo(np.float32).max  # JAX has no float64 by default
