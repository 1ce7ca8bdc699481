"""LossScaleOptimizer over `tf_keras.optimizers`, and the base that it shares with `tf_keras_legacy`.

tf_keras's own classes are given the state of `tf_keras_state`. They still manage slots, tracking and
replicas, so that `Model.compile` and checkpoints find the classes that they know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Never, Self, TypeVar

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as theirs

from preamp.arrays.tensorflow import Gradient, as_stored, divide, finite_and_norm, unconverted
from preamp.checks import check_store, listed_variables, paired
from preamp.errors import UsageError
from preamp.guards import RULES, Guard
from preamp.keras_shared.arguments import refuse_unknown
from preamp.policy import Policy
from preamp.policy.registry import from_json, to_json
from preamp.scaling import Step, given_guard
from preamp.tensorflow.optimizer import (
    Loss,
    Pair,
    Variables,
    check_tape,
    flat_variables,
    is_hyperparameter,
    kind_of_config,
)
from preamp.tensorflow.optimizer import LossScaleOptimizer as BaseLossScaleOptimizer
from preamp.tensorflow.rule import ArgumentTypeError, check_buffers, rule
from preamp.tensorflow.tf_keras_buffers import LayerBuffers
from preamp.tensorflow.tf_keras_state import LossScaleState

T = TypeVar("T")


class OverTfKeras(BaseLossScaleOptimizer):
    """A mixin that comes before one of tf_keras's LossScaleOptimizers in the bases of a class."""

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
        guard: Guard[Any] | None = None,
        model: Any = None,
        restore_buffers: bool = False,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, ArgumentTypeError)
        check_buffers(model, restore_buffers)
        buffers = None if model is None else LayerBuffers(model, restores=restore_buffers)
        guard = given_guard(guard)
        made = rule(dynamic, initial_scale, dynamic_growth_steps, policy)
        # With a fixed scale tf_keras checks the optimizer and makes no state of its own.
        self._theirs().__init__(inner_optimizer, dynamic=False, initial_scale=1.0)
        own = vars(self)  # past `__setattr__`, which would track the state under this name as well
        own["_loss_scale"] = LossScaleState(made, buffers, guard)
        own["_given_policy"] = None if policy is None else made
        self._theirs()._track_trackable(self._loss_scale, "loss_scale")

    @property
    def policy(self) -> Policy[Any]:
        return self._loss_scale.policy

    @property
    def guard(self) -> Guard[Any] | None:
        return self._loss_scale.guard

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

    def _apply_gradients(self, grads: Sequence[Gradient], *others: object) -> Any:
        return self._theirs()._apply_gradients(self._clippable(grads), *others)

    def _clippable(self, grads: Sequence[Gradient]) -> Sequence[Gradient]:
        """Return gradients that the inner optimizer can clip: of squares that overflow it makes zeros or NaN.

        Those are divided so that their largest entry is the limit, and so their norm is not below it.
        """
        limit = self._optimizer.clipnorm or self._optimizer.global_clipnorm
        if not limit:
            return grads
        _, _, amaxes = finite_and_norm(grads)
        if not self._optimizer.clipnorm:
            amaxes = tf.fill(tf.shape(amaxes), tf.reduce_max(amaxes))

        def divided() -> list[Gradient]:
            divisors = tf.clip_by_value(amaxes / limit, 1.0, 2.0**126)  # which have inverses in float32
            pairs = zip(grads, tf.unstack(divisors, num=len(grads)), strict=True)
            return [as_stored(divide([one], by)[0], one) for one, by in pairs]

        clippable: Sequence[Gradient] = tf.cond(tf.reduce_any(amaxes > limit), divided, lambda: list(grads))
        return clippable

    def get_config(self) -> dict[str, Any]:
        """Return the configuration and the state of the scale, in plain JSON.

        tf_keras's older file formats have no other place for the state.
        """
        config: dict[str, Any] = self._theirs().get_config()
        saving = tf_keras.saving
        if self._given_policy is not None:
            saved = to_json(self._given_policy, saving.get_registered_name, saving.get_registered_object)
            config = {"inner_optimizer": config["inner_optimizer"], "policy": saved}
        if self.guard is not None:
            find, name_of = saving.get_registered_object, saving.get_registered_name
            config["guard"] = to_json(self.guard, name_of, find, RULES)
        with tf.init_scope():
            if tf.executing_eagerly():
                config["state"] = {name: _plain(value) for name, value in self._loss_scale.numbers().items()}
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Create an optimizer from a configuration, this class's or that of tf_keras's own wrapper."""
        kind_of_config(config)  # raises if it is not one
        settings = {name: _copied(value) for name, value in config.items()}
        state = settings.pop("state", None)
        find = partial(tf_keras.saving.get_registered_object, custom_objects=custom_objects)
        if "policy" in settings:
            settings["policy"] = from_json(settings["policy"], find)
        if "guard" in settings:
            settings["guard"] = from_json(settings["guard"], find, RULES, Guard)
        made: Self = super(BaseLossScaleOptimizer, cls).from_config(settings, custom_objects)  # type: ignore[misc]
        if state is not None:
            made._loss_scale.restore({name: _numbers(value) for name, value in state.items()})
        return made

    def _theirs(self) -> Any:
        """Return this optimizer as tf_keras's own class."""
        return super(BaseLossScaleOptimizer, self)


@tf_keras.saving.register_keras_serializable("preamp")
class LossScaleOptimizer(OverTfKeras, theirs.LossScaleOptimizerV3):
    """`preamp.tensorflow.LossScaleOptimizer` over an optimizer of tf_keras.

    It adds what tf_keras's class lacks: hyperparameters, methods that act on the inner optimizer, and
    `.keras` files that hold its state once.
    """

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
            UsageError: without variables before it is built, and if it is not given a list of variables.
        """
        if var_list is None:
            var_list = vars(self).get("_trained")
        instead = "finalize_variable_values(model.trainable_variables)"
        if var_list is None:
            raise UsageError(f"the optimizer has no variables yet. Write {instead}.")
        self._optimizer.finalize_variable_values(listed_variables("var_list", var_list, instead))

    def add_variable(self, *args: object, **kwargs: object) -> Any:
        """Add a variable to the inner optimizer."""
        return self._optimizer.add_variable(*args, **kwargs)

    def add_variable_from_reference(self, *args: object, **kwargs: object) -> Any:
        """Add a variable to the inner optimizer, shaped like one of the model's."""
        return self._optimizer.add_variable_from_reference(*args, **kwargs)

    def update_step(self, gradient: Gradient, variable: tf.Variable) -> Any:
        """Let the inner optimizer update a variable with an unscaled gradient, without a check."""
        return self._optimizer.update_step(gradient, variable)

    def compute_gradients(
        self, loss: Loss, var_list: Variables, tape: tf.GradientTape | None = None
    ) -> list[Pair]:
        """Return unscaled gradients with their variables.

        Args:
            loss: a callable that returns the loss, or the loss itself, computed under `tape`.
            var_list: a variable, several, or a callable that returns them.
            tape: the tape of a loss that is not callable.

        Raises:
            UsageError: for a loss that is neither callable nor has a tape.
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
        """Save the state of the scale. Into a dict, save the inner optimizer's variables as well.

        In a file tf_keras itself saves those next to it.
        """
        check_store(store)
        if isinstance(store, dict):
            self._optimizer.save_own_variables(store)
        for name, value in self._loss_scale.numbers().items():
            store[name] = np.asarray(value)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Load what `save_own_variables` of this class or of tf_keras's own wrapper saved."""
        check_store(store)
        saved = {name: store[name] for name in store.keys()}  # noqa: SIM118  # a file is not a mapping
        inner = {name: value for name, value in saved.items() if name.isdecimal()}
        if inner:
            self._optimizer.load_own_variables(inner)
        state = {name: np.asarray(value).tolist() for name, value in saved.items() if name not in inner}
        if state:
            self._loss_scale.restore(state)

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("_optimizer")
        if inner is not None and is_hyperparameter(inner, name):
            return getattr(inner, name)
        if hasattr(type(self), name):  # a property raised AttributeError: raise that again
            return object.__getattribute__(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        inner = vars(self).get("_optimizer")
        if inner is not None and name not in vars(self) and is_hyperparameter(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)


def _plain(value: Any) -> Any:
    """Return a number, or a list of them, in a form that JSON can hold: inf and NaN as text."""
    if isinstance(value, list):
        return [_plain(number) for number in value]
    return value if math.isfinite(value) else str(value)


def _numbers(value: Any) -> Any:
    """Return what `_plain` was given."""
    if isinstance(value, list):
        return [_numbers(number) for number in value]
    return float(value) if isinstance(value, str) else value


def _copied(value: T) -> T:
    """Return a copy of a dict, which tf_keras will write to, and anything else as it is."""
    return deepcopy(value) if isinstance(value, dict) else value
