"""LossScaleOptimizer over `tf_keras.optimizers`.

It is tf_keras's class for them with a preamp policy, and with what that class leaves undone:
hyperparameters, methods that act on the inner optimizer, and `.keras` files that hold its state once.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs

from preamp.arrays.tensorflow import Gradient, unconverted
from preamp.checks import check_store, listed_variables, paired
from preamp.errors import UsageError
from preamp.tensorflow.hyperparameters import Hyperparameters
from preamp.tensorflow.optimizer import Loss, Pair, Variables, check_tape, flat_variables
from preamp.tensorflow.tf_keras_shared import OverTfKeras


@tf_keras.saving.register_keras_serializable("preamp")
class LossScaleOptimizer(Hyperparameters, OverTfKeras, theirs.LossScaleOptimizerV3):
    """What `preamp.tensorflow.LossScaleOptimizer` makes of an optimizer of tf_keras."""

    KIND = "tf_keras"

    @property
    def name(self) -> str:
        """The inner optimizer's name."""
        name: str = self._optimizer.name
        return name

    @property
    def jit_compile(self) -> bool:
        """Whether XLA compiles the inner optimizer's updates."""
        compiles: bool = self._optimizer.jit_compile
        return compiles

    @jit_compile.setter
    def jit_compile(self, value: bool) -> None:
        self._optimizer.jit_compile = value

    def build(self, var_list: Variables) -> Any:
        """Make the inner optimizer's variables."""
        var_list = listed_variables("var_list", var_list, "build(model.trainable_variables)")
        self.__dict__.setdefault("_trained", var_list)  # past `__setattr__`, which would track them
        return self._theirs().build(var_list)

    @unconverted
    def apply_gradients(self, grads_and_vars: Iterable[Pair], *args: object, **kwargs: object) -> Any:
        pairs = paired(grads_and_vars)
        if not pairs:
            raise UsageError(
                "there are no gradients. Write apply_gradients(zip(gradients, model.trainable_variables))."
            )
        self.__dict__.setdefault("_trained", [variable for _, variable in pairs])
        return super().apply_gradients(pairs, *args, **kwargs)

    def finalize_variable_values(self, var_list: Sequence[tf.Variable] | None = None) -> None:
        """Overwrite variables with their averages, if the inner optimizer keeps averages.

        Args:
            var_list: the variables. None: those it was built with.

        Raises:
            UsageError: without variables, before it was built, and for what is not a list of variables.
        """
        if var_list is None:
            var_list = vars(self).get("_trained")
        instead = "finalize_variable_values(model.trainable_variables)"
        if var_list is None:
            raise UsageError(f"the optimizer has no variables yet. Write {instead}.")
        self._optimizer.finalize_variable_values(listed_variables("var_list", var_list, instead))

    def add_variable(self, *args: object, **kwargs: object) -> Any:
        """Add a variable to the inner optimizer's."""
        return self._optimizer.add_variable(*args, **kwargs)

    def add_variable_from_reference(self, *args: object, **kwargs: object) -> Any:
        """Add a variable to the inner optimizer's, shaped like one of the model's."""
        return self._optimizer.add_variable_from_reference(*args, **kwargs)

    def update_step(self, gradient: Gradient, variable: tf.Variable) -> Any:
        """Have the inner optimizer update a variable, with an unscaled gradient and without a check."""
        return self._optimizer.update_step(gradient, variable)

    def compute_gradients(
        self, loss: Loss, var_list: Variables, tape: tf.GradientTape | None = None
    ) -> list[Pair]:
        """Return unscaled gradients with their variables.

        Args:
            loss: a callable that returns the loss, or the loss itself, of `tape`.
            var_list: a variable, several, or a callable that returns them.
            tape: the tape that has watched a loss that is not callable.

        Raises:
            UsageError: for a loss that is not callable, without a tape.
        """
        check_tape(loss, tape)
        variables = var_list if callable(var_list) else flat_variables("var_list", var_list)
        pairs: list[Pair] = self._theirs().compute_gradients(loss, variables, tape)
        return pairs

    def exclude_from_weight_decay(self, *args: object, **kwargs: object) -> None:
        """Exclude variables from the inner optimizer's weight decay, before it is built."""
        self._optimizer.exclude_from_weight_decay(*args, **kwargs)

    def aggregate_gradients(self, grads_and_vars: Iterable[Pair]) -> Any:
        """Return the gradients' sums over all replicas."""
        return self._optimizer.aggregate_gradients(paired(grads_and_vars))

    def set_weights(self, weights: Sequence[object]) -> None:
        """Set the inner optimizer's variables."""
        self._optimizer.set_weights(weights)

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Write the state of the scale; into a dict the inner optimizer's variables as well.

        A file has those beside it, once, where tf_keras writes them.
        """
        check_store(store)
        if isinstance(store, dict):
            self._optimizer.save_own_variables(store)
        for name, value in self._loss_scale.numbers().items():
            store[name] = np.asarray(value)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Read what `save_own_variables` wrote, here or of tf_keras's own wrapper."""
        check_store(store)
        saved = {name: store[name] for name in store.keys()}  # noqa: SIM118  # a file is not a mapping
        inner = {name: value for name, value in saved.items() if name.isdecimal()}
        if inner:
            self._optimizer.load_own_variables(inner)
        state = {name: np.asarray(value).item() for name, value in saved.items() if name not in inner}
        if state:
            self._loss_scale.restore(state)
