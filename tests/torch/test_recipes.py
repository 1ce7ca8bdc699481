"""Regions with a recipe: three products of quantized operands, in eager and in compiled code."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from preamp import casting, recipes
from preamp.errors import CastingError, UsageError
from preamp.recipes import Quant, Recipe
from preamp.torch import autocast, load_recipe_state, quantize, recipe_state

from .regions import COMPILED, run_in

ALL = {name: value for name, value in vars(recipes).items() if isinstance(value, Recipe)}
CURRENT = {name: recipe for name, recipe in ALL.items() if not recipe.delayed}
FUNCTIONS = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of PyTorch
OWNERS = [recipes.FLOAT8_TENSORWISE, recipes.FLOAT8_ROWWISE, recipes.FLOAT8_ROWWISE_GW_HP]


def layer(seed: int = 0, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(128, 256, bias=bias)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))


def gradients(network: nn.Module, x: Tensor, **region: Any) -> list[Tensor]:
    """Return the result of a model in a region, its gradients, and the cotangent."""
    x = x.clone().requires_grad_()
    with autocast("cpu", **region):
        y = network(x)
    torch.manual_seed(1)
    cotangent = torch.randn(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *network.parameters()], cotangent), cotangent]


def product(a: Tensor, b: Tensor, quants: tuple[Quant, Quant] | None) -> Tensor:
    """Return `a @ b.T` as a recipe computes it."""
    low = [quantize(x, quant) for x, quant in zip((a, b), quants, strict=True)] if quants else [a, b]
    return (low[0].float() @ low[1].float().T).bfloat16()


@pytest.mark.parametrize("name", CURRENT)
def test_each_product_is_that_of_its_quantized_operands(name: str) -> None:
    recipe, model, x = CURRENT[name], layer(), torch.randn(256, 128)
    y, dx, dw, db, g = gradients(model, x, recipe=recipe)
    x, w = x.bfloat16(), model.weight.detach().bfloat16()
    assert torch.equal(y, product(x, w, recipe.fprop) + model.bias.bfloat16())
    assert torch.equal(dx, product(g, w.T, recipe.dgrad).float())
    assert torch.equal(dw, product(g.T, x.T, recipe.wgrad).float())
    assert torch.equal(db, g.sum(0).float())


@pytest.mark.parametrize("recipe", OWNERS)
def test_a_layer_is_that_of_torchao(recipe: Recipe) -> None:
    float8 = pytest.importorskip("torchao.float8")
    names = dict(zip(OWNERS, ("tensorwise", "rowwise", "rowwise_with_gw_hp"), strict=True))
    settings = replace(float8.Float8LinearConfig.from_recipe_name(names[recipe]), emulate=True)
    model, x = layer(bias=False), torch.randn(256, 128)
    theirs = float8.convert_to_float8_training(
        nn.Sequential(copy.deepcopy(model)).bfloat16(), config=settings
    )
    ours = gradients(model.bfloat16(), x.bfloat16(), recipe=recipe)
    others = gradients(theirs, x.bfloat16(), enabled=False)
    for a, b in zip(ours[:2], others[:2], strict=True):
        assert torch.equal(a, b)
    # A product that stays high is summed in another order.
    assert torch.allclose(ours[2], others[2], rtol=0 if recipe.wgrad else 2**-7)


def test_what_is_no_product_with_a_weight_stays_high() -> None:
    model = nn.Sequential(layer(), nn.LayerNorm(256), nn.Unflatten(1, (16, 16)))
    x = torch.randn(128, 128)
    with autocast("cpu", recipe=recipes.MXFP8):
        y = model(x)
        scores = y @ y.mT
    low = y.bfloat16()
    assert scores.dtype is torch.bfloat16
    assert torch.equal(scores, (low.float() @ low.float().mT).bfloat16())


def test_sizes_that_the_owner_refuses_stay_high() -> None:
    model, x = nn.Linear(128, 10), torch.randn(32, 128)
    for recipe in CURRENT.values():
        for a, b in zip(
            gradients(model, x, recipe=recipe),
            gradients(model, x, dtype=torch.bfloat16, emulate=True),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_modules_may_stay_high_or_have_another_recipe() -> None:
    model, x = perceptron(), torch.randn(64, 64)
    region: dict[str, Any] = {"recipe": recipes.NVFP4, "model": model}
    high = gradients(model, x, dtype=torch.bfloat16, emulate=True)
    table = casting.DEFAULT.module("0", "high").module("2", "high")
    for a, b in zip(gradients(model, x, casting=table, **region), high, strict=True):
        assert torch.equal(a, b)
    table = casting.DEFAULT.module("0", recipes.MXFP8).module("2", recipes.MXFP8)
    assert repr(table) == "casting.DEFAULT.module('0', recipes.MXFP8).module('2', recipes.MXFP8)"
    for a, b in zip(
        gradients(model, x, casting=table, **region), gradients(model, x, recipe=recipes.MXFP8), strict=True
    ):
        assert torch.equal(a, b)


@FUNCTIONS
@pytest.mark.parametrize(
    ("name", "way"),
    sorted({*((name, COMPILED) for name in ALL), ("FLOAT8_CURRENT", "around"), ("NVFP4", "around")}),
)
def test_compiled_code_computes_the_same(name: str, way: str) -> None:
    model, recipe = perceptron(), ALL[name]
    ways = [
        run_in(each, lambda: autocast("cpu", recipe=recipe, model=model), model) for each in ("eager", way)
    ]
    for step in range(3):
        x = torch.randn(64, 64) * 2.0**step
        found = [torch.autograd.grad(run(x).square().sum(), model.parameters()) for run in ways]
        if not recipe.delayed:  # whose scales went on
            for a, b in zip(*found, strict=True):
                assert torch.equal(a, b)


@FUNCTIONS
@pytest.mark.parametrize("way", sorted({COMPILED, "around"}))
def test_compiled_code_changes_the_scales_as_eager_code_does(way: str) -> None:
    def trained(way: str) -> list[float]:
        model, losses = perceptron(), []

        def run(x: Tensor) -> Tensor:
            y: Tensor = model(x)
            return y.float().square().mean()

        step = run_in(way, lambda: autocast("cpu", recipe=recipes.FLOAT8_DELAYED, model=model), run)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(2)
        for number in range(8):
            loss = step(torch.randn(32, 64) * 4.0 ** (number % 3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert trained(way) == trained("eager")


def test_rounding_at_random_draws_nothing_and_is_right_on_average() -> None:
    quant, x = Quant("e2m1", (1, 16), "e4m3", stochastic=True), torch.randn(32, 64).bfloat16().float()
    before = torch.get_rng_state()
    draws = torch.stack([quantize(x, quant, draw=draw) for draw in range(400)])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(quantize(x, quant, draw=7), draws[7])
    step = draws.amax(0) - draws.amin(0)
    bias = (draws.mean(0) - x)[step > 0] / step[step > 0]
    assert bias.abs().mean() < 0.03
    assert bias.mean().abs() < 0.004  # 1 / 512 of 8 random bits
    assert not torch.equal(draws[0], draws[1])


class TransformerEngine:
    """The scale of one operand by Transformer Engine's rule, in float32."""

    def __init__(
        self, largest: float, *, history: int = 1024, algorithm: str = "max", margin: int = 0
    ) -> None:
        self.amaxes, self.scale = np.zeros(history, np.float32), np.float32(1)
        self.largest, self.algorithm = np.float32(largest * 2.0**-margin), algorithm

    def update(self, amax: float) -> None:
        self.amaxes = np.concatenate([[np.float32(amax)], self.amaxes[:-1]])
        counts = self.amaxes[0] if self.algorithm == "most_recent" else np.fmax.reduce(self.amaxes)
        if np.isfinite(counts) and counts > 0:
            self.scale = self.largest / counts


@pytest.mark.parametrize(
    "options", [{}, {"history": 16}, {"history": 4, "algorithm": "most_recent", "margin": 2}], ids=str
)
def test_delayed_scales_are_those_of_transformer_engine(options: dict[str, Any]) -> None:
    quant = replace(Quant(history=1024), **options)
    recipe = Recipe(
        (quant, quant), (replace(quant, format="e5m2"), quant), (replace(quant, format="e5m2"), quant)
    )
    model = layer(bias=False)
    theirs = [TransformerEngine(largest, **options) for largest in (448, 448, 57344)]
    for step in range(200):
        x = torch.randn(32, 128)
        if step in (20, 21, 90):
            x = x * 1e4
        if step in (30, 120):
            x = torch.zeros_like(x)
        if step in (60, 140):
            x[0, 0] = torch.nan if step == 60 else torch.inf
        g = torch.randn(32, 256) * 1e-4 * (1e5 if step == 50 else 1)
        with autocast("cpu", recipe=recipe, model=model):
            y = model(x)
        scales = [float(each.scale) for each in theirs]
        low_x, low_w = (
            (each.bfloat16().float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
            for each, scale in zip((x, model.weight.detach()), scales[:2], strict=True)
        )
        if step not in (60, 140):
            assert torch.allclose(
                y.float(), low_x @ low_w.T, rtol=2e-2, atol=1e-2 * float(y.detach().abs().max())
            )
        model.zero_grad()
        y.backward(g.bfloat16())
        for each, array in zip(theirs, (x, model.weight, g), strict=True):
            each.update(float(array.detach().bfloat16().abs().max()))
        found = [float(each[0]) for each in model._preamp_scales_0[:3]]
        assert found == [float(each.scale) for each in theirs], step


def trained(model: nn.Module, steps: int, seed: int = 3) -> list[float]:
    """Return the losses of a training with delayed scales."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    torch.manual_seed(seed)
    for number in range(steps):
        with autocast("cpu", recipe=recipes.FLOAT8_DELAYED, model=model):
            y = model(torch.randn(32, 64) * 4.0 ** (number % 3))
        loss = y.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_delayed_scales_go_with_copies_pickles_and_checkpoints() -> None:
    model = perceptron()
    trained(model, 5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "recipe": recipe_state(model)}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed = perceptron()
    resumed.load_state_dict(saved["model"])
    load_recipe_state(resumed, saved["recipe"])
    without = perceptron()
    without.load_state_dict(saved["model"])
    copied = copy.deepcopy(model)
    losses = trained(model, 5, seed=4)
    assert trained(copied, 5, seed=4) == losses
    assert trained(resumed, 5, seed=4) == losses
    assert trained(without, 5, seed=4) != losses


def test_what_computes_no_gradient_changes_no_scale() -> None:
    model = perceptron()
    trained(model, 3)
    before = copy.deepcopy(recipe_state(model))
    with torch.no_grad(), autocast("cpu", recipe=recipes.FLOAT8_DELAYED, model=model):
        model(100 * torch.randn(32, 64))
    for path, calls in recipe_state(model).items():
        for name, scales in calls.items():
            for a, b in zip(scales, before[path][name], strict=True):
                assert torch.equal(a, b)


def test_a_checkpoint_computes_again_with_the_scales_that_it_had() -> None:
    found = []
    for checkpoints in (False, True):
        model, losses = perceptron(), []
        for number in range(4):
            region = autocast("cpu", recipe=recipes.FLOAT8_DELAYED, model=model)
            torch.manual_seed(number)
            x = torch.randn(32, 64) * 4.0**number
            with region:
                y = (
                    checkpoint(model, x, use_reentrant=False, context_fn=region.context_fn)
                    if checkpoints
                    else model(x)
                )
            losses.append(torch.autograd.grad(y.float().square().sum(), model.parameters()))
        found.append(losses)
    for eager, again in zip(*found, strict=True):
        for a, b in zip(eager, again, strict=True):
            assert torch.equal(a, b)


def test_each_call_of_a_module_has_scales_of_its_own() -> None:
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with autocast("cpu", recipe=recipes.FLOAT8_DELAYED, model=model):
        model(torch.randn(32, 64))
    (calls,) = recipe_state(model).values()
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("region", "error", "said"),
    [
        ({"recipe": "MXFP8"}, CastingError, "recipe=preamp.recipes.MXFP8"),
        ({"recipe": recipes.MXFP8, "dtype": torch.float16}, CastingError, "high='float16'"),
        ({"recipe": recipes.FLOAT8_DELAYED}, UsageError, "model=model"),
        ({"dtype": torch.float8_e4m3fn, "emulate": True}, CastingError, "recipes.FLOAT8_CURRENT"),
    ],
)
def test_errors_say_what_to_write(region: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        autocast("cpu", **region)


def test_states_of_other_models_are_refused() -> None:
    model = perceptron()
    trained(model, 1)
    with pytest.raises(UsageError, match="'0' names no module of this Linear"):
        load_recipe_state(nn.Linear(2, 2), recipe_state(model))


@pytest.mark.parametrize("rule", ["high", recipes.NVFP4])
def test_rules_that_need_a_recipe_are_refused_without_one(rule: Any) -> None:
    table, model = casting.DEFAULT.module("0", rule), perceptron()
    with (
        pytest.raises(CastingError, match=r"'0' has the rule .* the region has no recipe"),
        autocast("cpu", casting=table, model=model),
    ):
        pass
    with autocast("cpu", recipe=recipes.MXFP8), autocast("cpu", casting=table, model=model):
        model(torch.randn(32, 64))


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_has_a_result(name: str) -> None:
    model = perceptron()
    with autocast("cpu", recipe=ALL[name], model=model):
        assert model(torch.empty(0, 64)).shape == (0, 32)
