"""What blame costs in JAX: time and memory of a transformer of 12 layers beside a step in float32.

It is the model of blame_cost.py. Run: python benchmarks/blame_cost_jax.py

Each is run in a process of its own, because memory is its peak.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

WIDTH, HEADS, LAYERS, WORDS, BATCH, LENGTH = 256, 8, 12, 8000, 8, 256

Params = dict[str, Any]


def main() -> None:
    """Print the table, or run what an argument names."""
    if len(sys.argv) == 1:
        print(f"{'':24}  seconds  peak of memory above the start, MiB")
        for name in ("step", "blame"):
            subprocess.run([sys.executable, __file__, name], check=True)
        return
    params, words = _params(), jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, WORDS)
    jax.block_until_ready((params, words))
    if sys.argv[1] == "step":
        step = jax.jit(jax.value_and_grad(loss)).lower(params, words).compile()
        before, start = _peak(), time.perf_counter()
        jax.block_until_ready(step(params, words))
        name = "step"
    else:
        import preamp.jax

        before, start = _peak(), time.perf_counter()
        preamp.jax.blame(loss, params, words)
        name = "blame, bfloat16"
    print(f"{name:24}  {time.perf_counter() - start:7.1f}  {_peak() - before:,.0f}")


def loss(params: Params, words: Array) -> Array:
    """Return the mean cross entropy of the next words."""
    x = params["words"][words[:, :-1]]
    for layer in params["layers"]:
        x = _block(layer, x)
    logits = _norm(params["last"], x) @ params["head"]
    chances = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(chances, words[:, 1:, None], -1).mean()


def _block(p: Params, x: Array) -> Array:
    parts = (_norm(p["first"], x) @ p["qkv"]).reshape(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS)
    query, key, value = jnp.moveaxis(parts, (2, 3), (0, 2))
    weights = jax.nn.softmax(query @ jnp.swapaxes(key, -1, -2) / (WIDTH // HEADS) ** 0.5)
    x = x + jnp.swapaxes(weights @ value, 1, 2).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(_norm(p["second"], x) @ p["up"]) @ p["down"]


def _norm(p: Params, x: Array) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    return (
        centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]
    )


def _params() -> Params:
    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS + 2))

    def weight(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def norm() -> Params:
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    layers = [
        {
            "first": norm(),
            "qkv": weight(WIDTH, 3 * WIDTH),
            "out": weight(WIDTH, WIDTH),
            "second": norm(),
            "up": weight(WIDTH, 4 * WIDTH),
            "down": weight(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {"words": weight(WORDS, WIDTH), "layers": layers, "last": norm(), "head": weight(WIDTH, WORDS)}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
