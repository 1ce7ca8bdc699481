"""What the document of `tf.keras.mixed_precision.LossScaleOptimizer` promises, sentence by sentence."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from preamp import Dynamic, Headroom, PolicyError, Tolerant, UsageError
from preamp.tensorflow import LossScaleOptimizer

from .kinds import KINDS, Peer, each_kind, inner, numbers, of_tf_keras, play, step, wrapped

INF = float("inf")


@each_kind
def test_it_is_an_optimizer_of_its_library(kind: str) -> None:
    optimizer = wrapped(kind)
    assert isinstance(optimizer, LossScaleOptimizer)
    assert isinstance(optimizer, KINDS[kind].Optimizer)
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer if kind == "keras" else Peer)
    assert isinstance(optimizer.inner_optimizer, KINDS[kind].SGD)


@of_tf_keras
def test_the_arguments_are_those_of_tf_keras(kind: str) -> None:
    theirs = inspect.signature(type(Peer(inner(kind))).__init__).parameters
    ours = inspect.signature(type(wrapped(kind)).__init__).parameters
    assert list(ours) == [*theirs, "policy", "guard", "model", "restore_buffers", "unknown"]
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)


@each_kind
def test_the_defaults(kind: str) -> None:
    optimizer = wrapped(kind)
    assert optimizer.dynamic is True
    assert optimizer.initial_scale == float(optimizer.loss_scale) == 2.0**15
    assert optimizer.dynamic_growth_steps == 2000
    assert int(optimizer.dynamic_counter) == 0


@each_kind
def test_the_growth_steps_of_any_policy_are_its_growth_interval(kind: str) -> None:
    assert wrapped(kind, policy=Tolerant(growth_interval=3)).dynamic_growth_steps == 3
    assert wrapped(kind, policy=Headroom()).dynamic_growth_steps is None


@each_kind
def test_the_types_of_what_is_read(kind: str) -> None:
    for optimizer in (wrapped(kind), wrapped(kind, dynamic=False, initial_scale=8)):
        assert tf.is_tensor(optimizer.loss_scale)
        assert (optimizer.loss_scale.dtype, optimizer.loss_scale.shape) == (tf.float32, ())
        assert type(optimizer.initial_scale) is float
    assert wrapped(kind).dynamic_counter.dtype == tf.int64
    assert type(wrapped(kind).dynamic_growth_steps) is int


@each_kind
@pytest.mark.parametrize("name", ["dynamic", "loss_scale", "dynamic_counter", "dynamic_growth_steps"])
def test_what_is_decided_elsewhere_cannot_be_set(kind: str, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(wrapped(kind), name, 5)


@each_kind
def test_every_growth_steps_the_scale_doubles_and_an_overflow_halves_it(kind: str) -> None:
    optimizer = wrapped(kind, initial_scale=8.0, dynamic_growth_steps=3)
    seen = play(optimizer, "0001000", tf.Variable([1.0, 2.0]), lambda: numbers(optimizer))
    assert seen == [(8, 1), (8, 2), (16, 0), (8, 0), (8, 1), (8, 2), (16, 0)]


@each_kind
@pytest.mark.parametrize("name", ["learning_rate", "lr"])
def test_the_learning_rate_by_both_names(kind: str, name: str) -> None:
    optimizer, var = wrapped(kind), tf.Variable([1.0, 1.0])
    assert float(tf.convert_to_tensor(getattr(optimizer, name))) == 0.5
    setattr(optimizer, name, 0.25)
    assert float(tf.convert_to_tensor(optimizer.inner_optimizer.learning_rate)) == 0.25
    optimizer.inner_optimizer.learning_rate = 2.0
    assert float(tf.convert_to_tensor(getattr(optimizer, name))) == 2.0
    step(optimizer, [1.0, 1.0], var)
    assert var.numpy().tolist() == [-1.0, -1.0]


@each_kind
def test_what_is_no_hyperparameter_is_not(kind: str) -> None:
    optimizer = LossScaleOptimizer(KINDS[kind].Adam(beta_1=0.8, epsilon=1e-5))
    assert optimizer.inner_optimizer.epsilon == 1e-5
    with pytest.raises(AttributeError, match="'LossScaleOptimizer' object has no attribute 'epsilon'"):
        _ = optimizer.epsilon
    optimizer.epsilon = 1e-4
    assert optimizer.epsilon == 1e-4
    assert optimizer.inner_optimizer.epsilon == 1e-5


@each_kind
@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD"])
def test_the_same_names_are_delegated_whatever_library_the_optimizer_is_of(kind: str, name: str) -> None:
    """The document's line is the legacy optimizers' `_hyper`; newer ones keep to it."""
    hyper = set(getattr(KINDS["legacy"], name)()._hyper) - {"decay"}  # which newer optimizers lack
    optimizer = LossScaleOptimizer(getattr(KINDS[kind], name)())
    shared = {each for each in hyper if each in vars(optimizer.inner_optimizer) or kind == "legacy"}
    assert shared or name in ("Adagrad", "Ftrl")
    for each in shared:
        assert float(tf.convert_to_tensor(getattr(optimizer, each))) == float(
            tf.convert_to_tensor(getattr(optimizer.inner_optimizer, each))
        )
    assert not hasattr(optimizer, "epsilon")
    assert not hasattr(optimizer, "initial_accumulator_value")


@each_kind
@pytest.mark.parametrize("name", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_set_on_the_wrapper_acts_on_unscaled_gradients(kind: str, name: str) -> None:
    optimizer, var = wrapped(kind), tf.Variable([0.0, 0.0])
    setattr(optimizer, name, 1.0)
    step(optimizer, [3.0, 4.0], var)
    expected = [-0.5, -0.5] if name == "clipvalue" else [-0.3, -0.4]
    assert var.numpy().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["tf_keras", "keras"])
def test_averages_are_the_inner_optimizers(kind: str) -> None:
    optimizer, var = LossScaleOptimizer(inner(kind, use_ema=True, ema_momentum=0.5)), tf.Variable([1.0, 2.0])
    assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.5)
    play(optimizer, "010", var)
    plain = inner(kind, use_ema=True, ema_momentum=0.5)
    other = tf.Variable([1.0, 2.0])
    plain.build([other])
    for i in (0, 2):
        plain.apply_gradients([(tf.constant([i + 1.0, -1.0]), other)])
    optimizer.finalize_variable_values([var])
    plain.finalize_variable_values([other])
    assert var.numpy().tolist() == other.numpy().tolist()


# Sentences about minimize and apply_gradients.


@each_kind
@pytest.mark.parametrize("as_callable", [False, True])
def test_minimize_takes_a_list_a_callable_or_one_variable(kind: str, as_callable: bool) -> None:
    optimizer, a, b = wrapped(kind), tf.Variable(1.0), tf.Variable(2.0)
    optimizer.minimize(lambda: a + 2.0 * b, (lambda: [a, b]) if as_callable else [a, b])
    assert (float(a), float(b)) == (0.5, 1.0)


@each_kind
def test_minimize_takes_a_loss_with_its_tape(kind: str) -> None:
    optimizer, var = wrapped(kind), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = var * 3.0
    optimizer.minimize(loss, [var], tape=tape)
    assert float(var) == -0.5


@each_kind
def test_a_loss_without_a_tape_is_refused(kind: str) -> None:
    var = tf.Variable(1.0)
    with pytest.raises(UsageError, match="without a tape"):
        wrapped(kind).minimize(var * 3.0, [var])


@each_kind
def test_minimize_skips_and_moves_the_scale(kind: str) -> None:
    optimizer, var = wrapped(kind, initial_scale=8.0), tf.Variable(1.0)
    optimizer.minimize(lambda: var * INF, var)
    assert (float(var), numbers(optimizer)) == (1.0, (4.0, 0.0))


@each_kind
def test_minimize_computes_the_gradients_that_a_tape_does(kind: str) -> None:
    optimizer, var = wrapped(kind), tf.Variable(3.0)
    compute = optimizer._compute_gradients if kind == "legacy" else optimizer.compute_gradients
    ((gradient, variable),) = compute(lambda: var**2, [var])
    assert float(gradient) == 6.0
    assert variable is var


def test_the_variables_of_keras() -> None:
    var = keras.Variable([1.0, 1.0])
    wrapped("keras").minimize(lambda: tf.reduce_sum(var.value), [var])
    assert var.numpy().tolist() == [0.5, 0.5]


@of_tf_keras
def test_the_arguments_of_apply_gradients_are_those_of_tf_keras(kind: str) -> None:
    flags: list[Any] = [{}, {"experimental_aggregate_gradients": False}, {"name": "apply"}]
    flags += [{"skip_gradients_aggregation": True}] if kind == "tf_keras" else []
    for arguments in flags:
        seen = []
        for optimizer in (wrapped(kind), Peer(inner(kind))):
            var = tf.Variable(1.0)
            scaled = optimizer.get_scaled_loss(tf.constant(1.0))
            grads = optimizer.get_unscaled_gradients([scaled])
            optimizer.apply_gradients(zip(grads, [var], strict=True), **arguments)
            seen.append((float(var), int(optimizer.iterations)))
        assert seen == [(0.5, 1)] * 2


def test_the_arguments_of_apply_gradients_for_keras() -> None:
    optimizer, var = wrapped("keras"), tf.Variable(4.0)
    for arguments in (
        {},
        {"experimental_aggregate_gradients": False},
        {"skip_gradients_aggregation": True},
        {"name": "apply"},
    ):
        grads = optimizer.get_unscaled_gradients([optimizer.get_scaled_loss(tf.constant(1.0))])
        optimizer.apply_gradients(zip(grads, [var], strict=True), **arguments)
    assert float(var) == 2.0
    with pytest.raises(TypeError, match="aggregate"):
        optimizer.apply_gradients([], aggregate=True)


# "ValueError in case of any invalid argument": a `PolicyError` is one.


@each_kind
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dynamic": False}, '"initial_scale" must be specified if "dynamic" is False'),
        (
            {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 5},
            '"dynamic_growth_steps" must be None if "dynamic" is False, but got: 5',
        ),
        ({"dynamic": "dynamic"}, "must be a bool, but got: 'dynamic'"),
        ({"dynamic": 1024.0}, "must be a bool, but got: 1024.0"),
        ({"dynamic": None}, "must be a bool, but got: None"),
        ({"initial_scale": 0.0}, "initial_scale=0.0 is not a finite number above 0"),
        ({"initial_scale": -1.0}, "initial_scale=-1.0"),
        ({"initial_scale": INF}, "initial_scale=inf"),
        ({"initial_scale": float("nan")}, "initial_scale=nan"),
        ({"initial_scale": "dynamic"}, "initial_scale='dynamic'"),
        ({"dynamic": False, "initial_scale": 0.0}, "initial_scale=0.0"),
        ({"dynamic_growth_steps": 0}, "dynamic_growth_steps=0 must be a whole number of at least 1"),
        ({"dynamic_growth_steps": -1}, "dynamic_growth_steps=-1"),
        ({"dynamic_growth_steps": 2.7}, "dynamic_growth_steps=2.7"),
        ({"dynamic_growth_steps": INF}, "dynamic_growth_steps=inf"),
        ({"dynamic_growth_steps": True}, "dynamic_growth_steps=True"),
        ({"policy": "dynamic"}, "policy='dynamic' is not a policy"),
        ({"policy": Dynamic(), "initial_scale": 8.0}, "initial_scale=8.0 are both given"),
        ({"policy": Dynamic(), "dynamic_growth_steps": 8}, "dynamic_growth_steps=8 are both given"),
        ({"policy": Dynamic(), "dynamic": False}, "dynamic=False are both given"),
    ],
    ids=str,
)
def test_an_invalid_argument(kind: str, arguments: Any, text: str) -> None:
    optimizer = inner(kind)
    with pytest.raises(PolicyError, match=re.escape(text)):
        LossScaleOptimizer(optimizer, **arguments)
    LossScaleOptimizer(optimizer)  # nothing was left behind


@of_tf_keras
@pytest.mark.parametrize(
    "arguments",
    [
        {"dynamic": False},
        {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 5},
        {"dynamic": "dynamic"},
    ],
    ids=str,
)
def test_errors_are_of_the_types_and_in_the_words_of_tf_keras(kind: str, arguments: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as theirs:
        Peer(inner(kind), **arguments)
    with pytest.raises(type(theirs.value)) as ours:
        LossScaleOptimizer(inner(kind), **arguments)
    assert str(theirs.value) in str(ours.value)


@pytest.mark.parametrize("wrong", ["sgd", None, 1.0, tf_keras.optimizers.SGD], ids=repr)
def test_what_is_no_optimizer(wrong: Any) -> None:
    with pytest.raises(TypeError) as theirs:
        Peer(wrong)
    for kind in (TypeError, ValueError):
        with pytest.raises(kind) as ours:
            LossScaleOptimizer(wrong)
        assert str(theirs.value) in str(ours.value)


@each_kind
def test_no_optimizer_is_wrapped_twice(kind: str) -> None:
    optimizer = wrapped(kind)
    with pytest.raises(ValueError, match="cannot wrap another LossScaleOptimizer"):
        LossScaleOptimizer(optimizer)
    with pytest.raises(ValueError, match=r"wrapped by (a|another) LossScaleOptimizer"):
        LossScaleOptimizer(optimizer.inner_optimizer)


@each_kind
def test_nor_one_of_its_library(kind: str) -> None:
    theirs = keras.optimizers.LossScaleOptimizer if kind == "keras" else Peer
    with pytest.raises(ValueError, match="cannot wrap another LossScaleOptimizer"):
        LossScaleOptimizer(theirs(inner(kind)))


def test_a_factor_that_keras_would_divide_by_as_well() -> None:
    with pytest.raises(PolicyError, match=r"already has loss_scale_factor=8\.0"):
        LossScaleOptimizer(inner("keras", loss_scale_factor=8.0))


def test_without_arguments() -> None:
    with pytest.raises(ValueError, match='"inner_optimizer" must be an instance of'):
        LossScaleOptimizer()  # type: ignore[call-arg]


# The configuration.


@each_kind
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"initial_scale": 8.0, "dynamic_growth_steps": 3},
        {"dynamic": False, "initial_scale": 8.0},
        {"policy": Dynamic(init_scale=8.0, hysteresis=2, growth_interval=3)},
    ],
    ids=str,
)
def test_a_configuration_makes_the_same_optimizer(kind: str, arguments: Any) -> None:
    optimizer = LossScaleOptimizer(inner(kind, "Adam", 0.25, beta_1=0.75), **arguments)
    config = optimizer.get_config()
    copied = copy.deepcopy(config)
    for make in (LossScaleOptimizer, type(optimizer)):
        again = make.from_config(config)
        assert config == copied
        assert type(again) is type(optimizer)
        assert again.policy == optimizer.policy
        assert again.get_config() == config
        assert float(again.beta_1) == 0.75


@of_tf_keras
def test_a_configuration_of_tf_keras_will_do(kind: str) -> None:
    peer = Peer(inner(kind), initial_scale=8.0, dynamic_growth_steps=3)
    for make in (LossScaleOptimizer, type(wrapped(kind))):
        again = make.from_config(peer.get_config())
        assert isinstance(again.inner_optimizer, KINDS[kind].SGD)
        assert (again.initial_scale, again.dynamic_growth_steps) == (8.0, 3)
