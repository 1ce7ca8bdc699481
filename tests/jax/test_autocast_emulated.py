"""A rehearsal is the region: it has the same dtypes, numbers and overflows, and compiling it changes none.

The real region is compiled without excess precision, which XLA takes by default: it drops a cast to a low
precision and back, and with it the rounding and the overflow that a rehearsal is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from preamp.autocasting.tables import EXPLICIT_PRECISION, JAX
from preamp.jax import autocast

from .agreement import Run, every_fifth, numbers, off_by, slow
from .programs import PROGRAMS
from .trainings import enable_x64

half = pytest.mark.parametrize("low", ["float16", "bfloat16"])
ONE_ROUNDING = 1.0
"""Of the largest number: both add products up in float32, in any order, so sums may be rounded otherwise."""

ELSEWHERE = 0.05
"""Of the entries of a low result may be rounded otherwise because of that. A third are if one is missing."""


def executable(function: Callable[..., Any], *args: Any, excess: bool = True) -> Any:
    options: Any = {"xla_allow_excess_precision": excess, "xla_backend_optimization_level": 0}
    return jax.jit(function).lower(*args).compile(compiler_options=options)


def compiled(function: Callable[..., Any], *args: Any, excess: bool = True) -> Any:
    return executable(function, *args, excess=excess)(*args)


def assert_same(rehearsed: Any, real: Any, low: str) -> None:
    """Compare results of a rehearsal with those of the region: dtypes, what is not finite, and numbers."""
    pairs = list(zip(jax.tree.leaves(rehearsed), jax.tree.leaves(real), strict=True))
    assert [a.dtype for a, _ in pairs] == [b.dtype for _, b in pairs]
    for a, b in pairs:
        np.testing.assert_array_equal(_without_finite(a), _without_finite(b))
    found, expected = ([_finite(each) for each in side] for side in zip(*pairs, strict=True))
    assert off_by(found, expected, low) <= ONE_ROUNDING
    assert all(np.mean(a != b) <= ELSEWHERE for a, b in zip(found, expected, strict=True) if a.dtype == low)


def _without_finite(array: Any) -> Any:
    values = numbers(array)
    return np.where(np.isfinite(values), 0, values)


def _finite(array: Any) -> Any:
    return jnp.nan_to_num(array, posinf=0, neginf=0) if jnp.issubdtype(array.dtype, jnp.floating) else array


@pytest.mark.parametrize("low", ["float16", *slow("bfloat16")])
@pytest.mark.parametrize("name", every_fifth(list(PROGRAMS)))
def test_a_compiled_rehearsal_of_a_program_is_its_region(name: str, low: str) -> None:
    program = PROGRAMS[name]
    real, rehearsed = (Run(program, partial(autocast, dtype=low, emulate=each)) for each in (False, True))
    with enable_x64(program.x64):
        for way in [way.__name__ for way in real.ways]:
            exact = compiled(getattr(real, way), real.floats, real.others, excess=False)
            assert_same(compiled(getattr(rehearsed, way), real.floats, real.others), exact, low)


W, X = (np.random.default_rng(seed).standard_normal((16, 16)).astype(np.float32) for seed in (0, 1))
SEEN = np.tril(np.ones((16, 16), bool))


def perceptron(w: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ w + w[0]) @ w


def layer_norm(w: Any, x: Any) -> Any:
    h = x @ w
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5) * w[0]


def rms_norm(w: Any, x: Any) -> Any:
    h = x @ w
    return h * lax.rsqrt(jnp.mean((h * h).astype(jnp.float16), -1, keepdims=True) + 1e-5)


def attention(w: Any, x: Any) -> Any:
    scores = (x @ w) @ (x @ w).T / 4
    return jax.nn.softmax(jnp.where(SEEN, scores, -jnp.inf)) @ (x @ w)


def log_sum_exp(w: Any, x: Any) -> Any:
    h = x @ w
    top = h.max(-1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(h - top), -1)) + top[:, 0]


def cosine_similarity(w: Any, x: Any) -> Any:
    a, b = x @ w, x @ w.T
    return jnp.sum(a * b, -1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1))


def dice(w: Any, x: Any) -> Any:
    found = jax.nn.sigmoid(x @ w)
    return 1 - (2 * jnp.sum(found * SEEN) + 1) / (jnp.sum(found) + jnp.sum(SEEN) + 1)


def gru(w: Any, x: Any) -> Any:
    def cell(h: Any, row: Any) -> Any:
        gate = jax.nn.sigmoid(row @ w + h @ w.T)
        return (gate * h + (1 - gate) * jnp.tanh(row @ w + (gate * h) @ w)).astype(h.dtype), h

    return lax.scan(cell, jnp.zeros(16), x)


def branches(w: Any, x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x @ w * 3, x)


def rematerialized(w: Any, x: Any) -> Any:
    return jax.checkpoint(perceptron)(w, perceptron(w, x))


def mapped(w: Any, x: Any) -> Any:
    return jax.vmap(lambda row: jnp.square(jnp.sin(row @ w)))(x)


def half_by_hand(w: Any, x: Any) -> Any:
    low = (x @ w).astype(jnp.float16) * jnp.float16(3) + jnp.float16(100)
    return (low - jnp.float16(100)).astype(jnp.float32).sum(0), low.astype(jnp.bfloat16) * 0.1


def exponential(w: Any, x: Any) -> Any:
    """By default XLA drops the rounding of a product in bfloat16 that float32 follows."""
    return jnp.exp(x @ w * 0.5)


def squared_error(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.cumsum(x @ w, -1) - x) ** 2) ** 0.5


MODELS = [
    *(perceptron, layer_norm, rms_norm, attention, log_sum_exp, cosine_similarity, dice, gru),
    *(branches, rematerialized, mapped, half_by_hand, exponential, squared_error),
]


def with_gradients(model: Any) -> Callable[..., Any]:
    """Return a function with the results of a model, its gradients, and those of a large loss scale."""

    def both(w: Any, x: Any) -> Any:
        y, pull = jax.vjp(model, w, x)
        scaled = [jax.tree.map(lambda each, s=s: jnp.full_like(each, s), y) for s in (1.0, 2e4)]
        return y, *map(pull, scaled)

    return both


@half
@pytest.mark.parametrize("model", MODELS)
def test_a_rehearsed_model_has_the_dtypes_numbers_and_overflows_of_the_region(model: Any, low: str) -> None:
    real, rehearsed = (with_gradients(autocast(model, low, emulate=each)) for each in (False, True))
    exact, found = executable(real, W, X, excess=False), executable(rehearsed, W, X)
    for size in (1e-3, 1.0, 100.0):
        x = np.float32(size) * X
        assert_same(found(W, x), exact(W, x), low)
    assert_same(rehearsed(W, X), exact(W, X), low)


@half
def test_products_are_multiplied_in_float32_and_stored_low(low: str) -> None:
    program = jax.jit(with_gradients(autocast(perceptron, low, emulate=True))).lower(W, X).compile().as_text()
    assert set(re.findall(r"= (\w+)\[\S* (?:dot|convolution)\(", program)) == {"f32"}


def test_what_overflows_in_the_middle_overflows_when_it_is_compiled() -> None:
    def compare(fn: Any, **options: Any) -> Any:
        return np.isfinite(compiled(fn, W, 1000 * X, **options)).all()

    assert not compare(autocast(rms_norm, "float16"), excess=False) or compare(rms_norm)
    rehearsed = compiled(autocast(rms_norm, "float16", emulate=True), W, 1000 * X)
    np.testing.assert_array_equal(
        rehearsed, compiled(autocast(rms_norm, "float16"), W, 1000 * X, excess=False)
    )
    assert not np.asarray(rehearsed).any()  # each number over an infinite norm


@half
def test_no_cast_of_the_program_is_compiled_away(low: str) -> None:
    def chain(x: Any) -> Any:
        once = x.astype(low).astype(jnp.float32)
        return once, (x.astype(low) + 1).astype(jnp.float32) - 1, lax.map(lambda x: x.astype(low) + x, x)

    x = 1e-3 * np.arange(1, 2000, dtype=np.float32)
    expected = np.asarray(x).astype(jnp.dtype(low))
    found = compiled(autocast(chain, low, emulate=True), x)
    np.testing.assert_array_equal(found[0], expected.astype(np.float32))
    one = (expected + np.ones((), expected.dtype)).astype(np.float32)
    np.testing.assert_array_equal(found[1], one - 1)
    gradient = compiled(jax.grad(lambda x: jnp.vdot(autocast(chain, low, emulate=True)(x)[0], x)), x)
    np.testing.assert_array_equal(gradient, expected.astype(np.float32) + expected.astype(np.float32))


def of_one(operator: Any) -> Callable[[Any, Any], Any]:
    return lambda x, _: operator(x)


UNARY = """
    abs acos acosh asin asinh atan atanh cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor
    is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh
"""
BINARY = "add atan2 div eq ge gt igamma igammac le lt max min mul ne pow rem sub"
ALONG = "cumlogsumexp cummax cummin cumprod cumsum"
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: of_one(getattr(lax, name)) for name in UNARY.split()},
    **{name: getattr(lax, name) for name in BINARY.split()},
    **{name: of_one(partial(getattr(lax, name), axis=1)) for name in ALONG.split()},
    "argmax": lambda x, y: jnp.argmax(x, 1),
    "argmin": lambda x, y: jnp.argmin(x, 1),
    "broadcast_in_dim": lambda x, y: lax.broadcast(x, (2,)),
    "clamp": lambda x, y: lax.clamp(x, y, x + 1),
    "concatenate": lambda x, y: jnp.concatenate([x, y]),
    "conv_general_dilated": lambda x, y: lax.conv(x[None, None], y[None, None, :3, :3], (1, 1), "SAME"),
    "dot_general": lambda x, y: x @ y,
    "dynamic_slice": lambda x, y: lax.dynamic_slice(x, (1, 1), (2, 2)),
    "dynamic_update_slice": lambda x, y: lax.dynamic_update_slice(x, y[:2, :2], (1, 1)),
    "gather": lambda x, y: x[np.array([3, 1, 1])],
    "integer_pow": lambda x, y: x**3,
    "pad": lambda x, y: jnp.pad(x, 1),
    "polygamma": lambda x, y: lax.polygamma(jnp.ones_like(x), y),
    "ragged_dot_general": lambda x, y: lax.ragged_dot(x, y[None], np.array([len(x)])),
    "reduce_max": lambda x, y: x.max(0),
    "reduce_min": lambda x, y: x.min(0),
    "reduce_prod": lambda x, y: jnp.prod(x, 0),
    "reduce_sum": lambda x, y: jnp.sum(x, 0),
    "reduce_window_max": lambda x, y: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID"),
    "reduce_window_sum": lambda x, y: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
    "reshape": lambda x, y: x.ravel(),
    "rev": lambda x, y: x[::-1],
    "select_n": lambda x, y: jnp.where(x > y, x, y),
    "slice": lambda x, y: x[1:3],
    "sort": lambda x, y: jnp.sort(x, 1),
    "split": lambda x, y: jnp.split(x, 2)[1],
    "squeeze": lambda x, y: x[None].squeeze(0),
    "stop_gradient": lambda x, y: lax.stop_gradient(x),
    "top_k": lambda x, y: lax.top_k(x, 2)[0],
    "transpose": lambda x, y: x.T,
}
NOT_HERE = """
    add_any all_gather all_gather_invariant all_to_all approx_top_k copy copy_p device_put expand_dims
    log2 mul_add name one_minus_square optimization_barrier pbroadcast pcast pmax pmin ppermute psum psum2
    psum_invariant psum_scatter pvary ragged_dot reduce_scatter reduce_window_min reshard
    sharding_constraint unreduced_psum
"""
"""What a derivative, several devices or another JAX has, or what the programs above hold."""


def test_every_operator_of_the_table_is_compared() -> None:
    assert OPERATORS.keys() | {*NOT_HERE.split(), EXPLICIT_PRECISION} >= JAX.rules.keys()


def each_operator(x: Any, y: Any, low: str, emulate: bool) -> Iterator[tuple[str, Any]]:
    """Yield the results of each operator on low numbers and on mixed ones, and the slopes of what is real."""
    for name, operator in OPERATORS.items():
        mixed = partial(lambda f, x, y: f(jnp.tanh(x @ y), jnp.exp(-y * y)), operator)
        lows = x.astype(low), y.astype(low)
        for kind, fn, given in (("mixed", mixed, (x, y)), ("low", operator, lows)):
            result, slopes = jax.vjp(autocast(fn, low, emulate=emulate), *given)
            yield f"{name}, {kind}", result
            if jnp.issubdtype(result.dtype, jnp.floating):
                yield f"{name}, {kind}, backward", slopes(jnp.ones_like(result))


@half
def test_every_operator_rehearses_what_it_computes(low: str) -> None:
    x, y = 0.3 * X[:4, :4] + 1, abs(W[:4, :4]) + 0.5
    real, rehearsed = (
        compiled(lambda x, y, e=each: dict(each_operator(x, y, low, e)), x, y, excess=each)
        for each in (False, True)
    )
    for name in real:
        try:
            assert_same(rehearsed[name], real[name], low)
        except AssertionError as error:
            raise AssertionError(name) from error
