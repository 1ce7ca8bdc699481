"""What a transformer costs under autocast: bytes kept for the backward pass, casts, compiled work."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from preamp.jax import autocast

from .agreement import slow
from .reading import HALVES, casts, dtypes, traced

LAYERS, WIDTH, HEADS, TOKENS, BATCH, LENGTH = 2, 64, 4, 96, 4, 32
RESIDUALS = 0.65
each_half = pytest.mark.parametrize("low", [HALVES[0], *slow(*HALVES[1:])])
ALIKE = 1.02


def normal(*shape: int) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def block_weights() -> dict[str, np.ndarray]:
    vector, wide = np.zeros(WIDTH, np.float32), np.zeros(4 * WIDTH, np.float32)
    return {
        "first": vector + 1, "qkv": normal(WIDTH, 3 * WIDTH), "out": normal(WIDTH, WIDTH), "out_bias": vector,
        "second": vector + 1, "up": normal(WIDTH, 4 * WIDTH), "up_bias": wide,
        "down": normal(4 * WIDTH, WIDTH), "down_bias": vector,
    }  # fmt: skip


def normalised(x: Any, gain: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain


def heads(x: Any) -> Any:
    return x.reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3)


def block(p: Any, x: Any) -> Any:
    q, k, v = jnp.split(normalised(x, p["first"]) @ p["qkv"], 3, -1)
    scores = jnp.einsum("bhqd,bhkd->bhqk", heads(q), heads(k)) / jnp.sqrt(WIDTH // HEADS)
    attention = jax.nn.softmax(jnp.where(np.tri(LENGTH, dtype=bool), scores, -1e9))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", attention, heads(v)).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + (mixed @ p["out"] + p["out_bias"])
    hidden = jax.nn.gelu(normalised(x, p["second"]) @ p["up"] + p["up_bias"])
    return x + (hidden @ p["down"] + p["down_bias"])


def block_by_hand(p: Any, x: Any, low: str) -> Any:
    def down(value: Any) -> Any:
        return value.astype(low)

    def up(value: Any) -> Any:
        return value.astype(np.float32)

    q, k, v = jnp.split(down(normalised(x, p["first"])) @ down(p["qkv"]), 3, -1)
    scores = up(jnp.einsum("bhqd,bhkd->bhqk", heads(q), heads(k))) / jnp.sqrt(WIDTH // HEADS)
    attention = down(jax.nn.softmax(jnp.where(np.tri(LENGTH, dtype=bool), scores, -1e9)))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", attention, heads(v)).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + (up(mixed @ down(p["out"])) + p["out_bias"])
    hidden = jax.nn.gelu(down(normalised(x, p["second"])) @ down(p["up"]) + down(p["up_bias"]))
    return x + (up(hidden @ down(p["down"])) + p["down_bias"])


def transformer(p: Any, tokens: Any) -> Any:
    x = p["tokens"][tokens] + p["places"]
    for weights in p["blocks"]:
        x = block(weights, x)
    log_odds = jax.nn.log_softmax(normalised(x, 1.0) @ p["tokens"].T)
    return -jnp.take_along_axis(log_odds, tokens[..., None], -1).mean()


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    weights = {
        "tokens": normal(TOKENS, WIDTH),
        "places": normal(LENGTH, WIDTH),
        "blocks": [block_weights() for _ in range(LAYERS)],
    }
    return weights, np.random.default_rng(0).integers(0, TOKENS, (BATCH, LENGTH))


def kept(fn: Any, p: Any, tokens: Any) -> int:
    """Return the bytes that a function keeps for its backward pass, each array once."""
    _, backward = jax.vjp(lambda p: fn(p, tokens), p)
    return sum({id(leaf): np.asarray(leaf).nbytes for leaf in jax.tree.leaves(backward)}.values())


@each_half
def test_the_backward_pass_keeps_at_most_two_thirds(model: Any, low: str) -> None:
    assert kept(autocast(transformer, low), *model) <= RESIDUALS * kept(transformer, *model)


def test_every_product_is_low_and_every_weight_cast_once(model: Any) -> None:
    equations = traced(autocast(transformer), *model)
    assert dtypes(autocast(transformer), *model) == ["bfloat16"] * (6 * LAYERS + 1)
    down = [pair for pair in casts(equations) if pair == ("float32", "bfloat16")]
    matrices, vectors, activations = 4 * LAYERS + 1, LAYERS, 3 * LAYERS + 1
    assert len(down) == matrices + vectors + activations


def test_the_backward_pass_runs_low_as_well(model: Any) -> None:
    given = dtypes(jax.grad(autocast(transformer)), *model)
    assert given == ["bfloat16"] * 3 * (6 * LAYERS + 1)


@each_half
def test_a_block_compiles_to_the_work_of_one_cast_by_hand(low: str) -> None:
    def derive(fn: Any) -> Any:
        return jax.grad(lambda *args: fn(*args).sum(), (0, 1))

    x = normal(BATCH, LENGTH, WIDTH)
    ours = compiled(derive(autocast(block, low)), block_weights(), x)
    by_hand = compiled(derive(lambda p, x: block_by_hand(p, x, low)), block_weights(), x)
    for cost in ("flops", "bytes accessed"):
        assert ours[cost] <= ALIKE * by_hand[cost]


def compiled(fn: Any, *args: Any) -> dict[str, float]:
    costs = jax.jit(fn).lower(*args).compile().cost_analysis()
    return costs[0] if isinstance(costs, list) else costs
