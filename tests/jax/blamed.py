"""Small models to blame, all of the same shapes: what one test has compiled serves the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Loss = Callable[..., Any]

EXAMPLES, INPUTS, HIDDEN, CLASSES = 16, 16, 16, 8
_random = np.random.default_rng(0)


def normal(*shape: int, size: float | None = None) -> Any:
    size = shape[0] ** -0.5 if size is None else size
    return jnp.asarray(_random.normal(size=shape) * size, jnp.float32)


X = normal(EXAMPLES, INPUTS, size=1.0)
Y = jnp.asarray(_random.integers(0, CLASSES, EXAMPLES))
PARAMS = {
    "up": normal(INPUTS, HIDDEN),
    "bias": normal(HIDDEN, size=0.1),
    "query": normal(HIDDEN, HIDDEN),
    "key": normal(HIDDEN, HIDDEN),
    "down": normal(HIDDEN, CLASSES),
}


def cross_entropy(logits: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), Y[:, None], -1).mean()


def perceptron(p: Any, x: Any, act: Callable[[Any], Any] = jnp.tanh) -> Any:
    return cross_entropy(act(x @ p["up"] + p["bias"]) @ p["down"])


def attention(p: Any, x: Any, shift: float = 0.0) -> Any:
    """The loss of one attention layer; a shift of all keys changes nothing but the size of the logits."""
    x = jnp.tanh(x @ p["up"])
    logits = (x @ p["query"]) @ (x @ p["key"] + shift).T
    return cross_entropy((jax.nn.softmax(logits) @ x) @ p["down"])
