"""What goes wrong elsewhere and not here. Where tf_keras has the fault, its own wrapper shows it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tensorflow as tf

from preamp import Dynamic, InexactScale, Reading, ScaleExhausted, UsageError
from preamp.tensorflow import LossScaleOptimizer

from .kinds import Peer, each_kind, gradients, inner, numbers, of_tf_keras, play, wrapped

HALVES = [tf.float16, tf.bfloat16]


@each_kind
@pytest.mark.parametrize("dtype", HALVES)
def test_a_loss_of_a_half_type_is_scaled_in_float32(kind: str, dtype: Any) -> None:
    scaled = wrapped(kind, initial_scale=2.0**25).get_scaled_loss(tf.constant(3.0, dtype))
    assert scaled.dtype == tf.float32
    assert float(scaled) == 3.0 * 2.0**25


@each_kind
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_a_half_type_are_divided_in_float32_and_come_back_in_it(kind: str, dtype: Any) -> None:
    """1 / 2**25 is 0 in float16, and 3 / 2**17 is not."""
    optimizer = wrapped(kind, initial_scale=2.0**25)
    rows = tf.IndexedSlices(tf.constant([[96.0]], dtype), tf.constant([1]), tf.constant([2, 1]))
    dense, none, sparse = optimizer.get_unscaled_gradients([tf.constant([256.0, 768.0], dtype), None, rows])
    assert (dense.dtype, none, sparse.dtype) == (dtype, None, dtype)
    assert dense.numpy().tolist() == [2.0**-17, 3.0 * 2.0**-17]
    assert sparse.values.numpy().tolist() == [[tf.cast(96.0 / 2.0**25, dtype).numpy()]]


@each_kind
@pytest.mark.parametrize(("dtype", "compiled"), [(tf.float16, False), (tf.bfloat16, True)])
def test_a_variable_of_a_half_type_can_be_updated_by_hand(kind: str, dtype: Any, compiled: bool) -> None:
    optimizer, variable = wrapped(kind, initial_scale=1024.0), tf.Variable([1.0, 2.0], dtype=dtype)

    def train() -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(variable * variable))
        (gradient,) = optimizer.get_unscaled_gradients([tape.gradient(loss, variable)])
        variable.assign_sub(0.25 * gradient)

    (tf.function(train) if compiled else train)()
    assert variable.numpy().tolist() == [0.5, 1.0]


@of_tf_keras
def test_tf_keras_loses_both(kind: str) -> None:
    peer = Peer(inner(kind), initial_scale=2.0**25)
    assert float(peer.get_scaled_loss(tf.constant(3.0, tf.float16))) == float("inf")
    assert peer.get_unscaled_gradients([tf.constant([256.0], tf.float16)])[0].numpy().tolist() == [0.0]


@each_kind
def test_float64_stays_float64(kind: str) -> None:
    optimizer = wrapped(kind, initial_scale=1024.0)
    assert optimizer.get_scaled_loss(tf.constant(3.0, tf.float64)).dtype == tf.float64
    (unscaled,) = optimizer.get_unscaled_gradients([tf.constant(3.0, tf.float64)])
    assert unscaled.dtype == tf.float64
    assert float(unscaled) == 3.0 / 1024.0


@each_kind
def test_a_scale_whose_reciprocal_is_subnormal_divides(kind: str) -> None:
    optimizer = wrapped(kind, initial_scale=2.0**127)
    assert float(optimizer.get_unscaled_gradients([tf.constant(2.0**127)])[0]) == 1.0


@each_kind
def test_a_callable_loss_gives_a_callable(kind: str) -> None:
    variable = tf.Variable(3.0)
    scaled = wrapped(kind, initial_scale=8.0).get_scaled_loss(lambda: variable * 2.0)
    variable.assign(5.0)
    assert float(scaled()) == 80.0


@each_kind
def test_none_and_sparse_gradients(kind: str) -> None:
    optimizer = wrapped(kind, initial_scale=8.0)
    sparse = tf.IndexedSlices(tf.constant([[8.0], [16.0]]), tf.constant([2, 0]), tf.constant([3, 1]))
    slices, none = optimizer.get_unscaled_gradients([sparse, None])
    assert none is None
    assert slices.values.numpy().tolist() == [[1.0], [2.0]]
    assert slices.indices.numpy().tolist() == [2, 0]
    assert slices.dense_shape.numpy().tolist() == [3, 1]
    table, other = tf.Variable([[1.0], [1.0], [1.0]]), tf.Variable(1.0)
    optimizer.get_scaled_loss(tf.constant(1.0))
    with warnings.catch_warnings(action="ignore"):  # Keras warns of the None
        optimizer.apply_gradients([(slices, table), (none, other)])
    assert table.numpy().tolist() == [[0.0], [1.0], [0.5]]
    assert float(other) == 1.0


@each_kind
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_in_a_sparse_gradient_skips(kind: str, value: float) -> None:
    optimizer, table = wrapped(kind, initial_scale=8.0), tf.Variable(tf.ones([3, 1]))
    optimizer.minimize(lambda: tf.reduce_sum(tf.gather(table, [0, 2])) * value, [table])
    assert table.numpy().tolist() == [[1.0]] * 3
    assert numbers(optimizer) == (4.0, 0.0)


@each_kind
def test_all_gradients_none_is_an_error(kind: str) -> None:
    optimizer = wrapped(kind)
    optimizer.get_scaled_loss(tf.constant(1.0))
    with pytest.raises(ValueError, match=r"[Nn]o gradients|all gradients are None"):
        optimizer.apply_gradients(
            zip(optimizer.get_unscaled_gradients([None]), [tf.Variable(1.0)], strict=True)
        )


@each_kind
@pytest.mark.filterwarnings("ignore:.*float16 variable")
def test_a_float16_variable_takes_no_inf(kind: str) -> None:
    optimizer, variable = wrapped(kind, initial_scale=1.0), tf.Variable(1.0, dtype=tf.float16)
    for gradient in (1e6, 2.0):
        optimizer.get_scaled_loss(tf.constant(1.0))
        optimizer.get_unscaled_gradients([])
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
    assert float(variable) == 0.0
    assert optimizer.skipped_steps == 1


@each_kind
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_skipped_step_changes_nothing_else(kind: str, name: str) -> None:

    settings = {} if name == "Adam" else {"momentum": 0.9}
    optimizer, variable = LossScaleOptimizer(inner(kind, name, **settings)), tf.Variable([1.0, 2.0])
    play(optimizer, "00", variable)
    theirs = optimizer.inner_optimizer.variables
    slots = [variable, *(theirs() if callable(theirs) else theirs)]
    before = [slot.numpy().tolist() for slot in slots if slot.shape == variable.shape]
    play(optimizer, "11", variable)
    assert [slot.numpy().tolist() for slot in slots if slot.shape == variable.shape] == before
    assert len(before) > 1


@each_kind
@pytest.mark.parametrize(
    ("scales", "unscales", "named"),
    [
        (False, False, "called without get_scaled_loss and get_unscaled_gradients: "),
        (False, True, "called without get_scaled_loss: "),
        (True, False, "called without get_unscaled_gradients: "),
    ],
)
def test_what_was_forgotten_is_said_once(kind: str, scales: bool, unscales: bool, named: str) -> None:
    optimizer, variable = wrapped(kind), tf.Variable(1.0)
    if scales:
        optimizer.get_scaled_loss(tf.constant(1.0))
    if unscales:
        optimizer.get_unscaled_gradients([])
    with pytest.warns(UserWarning, match=named) as said:
        optimizer.apply_gradients([(tf.constant(1.0), variable)])
    assert said[0].filename == __file__
    optimizer.apply_gradients([(tf.constant(1.0), variable)])


@each_kind
def test_the_last_step(kind: str) -> None:
    optimizer, variable = wrapped(kind, initial_scale=8.0, dynamic_growth_steps=1), tf.Variable([1.0, 1.0])
    assert optimizer.last_step is None
    assert optimizer.skipped_steps == 0
    steps = play(optimizer, "001", variable, lambda: optimizer.last_step)
    assert [(s.index, s.scale, s.finite, s.skipped, s.new_scale) for s in steps] == [
        (0, 8.0, True, False, 16.0),
        (1, 16.0, True, False, 32.0),
        (2, 32.0, False, True, 16.0),
    ]
    assert optimizer.skipped_steps == 1


@of_tf_keras
def test_the_last_step_cannot_be_read_in_a_graph(kind: str) -> None:
    optimizer = wrapped(kind)

    @tf.function(autograph=False)  # which would wrap the error
    def read() -> None:
        _ = optimizer.last_step

    with pytest.raises(UsageError, match=r"outside tf\.function"):
        read()


GIVES_UP = Dynamic(init_scale=4.0, min_scale=2.0, at_floor="raise")


def said_by_the_policy() -> ScaleExhausted:
    """Return what the policy says of two overflows on plain floats."""
    state = GIVES_UP.step(GIVES_UP.start(), Reading(False))
    with pytest.raises(ScaleExhausted) as raised:
        GIVES_UP.step(state, Reading(False))
    return raised.value


@each_kind
def test_a_policy_that_gives_up_raises_eagerly(kind: str) -> None:
    optimizer, variable = wrapped(kind, policy=GIVES_UP), tf.Variable([1.0, 2.0])
    play(optimizer, "1", variable)
    for _ in range(2):
        with pytest.raises(ScaleExhausted, match="scale of 2") as raised:
            play(optimizer, "1", variable)
        assert (raised.value.scale, raised.value.overflows) == (2.0, said_by_the_policy().overflows)
    assert variable.numpy().tolist() == [1.0, 2.0]
    play(optimizer, "0", variable)
    assert variable.numpy().tolist() == [0.5, 2.5]
    assert optimizer.skipped_steps == 3
    with pytest.raises(ScaleExhausted, match="scale of 2"):  # a clean step is no reason to be silent
        optimizer.check_exhausted()
    again = wrapped(kind, policy=GIVES_UP)
    store = saved_variables(optimizer)
    load_variables(again, store)
    again.check_exhausted()


def saved_variables(optimizer: Any) -> Any:
    """Return the state of an optimizer: of a legacy one, its configuration, which has it."""
    if not hasattr(optimizer, "save_own_variables"):
        return optimizer.get_config()["state"]
    optimizer.save_own_variables(store := {})
    return store


def load_variables(optimizer: Any, store: Any) -> None:
    if not hasattr(optimizer, "save_own_variables"):
        optimizer._loss_scale.restore(store)
        return
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it is not built
        optimizer.load_own_variables({name: store[name] for name in store if not name.isdecimal()})


@each_kind
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_the_first_time_that_a_policy_gave_up_is_kept(kind: str, compiled: bool) -> None:
    """Six overflows in a row: it gives up at the fourth, and at each one after it."""
    policy = Dynamic(init_scale=8.0, min_scale=1.0, at_floor="raise", growth_interval=1)
    optimizer, variable = wrapped(kind, policy=policy), tf.Variable([1.0, 2.0])

    def train(factor: Any) -> None:
        optimizer.minimize(lambda: tf.reduce_sum(variable) * factor, [variable])

    step, infinite = tf.function(train) if compiled else train, tf.constant(float("inf"))
    first = None
    for factor in [*[infinite] * 6, *[tf.constant(1.0)] * 2, *[infinite] * 5]:
        try:
            step(factor)
        except ScaleExhausted as reason:
            first = first or reason
            assert not compiled
        if optimizer.skipped_steps == 3:
            optimizer.check_exhausted()
    with pytest.raises(ScaleExhausted) as raised:
        optimizer.check_exhausted()
    assert (raised.value.scale, raised.value.overflows) == (1.0, 4)
    assert compiled or (first is not None and str(first) == str(raised.value))


def test_gradients_are_not_divided_twice() -> None:
    """Of Keras's two ways to hand over gradients, `apply` is for scaled ones."""
    optimizer, variable = wrapped("keras"), tf.Variable([1.0, 2.0])
    unscaled = gradients(optimizer, [1.0, 1.0], variable)
    with pytest.raises(UsageError, match="apply_gradients"):
        optimizer.apply(unscaled, [variable])
    optimizer.apply_gradients(zip(unscaled, [variable], strict=True))
    assert variable.numpy().tolist() == [0.5, 1.5]


def test_scaled_gradients_can_be_applied() -> None:
    optimizer, variable = wrapped("keras"), tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.reduce_sum(variable))
    with warnings.catch_warnings(action="error"):
        optimizer.apply([tape.gradient(loss, variable)], [variable])
    assert variable.numpy().tolist() == [0.5, 1.5]


@each_kind
def test_a_scale_that_is_no_power_of_two_warns(kind: str) -> None:
    with pytest.warns(InexactScale, match="initial_scale=3"):
        wrapped(kind, initial_scale=3.0)


@each_kind
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_is_scaled_once(kind: str, compiled: bool) -> None:
    variable, optimizer = tf.Variable([1.0, 1.0]), wrapped(kind, initial_scale=64.0)

    def loss() -> Any:
        return tf.reduce_sum(variable**2)

    calls: list[Any] = [
        lambda: optimizer.minimize(lambda: optimizer.get_scaled_loss(loss()), [variable]),
        lambda: optimizer.get_scaled_loss(optimizer.get_scaled_loss(loss())),
        lambda: optimizer.get_scaled_loss(optimizer.get_scaled_loss(loss))(),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"scaled already.*Write"):
            (tf.function(call, autograph=False) if compiled else call)()
    assert variable.numpy().tolist() == [1.0, 1.0]
    assert optimizer.skipped_steps == 0
    optimizer.minimize(loss, [variable])
    assert variable.numpy().tolist() == [0.0, 0.0]


@each_kind
@pytest.mark.parametrize("loss", ["a", None, ["a"], {}])
def test_what_is_not_a_loss_is_refused(kind: str, loss: Any) -> None:
    with pytest.raises(UsageError, match=r"is not a tensor\. Write"):
        wrapped(kind).get_scaled_loss(loss)
