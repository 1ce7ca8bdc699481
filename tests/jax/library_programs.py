"""Small programs of Equinox, Flax and optax."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.random import key

from .programs import program, x


@program(made=True, products=6)
def equinox_attention() -> Any:
    model = eqx.nn.MultiheadAttention(2, 8, key=key(0))
    return lambda model, a: model(a, a, a, mask=jnp.tril(jnp.ones((4, 4), bool))), model, x(4, 8)


@program(made=True, products=1)
def equinox_batch_norm() -> Any:
    """Its running averages come back as state."""
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "rows", mode="ema")
    leaves, tree = jax.tree.flatten(state)  # a state is used once

    def apply(norm: Any, w: Any, a: Any) -> Any:
        mapped = jax.vmap(
            lambda row: norm(row @ w, jax.tree.unflatten(tree, leaves)), axis_name="rows", out_axes=(0, None)
        )
        return mapped(a)

    return apply, norm, x(8, 3), x(4, 8)


@program(made=True, products=5)
def equinox_filter_grad() -> Any:
    model = eqx.nn.MLP(8, 3, 16, 1, key=key(0))
    loss = eqx.filter_value_and_grad(lambda model, a: jnp.mean(jax.vmap(model)(a) ** 2))
    return loss, model, x(4, 8)


def initialized(model: Any, *inputs: Any, of: str = "apply") -> Any:
    """Return the model's variables as NumPy arrays."""
    return jax.tree.map(np.asarray, model.init(key(0), *inputs))


class Block(linen.Module):
    @linen.compact
    def __call__(self, a: Any) -> Any:
        a = linen.LayerNorm()(a)
        return a + linen.MultiHeadDotProductAttention(num_heads=2)(a)


@program(made=True, products=6)
def linen_block() -> Any:
    model, a = Block(), x(2, 4, 8)
    return model.apply, initialized(model, a), a


class Normalized(linen.Module):
    @linen.compact
    def __call__(self, a: Any, train: bool) -> Any:
        a = linen.BatchNorm(use_running_average=not train)(linen.Conv(4, (3, 3))(a))
        return linen.Dropout(0.5, deterministic=not train)(a)


@program(made=True, products=1, mapped=False)
def linen_batch_norm() -> Any:
    model, a = Normalized(), x(2, 4, 4, 2)
    variables = initialized(model, a, False)

    def apply(variables: Any, a: Any) -> Any:
        return model.apply(variables, a, True, mutable=["batch_stats"], rngs={"dropout": key(1)})

    return apply, variables, a


class Cell(linen.Module):
    @linen.compact
    def __call__(self, h: Any, a: Any) -> Any:
        h = jnp.tanh(linen.Dense(8)(h) + a)
        return h, h


class Recurrent(linen.Module):
    @linen.compact
    def __call__(self, h: Any, a: Any) -> Any:
        body = linen.remat(Cell)
        scan = linen.scan(
            body, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
        )
        return scan()(h, a)


@program(made=True, products=1)
def linen_scan_of_remat() -> Any:
    model, h, a = Recurrent(), x(2, 8), x(2, 3, 8)
    return model.apply, initialized(model, h, a), h, a


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, a: Any) -> Any:
        return self.last(nnx.relu(self.norm(self.first(a))))


@program(made=True, products=2, mapped=False)
def nnx_module() -> Any:
    """Its running averages come back as state."""
    graph, state = nnx.split(Network(nnx.Rngs(0)))

    def apply(state: Any, a: Any) -> Any:
        model = nnx.merge(graph, state)
        return model(a), nnx.state(model, nnx.BatchStat)

    return apply, state, x(4, 8)


@program(x(8, 3), x(4, 8), products=2, loose=4)
def optax_step(w: Any, a: Any) -> Any:
    """A whole step: products forward and backward, then the optimizer's arithmetic."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((a @ w - 1) ** 2))(w)
    updates, state = optimizer.update(gradient, optimizer.init(w))
    return loss, optax.apply_updates(w, updates), state
