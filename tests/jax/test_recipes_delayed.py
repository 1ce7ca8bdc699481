"""Delayed scales in JAX: the rule, the state that a derivative returns, and what leaves it unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_dtypes import float8_e4m3fn, float8_e5m2

from preamp import casting, recipes
from preamp.errors import UsageError
from preamp.jax import RecipeScales, autocast, loss_scaled, recipe_state, value_and_grad
from preamp.recipes import Quant, Recipe

from .trainings import shard_map

TWO = Mesh(np.array(jax.devices()[:2]), ("data",))
DELAYED = recipes.FLOAT8_DELAYED
REGION: Any = {"recipe": DELAYED, "weights": (0,)}


def normal(*shape: int, seed: int = 0) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


def loss(weights: Any, x: Array) -> Array:
    up, down = weights
    return jnp.mean(jax.nn.relu(x @ up) @ down * jnp.arange(32.0))


WEIGHTS = normal(64, 128, seed=1), normal(128, 32, seed=2)
INPUTS = [normal(32, 64, seed=3 + number) * 4.0 ** (number % 3) for number in range(6)]


def alike(one: Any, other: Any) -> bool:
    """Return whether trees have the same numbers, bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def steps(gradient: Any, scales: RecipeScales, inputs: list[Array]) -> tuple[list[Any], RecipeScales]:
    """Return the gradients of some steps, and the scales after them."""
    found = []
    for x in inputs:
        _, (scales, gradients) = gradient(scales, WEIGHTS, x)
        found.append(gradients)
    return found, scales


class TransformerEngine:
    """The scale of one operand by Transformer Engine's rule, in float32."""

    def __init__(self, largest: float, history: int, algorithm: str, margin: int) -> None:
        self.amaxes, self.scale = [np.float32(0)] * history, np.float32(1)
        self.largest, self.algorithm = np.float32(largest * 2.0**-margin), algorithm

    def low(self, x: Any, kind: Any) -> Any:
        largest = float(jnp.finfo(kind).max)
        return np.clip(x * self.scale, -largest, largest).astype(kind).astype(np.float32) * (1 / self.scale)

    def update(self, x: Any) -> None:
        self.amaxes = [np.abs(x).max(), *self.amaxes[:-1]]
        counts = self.amaxes[0] if self.algorithm == "most_recent" else np.fmax.reduce(self.amaxes)
        if np.isfinite(counts) and counts > 0:
            self.scale = self.largest / counts


@pytest.mark.parametrize(
    ("history", "algorithm", "margin"), [(1024, "max", 0), (16, "max", 0), (4, "most_recent", 2)]
)
def test_scales_are_those_of_transformer_engine(history: int, algorithm: Any, margin: int) -> None:
    quant = Quant(history=history, algorithm=algorithm, margin=margin)
    of_g = replace(quant, format="e5m2")
    recipe = Recipe((quant, quant), (of_g, quant), (of_g, quant))
    region = autocast(lambda w, x: x @ w, recipe=recipe, weights=(0,))

    @jax.jit
    def run(scales: RecipeScales, w: Array, x: Array, g: Array) -> Any:
        y, pull_back = jax.vjp(region, scales, w, x)
        return y, *pull_back(g)

    theirs = [TransformerEngine(largest, history, algorithm, margin) for largest in (448, 448, 57344)]
    random, w = np.random.default_rng(0), np.asarray(normal(64, 32).astype(jnp.bfloat16), np.float32)
    scales = recipe_state(region, w, np.zeros((16, 64), np.float32))
    for number in range(200):
        x, g = random.standard_normal((16, 64)), random.standard_normal((16, 32)) * 1e-4
        x *= 1e4 if number in (20, 21, 90) else 0 if number in (30, 120) else 1
        g *= 1e5 if number == 50 else 1
        if number in (60, 140):
            x[0, 0] = np.nan if number == 60 else np.inf
        x, g = (each.astype(jnp.bfloat16).astype(np.float32) for each in (x, g))
        y, scales, dw, dx = run(scales, w, x, g.astype(jnp.bfloat16))
        kinds = float8_e4m3fn, float8_e4m3fn, float8_e5m2
        low_x, low_w, low_g = (
            each.low(array, kind) for each, array, kind in zip(theirs, (x, w, g), kinds, strict=True)
        )
        for found, expected in ((y, low_x @ low_w), (dx, low_g @ low_w.T), (dw, low_x.T @ low_g)):
            if np.isfinite(expected).all():
                atol = 2**-8 * np.abs(expected).max()
                assert np.allclose(np.asarray(found, np.float32), expected, rtol=2**-7, atol=atol), number
        for each, array in zip(theirs, (x, w, g), strict=True):
            each.update(array)
        (states,) = scales.products.values()
        for each, state in zip(theirs, states[:3], strict=True):
            assert state[0] == each.scale, number
            assert np.array_equal(state[2:], each.amaxes, equal_nan=True)


def test_a_training_is_that_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from preamp.torch import autocast as torch_autocast

    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128, bias=False), torch.nn.ReLU(), torch.nn.Linear(128, 32, bias=False)
    )
    with torch.no_grad():
        for layer, w in zip(model[::2], WEIGHTS, strict=True):
            layer.weight.copy_(torch.from_numpy(np.array(w)).T)
    region = autocast(lambda weights, x: jax.nn.relu(x @ weights[0]) @ weights[1], **REGION)
    scales, weights = recipe_state(region, WEIGHTS, INPUTS[0]), WEIGHTS
    for number, x in enumerate(INPUTS):
        g = normal(32, 32, seed=number).astype(jnp.bfloat16)
        y, pull_back = jax.vjp(region, scales, weights, x)
        scales, gradients, _ = pull_back(g)
        with torch_autocast("cpu", recipe=DELAYED, model=model):
            theirs = model(torch.from_numpy(np.array(x)))
        model.zero_grad()
        theirs.backward(torch.from_numpy(np.array(g, np.float32)).bfloat16())
        pairs = [(y, theirs.detach())]
        pairs += [(a, b.weight.grad.T) for a, b in zip(gradients, model[::2], strict=True)]
        for ours, other in pairs:  # sums in another order, which cross a rounding now and then
            a, b = np.asarray(ours, np.float32), other.float().numpy()
            assert np.linalg.norm(a - b) < 2**-10 * np.linalg.norm(b)
        for states, layer in zip(scales.products.values(), model[::2], strict=True):
            for a, b in zip(states, layer._preamp_scales_0, strict=True):
                assert np.allclose(a[0], b[0], rtol=2**-7)
                assert np.allclose(a[2:], b[2:], rtol=2**-7)
        weights = jax.tree.map(lambda w, dw: w - 0.01 * dw, weights, gradients)
        with torch.no_grad():
            for layer in model[::2]:
                layer.weight -= 0.01 * layer.weight.grad


def test_compiled_checkpointed_and_restored_steps_are_the_same() -> None:
    region = autocast(loss, **REGION)
    gradient = jax.value_and_grad(region, argnums=(0, 1))
    first = recipe_state(region, WEIGHTS, jax.ShapeDtypeStruct((32, 64), np.float32))
    expected = steps(gradient, first, INPUTS)
    assert not alike(expected[1], first)
    inner = autocast(jax.checkpoint(loss), **REGION)
    for other in (gradient, jax.value_and_grad(jax.checkpoint(region), argnums=(0, 1))):
        assert alike(steps(jax.jit(other), first, INPUTS), expected)
    found = steps(jax.value_and_grad(inner, argnums=(0, 1)), recipe_state(inner, WEIGHTS, INPUTS[0]), INPUTS)
    assert alike(found, expected)
    before, scales = steps(gradient, first, INPUTS[:3])
    saved = {name: [np.array(each) for each in states] for name, states in scales.products.items()}
    after, scales = steps(jax.jit(gradient), RecipeScales(saved), INPUTS[3:])
    assert alike(([*before, *after], scales), expected)


def test_what_is_not_differentiated_takes_the_scales_and_keeps_them() -> None:
    region = autocast(loss, **REGION)
    _, scales = steps(
        jax.value_and_grad(region, argnums=(0, 1)), recipe_state(region, WEIGHTS, INPUTS[0]), INPUTS
    )
    value = jax.value_and_grad(region, argnums=(0, 1))(scales, WEIGHTS, INPUTS[1])[0]
    assert region(scales, WEIGHTS, INPUTS[1]) == value
    assert jax.vmap(region, (None, None, 0))(scales, WEIGHTS, INPUTS[1][None])[0] == value
    assert region(recipe_state(region, WEIGHTS, INPUTS[0]), WEIGHTS, INPUTS[1]) != value


def test_a_product_without_a_derivative_keeps_its_scales() -> None:
    def branches(weights: Any, x: Array) -> Array:
        return jax.lax.stop_gradient(x @ weights[0]).sum() + (x @ weights[1]).sum()

    region, weights = autocast(branches, **REGION), (WEIGHTS[0], normal(64, 32))
    first = recipe_state(region, weights, INPUTS[0])
    scales, _ = jax.grad(region, argnums=(0, 1))(first, weights, INPUTS[0])
    kept, changed = first.products
    assert alike(scales.products[kept], first.products[kept])
    assert all(state[0] != 1 for state in scales.products[changed][:3])


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        down = nn.Dense(64, name="down")
        return down(nn.Dense(64, name="up")(x) + down(x))


def test_scales_have_the_names_of_modules_and_of_calls() -> None:
    model, x = Perceptron(), normal(32, 64)
    params = model.init(jax.random.key(0), x)
    table = casting.DEFAULT.module("up", recipes.MXFP8)
    for edits, names in ((None, {"down", "down 2", "up"}), (table, {"down", "down 2"})):
        region = autocast(jax.jit(model.apply), casting=edits, **REGION)
        found = recipe_state(region, params, x).products
        assert {name.removeprefix("Perceptron.") for name in found} == names


@pytest.mark.parametrize("compiles", [False, True])
def test_loss_scaling_leaves_scales_alone(compiles: bool) -> None:
    region = autocast(loss, **REGION)
    first = recipe_state(region, WEIGHTS, INPUTS[0])
    optimizer = loss_scaled(optax.sgd(0.1), max_norm=1e-3)
    state = optimizer.init(WEIGHTS)
    scale = float(state.policy_state.scale)
    run = value_and_grad(region, argnums=(0, 1))
    run = jax.jit(run) if compiles else run
    _, (scales, gradients), after = run(first, state, WEIGHTS, INPUTS[0])
    update, _ = optimizer.update(gradients, after, WEIGHTS)
    assert optax.tree.norm(update) <= 1.001e-4
    plain, pull_back = jax.vjp(region, first, WEIGHTS, INPUTS[0])
    expected, scaled, _ = pull_back(plain * 0 + scale)
    assert scale > 1
    assert alike(scales, expected)
    assert alike(gradients, jax.tree.map(lambda each: each / scale, scaled))
    # They are not among what has to be finite.
    broken = jax.tree.map(lambda each: each.at[5].set(jnp.inf), first)
    _, (scales, _), after = run(broken, state, WEIGHTS, INPUTS[0])
    assert bool(after.finite)
    assert all(state[6] == jnp.inf for states in scales.products.values() for state in states[:3])


def test_scales_that_were_added_up_give_nan() -> None:
    region = autocast(loss, **REGION)
    first = recipe_state(region, WEIGHTS, INPUTS[0])

    def scanned(scales: RecipeScales, xs: Array) -> Array:
        return jax.lax.scan(lambda total, x: (total + region(scales, WEIGHTS, x), None), 0.0, xs)[0]

    scales = jax.grad(scanned)(first, jnp.stack(INPUTS[:2]))
    assert jnp.isnan(region(scales, WEIGHTS, INPUTS[0]))


@pytest.mark.parametrize("is_mapped", [False, True])
def test_magnitudes_are_those_of_all_devices(is_mapped: bool) -> None:
    region, state = autocast(loss, **REGION), loss_scaled(optax.sgd(0.1)).init(WEIGHTS)
    first = recipe_state(region, WEIGHTS, INPUTS[0])

    def run(x: Array, **over: str) -> RecipeScales:
        scales: RecipeScales = value_and_grad(region, (0, 1), **over)(first, state, WEIGHTS, x)[1][0]
        return scales

    x = INPUTS[0].at[20].multiply(10.0)
    expected = run(x)
    if is_mapped:
        found = jax.jit(shard_map(lambda x: run(x, axis_name="data"), TWO, P("data"), P()))(x)
    else:
        found = jax.jit(run)(jax.device_put(x, NamedSharding(TWO, P("data"))))
    assert alike(found, expected)


def scanned(w: Array, x: Array) -> Array:
    return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0].sum()


def looped(w: Array, x: Array) -> Array:
    return jax.lax.fori_loop(0, 3, lambda _, x: x @ w, x).sum()


def branched(w: Array, x: Array) -> Array:
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x).sum()


def mapped(w: Array, x: Array) -> Array:
    return jax.vmap(lambda w, x: x @ w)(w, jnp.stack([x] * 3)).sum()


@jax.custom_jvp
def own(w: Array, x: Array) -> Array:
    return x @ w


own.defjvp(lambda primals, tangents: (own(*primals), tangents[1]))


@pytest.mark.parametrize("fn", [scanned, looped, branched, mapped, own])
def test_products_whose_calls_are_not_known_are_refused(fn: Any) -> None:
    w = normal(*([3] if fn in (scanned, mapped) else []), 64, 64)
    with pytest.raises(UsageError, match=r"test_recipes_delayed.py.*FLOAT8_CURRENT"):
        recipe_state(autocast(lambda w, x: fn(w, x), **REGION), w, normal(32, 64))


def test_errors_say_what_to_write() -> None:
    region, x = autocast(loss, **REGION), INPUTS[0]
    scales = recipe_state(region, WEIGHTS, x)
    with pytest.raises(UsageError, match=r"argnums=\(0, 1\)\)\(scales, params, batch\)"):
        region(WEIGHTS, x)
    with pytest.raises(UsageError, match=r"scales = recipe_state\(region, params, batch\)"):
        region(RecipeScales({}), WEIGHTS, x)
    with pytest.raises(UsageError, match=r"other sizes or names: .*Write scales = recipe_state"):
        region(RecipeScales({"layer": scales.products[next(iter(scales.products))]}), WEIGHTS, x)
    with pytest.raises(
        UsageError, match=r"Write region = autocast\(loss_fn, recipe=recipe, weights=\(0,\)\)"
    ):
        recipe_state(lambda scales, x: x, x)
    with pytest.raises(UsageError, match="two calls"):
        jax.grad(lambda scales: region(scales, WEIGHTS, x) + region(scales, WEIGHTS, x))(scales)
    with pytest.raises(UsageError, match="Write vmap inside of the region"):
        jax.vmap(jax.grad(region), (None, None, 0))(scales, WEIGHTS, x[None])
    with pytest.raises(UsageError, match=r"argnums=\(0, 1\)"):
        loss_scaled(optax.sgd(0.1)).init((scales, WEIGHTS))
    run = value_and_grad(region, argnums=(0, 1), axis_name="data")
    state = loss_scaled(optax.sgd(0.1)).init(WEIGHTS)
    mapped = shard_map(lambda x: run(scales, state, WEIGHTS, x)[0], TWO, P("data"), P(), checked=False)
    with pytest.raises(UsageError, match=r"Write jax.shard_map with check_vma=True"):
        mapped(x)
