"""Trees of parameters and gradients: which leaves are floating, and which are not gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array

from preamp.arrays import jax as arrays

Tree = TypeVar("Tree")


@dataclass(frozen=True, eq=False)
class FlowSlot:
    """The argument of the loss that `watch` counts in, made by `flow_slot`.

    The derivative of a loss with respect to it is a `FlowSlot` with the counts. The functions of `preamp.jax`
    that unscale, measure or clip gradients leave it unchanged, and with an `axis_name` the counts are added
    up over devices.

    Attributes:
        counts: a float32 array of shape [256], one count for each binary exponent.
    """

    counts: Array


@dataclass(frozen=True, eq=False)
class RecipeScales:
    """The scales of a delayed recipe, made by `recipe_state`: the first argument of a region.

    The derivative of a loss with respect to them is the scales after the step. The functions of `preamp.jax`
    that unscale, measure or clip gradients leave it unchanged. To save and restore them, save `products`.

    In a differentiated function they are for one call of the region: JAX adds up what several calls return.
    That is refused, or, where it cannot be seen, as in a `scan` around the region, the next results are NaN.

    Attributes:
        products: for each product with a weight, by the path of its module or by its line, six float32
            vectors, for the operands of fprop, dgrad and wgrad: the scale, the number of calls that were
            added up, 1, and the largest magnitudes of earlier steps, newest first.
    """

    products: dict[str, list[Array]]


def is_flow_slot(node: object) -> bool:
    """Return whether a node of a tree is a slot, for `is_leaf`."""
    return isinstance(node, FlowSlot)


def is_no_gradient(node: object) -> bool:
    """Return whether a node of a tree of gradients is something else, for `is_leaf`."""
    return isinstance(node, FlowSlot | RecipeScales)


for _kind, _name in ((FlowSlot, "counts"), (RecipeScales, "products")):
    jax.tree_util.register_dataclass(_kind, data_fields=[_name], meta_fields=[])


def split(tree: Tree) -> tuple[list[Array], Callable[[Iterable[Array]], Tree]]:
    """Return the floating and complex leaves of a tree, and a function that puts others in their places.

    The counts of `watch` and the scales of a recipe are not among them.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_no_gradient)
    places = [place for place, leaf in enumerate(leaves) if arrays.is_inexact(leaf)]

    def rebuild(replacements: Iterable[Array]) -> Tree:
        filled = list(leaves)
        for place, leaf in zip(places, replacements, strict=True):
            filled[place] = leaf
        return cast(Tree, jax.tree.unflatten(structure, filled))

    return [leaves[place] for place in places], rebuild


def map_inexact(function: Callable[[Array], Array], tree: Tree) -> Tree:
    """Apply a function to the floating and complex leaves of a tree that `split` returns."""
    leaves, rebuild = split(tree)
    return rebuild(map(function, leaves))


def unscale(tree: Tree, scale: Array) -> Tree:
    """Return a tree of gradients divided by the loss scale, in float32 where they were narrower."""
    leaves, rebuild = split(tree)
    return rebuild(arrays.multiply_by_inverse(leaves, scale))


def multiply(tree: Tree, factor: Array | float) -> Tree:
    """Return a tree times a scalar: float16 and bfloat16 become float32, other dtypes stay."""
    leaves, rebuild = split(tree)
    return rebuild(arrays.multiply(leaves, factor))


def widen(tree: Tree) -> Tree:
    """Return a tree whose float16, bfloat16 and narrower leaves are float32."""
    return cast(Tree, jax.tree.map(arrays.widen, tree))


def cast_like(tree: Tree, reference: object) -> Tree:
    """Return a tree in the dtypes of another."""
    return cast(Tree, jax.tree.map(_cast_like, tree, reference))


def _cast_like(leaf: object, reference: object) -> Array:
    dtype = jnp.asarray(reference).dtype
    array = cast(Array, leaf) if hasattr(leaf, "dtype") else jnp.asarray(leaf)  # line searches give numbers
    return array if array.dtype == dtype else array.astype(dtype)


def all_finite(tree: object) -> Array:
    """Return whether all entries are finite: a boolean scalar.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"w": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])}))
    False
    """
    leaves = split(tree)[0]
    return arrays.size_of(leaves, jnp.ones(()), arrays.global_norm(leaves)).finite


def kind_of(value: object) -> str:
    """Return what a value is, in words that name no tracers."""
    if hasattr(value, "shape"):
        return f"an array of shape {value.shape}"
    return f"a {type(value).__name__}"
