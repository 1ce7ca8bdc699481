"""A precision that a program asks for is kept, is reported, and can be changed by a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from preamp.autocasting.tables import DEFAULT, JAX
from preamp.errors import CastingError
from preamp.jax import autocast, casts

from .reading import dtypes, traced

X = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
IMAGE = np.random.default_rng(1).normal(size=(1, 6, 6, 2)).astype(np.float32)
FILTERS = np.random.default_rng(2).normal(size=(3, 3, 2, 4)).astype(np.float32)
LAYOUT = ("NHWC", "HWIO", "NHWC")
MATRIX = (((1,), (0,)), ((), ()))
CONV, RAGGED = "conv_general_dilated", "ragged_dot_general"

PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "jnp.matmul": (jnp.matmul, (X, X), "dot_general"),
    "jnp.dot": (jnp.dot, (X, X), "dot_general"),
    "jnp.einsum": (partial(jnp.einsum, "ij,jk->ik"), (X, X), "dot_general"),
    "jnp.tensordot": (partial(jnp.tensordot, axes=1), (X, X), "dot_general"),
    "jnp.convolve": (jnp.convolve, (X[0], X[1]), CONV),
    "lax.dot": (lax.dot, (X, X), "dot_general"),
    "lax.dot_general": (partial(lax.dot_general, dimension_numbers=MATRIX), (X, X), "dot_general"),
    "lax.conv": (
        partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=LAYOUT),
        (IMAGE, FILTERS),
        CONV,
    ),
    "lax.ragged_dot": (partial(lax.ragged_dot, group_sizes=np.array([2, 4])), (X, np.stack([X, X])), RAGGED),
}
PRECISIONS = ["highest", "high", ("default", "highest"), lax.Precision.HIGHEST]
NO_PRECISIONS = [None, "default", lax.Precision.DEFAULT]


def total(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jnp.sin(fn(*args)).astype(np.float32).sum()


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "highest") for name in PRODUCTS), *(("lax.dot", precision) for precision in PRECISIONS[1:])],
)
def test_a_product_that_asks_for_a_precision_is_the_same_as_without_autocast(
    name: str, precision: Any
) -> None:
    fn, operands, primitive = PRODUCTS[name]
    asking = partial(fn, precision=precision)
    result = autocast(asking)(*operands)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, asking(*operands))
    assert set(dtypes(autocast(asking), *operands, of=primitive)) == {"float32"}


@pytest.mark.parametrize("name", ["jnp.einsum", "lax.conv", "lax.ragged_dot"])
@pytest.mark.parametrize("around", [True, False])
def test_its_gradients_keep_the_precision_on_either_side(name: str, around: bool) -> None:
    fn, operands, primitive = PRODUCTS[name]
    for asking, runs in (
        (partial(fn, precision="highest"), "float32"),
        (partial(fn, precision="default"), "bfloat16"),
    ):
        transformed = (
            autocast(jax.grad(total(asking), (0, 1))) if around else jax.grad(autocast(total(asking)), (0, 1))
        )
        backward = dtypes(transformed, *operands, of=primitive)
        assert len(backward) == 3
        assert set(backward) == {runs}


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "default") for name in PRODUCTS), *(("lax.dot", precision) for precision in NO_PRECISIONS)],
)
def test_the_default_precision_asks_for_nothing(name: str, precision: Any) -> None:
    fn, operands, primitive = PRODUCTS[name]
    assert set(dtypes(autocast(partial(fn, precision=precision)), *operands, of=primitive)) == {"bfloat16"}


def test_an_algorithm_counts_unless_it_is_the_default() -> None:
    for algorithm, runs in (
        (lax.DotAlgorithmPreset.F32_F32_F32, "float32"),
        (lax.DotAlgorithmPreset.BF16_BF16_F32, "float32"),
        (lax.DotAlgorithmPreset.DEFAULT, "bfloat16"),
    ):
        assert dtypes(autocast(partial(lax.dot, precision=algorithm)), X, X) == [runs]


def test_the_precision_of_a_context_inside_of_the_region_counts() -> None:
    def fn(x: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            exact = x @ x
        with jax.default_matmul_precision("default"):
            return exact, x @ x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [each.dtype for each in autocast(fn)(X)] == [np.float32, jnp.bfloat16]


def test_a_precision_set_around_the_region_is_kept_with_a_warning_that_says_what_to_write() -> None:
    with jax.default_matmul_precision("highest"):
        with pytest.warns(UserWarning, match=r"'highest'.*lower\('explicit_precision'\)") as caught:
            assert autocast(jnp.matmul)(X, X).dtype == np.float32
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lowered = autocast(jnp.matmul, casting=DEFAULT.lower("explicit_precision"))
            assert lowered(X, X).dtype == jnp.bfloat16
            assert autocast(jnp.matmul, casting=DEFAULT.float32("dot_general"))(X, X).dtype == np.float32
            assert autocast(jnp.matmul, enabled=False)(X, X).dtype == np.float32


@pytest.mark.parametrize("name", ["lax.conv", "lax.ragged_dot"])
def test_a_result_type_that_is_asked_for_is_kept_forward_and_backward(name: str) -> None:
    fn, operands, primitive = PRODUCTS[name]
    asking = partial(fn, preferred_element_type=np.float32)
    result = autocast(asking)(*operands)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, asking(*operands))
    assert set(dtypes(autocast(jax.grad(total(asking), (0, 1))), *operands, of=primitive)) == {"float32"}


@pytest.mark.parametrize("name", ["jnp.matmul", "jnp.dot", "jnp.einsum", "jnp.tensordot"])
def test_a_result_type_of_float32_products_cannot_be_told_from_what_jnp_writes(name: str) -> None:
    """The two programs are the same text: docs/jax.md says what to write instead."""
    fn, operands, _ = PRODUCTS[name]
    asking = partial(fn, preferred_element_type=np.float32)
    assert str(jax.make_jaxpr(asking)(*operands)) == str(jax.make_jaxpr(fn)(*operands))
    assert dtypes(autocast(asking), *operands) == ["bfloat16"]
    assert dtypes(autocast(partial(asking, precision="highest")), *operands) == ["float32"]


@pytest.mark.parametrize(
    "fn",
    [
        jnp.linalg.pinv,
        lambda x: jnp.linalg.lstsq(x, x)[0],
        lambda x: jnp.polyfit(x[0], x[1], 2),
        lambda x: jax.image.resize(x, (9, 9), "linear"),
        jax.grad(lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(6)).sum()),
        jax.grad(lambda x: jnp.linalg.eigh(x + x.T)[1].sum()),
    ],
)
def test_products_inside_of_jax_that_ask_for_a_precision_keep_it(fn: Callable[..., Any]) -> None:
    asked = [it for it in equations_of(fn) if it.params["precision"] is not None]
    kept = [it for it in equations_of(autocast(fn)) if it.params["precision"] is not None]
    assert len(kept) == len(asked) > 0
    assert all(it.invars[0].aval.dtype == np.float32 for it in kept)


def equations_of(fn: Callable[..., Any]) -> list[Any]:
    return [it for it in traced(fn, X) if it.primitive.name == "dot_general"]


def test_arithmetic_before_such_a_product_is_not_rounded() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jnp.matmul(x @ w * 1.5 - 0.25, w, precision="highest")

    for of in ("mul", "sub"):
        assert dtypes(autocast(fn), X, X, of=of) == ["float32"]


@pytest.mark.parametrize(
    ("table", "runs"),
    [
        (None, "float32"),
        (JAX, "float32"),
        (DEFAULT.untouched("explicit_precision"), "float32"),
        (DEFAULT.float32("explicit_precision"), "float32"),
        (DEFAULT.lower("dot_general", "ragged_dot_general", CONV), "float32"),
        (DEFAULT.lower("explicit_precision"), "bfloat16"),
        (JAX.lower("explicit_precision"), "bfloat16"),
        (DEFAULT.widest("explicit_precision"), "float32"),
    ],
)
@pytest.mark.parametrize("name", ["jnp.matmul", "lax.conv"])
def test_a_table_says_what_becomes_of_them(name: str, table: Any, runs: str) -> None:
    fn, operands, primitive = PRODUCTS[name]
    asking = autocast(partial(fn, precision="highest"), casting=table)
    assert dtypes(asking, *operands, of=primitive) == [runs]
    assert asking(*operands).dtype == runs


def test_a_table_can_refuse_them_by_line() -> None:
    table = DEFAULT.refuse("explicit_precision")
    with pytest.raises(
        CastingError, match=r"'explicit_precision' is refused.*test_autocast_explicit\.py:\d+"
    ):
        autocast(lambda x: jnp.matmul(x, x, precision="highest"), casting=table)(X)
    assert autocast(jnp.matmul, casting=table)(X, X).dtype == jnp.bfloat16


def test_the_report_says_that_the_program_asked() -> None:
    def fn(x: Any) -> Any:
        return jnp.matmul(x, x, precision="highest") @ x

    report = casts(fn, X)
    rows = {row.rule: row for row in report.rows}
    assert (rows["explicit"].inputs, rows["explicit"].runs) == ("float32", "float32")
    assert rows["explicit"].operator == "dot_general"
    assert rows["lower"].runs == "bfloat16"
    assert any(
        text.startswith("dot_general at test_autocast_explicit.py:")
        and text.endswith("asks for its precision.")
        for text in report.warnings
    )
    (low,) = {row.rule for row in casts(fn, X, casting=DEFAULT.lower("explicit_precision")).rows}
    assert low == "lower"
