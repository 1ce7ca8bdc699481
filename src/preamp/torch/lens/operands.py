"""Count what quantizing does to the operands of linear layers: what becomes 0, what saturates, the noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from preamp.arrays.torch_devices import widest
from preamp.recipes import Quant, Recipe
from preamp.recipes.values import FORMATS, PRODUCTS, Operand, Product
from preamp.record.snapshots import QuantizedRow

PLACES: tuple[Operand, ...] = ("input", "weight", "gradient", "weight", "gradient", "input")
"""What the operands in `Recipe.quants` are."""
SLACK = 1 + 2.0**-20  # scales are rounded, and may bring the largest value a bit too high
COUNTS = 6


class Operands:
    """The counts of one pass, on their devices, in the order of computation.

    Attributes:
        is_open: whether more are counted. Graphs may outlive the pass.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._values: dict[tuple[str, Product, Operand, str], int] = {}
        self._counts: dict[tuple[str, Product, Operand, str], Tensor] = {}

    def add(self, name: str, product: Product, operand: Operand, quant: Quant, counts: Counts) -> None:
        """Add an operand of a product in a module."""
        key = name, product, operand, quant.format
        values, sums = counts
        self._values[key] = self._values.get(key, 0) + values
        self._counts[key] = self._counts[key] + sums if key in self._counts else sums

    def numbers(self) -> list[Tensor]:
        """Return all counts as scalars."""
        return [number for counts in self._counts.values() for number in counts.unbind()]

    def rows(self, numbers: Sequence[float]) -> Iterator[QuantizedRow]:
        """Yield the rows, given the same scalars on the host."""
        for place, (key, values) in enumerate(self._values.items()):
            nonzero, flushed, saturated, finite, signal, noise = numbers[COUNTS * place :][:COUNTS]
            shares = flushed / max(nonzero, 1), saturated / max(values, 1)
            yield QuantizedRow(*key, values, *shares, _decibels(signal, noise) if finite else math.nan)


class Call:
    """The operands of one call of a linear layer in a module, in its forward and its backward pass."""

    def __init__(self, operands: Operands, name: str, recipe: Recipe) -> None:
        self._operands, self._name, self._recipe = operands, name, recipe
        self._counts: dict[int, Counts] = {}

    def quantized(self, place: int, x: Tensor, scaled: Tensor, low: Tensor) -> None:
        """Count an operand.

        Args:
            place: in `Recipe.quants`.
            x: the matrix.
            scaled: as it is rounded to the format.
            low: what it stands for then.
        """
        quant = self._recipe.quants[place]
        if quant is not None and self._operands.is_open:
            self._counts[place] = _counted(x, scaled, low, FORMATS[quant.format].largest)

    def took(self, product: Product) -> None:
        """Add the operands of a product that was computed; some were quantized for an earlier one."""
        first = 2 * PRODUCTS.index(product)
        for place in (first, first + 1):
            quant, operand = self._recipe.quants[place], PLACES[place]
            if quant is not None and self._operands.is_open:
                counts = self._counts.get(place) or self._counts[PLACES.index(operand)]
                self._operands.add(self._name, product, operand, quant, counts)


Counts = tuple[int, Tensor]
"""How many values there are, and of shape [6]: how many are not 0, became 0, saturated, are finite before and
after, and the sums of the squares of those and of their errors."""


@torch.no_grad()
def _counted(x: Tensor, scaled: Tensor, low: Tensor, largest: float) -> Counts:
    wide, error, is_nonzero = widest(x.device), low - x, x != 0
    is_finite = error.isfinite()
    parts = (
        *(is_nonzero, is_nonzero & (low == 0), scaled.abs() > largest * SLACK, is_finite),
        # In float64, where there is one: the squares of small gradients are 0 in float32.
        *(torch.where(is_finite, each, 0.0).to(wide).square() for each in (x, error)),
    )
    return x.numel(), torch.stack([part.sum(dtype=wide) for part in parts])


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
