"""What the document of `LossScaleOptimizer` says of each argument, beside the bare inner optimizer."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import keras
import numpy as np
import pytest

from preamp import Dynamic, Headroom, PolicyError, Tolerant, UsageError
from preamp.keras import LossScaleOptimizer

from .driving import INF, Run, Stock, array, close, each_backend, each_way, same, walk_abreast, with_jax
from .test_training import fit, model_of

SCRIPT = "001001"
STARTS = (np.ones((2, 3)), np.full(2, -0.5))

INNERS: dict[str, Any] = {
    "sgd": lambda **arguments: keras.optimizers.SGD(0.25, **arguments),
    "momentum": lambda **arguments: keras.optimizers.SGD(0.25, momentum=0.5, **arguments),
    "adam": lambda **arguments: keras.optimizers.Adam(0.125, **arguments),
}
ARGUMENTS: list[dict[str, Any]] = [
    {"weight_decay": 0.125},
    {"clipnorm": 0.5},
    {"clipvalue": 0.25},
    {"global_clipnorm": 0.5},
    {"use_ema": True},
    {"use_ema": True, "ema_momentum": 0.5},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 3, "global_clipnorm": 0.25, "weight_decay": 0.25, "use_ema": True},
]
DEFAULTS = {
    "initial_scale": 2.0**15,
    "dynamic_growth_steps": 2000,
    "name": None,
    "weight_decay": None,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}

each_argument = pytest.mark.parametrize("arguments", ARGUMENTS, ids="-".join)
each_inner = pytest.mark.parametrize("inner", INNERS)


def bare(inner: str, **arguments: Any) -> Run:
    return Run(INNERS[inner](**arguments), *STARTS)


def ours(inner: str, *, way: str = "eager", inside: dict[str, Any] | None = None, **arguments: Any) -> Run:
    return Run(LossScaleOptimizer(INNERS[inner](**(inside or {})), **arguments), *STARTS, way=way)


def test_the_signature_is_the_documented_one() -> None:
    taken = inspect.signature(LossScaleOptimizer).parameters
    assert {name: taken[name].default for name in DEFAULTS} == DEFAULTS
    stock = [name for name, p in inspect.signature(Stock).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert list(taken)[: len(stock)] == stock


@pytest.mark.parametrize("place", ["wrapper", "inner", "both"])
@each_argument
def test_each_argument_is_the_inner_optimizers(arguments: dict[str, Any], place: str) -> None:
    inside, outside = ({} if place == other else arguments for other in ("wrapper", "inner"))
    run = ours("momentum", inside=inside, **outside)
    plain, without = bare("momentum", **arguments), bare("momentum")
    walk_abreast(run, plain, SCRIPT)
    without.walk("0000")
    finalized = run.finalized()
    assert close(finalized, plain.finalized())
    assert not close(finalized, without.finalized())


@each_backend
def test_many_arguments_at_once_in_compiled_steps() -> None:
    run, plain = ours("adam", way="compiled", **ARGUMENTS[-1]), bare("adam", **ARGUMENTS[-1])
    walk_abreast(run, plain, SCRIPT)
    assert close(run.finalized(), plain.finalized())


@pytest.mark.parametrize(
    ("argument", "outer", "inner"),
    [
        ("weight_decay", 0.1, 0.2),
        ("clipnorm", 1.0, 2.0),
        ("clipvalue", 1.0, 2.0),
        ("global_clipnorm", 1.0, 2.0),
        ("ema_momentum", 0.5, 0.75),
        ("ema_overwrite_frequency", 2, 3),
        ("gradient_accumulation_steps", 2, 3),
    ],
)
def test_conflicting_values_are_refused(argument: str, outer: Any, inner: Any) -> None:
    ema = {"use_ema": True} if argument.startswith("ema") else {}
    optimizer = keras.optimizers.SGD(0.25, **{**ema, argument: inner})
    before = {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}
    with pytest.raises(PolicyError, match=argument) as refused:
        LossScaleOptimizer(optimizer, **{**ema, argument: outer})
    assert repr(outer) in str(refused.value)
    assert repr(inner) in str(refused.value)
    assert {name: value for name, value in vars(optimizer).items() if not name.startswith("_")} == before
    LossScaleOptimizer(optimizer)  # nobody's yet


@pytest.mark.parametrize(
    ("arguments", "scale"),
    [
        ({"loss_scale_factor": 8.0}, 8.0),
        ({"initial_scale": 10.0}, 10.0),
        ({"dynamic_growth_steps": 5}, 2.0**15),
        ({"policy": Dynamic(init_scale=4.0)}, 4.0),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*is not a power of two:preamp.InexactScale")
def test_what_the_wrapper_is_told_counts_more_than_a_factor_inside(
    arguments: dict[str, Any], scale: float
) -> None:
    """Stock Keras wraps an optimizer that has a factor, and forgets it without a word."""
    name = next(iter(arguments))
    for make in (lambda: INNERS["momentum"](loss_scale_factor=5.0), lambda: several(loss_scale_factor=5.0)):
        with pytest.warns(UserWarning, match=rf"^{name}=.* is used, and .*\(loss_scale_factor=5\.0\) is not"):
            optimizer = LossScaleOptimizer(make(), **arguments)
        run = Run(optimizer, *STARTS)
        assert (run.scale, optimizer.inner_optimizer.loss_scale_factor) == (scale, None)
        run.step(*run.gradients(0))
        plain = Run(several(), *STARTS) if "multi" in optimizer.inner_optimizer.name else bare("momentum")
        plain.step(*plain.gradients(0))
        assert close(run.weights(), plain.weights())
    stock = Stock(several(loss_scale_factor=5.0), 10.0)
    stock.build([keras.Variable(np.ones(2, "float32"))])
    assert array(stock.scale_loss(1.0)) == 10.0


def test_the_same_factor_in_both_places_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings(action="error"):
        optimizer = LossScaleOptimizer(several(loss_scale_factor=8.0), loss_scale_factor=8.0)
    assert optimizer.loss_scale_factor == 8.0


@pytest.mark.parametrize("inner", ["AdamW", "subclass"])
def test_an_argument_counts_more_than_what_the_inner_optimizer_has_by_default(inner: str) -> None:
    class Mine(keras.optimizers.AdamW):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    kind = Mine if inner == "subclass" else keras.optimizers.AdamW
    run = Run(LossScaleOptimizer(kind(0.125), weight_decay=0.25), *STARTS)
    plain = Run(kind(0.125, weight_decay=0.25), *STARTS)
    walk_abreast(run, plain, SCRIPT)
    assert not close(run.weights(), Run(kind(0.125), *STARTS).walk("0000").weights())
    with pytest.raises(PolicyError, match=r"weight_decay=0\.25 contradicts .*\(weight_decay=0\.5\)"):
        LossScaleOptimizer(kind(weight_decay=0.5), weight_decay=0.25)


@pytest.mark.parametrize("steps", [2.0, np.float32(2.0), np.int64(2)], ids=repr)
def test_a_whole_number_of_steps_may_be_a_float(steps: Any) -> None:
    run = ours("sgd", initial_scale=8.0, dynamic_growth_steps=steps)
    assert [run.scale for _ in run.steps("0000")] == [8.0, 16.0, 16.0, 32.0]
    assert type(run.optimizer.dynamic_growth_steps) is int
    again = LossScaleOptimizer.from_config(run.optimizer.get_config())
    assert (
        again.policy
        == run.optimizer.policy
        == ours("sgd", initial_scale=8.0, dynamic_growth_steps=2).optimizer.policy
    )
    run.optimizer.dynamic_growth_steps = 3.0
    assert run.optimizer.dynamic_growth_steps == 3


def test_the_growth_steps_of_any_policy_are_its_growth_interval() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), policy=Tolerant(growth_interval=3))
    assert optimizer.dynamic_growth_steps == 3
    optimizer.dynamic_growth_steps = 5
    assert optimizer.policy == Tolerant(growth_interval=5)
    aiming = LossScaleOptimizer(keras.optimizers.SGD(), policy=Headroom())
    assert aiming.dynamic_growth_steps is None
    with pytest.raises(PolicyError, match=r"Headroom\(.*\) has no growth_interval"):
        aiming.dynamic_growth_steps = 5


@pytest.mark.parametrize(
    ("inside", "outside"),
    [("clipnorm", "clipvalue"), ("clipvalue", "global_clipnorm"), ("global_clipnorm", "clipnorm")],
)
def test_only_one_way_to_clip(inside: str, outside: str) -> None:
    with pytest.raises(PolicyError, match=outside):
        LossScaleOptimizer(keras.optimizers.SGD(0.25, **{inside: 1.0}), **{outside: 2.0})


def test_none_is_every_arguments_default() -> None:
    run = ours("adam", **dict.fromkeys(DEFAULTS))
    assert run.scale == 2.0**15
    walk_abreast(run, bare("adam"), SCRIPT)
    for argument in list(DEFAULTS)[3:]:
        expected = DEFAULTS[argument]
        assert getattr(run.optimizer, argument) == expected, argument


@pytest.mark.parametrize("kind", ["momentum", "several"])
def test_training_ends_with_averages_without_naming_the_variables(kind: str) -> None:
    ema = {"use_ema": True, "ema_momentum": 0.5}
    weights = []
    for named in (True, False):
        inner = several(inside=ema) if kind == "several" else INNERS[kind](**ema)
        run = Run(LossScaleOptimizer(inner), *STARTS)
        before = run.walk("010").weights()
        run.optimizer.finalize_variable_values(*([run.variables] if named else []))
        assert not close(run.weights(), before)
        weights.append(run.weights())
    assert same(*weights)


def test_without_variables_there_is_nothing_to_end_with() -> None:
    optimizer = LossScaleOptimizer(INNERS["sgd"](use_ema=True))
    with pytest.raises(UsageError, match=r"finalize_variable_values\(model\.trainable_variables\)"):
        optimizer.finalize_variable_values()


@each_backend
@each_way
def test_the_scale_starts_halves_and_doubles_as_documented(way: str) -> None:
    run = ours("sgd", way=way, initial_scale=8.0, dynamic_growth_steps=3)
    seen = [(run.scale, run.counter, run.iterations) for _ in run.steps("0010000")]
    assert seen == [(8, 1, 1), (8, 2, 2), (4, 0, 2), (4, 1, 3), (4, 2, 4), (8, 0, 5), (8, 1, 6)]
    assert run.optimizer.loss_scale == 8.0
    assert run.optimizer.skipped_steps == 1


@each_backend
@pytest.mark.parametrize("scale", [0.125, 2.0**40])
def test_the_loss_is_multiplied_by_the_initial_scale(scale: float) -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25), initial_scale=scale)
    for _ in range(2):
        scaled = optimizer.scale_loss(keras.ops.convert_to_tensor(3.0))
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        assert array(scaled) == np.float32(3.0) * np.float32(scale)
        optimizer.build([keras.Variable(np.ones(1, "float32"))])


@with_jax
@pytest.mark.parametrize("place", ["wrapper", "inner", "both"])
@each_way
def test_loss_scale_factor_is_a_fixed_scale_that_still_checks(place: str, way: str) -> None:
    factor = {"loss_scale_factor": 128.0}
    inside, outside = factor if place != "wrapper" else {}, factor if place != "inner" else {}
    run = ours("momentum", way=way, inside=inside, **outside)
    assert array(run.optimizer.scale_loss(keras.ops.convert_to_tensor(2.0))) == 256.0
    walk_abreast(run, bare("momentum"), "1110001")
    assert run.scale == 128.0
    assert run.optimizer.loss_scale_factor == 128.0
    assert run.optimizer.inner_optimizer.loss_scale_factor is None


def test_a_name_names_the_optimizer_and_its_variables() -> None:
    named = LossScaleOptimizer(keras.optimizers.SGD(0.25), name="scaled")
    assert named.name == "scaled"
    assert named.dynamic_scale.path == "scaled/dynamic_scale"
    assert LossScaleOptimizer(keras.optimizers.SGD(0.25)).name.startswith("loss_scale_optimizer")


HYPERPARAMETERS = [
    ("sgd", "weight_decay", 0.25),
    ("sgd", "clipnorm", 0.5),
    ("sgd", "clipvalue", 0.25),
    ("sgd", "global_clipnorm", 0.5),
    ("adam", "learning_rate", 0.5),
    ("adam", "beta_1", 0.5),
    ("adam", "epsilon", 0.5),
    ("momentum", "momentum", 0.75),
    ("momentum", "nesterov", True),
]


@pytest.mark.parametrize(("inner", "hyperparameter", "value"), HYPERPARAMETERS)
def test_what_is_set_on_the_wrapper_reaches_the_inner_optimizer(
    inner: str, hyperparameter: str, value: Any
) -> None:
    run, plain, without = ours(inner), bare(inner), bare(inner)
    for each in (run, plain):
        each.walk("00")
        setattr(each.optimizer, hyperparameter, value)
        assert getattr(each.optimizer, hyperparameter) == value
        each.walk("00")
    assert getattr(run.optimizer.inner_optimizer, hyperparameter) == value
    setattr(run.optimizer.inner_optimizer, hyperparameter, value)  # and what is set there shows outside
    assert getattr(run.optimizer, hyperparameter) == value
    assert close(run.trained(), plain.trained())
    assert not close(run.weights(), without.walk("00").walk("00").weights())


def test_excluding_from_weight_decay_reaches_the_inner_optimizer() -> None:
    runs = [ours("sgd", weight_decay=0.5), bare("sgd", weight_decay=0.5)]
    for run in runs:
        run.optimizer.exclude_from_weight_decay(var_list=[run.variables[0]])
        run.walk("00")
    assert close(*(run.weights() for run in runs))
    assert not close(runs[0].weights()[:1], bare("sgd", weight_decay=0.5).walk("00").weights()[:1])


def test_constraints_wait_for_an_update() -> None:
    run = ours("sgd")
    run.variables[1].constraint = keras.constraints.NonNeg()
    run.step(*run.gradients(0, overflow=True))
    assert same(run.weights(), [np.asarray(start, "float32") for start in STARTS])
    run.step(*run.gradients(0))
    assert (run.weights()[1] >= 0.0).all()
    assert run.weights()[1].min() == 0.0


def several(inside: dict[str, Any] | None = None, **arguments: Any) -> Any:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip(f"Keras {keras.__version__} has no MultiOptimizer")
    vectors, others = INNERS["momentum"](**(inside or {})), INNERS["adam"](**(inside or {}))
    return keras.optimizers.MultiOptimizer(
        lambda variable: vectors if len(variable.shape) == 1 else others, **arguments
    )


@with_jax
@each_way
def test_several_optimizers_in_one_keep_one_scale(way: str) -> None:
    run, plain = Run(LossScaleOptimizer(several()), *STARTS, way=way), Run(several(), *STARTS)
    walk_abreast(run, plain, "0010")
    assert run.scale == 2.0**14
    for argument in ({"clipnorm": 1.0}, {"weight_decay": 0.5}, {"use_ema": True}):
        with pytest.raises(PolicyError, match=next(iter(argument))):
            LossScaleOptimizer(several(), **argument)
    with pytest.raises(PolicyError, match=r"clipvalue=0\.5"):
        run.optimizer.clipvalue = 0.5


def test_schedules_see_updates_only() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.25, 0.0625])
    run = Run(LossScaleOptimizer(keras.optimizers.SGD(schedule)), np.zeros(1))
    weights = []
    for gradient in (1.0, INF, INF, 1.0, 1.0, 1.0):
        run.step([gradient])
        weights += run.weights()[0].tolist()
    assert weights == [-0.25, -0.25, -0.25, -0.5, -0.75, -0.8125]


@pytest.mark.parametrize("wrap", [lambda inner: inner, LossScaleOptimizer], ids=["bare", "wrapped"])
def test_callbacks_set_the_learning_rates_of_several_optimizers(wrap: Any) -> None:
    inner = several()
    model = model_of(wrap(inner))
    model.optimizer.build(model.trainable_variables)
    before = [float(array(one.learning_rate)) for one in inner.optimizers]
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    fit(model, 2, callbacks=[halve, keras.callbacks.ReduceLROnPlateau("loss")])
    assert [float(array(one.learning_rate)) for one in inner.optimizers] == [rate / 4 for rate in before]


def test_one_optimizer_has_no_list_of_them() -> None:
    assert not hasattr(LossScaleOptimizer(keras.optimizers.SGD()), "optimizers")
