"""Numbers that were cast down, differentiated as the float32 numbers that they were cast from.

Each use of a cast has a derivative of its own, which hands its cotangent on in float32: `used` for any
operator, and for a product the primitive of `product_of`, whose own sum, over the batch, is float32 as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from preamp.jax import jaxprs
from preamp.jax.jaxprs import Aval

FLOAT32 = np.dtype(np.float32)
PRODUCTS = frozenset(("conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"))

USED = Primitive("used")
"""The primitive of one use of a cast: takes the low numbers and the float32 ones, and returns the former."""


class Pair(NamedTuple):
    """A number, and the float32 number that it was cast from; None if it was not cast."""

    low: Any
    wide: Any = None


def _used_jvp(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Any]:
    (low, _), (_, tangent) = primals, tangents
    if type(tangent) is ad.Zero:
        return low, ad.Zero.from_primal_value(low)
    return low, lax.convert_element_type(tangent, low.dtype)


def _used_batched(operands: Sequence[Array], dims: Sequence[int | None]) -> tuple[Array, int]:
    return USED.bind(*_aligned(operands, dims)), 0  # type: ignore[return-value]


USED.def_impl(lambda low, wide: low)
USED.def_abstract_eval(lambda low, wide: low)
mlir.register_lowering(USED, mlir.lower_fun(lambda low, wide: low, multiple_results=False))
ad.primitive_jvps[USED] = _used_jvp
batching.primitive_batchers[USED] = _used_batched


@cache
def product_of(plain: Primitive) -> Primitive:
    """Return the primitive of a product whose derivatives with respect to float32 numbers are float32.

    It has the name and the parameters of the plain one. Its parameter `paired` has the places of the operands
    that were cast: what they were cast from comes after all operands, in the same order. Without it, float32
    operands are cast to the precision of the others; so it is the tangent of a product.
    """
    product = Primitive(plain.name)

    def computed(*operands: Array, paired: Sequence[int], **params: Any) -> Any:
        return plain.bind(*_lowered(operands[: len(operands) - len(paired)]), **params)

    def on_cpu(*operands: Array, paired: Sequence[int], **params: Any) -> Any:
        """XLA's products on a CPU are of one dtype: those of low numbers with a float32 result, of float32."""
        if _is_wide(params):
            lows = _lowered(operands[: len(operands) - len(paired)])
            operands, paired = tuple(_cast(it, FLOAT32) if _is_real(it) else it for it in lows), ()
        return computed(*operands, paired=paired, **params)

    def convolved_on_gpu(*operands: Array, paired: Sequence[int], **params: Any) -> Any:
        """Convolutions of GPUs have results of the dtype of their operands."""
        result = computed(*operands, paired=paired, **params | {"preferred_element_type": None})
        return _cast(result, params["preferred_element_type"]) if _is_wide(params) else result

    def evaluated(*avals: Aval, paired: Sequence[int], **params: Any) -> Any:
        abstract: Any = plain.abstract_eval(*_lowered(avals[: len(avals) - len(paired)]), **params)
        return abstract[0]

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Any], *, paired: Sequence[int], **params: Any
    ) -> tuple[Array, Any]:
        count = len(primals) - len(paired)
        numbers = primals[:count]
        changes = [*tangents[:count]]
        for place, change in zip(paired, tangents[count:], strict=True):
            changes[place] = change
        # A plain product, which policies of `jax.checkpoint` know; but its derivatives cannot be of two dtypes.
        run = product.bind if _is_wide(params) else computed
        result: Any = run(*numbers, paired=(), **params)
        terms = [
            product.bind(*numbers[:place], change, *numbers[place + 1 :], paired=(), **params)
            for place, change in enumerate(changes)
            if type(change) is not ad.Zero and _is_real(numbers[place])
        ]
        return result, sum(terms[1:], terms[0]) if terms else ad.Zero.from_primal_value(result)

    def transposed(cotangent: Any, *operands: Any, paired: Sequence[int], **params: Any) -> list[Any]:
        (place,) = (number for number, each in enumerate(operands) if ad.is_undefined_primal(each))
        if type(cotangent) is ad.Zero:
            return [None] * len(operands)
        wanted = operands[place].aval
        others = _lowered(operands[:place] + operands[place + 1 :])
        low = next((it.dtype for it in others if _is_real(it)), FLOAT32)
        params["preferred_element_type"] = params["preferred_element_type"] and low
        avals = (wanted.update(dtype=low), *(jax.typeof(it) for it in (cotangent, *others)))
        mesh = jax.sharding.get_abstract_mesh()
        traced = _transposed(plain, place, low, avals, tuple(params.items()), mesh)
        (result,) = _run(traced, [*map(Pair, (cotangent, *others))], plain, wanted.dtype)
        return [result if number == place else None for number in range(len(operands))]

    def batched(
        operands: Sequence[Array], dims: Sequence[int | None], *, paired: Sequence[int], **params: Any
    ) -> tuple[Array, int]:
        count = len(operands) - len(paired)
        pairs, places = [*map(Pair, operands[:count])], [*dims[:count]]
        for place, wide, dim in zip(paired, operands[count:], dims[count:], strict=True):
            if dim is not None or places[place] is not None:
                pairs[place], places[place] = (
                    Pair(*_aligned((operands[place], wide), (dims[place], dim))),
                    0,
                )
            else:
                pairs[place] = Pair(operands[place], wide)
        traced = jax.make_jaxpr(jax.vmap(partial(plain.bind, **params), in_axes=tuple(places)))(
            *_lowered([each.low for each in pairs])
        )
        (result,) = _run(traced, pairs, plain, params["preferred_element_type"])
        return result, 0

    product.def_impl(computed)
    product.def_abstract_eval(evaluated)
    mlir.register_lowering(product, mlir.lower_fun(computed, multiple_results=False))
    special = {"cpu": on_cpu}
    if plain.name == "conv_general_dilated":
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


def _run(traced: Any, pairs: Sequence[Pair], plain: Primitive, dtype: Any) -> list[Any]:
    """Run what JAX's rule for a plain product traced, with products whose results have this dtype.

    Whatever the rule moves in an operand it moves in what that was cast from as well.
    """
    known: dict[Any, Pair] = dict(zip(traced.jaxpr.invars, pairs, strict=True))

    def read(atom: Any) -> Pair:
        return Pair(jaxprs.array_of(atom)) if jaxprs.is_literal(atom) else known[atom]

    for equation in traced.jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        lows, wides = [each.low for each in given], [each.wide for each in given]
        results = wide_results = [None]
        if equation.primitive is plain:
            paired = tuple(place for place, wide in enumerate(wides) if wide is not None)
            params = {**equation.params, "preferred_element_type": dtype, "paired": paired}
            results = [product_of(plain).bind(*lows, *(wide for wide in wides if wide is not None), **params)]
        else:
            results = jaxprs.alone(equation)(*lows)
            if any(wide is not None for wide in wides):
                wide_results = jaxprs.alone(equation)(
                    *(it.low if it.wide is None else it.wide for it in given)
                )
        known.update(zip(equation.outvars, map(Pair, results, wide_results), strict=True))
    return [read(atom).low for atom in traced.jaxpr.outvars]


def _is_wide(params: dict[str, Any]) -> bool:
    """Return whether a product asks for a result in float32."""
    asked = params["preferred_element_type"]
    return asked is not None and np.dtype(asked) == FLOAT32


def _is_real(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, np.floating))


def _lowered(operands: Sequence[Any]) -> list[Any]:
    """Return arrays or abstract values with float32 in the lower precision of the others, if they have one."""
    lows = [it.dtype for it in operands if _is_real(it) and it.dtype != FLOAT32]
    return [_cast(it, lows[0]) if lows and it.dtype == FLOAT32 else it for it in operands]


def _cast(operand: Any, dtype: Any) -> Any:
    if isinstance(operand, jax.core.ShapedArray):
        return operand.update(dtype=np.dtype(dtype))
    return lax.convert_element_type(operand, dtype)


def _aligned(operands: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
    """Return arrays of which one at least is batched, all with the batch in front."""
    size = next(it.shape[dim] for it, dim in zip(operands, dims, strict=True) if dim is not None)
    return [
        jnp.broadcast_to(it, (size, *it.shape)) if dim is None else jnp.moveaxis(it, dim, 0)
        for it, dim in zip(operands, dims, strict=True)
    ]
