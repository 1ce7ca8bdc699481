"""Guards over optimizers of all kinds: steps that are skipped because of a spike."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from preamp import Headroom, PolicyError, Static, guards
from preamp.guards import SpikeGuard
from preamp.tensorflow import LossScaleOptimizer
from tests.guarding import POLICY, QUICK, RULES, batches, check_simulated, script
from tests.tensorflow.kinds import KINDS, each_kind, inner, wrapped

newer = pytest.mark.parametrize("kind", ["tf_keras", "keras"])


def taker(optimizer: Any, variable: tf.Variable, *, compiles: bool) -> Any:
    """Return a function that takes a step with a loss and a gradient."""

    def take(loss: tf.Tensor, gradient: tf.Tensor) -> None:
        optimizer.get_scaled_loss(loss)
        (unscaled,) = optimizer.get_unscaled_gradients([gradient[None] * optimizer.loss_scale])
        optimizer.apply_gradients([(unscaled, variable)])

    called = tf.function(take) if compiles else take
    return lambda loss, gradient: called(tf.constant(loss), tf.constant(gradient)), called


def values(optimizer: Any, variable: tf.Variable) -> list[np.ndarray]:
    """Return the weights and moments; tf_keras counts skipped steps in `iterations`."""
    variables = optimizer.inner_optimizer.variables
    variables = variables() if callable(variables) else variables
    return [np.array(v) for v in [variable, *variables] if np.array(v).dtype.kind == "f"]


@pytest.mark.parametrize(
    ("rule", "compiles", "kind"),
    [
        ("spike", False, "legacy"),
        ("norm", False, "keras"),
        ("olmo", False, "tf_keras"),
        ("levanter", False, "keras"),
        ("spike", True, "tf_keras"),
        ("olmo", True, "keras"),
    ],
)
def test_decisions_are_those_of_a_simulation(rule: str, compiles: bool, kind: str) -> None:
    optimizer = LossScaleOptimizer(inner(kind, "Adam", 0.01), policy=POLICY, guard=RULES[rule])
    variable = tf.Variable([1.0])
    take, called = taker(optimizer, variable, compiles=compiles)
    steps, played = [], script(len(rule))
    for loss, gradient in played:
        before = values(optimizer, variable)
        take(loss, gradient)
        steps.append(optimizer.last_step)
        if len(steps) == 1:
            traced = called.experimental_get_tracing_count() if compiles else 0
        after = values(optimizer, variable)
        if len(before) == len(after):  # the first step makes the moments
            assert all(map(np.array_equal, before, after)) == steps[-1].skipped
    check_simulated(steps, RULES[rule], played)
    assert optimizer.skipped_steps == sum(s.skipped for s in steps)
    if compiles:
        assert called.experimental_get_tracing_count() == traced <= 2  # one more makes the moments


@newer
def test_a_guard_that_skips_on_and_on_warns_once(kind: str) -> None:
    optimizer = LossScaleOptimizer(inner(kind), guard=guards.NormLimit(1.0))
    take, _ = taker(optimizer, tf.Variable([1.0]), compiles=False)
    for gradient in [2.0] * 60 + [0.5] + [2.0] * 99:
        take(1.0, gradient)
    with pytest.warns(UserWarning, match="has skipped 100 steps in a row") as caught:
        take(1.0, 2.0)
    assert [one.filename for one in caught] == [__file__]
    for _ in range(120):
        take(1.0, 2.0)


def model_of(optimizer: Any, norm: Any = None) -> tf_keras.Model:
    tf_keras.utils.set_random_seed(0)
    layers = [] if norm is None else [norm]
    model = tf_keras.Sequential([tf_keras.layers.Input((4,)), *layers, tf_keras.layers.Dense(1)])
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize(("kind", "watch"), [("tf_keras", "both"), ("legacy", "grad_norm")])
def test_fit_skips_the_spike(watch: str, kind: str) -> None:
    optimizer = LossScaleOptimizer(inner(kind, "Adam", 0.01), guard=SpikeGuard(warmup=8, watch=watch))
    model, steps = model_of(optimizer), []
    listen = tf_keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(optimizer.last_step)
    )
    x, y = map(np.concatenate, zip(*batches(12, 16), strict=True))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[listen])
    assert [step.index for step in steps if step.reason] == [12]
    assert steps[12].spike.of == ("loss" if watch == "both" else "grad_norm")
    assert steps[12].reason == "spike"
    if watch == "both":
        assert steps[12].spike.value == steps[12].loss


@pytest.mark.parametrize(("restores", "compiles"), [(True, True), (False, False)])
def test_moving_statistics_after_a_spike(restores: bool, compiles: bool) -> None:
    norm = tf_keras.layers.BatchNormalization()
    model = model_of(None, norm)
    optimizer = LossScaleOptimizer(
        tf_keras.optimizers.SGD(0.01), guard=SpikeGuard(warmup=4), model=model, restore_buffers=restores
    )
    model.compile(optimizer, "mse", run_eagerly=not compiles)
    seen = []
    for x, y in batches(6, 8):
        model.train_on_batch(x, y)
        seen.append((optimizer.last_step, [array.tolist() for array in map(np.array, norm.moving_mean)]))
    assert [step.reason for step, _ in seen] == [None] * 6 + ["spike", None]
    assert [step.buffers for step, _ in seen] == [()] * 8
    assert (seen[6][1] == seen[5][1]) == restores
    assert seen[7][1] != seen[6][1]


@pytest.mark.parametrize(
    ("rule", "kind"),
    [*[("spike", kind) for kind in KINDS], ("levanter", "tf_keras"), ("dialect", "tf_keras")],
)
def test_configurations_and_checkpoints_continue(rule: str, kind: str, tmp_path: Path) -> None:
    guard = {**RULES, "dialect": guards.MAXTEXT}[rule]
    optimizer = LossScaleOptimizer(inner(kind, "Adam", 0.01), guard=guard)
    variable = tf.Variable([1.0])
    take, _ = taker(optimizer, variable, compiles=False)
    for loss, gradient in [*script(3)[:8], (np.nan, 1.0)]:
        take(loss, gradient)
    config = json.loads(json.dumps(optimizer.get_config(), allow_nan=False))
    again = LossScaleOptimizer.from_config(config)
    assert repr(again.guard) == repr(guard)
    if kind != "keras":  # whose configuration has no state
        assert states(again) == states(optimizer) != states(LossScaleOptimizer(inner(kind), guard=guard))
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    restored = LossScaleOptimizer(inner(kind, "Adam", 0.01), guard=guard)
    tf.train.Checkpoint(optimizer=restored).restore(path).expect_partial()
    assert states(restored) == states(optimizer)


DROPPED = r"holds the state of a guard, and this optimizer has none.*LossScaleOptimizer\(\.\.\., guard="
OTHER = r"The state of guards\..* is not restored: the saved state belongs to another guard.*guard= as in"
LONG = guards.OLMO
SHORT = guards.OLMO(rolling_interval_length=24)


@pytest.mark.parametrize(
    ("saved", "given", "warning", "kind"),
    [
        (None, QUICK, None, "tf_keras"),
        (None, QUICK, None, "keras"),
        (QUICK, None, DROPPED, "legacy"),
        (QUICK, None, DROPPED, "keras"),
        (QUICK, LONG, OTHER, "tf_keras"),
        (LONG, SHORT, OTHER, "tf_keras"),  # the same names, of vectors of another length
        (LONG, SHORT, OTHER, "keras"),
        (guards.NormLimit(6.0), None, DROPPED, "tf_keras"),  # which has no state
    ],
)
def test_a_checkpoint_restores_with_another_guard(
    saved: Any, given: Any, warning: str | None, kind: str, tmp_path: Path
) -> None:
    def made(guard: Any) -> tuple[Any, tf.Variable]:
        return LossScaleOptimizer(inner(kind, "Adam", 0.01), policy=POLICY, guard=guard), tf.Variable([1.0])

    optimizer, variable = made(saved)
    take, _ = taker(optimizer, variable, compiles=False)
    for loss, gradient in script(3)[:9]:
        take(loss, gradient)
    path = tf.train.Checkpoint(optimizer=optimizer, variable=variable).save(str(tmp_path / "checkpoint"))
    other, copy = made(given)
    fresh = states(other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tf.train.Checkpoint(optimizer=other, variable=copy).restore(path)
    caught = [one for one in caught if issubclass(one.category, UserWarning)]
    assert len(caught) == (warning is not None)
    for one in caught:
        assert re.search(str(warning), str(one.message))
        assert one.filename == __file__
    assert states(other) == fresh
    assert float(other.loss_scale) == float(optimizer.loss_scale) != 64.0
    for each, weights in ((optimizer, variable), (other, copy)):
        taker(each, weights, compiles=False)[0](2.9, 1.0)
    assert all(map(np.array_equal, values(other, copy), values(optimizer, variable)))
    assert other.last_step._replace(loss=None) == optimizer.last_step._replace(loss=None)


@newer
def test_a_checkpoint_restores_with_another_policy(kind: str, tmp_path: Path) -> None:
    """What the policies have in common is restored, and all that comes after it."""
    policies = [POLICY, Headroom(init_scale=256.0), Static(8.0)]
    for saved in policies:
        optimizer, variable = LossScaleOptimizer(inner(kind, "Adam", 0.01), policy=saved), tf.Variable([1.0])
        take, _ = taker(optimizer, variable, compiles=False)
        for loss, gradient in [*script(3)[:9], (1.0, np.inf)]:
            take(loss, gradient)
        path = tf.train.Checkpoint(optimizer=optimizer, variable=variable).save(str(tmp_path / "checkpoint"))
        for policy in policies:
            other, copy = LossScaleOptimizer(inner(kind, "Adam", 0.01), policy=policy), tf.Variable([0.0])
            tf.train.Checkpoint(optimizer=other, variable=copy).restore(path)
            assert copy.numpy() == variable.numpy()
            assert other.skipped_steps == 1
            assert other.last_step.index == 9
            if not isinstance(policy, Static) and not isinstance(saved, Static):
                assert float(other.loss_scale) == float(optimizer.loss_scale)
            taker(other, copy, compiles=False)[0](1.0, 1.0)
            assert int(other.inner_optimizer.iterations) == (10 if kind == "keras" else 11)


def states(optimizer: Any) -> str:
    """Return the guard's state, NaN included, in a form that can be compared."""
    keras = getattr(optimizer, "_scaler", None)
    leaves = (optimizer._loss_scale.variables if keras is None else keras).guard_leaves
    return repr({name: np.array(one).tolist() for name, one in leaves.items()})


def test_keras_files_with_and_without_a_guard(tmp_path: Path) -> None:
    def trained(guard: Any) -> tf_keras.Model:
        model = model_of(LossScaleOptimizer(tf_keras.optimizers.SGD(0.01), guard=guard))
        for x, y in batches(99, 6):
            model.train_on_batch(x, y)
        return model

    with_guard, without, fresh = trained(QUICK), trained(None), wrapped("tf_keras", guard=QUICK)
    for name, model in (("with", with_guard), ("without", without)):
        model.save(tmp_path / f"{name}.keras")
        model.save_weights(tmp_path / f"{name}.weights.h5")
    again = tf_keras.saving.load_model(tmp_path / "with.keras")
    assert states(again.optimizer) == states(with_guard.optimizer) != states(fresh)
    assert again.optimizer.last_step._replace(loss=None) == with_guard.optimizer.last_step._replace(loss=None)
    store: dict[str, Any] = {}
    without.optimizer.save_own_variables(store)
    with_guard.optimizer.load_own_variables(store)
    assert states(with_guard.optimizer) == states(fresh)
    store = {}
    again.optimizer.save_own_variables(store)
    with pytest.warns(UserWarning, match=DROPPED):
        without.optimizer.load_own_variables(store)
    assert without.optimizer.last_step.index == 5
    other = LossScaleOptimizer(tf_keras.optimizers.SGD(0.01), guard=guards.OLMO)
    own = {name: value for name, value in store.items() if not name.isdecimal()}
    with pytest.warns(UserWarning, match=r"starts again: the saved state belongs to another.*guard= as in"):
        other.load_own_variables(own)
    config = with_guard.optimizer.get_config()
    del config["guard"]
    with pytest.warns(UserWarning, match=DROPPED):
        assert LossScaleOptimizer.from_config(config).guard is None


@each_kind
def test_what_is_refused(kind: str) -> None:
    with pytest.raises(PolicyError, match="is not a guard"):
        wrapped(kind, guard=1.0)
    optimizer, variable = wrapped(kind, guard=QUICK), tf.Variable([1.0])
    gradient = tf.constant([1.0])
    with pytest.raises(PolicyError, match="uses the loss"), pytest.warns():
        optimizer.apply_gradients([(gradient, variable)])
    optimizer.get_scaled_loss(tf.constant(1.0))
    optimizer.apply_gradients([(gradient, variable)])
    with pytest.raises(PolicyError, match=r'uses the loss.*watch="grad_norm"'):
        optimizer.apply_gradients([(gradient, variable)])  # that loss was of the step before

    def step_with_losses() -> None:
        optimizer.get_scaled_loss(tf.constant([1.0, 2.0]))
        optimizer.apply_gradients([(gradient, variable)])

    with pytest.raises(
        PolicyError, match=r"\(2,\).*not a floating-point scalar\. Write opt\.get_scaled_loss"
    ):
        step_with_losses()
    assert variable.numpy() == 0.5


@pytest.fixture(scope="module")
def strategy() -> Any:
    """Return a strategy of two replicas."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


@newer
def test_replicas_decide_alike(kind: str, strategy: Any) -> None:
    guard = SpikeGuard(warmup=3, watch="loss")
    with strategy.scope():
        variable = tf.Variable([1.0])
        optimizer = wrapped(kind, guard=guard)

    @tf.function
    def train(losses: Any) -> None:
        def replica_step(loss: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                scaled = optimizer.get_scaled_loss(loss + 0.0 * tf.reduce_sum(variable))
            (gradient,) = optimizer.get_unscaled_gradients([tape.gradient(scaled, variable)])
            optimizer.apply_gradients([(gradient + 1.0, variable)])

        strategy.run(replica_step, args=(losses,))

    for pair in ((1.0, 2.0), (1.1, 1.9), (1.0, 2.1), (1.2, 1.8), (1.0, 80.0), (1.0, 2.0)):
        before = [np.array(one) for one in strategy.experimental_local_results(variable)]
        train(
            strategy.experimental_distribute_values_from_function(
                lambda context, pair=pair: tf.constant(pair[context.replica_id_in_sync_group])
            )
        )
        after = [np.array(one) for one in strategy.experimental_local_results(variable)]
        step = optimizer.last_step
        assert step.skipped == (80.0 in pair)
        assert [np.array_equal(*both) for both in zip(before, after, strict=True)] == [step.skipped] * 2
        if step.skipped:
            assert step.spike.of == "loss"
            assert step.spike.value == pytest.approx(81.0)
    assert optimizer.skipped_steps == 1


def test_keras_has_no_norm_on_replicas(strategy: Any) -> None:
    with strategy.scope():
        variable = tf.Variable([1.0])
        optimizer = wrapped("keras", guard=guards.NormLimit(1.0))

    def step() -> None:
        optimizer.get_scaled_loss(tf.constant(1.0))
        optimizer.get_unscaled_gradients([tf.constant([1.0])])
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])

    with pytest.raises(PolicyError, match=r'norm.*several replicas.*watch="loss"'):
        strategy.run(step)
