"""What a lens sees of the operands that a recipe quantizes: what is flushed, what saturates, the noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from preamp import QuantizedRow, Snapshot, recipes
from preamp.recipes import Quant, Recipe
from preamp.torch import Lens, autocast, quantize, recipe_state
from preamp.torch.autocasting.quantized import watching

RECIPES = {"mx": recipes.MXFP8, "current": recipes.FLOAT8_CURRENT, "nv": recipes.NVFP4_PLAIN}
Rows = dict[tuple[str, str, str], QuantizedRow]


def perceptron(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))


def data(rows: int = 64, width: int = 64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, width) * torch.logspace(-6, 0, width)  # for all formats, some is too small


def step(model: nn.Module, recipe: Recipe, x: Tensor, inner: nn.Module | None = None) -> None:
    with autocast("cpu", recipe=recipe, model=inner or model):
        y = model(x)
    y.float().square().mean().backward()


def looked(model: nn.Module, recipe: Recipe, x: Tensor, **options: Any) -> Snapshot:
    with Lens(model, **options) as lens:
        step(model, recipe, x)
        assert lens.last is not None
        return lens.last


def named(rows: tuple[QuantizedRow, ...]) -> Rows:
    found = {(row.name, row.product, row.operand): row for row in rows}
    assert len(found) == len(rows)
    return found


def expected(x: Tensor, quant: Quant) -> tuple[float, float, float]:
    """Return the shares and the ratio of a matrix."""
    x, low = x.double(), quantize(x, quant).double()
    flushed = ((low == 0) & (x != 0)).sum() / (x != 0).sum()
    saturated = 0.0
    if quant.format == "e2m1":  # its scales are rounded, and in each block the largest value becomes 6 or -6
        blocks = [low.abs().unfold(0, quant.block[0], quant.block[0]).unfold(1, *[quant.block[1]] * 2)]
        tops = blocks[0].amax((2, 3)).repeat_interleave(quant.block[0], 0)
        saturated = (x.abs() > tops.repeat_interleave(quant.block[1], 1) * (1 + 1e-6)).double().mean().item()
    return flushed.item(), saturated, (10 * torch.log10(x.square().sum() / (low - x).square().sum())).item()


@pytest.mark.parametrize("name", RECIPES)
def test_shares_and_ratios_are_those_of_the_quantized_operands(name: str) -> None:
    recipe, model, x, seen = RECIPES[name], perceptron(), data(), {}
    model[2].register_forward_pre_hook(lambda _, args: seen.update(input=args[0].detach().bfloat16()))
    model[2].register_full_backward_hook(lambda _, __, g: seen.update(gradient=g[0]))
    seen["weight"] = model[2].weight.detach().bfloat16()
    rows = named(looked(model, recipe, x).quantized)
    transposed = {("dgrad", "weight"), ("wgrad", "input"), ("wgrad", "gradient")}
    operands = {"fprop": ("input", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "input")}
    assert list(rows) == [
        *[(layer, "fprop", operand) for layer in "02" for operand in operands["fprop"]],
        *[("2", product, operand) for product in ("dgrad", "wgrad") for operand in operands[product]],
        *[("0", "wgrad", operand) for operand in operands["wgrad"]],  # its input has no gradient
    ]
    some = 0.0
    for product, pair in operands.items():
        for operand, quant in zip(pair, getattr(recipe, product), strict=True):
            matrix = seen[operand].T if (product, operand) in transposed else seen[operand]
            row = rows["2", product, operand]
            assert (row.format, row.values) == (quant.format, matrix.numel())
            assert row[5:] == pytest.approx(expected(matrix, quant), rel=1e-5)
            some += row.saturated
    assert (some > 0) == (name == "nv")
    quants = [quant for quant in recipe.quants if quant]
    low = quantize(x.bfloat16(), quants[0])
    assert rows["0", "fprop", "input"].flushed == ((low == 0) & (x != 0)).double().mean().item() > 0


def test_the_layer_with_outlier_channels_is_the_noisiest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with torch.no_grad():
        model[1].weight[::16] *= 8.0  # one channel in each block of 16 x 16
    snapshot = looked(model, recipes.NVFP4_PLAIN, torch.randn(64, 64))
    first, second, third, *_ = snapshot.noisiest
    assert [first[:3], second[:3]] == [("1", "fprop", "weight"), ("1", "dgrad", "weight")]
    assert first.sqnr == second.sqnr < third.sqnr - 3.0
    assert first.flushed > 2 * third.flushed
    text = str(snapshot).split("quantized, worst first")[1]
    assert [float(line.split()[-1]) for line in text.splitlines() if line.startswith("    ")] == [
        float(f"{row.sqnr:.3g}") for row in snapshot.noisiest
    ]


@contextmanager
def calls() -> Iterator[list[str]]:
    """Keep the operators that run."""
    names: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Calls():
        yield names


def test_only_sampled_passes_are_watched_and_all_is_read_in_one_transfer() -> None:
    model, x = perceptron(), data()
    step(model, recipes.MXFP8, x)
    with calls() as plain:
        step(model, recipes.MXFP8, x)
    with Lens(model, every=2) as lens:
        with calls() as sampled:
            step(model, recipes.MXFP8, x)
        assert not watching
        assert not [name for name in sampled if "_local_scalar_dense" in name]
        with calls() as reading:
            assert lens.last is not None
        assert reading.count("aten.cat.default") == 1
        with calls() as other:
            step(model, recipes.MXFP8, x)
        assert other == plain
        assert len(lens.last.quantized) == 10
    assert looked(model, recipes.MXFP8, x, activations=False).quantized == ()


def test_the_gradients_are_the_same_under_a_lens() -> None:
    model, x = perceptron(), data()
    step(model, recipes.NVFP4, x)
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    looked(model, recipes.NVFP4, x)
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_an_evaluation_before_the_backward_pass_does_not_count() -> None:
    model, x = perceptron(), data()
    wanted = looked(model, recipes.MXFP8, x).quantized
    with Lens(model) as lens:
        with autocast("cpu", recipe=recipes.MXFP8, model=model):
            y = model(x)
            model[2](y.new_ones(32, 128))
            with torch.no_grad():
                model(x)
        y.float().square().mean().backward()
        assert lens.last is not None
        assert lens.last.quantized == wanted


class Checkpointed(nn.Module):
    """A perceptron in a checkpoint of one kind, or in none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind, self.region = perceptron(), kind, autocast("cpu")

    def forward(self, x: Tensor) -> Any:
        if self.kind == "reentrant":
            return checkpoint(self.body, x, use_reentrant=True)
        if self.kind == "checkpoint":
            return checkpoint(self.body, x, use_reentrant=False, context_fn=self.region.context_fn)
        return self.body(x)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_checkpoint_computes_again_is_not_counted_twice(name: str) -> None:
    found = {}
    for kind in ("plain", "checkpoint", "reentrant"):
        model, x = Checkpointed(kind), data().requires_grad_()
        model.region = autocast("cpu", recipe=RECIPES[name], model=model)
        with Lens(model) as lens:
            with model.region:
                model(x).float().square().mean().backward()
            assert lens.last is not None
            found[kind] = named(lens.last.quantized)
    assert len(found["plain"]) == 12
    assert found["checkpoint"] == found["plain"]
    forward = {key: row for key, row in found["plain"].items() if row.product == "fprop"}
    assert found["reentrant"] == forward


def test_a_delayed_scale_saturates_after_a_spike() -> None:
    model, x = perceptron(), torch.randn(64, 64)
    for _ in range(3):
        step(model, recipes.FLOAT8_DELAYED, x)
    calm = named(looked(model, recipes.FLOAT8_DELAYED, x).quantized)
    assert max(row.saturated for row in calm.values()) == 0.0
    scale = recipe_state(model)["0"]["_preamp_scales_0"][0][0].item()
    row = named(looked(model, recipes.FLOAT8_DELAYED, 8 * x).quantized)["0", "fprop", "input"]
    beyond = ((8 * x).bfloat16().float() * scale).abs() > 448
    assert row.saturated == beyond.double().mean().item() > 0.1
    assert row.sqnr < calm["0", "fprop", "input"].sqnr - 10


def test_what_stays_high_is_no_row_and_the_low_dtype_is_that_of_the_region() -> None:
    model, x = perceptron(), data()
    snapshot = looked(model, replace(recipes.MXFP8, wgrad=None), x)
    assert {row.product for row in snapshot.quantized} == {"fprop", "dgrad"}
    odd = looked(nn.Linear(60, 20), recipes.MXFP8, torch.randn(32, 60))
    assert odd.quantized == ()
    with Lens(model) as lens:
        with autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        plain = lens.last
    assert plain is not None
    assert plain.quantized == ()
    assert snapshot.low_dtype == plain.low_dtype == "bfloat16"
    assert [row[:3] for row in snapshot.rows] == [row[:3] for row in plain.rows]
    assert snapshot.best_scale() == pytest.approx(plain.best_scale(), rel=1.0)


class Odd(nn.Module):
    """Multiplies outside of any linear layer, after a part that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.part = nn.Parameter(torch.randn(64, 64)), perceptron()

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.part(x[:, :-1])
        except RuntimeError:
            x = functional.linear(x, self.weight)
        return functional.linear(self.part(x), self.weight) + perceptron()(x)


def test_operands_belong_to_the_module_that_is_running_for_each_lens() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Odd()), torch.randn(32, 64)
    with Lens(model) as outer, Lens(model[0].part, every=1) as inner:
        step(model, recipes.MXFP8, x)
        assert outer.last is not None
        assert inner.last is not None
        rows, others = named(outer.last.quantized), named(inner.last.quantized)
    assert {name for name, *_ in rows} == {"0", "0.part.0", "0.part.2"}
    assert rows["0", "fprop", "weight"].values == 2 * 64 * 64
    assert rows["0", "dgrad", "gradient"].values == 32 * 64  # the first input has no gradient
    assert {(f"0.part.{name}", *rest): row[3:] for (name, *rest), row in others.items()} == {
        key: row[3:] for key, row in rows.items() if key[0] != "0"
    }


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch 2.10
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of PyTorch
def test_a_compiled_model_has_the_same_rows() -> None:
    model, x = perceptron(), data()
    wanted = looked(model, recipes.FLOAT8_CURRENT, x).quantized
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, recipes.FLOAT8_CURRENT, x, model)
    with Lens(compiled) as lens:
        step(compiled, recipes.FLOAT8_CURRENT, x, model)
        assert lens.last is not None
        assert lens.last.quantized == wanted
        with torch.compiler.set_stance("fail_on_recompile"):
            step(compiled, recipes.FLOAT8_CURRENT, x, model)


def test_ratios_of_odd_values() -> None:
    model = nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(32))
    ratios = {}
    for value in (0.0, 1.0, 2.0**-100, math.inf, math.nan):
        row = named(looked(model, recipes.MXFP8, torch.full((32, 32), value)).quantized)["", "fprop", "input"]
        ratios[value] = row.sqnr, row.flushed, row.saturated
    assert ratios.pop(math.inf)[1:] == (0.0, 1.0)
    assert [str(number) for number, *_ in ratios.values()] == ["inf", "inf", "inf", "nan"]
    assert all(rest == [0.0, 0.0] for _, *rest in ratios.values())
