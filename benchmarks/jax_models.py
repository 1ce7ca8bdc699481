"""The networks that the JAX benchmarks run, as plain functions of dictionaries of arrays.

Each takes `low`. With None there are no casts. With a dtype the casts are written by hand, as an expert would
write them: products, biases and activations low; norms, softmax, residual stream and loss float32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]
F32 = jnp.float32


class Sizes(NamedTuple):
    """The sizes of a transformer."""

    layers: int
    width: int
    heads: int
    words: int
    length: int
    batch: int


def down(x: Any, low: Any) -> Any:
    return x if low is None else x.astype(low)


def up(x: Any, low: Any) -> Any:
    return x if low is None else x.astype(F32)


def count(params: Params) -> int:
    """Return how many parameters a model has."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def dense(rng: Any, fan_in: int, fan_out: int) -> Params:
    weight = rng.normal(size=(fan_in, fan_out)) * 0.5 / np.sqrt(fan_in)
    return {"w": jnp.asarray(weight, F32), "b": jnp.zeros(fan_out)}


def apply(layer: Params, x: Any, low: Any) -> Any:
    return down(x, low) @ down(layer["w"], low) + down(layer["b"], low)


def mlp_params(rng: Any, widths: tuple[int, ...]) -> Params:
    """Return a stack of dense layers."""
    return {"layers": [dense(rng, fan_in, fan_out) for fan_in, fan_out in pairwise(widths)]}


def mlp_loss(params: Params, batch: Any, low: Any = None) -> Any:
    """Return the cross-entropy of a stack of dense layers."""
    x, labels = batch
    *hidden, last = params["layers"]
    for layer in hidden:
        x = jax.nn.relu(apply(layer, x, low))
    return cross_entropy(up(apply(last, x, low), low), labels)


def mlp_batch(rng: Any, widths: tuple[int, ...], rows: int) -> Any:
    x, labels = rng.normal(size=(rows, widths[0])), rng.integers(widths[-1], size=rows)
    return jnp.asarray(x, F32), jnp.asarray(labels)


def gpt_params(rng: Any, sizes: Sizes) -> Params:
    """Return a transformer with tied embeddings."""
    tables = {
        name: jnp.asarray(rng.normal(size=(rows, sizes.width)) * 0.02, F32)
        for name, rows in (("words", sizes.words), ("places", sizes.length))
    }
    blocks = [block_params(rng, sizes.width) for _ in range(sizes.layers)]
    return {**tables, "blocks": blocks, "norm": norm_params(sizes.width)}


def block_params(rng: Any, d: int) -> Params:
    """Return a pre-norm transformer block."""
    return {
        "norms": [norm_params(d), norm_params(d)],
        "qkv": dense(rng, d, 3 * d),
        "out": dense(rng, d, d),
        "up": dense(rng, d, 4 * d),
        "down": dense(rng, 4 * d, d),
    }


def norm_params(d: int) -> Params:
    return {"g": jnp.ones(d), "b": jnp.zeros(d)}


def normalize(layer: Params, x: Any, low: Any) -> Any:
    x = up(x, low)
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * layer["g"] + layer["b"]


def attend(block: Params, x: Any, heads: int, low: Any) -> Any:
    rows, length, d = x.shape
    qkv = apply(block["qkv"], x, low).reshape(rows, length, 3, heads, d // heads)
    q, k, v = (qkv[:, :, part] for part in range(3))
    scores = up(jnp.einsum("bqhd,bkhd->bhqk", q, k), low) * (d // heads) ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = down(jax.nn.softmax(jnp.where(causal, scores, -1e9)), low)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, d)
    return apply(block["out"], mixed, low)


def transformer_block(block: Params, x: Any, heads: int, low: Any = None) -> Any:
    """Return a pre-norm transformer block's result."""
    x = x + attend(block, normalize(block["norms"][0], x, low), heads, low)
    hidden = jax.nn.gelu(apply(block["up"], normalize(block["norms"][1], x, low), low))
    return x + apply(block["down"], hidden, low)


def gpt_loss(params: Params, batch: Any, heads: int, low: Any = None) -> Any:
    """Return the cross-entropy of the next word."""
    words, following = batch
    x = params["words"][words] + params["places"][: words.shape[1]]
    for block in params["blocks"]:
        x = transformer_block(block, x, heads, low)
    logits = down(normalize(params["norm"], x, low), low) @ down(params["words"], low).T
    return cross_entropy(up(logits, low), following)


def gpt_batch(rng: Any, sizes: Sizes) -> Any:
    text = rng.integers(sizes.words, size=(sizes.batch, sizes.length + 1))
    return jnp.asarray(text[:, :-1]), jnp.asarray(text[:, 1:])


def cross_entropy(logits: Any, labels: Any) -> Any:
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -right.mean()
