"""Keras 3's LossScaleOptimizer with every documented argument, on JAX, PyTorch and TensorFlow."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Never, Self, cast

import keras
import numpy as np

from preamp.arrays import Arrays
from preamp.checks import (
    ScaledLosses,
    check_store,
    level_of_caller,
    listed,
    listed_variables,
    loss_or_refused,
    paired,
    shown,
)
from preamp.errors import PolicyError, ScaleExhausted, UsageError
from preamp.guards import RULES, Guard
from preamp.keras.inner import (
    BaseLossScaleOptimizer,
    Handed,
    adopt,
    check_inner,
    hand_over,
    is_hyperparameter,
)
from preamp.keras.rule import check_config, rule
from preamp.keras.scaler import APPLY_IN_JIT, Backend, NotedLosses, ScaledStep, has_value, saved_state
from preamp.keras_shared.arguments import INITIAL_SCALE, INTERVAL, KERAS_DEFAULTS, check_scale, refuse_unknown
from preamp.keras_shared.variables import COUNTS, Number, StateVariables, checkpoint_key, warn_if_other_guard
from preamp.policy import Dynamic, Policy, Static
from preamp.policy.registry import from_json, to_json
from preamp.scaling import Step, given_guard, raise_if_exhausted, to_step, with_rules
from preamp.systems.arguments import as_whole

if TYPE_CHECKING:
    import jax
    import tensorflow as tf
    import torch

    from preamp.arrays.jax import Gradient as JaxGradient
    from preamp.arrays.tensorflow import Gradient as TensorFlowGradient
    from preamp.keras import on_jax, on_tensorflow, on_torch

    # mypy checks that each module provides what is declared.
    _on_jax: Backend[JaxGradient, jax.Array] = on_jax
    _on_tensorflow: Backend[TensorFlowGradient | None, tf.Tensor] = on_tensorflow
    _on_torch: Backend[torch.Tensor, torch.Tensor] = on_torch

backend: Backend[Any, Any] = import_module(f"preamp.keras.on_{keras.backend.backend()}")
arrays: Arrays[Any, Any] = import_module(f"preamp.arrays.{keras.backend.backend()}")

# The advice for a scale outside the policy's bounds.
REMEDY = "optimizer.dynamic_scale.assign({bound!r}) after loading"

# The names of the variables of a policy's state, also in files: Keras's own where it has one.
NAMES = {
    "policy_state.scale": "dynamic_scale",
    "policy_state.good": "step_counter",
    "policy_state.bad": "overflow_counter",
    "policy_state.age": "age_counter",
}


class CountError(UsageError, ValueError):
    """The number of values is not the number of variables. Keras raises `ValueError` here."""


@keras.saving.register_keras_serializable(package="preamp")
class LossScaleOptimizer(BaseLossScaleOptimizer):
    """An optimizer that scales the loss, skips the steps that overflow and moves the scale.

    It is a `keras.optimizers.LossScaleOptimizer`, so `Model.compile` takes it as it is. The arguments are
    those that Keras 3.6 documents, and all of them apply to unscaled gradients: the inner optimizer
    accumulates, clips, decays, updates, averages and constrains, in this order.

    Args:
        inner_optimizer: the `keras.optimizers.Optimizer` to wrap.
        initial_scale: the scale of the first step.
        dynamic_growth_steps: finite steps in a row after which the scale is doubled.
        name: the name of the optimizer and the prefix of its variables.
        policy: any preamp policy or dialect, instead of these two arguments. Without it the rule is Keras's,
            with a floor of 2**-14 and a ceiling of 2**32.
        guard: any guard of `preamp.guards`, such as `SpikeGuard()`, which skips steps whose loss or gradient
            norm is a spike, as if they overflowed, but without moving the scale. If several losses are scaled
            for one step, it is given the last.
        weight_decay: decoupled weight decay: before an update every weight is reduced by this share of
            itself, times the learning rate.
        clipnorm: each variable's gradient is clipped to this L2 norm.
        clipvalue: each entry of a gradient is clipped to [-clipvalue, clipvalue].
        global_clipnorm: all gradients together are clipped to this L2 norm. Give at most one of the three.
        use_ema: keep an exponential moving average of the weights.
        ema_momentum: new average = ema_momentum * old average + (1 - ema_momentum) * weight.
        ema_overwrite_frequency: overwrite the weights with their averages once in this many updates. None: at
            the end of training, as `fit` does.
        loss_scale_factor: a fixed scale instead of one that moves. Steps that overflow are still skipped.
        gradient_accumulation_steps: update once in this many steps, at least 2, with the mean of their
            gradients. A step whose gradients overflow is dropped and not counted.
        dynamic: must be True. For a fixed scale use `loss_scale_factor`.

    Attributes:
        inner_optimizer: the wrapped optimizer. Its hyperparameters can be read and set on the wrapper.
        policy: the rule in force.
        dynamic_scale: a float32 variable, by which the next loss is multiplied.
        step_counter: a float32 variable, the number of finite steps since the scale moved.

    Raises:
        PolicyError: for invalid arguments, and for arguments that contradict each other; it is a
            `ValueError`. `apply` raises it for a guard that uses something that is not known there.
        UsageError: for arguments that can no longer be set on an inner optimizer that has been built.

    Warns:
        InexactScale: for a scale that is not a power of two.

    >>> import keras
    >>> from preamp.keras import LossScaleOptimizer
    >>> weight = keras.Variable([1.0])
    >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), global_clipnorm=1.0)
    >>> scaled = optimizer.scale_loss(2.0)
    >>> optimizer.apply([keras.ops.array([float(scaled)])], [weight])
    >>> print(weight.numpy(), optimizer.last_step.skipped, optimizer.loss_scale)
    [0.5] False 32768.0
    """

    weight_decay = Handed()
    clipnorm = Handed()
    clipvalue = Handed()
    global_clipnorm = Handed()
    use_ema = Handed()
    ema_momentum = Handed()
    ema_overwrite_frequency = Handed()
    gradient_accumulation_steps = Handed()
    _trainable_variables = Handed()
    _trainable_variables_indices = Handed()

    built: bool
    _scale_loss_is = "optimizer.scale_loss"  # for messages

    def __init__(
        self,
        inner_optimizer: keras.Optimizer,
        initial_scale: float | None = INITIAL_SCALE,
        dynamic_growth_steps: float | None = INTERVAL,
        name: str | None = None,
        *,
        policy: Policy[Any] | None = None,
        guard: Guard[Any] | None = None,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool | None = False,
        ema_momentum: float | None = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        dynamic: bool = True,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown)
        given = {
            "weight_decay": weight_decay,
            "clipnorm": clipnorm,
            "clipvalue": clipvalue,
            "global_clipnorm": global_clipnorm,
            "use_ema": use_ema,
            "ema_momentum": ema_momentum,
            "ema_overwrite_frequency": ema_overwrite_frequency,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        }
        if not dynamic:
            raise PolicyError("dynamic=False needs the fixed scale. Write loss_scale_factor=2.0**15 instead.")
        guard = given_guard(guard)
        check_inner(inner_optimizer)
        made = rule(inner_optimizer, initial_scale, dynamic_growth_steps, policy, loss_scale_factor)
        hand_over(
            inner_optimizer, {n: KERAS_DEFAULTS[n] if value is None else value for n, value in given.items()}
        )
        inner_optimizer.loss_scale_factor = None  # the wrapper has it now; gradients are divided once
        # Not the constructor of Keras's own: it takes these arguments only to refuse them.
        super(BaseLossScaleOptimizer, self).__init__(learning_rate=0.0, name=name)
        self._scaler: StateVariables[Any, keras.Variable] = StateVariables(
            made,
            guard,
            make=self._variable,
            # On TensorFlow the value is the variable itself, which is about to be written.
            read=lambda variable: variable.value + 0.0,
            write=backend.write,
            add=keras.Variable.assign_add,
            names=NAMES,
            remedy=REMEDY,
        )
        policy_state = self._scaler.state.policy_state
        self.dynamic_scale, self.step_counter = policy_state.scale, policy_state.good
        self._was_scaled = False
        self._scaled_losses = ScaledLosses()
        self._noted_losses = NotedLosses()
        self._loss_of_step: tuple[Any, Any] | None = None  # a step's loss, and how many steps there were then
        self.inner_optimizer = inner_optimizer
        adopt(self, inner_optimizer)

    @property
    def policy(self) -> Policy[Any]:
        """The rule in force."""
        return self._scaler.policy

    @property
    def guard(self) -> Guard[Any] | None:
        """The rule that skips spikes; None without one."""
        return self._scaler.guard

    @property
    def initial_scale(self) -> float:
        """The scale of the first step."""
        return float(self.policy.start().scale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The policy's `growth_interval`: clean steps before the scale grows. None if it has none.

        Programs that JAX and TensorFlow compiled before it was set keep the old number.
        """
        return getattr(self.policy, "growth_interval", None)

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value: float) -> None:
        if self.dynamic_growth_steps is None:
            raise PolicyError(
                f"dynamic_growth_steps={value!r} cannot be set: {self.policy!r} has no growth_interval. "
                f"Write LossScaleOptimizer(..., policy=Dynamic(growth_interval={value!r}))."
            )
        interval = as_whole(value)
        check_scale(self.initial_scale, interval, f"loss_scale_factor={self.initial_scale!r}")
        self._scaler.policy = replace(cast(Any, self.policy), growth_interval=interval)

    @property
    def loss_scale_factor(self) -> float | None:
        """The fixed scale; None if it moves."""
        return self.policy.scale if isinstance(self.policy, Static) else None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        if "inner_optimizer" in self.__dict__ and value != self.loss_scale_factor:
            raise PolicyError(
                f"loss_scale_factor={value!r} comes too late: whether the scale moves is decided when the "
                f"optimizer is created. Write LossScaleOptimizer(..., loss_scale_factor={value!r})."
            )

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of updates. In Keras 3.8 its own wrapper counts none."""
        return self.inner_optimizer.iterations

    @property
    def optimizers(self) -> list[keras.Optimizer]:
        """Those inside Keras's `MultiOptimizer`, whose learning rates callbacks set; only around one."""
        return self.inner_optimizer.optimizers  # type: ignore[no-any-return]

    @property
    def loss_scale(self) -> float:
        """The scale by which the next loss is multiplied, copied to the host."""
        return float(arrays.read([self.dynamic_scale.value])[0])

    @property
    def skipped_steps(self) -> int:
        """How many steps have been skipped, copied to the host."""
        return int(arrays.read([self._scaler.state.skipped_steps.value])[0])

    @property
    def last_step(self) -> Step | None:
        """The record of the last step, copied to the host; None before the first.

        It includes the loss if its value was known when it was scaled, which it is not in a compiled program,
        or if a guard uses it.
        """
        numbers, count = self._numbers(*(self._loss_of_step or ())), len(self._scaler.scalars)
        state = self._scaler.state_of(numbers[:count])
        loss = None if state.guard is None or np.isnan(state.guard.loss) else state.guard.loss
        # A compiled step leaves the loss of an older one there.
        if self._loss_of_step is not None and numbers[-1] == state.steps:
            loss = numbers[count]
        return with_rules(to_step(state, loss=loss, framework="keras"), self.policy, self.guard)

    def check_exhausted(self) -> None:
        """Raise if the policy gave up in a compiled step, which cannot raise, until a state is loaded.

        Raises:
            ScaleExhausted: with the scale at which it first gave up.
        """
        raise_if_exhausted(self.policy, self._scaler.state_of(self._numbers()))

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the inner optimizer's variables.

        Raises:
            UsageError: if it is not given a list of variables.
        """
        var_list = listed_variables("var_list", var_list, "build(model.trainable_variables)")
        halves = [variable for variable in var_list if _dtype(variable) == "float16"]
        if halves and not self.built:
            warnings.warn(
                f"{getattr(halves[0], 'path', halves[0].name)} is a float16 variable: Keras's optimizers "
                "round unscaled gradients to float16, which has nothing below 6e-8. "
                'Write dtype="mixed_float16", which keeps variables in float32.',
                stacklevel=level_of_caller("keras", "tensorflow"),
            )
        self.inner_optimizer.build(var_list)
        self.built = True

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the scale, in float32 or wider.

        Raises:
            UsageError: if the loss is not a tensor, or has already been scaled; on JAX under `jit`, where the
                current scale would be compiled in.
        """
        loss_or_refused(loss)
        self._scaled_losses.check(loss, "scale_loss(loss) once; Keras's own train_step does it in fit")
        self._was_scaled = True
        scale, moves = self.dynamic_scale, not isinstance(self.policy, Static)
        if not has_value(scale) or (moves and backend.becomes_constant(scale.value)):
            raise UsageError(
                "scale_loss inside jit would compile the current scale in, and not see it change. Write "
                "optimizer.stateless_scale_loss(optimizer_variables, loss), with optimizer_variables an "
                "argument of the function that is compiled; in train_step they are in its state."
            )
        self._note_loss(loss)
        return self._scaled_losses.note(keras.ops.multiply(loss, scale))

    def stateless_scale_loss(self, optimizer_variables: Sequence[Any], loss: Any) -> Any:
        """Return the loss times the scale among the optimizer's variables: `scale_loss` for `jax.jit`.

        Args:
            optimizer_variables: the current values of `variables`, as for `stateless_apply`.
            loss: a scalar.
        """
        pairs = list(zip(self.variables, self._counted(optimizer_variables), strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            return self.scale_loss(loss)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Unscale gradients and update the variables, unless a gradient is not finite; move the scale.

        Args:
            grads: scaled gradients, one for each variable; None for one without. Sparse ones stay sparse:
                `tf.IndexedSlices`, JAX's `BCOO`, PyTorch's sparse tensors. NumPy arrays are accepted.
            trainable_variables: the variables. None: those it was built with.

        Raises:
            ValueError: as in Keras, without variables, for unknown ones and if all gradients are None.
            CountError: if the numbers of gradients and variables differ.
            UsageError: for values that are not tensors or variables; on JAX under `jit`.
            ScaleExhausted: if the policy gives up on this step. The variables stay as they were.
        """
        instead = "apply(gradients, model.trainable_variables)"
        gradients = listed("grads", grads, instead)
        if not gradients:
            return
        if trainable_variables is not None:
            variables = listed_variables("trainable_variables", trainable_variables, instead)
        elif self.built:
            variables = list(self._trainable_variables)
        else:
            raise UsageError("the optimizer has no variables yet. Write apply(grads, trainable_variables).")
        if len(gradients) != len(variables):
            raise CountError(
                f"{len(gradients)} gradients were given for {len(variables)} variables. Write None for "
                "a variable without a gradient."
            )
        if not self.built:
            self.build(variables)
        for place, gradient in enumerate(gradients):
            if gradient is not None and not keras.ops.is_tensor(gradient):
                gradients[place] = _tensor(gradient)
        if not has_value(self.dynamic_scale):
            raise UsageError(APPLY_IN_JIT)
        if not self._was_scaled:
            self._warn_never_scaled()
        self._take_step(gradients, variables, self.dynamic_scale.value)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """Apply pairs of gradients and variables, as `apply` does, and return `iterations`.

        Raises:
            UsageError: for values that are not pairs. `apply` raises further errors.
        """
        pairs = paired(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        return self.iterations

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return new values of the variables and of the optimizer's: `apply` for `jax.jit`.

        Args:
            optimizer_variables: the current values of `variables`.
            grads: scaled gradients, one for each variable; None for one without.
            trainable_variables: the current values of the variables it was built with.

        Raises:
            ValueError: as in Keras, before `build`, for another number of variables, and on TensorFlow.
            CountError: for another number of gradients.
            UsageError: for arguments that are not lists of values.
        """
        instead = "stateless_apply(optimizer_variables, grads, trainable_variables), three lists of values"
        grads = listed("grads", grads, instead)
        optimizer_variables = _listed_values("optimizer_variables", optimizer_variables, instead)
        trainable_variables = _listed_values("trainable_variables", trainable_variables, instead)
        if self.built and len(grads) != len(self._trainable_variables):
            counts = len(grads), len(self._trainable_variables), len(trainable_variables)
            raise CountError(_miscounted(*counts))
        return super(BaseLossScaleOptimizer, self).stateless_apply(  # type: ignore[no-any-return]
            backend.stateless_inputs(optimizer_variables),
            grads,
            backend.stateless_inputs(trainable_variables),
        )

    def finalize_variable_values(self, var_list: Sequence[Any] | None = None) -> None:
        """Overwrite variables with their averages, if the inner optimizer keeps averages. `fit` does so.

        Args:
            var_list: the variables. None: those it was built with.

        Raises:
            UsageError: without variables before it is built, and if it is not given a list of variables.
        """
        instead = "finalize_variable_values(model.trainable_variables)"
        if var_list is None and not self.built:
            raise UsageError(f"the optimizer has no variables yet. Write {instead}.")
        if var_list is not None:
            var_list = listed_variables("var_list", var_list, instead)
        self.inner_optimizer.finalize_variable_values(
            self._trainable_variables if var_list is None else var_list
        )

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Exclude variables from the inner optimizer's weight decay, before it is built.

        Args:
            var_list: variables to exclude.
            var_names: parts of names; a variable whose name has one of them is excluded.

        Raises:
            ValueError: as in Keras, once it is built.
            UsageError: for arguments that are not lists. A string would exclude every name that contains one
                of its letters.
        """
        if var_list is not None:
            var_list = listed_variables("var_list", var_list, "exclude_from_weight_decay([layer.bias])")
        if var_names is not None:
            instead = "exclude_from_weight_decay(var_names=['bias'])"
            var_names = listed("var_names", var_names, instead)
            if not all(isinstance(name, str) for name in var_names):
                raise UsageError(f"var_names={shown(var_names)} are not names. Write {instead}.")
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set the values of `variables`, all of them.

        Raises:
            CountError: for another number of values, or before `build`.
            PolicyError: for a scale or count that training cannot resume from.
            UsageError: if it is not a list, or for a value of another shape. Then nothing is set.

        Warns:
            UserWarning: for a scale outside the policy's bounds.
        """
        if not self.built:
            raise CountError(
                "there are no variables to set yet. Write optimizer.build(model.trainable_variables)."
            )
        values = {id(v): value for v, value in zip(self.variables, self._counted(weights), strict=True)}
        for variable in self.variables:
            value = values[id(variable)]
            if isinstance(value, str) or tuple(np.shape(value)) != tuple(variable.shape):
                raise UsageError(
                    f"{shown(value)} is not a value for {variable.path}, of shape {tuple(variable.shape)}. "
                    "Write set_weights([variable.numpy() for variable in other.variables])."
                )
        own = {v.name: keras.ops.convert_to_numpy(values[id(v)]) for v in self._scaler.variables.values()}
        self._scaler.resumed({name: np.asarray(value, float).tolist() for name, value in own.items()})
        for variable in self.variables:
            variable.assign(values[id(variable)])

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Save the wrapper's variables. Into a dict, save the inner optimizer's as well.

        In a file Keras itself saves those next to the wrapper's.
        """
        check_store(store)
        if isinstance(store, dict):
            self.inner_optimizer.save_own_variables(store)
        for variable in self._scaler.variables.values():
            store[variable.name] = keras.ops.convert_to_numpy(variable.value)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Load variables that this wrapper, Keras's own wrapper, or an optimizer without a wrapper saved.

        A fixed scale stays as it is. A scale that training cannot resume from, such as NaN, starts again, and
        one outside the policy's bounds is kept; both cases give a warning. There is also one if the inner
        optimizer has not been built, because Keras then loads nothing into it.
        """
        check_store(store)
        inner, saved = self.inner_optimizer, saved_state(store)
        if saved is not None:
            try:
                self._scaler.load(saved)
            except PolicyError as problem:
                self._scaler.load({})
                warnings.warn(
                    f"the loss scale starts again at {self.initial_scale} instead of the value in the file: "
                    f"{problem}",
                    stacklevel=level_of_caller("keras", "tensorflow"),
                )
            if not self.built and saved.get("steps", 1.0):  # Keras saves no scale before `build`
                warnings.warn(
                    f"only the loss scale is loaded: {inner.name!r} has no variables yet to load its "
                    "iterations and moments into. Write "
                    "model.optimizer.build(model.trainable_variables) before model.load_weights(path).",
                    stacklevel=level_of_caller("keras", "tensorflow"),
                )
            beside = {name: store[name] for name in store.keys() if name.isdecimal()}  # noqa: SIM118
            if "dynamic_scale" in store.keys() and beside:  # noqa: SIM118  # a file is not a mapping
                inner.load_own_variables(beside)
        elif len(store.keys()) == len(inner.variables):
            inner.load_own_variables(store)
        else:
            warnings.warn(
                f"{self.name!r} starts again: the file holds neither a loss scale nor the "
                f"{len(inner.variables)} variables of {inner.name!r}.",
                stacklevel=level_of_caller("keras", "tensorflow"),
            )

    def get_config(self) -> dict[str, Any]:
        """Return the configuration, in plain JSON."""
        find, name_of = keras.saving.get_registered_object, keras.saving.get_registered_name
        described: dict[str, Any]
        if isinstance(self.policy, Static):
            described = {"loss_scale_factor": self.policy.scale}
        elif isinstance(self.policy, Dynamic) and self.policy == Dynamic.holding(
            self.initial_scale, growth_interval=self.policy.growth_interval
        ):
            described = {
                "initial_scale": self.initial_scale,
                "dynamic_growth_steps": self.dynamic_growth_steps,
            }
        else:
            described = {"policy": to_json(self.policy, name_of, find)}
        if self.guard is not None:
            described["guard"] = to_json(self.guard, name_of, find, RULES)
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, **described}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Create an optimizer from a configuration, this class's or that of Keras's own wrapper.

        Raises:
            PolicyError: if it is not a configuration of either.
        """
        check_config(config, cls)
        settings = dict(config)
        inner = keras.saving.deserialize_keras_object(settings.pop("inner_optimizer"), custom_objects)
        find = partial(keras.saving.get_registered_object, custom_objects=custom_objects)
        if settings.get("policy") is not None:
            settings["policy"] = from_json(settings["policy"], find)
        if settings.get("guard") is not None:
            settings["guard"] = from_json(settings["guard"], find, RULES, Guard)
        return cls(inner, **settings)

    def __getattr__(self, name: str) -> Any:
        """Return a hyperparameter of the inner optimizer, such as `beta_1`."""
        inner = self.__dict__.get("inner_optimizer")
        if inner is not None and self._hands_over(inner, name):
            return getattr(inner, name)
        if hasattr(type(self), name):  # a property raised AttributeError: raise that again
            return object.__getattribute__(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        inner = self.__dict__.get("inner_optimizer")
        if inner is not None and name == "inner_optimizer" and value is not inner:
            raise UsageError(
                f"inner_optimizer={value!r} comes too late. Write LossScaleOptimizer(...) around it, and "
                "compile the model with that."
            )
        owned = name in self.__dict__ or hasattr(type(self), name)
        if inner is not None and not owned and self._hands_over(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def _hands_over(self, inner: keras.Optimizer, name: str) -> bool:
        """Return whether an attribute that the wrapper lacks is forwarded to the inner optimizer."""
        return is_hyperparameter(inner, name)

    def _trackable_children(self, save_type: str = "checkpoint", **options: object) -> dict[str, Any]:
        """Return what TensorFlow saves. Only TensorFlow calls this method.

        Keras keeps its variables in a list, so that checkpoints know them by position. With one variable more
        or less, because of another policy or guard, none after it could be restored. Here they have names.
        """
        children: dict[str, Any] = super()._trackable_children(save_type, **options)
        if save_type != "checkpoint":
            return children
        children.pop("_variables", None)
        have_names = {id(one) for one in [*children.values(), *self._scaler.guard_leaves.values()]}
        children |= {v.name: v for v in self._variables if id(v) not in have_names}
        if self.guard is not None:
            children[checkpoint_key(self.guard)] = self._tracked_guard()
        return children

    def _lookup_dependency(self, name: str, *cached: Any, **options: Any) -> Any:
        """Return what TensorFlow restores under a name; None if nothing has that name."""
        found = super()._lookup_dependency(name, *cached, **options)
        if found is None and "_scaler" in self.__dict__:
            warn_if_other_guard(self.guard, name)
        return found

    def _tracked_guard(self) -> Any:
        """Return an object that TensorFlow saves, with the guard's state by name."""
        if "_guard_in_checkpoint" not in self.__dict__:
            from preamp.keras.on_tensorflow import tracked

            self.__dict__["_guard_in_checkpoint"] = tracked(self._scaler.guard_leaves)
        return self.__dict__["_guard_in_checkpoint"]

    def _note_loss(self, loss: object) -> None:
        """Remember the loss of a step, for its record and for the guard."""
        if isinstance(loss, np.floating):
            loss = float(loss)
        scalar = backend.scalar(loss)
        # A loss that is being traced is for a guard in the same program, and must not outlive it.
        if not backend.is_concrete(scalar) and (self.guard is None or "loss" not in self.guard.uses):
            scalar = None
        self._noted_losses.note(backend.replica(), loss, scalar)

    def _variable(self, name: str, value: Number) -> keras.Variable:
        """Create a variable of the optimizer, with the same value on all replicas."""
        return self.add_variable(
            shape=(len(value),) if isinstance(value, tuple) else (),
            initializer=lambda shape, dtype: keras.ops.convert_to_tensor(np.asarray(value), dtype),
            dtype="int" if name in COUNTS else "float32",
            aggregation="only_first_replica",
            name=name,
        )

    def _numbers(self, *more: Any) -> list[float]:
        """Copy the scaler's variables and further scalars to the host, all at once."""
        return list(arrays.read([*[variable.value for variable in self._scaler.scalars.values()], *more]))

    def _counted(self, values: Sequence[Any]) -> Sequence[Any]:
        values = _listed_values("values", values, "[variable.value for variable in optimizer.variables]")
        if len(values) != len(self.variables):
            raise CountError(
                f"{len(values)} values were given for the optimizer's {len(self.variables)} variables. "
                "Write one for each of optimizer.variables."
            )
        return values

    def _warn_never_scaled(self) -> None:
        """Warn once that gradients were given and no loss was scaled."""
        self._was_scaled = True
        warnings.warn(
            f"{self.name!r} was given gradients, which it divides by the loss scale, but no loss was "
            "scaled. Write optimizer.scale_loss(loss) before the gradients are computed.",
            stacklevel=level_of_caller("keras", "tensorflow"),
        )

    @backend.untraced
    def _take_step(self, gradients: Sequence[Any], variables: Sequence[keras.Variable], scale: Any) -> None:
        """Take one step. With a scale of None the gradients have already been unscaled."""
        inner, named = self.inner_optimizer, self._scale_loss_is
        loss, why = self._noted_losses.take(backend.replica())
        step = ScaledStep(backend, arrays, inner, self._scaler, gradients, variables, scale, loss, why, named)
        if backend.take_traced(step):
            return
        try:
            step.take_on_host()
        except ScaleExhausted:  # a step as well; after any other error there was none
            self._keep_loss(loss)
            raise
        self._keep_loss(loss)

    def _keep_loss(self, loss: Any) -> None:
        """Keep the loss of a step, unread, with the number of steps."""
        is_known = loss is not None and backend.is_concrete(loss)
        # The sum is a copy of the variable.
        self._loss_of_step = (loss, self._scaler.state.steps.value + 0) if is_known else None


def _tensor(gradient: object) -> Any:
    """Convert a gradient that is not a tensor, such as a NumPy array, as Keras does."""
    try:
        if isinstance(gradient, str | bytes):  # TensorFlow has tensors of strings
            raise TypeError("a string")
        return keras.ops.convert_to_tensor(gradient)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{shown(gradient)} among the gradients is not a tensor. Write None for a variable without one."
        ) from error


def _listed_values(name: str, values: object, instead: str) -> list[Any]:
    """Return the values of variables as a list without None. A variable stands for its value."""
    found = [v.value if isinstance(v, keras.Variable) else v for v in listed(name, values, instead)]
    if any(value is None for value in found):
        raise UsageError(f"{name}={shown(found)} has no value for a variable. Write {instead}.")
    return found


def _dtype(variable: keras.Variable) -> str:
    return str(keras.backend.standardize_dtype(variable.dtype))


def _miscounted(gradients: int, variables: int, given: int) -> str:
    """Return the error message for numbers of gradients and variables that differ.

    Args:
        gradients: of gradients.
        variables: of variables that the optimizer was built with.
        given: of variables that were given with the gradients.
    """
    if variables == 0:  # as after Keras has loaded an .h5 file
        return (
            f"{gradients} gradients were given for an optimizer without variables. A model that was loaded "
            "from an .h5 file has lost its optimizer's: save it as .keras, or compile it again."
        )
    if given == gradients:  # as after a layer has been unfrozen
        return (
            f"{gradients} variables were given to an optimizer that was built with {variables}. This "
            "optimizer can only be called for the variables it was originally built with. Write "
            "model.compile(...) with a new optimizer after changing which layers are trainable."
        )
    return (
        f"{gradients} gradients were given for {variables} variables. "
        "Write None for a variable without a gradient."
    )
