"""Linear layers by a recipe: three products, each of which quantizes its own operands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from preamp.arrays.torch_compat import is_in_backward, mark_constant
from preamp.recipes import Recipe
from preamp.recipes.arithmetic import next_state, quantized
from preamp.recipes.values import KNOWN, Product
from preamp.torch.autocasting.delayed import Scales
from preamp.torch.quantizing import ARRAYS

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Call(Protocol):
    """What watches a call: `preamp.torch.lens.operands.Call`."""

    def quantized(self, place: int, x: Tensor, scaled: Tensor, low: Tensor) -> None:
        """Look at an operand, with its place in `Recipe.quants`."""
        ...

    def took(self, product: Product) -> None:
        """Note that a product was computed."""
        ...


watching: OrderedDict[int, Callable[[Recipe], Call | None]] = OrderedDict()
"""What returns the watcher of the next call, if it wants to see it, by the ids of `RemovableHandle`."""


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
    calls: list[Call] = []
    if not is_compiling() and watching:  # in this order: graphs do not depend on who watches
        calls = [call for watch in watching.values() if (call := watch(recipe))]
    with torch.no_grad():
        low = _operand(x, recipe, 0, scales, calls, keeps), _operand(w, recipe, 1, scales, calls, keeps)
    product: Tensor = _Product.apply(x, w, *low, recipe.key, scales, calls)  # type: ignore[no-untyped-call]
    _note(calls, "fprop")
    result = product.reshape(shape)
    return result if bias is None else result + bias.to(high)


def fits(recipe: Recipe, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether the sizes of a linear layer are those that a recipe asks for, and nothing is float64."""
    if not x.numel() or not weight.numel():
        return False
    sizes = *weight.shape, x.numel() // x.shape[-1]
    is_float64 = x.dtype is torch.float64 or weight.dtype is torch.float64
    return weight.dim() == 2 and not is_float64 and all(size % recipe.multiple == 0 for size in sizes)


class _Product(torch.autograd.Function):
    """A product by a recipe, of operands in its high precision and as quantized for the forward pass."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, low_x: Tensor, low_w: Tensor, *_: Any) -> Tensor:
        return (low_x @ low_w.T).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, low_x, low_w, ctx.key, ctx.scales, ctx.calls = inputs
        once = _recipe_of(ctx.key).once
        ctx.save_for_backward(low_x if once.x else x, low_w if once.w else w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if not is_compiling():
            return _Product._gradients(ctx, g)
        # Before 2.13 compiled backward passes run in the region around the graph, which would cast operands.
        with torch.autocast(g.device.type, enabled=False):
            return _Product._gradients(ctx, g)

    @staticmethod
    def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), recipe, dx, dw = ctx.saved_tensors, _recipe_of(ctx.key), None, None
        scales, calls = ctx.scales, ctx.calls
        low_g = _operand(g, recipe, 2, scales, calls)
        if ctx.needs_input_grad[0]:
            w = w if recipe.once.w else _operand(w.T, recipe, 3, scales, calls).T
            dx = (low_g @ w).to(g.dtype)
            _note(calls, "dgrad")
        if ctx.needs_input_grad[1]:
            transposed = low_g.T if recipe.once.g else _operand(g.T, recipe, 4, scales, calls)
            x = x if recipe.once.x else _operand(x.T, recipe, 5, scales, calls).T
            dw = (transposed @ x).to(g.dtype)
            _note(calls, "wgrad")
        return dx, dw, None, None, None, None, None


@mark_constant  # a function of autograd takes the key: 2.6 cannot trace a recipe as an argument
def _recipe_of(key: str) -> Recipe:
    return KNOWN[key]


def _note(calls: list[Call], product: Product) -> None:
    for call in calls:
        call.took(product)


def _operand(
    x: Tensor, recipe: Recipe, place: int, scales: Scales, calls: list[Call], keeps: bool = False
) -> Tensor:
    """Return a matrix in float32, quantized along its last axis.

    Args:
        x: the matrix.
        recipe: of the product.
        place: of the operand in `recipe.quants`.
        scales: of a delayed recipe.
        calls: what watches this call.
        keeps: leave them as they are.
    """
    x, quant = x.contiguous().float(), recipe.quants[place]
    seen = [partial(call.quantized, place) for call in calls]
    if quant is None or not quant.history:
        return x if quant is None else quantized(ARRAYS, x, quant, seen=seen)
    state = scales[place]
    # What is computed again in the backward pass takes the scale that the forward pass took.
    again = place < 2 and not is_compiling() and is_in_backward()
    low = quantized(ARRAYS, x, quant, scale=state[int(again)].clone(), seen=seen)
    if not keeps and not again:
        state.copy_(next_state(ARRAYS, quant, state, x))
    result: Tensor = low
    return result
