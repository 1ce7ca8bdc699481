"""What gradients end in, which may as well wait: a cast to a longer dtype, and transpositions around it.

The gradient of a weight that was cast ends in the cast back. A conditional is where XLA writes out what it is
given: a float32 matrix, before anything has read it. Inside the conditional the cast fuses with what
reads it, and what is written is the short one. This room cuts a traced function there. It refuses to know
what becomes of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from preamp.jax import jaxprs
from preamp.jax.autocasting.transform import traced


def cut(
    function: Callable[..., tuple[Any, Any]], *args: Any, **kwargs: Any
) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Call a function that returns a result and gradients, but for what the gradients end in.

    Args:
        function: called once, traced.
        args: anything; what is no array stays what it is.
        kwargs: likewise.

    Returns:
        The result. The gradients without their ends: a tree alike, whose leaves have the same entries in
        another order or a shorter dtype, and so the same norm. And what turns these into the gradients.
    """
    call = traced(function, args, kwargs)
    program = jaxprs.inner(call.jaxpr)
    makers = {equation.outvars[0]: equation for equation in program.eqns if _may_wait(equation)}
    count = len(jax.tree.leaves(call.returned(program.outvars)[1]))
    others, last = (
        program.outvars[: len(program.outvars) - count],
        program.outvars[len(program.outvars) - count :],
    )
    tails = [_tail(variable, makers) for variable in last]
    early = [tail[0].invars[0] if tail else variable for variable, tail in zip(last, tails, strict=True)]
    shortened = jaxprs.rebuilt(call.jaxpr, program.invars, [*others, *early], program.eqns)
    result, gradients = call.returned(jaxprs.evaluated(shortened, call.arrays))

    def finish(gradients: Any) -> Any:
        leaves, structure = jax.tree.flatten(gradients)
        return jax.tree.unflatten(structure, map(_finished, leaves, tails))

    return result, gradients, finish


def _may_wait(equation: Any) -> bool:
    """Return whether an equation changes no entry: it transposes, or makes a float longer."""
    if equation.primitive.name == "transpose":
        return True
    if equation.primitive.name != "convert_element_type":
        return False
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new)) and old.itemsize < new.itemsize


def _tail(variable: Any, makers: dict[Any, Any]) -> list[Any]:
    """Return the equations that may wait, in order, if one of them is a cast."""
    tail: list[Any] = []
    while not jaxprs.is_literal(variable) and variable in makers:
        tail.insert(0, makers[variable])
        variable = tail[0].invars[0]
    casts = any(equation.primitive.name == "convert_element_type" for equation in tail)
    return tail if casts and not jaxprs.is_literal(variable) else []


def _finished(gradient: Any, tail: list[Any]) -> Any:
    for equation in tail:
        gradient = equation.primitive.bind(gradient, **equation.params)
    return gradient
