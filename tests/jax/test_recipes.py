"""Regions with a recipe in JAX: what is quantized, and that it is what PyTorch computes, bit for bit."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from preamp import casting, recipes
from preamp.errors import CastingError, UsageError
from preamp.jax import autocast, quantize
from preamp.recipes import Recipe

from .trainings import shard_map

CURRENT = {
    name: value for name, value in vars(recipes).items() if isinstance(value, Recipe) and not value.delayed
}
QUANTS = {quant for recipe in CURRENT.values() for quant in recipe.quants if quant}
REGION: Any = {"recipe": recipes.MXFP8, "weights": (0,)}


def normal(*shape: int, seed: int = 0) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


def inputs() -> dict[str, np.ndarray[Any, Any]]:
    """Return matrices by what they try. XLA has no subnormal numbers on CPUs."""
    random = np.random.default_rng(0)
    numbers = random.standard_normal((128, 384)).astype(np.float32)
    found = {f"times 2**{scale}": numbers * np.float32(2.0**scale) for scale in range(-90, 111, 40)}
    found["spread"] = numbers * np.exp2(4 * random.standard_normal(numbers.shape)).astype(np.float32)
    found["zero blocks"] = np.where(np.arange(384) < 160, 0, numbers).astype(np.float32)
    found["ties"] = random.integers(-96, 96, numbers.shape).astype(np.float32) / 4
    found["NaN"] = np.where(random.random(numbers.shape) < 1e-4, np.nan, numbers).astype(np.float32)
    return found


@pytest.mark.parametrize("quant", sorted(QUANTS, key=repr), ids=repr)
def test_quantizing_is_that_of_pytorch(quant: recipes.Quant) -> None:
    torch = pytest.importorskip("torch")
    from preamp.torch import quantize as torch_quantize

    @jax.jit
    def run(x: Array) -> Array:
        return quantize(x, quant, axis=0, draw=3)

    for name, x in inputs().items():
        found = np.asarray(run(jnp.asarray(x)))
        expected = torch_quantize(torch.from_numpy(x), quant, axis=0, draw=3).numpy()
        assert np.array_equal(found, expected, equal_nan=True), name


def product(a: Array, b: Array, quants: Any) -> Array:
    """Return `a @ b.T` as a recipe computes it."""
    low = [quantize(x, quant) for x, quant in zip((a, b), quants, strict=True)] if quants else [a, b]
    wide = [x.astype(jnp.float32) for x in low]
    return jnp.matmul(wide[0], wide[1].T, precision="highest").astype(jnp.bfloat16)


@pytest.mark.parametrize("name", CURRENT)
def test_each_product_is_that_of_its_quantized_operands(name: str) -> None:
    recipe, x, w = CURRENT[name], normal(256, 128), normal(128, 256, seed=1)
    region = autocast(jnp.matmul, recipe=recipe, weights=(1,))
    y, pull_back = jax.vjp(jax.jit(region), x, w)
    g = normal(256, 256, seed=2).astype(jnp.bfloat16)
    dx, dw = pull_back(g)
    low_x, low_w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    for found, expected in (
        (y, product(low_x, low_w.T, recipe.fprop)),
        (dx, product(g, low_w, recipe.dgrad)),
        (dw.T, product(g.T, low_x.T, recipe.wgrad)),
    ):
        assert np.array_equal(found, expected)


def quantized_products(fn: Any, *args: Any) -> int:
    """Return how many products of a program are quantized."""
    return str(jax.make_jaxpr(fn)(*args)).count("quants=Quants")


def scanned(w: Array, x: Array) -> Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()


def mapped(w: Array, x: Array) -> Array:
    return jax.vmap(lambda w, x: x @ w, (None, 0))(w, x.reshape(4, 32, 128)).sum()


def jitted(w: Array, x: Array) -> Array:
    return jax.jit(lambda w, x: x @ jax.jit(jnp.transpose)(w))(w, x).sum()


def recomputed(w: Array, x: Array) -> Array:
    return jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x).sum()


@pytest.mark.parametrize(
    ("fn", "w", "count"),
    [
        (scanned, normal(3, 128, 128), 3),
        (mapped, normal(128, 128), 3),
        (jitted, normal(128, 128), 3),
        (recomputed, normal(128, 128), 4),
    ],
)
def test_weights_are_followed_into_programs(fn: Any, w: Array, count: int) -> None:
    gradient = jax.grad(autocast(fn, **REGION), argnums=(0, 1))
    assert quantized_products(gradient, w, normal(128, 128)) == count


@pytest.mark.parametrize("name", ["FLOAT8_CURRENT", "MXFP8", "NVFP4"])
def test_each_matrix_of_a_batch_is_quantized_by_itself(name: str) -> None:
    """As in experts, or in an ensemble."""

    def inside(w: Array, x: Array) -> Array:
        result: Array = jnp.einsum("eij,eti->etj", w, x)
        return result

    w, x = normal(3, 128, 64), normal(3, 32, 128, seed=1) * jnp.array([1.0, 30.0, 1e-3])[:, None, None]
    g = normal(3, 32, 64, seed=2).astype(jnp.bfloat16)
    single, batch = (autocast(fn, recipe=CURRENT[name], weights=(0,)) for fn in (lambda w, x: x @ w, inside))

    def run(region: Any, *args: Array) -> list[Array]:
        y, pull_back = jax.vjp(region, *args[:2])
        return [y, *pull_back(args[2])]

    each_alone = [run(single, *args) for args in zip(w, x, g, strict=True)]
    expected = [jnp.stack(each) for each in zip(*each_alone, strict=True)]
    mapped = jax.vmap(lambda *args: run(single, *args))(w, x, g)
    for found in (run(batch, w, x, g), run(jax.vmap(single), w, x, g), mapped):
        for a, b in zip(found, expected, strict=True):
            assert np.array_equal(a, b)


def test_weights_are_followed_over_devices() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    region = autocast(lambda w, x: x @ jax.lax.all_gather(w, "data", tiled=True), **REGION)
    mapped = shard_map(region, mesh, (P("data"), P("data")), P("data"))
    w, x = normal(128, 64), normal(64, 128, seed=1)
    assert np.array_equal(jax.jit(mapped)(w, x), autocast(lambda w, x: x @ w, **REGION)(w, x))
    assert quantized_products(mapped, w, x) == 1


def attention(w: Array, x: Array) -> Array:
    rows = x @ w
    return jax.nn.softmax(rows @ rows.T) @ rows


def test_what_is_no_product_with_a_weight_stays_high() -> None:
    assert quantized_products(autocast(attention, **REGION), normal(128, 128), normal(64, 128)) == 1


def test_sizes_that_the_owner_refuses_stay_high() -> None:
    region = autocast(lambda w, x: x @ w, **REGION)
    assert quantized_products(region, normal(128, 10), normal(32, 128)) == 0


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(128, name="down")(nn.gelu(nn.Dense(256, name="up")(x)))


def test_modules_may_stay_high_or_have_another_recipe() -> None:
    model, x = Perceptron(), normal(64, 128)
    params = model.init(jax.random.key(0), x)

    def run(table: Any, recipe: Recipe) -> Array:
        result: Array = autocast(model.apply, casting=table, recipe=recipe, weights=(0,))(params, x)
        return result

    table = casting.DEFAULT.module("up", "high").module("down", "high")
    high = autocast(model.apply, emulate=True)(params, x)
    assert np.array_equal(run(table, recipes.NVFP4), high)
    table = casting.DEFAULT.module("up", recipes.MXFP8).module("down", recipes.MXFP8)
    assert np.array_equal(run(table, recipes.NVFP4), run(None, recipes.MXFP8))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recipe": "MXFP8", "weights": (0,)}, "recipe=preamp.recipes.MXFP8"),
        ({"recipe": recipes.MXFP8}, r"weights=\(0,\)"),
        ({"recipe": recipes.MXFP8, "weights": (0,), "dtype": "float16"}, "high='float16'"),
        ({"dtype": "float8_e4m3fn"}, "FLOAT8_CURRENT"),
    ],
)
def test_errors_say_what_to_write(settings: Any, said: str) -> None:
    with pytest.raises(CastingError, match=said):
        autocast(jnp.matmul, **settings)


def test_a_region_around_a_gradient_is_refused() -> None:
    gradient = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())
    with pytest.raises(UsageError, match=r"jax.grad\(autocast"):
        autocast(gradient, **REGION)(normal(128, 128), normal(128, 128))


def test_weights_that_are_no_arguments_are_refused() -> None:
    def loss(w: Array, x: Array) -> Array:
        return jnp.sum(x @ w)

    w = normal(32, 32)
    with pytest.raises(UsageError, match="no argument 5"):
        autocast(loss, recipe=recipes.MXFP8, weights=(5,))(w, w)
    with pytest.raises(UsageError, match="no argument 0"):
        autocast(loss, recipe=recipes.MXFP8, weights=(0,))(w=w, x=w)
    with pytest.raises(CastingError, match=r"Write recipe=preamp\.recipes\.MXFP8, too"):
        autocast(loss, weights=(0,))
    with pytest.raises(CastingError, match="the region has no recipe"):
        autocast(loss, casting=casting.DEFAULT.module("0", "high"))(w, w)
