"""What is saved comes back: the scale and the counter in every format, and then the same next steps."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from preamp import Dynamic, Policy, Tolerant, dialects
from preamp.guards import SpikeGuard
from preamp.tensorflow import LossScaleOptimizer

from .kinds import Peer, each_kind_trained, inner, numbers, of_tf_keras, of_tf_keras_trained, play, wrapped

LIBRARIES = {"legacy": tf_keras, "tf_keras": tf_keras, "keras": keras}
ARGUMENTS = {"initial_scale": 64.0, "dynamic_growth_steps": 3}
POLICIES: list[Policy[Any]] = [
    Dynamic(init_scale=64.0, growth_interval=3, hysteresis=2, max_scale=None),
    Tolerant(init_scale=64.0, tolerance=0.25, growth_interval=3),
    dialects.TORCH.policy,
    dialects.DEEPSPEED(hysteresis=3, scale_window=2),
]
INF = float("inf")


def adam(kind: str, wrapper: Any = LossScaleOptimizer, **arguments: Any) -> Any:
    return wrapper(inner(kind, "Adam", 0.125), **arguments)


def model_of(kind: str, optimizer: Any) -> Any:
    library = LIBRARIES[kind]
    library.utils.set_random_seed(0)
    model = library.Sequential([library.layers.Input((3,)), library.layers.Dense(4), library.layers.Dense(2)])
    model.compile(optimizer, library.losses.MeanSquaredError(), run_eagerly=True)
    return model


def train(model: Any, script: str) -> Any:
    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
    for mark in script:
        model.train_on_batch(x, np.full_like(y, INF) if mark == "1" else y)
    return model


def load(kind: str, path: Path) -> Any:
    with warnings.catch_warnings(action="ignore"):  # tf_keras says that its older formats are old
        return LIBRARIES[kind].models.load_model(path)


def save(model: Any, path: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        model.save(path)
    return path


def where(optimizer: Any) -> Any:
    step = optimizer.last_step  # whose loss no file has
    return numbers(optimizer), step and step._replace(loss=None), optimizer.skipped_steps


def sizes(path: Path) -> list[int]:
    """Return how many numbers each array in a `.keras` file has, sorted."""
    found: list[int] = []
    with zipfile.ZipFile(path) as archive, h5py.File(archive.open("model.weights.h5")) as file:
        file.visititems(lambda _, it: found.append(it.size) if isinstance(it, h5py.Dataset) else None)
    return sorted(found)


def same_weights(first: Any, second: Any) -> bool:
    pairs = zip(first.get_weights(), second.get_weights(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def after_a_checkpoint(kind: str, path: Path, script: str, from_: Any, to: Any) -> Any:
    """Return an optimizer with its variable, and those that they were restored into."""
    was, variable = from_(), tf.Variable([1.0, 2.0])
    play(was, script, variable)
    saved = tf.train.Checkpoint(optimizer=was, variable=variable).save(path / "at")
    again, other = to(), tf.Variable([0.0, 0.0])
    status = tf.train.Checkpoint(optimizer=again, variable=other).restore(saved)
    if kind == "keras":  # its slots cannot be restored before they are there
        again.build([other])
    return was, variable, again, other, status


@each_kind_trained
@pytest.mark.parametrize("policy", [None, *POLICIES], ids=repr)
def test_a_checkpoint_restores_everything(kind: str, policy: Any, tmp_path: Path) -> None:
    arguments = ARGUMENTS if policy is None else {"policy": policy}
    make = lambda: adam(kind, **arguments)  # noqa: E731
    was, variable, again, other, status = after_a_checkpoint(kind, tmp_path, "00010", make, make)
    assert where(again) == where(was)
    for optimizer, trained in ((was, variable), (again, other)):
        play(optimizer, "00100", trained)
    status.assert_consumed()
    assert where(again) == where(was)
    assert variable.numpy().tolist() == other.numpy().tolist()
    assert int(again.iterations) == int(was.iterations)


@of_tf_keras_trained
@pytest.mark.parametrize("ours_to_theirs", [False, True])
def test_checkpoints_go_from_tf_keras_to_preamp_and_back(
    kind: str, ours_to_theirs: bool, tmp_path: Path
) -> None:
    ways = [lambda: adam(kind, Peer, **ARGUMENTS), lambda: adam(kind, **ARGUMENTS)]
    from_, to = reversed(ways) if ours_to_theirs else ways
    was, variable, again, other, status = after_a_checkpoint(kind, tmp_path, "00010", from_, to)
    status.expect_partial()  # tf_keras keeps no record
    assert numbers(again) == numbers(was) == (64.0, 1.0)
    for optimizer, trained in ((was, variable), (again, other)):
        play(optimizer, "001", trained)
    assert numbers(again) == numbers(was) == (64.0, 0.0)
    assert variable.numpy().tolist() == other.numpy().tolist()


@of_tf_keras
@pytest.mark.parametrize("guard", [None, SpikeGuard(patience=5)])
def test_what_0_2_saved_is_restored_by_name(kind: str, guard: Any, tmp_path: Path) -> None:
    numbers_of_0_2 = {
        **{"current_loss_scale": 32.0, "good_steps": np.int64(2), "bad": 1.0},
        **{"last_scale": 64.0, "last_finite": np.bool_(False), "last_grad_norm": 0.0},
        **{"exhausted_scale": 0.0, "exhausted_overflows": 0.0},
        **{"steps": np.int64(7), "skipped_steps": np.int64(3)},
    }
    saved, state = tf.__internal__.tracking.AutoTrackable(), tf.__internal__.tracking.AutoTrackable()
    saved.loss_scale = state
    for name, value in numbers_of_0_2.items():
        setattr(state, name, tf.Variable(value))
    if guard is not None:
        for name, flag in {"last_taken": False, "last_loss_fits": True}.items():
            setattr(state, name, tf.Variable(flag))
        state.last_loss, state.last_limit = tf.Variable(0.5), tf.Variable(4.0)
        state.guard_0b29edbd = tf.__internal__.tracking.AutoTrackable()  # which says what is in it
        for of in ("loss", "grad_norm"):
            for name in ("level", "width", "last", "averaged", "steps"):
                state.guard_0b29edbd._track_trackable(tf.Variable(1.5), f"guard.{of}.{name}")
        for name in ("guard.run", "guard.near"):
            state.guard_0b29edbd._track_trackable(tf.Variable(2.0), name)
    path = tf.train.Checkpoint(optimizer=saved).save(tmp_path / "at")
    optimizer = wrapped(kind, guard=guard)
    tf.train.Checkpoint(optimizer=optimizer).restore(path)
    assert (numbers(optimizer), optimizer.skipped_steps) == ((32.0, 2.0), 3)
    step = optimizer.last_step
    assert (step.index, step.scale, step.finite, step.new_scale) == (6, 64.0, False, 32.0)
    play(optimizer, "0", tf.Variable([1.0, 2.0]))
    assert (optimizer.last_step.index, numbers(optimizer)) == (7, (32.0, 3.0))


@of_tf_keras_trained
def test_a_fixed_scale_is_not_moved_by_a_checkpoint(kind: str, tmp_path: Path) -> None:
    make = lambda scale: lambda: adam(kind, dynamic=False, initial_scale=scale)  # noqa: E731
    _, _, again, other, _ = after_a_checkpoint(kind, tmp_path, "01", make(64.0), make(8.0))
    play(again, "0", other)
    assert float(again.loss_scale) == 8.0


@each_kind_trained
@pytest.mark.parametrize("arguments", [ARGUMENTS, {"policy": POLICIES[1]}], ids=str)
def test_keras_files_restore_the_scale_and_the_counter(
    kind: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    model = train(model_of(kind, adam(kind, **arguments)), "00010")
    again = load(kind, save(model, tmp_path / "model.keras"))
    assert type(again.optimizer) is type(model.optimizer)
    assert again.optimizer.policy == model.optimizer.policy
    assert where(again.optimizer) == where(model.optimizer)
    train(again, "0010"), train(model, "0010")
    assert numbers(again.optimizer) == numbers(model.optimizer)
    # tf_keras leaves what a legacy optimizer has learned out of these files, whoever wraps it.
    assert (
        same_weights(again, model) == (kind != "legacy") == (where(again.optimizer) == where(model.optimizer))
    )


@pytest.mark.parametrize("kind", ["tf_keras", "keras"])
def test_keras_files_hold_every_number_once(kind: str, tmp_path: Path) -> None:
    wrapped, bare = (
        sizes(save(train(model_of(kind, optimizer), "0"), tmp_path / "model.keras"))
        for optimizer in (adam(kind), inner(kind, "Adam", 0.125))
    )
    assert [size for size in wrapped if size > 1] == [size for size in bare if size > 1]
    assert len(wrapped) - len(bare) < 12  # the wrapper's own scalars


@of_tf_keras_trained
@pytest.mark.parametrize("name", ["model.h5", "saved_model"])
def test_the_older_formats_of_tf_keras_restore_them_too(kind: str, name: str, tmp_path: Path) -> None:
    model = train(model_of(kind, adam(kind, **ARGUMENTS)), "00010")
    again = load(kind, save(model, tmp_path / name))
    assert type(again.optimizer) is type(model.optimizer)
    assert where(again.optimizer) == where(model.optimizer)
    train(again, "00"), train(model, "00")
    assert numbers(again.optimizer) == numbers(model.optimizer) == (128.0, 0.0)
    if name == "model.h5":  # a SavedModel loses what the optimizer learned, as with a bare one
        assert same_weights(again, model)


@of_tf_keras_trained
def test_a_configuration_says_where_the_scale_stands(kind: str) -> None:
    optimizer = adam(kind, **ARGUMENTS)
    play(optimizer, "0010", tf.Variable([1.0, 2.0]))
    config = json.loads(json.dumps(optimizer.get_config(), default=float))
    again = type(optimizer).from_config(config)
    assert where(again) == where(optimizer)
    assert again.initial_scale == 64.0


@of_tf_keras_trained
@pytest.mark.parametrize(("name", "value"), [("scale", 0.0), ("scale", INF), ("good", -1.0)])
def test_a_state_that_is_none_is_refused(kind: str, name: str, value: float) -> None:
    config = adam(kind, **ARGUMENTS).get_config()
    config["state"][name] = value
    with pytest.raises(ValueError, match=f"{name}={value!r} is not a valid state"):
        type(adam(kind)).from_config(config)


@of_tf_keras_trained
def test_a_norm_that_was_not_finite_is_unknown_after_loading(kind: str) -> None:
    """The norm of finite gradients overflows; JSON has no inf."""
    was, variable = adam(kind, dynamic=False, initial_scale=1.0), tf.Variable([1.0] * 4)
    was.get_scaled_loss(tf.constant(1e30))
    (gradient,) = was.get_unscaled_gradients([tf.constant([3e38] * 4)])
    was.apply_gradients([(gradient, variable)])
    assert was.last_step.grad_norm == INF
    again = type(was).from_config(was.get_config())
    assert (again.last_step.index, again.last_step.finite, again.last_step.grad_norm) == (0, True, None)
