"""What a model's layers keep beside their weights, such as BatchNorm's moving statistics.

A forward pass writes them, so a step whose gradients are skipped has changed them already: an overflow in the
forward pass leaves inf or NaN there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras


class Buffers:
    """The float variables of a model that its layers made as not trainable.

    Not the weights of frozen layers, which no forward pass writes.

    Args:
        model: the model that is trained.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._kept: dict[int, Any] = {}

    def keep(self) -> None:
        """Copy the values, on their device, for `restore`."""
        variables = self._variables()
        values = state_values(self._model, variables, self._model.non_trainable_variables, "non_trainable")
        # A product is a copy on every backend. An assignment may write to the memory of what was read.
        self._kept = {id(v): value * 1 for v, value in zip(variables, values, strict=True)}

    def not_finite(self, read: Callable[[Sequence[Any]], list[float]]) -> list[Any]:
        """Return the variables that hold an inf or NaN: one read to the host.

        Args:
            read: reads scalars of the backend to the host.
        """
        variables = self._variables()
        values = state_values(self._model, variables, self._model.non_trainable_variables, "non_trainable")
        flags = read([keras.ops.all(keras.ops.isfinite(value)) for value in values]) if values else []
        return [variable for variable, finite in zip(variables, flags, strict=True) if not finite]

    def restore(self, variables: Sequence[Any]) -> None:
        """Set variables to the values that were kept last."""
        if hasattr(self._model, "jax_state_sync"):
            self._model.jax_state_sync()  # `fit` on JAX has the values elsewhere, and comes back for them
        for variable in variables:
            variable.assign(self._kept[id(variable)])

    def _variables(self) -> list[Any]:
        """Return the variables. Keras has no public name for what a layer made as not trainable."""
        found: dict[int, Any] = {}
        for layer in self._model._flatten_layers():
            for variable in getattr(layer, "_non_trainable_variables", ()):
                if keras.backend.is_float_dtype(variable.dtype):
                    found.setdefault(id(variable), variable)
        known = {id(variable) for variable in self._model.non_trainable_variables}
        return [variable for key, variable in found.items() if key in known]


def state_values(model: keras.Model, variables: Sequence[Any], among: Sequence[Any], kind: str) -> list[Any]:
    """Return the values of variables; during `fit` on JAX the trainer has them.

    Args:
        model: the model that is trained.
        variables: whose values.
        among: all variables of their kind, in Keras's order.
        kind: "optimizer", "non_trainable" or "metrics".
    """
    state = getattr(model, "_jax_state", None)
    if state and not model._jax_state_synced:
        by_variable = zip(among, state[f"{kind}_variables"], strict=True)
        values = {id(variable): value for variable, value in by_variable}
        return [values[id(variable)] for variable in variables]
    return [variable.value for variable in variables]
