"""Reads the jaxpr of a program that autocast made: equations, casts, the precision of products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

__all__ = ["HALVES", "body", "casts", "dtypes", "equations", "traced"]

HALVES = ("float16", "bfloat16")
FLOATS = ("float16", "bfloat16", "float32")


def traced(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return all equations of a function, those in nested programs included."""
    return list(equations(jax.make_jaxpr(fn)(*args)))


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if hasattr(each, "eqns") or hasattr(each, "jaxpr"):
                    yield from equations(each)


def body(fn: Callable[..., Any], *args: Any, of: str, key: str = "jaxpr") -> list[Any]:
    """Return the equations in the program that a function's only equation of a primitive holds."""
    (found,) = [equation for equation in traced(fn, *args) if equation.primitive.name == of]
    return list(equations(found.params[key]))


def dtypes(fn: Callable[..., Any], *args: Any, of: str = "dot_general") -> list[str]:
    """Return the dtypes that the equations of a primitive are given, in order."""
    return [
        str(equation.invars[0].aval.dtype) for equation in traced(fn, *args) if equation.primitive.name == of
    ]


def casts(all_equations: list[Any]) -> list[tuple[str, str]]:
    """Return the casts between floats: from and to."""
    pairs = [
        (str(equation.invars[0].aval.dtype), str(equation.outvars[0].aval.dtype))
        for equation in all_equations
        if equation.primitive.name == "convert_element_type"
    ]
    return [(before, after) for before, after in pairs if {before, after} <= set(FLOATS)]
