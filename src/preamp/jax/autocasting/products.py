"""Numbers that were cast down, differentiated as the float32 numbers that they were cast from.

Each use of a cast has a derivative of its own, which hands its cotangent on in float32: `used` for any
operator, and for a product the primitive of `product_of`, whose own sum, over the batch, is float32 as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from preamp.jax import jaxprs
from preamp.jax.autocasting.precision import FLOAT32
from preamp.jax.jaxprs import Aval
from preamp.jax.quantizing import ARRAYS
from preamp.recipes import Quant, Recipe
from preamp.recipes.arithmetic import quantized
from preamp.recipes.values import PRODUCTS as PRODUCTS_OF

PRODUCTS = frozenset(("conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"))

REHEARSED: set[Primitive] = set()
"""The primitives of products that compute in float32 and round the result."""

USED = Primitive("used")
"""The primitive of one use of a cast: takes the low numbers and the float32 ones, and returns the former."""


class Quants(NamedTuple):
    """How the operands of a `dot_general` are quantized.

    Attributes:
        recipe: of the region.
        product: which of its three products it is: 0 is fprop, 1 dgrad, 2 wgrad.
        first: the place of the operand that comes first in the recipe: the input, or a gradient.
    """

    recipe: Recipe
    product: int
    first: int

    def of(self, place: int) -> Quant | None:
        """Return how the operand at a place is quantized."""
        return self.recipe.quants[2 * self.product + (place != self.first)]

    @property
    def formats(self) -> list[str]:
        """The formats of both operands, in the recipe's order; its high precision for a product in that."""
        pair: Any = getattr(self.recipe, PRODUCTS_OF[self.product])
        return [each.format for each in pair] if pair else [self.recipe.high]

    def transposed(self, place: int) -> Quants:
        """Return those of a gradient's product, where the gradient comes first, for an operand of fprop."""
        return Quants(self.recipe, 1 if place == self.first else 2, 0)


def fits(recipe: Recipe, equation: Any) -> bool:
    """Return whether the sizes of a product are those that a recipe asks for."""
    (contracted, batch), avals = equation.params["dimension_numbers"], [it.aval for it in equation.invars]
    summed, count = (math.prod(avals[0].shape[axis] for axis in axes[0]) for axes in (contracted, batch))
    sizes = [summed, *(aval.size // max(summed * count, 1) for aval in avals)]
    return all(size and size % recipe.multiple == 0 for size in sizes)


class Pair(NamedTuple):
    """A number, and the float32 number that it was cast from.

    Attributes:
        low: the number.
        wide: what it was cast from; None if it was not cast.
        frozen: whether the number has no derivative of its own.
    """

    low: Any
    wide: Any = None
    frozen: bool = False


def _used_jvp(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Any]:
    (low, _), (_, tangent) = primals, tangents
    if type(tangent) is ad.Zero:
        return low, _zero(low)
    return low, lax.convert_element_type(tangent, low.dtype)


def _used_batched(operands: Sequence[Array], dims: Sequence[int | None]) -> tuple[Array, int]:
    return USED.bind(*_aligned(operands, dims)), 0


USED.def_impl(lambda low, wide: low)
USED.def_abstract_eval(lambda low, wide: low)
mlir.register_lowering(USED, mlir.lower_fun(lambda low, wide: low, multiple_results=False))
ad.primitive_jvps[USED] = _used_jvp
batching.primitive_batchers[USED] = _used_batched


@cache
def product_of(plain: Primitive, *, in_float32: bool = False) -> Primitive:
    """Return the primitive of a product whose derivatives with respect to float32 numbers are float32.

    It has the name and the parameters of the plain one. Its parameter `paired` has the places of the operands
    that were cast: what they were cast from comes after all operands, in the same order. `frozen` has those
    of them that have no derivative of their own. Other operands in float32 are cast to the precision of the
    others, as the tangent of a product is. A product by a recipe has the parameter `quants` as well.

    Args:
        plain: the primitive of the product.
        in_float32: compute in float32, and round the result to its dtype; backward products as well.
    """
    product = Primitive(plain.name)

    def computed(
        *operands: Array,
        paired: Sequence[int],
        frozen: Sequence[int],
        quants: Quants | None = None,
        **params: Any,
    ) -> Any:
        lows = _lowered(operands[: len(operands) - len(paired)])
        if not in_float32:
            return plain.bind(*lows, **params)
        result = evaluated(*map(jax.typeof, lows), paired=(), frozen=(), **params)
        if quants:  # a gradient in float32 is rounded, too, as the owners of recipes do
            product = _quantized(lows, quants, params["dimension_numbers"])
            return _cast(rounded(_cast(product, lows[0].dtype)), result.dtype)
        wide = {"precision": (lax.Precision.HIGHEST,) * 2, "preferred_element_type": FLOAT32}
        numbers = [_cast(rounded(it), FLOAT32) if _is_real(it) else it for it in lows]
        return rounded(_cast(plain.bind(*numbers, **params | wide), result.dtype))

    def on_cpu(*operands: Array, paired: Sequence[int], frozen: Sequence[int], **params: Any) -> Any:
        """XLA moves transposes into such a product where it may: slowly, and not at all in bfloat16."""
        if not _is_wide(params):
            return computed(*operands, paired=paired, frozen=frozen, **params)
        lows = _lowered(operands[: len(operands) - len(paired)])
        if all(it.dtype == jnp.bfloat16 for it in lows):
            is_batched = plain.name == "dot_general" and params["dimension_numbers"][1][0]
            # With axes of a batch, it is not known which layouts of bfloat16 XLA can multiply.
            lows = [_cast(it, FLOAT32) for it in lows] if is_batched else lax.optimization_barrier(lows)
        return lax.optimization_barrier(plain.bind(*lows, **params))

    def convolved_on_gpu(
        *operands: Array, paired: Sequence[int], frozen: Sequence[int], **params: Any
    ) -> Any:
        """Convolutions of GPUs have results of the dtype of their operands."""
        result = computed(
            *operands, paired=paired, frozen=frozen, **params | {"preferred_element_type": None}
        )
        return _cast(result, params["preferred_element_type"]) if _is_wide(params) else result

    def evaluated(
        *avals: Aval, paired: Sequence[int], frozen: Sequence[int], quants: object = None, **params: Any
    ) -> Any:
        abstract: Any = plain.abstract_eval(*_lowered(avals[: len(avals) - len(paired)]), **params)
        return abstract[0]

    def bind(pairs: Sequence[Pair], params: dict[str, Any]) -> Any:
        paired = tuple(place for place, each in enumerate(pairs) if each.wide is not None)
        frozen = tuple(place for place in paired if pairs[place].frozen)
        operands = [*(each.low for each in pairs), *(pairs[place].wide for place in paired)]
        return product.bind(*operands, **params, paired=paired, frozen=frozen)

    def pairs_of(operands: Sequence[Any], paired: Sequence[int], frozen: Sequence[int]) -> list[Pair]:
        wides = dict(zip(paired, operands[len(operands) - len(paired) :], strict=True))
        numbers = enumerate(operands[: len(operands) - len(paired)])
        return [Pair(number, wides.get(place), place in frozen) for place, number in numbers]

    def jvp(
        primals: Sequence[Array],
        tangents: Sequence[Any],
        *,
        paired: Sequence[int],
        frozen: Sequence[int],
        **params: Any,
    ) -> tuple[Array, Any]:
        changes = pairs_of(tangents, paired, frozen)
        # Second derivatives go through the number where it has one, so that nothing else need be kept.
        pairs = [it if it.frozen else Pair(it.low) for it in pairs_of(primals, paired, frozen)]
        terms = []
        for place, (number, change) in enumerate(zip(pairs, changes, strict=True)):
            tangent = change.low if change.wide is None else change.wide
            if type(tangent) is not ad.Zero and _is_real(number.low):
                terms.append(bind([*pairs[:place], Pair(tangent), *pairs[place + 1 :]], params))
        if in_float32 or frozen or _is_wide(params):
            result = bind(pairs, params)
        else:  # the plain product, which policies of `jax.checkpoint` know
            result = computed(*(each.low for each in pairs), paired=(), frozen=(), **params)
        return result, sum(terms[1:], terms[0]) if terms else _zero(result)

    def transposed(
        cotangent: Any,
        *operands: Any,
        paired: Sequence[int],
        frozen: Sequence[int],
        quants: Quants | None = None,
        **params: Any,
    ) -> list[Any]:
        (place,) = (number for number, each in enumerate(operands) if ad.is_undefined_primal(each))
        if type(cotangent) is ad.Zero:
            return [None] * len(operands)
        wanted, pairs = operands[place].aval, pairs_of(operands, paired, frozen)
        del pairs[place]
        others = _lowered([each.low for each in pairs])
        low = next((it.dtype for it in others if _is_real(it)), FLOAT32)
        params["preferred_element_type"] = params["preferred_element_type"] and low
        avals = (wanted.update(dtype=low), *(jax.typeof(it) for it in (cotangent, *others)))
        mesh = jax.sharding.get_abstract_mesh()
        traced = _transposed(plain, place, low, avals, tuple(params.items()), mesh)
        extra = {"quants": quants.transposed(place)} if quants and not quants.product else {}
        (result,) = _run(traced, [Pair(cotangent), *pairs], bind, plain, wanted.dtype, extra)
        return [result if number == place else None for number in range(len(operands))]

    def batched(
        operands: Sequence[Array],
        dims: Sequence[int | None],
        *,
        paired: Sequence[int],
        frozen: Sequence[int],
        quants: Quants | None = None,
        **params: Any,
    ) -> tuple[Array, int]:
        pairs, axes = pairs_of(operands, paired, frozen), pairs_of(dims, paired, frozen)
        for place in paired:
            at = axes[place].low, axes[place].wide
            if at != (None, None):
                low, wide = _aligned((pairs[place].low, pairs[place].wide), at)
                pairs[place], axes[place] = pairs[place]._replace(low=low, wide=wide), Pair(0)
        run = jax.vmap(partial(plain.bind, **params), in_axes=tuple(each.low for each in axes))
        traced = jax.make_jaxpr(run)(*_lowered([each.low for each in pairs]))
        extra = {"quants": quants} if quants else {}
        (result,) = _run(traced, pairs, bind, plain, params["preferred_element_type"], extra)
        return result, 0

    product.def_impl(computed)
    product.def_abstract_eval(evaluated)
    mlir.register_lowering(product, mlir.lower_fun(computed, multiple_results=False))
    REHEARSED.update([product] if in_float32 else [])
    special = {} if in_float32 else {"cpu": on_cpu}
    if plain.name == "conv_general_dilated" and not in_float32:
        special |= dict.fromkeys(("cuda", "rocm"), convolved_on_gpu)
    for platform, run in special.items():
        mlir.register_lowering(product, mlir.lower_fun(run, multiple_results=False), platform=platform)
    ad.primitive_jvps[product] = jvp
    ad.primitive_transposes[product] = transposed
    batching.primitive_batchers[product] = batched
    return product


@lru_cache(maxsize=4096)
def _transposed(
    plain: Primitive, place: int, low: Any, avals: Sequence[Any], params: Sequence[Any], mesh: object
) -> Any:
    """Return what JAX's rule for a plain product computes from a cotangent and the other operands.

    Args:
        plain: its primitive.
        place: of the operand whose cotangent is wanted.
        low: the dtype of all operands.
        avals: of that operand, the cotangent, and the other operands.
        params: of the product.
        mesh: the mesh around it.
    """

    def pulled(cotangent: Array, *others: Array) -> Any:
        given = (*others[:place], ad.UndefinedPrimal(avals[0]), *others[place:])
        return ad.primitive_transposes[plain](_cast(cotangent, low), *given, **dict(params))[place]

    return jax.make_jaxpr(pulled)(*avals[1:])


def _run(
    traced: Any,
    pairs: Sequence[Pair],
    bind: Callable[..., Any],
    plain: Primitive,
    dtype: Any,
    extra: dict[str, Any],
) -> list[Any]:
    """Run what JAX's rule for a plain product traced, with products by `bind` whose results have this dtype.

    Whatever the rule moves in an operand it moves in what that was cast from as well.
    """
    known: dict[Any, Pair] = dict(zip(traced.jaxpr.invars, pairs, strict=True))

    def read(atom: Any) -> Pair:
        return Pair(jaxprs.array_of(atom)) if jaxprs.is_literal(atom) else known[atom]

    for equation in traced.jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        if equation.primitive is plain:
            results = [Pair(bind(given, {**equation.params, "preferred_element_type": dtype, **extra}))]
        else:
            run = jaxprs.alone(equation)
            results = [*map(Pair, run(*(each.low for each in given)))]
            if any(each.wide is not None for each in given):
                wides = run(*(each.low if each.wide is None else each.wide for each in given))
                frozen = any(each.frozen for each in given)
                results = [
                    it._replace(wide=wide, frozen=frozen) for it, wide in zip(results, wides, strict=True)
                ]
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom).low for atom in traced.jaxpr.outvars]


def _quantized(operands: Sequence[Array], quants: Quants, numbers: Any) -> Array:
    """Return a `dot_general` of quantized matrices, in float32.

    Args:
        operands: of one dtype.
        quants: how they are quantized.
        numbers: its `dimension_numbers`. Each matrix of a batch is quantized by itself.
    """

    def product(*matrices: Array) -> Array:
        pair = [each.astype(FLOAT32) for each in matrices]
        for place, matrix in enumerate(pair):
            if quant := quants.of(place):
                pair[place] = quantized(ARRAYS, matrix, quant)
        return transposed_product(*pair)

    pair, shape = matrices(operands, numbers)
    run = jax.vmap(product) if numbers[1][0] else product
    return run(*pair).reshape(shape)


def matrices(operands: Sequence[Array], numbers: Any) -> tuple[list[Array], list[int]]:
    """Return the operands of a `dot_general` as matrices, and the shape of its result.

    Args:
        operands: of any shapes.
        numbers: its `dimension_numbers`. The last axis of both matrices is summed over, and the first one of
            three is the batch.
    """
    batch = [operands[0].shape[axis] for axis in numbers[1][0]]
    shape = [*batch]
    found: list[Array] = []
    for operand, summed, mapped in zip(operands, *numbers, strict=True):
        free = [axis for axis in range(operand.ndim) if axis not in (*summed, *mapped)]
        rows, columns = ([operand.shape[axis] for axis in axes] for axes in (free, summed))
        sizes = ([math.prod(batch)] if batch else []) + [math.prod(rows), math.prod(columns)]
        found.append(lax.transpose(operand, (*mapped, *free, *summed)).reshape(sizes))
        shape += rows
    return found, shape


def transposed_product(one: Array, other: Array) -> Array:
    """Return `one @ other.T` in full precision."""
    return lax.dot_general(one, other, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def _zero(primal: Array) -> Any:
    zero: Any = ad.Zero
    return zero.from_primal_value(primal)


def _is_wide(params: dict[str, Any]) -> bool:
    """Return whether a product asks for a result in float32."""
    asked = params["preferred_element_type"]
    return asked is not None and np.dtype(asked) == FLOAT32


def _is_real(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, np.floating))


def _lowered(operands: Sequence[Any]) -> list[Any]:
    """Return arrays or abstract values with float32 in the lower precision of the others, if there is one."""
    lows = [it.dtype for it in operands if _is_real(it) and it.dtype != FLOAT32]
    return [_cast(it, lows[0]) if lows and it.dtype == FLOAT32 else it for it in operands]


def _cast(operand: Any, dtype: Any) -> Any:
    if isinstance(operand, jax.core.ShapedArray):
        return operand.update(dtype=np.dtype(dtype))
    return lax.convert_element_type(operand, dtype)


def rounded(array: Array) -> Array:
    """Return an array rounded to its own dtype, which a compiler might keep in float32 otherwise."""
    low = jnp.finfo(array.dtype)
    return array if low.bits >= 32 else lax.reduce_precision(array, low.nexp, low.nmant)


def _aligned(operands: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
    """Return arrays of which one at least is batched, all with the batch in front."""
    size = next(it.shape[dim] for it, dim in zip(operands, dims, strict=True) if dim is not None)
    return [
        jnp.broadcast_to(it, (size, *it.shape)) if dim is None else jnp.moveaxis(it, dim, 0)
        for it, dim in zip(operands, dims, strict=True)
    ]
