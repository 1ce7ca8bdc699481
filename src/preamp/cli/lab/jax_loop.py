"""The training loop in JAX: one compiled step, as a user of `preamp.jax` would write it.

`autocast(emulate=True)` emulates low precision. JAX's own float16 products are summed in float32 too, at
float32's speed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from preamp.cli.lab import SNAPSHOT_EVERY, Precision
from preamp.cli.lab.loop import Loop, Trained
from preamp.cli.lab.problem import Problem
from preamp.errors import ScaleExhausted
from preamp.jax import (
    apply_gradients,
    autocast,
    check_exhausted,
    exponent_histogram,
    flow_slot,
    last_step,
    loss_scaled,
    snapshot,
    value_and_grad,
    watch,
)
from preamp.policy import Policy
from preamp.record.snapshots import Kind, Snapshot
from preamp.scaling import Step

# By the names of the layers, in the order of the forward or of the backward pass.
Layers: TypeAlias = OrderedDict[str, dict[str, jax.Array]]
ByLayer: TypeAlias = OrderedDict[str, Any]


@dataclass
class Lens:
    """Chooses the steps to inspect as `preamp.torch.Lens` does: one of `every`, and the one after a skip.

    Attributes:
        every: steps from one snapshot to the next, beginning with the first.
        on_snapshot: called with every `Snapshot`; None to take none.
    """

    every: int = SNAPSHOT_EVERY
    on_snapshot: Callable[[Snapshot], object] | None = None
    _skipped_before: bool = field(default=False, init=False, repr=False)

    def is_due(self, index: int, *, after_skip: bool) -> bool:
        """Return whether to inspect a step; called once for each. Of skips in a row, the first counts."""
        before, self._skipped_before = self._skipped_before, after_skip
        return index % self.every == 0 or (after_skip and not before)


class JaxLoop(Loop):
    """One training of one problem. Its `lens` says which steps to inspect."""

    def __init__(
        self, problem: Problem, precision: Precision, policy: Policy[Any] | None, seed: int, **settings: bool
    ) -> None:
        super().__init__(problem, precision, policy, seed, **settings)
        self.products = _products
        if precision != "float32":
            self.products = autocast(_products, precision, emulate=self.emulate)
        self.optimizer = optax.adam(problem.learning_rate)
        if policy is not None:
            self.optimizer = loss_scaled(self.optimizer, policy)
        layers: Layers = OrderedDict(
            (f"layer{number}", {"weight": jnp.asarray(weight.T), "bias": jnp.zeros(len(weight))})
            for number, weight in enumerate(problem.initial_weights(seed), start=1)
        )
        state = layers, self.optimizer.init(layers)
        self.layers, self.state = jax.device_put(state, jax.local_devices(backend="cpu")[0])
        self.lens = Lens()
        self.train_step = jax.jit(self._train_step)
        self.values = jax.jit(self._values)

    def train_on(self, rows: NDArray[np.int64], index: int) -> Trained:
        inputs, labels = self.problem.table.train[rows], self.problem.table.train_labels[rows]
        if self.lens.on_snapshot and self.lens.is_due(index, after_skip=self.skipped):
            for one in self._snapshots(index, inputs, labels):
                self.lens.on_snapshot(one)
        after = self.train_step(self.layers, self.state, inputs, labels)
        loss, gradients, amax, self.layers, self.state = after
        if self.policy is not None and self.policy.gives_up:  # a compiled step cannot raise
            try:
                check_exhausted(self.state, self.policy)
            except ScaleExhausted as error:
                return Trained(loss, gradients, amax, error)
        return Trained(loss, gradients, amax)

    def last_step(self) -> Step | None:
        return last_step(self.state)

    def outputs(self) -> NDArray[np.float32]:
        answers, _ = self._outputs(self.layers, None, jnp.asarray(self.problem.table.test))
        return np.asarray(answers)

    def _train_step(
        self, layers: Layers, state: optax.OptState, inputs: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, list[jax.Array], jax.Array, Layers, Any]:
        """Return the loss, the weights' gradients of the scaled loss, their amax, and the next state."""
        if self.policy is None:
            (loss, _), gradients = jax.value_and_grad(self._loss, has_aux=True)(layers, None, inputs, labels)
            updates, state = self.optimizer.update(gradients, state, layers)
            layers = optax.apply_updates(layers, updates)
        else:
            scale = state.policy_state.scale
            differentiated = value_and_grad(self._loss, has_aux=True)
            (loss, _), gradients, state = differentiated(layers, state, None, inputs, labels)
            layers, state = apply_gradients(self.optimizer, gradients, state, layers)
            gradients = jax.tree.map(lambda gradient: gradient * scale, gradients)
        of_weights = [layer["weight"] for layer in gradients.values()]
        return loss, of_weights, _amax(of_weights), layers, state

    def _outputs(self, layers: Layers, slots: ByLayer | None, inputs: jax.Array) -> tuple[jax.Array, ByLayer]:
        """Return the network's outputs, in float32 from the last product on, and those of each layer."""
        products, activations = self.products(layers, slots, inputs)
        answers = products.astype(jnp.float32)
        if self.problem.loss == "squared":
            answers = jax.nn.sigmoid(answers)
        *_, last = layers
        activations[last] = answers = _watched(answers, slots, last)
        return answers, activations

    def _loss(
        self, layers: Layers, slots: ByLayer | None, inputs: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, ByLayer]:
        """Return the loss, and the outputs of each layer."""
        answers, activations = self._outputs(layers, slots, inputs)
        if self.problem.loss == "squared":
            return jnp.mean(jnp.square(answers - inputs)), activations
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(answers, labels)
        return jnp.mean(losses), activations

    def _snapshots(
        self, index: int, inputs: NDArray[np.float32], labels: NDArray[np.int64]
    ) -> Iterator[Snapshot]:
        """Yield a snapshot of each kind of values of the step that is about to be made."""
        scale, values, counts = self.values(self.layers, self.state, inputs, labels)
        about: dict[str, Any] = {"index": index, "scale": float(scale), "low_dtype": self.precision}
        for what, like in values.items():
            yield snapshot(counts[what], what=what, like=like, **about)

    def _values(
        self, layers: Layers, state: optax.OptState, inputs: jax.Array, labels: jax.Array
    ) -> tuple[Any, dict[Kind, ByLayer], dict[Kind, ByLayer]]:
        """Return the loss scale, the values that a step computes, and the histogram of each.

        It is apart from the step, so that a step is the same whether it is inspected or not.
        """
        slots = OrderedDict((name, flow_slot()) for name in layers)
        if self.policy is None:
            scale: Any = 1.0
            differentiated = jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
            (_, activations), (gradients, flows) = differentiated(layers, slots, inputs, labels)
        else:
            scale = state.policy_state.scale
            scaled = value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
            (_, activations), (gradients, flows), _ = scaled(layers, state, slots, inputs, labels)
            gradients = jax.tree.map(lambda gradient: gradient * scale, gradients)
        values: dict[Kind, ByLayer] = {
            "input": OrderedDict(zip(layers, [inputs, *activations.values()], strict=False)),
            "weight": layers,
            "activation": activations,
            "flow": _last_first(activations),  # with the flows' shapes and dtypes
            "gradient": _last_first(gradients),
        }
        counts: dict[Kind, ByLayer] = {what: exponent_histogram(tree) for what, tree in values.items()}
        counts["flow"] = _last_first(flows)
        return scale, values, counts


def _products(layers: Layers, slots: ByLayer | None, values: jax.Array) -> tuple[jax.Array, ByLayer]:
    """Return the outputs of the last layer, before any sigmoid, and those of the others.

    Args:
        layers: weight, of shape (in, out), and bias of each.
        slots: for each layer, where to count the gradient with respect to its outputs; None not to.
        values: the inputs.
    """
    *hidden, last = layers
    activations: ByLayer = OrderedDict()
    for name in hidden:
        products = values @ layers[name]["weight"] + layers[name]["bias"]
        activations[name] = values = _watched(jax.nn.sigmoid(products), slots, name)
    return values @ layers[last]["weight"] + layers[last]["bias"], activations


def _watched(values: jax.Array, slots: ByLayer | None, name: str) -> jax.Array:
    return values if slots is None else watch(values, slots[name])


def _last_first(tree: ByLayer) -> ByLayer:
    """Return a dict by layer in the order of the backward pass."""
    return OrderedDict(reversed(tree.items()))


def _amax(gradients: list[jax.Array]) -> jax.Array:
    """Return the largest finite magnitude."""
    return jnp.stack([jnp.max(jnp.abs(g), initial=0.0, where=jnp.isfinite(g)) for g in gradients]).max()
