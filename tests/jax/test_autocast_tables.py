"""Edited tables, names in them, and what no rule touches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from preamp.autocasting.tables import DEFAULT, JAX
from preamp.errors import CastingError
from preamp.jax import autocast, blame, casts, tune

from .reading import dtypes
from .trainings import enable_x64

X, W = np.ones((4, 8), np.float32), np.ones((8, 8), np.float32)


def product(x: Any, w: Any) -> Any:
    return jnp.exp(jnp.tanh(x @ w))


def runs(table: Any, of: str) -> list[str]:
    return dtypes(autocast(product, casting=table), X, W, of=of)


@pytest.mark.parametrize(
    ("table", "products", "exponentials"),
    [
        (None, "bfloat16", "float32"),
        (DEFAULT, "bfloat16", "float32"),
        (DEFAULT.lower("exp"), "bfloat16", "bfloat16"),
        (DEFAULT.float32("matmul"), "float32", "float32"),
        (DEFAULT.widest("exp"), "bfloat16", "bfloat16"),
        (DEFAULT.widest("dot"), "float32", "float32"),
        (DEFAULT.untouched("exp"), "bfloat16", "bfloat16"),
        (DEFAULT.untouched("dot_general"), "float32", "float32"),
        (DEFAULT.refuse("sort"), "bfloat16", "float32"),
        (DEFAULT.float32("matmul").lower("dot_general", "exp"), "bfloat16", "bfloat16"),
    ],
)
def test_an_edited_table_counts(table: Any, products: str, exponentials: str) -> None:
    assert runs(table, "dot_general") == [products]
    assert runs(table, "exp") == [exponentials]


@given(st.sampled_from(sorted(name for name, rule in JAX.rules.items() if rule == "float32")))
def test_every_name_of_the_table_can_be_edited(name: str) -> None:
    assert DEFAULT.lower(name)[name] == "lower"
    assert runs(DEFAULT.untouched(name), "dot_general") == ["bfloat16"]


def test_a_refused_primitive_is_named_with_its_line() -> None:
    with pytest.raises(CastingError, match=r"(?s)'exp' is refused.*test_autocast_tables\.py:\d+ \(product\)"):
        autocast(product, casting=DEFAULT.refuse("exp"))(X, W)


def test_a_refused_primitive_inside_of_jax_has_the_line_around_it() -> None:
    exec(compile("jnp.sort(X)", "elsewhere.py", "eval"), {"jnp": jnp, "X": X})  # JAX keeps what it traces
    with pytest.raises(CastingError, match=r"'sort' is refused.*test_autocast_tables\.py:\d+.*enabled=False"):
        autocast(lambda x: jnp.sort(x), casting=DEFAULT.refuse("sort"))(X)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("dot_genera", "dot_general"),
        ("exq", "exp"),
        ("conv_general", "conv_general_dilated"),
        ("jax.nn.softmax", "softmax"),
        ("jnp.matmul", "matmul"),
        ("lax.dot_general_p", "dot_general"),
        ("__add__", "add"),
        ("nnx.Linear", "Linear"),
    ],
)
def test_a_name_that_is_none_comes_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(CastingError, match=rf"'{name}' is not a primitive of JAX.*'{near}'"):
        autocast(product, casting=DEFAULT.lower(name))(X, W)


@pytest.mark.parametrize("name", ["LayerNorm", "nnx.MultiHeadAttention"])
def test_a_class_of_modules_is_refused_with_the_edit_of_a_module(name: str) -> None:
    with pytest.raises(
        CastingError, match=rf"'{name}' is not a primitive.*\.module\('layers\.0', 'float32'\)"
    ):
        autocast(product, casting=DEFAULT.float32(name))(X, W)


def test_a_table_may_name_what_only_the_program_has() -> None:
    own = jax.extend.core.Primitive("only_here")
    own.def_impl(lambda x: x)
    own.def_abstract_eval(lambda x: x)
    fn = autocast(lambda x, w: own.bind(x @ w), casting=DEFAULT.lower("only_here"))
    assert fn(X, W).dtype == jnp.bfloat16
    assert autocast(lambda x, w: own.bind(x @ w))(X, W).dtype == np.float32


@pytest.mark.parametrize("wrong", [{"exp": "lower"}, "exp", JAX.rules])
def test_what_is_no_table_is_refused(wrong: Any) -> None:
    with pytest.raises(CastingError, match=r"is not a table\. Write casting=casting\.DEFAULT"):
        autocast(product, casting=wrong)


@pytest.mark.parametrize(
    ("dtype", "write"),
    [
        ("float32", "dtype='float16' or dtype='bfloat16'"),
        (np.int32, "dtype='float16'"),
        ("half-ish", "dtype='float16'"),
        (jnp.float8_e5m2, r"dtype='float8_e5m2' needs a scale.*Write recipe="),
        ("float8_e4m3fn", r"dtype='float8_e4m3fn' needs a scale.*Write recipe="),
    ],
)
def test_a_dtype_that_cannot_be_the_low_one_is_refused(dtype: Any, write: str) -> None:
    x = jnp.ones((2, 2))
    for run in (
        lambda: autocast(product, dtype),
        lambda: autocast(product, dtype, emulate=True),
        lambda: casts(product, x, x, dtype=dtype),
        lambda: blame(product, x, x, dtype=dtype),
        lambda: tune(product, x, x, dtype=dtype),
    ):
        with pytest.raises(CastingError, match=write):
            run()


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16"), jnp.float16])
def test_a_dtype_may_be_written_in_any_way(dtype: Any) -> None:
    assert autocast(jnp.matmul, dtype)(X, W).dtype == np.float16


def test_numbers_of_64_bits_integers_complex_numbers_and_keys_pass() -> None:
    def mixed(x: Any, i: Any, z: Any, key: Any) -> Any:
        return i @ i.T, jnp.exp(z) @ z.T, jax.random.normal(key, (2,)), jax.random.split(key), i > 1, x @ x.T

    integers, complexes = np.ones((2, 2), np.int32), np.ones((2, 2), np.complex64)
    key = jax.random.key(0)
    args = X, integers, complexes, key
    results, plain = autocast(mixed)(*args), mixed(*args)
    for ours, expected in zip(results[:-1], plain[:-1], strict=True):
        assert ours.dtype == expected.dtype
        assert (jnp.asarray(ours == expected)).all()


def test_float64_runs_in_float64() -> None:
    with enable_x64(True):
        x = np.ones((2, 2), np.float64)
        result = jax.jit(autocast(lambda x: jnp.exp(x @ x) + x.astype(np.float32)))(x)
        assert result.dtype == np.float64
        assert (result == np.exp(2.0) + 1).all()


def test_a_dtype_that_is_asked_for_is_kept() -> None:
    low = W.astype(jnp.bfloat16)

    def asked(a: Any, b: Any) -> Any:
        return lax.dot(a, b, preferred_element_type=np.float32)

    assert autocast(asked)(low, low).dtype == np.float32
    assert autocast(asked, "float16")(low, low).dtype == np.float32
    assert dtypes(autocast(asked, "float16"), low, low) == ["bfloat16"]
    assert autocast(asked, "float16")(W, W).dtype == np.float16  # what jnp.matmul writes
    assert autocast(lambda a: lax.dot(a, a, preferred_element_type=jnp.bfloat16))(W).dtype == jnp.bfloat16


def test_an_algorithm_that_is_asked_for_is_kept() -> None:
    fn = autocast(lambda a: lax.dot(a, a, precision=lax.DotAlgorithmPreset.F32_F32_F32))
    assert dtypes(fn, W) == ["float32"]


def test_sums_over_devices_run_in_float32_and_moves_stay_low() -> None:
    def along(x: Any) -> Any:
        y = x @ x
        return lax.psum(y, "i"), lax.pmean(y, "i"), lax.pmax(y, "i"), lax.all_gather(y, "i")

    sums, means, amaxes, gathered = jax.vmap(autocast(along), axis_name="i")(np.ones((2, 3, 3), np.float32))
    assert sums.dtype == means.dtype == np.float32
    assert amaxes.dtype == gathered.dtype == jnp.bfloat16
