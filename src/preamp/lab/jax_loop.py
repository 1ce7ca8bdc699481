"""The training loop in JAX: one compiled step, as a user of `preamp.jax` would write it.

`autocast(emulate=True)` rehearses low precision. JAX's own float16 products are summed in float32 too, at
float32's speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from preamp.jax import apply_gradients, autocast, check_starved, last_step, loss_scaled, scaled_value_and_grad
from preamp.lab import ADAM_EPSILON, ZEROS_EVERY, Precision
from preamp.lab.problem import Problem, share_of_zeros
from preamp.policy import Policy
from preamp.trace import Step

__all__ = ["JaxLoop"]

Layers: TypeAlias = list[tuple[jax.Array, jax.Array]]


class JaxLoop:
    """One training of one problem. The arguments are those of `preamp.lab.runs.Loop`."""

    def __init__(
        self,
        problem: Problem,
        precision: Precision,
        policy: Policy[Any] | None,
        seed: int,
        *,
        emulate: bool = True,
    ) -> None:
        self.problem, self.seed, self.policy = problem, seed, policy
        self.products = _products
        if precision != "float32":
            self.products = autocast(_products, precision, emulate=emulate)
        self.optimizer = optax.adam(problem.learning_rate, eps=ADAM_EPSILON)
        if policy is not None:
            self.optimizer = loss_scaled(self.optimizer, policy)
        layers = [(weight.T, np.zeros(len(weight), np.float32)) for weight in problem.initial_weights(seed)]
        state = layers, self.optimizer.init(layers)
        self.layers, self.state = jax.device_put(state, jax.local_devices(backend="cpu")[0])
        self.train_step = jax.jit(self._train_step)

    def steps(self) -> Iterator[Step]:
        """Train, yielding one `Step` after each update."""
        inputs, labels = self.problem.table.train, self.problem.table.train_labels
        for index, rows in enumerate(self.problem.batches(self.seed)):
            start = time.perf_counter()
            after = self.train_step(self.layers, self.state, inputs[rows], labels[rows])
            loss, gradients, peak, self.layers, self.state = after
            zeros = share_of_zeros(gradients) if index % ZEROS_EVERY == 0 else None
            step = last_step(self.state) if self.policy else None
            step = step or Step(index, 1.0, finite=True, skipped=False)
            step = step._replace(loss=float(loss), peak=float(peak), zeros=zeros)
            yield step._replace(seconds=time.perf_counter() - start)
            if self.policy and step.skipped:
                check_starved(self.state, self.policy)

    def outputs(self) -> NDArray[np.float32]:
        """Return what the network answers on the test rows, in the precision it was trained in."""
        return np.asarray(self._outputs(self.layers, jnp.asarray(self.problem.table.test)))

    def _train_step(
        self, layers: Layers, state: Any, inputs: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, list[jax.Array], jax.Array, Layers, Any]:
        """Return the loss, the weights' gradients of the scaled loss, their peak, and what is next."""
        if self.policy is None:
            loss, gradients = jax.value_and_grad(self._loss)(layers, inputs, labels)
            updates, state = self.optimizer.update(gradients, state, layers)
            layers = optax.apply_updates(layers, updates)
        else:
            loss, scaled = scaled_value_and_grad(self._loss)(state, layers, inputs, labels)
            layers, state = apply_gradients(self.optimizer, scaled, state, layers)
            gradients = scaled.gradients
        of_weights = [weight for weight, _ in gradients]
        return loss, of_weights, _peak(of_weights), layers, state

    def _outputs(self, layers: Layers, inputs: jax.Array) -> jax.Array:
        """Return what the network answers, in float32 from the last product on."""
        answers = self.products(layers, inputs).astype(jnp.float32)
        return jax.nn.sigmoid(answers) if self.problem.loss == "squared" else answers

    def _loss(self, layers: Layers, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        outputs = self._outputs(layers, inputs)
        if self.problem.loss == "squared":
            return jnp.mean(jnp.square(outputs - inputs))
        return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(outputs, labels))


def _products(layers: Layers, values: jax.Array) -> jax.Array:
    """Return what the last layer says, before any sigmoid of it."""
    (weight, bias), *others = layers
    products = values @ weight + bias
    for weight, bias in others:
        products = jax.nn.sigmoid(products) @ weight + bias
    return products


def _peak(gradients: list[jax.Array]) -> jax.Array:
    """Return the largest finite magnitude."""
    return jnp.stack([jnp.max(jnp.abs(g), initial=0.0, where=jnp.isfinite(g)) for g in gradients]).max()
