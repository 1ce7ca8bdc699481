"""What today's `keras.optimizers.LossScaleOptimizer` gets wrong, and preamp's does not.

Each test shows the defect in stock Keras first, so that a release that mends it is noticed here. What
concerns one backend only is in its `test_only_*.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from preamp import PolicyError, UsageError
from preamp.keras import LossScaleOptimizer

from .driving import (
    BACKEND,
    INF,
    Run,
    Stock,
    array,
    dtype_policy,
    each_backend,
    each_way,
    same,
    tensor,
    walk_abreast,
    with_jax,
)


def sgd(**arguments: Any) -> Any:
    return keras.optimizers.SGD(0.25, **arguments)


def both(*arguments: Any, **keywords: Any) -> list[Run]:
    return [Run(make(sgd(), *arguments, **keywords), np.ones(2)) for make in (Stock, LossScaleOptimizer)]


def test_a_burst_of_overflows_never_takes_the_scale_to_zero() -> None:
    stock, ours = both()
    for run in (stock, ours):
        run.walk("1" * 170)
        run.step([1.0, 2.0])
    assert stock.scale == 0.0
    assert np.isnan(stock.weights()).all()
    assert ours.scale == 2.0**-14
    assert ours.weights()[0].tolist() == [0.75, 0.5]


def test_growth_never_takes_the_scale_to_inf() -> None:
    stock, ours = both(2.0**15, 1)
    for run in (stock, ours):
        for _ in range(116):
            run.step(np.zeros(2))
        run.step([1.0, 2.0])
    assert stock.scale == INF
    assert stock.weights()[0].tolist() == [1.0, 1.0]  # stuck for ever
    assert ours.scale == 2.0**32
    assert ours.weights()[0].tolist() == [0.75, 0.5]


@each_backend
@each_way
@pytest.mark.parametrize("gradient", [[1e35, 0.0], [1e35, -1e35]], ids=str)
def test_the_check_sees_what_is_written_to_the_weights(way: str, gradient: list[float]) -> None:
    """Stock Keras checks scaled gradients; these are finite, and unscaled they are not."""
    stock, ours = (Run(make(sgd(), 2.0**-20), np.ones(2), way=way) for make in (Stock, LossScaleOptimizer))
    for run in (stock, ours):
        run.optimizer.scale_loss(tensor(1.0))
        run.apply(gradient)
    assert np.isinf(stock.weights()).any()
    assert ours.weights()[0].tolist() == [1.0, 1.0]
    assert ours.optimizer.skipped_steps == 1


def test_a_counter_beyond_the_interval_still_grows() -> None:
    stock, ours = both(2.0**15, 5)
    for run in (stock, ours):
        run.optimizer.step_counter.assign(10)
        run.walk("0")
    assert stock.scale == 2.0**15
    assert ours.scale == 2.0**16
    assert ours.counter == 0


@pytest.mark.parametrize("legacy", [(False, 1024.0), (True,), (True, 1024.0)])
def test_the_arguments_of_tf_keras_by_position_are_refused(legacy: tuple[Any, ...]) -> None:
    with pytest.raises(PolicyError, match="initial_scale"):
        LossScaleOptimizer(sgd(), *legacy)
    Stock(sgd(), *legacy)


def test_nested_optimizers_are_refused() -> None:
    Stock(Stock(sgd()))
    for make in (Stock, LossScaleOptimizer):
        with pytest.raises(PolicyError, match="LossScaleOptimizer"):
            LossScaleOptimizer(make(sgd()))


def test_it_may_take_the_name_of_keras_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (keras.optimizers, keras.mixed_precision):
        monkeypatch.setattr(module, "LossScaleOptimizer", LossScaleOptimizer)
    run = Run(keras.optimizers.LossScaleOptimizer(sgd(), 8.0), np.ones(2))
    walk_abreast(run, Run(sgd(), np.ones(2)), "0100")
    assert (run.scale, run.optimizer.skipped_steps) == (4.0, 1)
    for make in (Stock, LossScaleOptimizer):
        with pytest.raises(PolicyError, match="already scales the loss"):
            keras.optimizers.LossScaleOptimizer(make(sgd()))


def test_a_factor_that_is_set_inside_afterwards_would_divide_twice() -> None:
    inner = sgd()
    run = Run(LossScaleOptimizer(inner), np.ones(2)).walk("0")
    before = run.everything()
    inner.loss_scale_factor = 8.0
    with pytest.raises(UsageError, match=r"loss_scale_factor=8\.0 was set after it was wrapped"):
        run.walk("0")
    assert same(run.everything(), before)


def test_an_inner_optimizer_has_one_wrapper() -> None:
    inner = sgd()
    Stock(inner), Stock(inner)
    first = LossScaleOptimizer(inner)
    with pytest.raises(PolicyError, match="inner_optimizer"):
        LossScaleOptimizer(inner)
    assert first.inner_optimizer is inner


def test_a_forgotten_scale_loss_is_noticed_once() -> None:
    stock, ours = both()
    with warnings.catch_warnings(action="error"):
        stock.apply([1.0, 1.0])
    assert (stock.weights()[0] == 1.0 - 0.25 / 2.0**15).all()
    with pytest.warns(UserWarning, match="scale_loss"):
        ours.apply([1.0, 1.0])
    with warnings.catch_warnings(action="error"):
        ours.apply([1.0, 1.0])


def test_a_static_factor_survives_compile_under_mixed_float16() -> None:
    with dtype_policy("mixed_float16"):
        models = [small() for _ in range(2)]
        models[0].compile(sgd(loss_scale_factor=128.0), "mse")
        models[1].compile(LossScaleOptimizer(sgd(loss_scale_factor=128.0)), "mse")
    stock, ours = (model.optimizer for model in models)
    assert isinstance(stock, Stock)
    assert array(stock.scale_loss(tensor(1.0))) == 2.0**15
    assert array(ours.scale_loss(tensor(1.0))) == 128.0


def small() -> Any:
    """Return a model of four weights."""
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, use_bias=False)])


def batch() -> tuple[np.ndarray, np.ndarray]:
    return np.ones((4, 2), "float32"), np.zeros((4, 2), "float32")


def reloaded(model: Any, path: Path) -> Any:
    model.save(path)
    return keras.models.load_model(path)


def test_auto_scale_loss_survives_saving(tmp_path: Path) -> None:
    with dtype_policy("mixed_float16"):
        stock, ours = small(), small()
        stock.compile(keras.optimizers.Adam(), "mse", auto_scale_loss=False)
        ours.compile(LossScaleOptimizer(keras.optimizers.Adam()), "mse", auto_scale_loss=False)
        for model in (stock, ours):
            model.train_on_batch(*batch())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert type(reloaded(stock, tmp_path / "stock.keras").optimizer) is Stock
        assert any("Skipping variable loading" in str(warning.message) for warning in said)
        again = reloaded(ours, tmp_path / "ours.keras").optimizer
    assert type(again) is LossScaleOptimizer
    assert same(*([array(v) for v in each.variables] for each in (ours.optimizer, again)))


@each_backend
def test_a_float16_loss_is_scaled_in_float32_from_the_start() -> None:
    loss = tensor(3.0, "float16")
    if BACKEND != "torch":
        assert array(Stock(sgd()).scale_loss(loss)) == INF
    scaled = LossScaleOptimizer(sgd()).scale_loss(loss)
    assert array(scaled) == np.float32(3.0 * 2.0**15)
    assert array(scaled).dtype == np.float32


def test_float16_variables_warn_that_they_lose_what_scaling_saves() -> None:
    stock = Run(Stock(keras.optimizers.Adam(0.25)), np.zeros(1), dtype="float16")
    stock.step([1e-8])
    assert stock.weights()[0] == [0.0]  # Adam's first update is the learning rate, however small the gradient
    with pytest.warns(UserWarning, match="float16"):
        Run(LossScaleOptimizer(keras.optimizers.Adam(0.25)), np.zeros(1), dtype="float16")


@each_backend
def test_apply_gradients_returns_the_updates_made() -> None:
    ours = both()[1]
    returned = []
    for gradient in ([1.0, 1.0], [INF, 1.0], [1.0, 1.0]):
        scaled = ours.optimizer.scale_loss(tensor(gradient))
        returned.append(int(array(ours.optimizer.apply_gradients([(scaled, ours.variables[0])]))))
    assert returned == [1, 1, 2]
    if BACKEND != "jax":
        stock = both()[0]
        assert array(stock.optimizer.apply_gradients([(tensor([1.0, 1.0]), stock.variables[0])])) == 0


def test_set_weights_restores_everything() -> None:
    for run, whole in zip(both_with_momentum(), (False, True), strict=True):
        run.walk("0010")
        saved, values = run.everything(), [array(v) for v in run.optimizer.variables]
        run.walk("1000")
        run.optimizer.set_weights(values)
        assert same(run.everything()[1:], saved[1:]) is whole


def both_with_momentum() -> list[Run]:
    return [
        Run(make(keras.optimizers.SGD(0.25, momentum=0.5)), np.ones(2))
        for make in (Stock, LossScaleOptimizer)
    ]


def test_from_config_leaves_its_argument_alone() -> None:
    for make, alone in ((Stock, False), (LossScaleOptimizer, True)):
        config = make(sgd()).get_config()
        before = dict(config)
        make.from_config(config)
        assert (config == before) is alone


@with_jax
@each_way
def test_nadams_product_is_kept_with_the_rest(way: str) -> None:
    """Stock Keras builds the inner optimizer unseen, and Nadam's product is among no variables."""
    stock, ours = (
        Run(make(keras.optimizers.Nadam(0.25)), np.ones(2), way=way) for make in (Stock, LossScaleOptimizer)
    )
    for run, whole in ((stock, False), (ours, True)):
        product = run.optimizer.inner_optimizer._u_product
        assert any(variable is product for variable in run.optimizer.variables) is whole
    walk_abreast(ours, Run(keras.optimizers.Nadam(0.25), np.ones(2)), "0010001")
