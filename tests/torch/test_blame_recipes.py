"""blame and tune with a recipe: what each product of each layer loses, and what to keep high."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from preamp import casting, recipes
from preamp.autocasting.tables import Casting
from preamp.errors import CastingError, UsageError
from preamp.recipes import Recipe
from preamp.recipes.values import CONSTANTS, PRODUCTS
from preamp.torch import autocast, blame, recipe_state, tune


class Network(nn.Module):
    """Two layers and a head, with a gain between the layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 128)
        self.gain = nn.Parameter(torch.ones(256))
        self.x, self.y = torch.randn(128, 128), torch.randint(128, (128,))

    def forward(self) -> Tensor:
        x = self.head(torch.tanh(self.down(torch.relu(self.up(self.x)) * self.gain)))
        return nn.functional.cross_entropy(x, self.y)


def with_outliers() -> Network:
    """Return a network in which some inputs of `down` are much larger, and their weights smaller."""
    network = Network()
    with torch.no_grad():
        network.gain[::4] *= 1e3
        network.down.weight[:, ::4] /= 1e3
    return network


def error(network: Network, recipe: Recipe, table: Casting | None = None) -> float:
    """Return the relative error of the gradients, each weighted by the size of its weight."""
    found = []
    for region in ({"enabled": False}, {"recipe": recipe, "casting": table}):
        with autocast("cpu", model=network, **region):
            loss = network()
        pairs = zip(network.parameters(), torch.autograd.grad(loss, list(network.parameters())), strict=True)
        found.append(torch.cat([(weight.detach().abs() * gradient).flatten() for weight, gradient in pairs]))
    return float((found[1] - found[0]).norm() / found[0].norm())


@pytest.mark.parametrize("name", ["FLOAT8_CURRENT", "FLOAT8_ROWWISE_GW_HP", "MXFP8", "NVFP4"])
def test_each_product_of_each_layer_has_a_row(name: str) -> None:
    recipe, network = CONSTANTS[name], Network()
    found = blame(network, model=network, recipe=recipe)
    rows = {(row.module, row.product): row for row in found.rows if row.product}
    assert rows.keys() == {(layer, product) for layer in ("up", "down", "head") for product in PRODUCTS} - {
        ("up", "dgrad")  # nobody wants the gradient of the data
    }
    for (_, product), row in rows.items():
        pair = getattr(recipe, product)
        assert row.runs == (", ".join(quant.format for quant in pair) if pair else "bfloat16")
        assert row.direction == ("forward" if product == "fprop" else "backward")
        assert 0 < row.high_effect < row.effect if pair else row.high_effect == pytest.approx(row.effect, 0.5)
    assert found.recipe == name
    assert not found.guilty
    assert {"pass", "in bf16"} <= found.table()[0].keys()
    assert all(len(line) <= 80 for line in str(found).splitlines())
    effects = [max(row.effect, abs(row.loss_effect)) for row in found.rows]
    assert effects == sorted(effects, reverse=True)


@pytest.mark.parametrize("name", ["FLOAT8_CURRENT", "FLOAT8_BLOCK", "MXFP8", "NVFP4", "NVFP4_PLAIN"])
def test_the_predicted_error_is_that_of_a_step(name: str) -> None:
    network = Network()
    predicted = blame(network, model=network, recipe=CONSTANTS[name]).gradient_error
    assert predicted == pytest.approx(error(network, CONSTANTS[name]), rel=0.6)


def test_a_layer_with_outliers_loses_most_and_a_parameter_is_named() -> None:
    network = with_outliers()
    found = blame(network, model=network, recipe=recipes.NVFP4)
    worst = found.rows[0]
    assert (worst.module, worst.product) == ("down", "fprop")
    assert worst.guilty
    assert worst.parameter
    # The measured error of one row alone: all other products are high.
    others = casting.DEFAULT.module("up", "high").module("head", "high")
    alone = others.module("down", recipes.NVFP4.without("dgrad", "wgrad"))
    assert worst.effect == pytest.approx(error(network, recipes.NVFP4, alone), rel=0.6)
    assert f"in fprop: the gradient of {worst.parameter} changes" in found.summary()


def test_tune_keeps_the_product_with_outliers_high() -> None:
    network = with_outliers()
    found = tune(network, model=network, recipe=recipes.NVFP4)
    assert found.solved
    assert str(found.casting) == "casting.DEFAULT.module('down', replace(recipes.NVFP4, fprop=None))"
    assert found.lines()[0].startswith("fprop high: down (")
    assert error(network, recipes.NVFP4, found.casting) < 0.5 < error(network, recipes.NVFP4)
    assert found.low_share == pytest.approx(1 - 256 / (128 + 256 + 256 + 128) / 2 / 3 * 2, abs=0.2)
    with pytest.raises(UsageError, match="fprop of 'down'"):
        found.export("te")
    whole = tune(network, model=network, recipe=recipes.NVFP4, whole_layers=True)
    assert whole.casting == casting.DEFAULT.module("down", "high")
    assert whole.before.layers == {"up": (256, 128), "down": (128, 256), "head": (128, 128)}
    assert "'down'," in whole.export("te")


def test_products_of_a_layer_are_one_rule() -> None:
    network = Network()
    found = tune(network, model=network, recipe=recipes.MXFP8, target=1e-2)
    names = [each.name for each in found.kept]
    assert len(names) == len(set(names)) == len(found.casting.modules)
    assert found.solved
    assert error(network, recipes.MXFP8, found.casting) < 2e-2 < error(network, recipes.MXFP8)


def test_a_table_with_recipes_is_read_as_it_was_written() -> None:
    table = casting.DEFAULT.module("head", recipes.MXFP8.without("wgrad")).module("up", recipes.NVFP4)
    written = table.to_dict()
    assert [edit["rule"] for edit in written["edits"]] == ["MXFP8 without wgrad", "NVFP4"]
    assert Casting.from_dict(written) == table
    own = casting.DEFAULT.module("head", replace(recipes.MXFP8, multiple=64))
    with pytest.raises(CastingError, match="The recipe of 'head' is not one of"):
        own.to_dict()
    with pytest.raises(CastingError, match="'MXFP9' is not a recipe"):
        Casting.from_dict({"edits": [{"modules": "head", "rule": "MXFP9"}]})


def test_a_delayed_recipe_is_blamed_with_the_scales_that_it_has_and_keeps_them() -> None:
    network = Network()
    first = blame(network, model=network, recipe=recipes.FLOAT8_DELAYED)
    assert first.notes == ("No step has run in this recipe, so the scales are those of this step.",)
    assert not recipe_state(network)
    assert not first.guilty
    for _ in range(2):
        with autocast("cpu", recipe=recipes.FLOAT8_DELAYED, model=network):
            network().backward()
    before = copy.deepcopy(recipe_state(network))
    with torch.no_grad():  # the inputs of `down` no longer fit
        network.gain *= 1e3
        network.down.weight /= 1e3
    found = blame(network, model=network, recipe=recipes.FLOAT8_DELAYED)
    assert (found.rows[0].module, found.rows[0].guilty) == ("down", True)
    assert not found.notes
    for path, scales in recipe_state(network).items():
        for name, values in scales.items():
            assert all(map(torch.equal, values, before[path][name]))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda network: blame(network, recipe=recipes.FLOAT8_DELAYED), "model="),
        (lambda network: tune(network, recipe=recipes.MXFP8), "model=model"),
        (lambda network: blame(network, model=network, recipe="MXFP8"), "is not a recipe"),
        (lambda network: blame(network, dtype=torch.float16, recipe=recipes.MXFP8), "high='float16'"),
        (lambda network: tune(network, model=network).export("te"), "Only a recipe can be exported"),
    ],
)
def test_what_does_not_go_with_a_recipe_is_refused(call: Callable[[Network], Any], said: str) -> None:
    with pytest.raises((CastingError, UsageError), match=said):
        call(Network())


def test_layers_that_do_not_fit_stay_high_in_what_is_exported() -> None:
    model = nn.Sequential(nn.Linear(20, 64), nn.Linear(64, 64))
    x = torch.randn(32, 20)
    found = tune(lambda: model(x).square().mean(), model=model, recipe=recipes.MXFP8)
    assert "# Kept high, because their sizes are not multiples of 32: 0 (64, 20)." in found.export("te")
    assert "fqns=['1']" in found.export("torchtitan")
    assert found.low_share == 1


def test_what_is_no_linear_module_is_named_and_not_exported() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4), "up": nn.Linear(64, 64)})
    x = torch.randn(8, 4, 64)

    def loss() -> Tensor:
        return model["up"](model["attention"](x, x, x)[0]).square().mean()

    found = tune(loss, model=model, recipe=recipes.MXFP8)
    assert any("that convert only nn.Linear: attention." in note for note in found.before.notes)
    assert list(found.before.layers) == ["up"]


def test_a_step_in_which_nothing_is_quantized_is_no_success() -> None:
    model, x = nn.Linear(20, 7), torch.randn(3, 20)
    found = blame(lambda: model(x).square().mean(), model=model, recipe=recipes.MXFP8)
    assert found.summary().startswith("No layer is quantized")
    with pytest.raises(UsageError, match="No layer is quantized"):
        tune(lambda: model(x).square().mean(), model=model, recipe=recipes.MXFP8)
