"""How much the gradients and the loss change with each result of a step: reverse mode over what ran.

The step is differentiated as float32 would compute it, at the values that the program had. So no value is
computed again, and of a product only the two products of its derivative are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from preamp.arrays.jax import is_inexact, widen
from preamp.jax import jaxprs
from preamp.jax.blaming.operations import Operation, Signature, in_float32, is_float, wide
from preamp.jax.blaming.tape import Call, Stack, Tape, Unstack, Variable

GRADIENTS, LOSS = 0, 1
"""The places of a variable's sensitivities."""


class Measured(NamedTuple):
    """What a result lost; numbers on the device.

    Attributes:
        error: the 2-norm of the difference from float32.
        size: the 2-norm in float32.
        effect: the 2-norm of the difference times the sensitivity of the gradients to it.
        loss_effect: the sum of the difference times the derivative of the loss.
        lost: the number of values that are zero, but not in float32.
        lost_size: the 2-norm of those in float32.
        peak: the largest magnitude in float32.
    """

    error: Any
    size: Any
    effect: Any
    loss_effect: Any
    lost: Any
    lost_size: Any
    peak: Any


def seed(variable: Variable, place: int, value: Any) -> None:
    """Add to one of a variable's sensitivities.

    Args:
        variable: anything; nothing is kept for arguments and constants.
        place: `GRADIENTS` or `LOSS`.
        value: an array of its shape.
    """
    if variable.maker is not None:
        before = variable.sensitivities[place]
        variable.sensitivities[place] = value if before is None else lax.add(before, value)


def measure(tape: Tape) -> dict[Call, list[Measured]]:
    """Return what each call lost, those that float32 does not change left out.

    Sensitivities that were seeded are carried to every variable of the tape; values and sensitivities are
    dropped on the way.
    """
    measured: dict[Call, list[Measured]] = {}
    for call in reversed(tape.calls):
        operation = call.operation
        sensitivities = [[each.sensitivities[place] for each in call.results] for place in (GRADIENTS, LOSS)]
        if isinstance(operation, Operation):
            try:
                if operation.differs:
                    measured[call] = _compared(call, operation, sensitivities)
                _pull(call, operation, sensitivities)
            except Exception as error:  # a library's own primitive may raise anything
                tape.notes[_refusal(operation, error)] = None
        else:
            _pull_layout(call, operation, sensitivities)
        for each in call.results:
            each.value, each.sensitivities = None, [None, None]
    return measured


def _refusal(operation: Operation, error: Exception) -> str:
    why = str(error).partition("\n")[0]
    return (
        f"{operation.name} at {operation.source} cannot be computed or differentiated in float32 "
        f"({type(error).__name__}: {why:.100}): what it loses is not known, nor what is lost before it."
    )


def _compared(call: Call, operation: Operation, sensitivities: list[list[Any]]) -> list[Measured]:
    exact = operation.in_float32(*(each.value for each in call.operands))
    floats = [exact[place] for place in operation.floats]
    found = []
    for result, value, gradient, loss in zip(call.results, floats, *sensitivities, strict=True):
        zeros = jnp.zeros_like(value) if gradient is None else gradient  # so that one compiled function does
        measured = _measured(result.value, value, zeros, zeros if loss is None else loss)
        unknown = [name for name, each in (("effect", gradient), ("loss_effect", loss)) if each is None]
        found.append(measured._replace(**dict.fromkeys(unknown, 0.0)))
    return found


def _pull(call: Call, operation: Operation, sensitivities: list[list[Any]]) -> None:
    active = tuple(each.maker is not None for each in call.operands)
    taken = [each for each in call.operands if each.maker is not None]
    for place, results in enumerate(sensitivities):
        if taken and any(each is not None for each in results):
            values = [each.value for each in call.operands]
            for variable, array in zip(taken, _pulled(operation, values, active, results), strict=True):
                seed(variable, place, array)


def _pulled(
    operation: Operation, operands: Sequence[Any], active: tuple[bool, ...], results: Sequence[Any]
) -> list[Any]:
    """Return the sensitivities to the active operands; those that are not finite are taken for 0.

    Args:
        operation: what ran.
        operands: as the program had them.
        active: for each operand, whether the sensitivity to it is wanted.
        results: the sensitivity to each result that is floating or complex; None for 0.
    """
    if operation.is_cast:
        return [result.astype(wide(operation.equation.invars[0].aval.dtype)) for result in results]
    given = [each for each in results if each is not None]
    program, tape = _derivative(operation.signature, active, tuple(each is not None for each in results))
    return [_finite(each.value) for each in tape.run(program, list(map(Variable, [*operands, *given])))]


@lru_cache(maxsize=4096)
def _derivative(signature: Signature, active: tuple[bool, ...], given: tuple[bool, ...]) -> tuple[Any, Tape]:
    """Return the derivative of an equation in float32, by reverse mode.

    Args:
        signature: of the equation.
        active: for each operand, whether its sensitivity is wanted.
        given: for each floating or complex result, whether its sensitivity is given.

    Returns:
        A program of all operands and of the sensitivities of results that are given, and what runs it.
    """
    function, count = in_float32(signature.equation), len(active)

    def pulled(*arrays: Any) -> list[Any]:
        def exact_of(*chosen: Any) -> list[Any]:
            values = iter(chosen)
            filled = [next(values) if is_active else x for x, is_active in zip(operands, active, strict=True)]
            return [value for value in function(*filled) if is_inexact(value)]

        operands, sensitivities = [widen(array) for array in arrays[:count]], iter(arrays[count:])
        exact, pull = jax.vjp(
            exact_of, *(x for x, is_active in zip(operands, active, strict=True) if is_active)
        )
        pairs = zip(exact, given, strict=True)
        return list(pull([next(sensitivities) if it else jnp.zeros_like(value) for value, it in pairs]))

    avals = [jaxprs.without_weak_type(atom.aval) for atom in signature.equation.invars]
    floats = [atom.aval for atom in signature.equation.outvars if is_float(atom)]
    results = [
        jax.ShapeDtypeStruct(aval.shape, wide(aval.dtype))
        for aval, it in zip(floats, given, strict=True)
        if it
    ]
    return jax.make_jaxpr(pulled)(*avals, *results), Tape(in_float32=True)


def _finite(array: Any) -> Any:
    return array if np.isfinite(array).all() else jnp.where(jnp.isfinite(array), array, 0)


def _pull_layout(call: Call, operation: Unstack | Stack, sensitivities: Iterable[Sequence[Any]]) -> None:
    for place, arrays in enumerate(sensitivities):
        if any(each is not None for each in arrays):
            filled = [
                jnp.zeros(variable.value.shape, variable.value.dtype) if each is None else each
                for variable, each in zip(call.results, arrays, strict=True)
            ]
            for variable, array in zip(call.operands, operation.pulled(filled), strict=True):
                seed(variable, place, array)


@jax.jit
def _measured(low: Array, exact: Array, gradient: Array, loss: Array) -> Measured:
    """Compare a result with float32, where both are finite.

    Args:
        low: the result in the program.
        exact: the same in float32.
        gradient: the sensitivity of the gradients to it.
        loss: that of the loss.
    """
    low = low.astype(exact.dtype)
    usable = jnp.isfinite(low) & jnp.isfinite(exact)
    low, exact = jnp.where(usable, low, 0), jnp.where(usable, exact, 0)
    peak = jnp.max(jnp.abs(exact), initial=0.0)
    size = jnp.where(peak > 0, peak, 1)  # so that squares neither overflow nor underflow
    error, lost = low - exact, (low == 0) & (exact != 0)
    terms = [
        jnp.square(jnp.abs(error / size)),
        jnp.square(jnp.abs(exact / size)),
        jnp.square(jnp.abs(error * gradient)),
        error * loss,
        lost.astype(peak.dtype),
        jnp.square(jnp.where(lost, jnp.abs(exact / size), 0)),
    ]
    squares = _sums(terms)
    return Measured(
        error=size * jnp.sqrt(squares[0]),
        size=size * jnp.sqrt(squares[1]),
        effect=jnp.sqrt(squares[2]),
        loss_effect=squares[3],
        lost=squares[4],
        lost_size=size * jnp.sqrt(squares[5]),
        peak=peak,
    )


def _sums(terms: Sequence[Array]) -> Sequence[Array]:
    """Return the sums of arrays of one shape, all in one pass: it compiles faster than one for each.

    The last axis is summed first: added to one total, the small terms of a large array would be lost.
    """
    rows = [jnp.real(term).reshape(-1, *term.shape[-1:]) for term in terms]
    zeros = [jnp.zeros((), each.dtype) for each in rows]
    for axis in reversed(range(rows[0].ndim)):
        rows = list(lax.reduce(tuple(rows), tuple(zeros), _added, (axis,)))
    return rows


def _added(some: Sequence[Array], others: Sequence[Array]) -> Sequence[Array]:
    return tuple(a + b for a, b in zip(some, others, strict=True))
