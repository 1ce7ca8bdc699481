"""What the wrappers of tf_keras's two kinds of optimizers share.

tf_keras's own LossScaleOptimizers get the state of `tf_keras_state`. They stay in charge of slots, tracking
and replicas, so that `Model.compile` and checkpoints find the classes that they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Self, TypeVar

import tensorflow as tf
import tf_keras

from preamp.arrays.tensorflow import as_stored, unconverted
from preamp.checks import paired
from preamp.policy import Policy
from preamp.policy.registry import from_json, to_json
from preamp.scaling import Step
from preamp.tensorflow.arguments import check_buffers, rule
from preamp.tensorflow.optimizer import Loss, LossScaleOptimizer, Pair, kind_of_config
from preamp.tensorflow.tf_keras_buffers import Buffers
from preamp.tensorflow.tf_keras_state import LossScaleState

T = TypeVar("T")


class OverTfKeras(LossScaleOptimizer):
    """Stands before one of tf_keras's LossScaleOptimizers among the bases of a class."""

    _loss_scale: LossScaleState
    _optimizer: tf_keras.optimizers.Optimizer
    _given_policy: Policy[Any] | None

    def __init__(
        self,
        inner_optimizer: tf.keras.optimizers.Optimizer,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: float | None = None,
        *,
        policy: Policy[Any] | None = None,
        model: Any = None,
        restore_buffers: bool = False,
    ) -> None:
        check_buffers(model, restore_buffers)
        buffers = None if model is None else Buffers(model, restores=restore_buffers)
        made = rule(dynamic, initial_scale, dynamic_growth_steps, policy)
        # With a fixed scale tf_keras checks the optimizer and makes no state of its own.
        self._theirs().__init__(inner_optimizer, dynamic=False, initial_scale=1.0)
        own = vars(self)  # past `__setattr__`, which would track the state under this name as well
        own["_loss_scale"] = LossScaleState(made, buffers)
        own["_given_policy"] = None if policy is None else made
        self._theirs()._track_trackable(self._loss_scale, "loss_scale")

    @property
    def policy(self) -> Policy[Any]:
        return self._loss_scale.policy

    @property
    def inner_optimizer(self) -> tf.keras.optimizers.Optimizer:
        return self._optimizer

    @property
    def loss_scale(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._loss_scale.current_loss_scale)

    @property
    def dynamic_counter(self) -> tf.Tensor | None:
        return self._loss_scale.counter if self.dynamic else None

    @property
    def last_step(self) -> Step | None:
        return self._loss_scale.step()

    @property
    def skipped_steps(self) -> int:
        return self._loss_scale.skipped()

    def check_exhausted(self) -> None:
        self._loss_scale.check_exhausted()

    @unconverted
    def get_scaled_loss(self, loss: Loss) -> Any:
        if callable(loss):
            return self._after_noting(loss)
        self._check_loss(loss)
        loss = tf.convert_to_tensor(loss)
        self._loss_scale.losses.add(loss)
        return super().get_scaled_loss(loss)

    def _after_noting(self, loss: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
        """Return a callable for the scaled loss; the loss is noted when it is computed."""
        self._loss_has_been_scaled = True
        return lambda: self.get_scaled_loss(loss())

    @unconverted
    def apply_gradients(self, grads_and_vars: Iterable[Pair], *args: object, **kwargs: object) -> Any:
        given = paired(grads_and_vars)
        self._warn_if_forgotten()
        self._loss_scale.begin()
        # In the variables' dtype before they are checked: 1e6 becomes inf in float16.
        pairs = [(as_stored(gradient, variable), variable) for gradient, variable in given]
        return self._theirs().apply_gradients(pairs, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Return what describes this optimizer, in plain JSON, and where its scale stands.

        tf_keras's older file formats have no other place for the state of a scale.
        """
        config: dict[str, Any] = self._theirs().get_config()
        if self._given_policy is not None:
            saving = tf_keras.saving
            saved = to_json(self._given_policy, saving.get_registered_name, saving.get_registered_object)
            config = {"inner_optimizer": config["inner_optimizer"], "policy": saved}
        with tf.init_scope():
            if tf.executing_eagerly():
                config["state"] = self._loss_scale.numbers()
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Return the optimizer that a configuration describes; one of tf_keras's own will do."""
        kind_of_config(config)  # which refuses what is none
        settings = {name: _copied(value) for name, value in config.items()}
        state = settings.pop("state", None)
        if "policy" in settings:
            find = partial(tf_keras.saving.get_registered_object, custom_objects=custom_objects)
            settings["policy"] = from_json(settings["policy"], find)
        made: Self = super(LossScaleOptimizer, cls).from_config(settings, custom_objects)  # type: ignore[misc]
        if state is not None:
            made._loss_scale.restore(state)
        return made

    def _theirs(self) -> Any:
        """Return this optimizer as tf_keras's own class."""
        return super(LossScaleOptimizer, self)


def _copied(value: T) -> T:
    """Return a copy of a dict, which tf_keras will write to, and anything else as it is."""
    return deepcopy(value) if isinstance(value, dict) else value
