"""Linear layers by a recipe: three products, each of which quantizes its own operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from preamp.arrays.torch_compat import is_in_backward
from preamp.recipes import Recipe
from preamp.recipes.arithmetic import next_state, quantized
from preamp.torch.autocasting.delayed import Scales
from preamp.torch.quantizing import ARRAYS

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe, scales: Scales
) -> Tensor:
    """Return `x @ weight.T + bias` by a recipe, in its high precision; the bias is added there.

    Args:
        x: any shape but a scalar's.
        weight: a matrix.
        bias: a vector, or None.
        recipe: of the region.
        scales: of a delayed recipe, which are changed; otherwise empty.
    """
    high = DTYPES[recipe.high]
    shape, rows = (*x.shape[:-1], weight.shape[0]), x.reshape(-1, x.shape[-1])
    x, w = rows.to(high), weight.to(high)
    keeps = not torch.is_grad_enabled()
    with torch.no_grad():
        low = _operand(x, recipe, 0, scales, keeps), _operand(w, recipe, 1, scales, keeps)
    product: Tensor = _Product.apply(x, w, *low, recipe, scales)  # type: ignore[no-untyped-call]
    result = product.reshape(shape)
    return result if bias is None else result + bias.to(high)


def fits(recipe: Recipe, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether the sizes of a linear layer are those that a recipe asks for, and nothing is float64."""
    sizes = *weight.shape, x.numel() // x.shape[-1]
    is_float64 = x.dtype is torch.float64 or weight.dtype is torch.float64
    return weight.dim() == 2 and not is_float64 and all(size % recipe.multiple == 0 for size in sizes)


class _Product(torch.autograd.Function):
    """A product by a recipe, of operands in its high precision and as quantized for the forward pass."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, low_x: Tensor, low_w: Tensor, recipe: Recipe, scales: Scales) -> Tensor:
        return (low_x @ low_w.T).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, low_x, low_w, ctx.recipe, ctx.scales = inputs
        once = ctx.recipe.once
        ctx.save_for_backward(low_x if once.x else x, low_w if once.w else w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), recipe, scales, dx, dw = ctx.saved_tensors, ctx.recipe, ctx.scales, None, None
        low_g = _operand(g, recipe, 2, scales)
        if ctx.needs_input_grad[0]:
            dx = (low_g @ (w if recipe.once.w else _operand(w.T, recipe, 3, scales).T)).to(g.dtype)
        if ctx.needs_input_grad[1]:
            transposed = low_g.T if recipe.once.g else _operand(g.T, recipe, 4, scales)
            dw = (transposed @ (x if recipe.once.x else _operand(x.T, recipe, 5, scales).T)).to(g.dtype)
        return dx, dw, None, None, None, None


def _operand(x: Tensor, recipe: Recipe, place: int, scales: Scales, keeps: bool = False) -> Tensor:
    """Return a matrix in float32, quantized along its last axis.

    Args:
        x: the matrix.
        recipe: of the product.
        place: of the operand in `recipe.quants`.
        scales: of a delayed recipe.
        keeps: leave them as they are.
    """
    x, quant = x.float(), recipe.quants[place]
    if quant is None or not quant.history:
        return x if quant is None else quantized(ARRAYS, x, quant)
    state = scales[place]
    # What is computed again in the backward pass takes the scale that the forward pass took.
    again = place < 2 and not is_compiling() and is_in_backward()
    low = quantized(ARRAYS, x, quant, scale=state[int(again)].clone())
    if not keeps and not again:
        state.copy_(next_state(ARRAYS, quant, state, x))
    result: Tensor = low
    return result
