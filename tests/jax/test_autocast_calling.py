"""How autocast is called: decorators, trees, static arguments, regions inside of regions."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from preamp.autocasting.tables import DEFAULT
from preamp.errors import CastingError, UsageError
from preamp.jax import autocast

from .reading import dtypes

X, W = np.ones((3, 3), np.float32), np.eye(3, dtype=np.float32)


class Pair(NamedTuple):
    left: Any
    right: Any


def matmul(x: Any, w: Any) -> Any:
    """Multiply."""
    return x @ w


def test_it_decorates_with_and_without_arguments() -> None:
    @autocast
    def bare(x: Any) -> Any:
        return x @ x

    @autocast(dtype="float16")
    def with_dtype(x: Any) -> Any:
        return x @ x

    class Layer:
        @autocast(dtype="float16")
        def __call__(self, x: Any) -> Any:
            return x @ x

    assert bare(X).dtype == jnp.bfloat16
    assert with_dtype(X).dtype == Layer()(X).dtype == np.float16
    assert autocast(matmul, "float16")(X, w=W).dtype == np.float16


def test_the_function_keeps_its_name_and_signature() -> None:
    fn = autocast(matmul)
    assert (fn.__name__, fn.__doc__) == ("matmul", "Multiply.")
    assert inspect.signature(fn) == inspect.signature(matmul)


def test_all_but_arrays_is_passed_as_it_is() -> None:
    def fn(x: Any, train: bool, scale: float, how: str, *, then: Any, nothing: Any = None) -> Any:
        assert train is True
        assert type(scale) is float
        return then(x @ x) if how == "yes" else nothing

    assert autocast(fn)(X, True, 2.0, "yes", then=jnp.tanh).dtype == jnp.bfloat16
    assert autocast(fn)(X, True, 2.0, "no", then=jnp.tanh) is None


def test_results_are_trees_whose_other_leaves_pass() -> None:
    marker = object()
    result = autocast(lambda pair: {"y": Pair(pair.left @ pair.right, marker), "n": [3, "s", None]})(
        Pair(X, W)
    )
    assert result["y"].left.dtype == jnp.bfloat16
    assert result["y"].right is marker
    assert result["n"] == [3, "s", None]


@pytest.mark.parametrize(
    "x", [X, jnp.asarray(X), X.astype(np.float16), X[0, 0], X.astype(np.int8), np.array("s")]
)
def test_arrays_of_any_kind_come_back(x: Any) -> None:
    result = autocast(lambda x: x)(x)
    assert np.asarray(result).dtype == x.dtype
    assert (np.asarray(result) == np.asarray(x)).all()


def test_an_object_that_is_an_array_for_jax_is_one() -> None:
    class Parameter:
        def __jax_array__(self) -> Any:
            return jnp.asarray(W)

    assert autocast(lambda x, w: x @ jnp.asarray(w))(X, Parameter()).dtype == jnp.bfloat16


def test_an_eager_call_compiles_nothing_of_the_program() -> None:
    fn = autocast(lambda x: jax.nn.relu(jnp.where(x > 0, x, 0) @ x))
    fn(X)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    fn(X)
    assert not [name for name in compiled if "backend_compile" in name]


@pytest.mark.parametrize(
    ("wrong", "write"),
    [
        ("float16", r"autocast\(fn, dtype='float16'\)"),
        (jnp.float16, r"autocast\(fn, dtype='float16'\)"),
        (np.float16, r"autocast\(fn, dtype='float16'\)"),
        (np.dtype("float16"), r"autocast\(fn, dtype='float16'\)"),
        (X, "An array is not a function"),
    ],
)
def test_what_is_no_function_is_refused(wrong: Any, write: str) -> None:
    with pytest.raises(CastingError, match=write):
        autocast(wrong)


def test_it_is_no_context() -> None:
    with pytest.raises(UsageError, match=r"Write autocast\(fn, dtype='float16'\)"), autocast(dtype="float16"):
        pass


def nested(x: Any, w: Any) -> Any:
    inner = autocast(matmul, "float16")
    plain = autocast(matmul, enabled=False)
    return x @ w, plain(x @ w, w), inner(x, w)


OUTER = ["bfloat16", "bfloat16", "float32", "float16"]


def test_regions_keep_their_own_precision() -> None:
    assert dtypes(autocast(nested), X, W) == OUTER
    assert [it.dtype.name for it in autocast(nested)(X, W)] == ["bfloat16", "float32", "float16"]


def total(x: Any, w: Any) -> Any:
    return sum(it.astype(np.float32).sum() for it in nested(x, w))


def test_regions_keep_their_own_precision_under_transformations() -> None:
    batch = np.ones((2, 3, 3), np.float32)
    assert dtypes(autocast(jax.vmap(nested, (0, None))), batch, W) == OUTER
    assert dtypes(jax.vmap(autocast(nested), (0, None)), batch, W) == OUTER
    assert dtypes(jax.jit(autocast(nested)), X, W) == OUTER
    for backward in (
        autocast(jax.value_and_grad(total, (0, 1))),
        jax.value_and_grad(autocast(total), (0, 1)),
    ):
        given = dtypes(backward, X, W)
        assert [given.count(low) for low in ("bfloat16", "float32", "float16")] == [6, 3, 3]


def test_regions_inside_of_loops_and_branches_keep_their_own_precision() -> None:
    def fn(x: Any, w: Any) -> Any:
        x, _ = lax.scan(lambda x, _: (nested(x, w)[1], None), x, length=2)
        return lax.cond(x[0, 0] > 0, autocast(matmul, enabled=False), lambda x, w: x @ w.T, x, w)

    assert sorted(dtypes(autocast(fn), X, W)) == ["bfloat16", "bfloat16", "float32", "float32"]


def test_a_region_with_the_same_settings_is_part_of_the_one_around() -> None:
    def outer(x: Any, w: Any) -> Any:
        return autocast(matmul)(x @ w, w) @ w

    def flat(x: Any, w: Any) -> Any:
        return x @ w @ w @ w

    assert dtypes(autocast(outer), X, W) == dtypes(autocast(flat), X, W) == ["bfloat16"] * 3
    np.testing.assert_array_equal(*(jax.jit(autocast(fn))(X, W) for fn in (outer, flat)))


def test_a_region_with_another_table_keeps_it() -> None:
    inner = autocast(lambda x: jnp.exp(x @ x), casting=DEFAULT.lower("exp"))
    fn = autocast(lambda x: (jnp.exp(x @ x), inner(x)))
    assert [it.dtype.name for it in fn(X)] == ["float32", "bfloat16"]


def test_what_jit_cached_in_a_region_is_right_outside_of_it() -> None:
    fn = jax.jit(autocast(matmul, "float16"))
    assert autocast(lambda x: fn(x, x))(X).dtype == np.float16
    assert fn(X, X).dtype == np.float16
    plain = jax.jit(matmul)
    assert autocast(lambda x: plain(x, x))(X).dtype == jnp.bfloat16
    assert plain(X, X).dtype == np.float32


def test_a_region_that_is_off_changes_nothing() -> None:
    assert autocast(matmul, enabled=False)(X, W).dtype == np.float32
    assert jax.jit(autocast(matmul, enabled=False))(X, W).dtype == np.float32
    assert autocast(lambda x: x, enabled=False)("text") == "text"


def test_not_a_number_is_found_where_jax_looks_for_it() -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        autocast(lambda x: jnp.log(x - 2))(X)


def test_strict_promotion_and_missing_arguments_are_as_without() -> None:
    with jax.numpy_dtype_promotion("strict"):
        assert autocast(lambda x, w: jnp.tanh(x @ w + 1.0).sum())(X, W).dtype == np.float32
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        autocast(matmul)(X)


@pytest.mark.parametrize("name", ["enabled", "emulate"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_what_is_no_boolean_is_refused(name: str, value: Any) -> None:
    """`enabled="no"` counted as true."""
    with pytest.raises(CastingError, match=rf"{name}={value!r} is not a boolean\. Write {name}=True or"):
        autocast(jnp.sin, **{name: value})
    with pytest.raises(CastingError, match="is not a boolean"):
        autocast(**{name: value})(jnp.sin)
