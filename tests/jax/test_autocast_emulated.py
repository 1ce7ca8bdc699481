"""Rehearsed precision: rounding is a cast's, and an emulated run is the low run."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from preamp.jax import autocast

from .agreement import slow
from .inside import rounded

DTYPES = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]

float32s = arrays(np.float32, 32, elements=st.floats(width=32))
ordinary = float32s.map(lambda x: np.where(abs(x) < 1e-30, np.float32(0), x))
"""Numbers whose sums are no subnormal float32: compiled arithmetic takes those for 0."""


def cast(x, dtype):
    """Return what ml_dtypes' cast and back gives."""
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float32).astype(jnp.dtype(dtype)).astype(np.float32)


def assert_same_numbers(actual, expected):
    """Compare bit for bit, but for the bits inside a NaN."""
    for values in (actual, expected):
        assert values.dtype == np.float32
    np.testing.assert_array_equal(_bits(actual), _bits(expected))


def _bits(values):
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.int32)


def patterns():
    """Return every first half with the second halves that decide ties, and others spread over all float32."""
    tops = np.arange(2**16, dtype=np.uint32) << 16
    endings = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF], np.uint32)
    spread = np.arange(2**20, dtype=np.uint64) * 4093 % 2**32
    return np.concatenate([(tops[:, None] | endings).ravel(), spread.astype(np.uint32)]).view(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_the_cast_for_every_kind_of_number(dtype):
    x = patterns()
    assert_same_numbers(jax.jit(rounded, static_argnums=1)(x, dtype), cast(x, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_dtype_holds_is_left_as_it_is(dtype):
    bits = jnp.finfo(dtype).bits
    held = np.arange(2**bits, dtype=f"uint{bits}").view(jnp.dtype(dtype)).astype(np.float32)
    assert_same_numbers(rounded(held, dtype), held)


@cache
def places(dtype):
    """Return rounding as it happens under every transformation."""

    def one(x):
        return rounded(x, dtype)

    return {
        "jit": jax.jit(one),
        "vmap": jax.jit(jax.vmap(one)),
        "scan": jax.jit(lambda x: jax.lax.map(one, x)),
        "checkpoint": jax.jit(jax.checkpoint(one)),
        "jvp": jax.jit(lambda x: jax.jvp(one, (x,), (x,))[1]),
        "vjp": jax.jit(lambda x: jax.vjp(one, x)[1](x)[0]),
        "linearize": jax.jit(lambda x: jax.linearize(one, x)[1](x)),
        "gradient of a gradient": jax.jit(
            lambda x: jax.jvp(jax.grad(lambda y: jnp.sum(jnp.square(one(y)) / 2)), (x,), (x,))[1]
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=15)
@given(x=float32s)
def test_rounding_is_the_same_under_every_transformation(dtype, x):
    low = cast(x, dtype)
    assert_same_numbers(rounded(x, dtype), low)
    doubled_is_infinite = np.isfinite(low) & (abs(low) >= 2.0**127)  # as the gradient of a square may be
    x = np.where(doubled_is_infinite, np.float32(0), x)
    for name, place in places(dtype).items():
        if name == "gradient of a gradient":  # compiled arithmetic may take subnormal numbers for 0
            x = np.where(abs(low) < np.finfo(np.float32).smallest_normal, np.float32(0), x)
        assert_same_numbers(place(x), cast(x, dtype))


@cache
def between_other_operations(dtype):
    return jax.jit(lambda x, y: rounded(3 * rounded(rounded(x, dtype) - rounded(y, dtype), dtype), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=15)
@given(x=ordinary, y=ordinary)
def test_rounding_between_operations_of_one_fusion_is_kept(dtype, x, y):
    with np.errstate(all="ignore"):
        difference = cast(cast(x, dtype) - cast(y, dtype), dtype)
        expected = cast(3 * difference, dtype)
    assert_same_numbers(between_other_operations(dtype)(x, y), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_rounding_compiles_to_one_fusion_in_float32(dtype):
    text = jax.jit(rounded, static_argnums=1).lower(jnp.zeros(8), dtype).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert len(re.findall(r" fusion\(| reduce-precision\(", entry)) == 1
    assert set(re.findall(r"\b[a-z]+\d+\w*(?=\[)", entry)) == {"f32"}


def numbers(*shape, scale=1.0, seed=0):
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def perceptron(layers, x):
    *hidden, (weight, bias) = layers
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    return x @ weight + bias


def attention(params, x):
    q, k, v = jnp.split(x @ params["qkv"], 3, -1)
    return jax.nn.softmax(q @ k.T * np.float32(8**-0.5)) @ v @ params["out"]


def scan(weights, x):
    def turn(x, weight):
        x = jax.nn.relu(x @ weight)
        return x, x @ weight

    return jax.lax.scan(turn, x, weights)[1]


NETWORKS = {
    "perceptron": (
        perceptron,
        [
            (numbers(16, 32, scale=0.3), numbers(32)),
            (numbers(32, 32, scale=0.2), numbers(32)),
            (numbers(32, 4), numbers(4)),
        ],
        numbers(8, 16),
    ),
    "attention": (attention, {"qkv": numbers(8, 24), "out": numbers(8, 8)}, numbers(6, 8)),
    "scan": (scan, numbers(3, 8, 8, scale=0.4), numbers(4, 8)),
}
HALVES = ["float16", "bfloat16"]
ELSEWHERE = 0.02  # of the entries may be rounded the other way, because sums are taken in another order
ROUNDINGS = 0.25  # of the dtype: what gradients of weights, which are float32, may differ by because of those


def loss_of(network, dtype, emulate, factor=1.0):
    def loss(params, x):
        y = autocast(network, dtype, emulate=emulate)(params, x)
        return factor * jnp.sum(y.astype(jnp.float32) ** 2), y

    return loss


@cache
def run(name, dtype, emulate, factor=1.0):
    """Return what a network computes and its gradients, one operator after the other."""
    network, params, x = NETWORKS[name]
    gradients, y = jax.grad(loss_of(network, dtype, emulate, factor), has_aux=True)(params, x)
    return [np.asarray(leaf) for leaf in (y, *jax.tree.leaves(gradients))]


def assert_same_run(rehearsed, real, dtype):
    """Compare entry by entry: none differs by more than two roundings, and the result's hardly ever."""
    eps = float(jnp.finfo(dtype).eps)
    for a, b in zip(rehearsed, real, strict=True):
        assert a.dtype == np.float32
        wide = np.asarray(b, np.float32)
        np.testing.assert_allclose(a, wide, rtol=0, atol=2 * eps * np.abs(wide).max())
        if b.dtype == dtype:
            assert np.mean(a != wide) <= ELSEWHERE
        else:
            assert np.linalg.norm(a - wide) <= ROUNDINGS * eps * np.linalg.norm(wide)


@pytest.mark.parametrize("dtype", [HALVES[0], *slow(*HALVES[1:])])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_rehearsal_computes_what_the_low_run_computes(name, dtype):
    network, params, x = NETWORKS[name]
    rehearsed, real = run(name, dtype, True), run(name, dtype, False)
    assert real[0].dtype == dtype
    assert_same_run(rehearsed, real, dtype)
    assert_same_numbers(rehearsed[0], cast(rehearsed[0], dtype))
    unrounded = np.asarray(network(params, x))
    assert np.mean(rehearsed[0] != unrounded) > np.mean(unrounded != 0) / 2


@pytest.mark.parametrize("name", NETWORKS)
def test_a_compiled_rehearsal_is_the_low_run_and_nothing_in_it_is_low(name):
    network, params, x = NETWORKS[name]
    gradients = jax.grad(loss_of(network, "float16", True), has_aux=True)
    compiled = jax.jit(gradients).lower(params, x).compile()
    assert not re.search(r"\b(f16|bf16|f8\w*)\[", compiled.as_text())
    weights, y = compiled(params, x)
    results = [np.asarray(leaf) for leaf in (y, *jax.tree.leaves(weights))]
    assert_same_run(results, run(name, "float16", False), "float16")


@pytest.mark.parametrize(
    ("name", "factor"),
    {"perceptron": 2.0**-28, "attention": 2.0**-30, "scan": 2.0**-27}.items(),
)
def test_what_underflows_in_float16_underflows_in_the_rehearsal(name, factor):
    (_, *rehearsed), (_, *real) = (run(name, "float16", emulate, factor) for emulate in (True, False))
    zeros = np.mean(np.concatenate([gradient.ravel() for gradient in real]) == 0)
    assert 0.2 < zeros < 0.9
    for a, b in zip(rehearsed, real, strict=True):
        np.testing.assert_array_equal(a == 0, b == 0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_rounds_operands_and_results_and_not_the_gradients_of_what_was_cast(dtype):
    x, w, seed = numbers(4, 8), numbers(8, 4), numbers(4, 4, seed=1)
    y, back = jax.vjp(autocast(lambda x, w: x @ w, dtype, emulate=True), x, w)
    low_x, low_w, low_seed = (cast(each, dtype) for each in (x, w, seed))
    assert_same_numbers(np.asarray(y), cast(low_x @ low_w, dtype))
    given = map(np.asarray, back(jnp.asarray(seed)))
    for gradient, product in zip(given, (low_seed @ low_w.T, low_x.T @ low_seed), strict=True):
        np.testing.assert_allclose(gradient, product, rtol=1e-6, atol=1e-6)


MASK = np.tril(np.ones((6, 6), bool))


def masked_by_where(scores):
    return jax.nn.softmax(jnp.where(MASK, scores, -jnp.inf))


def masked_by_sum(scores):
    return jax.nn.softmax(scores + jnp.where(MASK, 0.0, -jnp.inf))


def masked_in_softmax(scores):
    return jax.nn.softmax(scores, where=MASK)


def not_masked(scores):
    return jax.nn.softmax(scores)  # which takes the largest score and -inf


MASKED = [masked_by_where, masked_by_sum, masked_in_softmax, not_masked]


@pytest.mark.parametrize(
    ("program", "dtype"),
    [
        *((program, "float8_e4m3fn") for program in MASKED),
        (masked_by_where, "float16"),
        (masked_by_sum, "float8_e5m2"),
    ],
)
def test_an_infinite_constant_stays_infinite(program, dtype):
    """In float8_e4m3fn, which has none, a cast would make it NaN: it keeps its operator in float32."""
    draw = np.random.default_rng(0)
    queries, keys = (draw.normal(size=(6, 8)).astype(np.float32) for _ in range(2))
    weights = draw.normal(size=(6, 6)).astype(np.float32)

    def loss(queries):
        found = program(queries @ keys.T)
        return jnp.sum(found * weights)

    scores = cast(cast(queries, dtype) @ cast(keys, dtype).T, dtype)
    rehearsed = jax.jit(autocast(lambda x: program(x @ keys.T), dtype, emulate=True))(queries)
    np.testing.assert_allclose(rehearsed, program(jnp.asarray(scores)), rtol=1e-5)
    gradient = jax.jit(jax.grad(autocast(loss, dtype, emulate=True)))(queries)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).any()
