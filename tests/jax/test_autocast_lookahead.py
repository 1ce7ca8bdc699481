"""What only a rewriter that sees the whole program can do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from preamp.jax import autocast

from .reading import HALVES, body, casts, dtypes, traced

RANDOM = np.random.default_rng(0)
X, W, B = (RANDOM.normal(size=shape).astype(np.float32) for shape in ((4, 8), (8, 8), (8,)))

FLOAT32_EPS = np.finfo(np.float32).eps

each_half = pytest.mark.parametrize("low", HALVES)


@each_half
@pytest.mark.parametrize("fn", [jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp])
def test_a_softmax_of_low_logits_is_the_one_in_float32(fn: Any, low: str) -> None:
    logits = autocast(jnp.matmul, low)(X, W)
    assert logits.dtype == low
    result = autocast(lambda x, w: fn(x @ w), low)(X, W)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, fn(logits.astype(np.float32)), rtol=2 * FLOAT32_EPS)


@each_half
def test_scaled_and_masked_logits_reach_softmax_unrounded(low: str) -> None:
    def scores(x: Any, keys: Any) -> Any:
        return jnp.where(np.tri(4, dtype=bool), (x @ keys.T) / jnp.sqrt(8), -1e9)

    products = autocast(lambda x, keys: x @ keys.T, low)(X, X).astype(np.float32)
    expected = jax.nn.softmax(jnp.where(np.tri(4, dtype=bool), products / jnp.sqrt(8), -1e9))
    assert (autocast(lambda x, keys: jax.nn.softmax(scores(x, keys)), low)(X, X) == expected).all()


@each_half
def test_a_bias_added_to_a_product_stays_low(low: str) -> None:
    def layer(x: Any, w: Any, b: Any) -> Any:
        return jnp.tanh(x @ w + b)

    assert autocast(layer, low)(X, W, B).dtype == low
    assert casts(traced(autocast(layer, low), X, W, B)) == [("float32", low)] * 3
    assert dtypes(autocast(layer, low), X, W, B, of="tanh") == [low]


def test_an_input_added_to_a_product_is_no_bias() -> None:
    assert autocast(lambda x, w: x + x @ w)(X, W).dtype == np.float32


@each_half
@given(st.floats(width=32, allow_nan=False))
@settings(max_examples=25, deadline=None)
def test_a_number_in_the_program_widens_only_what_cannot_hold_it(low: str, number: float) -> None:
    with np.errstate(all="ignore"):
        held = np.float32(number).astype(jnp.dtype(low)).astype(np.float32)
    kept = np.isinf(number) or (np.isfinite(held) and (held != 0 or number == 0))
    result = jax.eval_shape(autocast(lambda x, w: jnp.maximum(x @ w, number), low), X, W)
    assert result.dtype == (low if kept else np.float32)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda y: y + 1e-12, {"float16": "float32", "bfloat16": "bfloat16"}),
        (lambda y: y + 1e-6, {"float16": "float16", "bfloat16": "bfloat16"}),
        (lambda y: jnp.where(y > 0, y, -1e9), {"float16": "float32", "bfloat16": "bfloat16"}),
        (lambda y: jnp.where(y > 0, y, -jnp.inf), {"float16": "float16", "bfloat16": "bfloat16"}),
        (lambda y: jnp.where(y > 0, y, jnp.finfo("float32").min), dict.fromkeys(HALVES, "float32")),
        (lambda y: jnp.clip(y, 0, 6), {"float16": "float16", "bfloat16": "bfloat16"}),
        (lambda y: jnp.where(y > 0, y, 0) / 0.9, {"float16": "float16", "bfloat16": "bfloat16"}),
        (lambda y: y / jnp.sqrt(64.0), {"float16": "float16", "bfloat16": "bfloat16"}),
        (lambda y: y * jnp.mean(B), {"float16": "float32", "bfloat16": "float32"}),
        (jax.nn.relu, {"float16": "float16", "bfloat16": "bfloat16"}),
        (jax.nn.gelu, {"float16": "float16", "bfloat16": "bfloat16"}),
        (jax.nn.silu, {"float16": "float16", "bfloat16": "bfloat16"}),
        (lax.stop_gradient, {"float16": "float16", "bfloat16": "bfloat16"}),
        (lambda y: y.mean(), {"float16": "float32", "bfloat16": "float32"}),
        (lambda y: y.var(), {"float16": "float32", "bfloat16": "float32"}),
        (lambda y: y.max(), {"float16": "float16", "bfloat16": "bfloat16"}),
        (jnp.cumsum, {"float16": "float32", "bfloat16": "float32"}),
        (jnp.sort, {"float16": "float16", "bfloat16": "bfloat16"}),
        (lambda y: y.astype("float16").astype("bfloat16"), dict.fromkeys(HALVES, "bfloat16")),
    ],
)
@each_half
def test_what_becomes_of_a_product(fn: Any, expected: dict[str, str], low: str) -> None:
    assert jax.eval_shape(autocast(lambda x, w: fn(x @ w), low), X, W).dtype == expected[low]


def test_a_weight_and_its_transpose_share_one_cast() -> None:
    def tied(x: Any, w: Any) -> Any:
        return (x @ w @ w.T).reshape(8, 4) @ w.reshape(4, 16) @ w.T.reshape(16, 4)

    assert casts(traced(autocast(tied), X, W)) == [("float32", "bfloat16")] * 2


def test_a_weight_that_is_also_summed_is_cast_once() -> None:
    def penalised(x: Any, w: Any) -> Any:
        return x @ w @ w, (w * w).sum()

    assert casts(traced(autocast(penalised), X, W)) == [("float32", "bfloat16")] * 2


def test_integers_become_low_without_a_detour() -> None:
    one_hot = autocast(lambda i, w: (i[:, None] == jnp.arange(8)).astype("float32") @ w)
    assert casts(traced(one_hot, np.arange(4), W)) == [("float32", "bfloat16")]


@pytest.mark.parametrize("fold", ["scan", "while"])
def test_a_weight_is_cast_outside_of_the_loop(fold: str) -> None:
    def looped(x: Any, w: Any) -> Any:
        def turn(x: Any) -> Any:
            return jnp.tanh(x @ w @ w.T)

        if fold == "scan":
            return lax.scan(lambda x, _: (turn(x), None), x, length=3)[0]
        return lax.while_loop(lambda x: x[0, 0] < 9, turn, x)

    key = "jaxpr" if fold == "scan" else "body_jaxpr"
    inside = casts(body(autocast(looped), X, W, of=fold, key=key))
    assert inside == [("float32", "bfloat16"), ("bfloat16", "float32")]  # what is carried
    assert casts(traced(autocast(looped), X, W)) == [("float32", "bfloat16"), *inside]


@pytest.mark.parametrize(
    "product",
    [
        autocast(jnp.matmul, enabled=False),
        lambda x, w: lax.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32),
    ],
)
def test_a_weight_of_what_stays_in_float32_is_cast_nowhere(product: Any) -> None:
    def looped(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, _: (product(x, w.T), None), x, length=3)[0]

    assert dtypes(autocast(looped), X, W) == ["float32"]
    assert casts(traced(autocast(looped), X, W)) == []


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_a_weight_that_blocks_share_is_cast_once(wrap: Any) -> None:
    block = wrap(lambda x, w: jnp.tanh(x @ w))

    def blocks(x: Any, w: Any) -> Any:
        return block(block(block(x, w), w), w)

    assert casts(traced(jax.jit(autocast(blocks)), X, W)) == [("float32", "bfloat16")] * 2


def test_blocks_that_are_alike_are_rewritten_once() -> None:
    block = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def blocks(x: Any, w: Any) -> Any:
        x = (x @ w).astype(np.float32)
        for _ in range(3):
            x = block(x, w)
        return x

    calls = [it for it in jax.make_jaxpr(autocast(blocks))(X, W).eqns if "jaxpr" in it.params]
    assert len({id(it.params["jaxpr"]) for it in calls}) == 1 < len(calls)


def test_no_cast_is_taken_back() -> None:
    def wandering(x: Any, w: Any) -> Any:
        y = (x @ w).astype("bfloat16").astype("float32") @ w
        return lax.optimization_barrier(y).T.astype("float32") @ y

    made = [it for it in traced(autocast(wandering), X, W) if it.primitive.name == "convert_element_type"]
    assert len(made) == 2
    assert not {id(it.invars[0]) for it in made} & {id(it.outvars[0]) for it in made}
