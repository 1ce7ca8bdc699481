"""`blame` in a recipe: a row for each product, which predicts what happens, as in PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from preamp import casting, recipes
from preamp.blaming.blame import Blame, BlameRow
from preamp.errors import CastingError, UsageError
from preamp.jax import autocast, blame, tune
from preamp.recipes import Recipe

PRODUCTS = ("fprop", "dgrad", "wgrad")


def normal(*shape: int, seed: int = 0) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


X = normal(64, 64)
WEIGHTS = [normal(64, 128, seed=1) / 8, normal(128, 128, seed=2) / 8, normal(128, 32, seed=3) / 8]


def loss(weights: list[Array], x: Array, gain: Array | float = 1.0) -> Array:
    """Return the loss of a network whose layers have the names of their places.

    Args:
        weights: of the layers.
        x: the input.
        gain: of the input of the last layer.
    """
    for number, w in enumerate(weights):
        with jax.named_scope(str(number)):
            x = (x if not number else jnp.tanh(x) if number == 1 else jnp.tanh(x) * gain) @ w
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def products(found: Blame) -> dict[tuple[str, str], BlameRow]:
    return {(row.module, row.product): row for row in found.rows if row.product}


@pytest.mark.parametrize(
    ("recipe", "formats"),
    [
        (recipes.MXFP8, ["e4m3, e4m3"] * 3),
        (recipes.FLOAT8_DELAYED, ["e4m3, e4m3", "e5m2, e4m3", "e5m2, e4m3"]),
        (recipes.NVFP4.without("dgrad"), ["e2m1, e2m1", "bfloat16", "e2m1, e2m1"]),
    ],
    ids=lambda it: getattr(it, "name", None),
)
def test_each_product_of_each_layer_has_a_row(recipe: Recipe, formats: list[str]) -> None:
    found = blame(loss, WEIGHTS, X, recipe=recipe)
    rows = products(found)
    # The first layer has no dgrad.
    assert rows.keys() == {(layer, product) for layer in "012" for product in PRODUCTS} - {("0", "dgrad")}
    for (_, product), row in rows.items():
        assert row.runs == formats[PRODUCTS.index(product)]
        assert row.direction == ("forward" if product == "fprop" else "backward")
        is_low = row.runs != "bfloat16"
        assert 0 < row.high_effect < (0.2 if is_low else 2) * row.effect
    assert found.recipe == recipe.name
    assert found.roundoff == max(
        2.0 ** -(1 + recipes.values.FORMATS[it[:4]].mantissa) for it in formats if it[0] == "e"
    )
    assert any("scales are those of this step" in note for note in found.notes) is recipe.delayed
    assert all(row.high_effect < 1e-2 for row in found.rows)


@pytest.mark.parametrize(
    ("recipe", "factor"),
    [(recipes.MXFP8, 2.0**18), (recipes.NVFP4, 64.0)],
    ids=lambda it: getattr(it, "name", None),
)
def test_outliers_in_the_input_of_a_layer_accuse_its_fprop(recipe: Recipe, factor: float) -> None:
    gain = jnp.where(jnp.arange(128) % 32 == 3, factor, 1.0)
    planted = [*WEIGHTS[:2], WEIGHTS[2] / gain[:, None]]
    assert loss(planted, X, gain) == loss(WEIGHTS, X)  # the same function, in float32 bit for bit
    found, without = (blame(loss, *args, recipe=recipe) for args in ((planted, X, gain), (WEIGHTS, X)))
    first = found.rows[0]
    assert (first.module, first.product) == ("2", "fprop")
    assert first.effect > 2 * products(without)["2", "fprop"].effect
    assert without.rows[0].module != "2"


@pytest.mark.parametrize("recipe", [recipes.MXFP8, recipes.NVFP4_PLAIN], ids=lambda it: it.name)
def test_the_predicted_error_of_the_gradients_is_that_which_happens(recipe: Recipe) -> None:
    region = autocast(loss, recipe=recipe, weights=(0,))
    low, exact = (jax.grad(fn)(WEIGHTS, X) for fn in (region, loss))
    sizes = [float(jnp.sqrt(jnp.mean(w * w))) for w in WEIGHTS]
    error, norm = (
        np.hypot.reduce([size * np.linalg.norm(each) for size, each in zip(sizes, arrays, strict=True)])
        for arrays in ([a - b for a, b in zip(low, exact, strict=True)], exact)
    )
    found = blame(loss, WEIGHTS, X, recipe=recipe)
    assert 0.5 < found.gradient_error / (error / norm) < 2
    assert np.isclose(found.loss, region(WEIGHTS, X), rtol=1e-6)


def test_rows_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from preamp.torch import blame as torch_blame

    model = torch.nn.Sequential()
    for number, w in enumerate(WEIGHTS):
        layer = torch.nn.Linear(*w.shape, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(np.array(w)).T)
        model.append(layer if not number else torch.nn.Sequential(torch.nn.Tanh(), layer))
    x = torch.from_numpy(np.array(X))
    theirs = torch_blame(lambda: model(x).float().square().mean(), model=model, recipe=recipes.MXFP8)
    ours = products(blame(loss, WEIGHTS, X, recipe=recipes.MXFP8))
    others = {(module[:1], product): row for (module, product), row in products(theirs).items()}
    assert ours.keys() == others.keys()
    for key, row in ours.items():
        assert row.runs == others[key].runs
        assert np.isclose(row.local_error, others[key].local_error, rtol=0.05)
        assert np.isclose(row.effect, others[key].effect, rtol=0.2)


def test_modules_have_recipes_of_their_own_and_turns_of_a_loop_one_row() -> None:
    def scanned(params: dict[str, Array], x: Array) -> Array:
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
        with jax.named_scope("head"):
            return jnp.mean(jnp.square((x @ params["head"]).astype(jnp.float32)))

    params = {"layers": normal(3, 64, 64) / 8, "head": normal(64, 32) / 8}
    table = casting.DEFAULT.module("head", recipes.FLOAT8_CURRENT)
    found = products(blame(scanned, params, X, recipe=recipes.NVFP4, casting=table))
    runs = {key: (row.runs, row.calls) for key, row in found.items()}
    e5m2 = "e5m2, e4m3", 1
    head = {("head", "fprop"): ("e4m3, e4m3", 1), ("head", "dgrad"): e5m2, ("head", "wgrad"): e5m2}
    assert runs == head | {("-", product): ("e2m1, e2m1", 3) for product in PRODUCTS}
    assert all(0 < row.high_effect < 0.2 * row.effect for row in found.values())


def test_tune_keeps_the_product_of_a_module_high_and_qwix_is_told() -> None:
    gain = jnp.where(jnp.arange(128) % 4 == 3, 2.0**10, 1.0)
    planted = [*WEIGHTS[:2], WEIGHTS[2] / gain[:, None]]
    before = blame(loss, planted, X, gain, recipe=recipes.NVFP4)
    found = tune(loss, planted, X, gain, recipe=recipes.NVFP4, target=0.7 * before.gradient_error)
    assert found.solved
    assert str(found.casting) == "casting.DEFAULT.module('2', replace(recipes.NVFP4, fprop=None))"
    sound = blame(loss, WEIGHTS, X, recipe=recipes.MXFP8_QWIX).gradient_error
    whole = tune(loss, WEIGHTS, X, recipe=recipes.MXFP8_QWIX, target=0.8 * sound, whole_layers=True)
    assert set(whole.casting.modules.values()) == {"high"}
    assert whole.before.layers == {"0": (128, 64), "1": (128, 128), "2": (32, 128)}
    assert "qwix.QtRule" in whole.export("qwix")


def test_errors_say_what_to_write() -> None:
    with pytest.raises(CastingError, match=r"recipe=preamp\.recipes\.MXFP8"):
        blame(loss, WEIGHTS, X, recipe="MXFP8")  # type: ignore[arg-type]
    table = casting.DEFAULT.module("1", recipes.FLOAT8_DELAYED)
    with pytest.raises(UsageError, match=r"1 has a recipe .* Write recipe\.current in the table"):
        blame(loss, WEIGHTS, X, recipe=recipes.MXFP8, casting=table)
