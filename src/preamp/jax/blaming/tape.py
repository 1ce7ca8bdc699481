"""A step that runs equation by equation, and the list of what ran: loops are unrolled, branches are taken.

Everything is computed at once, on arrays, so loops and branches need no derivative of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from preamp.arrays.jax import is_inexact, widen
from preamp.jax import jaxprs
from preamp.jax.autocasting.counting import LAYOUT, flops_of
from preamp.jax.blaming.operations import Operation
from preamp.jax.jaxprs import AnyJaxpr, Atom, Equation

OPAQUE = ("shard_map", "xla_pmap")
_ENTERED = {key: value for key, value in jaxprs.CALLS.items() if key not in OPAQUE} | {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
}


class Variable:
    """A value of the step.

    Args:
        value: an array.
        maker: the call that returned it; None for arguments, constants, and what is not floating.
        is_backward: whether the seed of the backward pass has a part in it.

    Attributes:
        uses: the calls that took it, in order.
        sensitivities: of the gradients and of the loss to it; None for 0.
    """

    __slots__ = ("is_backward", "maker", "sensitivities", "uses", "value")

    def __init__(self, value: Any, maker: Call | None = None, is_backward: bool = False) -> None:
        self.value, self.maker, self.is_backward = value, maker, is_backward
        self.uses: list[Call] = []
        self.sensitivities: list[Any] = [None, None]


class Unstack:
    """Takes an array apart along its first axis, for the turns of a loop."""

    name = "unstack"

    def __call__(self, array: Any) -> list[Any]:
        return list(_unstacked(array))

    def pulled(self, results: Sequence[Any]) -> list[Any]:
        """Return the sensitivity to the array, for those to the results."""
        return [_stacked(list(results))]


class Stack:
    """Puts the results of the turns of a loop together."""

    name = "stack"

    def __call__(self, *arrays: Any) -> list[Any]:
        return [_stacked(list(arrays))]

    def pulled(self, results: Sequence[Any]) -> list[Any]:
        """Return the sensitivities to the arrays, for that to the result."""
        return list(_unstacked(results[0]))


Runs: TypeAlias = Operation | Unstack | Stack


class Call:
    """One evaluation of an operation.

    Attributes:
        results: those that are floating or complex.
        overflowed: how many values of the results are not finite, but are in float32.
        is_backward: whether it belongs to the backward pass.
    """

    __slots__ = ("index", "is_backward", "operands", "operation", "overflowed", "results")

    def __init__(self, operation: Runs, operands: list[Variable], index: int) -> None:
        self.operation, self.operands, self.index = operation, operands, index
        self.results: list[Variable] = []
        self.overflowed = 0
        self.is_backward = any(each.is_backward for each in operands)


class BackwardOverflow(Exception):
    """A value of the backward pass overflowed.

    Attributes:
        excess: how many times the largest number of the low precision it is.
    """

    def __init__(self, excess: float) -> None:
        super().__init__(excess)
        self.excess = excess


class Tape:
    """Runs programs on arrays.

    Args:
        in_float32: compute everything in float32, and keep no list.
        stops: raise `BackwardOverflow` at the first overflow of the backward pass.
        without_nan: replace what is not a number, though its inputs are, by 0.

    Attributes:
        calls: what ran, in order; not what depends on nothing that low precision may change.
        flops: the floating-point operations of the forward pass's products.
        notes: sentences about what could not be compared with float32.
    """

    def __init__(self, *, in_float32: bool = False, stops: bool = False, without_nan: bool = False) -> None:
        self.calls: list[Call] = []
        self.flops = 0
        self.notes: dict[str, None] = {}
        self._in_float32, self._stops, self._without_nan = in_float32, stops, without_nan
        self._operations: dict[tuple[int, str, str], tuple[Equation, Operation]] = {}

    def run(
        self,
        program: AnyJaxpr,
        operands: Sequence[Variable],
        at: tuple[str, str] = ("", "-"),
        wanted: Sequence[bool] | None = None,
    ) -> list[Variable]:
        """Return the results of a program.

        Args:
            program: open, or closed.
            operands: its operands.
            at: the path of the module and the line that it is called from.
            wanted: for each result, whether it is used; None: all are.
        """
        jaxpr = jaxprs.inner(program)
        known = dict(zip(jaxpr.invars, operands, strict=True))
        constants = getattr(program, "consts", ())
        known.update(zip(jaxpr.constvars, map(self.constant, constants), strict=True))
        flags = [True] * len(jaxpr.outvars) if wanted is None else wanted
        results = [atom for atom, is_wanted in zip(jaxpr.outvars, flags, strict=True) if is_wanted]
        for equation in jaxprs.alive(jaxpr.eqns, results):
            if equation.outvars:  # it prints, otherwise
                given = [self._read(atom, known) for atom in equation.invars]
                known.update(zip(equation.outvars, self._visit(equation, given, at), strict=True))
        unused = Variable(None)
        return [
            self._read(atom, known) if is_wanted else unused
            for atom, is_wanted in zip(jaxpr.outvars, flags, strict=True)
        ]

    def constant(self, value: Any) -> Variable:
        """Return an array as a variable."""
        array = value if isinstance(value, jax.Array) else jnp.asarray(value)
        return Variable(widen(array) if self._in_float32 else array)

    def _read(self, atom: Atom, known: dict[Atom, Variable]) -> Variable:
        if not jaxprs.is_literal(atom):
            return known[atom]
        number = jaxprs.array_of(atom)
        return Variable(np.asarray(widen(number)) if self._in_float32 else number)

    def _visit(self, equation: Equation, operands: list[Variable], at: tuple[str, str]) -> list[Variable]:
        name, params = equation.primitive.name, equation.params
        wanted = [not jaxprs.drops(atom) for atom in equation.outvars]
        if name == "scan":
            return self._scan(equation, operands, _inside(equation, at), wanted)
        if name == "while":
            return self._while(equation, operands, _inside(equation, at))
        if name == "cond":
            last = len(params["branches"]) - 1
            branch = params["branches"][min(max(int(operands[0].value), 0), last)]
            return self.run(branch, operands[1:], _inside(equation, at), wanted)
        if name in _ENTERED:
            key = _ENTERED[name]
            program = params[key] if key in params else params["jaxpr"]
            return self.run(program, operands, _inside(equation, at), wanted)
        return self._call(self._operation(equation, at), operands)

    def _scan(
        self, equation: Equation, operands: list[Variable], at: tuple[str, str], wanted: list[bool]
    ) -> list[Variable]:
        body, length = equation.params["jaxpr"], equation.params["length"]
        constants, carries = jaxprs.scan_layout(equation.params)
        fixed, carried = operands[:constants], operands[constants : constants + carries]
        columns = (
            [self._call(Unstack(), [each]) for each in operands[constants + carries :]] if length else []
        )
        turns = list[list[Variable]]()
        order = range(length)
        for turn in reversed(order) if equation.params["reverse"] else order:
            wants = [True] * carries + wanted[carries:]
            results = self.run(body, [*fixed, *carried, *(each[turn] for each in columns)], at, wants)
            carried = results[:carries]
            turns.append(results[carries:])
        if equation.params["reverse"]:
            turns.reverse()
        avals = [atom.aval for atom in jaxprs.inner(body).outvars[carries:]]
        stacked = []
        for place, is_wanted in enumerate(wanted[carries:]):
            column = [turn[place] for turn in turns]
            if not is_wanted:
                stacked.append(Variable(None))
            elif not length:
                stacked.append(self.constant(jnp.zeros((0, *avals[place].shape), avals[place].dtype)))
            else:
                stacked += self._call(Stack(), column)
        return [*carried, *stacked]

    def _while(self, equation: Equation, operands: list[Variable], at: tuple[str, str]) -> list[Variable]:
        params = equation.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carried = operands[second:]
        while bool(self.run(params["cond_jaxpr"], [*operands[:first], *carried], at)[0].value):
            carried = self.run(params["body_jaxpr"], [*operands[first:second], *carried], at)
        return carried

    def _operation(self, equation: Equation, at: tuple[str, str]) -> Operation:
        """Return an equation as an operation, the same one in every turn of a loop."""
        key = id(equation), *at
        if key not in self._operations:
            self._operations[key] = equation, Operation(equation, *_inside(equation, at))
        return self._operations[key][1]

    def _call(self, operation: Runs, operands: list[Variable]) -> list[Variable]:
        if isinstance(operation, Operation) and operation.rounds and _is_rounded(operands[0], operation):
            return operands
        values = [each.value for each in operands]
        if self._in_float32:
            exact = _exact(operation, values) if isinstance(operation, Operation) else operation(*values)
            return [Variable(value) for value in exact]
        results, call = operation(*values), Call(operation, operands, len(self.calls))
        if isinstance(operation, Operation) and not call.is_backward:
            self.flops += flops_of(operation.equation)
        differs = isinstance(operation, Operation) and operation.differs
        is_kept = differs or any(each.maker for each in operands)
        variables = [
            Variable(value, call if is_kept and is_inexact(value) else None, call.is_backward)
            for value in results
        ]
        call.results = [each for each in variables if each.maker]
        if call.results:
            self.calls.append(call)
            for each in operands:
                each.uses.append(call)
            if differs and not all(np.isfinite(each.value).all() for each in call.results):
                self._repair(call, operation, values)
            if self._without_nan:
                self._remove_nan(call)
        return variables

    def _repair(self, call: Call, operation: Any, values: list[Any]) -> None:
        """Replace what overflowed by the largest number of its precision, and count it."""
        try:
            exact = [value for value in operation.in_float32(*values) if is_inexact(value)]
        except Exception:  # whatever a library's own primitive raises; it is noted where it is measured
            return
        for variable, value in zip(call.results, exact, strict=True):
            limit = float(jnp.finfo(operation.low or np.float32).max)
            repaired, count, peak = _repaired(variable.value, value, limit)
            variable.value = repaired
            call.overflowed += int(count)
            if count and call.is_backward and self._stops:
                raise BackwardOverflow(float(peak) / limit)

    def _remove_nan(self, call: Call) -> None:
        for variable in call.results:
            bad = np.isnan(variable.value)
            if bad.any():
                variable.value = jnp.where(bad, 0, variable.value)
                if isinstance(call.operation, Operation):
                    self.notes[
                        f"{call.operation.name} at {call.operation.source} gave NaN, and does so in float32, "
                        "given what it was given. Zeros were put there to go on: what feeds it is to blame."
                    ] = None


def made_by(variable: Variable) -> Call | None:
    """Return the call that computed a value, before its layout was changed; None for arguments."""
    maker = variable.maker
    while maker is not None and maker.operation.name in LAYOUT:
        maker = maker.operands[0].maker
    return maker


def _is_rounded(variable: Variable, operation: Operation) -> bool:
    """Return whether a variable has been rounded in the same way already."""
    maker = made_by(variable)
    before = maker and maker.operation
    return isinstance(before, Operation) and before.rounds and before.low == operation.low


def _exact(operation: Operation, values: Sequence[Any]) -> list[Any]:
    """Return an operation's results in float32; as the program has them, where float32 is refused."""
    try:
        return operation.in_float32(*values)
    except Exception:  # whatever a library's own primitive raises; it is noted where it is measured
        dtypes = [atom.aval.dtype for atom in operation.equation.invars]
        pairs = zip(values, dtypes, strict=True)
        return list(map(widen, operation(*(jnp.asarray(value, dtype) for value, dtype in pairs))))


def _inside(equation: Equation, at: tuple[str, str]) -> tuple[str, str]:
    """Return the path of the module and the line of an equation: its own, or those of what holds it."""
    source = PurePath(str(jaxprs.source_line(equation)).rpartition(" (")[0]).name
    return jaxprs.module_path(equation, at[0]), source or at[1]


@jax.jit
def _repaired(low: Any, exact: Any, limit: Any) -> tuple[Any, Any, Any]:
    """Return a result without overflows, the number of them, and the largest magnitude in float32."""
    overflowed = ~jnp.isfinite(low) & jnp.isfinite(exact)
    largest = (jnp.sign(exact) * limit).astype(low.dtype)
    peak = jnp.max(jnp.where(overflowed, jnp.abs(exact), 0), initial=0.0)
    return jnp.where(overflowed, largest, low), jnp.sum(overflowed), peak


@jax.jit
def _unstacked(array: Any) -> list[Any]:
    return [array[place] for place in range(array.shape[0])]


@jax.jit
def _stacked(arrays: list[Any]) -> Any:
    return jnp.stack(arrays)
