"""Gradients that carry their scale: they survive JAX's transformations, and arithmetic on them raises."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from preamp import Dynamic, Static, UsageError
from preamp.jax import (
    LossScale,
    ScaledGradients,
    apply_gradients,
    last_step,
    loss_scaled,
    scaled_value_and_grad,
    step,
)

from .trainings import SCRIPT, batches, identical, loss, off_by, parameters, shard_map

POLICY = Dynamic(init_scale=2.0**10, growth_interval=2)
OPTIMIZER = loss_scaled(optax.adamw(0.05), POLICY, max_norm=1.0)
X = next(batches("0"))[0]


def scaled_of(params: Any = None, x: Any = X, scale: float = 2.0**10) -> ScaledGradients:
    params = parameters() if params is None else params
    _, scaled = scaled_value_and_grad(loss)(LossScale(Static(scale)), params, x)
    return scaled


def stacked(scaled: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), scaled)


def over_one_device(scaled: Any) -> Any:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("d",))
    return jax.jit(shard_map(lambda s: s, mesh, PartitionSpec(), PartitionSpec()))(scaled)


PASSES: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit(lambda scaled: scaled),
    "donation": lambda scaled: jax.jit(lambda s: s, donate_argnums=0)(jax.tree.map(jnp.copy, scaled)),
    "scan carry": lambda scaled: lax.scan(lambda s, _: (s + s.map(jnp.zeros_like), None), scaled, None, 3)[0],
    "cond": lambda scaled: lax.cond(jnp.array(True), lambda s: s, lambda s: s.map(jnp.negative), scaled),
    "select": lambda scaled: jax.tree.map(lambda a, b: jnp.where(True, a, b), scaled, scaled),
    "vmap": lambda scaled: jax.tree.map(lambda leaf: leaf[1], jax.vmap(lambda s: s)(stacked(scaled))),
    "pmap": lambda scaled: jax.tree.map(lambda leaf: leaf[1], jax.pmap(lambda s: s)(stacked(scaled))),
    "shard_map": over_one_device,
    "checkpoint": lambda scaled: jax.checkpoint(lambda s: s)(scaled),
    "pickle": lambda scaled: pickle.loads(pickle.dumps(scaled)),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "zeros plus": lambda scaled: jax.tree.map(jnp.zeros_like, scaled) + scaled,
}


@pytest.mark.parametrize("way", PASSES)
def test_gradients_and_scale_pass_through(way: str) -> None:
    before = scaled_of()
    after = PASSES[way](scaled_of())
    assert isinstance(after, ScaledGradients)
    assert float(after.scale) == 2.0**10
    assert identical(after.gradients, before.gradients)


COMPUTES: dict[str, Callable[[Any], Any]] = {
    "times a number": lambda g: g * 2.0,
    "plus": lambda g: g + 1.0,
    "negative": lambda g: -g,
    "norm": jnp.linalg.norm,
    "mean of devices": lambda g: lax.pmean(g, "i"),
    "sum of two": lambda g: jnp.add(g, g),
    "to NumPy": np.asarray,
}


@pytest.mark.parametrize("compute", COMPUTES)
def test_arithmetic_on_the_leaves_raises(compute: str) -> None:
    def mapped(scaled: Any) -> Any:
        return jax.tree.map(COMPUTES[compute], scaled)

    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        jax.vmap(mapped, axis_name="i")(stacked(scaled_of()))


@pytest.mark.parametrize("compute", ["times a number", "plus", "negative", "sum of two"])
def test_the_error_of_arithmetic_says_what_to_write(compute: str) -> None:
    with pytest.raises(TypeError, match=r"ScaledGradients.*loss_scaled\(optax\.chain\(\.\.\.\)\)"):
        jax.tree.map(COMPUTES[compute], scaled_of())


# What people do with gradients: it works, or the error says what to write

COMPUTED: dict[str, Callable[[Any], Any]] = {
    "s - s": lambda s: s - s,
    "s * 2": lambda s: s * 2,
    "s / 2": lambda s: s / 2,
    "s**2": lambda s: s**2,
    "-s": lambda s: -s,
    "s < s": lambda s: s < s,
    "array * s": lambda s: jnp.float32(2) * s,
    "NumPy number * s": lambda s: np.float32(2) * s,
    "len": len,
    "iteration": list,
    "s['w']": lambda s: s["w"],
    "s.get": lambda s: s.get("w"),
    "s.w": lambda s: s.w,
    "s.shape": lambda s: s.shape,
    "format": lambda s: f"{s:.3f}",
    "jnp.asarray": jnp.asarray,
    "np.asarray": np.asarray,
    "jnp.sum": jnp.sum,
    "jnp.zeros_like": jnp.zeros_like,
}


@pytest.mark.parametrize("compute", COMPUTED)
def test_the_object_computes_nothing_and_says_what_to_write(compute: str) -> None:
    with pytest.raises(UsageError, match=r"ScaledGradients.*Write scaled\.unscale\(\)"):
        COMPUTED[compute](scaled_of())


def updated(transformation: Any) -> Callable[[Any], Any]:
    state = transformation.init(parameters())
    return lambda scaled: transformation.update(scaled, state, parameters())


OPTAX: dict[str, Callable[[Any], Any]] = {
    "optax.global_norm": lambda s: optax.global_norm(s),
    "optax.tree.norm": optax.tree.norm,
    "optax.tree.scale": lambda s: optax.tree.scale(0.5, s),
    "optax.tree.vdot": lambda s: optax.tree.vdot(s, s),
    "optax.apply_updates": lambda s: optax.apply_updates(parameters(), s),
    "clip_by_global_norm": updated(optax.clip_by_global_norm(1.0)),
    "zero_nans": updated(optax.zero_nans()),
    "adam": updated(optax.adam(0.1)),
    "MultiSteps": updated(optax.MultiSteps(optax.sgd(0.1), 2)),
    "MultiSteps of ours": updated(optax.MultiSteps(OPTIMIZER, 2)),
    "jax.tree.map of parameters": lambda s: jax.tree.map(lambda p, g: p - 0.1 * g, parameters(), s),
    "jax.tree.map with parameters": lambda s: jax.tree.map(lambda g, p: g + p, s, parameters()),
}
TREES_DIFFER = ("optax.apply_updates", "jax.tree.map of parameters")


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")
@pytest.mark.parametrize("function", OPTAX)
def test_no_function_of_optax_takes_them(function: str) -> None:
    """`zero_nans` would hide an overflow, and `global_norm` end in an error of JAX that does not help."""
    message = r"(?s)loss_scaled around the whole optimizer.*scaled\.unscale\(\)"
    if function in TREES_DIFFER and jax.__version_info__ < (0, 10):
        message = "Expected dict, got ScaledGradients"  # older JAX prints no types where two trees differ
    with pytest.raises((UsageError, ValueError), match=message):
        jax.jit(OPTAX[function])(scaled_of())


def test_the_line_that_is_named_gives_the_true_norm() -> None:
    expected = optax.tree.norm(jax.grad(loss)(parameters(), X))
    norm = jax.jit(lambda scaled: optax.tree.norm(scaled.unscale()))(scaled_of())
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)


def test_they_are_equal_to_themselves_alone() -> None:
    scaled = scaled_of()
    assert scaled == scaled
    assert scaled != scaled.gradients
    assert scaled in [scaled]
    assert bool(scaled)
    assert not hasattr(scaled, "dtype")
    with pytest.raises(UsageError, match=r"cannot be compared with ==.*array_equal"):
        scaled == scaled_of()  # noqa: B015


def test_a_pickle_is_read_by_another_process() -> None:
    program = (
        "import pickle, sys, jax.numpy as jnp; from preamp.jax import ScaledGradients;"
        "read = pickle.load(sys.stdin.buffer);"
        "total = read + ScaledGradients(jnp.ones(2), 4.0, 1.0);"
        "print(total.unscale().tolist(), float(total.loss))"
    )
    saved = pickle.dumps(ScaledGradients(jnp.full(2, 8.0), 8.0, 0.5))
    done = subprocess.run([sys.executable, "-c", program], input=saved, capture_output=True, check=True)
    assert done.stdout.decode().split("\n")[0] == "[1.25, 1.25] 1.5"


def test_gradients_accumulate_from_zeros() -> None:
    """Zeros like scaled gradients have a scale of 0, which must not become that of the sum."""
    parts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(scaled_of(x=X * n) for n in (1, 2, 3)))
    start = jax.tree.map(jnp.zeros_like, scaled_of())
    total, _ = jax.jit(lambda: lax.scan(lambda s, part: (s + part, None), start, parts))()
    expected = jax.tree.map(
        lambda *leaves: sum(leaves), *(jax.grad(loss)(parameters(), X * n) for n in (1, 2, 3))
    )
    assert off_by(total.unscale(), expected) < 1e-6
    assert float(total.loss) == pytest.approx(sum(float(loss(parameters(), X * n)) for n in (1, 2, 3)))


@pytest.mark.parametrize("call", [OPTIMIZER.update, functools.partial(apply_gradients, OPTIMIZER)])
def test_a_second_scale_beside_them_is_refused(call: Callable[..., Any]) -> None:
    """It would be the caller's word against the scale that was in the loss."""
    params, scaled = parameters(), scaled_of()
    state = OPTIMIZER.init(params)
    with pytest.raises(UsageError, match=r"loss_scale= was given with ScaledGradients.*update\(scaled"):
        call(scaled, state, params, loss_scale=3.0)
    assert last_step(call(scaled.gradients, state, params, loss_scale=scaled.scale)[1]).scale == 2.0**10


def test_gradients_of_each_example_have_a_scale_each_and_are_named() -> None:
    params = parameters()
    state = OPTIMIZER.init(params)
    _, each = jax.vmap(scaled_value_and_grad(loss), (None, None, 0))(state, params, X)
    for call in (
        lambda: OPTIMIZER.update(each, state, params),
        lambda: apply_gradients(OPTIMIZER, each, state, params),
        each.unscale,
        lambda: each + each,
    ):
        with pytest.raises(
            UsageError, match=r"an array of shape \(8,\).*jax\.vmap\(lambda s: s\.unscale\(\)\)"
        ):
            call()
    unscaled = jax.vmap(lambda s: s.unscale())(each)
    assert off_by(unscaled, jax.vmap(jax.grad(loss), (None, 0))(params, X)) < 1e-6


# The loss that they carry

WITH_LOSS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "update": lambda scaled, state, params: OPTIMIZER.update(scaled, state, params)[1],
    "apply_gradients": lambda scaled, state, params: apply_gradients(OPTIMIZER, scaled, state, params)[1],
    "TrainState": lambda scaled, _, params: (
        TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER).apply_gradients(grads=scaled).opt_state
    ),
}


@pytest.mark.parametrize(
    ("way", "has_aux"), [("update", False), ("apply_gradients", True), ("TrainState", False)]
)
def test_the_loss_is_recorded_without_being_told(way: str, has_aux: bool) -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        return (loss(params, x), x) if has_aux else loss(params, x)

    @jax.jit
    def train(params: Any, state: Any, x: Any) -> Any:
        _, scaled = scaled_value_and_grad(loss_fn, has_aux=has_aux)(state, params, x)
        return WITH_LOSS[way](scaled, state, params)

    params = parameters()
    state = OPTIMIZER.init(params)
    record = last_step(train(params, state, X))
    assert record.loss == pytest.approx(float(loss(params, X)), rel=1e-6)
    overflow = last_step(train(params, state, np.full_like(X, np.inf)))
    assert overflow.skipped
    assert not np.isfinite(overflow.loss)


@pytest.mark.parametrize(
    ("function", "is_linear"),
    [
        (lambda g: g / 3, True),
        (lambda g: -g.astype(jnp.bfloat16), True),
        (lambda g: jnp.where(jnp.arange(g.size).reshape(g.shape) % 2 == 0, g, 0.0), True),
        (lambda g: g - g.mean(), True),
        (jax.jit(lambda g: 2 * g), True),
        (lambda g: jnp.clip(g, -1.0, 1.0), False),
        (lambda g: g / jnp.linalg.norm(g), False),
        (lambda g: jnp.where(jnp.isfinite(g), g, 0.0), False),
        (jnp.nan_to_num, False),
        (lambda g: g * g, False),
        (jax.jit(jnp.abs), False),
    ],
)
def test_a_function_that_is_not_linear_is_warned_of(function: Any, is_linear: bool) -> None:
    """Its result depends on the loss scale: clipped at 1, a gradient of 2 becomes 2**-16."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(lambda scaled: scaled.map(function))(scaled_of())
    assert [each.category for each in caught] == ([] if is_linear else [UserWarning])
    assert all(each.filename == __file__ for each in caught)


def test_gradients_that_were_mapped_have_no_known_loss() -> None:
    """A mean over devices is that of other losses too; a half of a sum is that of half a loss."""
    params, scaled = parameters(), scaled_of()
    for unknown in (scaled.map(lambda g: g / 2), ScaledGradients(scaled.gradients, scaled.scale)):
        assert last_step(OPTIMIZER.update(unknown, OPTIMIZER.init(params), params)[1]).loss is None
    with pytest.raises(UsageError, match=r"loss=.* is not a real scalar"):
        ScaledGradients(scaled.gradients, 1.0, jnp.ones(2))


@pytest.mark.parametrize("scale", [2.0**-14, 2.0**30])
def test_a_gradient_is_unscaled_with_the_scale_that_was_in_its_loss(scale: float) -> None:
    """The optimizer's own scale is another one: it may have moved since, or never been used."""
    optimizer = loss_scaled(optax.sgd(1.0), Static(4.0))
    params = parameters()
    gradients = jax.grad(loss)(params, X)
    scaled = ScaledGradients(jax.tree.map(lambda g: g * scale, gradients), scale)
    updates, state = jax.jit(optimizer.update)(scaled, optimizer.init(params), params)
    assert identical(updates, jax.tree.map(jnp.negative, gradients))
    assert last_step(state).scale == scale
    assert identical(scaled.unscale(), gradients)


def test_sums_convert_to_the_scale_of_the_first() -> None:
    params = parameters()
    parts = [scaled_of(params, X * n, scale) for n, scale in ((1, 2.0**10), (2, 2.0**3), (3, 2.0**12))]
    total = sum(parts)
    assert isinstance(total, ScaledGradients)
    assert float(total.scale) == 2.0**10
    expected = jax.tree.map(lambda *gs: sum(gs), *(jax.grad(loss)(params, X * n) for n in (1, 2, 3)))
    assert off_by(total.unscale(), expected) < 1e-6


@functools.cache
def trained() -> Any:
    """Return parameters after the script, of `step`."""
    params, train = parameters(), jax.jit(step(loss, OPTIMIZER))
    state = OPTIMIZER.init(params)
    for x, _ in batches():
        _, params, state = train(params, state, x)
    return params


def test_flaxs_train_state_trains_as_step_does() -> None:
    state = TrainState.create(apply_fn=None, params=parameters(), tx=OPTIMIZER)

    @jax.jit
    def train(state: Any, x: Any) -> Any:
        _, scaled = scaled_value_and_grad(loss)(state.opt_state, state.params, x)
        return state.apply_gradients(grads=scaled)

    for x, _ in batches():
        state = train(state, x)
    assert off_by(state.params, trained()) < 1e-5
    assert int(state.opt_state.skipped_steps) == SCRIPT.count("1")


class Layer(nnx.Module):
    def __init__(self) -> None:
        start = parameters()
        self.w, self.b = nnx.Param(start["w"]), nnx.Param(start["b"])


def test_nnxs_optimizer_trains_as_step_does() -> None:
    model = Layer()
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def train(model: Any, optimizer: Any, x: Any) -> None:
        def of(params: Any, x: Any) -> Any:
            return loss(nnx.to_pure_dict(params), x)

        _, scaled = scaled_value_and_grad(of)(optimizer.opt_state, nnx.state(model, nnx.Param), x)
        optimizer.update(model, scaled.gradients, loss_scale=scaled.scale)

    for x, _ in batches():
        train(model, optimizer, x)
    assert off_by(nnx.to_pure_dict(nnx.state(model, nnx.Param)), trained()) < 1e-5
    assert last_step(optimizer.opt_state).index == len(SCRIPT) - 1


def test_nnxs_optimizer_drops_the_scale_and_is_told_how_to_pass_it() -> None:
    model = Layer()
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    _, scaled = scaled_value_and_grad(lambda p, x: loss(nnx.to_pure_dict(p), x))(
        optimizer.opt_state, nnx.state(model, nnx.Param), X
    )
    with pytest.raises(UsageError, match=r"update\(model, scaled\.gradients, loss_scale=scaled\.scale\)"):
        optimizer.update(model, scaled)


PLAIN: dict[str, Callable[[Any, Any, Any], Any]] = {
    "update": lambda gradients, state, params: OPTIMIZER.update(gradients, state, params),
    "compiled update": lambda *args: jax.jit(OPTIMIZER.update)(*args),
    "apply_gradients": lambda gradients, state, params: apply_gradients(OPTIMIZER, gradients, state, params),
    "TrainState": lambda gradients, _, params: TrainState.create(
        apply_fn=None, params=params, tx=OPTIMIZER
    ).apply_gradients(grads=gradients),
}


@pytest.mark.parametrize("way", PLAIN)
def test_gradients_of_jax_grad_are_refused(way: str) -> None:
    """Divided by the loss scale they would train almost nothing, without a word."""
    params = parameters()
    with pytest.raises(
        UsageError,
        match=r"(?s)carry no loss scale.*scaled_value_and_grad.*ScaledGradients\(gradients",
    ):
        PLAIN[way](jax.grad(loss)(params, X), OPTIMIZER.init(params), params)


def test_what_is_computed_with_them_is_refused_by_name() -> None:
    scaled = scaled_of()
    for wrong, message in (
        (lambda: scaled["w"], r"cannot be indexed or unpacked, here by 'w'.*scaled\.unscale\(\)"),
        (lambda: [*scaled], "indexed or unpacked, here by 0"),
        (lambda: scaled + scaled.gradients, r"\+ dict: only ScaledGradients can be added"),
        (lambda: scaled.map(2.0), r"map\(2\.0\) needs a function"),
        (lambda: ScaledGradients(scaled, 2.0), "carry their own scale"),
        (lambda: ScaledGradients(scaled.gradients, None), "is None, not a floating scalar"),
        (lambda: ScaledGradients(scaled.gradients, jnp.ones(2)), r"is an array of shape \(2,\)"),
    ):
        with pytest.raises(UsageError, match=message):
            wrong()


# Means over devices

TWO = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
BY_SGD = loss_scaled(optax.sgd(0.1), POLICY)  # the size of a gradient shows, unlike with a clip or Adam
WHOLE, SPLIT = PartitionSpec(), PartitionSpec("data")
MEANS: dict[str, Callable[[Any], Any]] = {
    "pmean": lambda g: lax.pmean(g, "data"),
    "psum": lambda g: lax.psum(g, ("data",)) / 2,
    "in jit": jax.jit(lambda g: lax.pmean(g, "data")),
    "all_gather": lambda g: lax.all_gather(g, "data").mean(0),
}


def averaged(mean: Any, **options: Any) -> Any:
    def train(params: Any, state: Any, x: Any) -> Any:
        _, scaled = scaled_value_and_grad(loss, **options)(state, params, x)
        return apply_gradients(BY_SGD, scaled.map(mean) if mean else scaled, state, params)[0]

    return train


def mapped(train: Any, checked: bool) -> Any:
    params = parameters()
    run = jax.jit(shard_map(train, TWO, (WHOLE, WHOLE, SPLIT), WHOLE, checked))
    return run(params, BY_SGD.init(params), X)


@pytest.mark.parametrize("mean", MEANS)
def test_a_mean_of_what_is_summed_already_is_refused(mean: str) -> None:
    with pytest.raises(
        UsageError, match=r"over the axis 'data'.* Write scaled_value_and_grad\(loss_fn, axis_"
    ):
        mapped(averaged(MEANS[mean]), True)
    assert off_by(mapped(averaged(None, axis_name="data"), True), once(X)) < 1e-6
    assert off_by(mapped(averaged(lambda g: g / 2), True), once(X)) < 1e-6


def once(x: Any) -> Any:
    params = parameters()
    return step(loss, BY_SGD)(params, BY_SGD.init(params), x)[1]


@pytest.mark.parametrize("mean", MEANS)
def test_a_mean_of_what_differs_is_right(mean: str) -> None:
    if mean != "all_gather":  # whose result shard_map cannot know to be the same on all devices
        assert off_by(mapped(averaged(MEANS[mean]), False), once(X)) < 1e-6
    params = parameters()
    several = [stacked(params), stacked(BY_SGD.init(params)), X.reshape(2, -1, X.shape[-1])]
    by_pmap = jax.pmap(averaged(MEANS[mean]), axis_name="data", devices=jax.devices("cpu")[:2])(*several)
    assert off_by(jax.tree.map(lambda leaf: leaf[0], by_pmap), once(X)) < 1e-6
    by_vmap = jax.vmap(averaged(MEANS[mean]), axis_name="data")(*several)
    assert off_by(jax.tree.map(lambda leaf: leaf[0], by_vmap), once(X)) < 1e-6
