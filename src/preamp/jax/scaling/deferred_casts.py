"""Move the casts at the end of gradients, to a wider dtype, into the conditional of the update.

The gradient of a weight that was cast ends in the cast back to float32. XLA writes the operands of a
conditional to memory, here a float32 matrix that nothing has read yet. Inside the conditional the cast fuses
with the operation that reads it, and only the narrower array is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from preamp.jax import jaxprs

Result = TypeVar("Result")
Gradients = TypeVar("Gradients")


def defer_casts(
    function: Callable[[], tuple[Result, Gradients]],
) -> tuple[Result, Gradients, Callable[[list[Array]], list[Array]]]:
    """Call a function that returns a result and gradients, without the casts at the end of its gradients.

    Args:
        function: called once, traced. Its gradients are floating or complex.

    Returns:
        The result. The gradients without their trailing casts and the transpositions around them: a tree of
        the same structure, whose leaves have the same entries in another order or a narrower dtype, and so
        the same norm. And a function that turns these leaves into those of the gradients.
    """
    call = jaxprs.traced(function)
    program = jaxprs.inner(call.jaxpr)
    outvars = program.outvars
    makers: dict[jaxprs.Atom, jaxprs.Equation] = {}
    for equation in program.eqns:
        makers.update(zip(equation.outvars[:1], [equation]))  # noqa: B905 # some have no results
    first = len(outvars) - len(jax.tree.leaves(call.returned(outvars)[1]))
    tails = [_trailing_casts(atom, makers) for atom in outvars[first:]]
    short = [tail[0].invars[0] if tail else atom for atom, tail in zip(outvars[first:], tails, strict=True)]
    shortened = jaxprs.rebuilt(call.jaxpr, program.invars, [*outvars[:first], *short], program.eqns)
    result, gradients = call.returned(jaxprs.evaluated(shortened, call.arrays))

    def finish(leaves: list[Array]) -> list[Array]:
        finished = []
        for leaf, tail in zip(leaves, tails, strict=True):
            for equation in tail:
                leaf = equation.primitive.bind(leaf, **equation.params)
            finished.append(leaf)
        return finished

    return result, gradients, finish


def _trailing_casts(atom: jaxprs.Atom, makers: dict[jaxprs.Atom, jaxprs.Equation]) -> list[jaxprs.Equation]:
    """Return the trailing casts and transpositions of a variable, in order, if one of them is a cast."""
    tail: list[jaxprs.Equation] = []
    casts = False
    while not jaxprs.is_literal(atom) and atom in makers:
        equation = makers[atom]
        is_cast = equation.primitive.name == "convert_element_type"
        if not (_is_upcast(equation) if is_cast else equation.primitive.name == "transpose"):
            break
        tail.insert(0, equation)
        casts, atom = casts or is_cast, equation.invars[0]
    return tail if casts and not jaxprs.is_literal(atom) else []


def _is_upcast(equation: jaxprs.Equation) -> bool:
    """Return whether a cast makes a float wider, which changes no entry."""
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    is_float = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return bool(is_float) and old.itemsize < new.itemsize
