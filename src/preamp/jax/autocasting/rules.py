"""The rules of the table: in which precision an ordinary operator runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from preamp.autocasting import tables as casting
from preamp.autocasting.tables import Rule
from preamp.errors import CastingError
from preamp.jax.autocasting.lookahead import ARITHMETIC, INDEPENDENT, MOVES
from preamp.jax.autocasting.precision import FLOAT32, Precision, Value, has_explicit_precision, precision_of
from preamp.jax.autocasting.rewriting import Program
from preamp.jax.jaxprs import Atom, Equation, literal, source_line

Handler: TypeAlias = Callable[[Program, Equation], None]


def lower(program: Program, equation: Equation) -> None:
    """Run in the low precision."""
    if has_explicit_precision(equation):  # an algorithm for float32 cannot multiply anything else
        equation = equation.replace(params={**equation.params, "precision": None})
    _run(program, equation, program.operands(equation), program.low)


def float32(program: Program, equation: Equation) -> None:
    """Run in float32."""
    _run(program, equation, program.operands(equation), FLOAT32)


def widest(program: Program, equation: Equation) -> None:
    """Run in the widest precision among the operands, considering where the result goes."""
    values = program.operands(equation)
    floats = [value for value in values if value.precision is not None]
    if not floats:
        program.as_written(equation)
    elif equation.primitive.name in INDEPENDENT:
        program.emit(equation, values, [value.precision for value in values])
    else:
        _run(program, equation, values, _widest_with_lookahead(program, equation, floats))
        if equation.primitive.name in MOVES and len(values) == 1:
            program.keep_scalar(equation, values[0])


def as_given(program: Program, equation: Equation) -> None:
    """Run in the precision of the operands; where they differ, in float32."""
    values = program.operands(equation)
    _run(program, equation, values, _widest([value for value in values if value.precision]))


def refuse(program: Program, equation: Equation) -> None:
    """Raise: the table refuses this primitive."""
    name = program.settings.name_in_table(equation)
    lines = [line for line in map(source_line, reversed(program.rewriter.path)) if line != "-"]
    raise CastingError(
        f"{name!r} is refused in this region, and {lines[0] if lines else 'the program'} uses it. "
        f"Write autocast(fn, enabled=False) around what needs it, or table.float32({name!r})."
    )


def convert(program: Program, equation: Equation) -> None:
    """Cast as the program says; a cast to the same dtype follows what the value now is.

    `jnp.sum` and its relatives cast low numbers to float32, and the sum back: here it stays float32.
    """
    (atom,), (result,) = equation.invars, equation.outvars
    value, target = program.read(atom), precision_of(result.aval)
    if target is None:
        program.emit(equation, [value], [None])
    elif value.precision is None:
        _from_integers(program, equation, value, target)
    else:
        same = precision_of(atom.aval) == target or program.ahead.sums.get(atom) == target
        program.set(result, value if same else program.cast(value, target)._replace(weak=False))


_HANDLERS: dict[Rule, Handler] = {
    "lower": lower,
    "float32": float32,
    "widest": widest,
    "untouched": as_given,
    "refuse": refuse,
}


def handler_of(name: str, rule: Rule) -> Handler:
    """Return the function that applies a rule to a primitive.

    `untouched` leaves primitives as written that autocast's own table does not name, since they may not work
    in other dtypes, and equations that ask for their dtypes.
    """
    is_kept = name == casting.EXPLICIT_PRECISION or name not in casting.JAX
    return Program.as_written if rule == "untouched" and is_kept else _HANDLERS[rule]


def _run(program: Program, equation: Equation, values: Sequence[Value], precision: Precision) -> None:
    """Write an equation with all its castable operands and results in one precision."""
    operands = [program.cast(value, precision) for value in values]
    results = [precision if precision_of(atom.aval) else None for atom in equation.outvars]
    params = None
    asked = equation.params.get("preferred_element_type")
    if asked is not None and np.dtype(asked) != precision and results[0]:
        params = {**equation.params, "preferred_element_type": precision}
    program.emit(equation, operands, results, params)


def _holds(precision: Precision, number: float) -> bool:
    """Return whether a number is neither too large for a precision nor too small."""
    with np.errstate(all="ignore"):
        stored = float(np.float32(number).astype(precision))
    return not np.isfinite(number) or number == 0 or (bool(np.isfinite(stored)) and stored != 0)


def _widest(values: Sequence[Value]) -> Precision:
    """Return the widest precision among values. Literals count only if there is nothing else."""
    strong = {value.precision for value in values if value.scalar is None and not value.weak}
    every = strong or {value.precision for value in values}
    return (next(iter(every)) if len(every) == 1 else None) or FLOAT32


def _widest_with_lookahead(program: Program, equation: Equation, floats: Sequence[Value]) -> Precision:
    """Return the widest precision among values, narrowed for later casts and widened for later sums."""
    ahead, low, name, results = program.ahead, program.low, equation.primitive.name, equation.outvars
    precision = _widest(floats)
    wants_float32 = name in ARITHMETIC and not ahead.wants_float32.isdisjoint(results)
    if precision == FLOAT32:
        return low if not wants_float32 and _is_to_be_low(program, equation, floats) else FLOAT32
    if wants_float32:
        return FLOAT32
    held = all(_holds(precision, value.scalar) for value in floats if value.scalar is not None)
    return precision if held else FLOAT32


def _is_to_be_low(program: Program, equation: Equation, floats: Sequence[Value]) -> bool:
    """Return whether float32 operands may be cast here: a bias, or what is only moved before a cast."""
    result = equation.outvars[0]
    if equation.primitive.name == "add":
        return result in program.ahead.biases and any(value.precision == program.low for value in floats)
    if equation.primitive.name not in MOVES or program.ahead.low_of(result) != program.low:
        return False
    return all(value.scalar is None and _size(value.atom) <= _size(result) for value in floats)


def _size(atom: Atom) -> int:
    return math.prod(atom.aval.shape)


def _from_integers(program: Program, equation: Equation, value: Value, precision: Precision) -> None:
    """Cast integers straight to the low precision where nothing wants float32."""
    result = equation.outvars[0]
    if value.scalar is not None and result.aval.shape == ():
        number = literal(np.asarray(value.scalar, precision), result.aval)
        program.set(result, Value(number, precision, value.scalar))
        return
    if precision == FLOAT32 and program.ahead.low_of(result) == program.low:
        precision = program.low
    params = {**equation.params, "new_dtype": precision, "weak_type": False}
    program.emit(equation, [value], [precision], params)
