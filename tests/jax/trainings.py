"""A small training that overflows where a script says so, and what is compared after its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from preamp.jax import PendingState, value_and_grad

__all__ = [
    "SCRIPT",
    "batches",
    "enable_x64",
    "handed",
    "handing",
    "identical",
    "loss",
    "off_by",
    "parameters",
    "shard_map",
]

SCRIPT = "0010011000"  # "1" is an overflow


def parameters(dtype: Any = "float32") -> dict[str, jax.Array]:
    """Return a layer whose bias begins with a negative zero: adding a zero to it would show."""
    weight = np.random.default_rng(0).integers(-8, 9, (6, 4)) / 8
    return {"b": jnp.array([-0.0, 1.0, 0.5, 0.25], dtype), "w": jnp.asarray(weight, dtype)}


def loss(params: Any, x: Any) -> Any:
    """Return a float32 scalar, in strict dtype promotion too."""
    weight, bias = (params[name].astype(jnp.float32) for name in ("w", "b"))
    return jnp.mean(jnp.square(x @ weight + bias - 1.0))


@jax.custom_vjp
def handing(params: Any, scaled: Any, value: Any) -> Any:
    """Return a loss that has these gradients, whatever scale comes in backward."""
    return jnp.asarray(value, jnp.float32)


handing.defvjp(
    lambda params, scaled, value: (jnp.asarray(value, jnp.float32), scaled),
    lambda scaled, _: (scaled, None, None),
)


def handed(scaled: Any, state: Any, value: Any = 0.0) -> tuple[Any, PendingState]:
    """Return the gradients and the state after a backward pass that found these, still scaled."""
    _, *found = value_and_grad(handing, axis_name=())(scaled, state, scaled, value)
    return tuple(found)


def batches(script: str = SCRIPT) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield batches of 8 examples, and whether one of them overflows."""
    draw = np.random.default_rng(1)
    for number, mark in enumerate(script):
        x = draw.normal(size=(8, 6)).astype(np.float32)
        if mark == "1":
            x[number % 8, number % 6] = (np.inf, -np.inf, np.nan)[number % 3]
        yield x, mark == "1"


def identical(first: Any, second: Any) -> bool:
    """Return whether two trees are the same to the last bit, dtypes included."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(a.dtype == b.dtype and _bits(a) == _bits(b) for a, b in pairs)


def off_by(first: Any, second: Any) -> float:
    """Return by how much entries of two trees differ at most, in units of the largest of them."""
    pairs = [
        (np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True)
    ]
    return max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30)) for a, b in pairs if a.size)


def shard_map(function: Any, mesh: Mesh, inputs: Any, outputs: Any, checked: bool = True) -> Any:
    """Map over shards; before JAX 0.7 the function was elsewhere and its flag had another name."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=checked)
    from jax.experimental.shard_map import shard_map

    return shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_rep=checked)


def enable_x64(enabled: bool) -> Any:
    """Return the context in which numbers have 64 bits, or not; before JAX 0.8 it was elsewhere."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    from jax.experimental import enable_x64

    return enable_x64(enabled)


def _bits(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()
