"""What cannot work is refused where it is written: the value, the reason and the line to write instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest

from preamp import Dynamic, InexactScale, PolicyError, Static, Trace, UsageError, dialects
from preamp.keras import LossScaleOptimizer, TraceCallback

from .driving import BACKEND, INF, Run, Stock, each_backend, same, tensor, with_jax

NAN = float("nan")


def sgd(**arguments: Any) -> Any:
    return keras.optimizers.SGD(0.25, **arguments)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(
            ("initial_scale", value)
            for value in (0, 0.0, -1.0, NAN, INF, True, False, "dynamic", 1e39, 1e-50)
        ),
        *(("dynamic_growth_steps", value) for value in (0, -1, 2.5, INF, True, "2")),
        *(("loss_scale_factor", value) for value in (0.0, -2.0, NAN, INF, True, "8")),
        *(("weight_decay", value) for value in (-0.5, NAN, INF, "a", True)),
        *(("clipnorm", value) for value in (0, -1.0, NAN, True)),
        *(("clipvalue", value) for value in (0, -1.0, INF)),
        *(("global_clipnorm", value) for value in (0, -1.0, "a")),
        *(("use_ema", value) for value in (1, "yes")),
        *(("ema_momentum", value) for value in (-0.5, 1.5, NAN, "a")),
        *(("ema_overwrite_frequency", value) for value in (0, -1, 2.5)),
        *(("gradient_accumulation_steps", value) for value in (0, 1, -2, 2.5, "2")),
        *(("policy", value) for value in ("dynamic", 2.0**15, Dynamic)),
        ("dynamic", False),
    ],
)
def test_values_that_cannot_work(argument: str, value: Any) -> None:
    inner = sgd()
    with pytest.raises(PolicyError, match="Write") as refused:
        LossScaleOptimizer(inner, **{argument: value})
    assert argument in str(refused.value) or "scale" in argument  # a rounded scale is `init_scale`
    LossScaleOptimizer(inner)  # nobody's yet


@pytest.mark.parametrize("backend", [pytest.param("numpy", marks=pytest.mark.slow), "openvino"])
def test_a_backend_that_cannot_train(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import preamp.keras"],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith(f"preamp.errors.MissingExtra: Keras computes with {backend} here, which has no")
    assert "but not train. Write before Keras is imported: os.environ['KERAS_BACKEND'] = 'jax'" in said


@pytest.mark.parametrize("inner", ["sgd", None, 0.25, keras.optimizers.SGD], ids=str)
def test_what_is_no_optimizer(inner: Any) -> None:
    with pytest.raises(PolicyError, match=r"Write LossScaleOptimizer\(keras\.optimizers\.Adam\(\)\)"):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"policy": Dynamic(), "initial_scale": 8.0}, "initial_scale=8.0"),
        ({"policy": dialects.TORCH, "dynamic_growth_steps": 5}, "dynamic_growth_steps=5"),
        ({"policy": Static(8.0), "loss_scale_factor": 8.0}, "loss_scale_factor=8.0"),
        ({"loss_scale_factor": 8.0, "initial_scale": 4.0}, "initial_scale=4.0"),
        ({"loss_scale_factor": 8.0, "dynamic_growth_steps": 5}, "dynamic_growth_steps=5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_rules_at_once(arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(PolicyError, match=names):
        LossScaleOptimizer(sgd(), **arguments)


def test_arguments_that_nobody_knows() -> None:
    """Keras names all of them in a `ValueError` as well."""
    for make in (Stock, LossScaleOptimizer):
        with pytest.raises(ValueError, match=r"(?i)argument.*foo.*bar"):
            make(sgd(), foo=1, bar=None)
    with pytest.raises(TypeError, match="positional"):
        LossScaleOptimizer(sgd(), 2.0**15, 2000, "name", None)


@pytest.mark.parametrize("argument", [{"use_ema": True}, {"gradient_accumulation_steps": 2}])
def test_what_needs_variables_comes_before_them(argument: dict[str, Any]) -> None:
    ((name, value),) = argument.items()
    used = sgd()
    used.build([keras.Variable(np.ones(2, "float32"))])
    with pytest.raises(UsageError, match=f"{name}={value}"):
        LossScaleOptimizer(used, **argument)
    run = Run(LossScaleOptimizer(sgd()), np.ones(2)).walk("0")
    with pytest.raises(UsageError, match=f"{name}={value}"):
        setattr(run.optimizer, name, value)
    run.walk("0")


def test_a_fixed_scale_is_decided_at_the_start() -> None:
    moves, fixed = LossScaleOptimizer(sgd()), LossScaleOptimizer(sgd(), loss_scale_factor=8.0)
    for optimizer in (moves, fixed):
        with pytest.raises(PolicyError, match=r"loss_scale_factor=77\.0"):
            optimizer.loss_scale_factor = 77.0
    fixed.loss_scale_factor = 8.0  # as it is
    with pytest.raises(PolicyError, match="has no growth_interval"):
        fixed.dynamic_growth_steps = 5
    with pytest.raises(PolicyError, match="dynamic_growth_steps=0"):
        moves.dynamic_growth_steps = 0
    assert (moves.dynamic_growth_steps, fixed.dynamic_growth_steps) == (2000, None)


@pytest.mark.parametrize("value", [0, -1.0, NAN])
def test_hyperparameters_are_looked_at_when_they_are_set(value: float) -> None:
    optimizer = LossScaleOptimizer(sgd(clipnorm=1.0))
    with pytest.raises(PolicyError, match="clipnorm"):
        optimizer.clipnorm = value
    with pytest.raises(PolicyError, match="clipvalue"):
        optimizer.clipvalue = 1.0  # the other one is set
    assert (optimizer.clipnorm, optimizer.clipvalue) == (1.0, None)


def test_gradients_that_do_not_match_the_variables() -> None:
    run = Run(LossScaleOptimizer(sgd()), np.ones(2), np.ones(2))
    run.optimizer.scale_loss(tensor(1.0))
    before = run.everything()
    for gradients in ([tensor([1.0, 1.0])], [tensor([1.0, 1.0])] * 3):
        with pytest.raises(ValueError, match=f"{len(gradients)} gradients were given for 2 variables"):
            run.optimizer.apply(gradients, run.variables)
    with pytest.raises(ValueError, match="all gradients are None"):
        run.optimizer.apply([None, None], run.variables)
    with pytest.raises(ValueError, match="Unknown variable"):
        run.optimizer.apply([tensor([1.0])], [keras.Variable([1.0])])
    assert same(run.everything(), before)
    run.optimizer.apply([], [])  # as Keras: nothing to do
    assert run.optimizer.last_step is None


@each_backend
def test_an_optimizer_without_variables() -> None:
    optimizer = LossScaleOptimizer(sgd())
    with pytest.raises(UsageError, match="trainable_variables"):
        optimizer.apply([tensor([1.0])])
    with pytest.raises(ValueError, match="not supported" if BACKEND == "tensorflow" else "must be built"):
        optimizer.stateless_apply([], [tensor([1.0])], [tensor([1.0])])
    with pytest.raises(UsageError, match="build"):
        optimizer.set_weights([])


@pytest.mark.skipif(BACKEND == "tensorflow", reason="has no stateless_apply")
@with_jax
def test_inputs_of_other_lengths() -> None:
    """Stock Keras drops what it lacks and trains on, or answers None for it."""
    run = Run(LossScaleOptimizer(sgd()), np.ones(1), np.ones(1))
    state, ones = [v.value for v in run.optimizer.variables], [tensor([1.0])] * 3
    for arguments, names in [
        ((state, ones[:1], ones[:2]), "1 gradients were given for 2 variables"),
        ((state, ones, ones[:2]), "3 gradients were given"),
        ((state[:-1], ones[:2], ones[:2]), "optimizer_variables"),
        ((state, ones[:2], ones[:1]), "trainable_variables"),
    ]:
        with pytest.raises(ValueError, match=names):
            run.optimizer.stateless_apply(*arguments)


def test_values_for_other_variables() -> None:
    run = Run(LossScaleOptimizer(sgd()), np.ones(2)).walk("0")
    values, before = [v.value for v in run.optimizer.variables], run.everything()
    for wrong in (values[:-1], [*values, values[0]]):
        with pytest.raises(ValueError, match=f"{len(wrong)} values were given"):
            run.optimizer.set_weights(wrong)
        with pytest.raises(ValueError, match=f"{len(wrong)} values were given"):
            run.optimizer.stateless_scale_loss(wrong, tensor(1.0))
    assert same(run.everything(), before)


def test_an_interval_beyond_what_the_counter_counts() -> None:
    LossScaleOptimizer(sgd(), dynamic_growth_steps=2**24)
    with pytest.raises(PolicyError, match=r"16777217 is more than 2\*\*24"):
        LossScaleOptimizer(sgd(), dynamic_growth_steps=2**24 + 1)


def test_the_inner_optimizer_stays() -> None:
    optimizer = LossScaleOptimizer(sgd())
    inner = optimizer.inner_optimizer
    with pytest.raises(UsageError, match="comes too late"):
        optimizer.inner_optimizer = sgd()
    assert optimizer.inner_optimizer is inner


@pytest.mark.parametrize("settings", [{"mode": "append"}, {"name": "x"}], ids=str)
def test_settings_of_a_file_beside_a_trace(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(settings))}: this applies to a file"):
        TraceCallback(Trace(), **settings)


def test_a_property_that_fails_says_why() -> None:
    """And not that there is none: `__getattr__` is asked when a property raises AttributeError."""

    class Odd(LossScaleOptimizer):
        @property
        def scale_of_tomorrow(self) -> float:
            raise AttributeError("tomorrow is not known")

    with pytest.raises(AttributeError, match="tomorrow is not known"):
        _ = Odd(sgd()).scale_of_tomorrow


NO_LIST = [None, "x", 3.0, ["x"]]
NO_VARIABLES = [*NO_LIST[1:], [1.0], [None]]
CALLS: dict[str, tuple[Any, list[Any]]] = {
    "build": (lambda o, v, bad: o.build(bad), [None, *NO_VARIABLES]),
    "scale_loss": (lambda o, v, bad: o.scale_loss(bad), [None, "x", [None], {}, len]),
    "stateless_scale_loss": (lambda o, v, bad: o.stateless_scale_loss(bad, 1.0), [*NO_LIST, [], [1.0]]),
    "apply": (lambda o, v, bad: o.apply(bad, [v]), [*NO_LIST, [1.0, 1.0], [{}]]),
    "apply, variables": (lambda o, v, bad: o.apply([tensor([1.0, 1.0])], bad), [*NO_VARIABLES, []]),
    "apply_gradients": (lambda o, v, bad: o.apply_gradients(bad), [*NO_LIST, [None], [(1.0,)], [("x", 1.0)]]),
    "stateless_apply": (
        lambda o, v, bad: o.stateless_apply(bad, [tensor([1.0, 1.0])], [v.value]),
        [None, "x", 3.0, [None]],
    ),
    "stateless_apply, gradients": (
        lambda o, v, bad: o.stateless_apply([w.value for w in o.variables], bad, [v.value]),
        [None, "x", 3.0, []],
    ),
    "stateless_apply, variables": (
        lambda o, v, bad: o.stateless_apply([w.value for w in o.variables], [None], bad),
        [None, "x", 3.0, [None]],
    ),
    "finalize": (lambda o, v, bad: o.finalize_variable_values(bad), NO_VARIABLES),
    "exclude": (lambda o, v, bad: o.exclude_from_weight_decay(bad), NO_VARIABLES),
    "exclude, names": (lambda o, v, bad: o.exclude_from_weight_decay(var_names=bad), ["bias", 3.0, [1.0]]),
    "set_weights": (lambda o, v, bad: o.set_weights(bad), [*NO_LIST, [], [1.0]]),
    "set_weights, one": (
        lambda o, v, bad: o.set_weights([*[w.numpy() * 0 + 1 for w in o.variables[:-1]], bad]),
        [None, "x", [1.0, 2.0, 3.0]],
    ),
    "save": (lambda o, v, bad: o.save_own_variables(bad), [None, "x", 3.0, []]),
    "load": (lambda o, v, bad: o.load_own_variables(bad), [None, "x", 3.0, []]),
    "from_config": (lambda o, v, bad: LossScaleOptimizer.from_config(bad), [None, "x", 3.0, [], {}]),
}


@pytest.mark.filterwarnings("ignore:gradients come to")
@pytest.mark.parametrize(
    ("call", "bad"),
    [pytest.param(call, bad, id=f"{name} {bad!r}") for name, (call, bads) in CALLS.items() for bad in bads],
)
def test_methods_refuse_what_is_no_list_tensor_or_variable(call: Any, bad: Any) -> None:
    run = Run(LossScaleOptimizer(sgd(momentum=0.5, use_ema=True)), [1.0, 2.0])
    before = run.everything()
    with pytest.raises((UsageError, PolicyError), match="Write"):
        call(run.optimizer, run.variables[0], bad)
    assert same(run.everything(), before)


def test_a_loss_is_scaled_once() -> None:
    """Gradients are divided once. Two losses of one step are each scaled, and may be added up."""
    optimizer = LossScaleOptimizer(sgd())
    first = optimizer.scale_loss(tensor(1.0))
    with pytest.raises(UsageError, match=r"scaled already.*Write"):
        optimizer.scale_loss(first)
    assert float(keras.ops.convert_to_numpy(first + optimizer.scale_loss(tensor(1.0)))) == 2.0**16


@with_jax
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_scales_no_loss_that_compute_loss_has_scaled(run_eagerly: bool) -> None:
    class Scales(keras.Model):
        def compute_loss(self, *arguments: Any, **settings: Any) -> Any:
            return self.optimizer.scale_loss(super().compute_loss(*arguments, **settings))

    inputs = keras.Input((2,))
    model = Scales(inputs, keras.layers.Dense(1)(inputs))
    model.compile(LossScaleOptimizer(sgd()), "mse", run_eagerly=run_eagerly)
    with pytest.raises((UsageError, ValueError), match=r"scaled already|scale_loss inside jit"):
        model.train_on_batch(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))


@pytest.mark.parametrize("scale", [2.0**200, 1e60])
def test_a_first_scale_that_is_inf_in_float32_is_named_as_it_was_written(scale: float) -> None:
    with pytest.raises(PolicyError, match=rf"initial_scale={re.escape(repr(scale))} is inf in float32"):
        LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=scale)


def test_a_first_scale_that_is_no_power_of_two_is_named_as_it_was_written() -> None:
    with pytest.warns(InexactScale, match=r"^initial_scale=1000 .* Write initial_scale=1024\.0") as told:
        LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=1000.0)
    assert len(told) == 1
