"""What is saved comes back, once, and the next step is the same to the last bit."""

from __future__ import annotations

import copy
import json
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

from preamp import (
    Dynamic,
    Headroom,
    Policy,
    PolicyError,
    ScaleExhausted,
    Static,
    Tolerant,
    dialects,
)
from preamp.guards import SpikeGuard
from preamp.keras import LossScaleOptimizer
from preamp.scaling import Spike
from tests.strategies import RULES

from .driving import BACKEND, INF, WAYS, Run, Stock, array, each_backend, same

POLICIES: list[Policy[Any]] = [
    Dynamic(init_scale=64.0, growth_interval=3, hysteresis=2, max_scale=None),
    Tolerant(init_scale=64.0, tolerance=0.25, growth_interval=3),
    Static(8.0),
    dialects.TORCH,
    dialects.DEEPSPEED(hysteresis=3, scale_window=2),
    Dynamic(hysteresis_reset="growth", hysteresis=2, growth_interval=2),
]
ALL: list[Policy[Any]] = [*POLICIES, Headroom(init_scale=64.0)]
ALL += [kind() for kind in RULES.values() if kind not in map(type, ALL)]


def adam(**arguments: Any) -> LossScaleOptimizer:
    return LossScaleOptimizer(keras.optimizers.Adam(0.125), **arguments)


def model_of(optimizer: Any, **arguments: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    # TensorFlow would trace a graph for each model; what is saved are the same variables.
    model.compile(optimizer, "mse", **{"run_eagerly": BACKEND == "tensorflow", **arguments})
    return model


def batch(number: int = 0, *, overflow: bool = False) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(number)
    x, y = draw.normal(size=(4, 3)).astype("float32"), draw.normal(size=(4, 2)).astype("float32")
    if overflow:
        y[0, 0] = INF
    return x, y


def train(model: Any, script: str) -> Any:
    for number, mark in enumerate(script):
        model.train_on_batch(*batch(number, overflow=mark == "1"))
    return model


def everything(model: Any) -> list[np.ndarray]:
    return [array(v) for v in [*model.variables, *model.optimizer.variables]]


def saved(model: Any, path: Path) -> Any:
    model.save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


@pytest.mark.parametrize(
    "policy", [pytest.param(ALL[0], marks=each_backend), POLICIES[1], POLICIES[2], ALL[-1]], ids=repr
)
def test_a_model_goes_on_where_it_was_saved(policy: Policy[Any], tmp_path: Path) -> None:
    model = train(model_of(adam(policy=policy)), "00100")
    again = saved(model, tmp_path)
    assert type(again.optimizer) is LossScaleOptimizer
    assert again.optimizer.policy == model.optimizer.policy
    assert again.optimizer.last_step == model.optimizer.last_step._replace(loss=None)
    for each in (model, again):
        train(each, "01000")
    assert same(everything(model), everything(again))
    assert model.optimizer.last_step == again.optimizer.last_step


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"initial_scale": 2.0**-20, "dynamic_growth_steps": 3},
    {"loss_scale_factor": 4.0},
    {"weight_decay": 0.25, "clipnorm": 0.5},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 3},
    {"name": "scaled"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids="-".join)
def test_every_argument_comes_back(arguments: dict[str, Any], tmp_path: Path) -> None:
    model = train(model_of(adam(**arguments)), "0010")
    again = saved(model, tmp_path)
    for name, value in arguments.items():
        assert getattr(again.optimizer, name) == value
    for each in (model, again):
        train(each, "001")
        each.optimizer.finalize_variable_values(each.trainable_variables)
    assert same(everything(model), everything(again))


def test_what_was_set_later_comes_back(tmp_path: Path) -> None:
    model = train(model_of(adam()), "0")
    model.optimizer.learning_rate = 0.5
    model.optimizer.clipnorm = 0.25
    again = saved(model, tmp_path)
    assert array(again.optimizer.learning_rate) == 0.5
    assert again.optimizer.clipnorm == 0.25


def sizes_in_file(model: Any, path: Path) -> list[int]:
    """Return how many numbers each of the optimizer's arrays has in the file of a model."""
    model.save(path / "model.keras")
    zipfile.ZipFile(path / "model.keras").extract("model.weights.h5", path)
    sizes: list[int] = []

    def measure(name: str, item: Any) -> None:
        if name.startswith("optimizer") and isinstance(item, h5py.Dataset):
            sizes.append(np.array(item).size)

    with h5py.File(path / "model.weights.h5") as file:
        file.visititems(measure)
    return sorted(sizes)


def test_the_state_is_in_the_file_once(tmp_path: Path) -> None:
    """Stock Keras writes what the inner optimizer remembers twice."""
    ours, stock = (train(model_of(each), "01") for each in (adam(), Stock(keras.optimizers.Adam(0.125))))
    inner = [array(v).size for v in ours.optimizer.inner_optimizer.variables]
    assert sizes_in_file(stock, tmp_path) == sorted([1] * 4 + inner + inner)
    own = ours.optimizer.variables[: -len(inner)]
    unused = ("iteration", "learning_rate")  # Keras's constructor makes them; the inner optimizer's are used
    kept = [v for v in own if v.name not in unused]
    assert sizes_in_file(ours, tmp_path) == sorted([1] * len(kept) + inner)
    assert len(kept) == len(own) - len(unused)


# What 0.2 saved of Headroom with a guard: names in files, and places in lists of values.
SAVED_IN_0_2 = {
    **{"dynamic_scale": 32.0, "step_counter": 2.0, "overflow_counter": 1.0},
    **{"lost": 0.5, "peaks": 3.0, "level": -1.5, "spread": 0.25, "gap": 1.0},
    **{"last_scale": 64.0, "last_finite": 1.0, "last_grad_norm": 8.0, "last_peak": 512.0},
    **{"exhausted_scale": 1.0, "exhausted_overflows": 4.0},
    **{"last_taken": 0.0, "last_loss": 0.75, "last_loss_fits": 1.0, "last_limit": 4.0},
    **{"guard.loss.level": 2.5, "guard.loss.width": 0.25, "guard.loss.last": 3.0},
    **{"guard.loss.averaged": 5.0, "guard.loss.steps": 8.0},
    **{"guard.grad_norm.level": 1.5, "guard.grad_norm.width": 0.5, "guard.grad_norm.last": 2.0},
    **{"guard.grad_norm.averaged": 6.0, "guard.grad_norm.steps": 7.0, "guard.run": 1.0, "guard.near": 2.0},
    **{"steps": 9.0, "skipped_steps": 3.0},
}


@each_backend
def test_what_0_2_saved_is_loaded_by_name() -> None:
    model = model_of(adam(policy=Headroom(init_scale=64.0), guard=SpikeGuard(watch="grad_norm")))
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    own = optimizer.variables[2 : 2 + len(SAVED_IN_0_2)]  # after Keras's two
    assert [variable.name for variable in own] == list(SAVED_IN_0_2)
    optimizer.load_own_variables({name: np.asarray(value) for name, value in SAVED_IN_0_2.items()})
    expected = {**SAVED_IN_0_2, "exhausted_scale": 0.0, "exhausted_overflows": 0.0}
    assert [float(array(variable)) for variable in own] == list(expected.values())
    step = optimizer.last_step
    assert (step.index, step.scale, step.new_scale, step.amax) == (8, 64.0, 32.0, 512.0)
    assert (step.spike, optimizer.skipped_steps) == (Spike("grad_norm", 8.0, 4.0), 3)
    train(model, "01")
    assert optimizer.last_step.index == 10


def test_a_dict_holds_what_the_inner_optimizer_learned_as_well() -> None:
    """A file has that beside the wrapper's own state; a dict is all that its caller gets."""
    ours, other = (train(model_of(adam()), "0") for _ in range(2))
    train(ours, "100")
    store: dict[str, Any] = {}
    ours.optimizer.save_own_variables(store)
    assert (store["dynamic_scale"], store["step_counter"]) == (2.0**14, 2)
    other.optimizer.load_own_variables(store)
    assert same(*([array(v) for v in model.optimizer.variables] for model in (ours, other)))


def test_weights_of_stock_keras_bring_scale_and_counter_and_the_next_step(tmp_path: Path) -> None:
    stock = train(model_of(Stock(keras.optimizers.Adam(0.125))), "0010")
    stock.save(tmp_path / "stock.keras")
    again = keras.models.load_model(
        tmp_path / "stock.keras", custom_objects={"LossScaleOptimizer": LossScaleOptimizer}
    )
    assert type(again.optimizer) is Stock  # Keras asks nobody for classes of its own

    ours = model_of(adam())
    ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(tmp_path / "stock.keras")
    assert (ours.optimizer.loss_scale, array(ours.optimizer.step_counter)) == (2.0**14, 1)
    for model in (stock, ours):
        train(model, "001")
    assert same(*([array(v) for v in m.variables] for m in (stock, ours)))
    assert same(*([array(v) for v in m.optimizer.inner_optimizer.variables] for m in (stock, ours)))
    assert ours.optimizer.loss_scale == array(stock.optimizer.dynamic_scale)


def remade(optimizer: Any, way: str) -> Any:
    if way == "from_config":
        return LossScaleOptimizer.from_config(optimizer.get_config())
    if way == "registered":
        config = keras.optimizers.serialize(optimizer)
        assert config["registered_name"] == "preamp>LossScaleOptimizer"
        return keras.optimizers.deserialize(config)
    if way == "json":
        return keras.saving.deserialize_keras_object(
            json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
        )
    return copy.deepcopy(optimizer)


@pytest.mark.parametrize(
    ("policy", "way"),
    [
        *[(policy, "json") for policy in ALL],
        *[(POLICIES[1], way) for way in ("from_config", "registered", "deepcopy")],
    ],
)
def test_configs_hold_the_policy(policy: Policy[Any], way: str) -> None:
    optimizer = adam(policy=policy, clipnorm=0.5)
    again = remade(optimizer, way)
    assert type(again) is LossScaleOptimizer
    assert again.policy == optimizer.policy
    assert again.policy.start() == policy.start()
    assert again.get_config() == optimizer.get_config()
    runs = [Run(each, np.ones(2)).walk("0010") for each in (optimizer, again)]
    assert same(*(run.trained() for run in runs))


def test_a_config_of_stock_keras_makes_ours() -> None:
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5), 8.0, 7, name="scaled")
    ours = LossScaleOptimizer.from_config(stock.get_config())
    assert (ours.loss_scale, ours.name, ours.inner_optimizer.get_config()) == (
        8.0,
        "scaled",
        stock.inner_optimizer.get_config(),
    )
    assert [Run(ours, np.ones(1)).walk("0000000").scale] == [16.0]


def test_custom_inner_optimizers_are_found() -> None:
    class Mine(keras.optimizers.SGD):
        pass

    config = LossScaleOptimizer(Mine(0.5)).get_config()
    again = LossScaleOptimizer.from_config(config, custom_objects={"Mine": Mine})
    assert type(again.inner_optimizer) is Mine


@pytest.mark.parametrize("arguments", [{"loss_scale_factor": 8.0}, {"policy": POLICIES[1]}], ids="-".join)
def test_weights_of_another_rule_bring_what_they_have(arguments: dict[str, Any], tmp_path: Path) -> None:
    """A fixed scale stays what was asked for; a rule that counts more keeps its own count."""
    train(model_of(adam()), "0010").save(tmp_path / "model.keras")
    other = model_of(adam(**arguments))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.keras")
    assert other.optimizer.loss_scale == (8.0 if "loss_scale_factor" in arguments else 2.0**14)
    assert (other.optimizer.skipped_steps, array(other.optimizer.iterations)) == (1, 3)
    train(other, "0")
    assert other.optimizer.last_step.index == 4


@pytest.mark.parametrize("scale", [0.0, np.nan])
def test_a_scale_that_died_starts_again_with_a_warning(scale: float, tmp_path: Path) -> None:
    model = model_of(Stock(keras.optimizers.Adam(0.01)))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(scale)
    model.save_weights(tmp_path / "dead.weights.h5")
    again = model_of(LossScaleOptimizer(keras.optimizers.Adam(0.01), 64.0))
    again.optimizer.build(again.trainable_variables)
    with pytest.warns(UserWarning, match="starts again at 64.0"):
        again.load_weights(tmp_path / "dead.weights.h5")
    assert again.optimizer.loss_scale == 64.0


def test_weights_saved_without_a_wrapper_load_with_the_optimizers_state(tmp_path: Path) -> None:
    model = model_of(keras.optimizers.SGD(0.01, momentum=0.9))
    train(model, "0")
    model.save_weights(tmp_path / "bare.weights.h5")
    again = model_of(LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.9)))
    again.optimizer.build(again.trainable_variables)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of the inner optimizer, by Keras
        again.load_weights(tmp_path / "bare.weights.h5")
    inner = again.optimizer.inner_optimizer
    assert again.optimizer.loss_scale == 2.0**15
    assert same(*([array(v) for v in o.variables] for o in (inner, model.optimizer)))


@keras.saving.register_keras_serializable(package="mine")
class Cautious(Dynamic):
    """A policy of one's own."""


def test_a_registered_policy_of_ones_own_comes_back(tmp_path: Path) -> None:
    model = model_of(LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=Cautious(init_scale=4.0)))
    train(model, "0")
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").optimizer.policy == Cautious(init_scale=4.0)


GIVEN_UP = [(3, 4), (4, 4), (5, 4), (10, 3), (11, 3), (12, 3)]  # numbers of steps, overflows counted


# What `stateless_apply` raises on PyTorch, where it runs on the host, leaves the caller's state as it was.
@each_backend
@pytest.mark.parametrize("way", WAYS[1:] if BACKEND != "torch" else ["eager"])
def test_the_first_time_that_a_policy_gave_up_is_kept_until_a_state_is_loaded(way: str) -> None:
    """It gives up at the fourth overflow in a row, and again later."""
    policy = Dynamic(init_scale=8.0, min_scale=1.0, at_floor="raise", growth_interval=1)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=policy)
    run = Run(optimizer, np.ones(2), way=way)
    raised = []
    for number, mark in enumerate("1111110011111"):
        try:
            run.step(*run.gradients(number, mark == "1"))
        except ScaleExhausted as reason:
            raised.append((number, reason.overflows))
        if number == 2:
            optimizer.check_exhausted()
    # What runs on the host raises on every step on which the policy gives up.
    assert raised == ([] if way == "compiled" else GIVEN_UP)
    for _ in range(2):
        with pytest.raises(ScaleExhausted) as first:
            optimizer.check_exhausted()
        assert (first.value.scale, first.value.overflows) == (1.0, 4)
    optimizer.save_own_variables(store := {})
    optimizer.load_own_variables(store)
    optimizer.check_exhausted()


@each_backend
def test_a_compiled_run_that_gave_up_goes_on_when_it_is_loaded(tmp_path: Path) -> None:
    gives_up = Dynamic(init_scale=4.0, min_scale=2.0, at_floor="raise")
    model = model_of(adam(policy=gives_up))
    with suppress(ScaleExhausted):  # where steps are not compiled
        train(model, "110")
    with pytest.raises(ScaleExhausted, match="2 overflows"):
        model.optimizer.check_exhausted()
    again = saved(model, tmp_path)
    again.optimizer.check_exhausted()
    assert again.optimizer.loss_scale == 2.0


@keras.saving.register_keras_serializable("tests")
class Noted(LossScaleOptimizer):
    """A subclass with an argument of its own."""

    def __init__(self, inner_optimizer: Any, note: str = "", **settings: Any) -> None:
        super().__init__(inner_optimizer, **settings)
        self.note = note

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "note": self.note}


def test_a_subclass_with_an_argument_of_its_own_is_saved_and_loaded(tmp_path: Path) -> None:
    model = model_of(Noted(keras.optimizers.Adam(0.125), note="here", initial_scale=8.0))
    train(model, "01")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert (type(again), again.note, again.loss_scale) == (Noted, "here", model.optimizer.loss_scale)
    with pytest.raises(PolicyError, match="is not the configuration of a LossScaleOptimizer"):
        Noted.from_config({**again.get_config(), "unknown": 1})


@pytest.mark.parametrize("wrap", [LossScaleOptimizer, Stock])
def test_weights_loaded_before_build_are_told_of(wrap: Any, tmp_path: Path) -> None:
    """Keras loads nothing into an optimizer without variables. Its own warning names no line to write."""
    path = tmp_path / "model.weights.h5"
    train(model_of(wrap(keras.optimizers.Adam(0.125))), "0010").save_weights(path)
    again = model_of(adam())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again.load_weights(path)
    messages = [str(each.message) for each in told if "only the loss scale is loaded" in str(each.message)]
    assert len(messages) == 1
    assert "optimizer.build(model.trainable_variables)" in messages[0]
    built = model_of(adam())
    built.optimizer.build(built.trainable_variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built.load_weights(path)
    assert array(built.optimizer.iterations) == 3
    model_of(adam()).save_weights(path)
    with warnings.catch_warnings():  # nothing was trained, so nothing is lost
        warnings.simplefilter("error")
        model_of(adam()).load_weights(path)


def test_a_scale_that_is_assigned_is_not_called_that_of_a_checkpoint() -> None:
    model = train(model_of(adam()), "0")
    model.optimizer.dynamic_scale.assign(2.0**40)
    with pytest.warns(UserWarning, match="the optimizer's loss scale") as told:
        print(model.optimizer.last_step)
    assert not any("checkpoint" in str(each.message) for each in told)
