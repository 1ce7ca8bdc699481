"""The training loop in JAX: one compiled step, as a user of `preamp.jax` would write it.

`autocast(emulate=True)` rehearses low precision. JAX's own float16 products are summed in float32 too, at
float32's speed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from preamp.cli.lab import ADAM_EPSILON, ZEROS_EVERY, Precision
from preamp.cli.lab.lens import Lens
from preamp.cli.lab.problem import Problem, share_of_zeros
from preamp.jax import (
    apply_gradients,
    autocast,
    check_exhausted,
    exponent_histogram,
    flow_slot,
    last_step,
    loss_scaled,
    scaled_value_and_grad,
    snapshot,
    watch,
)
from preamp.policy import Policy
from preamp.record.snapshots import Kind, Snapshot
from preamp.scaling import Step

# By the names of the layers: from the first to the last, or of a backward pass from the last to the first.
Layers: TypeAlias = OrderedDict[str, dict[str, jax.Array]]
ByLayer: TypeAlias = OrderedDict[str, Any]


class JaxLoop:
    """One training of one problem. The arguments are those of `preamp.cli.lab.runs.Loop`.

    Attributes:
        lens: says at which steps to look.
    """

    def __init__(
        self,
        problem: Problem,
        precision: Precision,
        policy: Policy[Any] | None,
        seed: int,
        *,
        emulate: bool = True,
    ) -> None:
        self.problem, self.precision, self.policy, self.seed = problem, precision, policy, seed
        self.products = _products
        if precision != "float32":
            self.products = autocast(_products, precision, emulate=emulate)
        self.optimizer = optax.adam(problem.learning_rate, eps=ADAM_EPSILON)
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

    def steps(self) -> Iterator[Step]:
        """Train, yielding one `Step` after each update."""
        inputs, labels = self.problem.table.train, self.problem.table.train_labels
        skipped = False
        for index, rows in enumerate(self.problem.batches(self.seed)):
            start = time.perf_counter()
            if self.lens.is_due(index, after_skip=skipped):
                self.lens.show(self._snapshots(index, inputs[rows], labels[rows]))
            after = self.train_step(self.layers, self.state, inputs[rows], labels[rows])
            loss, gradients, peak, self.layers, self.state = after
            zeros = share_of_zeros(gradients) if index % ZEROS_EVERY == 0 else None
            step = last_step(self.state) if self.policy else None
            step = step or Step(index, 1.0, finite=True, skipped=False)
            step = step._replace(loss=float(loss), peak=float(peak), zeros=zeros)
            yield step._replace(seconds=time.perf_counter() - start)
            skipped = step.skipped
            if self.policy and skipped:
                check_exhausted(self.state, self.policy)

    def outputs(self) -> NDArray[np.float32]:
        """Return what the network answers on the test rows, in the precision it was trained in."""
        answers, _ = self._outputs(self.layers, None, jnp.asarray(self.problem.table.test))
        return np.asarray(answers)

    def _train_step(
        self, layers: Layers, state: Any, inputs: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, list[jax.Array], jax.Array, Layers, Any]:
        """Return the loss, the weights' gradients of the scaled loss, their peak, and what is next."""
        if self.policy is None:
            (loss, _), gradients = jax.value_and_grad(self._loss, has_aux=True)(layers, None, inputs, labels)
            updates, state = self.optimizer.update(gradients, state, layers)
            layers = optax.apply_updates(layers, updates)
        else:
            differentiated = scaled_value_and_grad(self._loss, has_aux=True)
            (loss, _), scaled = differentiated(state, layers, None, inputs, labels)
            layers, state = apply_gradients(self.optimizer, scaled, state, layers)
            gradients = scaled.gradients
        of_weights = [layer["weight"] for layer in gradients.values()]
        return loss, of_weights, _peak(of_weights), layers, state

    def _outputs(self, layers: Layers, slots: ByLayer | None, inputs: jax.Array) -> tuple[jax.Array, ByLayer]:
        """Return what the network answers, in float32 from the last product on, and what layers put out."""
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
        """Return the loss, and what each layer puts out."""
        answers, activations = self._outputs(layers, slots, inputs)
        if self.problem.loss == "squared":
            return jnp.mean(jnp.square(answers - inputs)), activations
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(answers, labels)
        return jnp.mean(losses), activations

    def _snapshots(
        self, index: int, inputs: NDArray[np.float32], labels: NDArray[np.int64]
    ) -> Iterator[Snapshot]:
        """Yield what there is to see of a step that is about to be made, a look for each kind of values."""
        scale, values, counts = self.values(self.layers, self.state, inputs, labels)
        about: dict[str, Any] = {"index": index, "scale": float(scale), "low_dtype": self.precision}
        for what, like in values.items():
            yield snapshot(counts[what], what=what, like=like, **about)

    def _values(
        self, layers: Layers, state: Any, inputs: jax.Array, labels: jax.Array
    ) -> tuple[Any, dict[Kind, ByLayer], dict[Kind, ByLayer]]:
        """Return the loss scale, what a step computes, and how many values of each size that has.

        This is a function beside the step, so that a step is the same whether it is inspected or not.
        """
        slots = OrderedDict((name, flow_slot()) for name in layers)
        if self.policy is None:
            scale: Any = 1.0
            differentiated = jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
            (_, activations), (gradients, flows) = differentiated(layers, slots, inputs, labels)
        else:
            scaled_differentiated = scaled_value_and_grad(self._loss, argnums=(0, 1), has_aux=True)
            (_, activations), scaled = scaled_differentiated(state, layers, slots, inputs, labels)
            scale, (gradients, flows) = scaled.scale, scaled.gradients
        values: dict[Kind, ByLayer] = {
            "input": OrderedDict(zip(layers, [inputs, *activations.values()], strict=False)),
            "weight": layers,
            "activation": activations,
            "flow": _last_first(activations),  # which has the flows' shapes and dtypes
            "gradient": _last_first(gradients),
        }
        counts: dict[Kind, ByLayer] = {what: exponent_histogram(tree) for what, tree in values.items()}
        counts["flow"] = _last_first(flows)
        return scale, values, counts


def _products(layers: Layers, slots: ByLayer | None, values: jax.Array) -> tuple[jax.Array, ByLayer]:
    """Return what the last layer says, before any sigmoid of it, and what the others put out.

    Args:
        layers: weight, of shape (in, out), and bias of each.
        slots: for each layer, where to count the gradient with respect to what it puts out; None not to.
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
    """Return what there is of each layer in the order in which a backward pass comes to it."""
    return OrderedDict(reversed(tree.items()))


def _peak(gradients: list[jax.Array]) -> jax.Array:
    """Return the largest finite magnitude."""
    return jnp.stack([jnp.max(jnp.abs(g), initial=0.0, where=jnp.isfinite(g)) for g in gradients]).max()


LOOP = JaxLoop
