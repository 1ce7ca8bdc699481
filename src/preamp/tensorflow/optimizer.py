"""tf.keras's LossScaleOptimizer: scale the loss, unscale the gradients, apply.

There is one class for each kind of inner optimizer; `LossScaleOptimizer(inner)` makes an object of it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

import tensorflow as tf

from preamp.arrays.tensorflow import Gradient, as_stored, divide, scaled, unconverted
from preamp.checks import (
    ScaledLosses,
    level_of_caller,
    listed_gradients,
    listed_variables,
    loss_or_refused,
    shown,
)
from preamp.errors import PolicyError, UsageError
from preamp.guards import Guard
from preamp.keras_shared.arguments import KERAS_DEFAULTS
from preamp.policy import Policy, Static
from preamp.scaling import Step
from preamp.tensorflow.rule import ArgumentTypeError

Kind: TypeAlias = Literal["legacy", "tf_keras", "keras"]
Loss: TypeAlias = "tf.Tensor | float | Callable[[], tf.Tensor]"
# A variable, several in lists and dicts, or a callable that returns them.
Variables: TypeAlias = "tf.Variable | Iterable[tf.Variable] | Callable[[], Iterable[tf.Variable]]"
Pair: TypeAlias = "tuple[Gradient | None, tf.Variable]"

# The class made for a user's subclass and a kind of inner optimizer.
_MADE: dict[tuple[type[LossScaleOptimizer], Kind], type[LossScaleOptimizer]] = {}


L = TypeVar("L", bound="LossScaleOptimizer")


class _SignatureOfInit:
    """Shows `inspect.signature`, help and editors the signature of `__init__` instead of `__new__`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        whole = inspect.signature(owner.__init__)  # type: ignore[misc]  # of the class that is asked
        return whole.replace(parameters=list(whole.parameters.values())[1:], return_annotation=owner)


class LossScaleOptimizer:
    """An optimizer that scales the loss, skips the steps that overflow and moves the scale.

    It takes the place of `tf.keras.mixed_precision.LossScaleOptimizer`, with the same arguments, attributes,
    errors and checkpoints. The object is an optimizer of the inner optimizer's library, so that
    `Model.compile` accepts it. The same holds for a subclass.

    Args:
        inner_optimizer: the optimizer to wrap: of tf_keras, legacy or not, or of Keras 3 on TensorFlow.
        dynamic: whether the scale moves. False: `initial_scale` stays, and steps that overflow are still
            skipped.
        initial_scale: the scale of the first step. None: 2**15 for a scale that moves.
        dynamic_growth_steps: finite steps in a row after which the scale is doubled. None: 2000.
        policy: any preamp policy or dialect, instead of these three arguments. Without it the rule is
            tf_keras's, with a floor of 1, or of `initial_scale` if that is less.
        guard: any guard of `preamp.guards`, such as `SpikeGuard()`, which skips steps whose loss or gradient
            norm is a spike, as if they overflowed, but without moving the scale. It judges the loss that
            `last_step` reports.
        model: the tf_keras model whose buffers to check after a skipped step: an overflow in the forward
            pass reaches BatchNorm's moving statistics before the step can be skipped. `last_step.buffers`
            names those that are not finite. Costs nothing while steps are taken. With an optimizer of Keras 3
            use `preamp.keras.TraceCallback` instead.
        restore_buffers: after every skipped step give all buffers the values that they had after the last
            step that was taken, or when the optimizer was made or its state loaded, if that was later. So
            load the model first. Costs a copy of these variables at each step, on their device. `get_config`
            includes neither this argument nor `model`.

    Attributes:
        dynamic: whether the scale moves.
        dynamic_counter: an int64 scalar, finite steps since the scale moved. None for a fixed scale.
        dynamic_growth_steps: the policy's `growth_interval`: clean steps before the scale grows. None if it
            has none.
        initial_scale: the scale of the first step, a float.
        inner_optimizer: the wrapped optimizer. Its hyperparameters can be read and set on the wrapper.
        learning_rate: the learning rate of the inner optimizer; `lr` is the same.
        loss_scale: the scale of the next step, a float32 scalar tensor.
        policy: the rule in force.
        last_step: the record of the last step, a `Step`, copied to the host; None before the first. Its
            `loss` is the sum of the losses that were scaled since the step before, on all replicas.
        skipped_steps: how many steps have been skipped, copied to the host.

    Raises:
        PolicyError: for invalid arguments, and for arguments that contradict each other; it is a
            `ValueError`. Where tf_keras raises `TypeError`, for a `dynamic` that is not a bool and for
            something that is not an optimizer, it is a `TypeError` as well.

    Warns:
        InexactScale: for a scale that is not a power of two.

    `minimize` scales the loss, unscales the gradients and moves the scale:

    >>> import tensorflow as tf
    >>> from preamp.tensorflow import LossScaleOptimizer
    >>> opt = tf.keras.optimizers.SGD(0.25)
    >>> opt = LossScaleOptimizer(opt)
    >>> var = tf.Variable(1.)
    >>> loss_fn = lambda: var ** 2
    >>> opt.minimize(loss_fn, var_list=var)
    >>> print(var.numpy())
    0.5

    With a tape, scale the loss and unscale the gradients:

    >>> with tf.GradientTape() as tape:
    ...     loss = loss_fn()
    ...     scaled_loss = opt.get_scaled_loss(loss)
    >>> scaled_grad = tape.gradient(scaled_loss, var)
    >>> (grad,) = opt.get_unscaled_gradients([scaled_grad])
    >>> opt.apply_gradients([(grad, var)])  # The scale moves here.
    >>> print(var.numpy())
    0.25

    Hyperparameters are the inner optimizer's:

    >>> opt = tf.keras.optimizers.Adam(beta_1=0.8, epsilon=1e-5)
    >>> opt = LossScaleOptimizer(opt)
    >>> opt.beta_1
    0.8
    >>> opt.beta_1 = 0.7
    >>> opt.beta_1
    0.7
    >>> opt.inner_optimizer.beta_1
    0.7

    Constants of legacy optimizers, such as `epsilon`, are never forwarded, whatever library the inner
    optimizer belongs to:

    >>> opt.inner_optimizer.epsilon
    1e-05
    >>> opt.epsilon
    Traceback (most recent call last):
    ...
    AttributeError: 'LossScaleOptimizer' object has no attribute 'epsilon'
    >>> opt.epsilon = 1e-4  # Not that of the inner optimizer.
    >>> opt.inner_optimizer.epsilon
    1e-05
    """

    _loss_has_been_scaled = False
    _gradients_have_been_unscaled = False
    _scaled_losses: ScaledLosses
    _class_for: ClassVar[Callable[[Kind], type[LossScaleOptimizer]]]  # set by `preamp.tensorflow.kinds`

    __signature__: ClassVar[_SignatureOfInit] = _SignatureOfInit()

    def __new__(
        cls, inner_optimizer: tf.keras.optimizers.Optimizer | None = None, *_: object, **__: object
    ) -> Self:
        made: Self = object.__new__(cls if _has_kind(cls) else _over(cls, _kind(inner_optimizer)))
        return made

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
    ) -> None:
        raise NotImplementedError  # each kind has its own

    if TYPE_CHECKING:  # each kind implements these itself

        @property
        def policy(self) -> Policy[Any]: ...

        @property
        def guard(self) -> Guard[Any] | None: ...

        @property
        def inner_optimizer(self) -> tf.keras.optimizers.Optimizer: ...

        @property
        def loss_scale(self) -> tf.Tensor: ...

        @property
        def dynamic_counter(self) -> tf.Tensor | None: ...

        @property
        def last_step(self) -> Step | None: ...

        @property
        def skipped_steps(self) -> int: ...

        def check_exhausted(self) -> None: ...

        def minimize(self, loss: Loss, var_list: Variables, *args: Any, **kwargs: Any) -> Any: ...

        def apply_gradients(self, grads_and_vars: Iterable[Pair], *args: Any, **kwargs: Any) -> Any: ...

        def get_config(self) -> dict[str, Any]: ...

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Create an optimizer from a configuration, this class's or that of tf.keras's own wrapper.

        Args:
            config: as `get_config` returns it. It is not changed.
            custom_objects: classes by name, such as those of an inner optimizer of your own.

        Raises:
            PolicyError: if it is not a configuration of either.
        """
        return _over(cls, kind_of_config(config)).from_config(config, custom_objects)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: object) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def lr(self) -> Any:
        """The inner optimizer's learning rate, by its old name."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: object) -> None:
        self.learning_rate = value

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return not isinstance(self.policy, Static)

    @property
    def initial_scale(self) -> float:
        """The scale of the first step."""
        return float(self.policy.start().scale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The policy's `growth_interval`: clean steps before the scale grows. None if it has none."""
        return getattr(self.policy, "growth_interval", None)

    @unconverted
    def get_scaled_loss(self, loss: Loss) -> Any:
        """Return the loss times the scale, to compute the gradients of.

        Args:
            loss: a tensor, or a callable that returns one; then the result is a callable too. float16 and
                bfloat16 become float32, because 2**17 is inf in float16.

        Raises:
            UsageError: if the loss is not a tensor, or has already been scaled.
        """
        if callable(loss):
            self._loss_has_been_scaled = True
            return lambda: self.get_scaled_loss(loss())
        self._check_loss(loss)
        self._loss_has_been_scaled = True
        return self._scaled_losses.note(scaled(loss, self.loss_scale))

    def _check_loss(self, loss: Loss) -> None:
        """Check that a loss is a tensor or number, and has not already been scaled."""
        loss_or_refused(loss)
        # Past `__setattr__` of tf_keras, which tracks attributes.
        scaled_losses = self.__dict__.setdefault("_scaled_losses", ScaledLosses())
        scaled_losses.check(loss, "minimize(loss_fn, variables), which scales, or get_scaled_loss(loss) once")

    @unconverted
    def get_unscaled_gradients(self, grads: Iterable[Gradient | None]) -> list[Any]:
        """Return the gradients divided by the scale.

        Args:
            grads: tensors or `tf.IndexedSlices`, divided in float32 or wider. None stays None.

        Returns:
            Gradients of the dtypes that were given. So float16 has nothing below 6e-8: with a scale of 2**15
            what was below 0.002 becomes 0. Gradients of float32 variables are float32.

        Raises:
            UsageError: if it is not a list of tensors.
        """
        grads = listed_gradients("grads", grads, "get_unscaled_gradients(tape.gradient(loss, variables))")
        self._gradients_have_been_unscaled = True
        unscaled = divide(grads, self.loss_scale)
        return [as_stored(one, given) for one, given in zip(unscaled, grads, strict=True)]

    def get_gradients(self, loss: Loss, params: Variables) -> list[Any]:
        """Return unscaled gradients of a loss in a graph. Not needed with `minimize` or a tape.

        Args:
            loss: a tensor of the graph that is being built, in `tf.function` or `tf.Graph`.
            params: a variable, or several.

        Raises:
            ValueError: for a variable that the loss does not depend on.
            UsageError: outside a graph, where TensorFlow needs a tape to compute gradients.
        """
        check_graph()
        variables = flat_variables("params", params)
        tensors = [
            v if tf.is_tensor(v) or isinstance(v, tf.Variable) else v.value for v in variables
        ]  # of Keras
        grads = tf.gradients(self.get_scaled_loss(loss), tensors)
        missing = [v.name for v, gradient in zip(variables, grads, strict=True) if gradient is None]
        if missing:
            raise ValueError(f"the loss does not depend on {missing[0]}. Write params without it.")
        return self.get_unscaled_gradients(grads)

    def _warn_if_forgotten(self) -> None:
        """Warn once of gradients that cannot be those of a scaled loss."""
        calls = {
            "get_scaled_loss": self._loss_has_been_scaled,
            "get_unscaled_gradients": self._gradients_have_been_unscaled,
        }
        forgotten = [name for name, called in calls.items() if not called]
        if forgotten:
            self._loss_has_been_scaled = self._gradients_have_been_unscaled = True
            warnings.warn(
                f"apply_gradients was called without {' and '.join(forgotten)}: the loss scale does not "
                "protect these gradients, or is still in them. Write loss = opt.get_scaled_loss(loss) under "
                "the tape and grads = opt.get_unscaled_gradients(tape.gradient(loss, variables)), or "
                "opt.minimize(loss_fn, variables), which does both.",
                UserWarning,
                stacklevel=level_of_caller("tensorflow", "tf_keras", "keras"),
            )


def is_hyperparameter(inner: object, name: str) -> bool:
    """Return whether an attribute of an inner optimizer can be read and set on the wrapper.

    Legacy optimizers distinguish hyperparameters, such as `beta_1`, from constants, such as `epsilon` and the
    initial values of slots. Newer ones do not, so the same distinction is made for them here. A
    hyperparameter is a public number, or a setting that every newer optimizer has, which is None or a bool if
    it is not used.
    """
    value = vars(inner).get(name, "")
    if name in KERAS_DEFAULTS:
        return name in vars(inner)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and not name.startswith(("_", "epsilon", "initial_"))


def check_tape(loss: Loss, tape: tf.GradientTape | None) -> None:
    """Refuse a loss that was computed without a tape: it has no gradients."""
    if not callable(loss) and tape is None:
        raise UsageError(
            f"loss={loss!r} was computed without a tape. Write minimize(lambda: loss_of(model), variables), "
            "or minimize(loss, variables, tape=tape)."
        )


def flat_variables(name: str, variables: object) -> list[Any]:
    """Return a variable, or several in lists and dicts, as one list. Refuse anything else."""
    return listed_variables(name, tf.nest.flatten(variables), "minimize(loss_fn, model.trainable_variables)")


def check_graph() -> None:
    """Refuse `get_gradients` where TensorFlow has no graph to differentiate."""
    if tf.executing_eagerly():
        raise UsageError(
            "get_gradients is for graphs. Write it in a tf.function, or use a tf.GradientTape, or write "
            "optimizer.minimize(lambda: loss_of(model), variables)."
        )


def _has_kind(cls: type) -> bool:
    """Return whether a class is already made for inner optimizers of one library."""
    return any(issubclass(base, LossScaleOptimizer) and "KIND" in vars(base) for base in cls.__mro__)


def _over(cls: type[L], kind: Kind) -> type[L]:
    """Return a class for inner optimizers of one kind. A subclass gets one with its own name and module."""
    base: Any = LossScaleOptimizer._class_for(kind)
    if cls is LossScaleOptimizer:
        return base  # type: ignore[no-any-return]
    made: Any = _MADE.get((cls, kind))
    if made is None:
        place = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        made = types.new_class(cls.__name__, (cls, base), exec_body=lambda body: body.update(place))
        _MADE[cls, kind] = made
    _register_as(made, cls, kind)
    return made  # type: ignore[no-any-return]


def _register_as(made: type, cls: type, kind: Kind) -> None:
    """Register a class under the name of the user's class that it was made from, if that is registered.

    Files then hold that name, and loading finds the user's class, which creates the right kind.
    """
    library = importlib.import_module("keras" if kind == "keras" else "tf_keras")
    name = library.saving.get_registered_name(cls)
    package, found, short = name.rpartition(">")
    if found and library.saving.get_registered_name(made) != name:
        for each in (made, cls):  # the last one is found by the name
            library.saving.register_keras_serializable(package, short)(each)


def kind_of_config(config: object) -> Kind:
    """Return the kind of the inner optimizer in a configuration of any of the three libraries.

    Raises:
        PolicyError: if it is not a configuration.
    """
    inner = config.get("inner_optimizer") if isinstance(config, Mapping) else None
    if inner is not None and not isinstance(inner, Mapping):
        return _kind(inner)
    settings: Any = (inner or {}).get("config") or {}
    if "decay" in settings or settings.get("is_legacy_optimizer"):
        return "legacy"
    if "is_legacy_optimizer" in settings:
        return "tf_keras"
    if settings:
        return "keras"
    raise PolicyError(
        f"{shown(config)} is not the configuration of a LossScaleOptimizer, which has an inner_optimizer and "
        "arguments. Write optimizer.get_config() to get one."
    )


def _kind(inner: object) -> Kind:
    """Return the kind of an inner optimizer, without importing any other library.

    Raises:
        ArgumentTypeError: if it is not an optimizer, or scales its loss itself.
    """
    if isinstance(inner, LossScaleOptimizer):
        raise _nested(inner)
    if "tf_keras" in sys.modules:
        import tf_keras

        if isinstance(inner, tf_keras.mixed_precision.LossScaleOptimizer):
            raise _nested(inner)
        if isinstance(inner, tf_keras.optimizers.legacy.Optimizer):
            return "legacy"
        if isinstance(inner, tf_keras.optimizers.Optimizer):
            return "tf_keras"
    if "keras" in sys.modules:
        import keras

        if isinstance(inner, keras.optimizers.Optimizer):
            _check_backend(keras.backend.backend())
            from preamp.keras.inner import BaseLossScaleOptimizer

            if isinstance(inner, BaseLossScaleOptimizer):
                raise _nested(inner)
            return "keras"
    raise ArgumentTypeError(
        '"inner_optimizer" must be an instance of `tf.keras.optimizers.Optimizer` or '
        f"`tf.keras.optimizers.experimental.Optimizer`, but got: {inner}. "
        "Write LossScaleOptimizer(tf.keras.optimizers.Adam())."
    )


def _check_backend(name: str) -> None:
    if name != "tensorflow":
        raise UsageError(
            f"Keras computes with {name} here, and get_scaled_loss is for TensorFlow. "
            "Write from preamp.keras import LossScaleOptimizer, or set KERAS_BACKEND=tensorflow before Keras "
            "is imported."
        )


def _nested(inner: object) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"LossScaleOptimizer cannot wrap another LossScaleOptimizer, but got: {inner}. "
        "Write LossScaleOptimizer(tf.keras.optimizers.Adam()), around an optimizer that scales nothing."
    )
