"""How often blame names the product of a recipe that was made to lose accuracy, and nobody where none was.

Run: python benchmarks/recipe_cases.py [--only SUBSTRING] [--seeds 2] [--json FILE]

Most faults are rewritings that leave the function as it is in float32: some channels between two layers are
made larger by one and smaller by the other. Only quantizing is harder then, in the layers that were changed.
Cases are split in halves by their names: thresholds were chosen on the first, and the second is held out.
"""

from __future__ import annotations

import argparse
import copy
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from preamp import recipes
from preamp.autocasting.tables import Casting
from preamp.recipes import Recipe
from preamp.torch import autocast, blame, recipe_state

WIDTH, HEADS, WORDS, LENGTH = 128, 4, 128, 32
HARM = 1.5  # times the error of the gradients without the fault: from here on it hurts
RECIPES = {
    name: getattr(recipes, name)
    for name in (
        "FLOAT8_DELAYED",
        "FLOAT8_CURRENT",
        "FLOAT8_BLOCK",
        "FLOAT8_ROWWISE",
        "MXFP8",
        "MXFP8_E5M2_GRADIENTS",
        "NVFP4",
        "NVFP4_PLAIN",
    )
}


class Block(nn.Module):
    """Attention and an MLP, each with a norm before and a residual around it."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (batch, time, width) after the block."""
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))) * self.gain)


class Language(nn.Module):
    """A language model of some blocks."""

    def __init__(self, blocks: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(norm) for _ in range(blocks))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of words of shape (batch, time)."""
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass
class Step:
    """A model with a batch: `loss()` is what blame runs."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    temperature: float = 1.0

    def loss(self) -> Tensor:
        """Return the cross entropy."""
        logits = self.model(self.inputs) * self.temperature
        return nn.functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())


def language(seed: int, blocks: int = 2, norm: type[nn.Module] = nn.LayerNorm) -> Step:
    """Return a language model after 30 steps on a text in which each word follows from the one before."""
    torch.manual_seed(seed)
    model = Language(blocks, norm)
    follows = torch.randint(0, WORDS, (WORDS, 4))

    def batch() -> tuple[Tensor, Tensor]:
        words = [torch.randint(0, WORDS, (8,))]
        for _ in range(LENGTH):
            words.append(follows[words[-1], torch.randint(0, 4, (8,))])
        text = torch.stack(words, 1)
        return text[:, :-1], text[:, 1:]

    return _trained(Step(model, *batch()), batch)


def classifier(seed: int, depth: int = 3) -> Step:
    """Return a network of layers without residuals after 30 steps on clusters."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(2 * WIDTH, 2 * WIDTH), nn.ReLU()]
    model, centers = nn.Sequential(*layers, nn.Linear(2 * WIDTH, 32)), torch.randn(32, WIDTH)

    def batch() -> tuple[Tensor, Tensor]:
        targets = torch.randint(0, 32, (128,))
        return centers[targets] + 3 * torch.randn(128, WIDTH), targets

    return _trained(Step(model, *batch()), batch)


def _trained(step: Step, batch: Callable[[], tuple[Tensor, Tensor]], steps: int = 30) -> Step:
    optimizer = torch.optim.AdamW(step.model.parameters(), 3e-3)
    for _ in range(steps):
        step.inputs, step.targets = batch()
        optimizer.zero_grad()
        step.loss().backward()
        optimizer.step()
    optimizer.zero_grad()
    return step


Fault = Callable[[Step, str], str]
"""Changes a step for a recipe of a name, and returns the layer whose products are to be named."""


def _channels(size: int, count: int) -> Tensor:
    return torch.arange(count) * (size // count) + 3


def outliers_in_down(factor: float, count: int) -> Fault:
    """Make some channels of a down projection's input larger, and its weights for them smaller."""

    @torch.no_grad()
    def plant(step: Step, recipe: str) -> str:
        block = step.model.layers[-1]
        channels = _channels(4 * WIDTH, count)
        block.gain[channels] *= factor
        block.down.weight[:, channels] /= factor
        return f"layers.{len(step.model.layers) - 1}.down"

    return plant


def outliers_in_attention(factor: float, count: int) -> Fault:
    """The same for the input of the attention, through the gain of the norm before it."""

    @torch.no_grad()
    def plant(step: Step, recipe: str) -> str:
        block = step.model.layers[0]
        channels = _channels(WIDTH, count)
        for parameter in block.norm1.parameters():
            parameter[channels] *= factor
        block.qkv.weight[:, channels] /= factor
        return "layers.0.qkv"

    return plant


def large_gradients_in_up(factor: float, count: int) -> Fault:
    """Make the gradients of some output channels larger, and the weights for them smaller."""

    @torch.no_grad()
    def plant(step: Step, recipe: str) -> str:
        block = step.model.layers[0]
        channels = _channels(4 * WIDTH, count)
        block.gain[channels] *= factor
        block.up.weight[channels] /= factor
        block.up.bias[channels] /= factor
        return "layers.0.up"

    return plant


def sharp_head(temperature: float) -> Fault:
    """Make the logits larger, so that their relative errors matter."""

    @torch.no_grad()
    def plant(step: Step, recipe: str) -> str:
        step.model.head.weight *= temperature
        return "head"

    return plant


def grown(factor: float) -> Fault:
    """Make the whole input of a down projection larger, after the scales of a delayed recipe were taken."""

    @torch.no_grad()
    def plant(step: Step, recipe: str) -> str:
        if RECIPES[recipe].delayed:
            with torch.enable_grad():
                for _ in range(3):
                    gradients(step, RECIPES[recipe])
        block = step.model.layers[0]
        block.gain *= factor
        block.down.weight /= factor
        return "layers.0.down"

    return plant


FACTORS = (30.0, 1e3, 1e5)
FAULTS: dict[str, Fault] = {
    **{f"{count} down outliers x {by:g}": outliers_in_down(by, count) for by in FACTORS for count in (8, 64)},
    **{
        f"{count} attention outliers x {by:g}": outliers_in_attention(by, count)
        for by in FACTORS
        for count in (2, 16)
    },
    **{
        f"{count} up gradients x {by:g}": large_gradients_in_up(by, count)
        for by in FACTORS
        for count in (8, 64)
    },
    **{f"sharp head x {by:g}": sharp_head(by) for by in (10.0, 30.0)},
    **{f"grown x {by:g}": grown(by) for by in (100.0, 1e4)},
}


def gradients(step: Step, recipe: Recipe | None, table: Casting | None = None) -> list[Tensor]:
    """Return the gradients of a step, each times the size of its weight, as blame weighs them."""
    parameters = list(step.model.parameters())
    with autocast("cpu", recipe=recipe, casting=table, model=step.model, enabled=recipe is not None):
        loss = step.loss()
    return [
        each * weight.detach().abs()
        for each, weight in zip(torch.autograd.grad(loss, parameters), parameters, strict=True)
    ]


def error(step: Step, recipe: Recipe, table: Casting | None = None) -> float:
    """Return the relative error of the gradients in a recipe."""
    kept = copy.deepcopy(step)
    if recipe.delayed and not recipe_state(kept.model):
        gradients(kept, recipe)  # the first step has no scales
    exact = torch.cat([each.flatten() for each in gradients(kept, None)])
    low = torch.cat([each.flatten() for each in gradients(kept, recipe, table)])
    return float((low - exact).norm() / exact.norm())


@dataclass
class Outcome:
    """What blame said of a step.

    Attributes:
        case: the model, the recipe, the fault or "healthy", and the seed.
        held: whether it is in the half on which no threshold was chosen.
        harm: how much larger the error of the gradients is than without the fault.
        first: whether the first row names the fault.
        top: whether one of the first three rows does.
        accused: whether a row that names the fault is accused; of a healthy step, any row.
        predicted: the error of the gradients that blame predicts.
        error: the true one.
        rows: the first rows.
    """

    case: str
    held: bool
    harm: float
    first: bool
    top: bool
    accused: bool
    predicted: float
    error: float
    rows: list[str]


def judged(case: str, step: Step, recipe: Recipe, layer: str, before: float) -> Outcome:
    """Run blame on a step whose fault is in a layer; "" is a healthy step."""
    true = error(step, recipe)
    found = blame(step.loss, model=step.model, recipe=recipe)
    named = [row.module == layer and bool(row.product) for row in found.rows]
    guilty = [
        row for row, is_named in zip(found.rows, named, strict=True) if row.guilty and (is_named or not layer)
    ]
    return Outcome(
        case,
        zlib.crc32(case.encode()) % 2 == 1,
        true / before,
        named[0],
        any(named[:3]),
        bool(guilty),
        found.gradient_error,
        true,
        [
            f"{row.module} {row.product or row.operator} {row.effect:.3g} ({row.severity:.2f})"
            for row in found.rows[:4]
        ],
    )


MODELS: dict[str, Callable[[int], Step]] = {
    "LayerNorm": language,
    "RMSNorm, 4 blocks": partial(language, blocks=4, norm=nn.RMSNorm),
    "classifier": classifier,
    "deep classifier": partial(classifier, depth=6),
}


def outcomes(only: str, seeds: int) -> Iterator[Outcome]:
    """Yield what blame says of each case."""
    for seed in range(seeds):
        for model, make in MODELS.items():
            healthy = make(seed)
            for name, recipe in RECIPES.items():
                case = f"{model}, {name}, {{}}, {seed}"
                before = error(healthy, recipe)
                if only in case.format("healthy"):
                    yield judged(case.format("healthy"), copy.deepcopy(healthy), recipe, "", before)
                for fault, plant in FAULTS.items() if hasattr(healthy.model, "layers") else ():
                    if only in case.format(fault):
                        step = copy.deepcopy(healthy)
                        layer = plant(step, name)
                        yield judged(case.format(fault), step, recipe, layer, before)


def main() -> None:
    """Judge all cases and print what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for each in outcomes(arguments.only, arguments.seeds):
        found.append(each)
        is_wrong = each.accused if "healthy" in each.case else each.harm >= HARM and not each.first
        if is_wrong:
            print(
                f"{each.case}: harm {each.harm:.1f}, error {each.error:.3f}; {'; '.join(each.rows)}",
                flush=True,
            )
    healthy = [each for each in found if "healthy" in each.case]
    for held in (False, True):
        faults = [
            each for each in found if "healthy" not in each.case and each.harm >= HARM and each.held == held
        ]
        own = [each for each in healthy if each.held == held]
        print(
            f"{'held out' if held else 'chosen on'}: of {len(faults)} faults that hurt, "
            + ", ".join(
                f"{sum(getattr(each, what) for each in faults)} {said}"
                for what, said in (("first", "first"), ("top", "in the first three"), ("accused", "accused"))
            )
            + f"; {sum(each.accused for each in own)} of {len(own)} healthy accused"
        )
    ratios = sorted(each.predicted / each.error for each in healthy)
    if ratios:
        print(f"predicted over true error of healthy steps: {ratios[0]:.2f} to {ratios[-1]:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
