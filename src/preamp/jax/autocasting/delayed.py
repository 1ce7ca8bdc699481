"""The scales of a recipe with delayed scaling: an argument of a region, whose cotangent is the next scales.

So a step that is differentiated returns what PyTorch keeps in modules, as Flax's `fp8_ops` does it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from preamp.errors import UsageError
from preamp.jax import axes, jaxprs
from preamp.jax.autocasting.precision import FLOAT32
from preamp.jax.autocasting.products import Quants, matrices, rounded, transposed_product
from preamp.jax.jaxprs import Atom, Equation
from preamp.jax.quantizing import ARRAYS
from preamp.jax.trees import RecipeScales
from preamp.recipes import Quant, Recipe
from preamp.recipes.arithmetic import first_state, next_state, quantized

SCALE, CALLS = 0, 1  # of an operand's state; the second counts the calls that JAX has added up
EXAMPLE = "scales = recipe_state(region, params, batch)"
_DIFFERENTIATED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class State(NamedTuple):
    """The state of a product in a program that is rewritten.

    Attributes:
        name: of its module, or its line.
        recipe: by which it is quantized.
        atoms: the variables of its operands' states.
    """

    name: str
    recipe: Recipe
    atoms: list[Atom]

    @classmethod
    def new(cls, name: str, recipe: Recipe) -> State:
        """Return a state with new variables."""
        avals: Any = [jax.typeof(each) for each in _first(recipe)]
        return cls(name, recipe, [*map(jaxprs.variable, avals)])


class FirstScales(UsageError):
    """A region was given no scales. Those that it begins with are in `scales`."""

    def __init__(self, scales: RecipeScales) -> None:
        super().__init__(
            f"the region has products with delayed scales, and these are empty. Write {EXAMPLE}."
        )
        self.scales = scales


def recipe_state(fn: Callable[..., object], *args: object, **kwargs: object) -> RecipeScales:
    """Return the scales that a region with a delayed recipe begins with.

    The region takes them as its first argument, and the derivative with respect to them is the scales after
    the step:

    >>> import jax, jax.numpy as jnp
    >>> from preamp import recipes
    >>> from preamp.jax import autocast
    >>> region = autocast(lambda w, x: jnp.mean(x @ w), recipe=recipes.FLOAT8_DELAYED, weights=(0,))
    >>> w, x = jnp.ones((64, 64)), jnp.full((32, 64), 2.0)
    >>> scales = recipe_state(region, w, x)
    >>> loss, (scales, gradient) = jax.value_and_grad(region, argnums=(0, 1))(scales, w, x)
    >>> [float(each[0]) for (product,) in [scales.products.values()] for each in product[:2]]
    [224.0, 448.0]

    Args:
        fn: a region, or a function with a region that takes its first argument.
        args: its other arguments. Nothing is computed, but what such a function computes before.
        kwargs: its keyword arguments.

    Raises:
        UsageError: for a function without a region whose products have delayed scales.
    """
    try:
        fn(RecipeScales({}), *args, **kwargs)
    except FirstScales as found:
        return found.scales
    raise UsageError(
        "no region with a delayed recipe takes the first argument of this function, or it has no product "
        f"with a weight. Write region = autocast(loss_fn, recipe=recipe, weights=(0,)), and {EXAMPLE}."
    )


def taken(args: tuple[Any, ...]) -> tuple[RecipeScales, tuple[Any, ...]]:
    """Return the scales of a call, and its other arguments.

    Raises:
        UsageError: if its first argument is something else.
    """
    if args and isinstance(args[0], RecipeScales):
        return args[0], args[1:]
    raise UsageError(
        "the recipe takes its scales from earlier steps, and they are the first argument of the region and a "
        f"result of its derivative. Write {EXAMPLE}, and loss, (scales, gradients) = "
        "jax.value_and_grad(region, argnums=(0, 1))(scales, params, batch)."
    )


def entered(scales: RecipeScales, states: Sequence[State]) -> list[Array]:
    """Return the operands that a program takes for its states.

    Raises:
        UsageError: for scales of another program, and for those that two calls have added up.
    """
    names = _numbered([state.name for state in states])
    first = {name: _first(state.recipe) for name, state in zip(names, states, strict=True)}
    if first and not scales.products:
        raise FirstScales(RecipeScales({name: [*map(jnp.asarray, each)] for name, each in first.items()}))
    if jax.tree.map(np.shape, first) != jax.tree.map(np.shape, scales.products):
        raise UsageError(
            f"the scales are those of {', '.join(scales.products)}, and this program needs some of other "
            f"sizes or names: {', '.join(names) or 'none'}. Write {EXAMPLE}."
        )
    given = [each for name in names for each in scales.products[name]]
    for each in given[:1]:
        if hasattr(each, "tangent") and _DIFFERENTIATED.get(id(each)) is each:
            raise UsageError(
                "two calls in one differentiated function are given the same scales, and their derivatives "
                f"would be added up. Write {EXAMPLE} for each call, and give the function both."
            )
        if hasattr(each, "tangent"):
            _DIFFERENTIATED[id(each)] = each
    return list(_kept(given))


def refusal(what: str, equation: Equation) -> UsageError:
    """Return the error of products with a weight that run more or less often than once."""
    return UsageError(
        f"the {what} at {jaxprs.source_line(equation)} holds products with a weight, and delayed scales are "
        "those of one call. Write recipe=preamp.recipes.FLOAT8_CURRENT, or "
        "casting.DEFAULT.module(path, 'high') for the module that it is in."
    )


def product_of(
    equation: Equation, states: Sequence[Atom], operands: Sequence[Atom], quants: Quants
) -> Equation:
    """Return a `dot_general` of low numbers as the equation that computes it with delayed scales.

    Args:
        equation: the product.
        states: of its operands, before which they come.
        operands: the input and the weight, in the places that they have there.
        quants: how they are quantized.
    """
    run = jax.jit(partial(_product, quants=quants, numbers=equation.params["dimension_numbers"]))
    (made,) = jax.make_jaxpr(run)(*([atom.aval for atom in it] for it in (states, operands))).eqns
    return equation.replace(primitive=made.primitive, params=made.params, invars=[*states, *operands])


def _product(states: list[Array], operands: list[Array], quants: Quants, numbers: Any) -> Array:
    pair, shape = matrices(operands, numbers)
    x, w = pair[quants.first], pair[1 - quants.first]
    product = _product_by(quants.recipe)(states, x, w)
    return (product.T if quants.first else product).reshape(shape)


@cache
def _product_by(recipe: Recipe) -> Callable[[list[Array], Array, Array], Array]:
    """Return a function of states, input and weight; its derivative for the states are those that follow.

    It is zero for the state of what is not quantized, which `entered` takes for no call.
    """
    once = recipe.once

    def low(states: list[Array], place: int, x: Array) -> Array:
        quant, state, x = recipe.quants[place], states[place], x.astype(FLOAT32)
        if quant is None:
            return x
        scale = jnp.where(state[CALLS] == 1, state[SCALE], jnp.nan) if quant.history else None
        array: Array = quantized(ARRAYS, x, quant, scale=scale)
        return array

    def after(states: list[Array], place: int, x: Array) -> Array:
        quant, state = recipe.quants[place], states[place]
        if quant is None or not quant.history:
            return jnp.zeros_like(state)
        return _after(quant)(state, x.astype(FLOAT32))

    def multiplied(one: Array, other: Array, like: Array) -> Array:
        return rounded(transposed_product(one, other).astype(like.dtype))

    @jax.custom_vjp
    def product(states: list[Array], x: Array, w: Array) -> Array:
        return multiplied(low(states, 0, x), low(states, 1, w), x)

    def forward(states: list[Array], x: Array, w: Array) -> tuple[Array, Any]:
        low_x, low_w = low(states, 0, x), low(states, 1, w)
        kept = low_x if once.x else x, low_w if once.w else w
        return multiplied(low_x, low_w, x), (states, after(states, 0, x), after(states, 1, w), *kept)

    def backward(residuals: Any, g: Array) -> tuple[list[Array], Array, Array]:
        states, of_x, of_w, x, w = residuals
        arrays = {2: g, 3: w.T, 4: g.T, 5: x.T}
        lows = {place: low(states, place, array) for place, array in arrays.items()}
        low_x, low_w = x.T if once.x else lows[5], w.T if once.w else lows[3]
        unused = {place for place, is_once in zip((5, 3, 4), once, strict=True) if is_once}
        following = [
            jnp.zeros_like(states[place]) if place in unused else after(states, place, array)
            for place, array in arrays.items()
        ]
        dx = multiplied(lows[2], low_w, g)
        dw = multiplied(lows[2].T if once.g else lows[4], low_x, g)
        return [of_x, of_w, *following], dx, dw

    product.defvjp(forward, backward)
    return product


@cache
def _after(quant: Quant) -> Callable[[Array, Array], Array]:
    """Return a function of a state and an operand that returns the state of the next step."""

    def plain(state: Array, x: Array) -> Array:
        amax = ARRAYS.amax(x, (0, 1))
        if over := axes.varying(amax) - axes.varying(state):  # of all devices; by its bits, which keep NaN
            amax = ARRAYS.floats(lax.pmax(ARRAYS.bits(amax), tuple(over)))
        following: Array = next_state(ARRAYS, quant, state, amax)
        return following.at[CALLS].set(1.0)

    @jax.custom_batching.custom_vmap
    def after(state: Array, x: Array) -> Array:
        return plain(state, x)

    @after.def_vmap
    def _mapped(size: int, batched: list[bool], state: Array, x: Array) -> tuple[Array, bool]:
        if not batched[0]:
            raise UsageError(
                "vmap makes many calls of one region with delayed scales, which are those of one call. Write "
                "vmap inside of the region, or recipe=preamp.recipes.FLOAT8_CURRENT."
            )
        return jax.vmap(plain, (0, 0 if batched[1] else None))(state, x), True

    return after


@jax.custom_vjp
def _kept(states: list[Array]) -> list[Array]:
    """Return states whose derivatives are those that follow; without a call, the states themselves."""
    return states


def _kept_backward(states: list[Array], following: list[Array]) -> tuple[list[Array]]:
    pairs = zip(states, following, strict=True)
    return ([jnp.where(new[CALLS] == 0, old, new) for old, new in pairs],)


_kept.defvjp(lambda states: (states, states), _kept_backward)


def _first(recipe: Recipe) -> list[np.ndarray[Any, Any]]:
    return [np.array(first_state(quant), np.float32) for quant in recipe.quants]


def _numbered(names: Sequence[str]) -> list[str]:
    """Return names with the number of the product, from the second one of a name on."""
    counts = Counter[str]()
    found = []
    for name in names:
        counts[name] += 1
        found.append(name if counts[name] == 1 else f"{name} {counts[name]}")
    return found
