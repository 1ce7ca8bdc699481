"""One equation of a step: as the program has it, in float32, and the derivative of the latter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from preamp.arrays.jax import is_inexact, widen
from preamp.jax import jaxprs
from preamp.jax.autocasting.products import REHEARSED, USED, Quants
from preamp.jax.jaxprs import AnyJaxpr, Atom, ClosedJaxpr, Equation

_CASTS = ("convert_element_type", "reduce_precision")
_PASSING = (USED.name, "stop_gradient")
_KEPT = 4096  # compiled functions


class Operation:
    """An equation of a step.

    Args:
        equation: one that holds no program which was entered.
        module: the path of the module that it is in, "" outside of modules.
        source: its line, such as "train.py:41".

    Attributes:
        name: of its primitive.
        low: the low precision of its results; None if they have none.
        is_cast: whether it only changes the precision of its operand.
        signature: what it has in common with operations that compute the same.
        passes: whether its result is its first operand; that it stops the gradient has been taken care of.
        quants: how the operands of a product are quantized; None if they are not.
        is_rehearsed: whether it computes in float32, and rounds that to the dtype of its result.
        differs: whether float32 may give other results.
        floats: the places of its results that are floating or complex.
    """

    def __init__(self, equation: Equation, module: str, source: str) -> None:
        equation = _with_full_products(equation)
        self.equation, self.module, self.source = equation, module, source
        self.name: str = equation.primitive.name
        results = equation.outvars
        self.floats = [place for place, atom in enumerate(results) if is_float(atom)]
        self.is_cast = self.name in _CASTS and all(map(_is_real, (equation.invars[0], results[0])))
        lows = [atom.aval.dtype for atom in results if _is_low(atom)]
        self.low: np.dtype[Any] | None = next(iter(lows), None)
        self.passes = self.name in _PASSING or jaxprs.keeps_numbers(equation)
        self.quants: Quants | None = equation.params.get("quants")
        self.is_rehearsed = equation.primitive in REHEARSED and not self.quants
        held = any(True for _ in jaxprs.subprograms(equation))
        self.differs = self.is_cast or held or any(map(_is_low, (*equation.invars, *results)))
        self.signature = _signature(equation)

    def __call__(self, *values: Any) -> list[Any]:
        """Return its results as the program has them."""
        results: list[Any] = _compiled(self.signature)(*values)
        return results

    def compared(self, *values: Any) -> tuple[list[Any], list[Any] | None]:
        """Return its results, and those in float32 if they are rounded to the former, and None otherwise."""
        if not self.is_rehearsed:
            return self(*values), None
        exact = self.in_float32(*values)
        pairs = zip(exact, self.equation.outvars, strict=True)
        return [value.astype(atom.aval.dtype) for value, atom in pairs], exact

    def in_float32(self, *values: Any) -> list[Any]:
        """Return its results in float32; what is neither low nor float32 stays as it is."""
        if self.is_cast:
            return [jnp.asarray(values[0]).astype(wide(self.equation.outvars[0].aval.dtype))]
        compiled = _compiled_in_float32 if self.differs else _compiled
        results: list[Any] = compiled(self.signature)(*values)
        return results

    def needed(self, active: tuple[bool, ...]) -> Sequence[bool]:
        """Return for each operand whether the derivative depends on its value.

        Args:
            active: for each operand, whether its sensitivity is wanted.
        """
        if self.is_cast or not any(active):
            return [False] * len(active)
        try:
            return derivative(self.signature, active).needed
        except Exception:  # a library's own primitive may raise anything; it is noted where it is measured
            return [True] * len(active)


class Derivative(NamedTuple):
    """The derivative of an equation in float32, by reverse mode.

    Attributes:
        program: of all operands, and of the sensitivities of the results that are floating or complex.
        needed: for each operand, whether it depends on its value.
    """

    program: ClosedJaxpr
    needed: Sequence[bool]


@dataclass(frozen=True)
class Signature:
    """What equations have in common that compute the same; one of them comes with it."""

    primitive: Any
    params: Any
    avals: Any
    equation: Equation = field(compare=False)


def _signature(equation: Equation) -> Signature:
    both = equation.invars, equation.outvars
    avals = tuple(tuple(jaxprs.without_weak_type(atom.aval) for atom in atoms) for atoms in both)
    params: Any = tuple(sorted(equation.params.items(), key=lambda item: item[0]))
    try:
        hash(params)
    except TypeError:  # it is compared by identity
        params = equation
    return Signature(equation.primitive, params, avals, equation)


@lru_cache(maxsize=_KEPT)
def _compiled(signature: Signature) -> Callable[..., Any]:
    return jax.jit(jaxprs.alone(signature.equation))


@lru_cache(maxsize=_KEPT)
def _compiled_in_float32(signature: Signature) -> Callable[..., Any]:
    function = in_float32(signature.equation)
    return jax.jit(lambda *operands: function(*map(widen, operands)))


@lru_cache(maxsize=_KEPT)
def derivative(signature: Signature, active: tuple[bool, ...]) -> Derivative:
    """Return the derivative of an equation in float32.

    Args:
        signature: of the equation.
        active: for each operand, whether its sensitivity is wanted.
    """
    function, count = in_float32(signature.equation), len(active)

    def pulled(*arrays: Any) -> list[Any]:
        def exact_of(*chosen: Any) -> list[Any]:
            values = iter(chosen)
            filled = [next(values) if is_active else x for x, is_active in zip(operands, active, strict=True)]
            return [value for value in function(*filled) if is_inexact(value)]

        operands, sensitivities = [widen(array) for array in arrays[:count]], arrays[count:]
        pull = jax.vjp(exact_of, *(x for x, is_active in zip(operands, active, strict=True) if is_active))[1]
        return list(pull(list(sensitivities)))

    avals = [jaxprs.without_weak_type(atom.aval) for atom in signature.equation.invars]
    program: Any = jax.make_jaxpr(pulled)(*avals, *results_in_float32(signature.equation))
    results = program.jaxpr.outvars
    read = {atom for each in jaxprs.alive(program.jaxpr.eqns, results) for atom in _variables(each.invars)}
    read.update(_variables(results))
    return Derivative(program, [atom in read for atom in program.jaxpr.invars[:count]])


def results_in_float32(equation: Equation) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes in float32 of the results that are floating or complex."""
    avals = [atom.aval for atom in equation.outvars if is_float(atom)]
    return [jax.ShapeDtypeStruct(aval.shape, wide(aval.dtype)) for aval in avals]


def _variables(atoms: Iterable[Atom]) -> list[Atom]:
    return [atom for atom in atoms if not jaxprs.is_literal(atom)]


def in_float32(equation: Equation) -> Callable[..., list[Any]]:
    """Return a function that computes in float32 what an equation computes.

    Its derivative is that of the numbers, and not of what the operands of a product were cast from: the
    backward pass has equations of its own in the step.
    """
    if equation.primitive.name in _CASTS and all(map(_is_real, (equation.invars[0], equation.outvars[0]))):
        dtype = wide(equation.outvars[0].aval.dtype)
        return lambda operand: [operand.astype(dtype)]
    numbers, params = jaxprs.numbers_of(equation), equation.params
    if len(numbers) < len(equation.invars):
        equation = equation.replace(invars=numbers, params=params | {"paired": (), "frozen": ()})
    run = jaxprs.alone(_equation_in_float32(equation, {}))
    return lambda *operands: run(*operands[: len(numbers)])


def _equation_in_float32(equation: Equation, known: dict[Atom, Atom]) -> Equation:
    operands, results = (
        [_atom_in_float32(atom, known) for atom in atoms] for atoms in (equation.invars, equation.outvars)
    )
    params = {name: _param_in_float32(value) for name, value in equation.params.items() if name != "quants"}
    return _with_full_products(equation.replace(invars=operands, outvars=results, params=params))


def _with_full_products(equation: Equation) -> Equation:
    """Return a product of float32 as one that GPUs and TPUs do not compute in less, as they do by default."""
    is_product = equation.primitive.name in ("dot_general", "conv_general_dilated")
    if not is_product or equation.params["precision"] is not None or any(map(_is_low, equation.invars)):
        return equation
    return equation.replace(params={**equation.params, "precision": (lax.Precision.HIGHEST,) * 2})


def _param_in_float32(value: Any) -> Any:
    if isinstance(value, tuple | list):
        plain = type(value) in (tuple, list)
        return type(value)(map(_param_in_float32, value)) if plain else value
    if isinstance(value, np.dtype):
        return wide(value)
    return _program_in_float32(value) if jaxprs.is_program(value) else value


@lru_cache(maxsize=_KEPT)
def _program_in_float32(program: AnyJaxpr) -> AnyJaxpr:
    """Return a program with float32 in the place of low precisions, and without roundings."""
    if any(_is_low(atom) for atom in jaxprs.inner(program).constvars):
        raise NotImplementedError("a program with constants in a low precision")
    old, known, equations = jaxprs.inner(program), dict[Atom, Atom](), list[Equation]()
    for equation in old.eqns:
        if jaxprs.keeps_numbers(equation):
            known[equation.outvars[0]] = _atom_in_float32(equation.invars[0], known)
        else:
            equations.append(_equation_in_float32(equation, known))
    operands, results = ([_atom_in_float32(atom, known) for atom in it] for it in (old.invars, old.outvars))
    return jaxprs.rebuilt(program, operands, results, equations)


def _atom_in_float32(atom: Atom, known: dict[Atom, Atom]) -> Atom:
    if not _is_low(atom):
        return atom if jaxprs.is_literal(atom) else known.get(atom, atom)
    aval = atom.aval.update(dtype=np.dtype(np.float32))
    if jaxprs.is_literal(atom):
        return jaxprs.literal(np.float32(jaxprs.number_of(atom)), aval)
    return known.setdefault(atom, jaxprs.variable(aval))


def is_low(dtype: Any) -> bool:
    """Return whether a dtype is floating and narrower than float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32


def wide(dtype: Any) -> Any:
    """Return float32 for a low precision, and other dtypes as they are."""
    return np.dtype(np.float32) if is_low(dtype) else dtype


def _is_low(atom: Atom) -> bool:
    return jaxprs.is_array(atom.aval) and is_low(atom.aval.dtype)


def _is_real(atom: Atom) -> bool:
    return jaxprs.is_array(atom.aval) and bool(jnp.issubdtype(atom.aval.dtype, jnp.floating))


def is_float(atom: Atom) -> bool:
    """Return whether a variable is floating or complex."""
    return jaxprs.is_array(atom.aval) and bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))
