"""More of what the document promises: the class as a class, averages, graphs, a store that is a dict."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from preamp import PolicyError, UsageError
from preamp.tensorflow import LossScaleOptimizer

from .kinds import KINDS, Peer, each_kind, inner, numbers, play, wrapped

newer = pytest.mark.parametrize("kind", ["tf_keras", "keras"])
INF = float("inf")


class Mine(LossScaleOptimizer):
    """A user's own optimizer: it counts what it scales."""

    scaled = 0

    def get_scaled_loss(self, loss: Any) -> Any:
        self.scaled += 1
        return super().get_scaled_loss(loss)


class Told(LossScaleOptimizer):
    """One with an argument of its own."""

    def __init__(self, inner_optimizer: Any, note: str = "", **settings: Any) -> None:
        super().__init__(inner_optimizer, **settings)
        self.note = note


@keras.saving.register_keras_serializable("tests")
@tf_keras.saving.register_keras_serializable("tests")
class Registered(LossScaleOptimizer):
    """One with an argument of its own, for files."""

    def __init__(self, inner_optimizer: Any, note: str = "", **settings: Any) -> None:
        super().__init__(inner_optimizer, **settings)
        self.note = note

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "note": self.note}


# The class.


def test_the_signature_is_the_documented_one() -> None:
    shown = inspect.signature(LossScaleOptimizer)
    theirs = inspect.signature(type(Peer(inner("legacy"))).__init__)
    assert list(shown.parameters) == [
        *list(theirs.parameters)[1:],
        "policy",
        "guard",
        "model",
        "restore_buffers",
    ]
    for name, parameter in shown.parameters.items():
        default = False if name == "restore_buffers" else None
        assert parameter.default == getattr(theirs.parameters.get(name), "default", default)
    assert [list(inspect.signature(each).parameters)[1:2] for each in (Mine, Told)] == [["dynamic"], ["note"]]


@pytest.mark.parametrize("config", [{}, {"dynamic": True}, {"inner_optimizer": {}}, None, 3], ids=str)
def test_what_is_no_configuration(config: Any) -> None:
    with pytest.raises(PolicyError, match="is not the configuration of a LossScaleOptimizer"):
        LossScaleOptimizer.from_config(config)


@each_kind
def test_a_subclass_is_an_optimizer_of_the_library_of_the_inner_one(kind: str) -> None:
    optimizer, var = Mine(inner(kind), initial_scale=8.0), tf.Variable([1.0, 1.0])
    assert isinstance(optimizer, Mine)
    assert isinstance(optimizer, type(wrapped(kind)))
    assert type(optimizer) is type(Mine(inner(kind)))
    assert (type(optimizer).__name__, type(optimizer).__module__) == ("Mine", __name__)
    play(optimizer, "010", var)
    plain, other = wrapped(kind, initial_scale=8.0), tf.Variable([1.0, 1.0])
    play(plain, "010", other)
    assert var.numpy().tolist() == other.numpy().tolist()
    assert (numbers(optimizer), optimizer.scaled) == (numbers(plain), 3)
    again = Mine.from_config(optimizer.get_config())
    assert (type(again), again.initial_scale) == (type(optimizer), 8.0)


@each_kind
def test_a_configuration_has_the_arguments_of_a_subclass(kind: str) -> None:
    made = Registered(inner(kind), note="here", initial_scale=8.0)
    again = Registered.from_config(made.get_config())
    assert (type(again), again.note, again.initial_scale) == (type(made), "here", 8.0)
    if kind == "keras":
        with pytest.raises(PolicyError, match="is not the configuration of a LossScaleOptimizer"):
            Mine.from_config(made.get_config())


FORMATS = [("keras", ".keras"), ("tf_keras", ".keras"), ("legacy", ".h5"), ("tf_keras", "")]


@pytest.mark.parametrize(("kind", "ending"), FORMATS)
def test_a_registered_subclass_is_saved_and_loaded(kind: str, ending: str, tmp_path: Path) -> None:
    library = keras if kind == "keras" else tf_keras
    model = library.Sequential([library.layers.Input((3,)), library.layers.Dense(1)])
    model.compile(
        Registered(inner(kind, "SGD", 0.01), note="here", initial_scale=8.0), "mse", run_eagerly=True
    )
    for factor in (1.0, INF):
        model.train_on_batch(np.ones((4, 3)) * factor, np.ones((4, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tf_keras has an opinion of its older formats
        model.save(tmp_path / f"model{ending}")
        again = library.models.load_model(tmp_path / f"model{ending}")
    found = again.optimizer
    assert (type(found), found.note, float(found.loss_scale)) == (type(model.optimizer), "here", 4.0)
    assert found.skipped_steps == 1
    assert library.saving.get_registered_object("tests>Registered") is Registered


@each_kind
def test_it_may_take_the_name_of_the_librarys_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tf_keras.mixed_precision, keras.mixed_precision, keras.optimizers):
        monkeypatch.setattr(module, "LossScaleOptimizer", LossScaleOptimizer)
    optimizer, var = tf_keras.mixed_precision.LossScaleOptimizer(inner(kind)), tf.Variable([1.0, 1.0])
    play(optimizer, "010", var)
    assert optimizer.skipped_steps == 1
    assert var.numpy().tolist() != [1.0, 1.0]
    own = KerasOwn if kind == "keras" else Peer
    with pytest.raises(TypeError, match="cannot wrap another LossScaleOptimizer"):
        tf_keras.mixed_precision.LossScaleOptimizer(own(inner(kind)))


KerasOwn = keras.optimizers.LossScaleOptimizer


# finalize_variable_values().


@newer
def test_training_ends_with_averages_without_naming_the_variables(kind: str) -> None:
    weights = []
    for named in (True, False):
        optimizer, var = (
            LossScaleOptimizer(inner(kind, use_ema=True, ema_momentum=0.5)),
            tf.Variable([1.0, 2.0]),
        )
        play(optimizer, "010", var)
        before = var.numpy().tolist()
        optimizer.finalize_variable_values(*([[var]] if named else []))
        assert var.numpy().tolist() != before
        weights.append(var.numpy().tolist())
    assert weights[0] == weights[1]


@newer
def test_without_variables_there_is_nothing_to_end_with(kind: str) -> None:
    optimizer = LossScaleOptimizer(inner(kind, use_ema=True))
    with pytest.raises(UsageError, match=r"Write finalize_variable_values\(model\.trainable_variables\)"):
        optimizer.finalize_variable_values()


# A store that is a dict.


@newer
def test_a_dict_holds_the_scale_and_what_the_inner_optimizer_learned(kind: str) -> None:
    made = [LossScaleOptimizer(inner(kind, "Adam", 0.125), initial_scale=8.0) for _ in range(2)]
    variables = [tf.Variable([1.0, 2.0]) for _ in made]
    for optimizer, variable in zip(made, variables, strict=True):
        optimizer.build([variable])
    play(made[0], "0100", variables[0])
    store: dict[str, Any] = {}
    made[0].save_own_variables(store)
    assert all(isinstance(value, np.ndarray | np.generic) for value in store.values())
    made[1].load_own_variables(store)
    variables[1].assign(variables[0])
    assert numbers(made[1]) == numbers(made[0])
    assert (made[1].last_step, made[1].skipped_steps) == (made[0].last_step._replace(loss=None), 1)
    for optimizer, variable in zip(made, variables, strict=True):
        play(optimizer, "00", variable)
    assert variables[0].numpy().tolist() == variables[1].numpy().tolist()
    assert int(made[1].iterations) == int(made[0].iterations)


def test_a_dict_of_tf_keras_own_wrapper_is_read() -> None:
    peer, variable = Peer(inner("tf_keras", "Adam", 0.125)), tf.Variable([1.0, 2.0])
    play(peer, "00", variable)
    store: dict[str, Any] = {}
    peer.save_own_variables(store)
    optimizer, other = LossScaleOptimizer(inner("tf_keras", "Adam", 0.125)), tf.Variable(variable)
    optimizer.build([other])
    optimizer.load_own_variables(store)
    for each, trained in ((peer, variable), (optimizer, other)):
        play(each, "0", trained)
    assert variable.numpy().tolist() == other.numpy().tolist()


# Public methods are the inner optimizer's.


def test_the_public_methods_of_newer_optimizers_reach_the_inner_one() -> None:
    bare, wrapped = (tf_keras.optimizers.Adam(0.5, jit_compile=False, name="mine") for _ in range(2))
    optimizer, variable = LossScaleOptimizer(wrapped), tf.Variable([1.0])
    assert optimizer.name == bare.name == "mine"
    optimizer.jit_compile = True
    assert optimizer.jit_compile is optimizer.inner_optimizer.jit_compile is True
    optimizer.jit_compile = False
    for each in (bare, optimizer):
        each.build([variable])
        before = len(each.variables)
        slot = each.add_variable_from_reference(variable, "slot")
        scalar = each.add_variable(shape=(), name="scalar")
        assert (slot.shape, scalar.shape) == (variable.shape, ())
        assert len(each.variables) == before + 2
    optimizer.update_step(tf.constant([1.0]), variable)
    assert variable.numpy().tolist() != [1.0]
    settings = {"epsilon", "amsgrad", "adaptive_epsilon"}  # which the document does not delegate
    missing = {name for name in dir(bare) if name[0] != "_" and not hasattr(optimizer, name)}
    assert missing <= settings


# get_gradients.


@each_kind
def test_gradients_of_a_graph_are_unscaled(kind: str) -> None:
    optimizer, var = wrapped(kind), tf.Variable([1.0, 3.0])
    scales: list[Any] = []

    @tf.function
    def gradients() -> Any:
        scales.append(optimizer.get_scaled_loss(tf.constant(1.0)))
        return optimizer.get_gradients(tf.reduce_sum(var**2), [var])

    (gradient,) = gradients()
    assert gradient.numpy().tolist() == [2.0, 6.0]

    @tf.function
    def step() -> None:
        loss = tf.reduce_sum(var**2)
        optimizer.apply_gradients(zip(optimizer.get_gradients(loss, var), [var], strict=True))

    if kind != "legacy":  # whose variables are made outside
        optimizer.build([var])
    with warnings.catch_warnings(action="error"):
        step()
    assert var.numpy().tolist() == [0.0, 0.0]


@each_kind
def test_get_gradients_says_what_it_needs(kind: str) -> None:
    optimizer, var, other = wrapped(kind), tf.Variable(1.0), tf.Variable(2.0)
    with pytest.raises(UsageError, match="get_gradients is for graphs"):
        optimizer.get_gradients(var * 2.0, [var])
    with pytest.raises(ValueError, match=r"[vV]ariable"):
        tf.function(lambda: optimizer.get_gradients(var * 2.0, [var, other]), autograph=False)()


def test_get_gradients_takes_the_variables_of_keras() -> None:
    optimizer, var = wrapped("keras"), keras.Variable([1.0, 3.0])
    (gradient,) = tf.function(lambda: optimizer.get_gradients(tf.reduce_sum(var.value**2), [var]))()
    assert gradient.numpy().tolist() == [2.0, 6.0]


# What is handed to the methods.


CALLS: dict[str, tuple[Any, list[Any]]] = {
    "get_scaled_loss": (lambda o, bad: o.get_scaled_loss(bad), [None, "x", [None]]),
    "get_scaled_loss, function": (lambda o, bad: o.get_scaled_loss(lambda: bad)(), [None, "x"]),
    "get_unscaled_gradients": (lambda o, bad: o.get_unscaled_gradients(bad), [None, "x", 3.0, [1.0], ["x"]]),
    "apply_gradients": (lambda o, bad: o.apply_gradients(bad), [None, "x", 3.0, [1.0], [None], [(1.0,)]]),
    "minimize": (lambda o, bad: o.minimize(lambda: 1.0, bad), [None, "x", 3.0, [1.0], [None]]),
    "build": (lambda o, bad: o.build(bad), [None, "x", 3.0, [1.0], [None]]),
    "finalize": (lambda o, bad: o.finalize_variable_values(bad), ["x", 3.0, [1.0], [None]]),
    "save": (lambda o, bad: o.save_own_variables(bad), [None, "x", 3.0, []]),
    "load": (lambda o, bad: o.load_own_variables(bad), [None, "x", 3.0, []]),
    "from_config": (lambda o, bad: type(o).from_config(bad), [None, "x", 3.0, [], {}]),
}


NEWER = ("build", "finalize", "save", "load")  # which tf_keras's legacy optimizers lack
REFUSED = [
    pytest.param(kind, call, bad, id=f"{kind} {name} {bad!r}")
    for kind in KINDS
    for name, (call, bads) in CALLS.items()
    for bad in bads
    if not (kind == "legacy" and name in NEWER)
]


@pytest.mark.parametrize(("kind", "call", "bad"), REFUSED)
def test_methods_refuse_what_is_no_list_tensor_or_variable(kind: str, call: Any, bad: Any) -> None:
    optimizer, var = wrapped(kind), tf.Variable([1.0, 1.0])
    play(optimizer, "0", var)
    before = (numbers(optimizer), optimizer.last_step)
    with pytest.raises((PolicyError, UsageError), match="Write"):
        call(optimizer, bad)
    assert (numbers(optimizer), optimizer.last_step) == before
