"""LossScaleOptimizer over Keras 3 optimizers, with TensorFlow as the backend.

It is `preamp.keras.LossScaleOptimizer` with the methods of tf.keras.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Never, Self

import keras
import tensorflow as tf

from preamp.arrays.tensorflow import Gradient, as_stored, unconverted
from preamp.checks import paired
from preamp.errors import PolicyError, UsageError
from preamp.guards import RULES, Guard
from preamp.keras.loss_scale_optimizer import LossScaleOptimizer as KerasLossScaleOptimizer
from preamp.keras_shared.arguments import refuse_unknown
from preamp.policy import Policy
from preamp.policy.registry import to_json
from preamp.tensorflow.optimizer import Loss, Pair, Variables, check_tape, flat_variables, is_hyperparameter
from preamp.tensorflow.optimizer import LossScaleOptimizer as TensorFlowLossScaleOptimizer
from preamp.tensorflow.rule import ArgumentTypeError, rule


@keras.saving.register_keras_serializable("preamp.tensorflow")
class LossScaleOptimizer(TensorFlowLossScaleOptimizer, KerasLossScaleOptimizer):  # type: ignore[override]  # read-only in tf.keras
    """`preamp.tensorflow.LossScaleOptimizer` over an optimizer of Keras 3.

    Keras's own methods `scale_loss` and `apply` behave as in Keras. `Model.fit` calls `scale_loss` and then
    `apply_gradients`, which therefore has to know how the loss was last scaled.
    """

    KIND = "keras"
    _gradients_are_scaled = False
    _scale_loss_is = "opt.get_scaled_loss"

    def __init__(
        self,
        inner_optimizer: tf.keras.optimizers.Optimizer,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: float | None = None,
        *,
        policy: Policy[Any] | None = None,
        guard: Guard[Any] | None = None,
        name: str | None = None,
        model: Any = None,
        restore_buffers: bool = False,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, ArgumentTypeError)
        if model is not None or restore_buffers:
            raise PolicyError(
                "model and restore_buffers are for optimizers of tf_keras. With one of Keras 3 write "
                "model.fit(..., callbacks=[preamp.keras.TraceCallback(restore_buffers=True)])."
            )
        made = rule(dynamic, initial_scale, dynamic_growth_steps, policy)
        if inner_optimizer.loss_scale_factor is not None:
            raise PolicyError(
                f"inner_optimizer already has loss_scale_factor={inner_optimizer.loss_scale_factor!r}. Leave "
                "it out. A fixed scale is LossScaleOptimizer(opt, dynamic=False, initial_scale=2.0**15)."
            )
        KerasLossScaleOptimizer.__init__(self, inner_optimizer, policy=made, guard=guard, name=name)
        self._policy_was_given = policy is not None

    @property
    def loss_scale(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.dynamic_scale.value)

    @property
    def dynamic_counter(self) -> tf.Tensor | None:
        return tf.cast(self.step_counter.value, tf.int64) if self.dynamic else None

    def minimize(self, loss: Loss, var_list: Variables, tape: tf.GradientTape | None = None) -> None:
        """Scale the loss, compute gradients, unscale and apply them.

        Args:
            loss: a callable that returns the loss, or the loss itself, computed under `tape`.
            var_list: a variable, several, or a callable that returns them.
            tape: the tape of a loss that is not callable.
        """
        self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    def compute_gradients(
        self, loss: Loss, var_list: Variables, tape: tf.GradientTape | None = None
    ) -> list[Pair]:
        """Return unscaled gradients with their variables.

        Args:
            loss: as in `minimize`.
            var_list: as in `minimize`.
            tape: as in `minimize`.

        Raises:
            UsageError: for a loss that is neither callable nor has a tape, and for values that are not
                variables.
        """
        check_tape(loss, tape)
        variables = None if callable(var_list) else flat_variables("var_list", var_list)
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            scaled = self.get_scaled_loss(loss() if callable(loss) else loss)
        if variables is None:  # a function may make them while it computes the loss
            variables = flat_variables("var_list", var_list() if callable(var_list) else var_list)
        tensors = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        gradients = self.get_unscaled_gradients(tape.gradient(scaled, tensors))
        return list(zip(gradients, variables, strict=True))

    @unconverted
    def scale_loss(self, loss: Loss) -> Any:
        """Return the loss times the scale, for Keras's `fit`, which then applies gradients still scaled."""
        self._gradients_are_scaled = True
        return super().scale_loss(loss)

    @unconverted
    def get_scaled_loss(self, loss: Loss) -> Any:
        if not callable(loss):
            self._check_loss(loss)
        self._gradients_are_scaled, self._was_scaled = False, True
        if not callable(loss):
            self._note_loss(loss)
        return super().get_scaled_loss(loss)

    @unconverted
    def get_unscaled_gradients(self, grads: Iterable[Gradient | None]) -> list[Any]:
        self._gradients_are_scaled = False
        unscaled: list[Any] = super().get_unscaled_gradients(grads)
        return unscaled

    def apply(
        self, grads: Iterable[Gradient | None], trainable_variables: Iterable[tf.Variable] | None = None
    ) -> None:
        """Update the variables with scaled gradients, as Keras's `apply` does.

        Args:
            grads: scaled gradients, one for each variable; None for one without.
            trainable_variables: the variables. None: those it was built with.

        Raises:
            UsageError: for gradients that `get_unscaled_gradients` has already unscaled.
        """
        if not self._gradients_are_scaled and self._gradients_have_been_unscaled:
            raise UsageError(
                "apply divides gradients by the loss scale, and get_unscaled_gradients has already done so. "
                "Write optimizer.apply_gradients(zip(gradients, variables))."
            )
        super().apply(grads, trainable_variables)

    @unconverted
    def apply_gradients(
        self,
        grads_and_vars: Iterable[Pair],
        skip_gradients_aggregation: bool = False,
        *,
        experimental_aggregate_gradients: bool = True,
        name: str | None = None,
    ) -> None:
        """Update the variables, unless a gradient is not finite on any replica, and move the scale.

        Args:
            grads_and_vars: gradients with their variables, unscaled unless the loss was scaled by
                `scale_loss`. A gradient may be None.
            skip_gradients_aggregation: False. Keras sums the gradients of all replicas.
            experimental_aggregate_gradients: True, the opposite of the argument before.
            name: ignored, as in tf_keras's newer optimizers.

        Raises:
            UsageError: for values that are not pairs; on several replicas, if gradients are not to be summed.
        """
        _check_summed(skip_gradients_aggregation or not experimental_aggregate_gradients)
        pairs = paired(grads_and_vars)
        if self._gradients_are_scaled:
            super().apply_gradients(pairs)
            return
        self._warn_if_forgotten()
        # In the variables' dtype before they are checked: 1e6 becomes inf in float16.
        gradients = [as_stored(gradient, variable) for gradient, variable in pairs]
        variables = [variable for _, variable in pairs]
        if not self.built:
            self.build(variables)
        self._take_step(gradients, variables, None)

    def get_config(self) -> dict[str, Any]:
        """Return the configuration, in plain JSON."""
        config = {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
        }
        find, name_of = keras.saving.get_registered_object, keras.saving.get_registered_name
        if self.guard is not None:
            config["guard"] = to_json(self.guard, name_of, find, RULES)
        if self._policy_was_given:
            return {**config, "policy": to_json(self.policy, name_of, find)}
        names = ("dynamic", "initial_scale", "dynamic_growth_steps")
        return {**config, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Create an optimizer from a configuration, this class's or that of Keras's own wrapper."""
        made: Self = super(TensorFlowLossScaleOptimizer, cls).from_config(config, custom_objects)
        return made

    def _hands_over(self, inner: object, name: str) -> bool:
        return is_hyperparameter(inner, name)


def _check_summed(refused: bool) -> None:
    """Check that gradients may be summed, as Keras does. With one replica it makes no difference."""
    if refused and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise UsageError(
            "skip_gradients_aggregation=True, but Keras's optimizers sum the gradients of all replicas. "
            "Leave it out, and hand over each replica's own gradients."
        )
