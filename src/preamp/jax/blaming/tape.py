"""A step that runs equation by equation, and the list of what ran: loops are unrolled, branches are taken.

Everything is computed at once, on arrays, so loops and branches need no derivative of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from preamp.arrays.jax import is_inexact, widen
from preamp.jax import jaxprs
from preamp.jax.autocasting.counting import LAYOUT, flops_of
from preamp.jax.blaming.losses import Lost, repaired, what_is_lost
from preamp.jax.blaming.operations import Operation
from preamp.jax.jaxprs import AnyJaxpr, Atom, Equation

OPAQUE = ("shard_map", "xla_pmap")
_ENTERED = {key: value for key, value in jaxprs.CALLS.items() if key not in OPAQUE} | {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
}


class Node:
    """The place of a value among the calls, without the value.

    Args:
        maker: the call that returned it; None for arguments, constants, and what is not floating.
        is_backward: whether the seed of the backward pass has a part in it.

    Attributes:
        uses: the calls that took it, in order.
        sensitivities: of the gradients and of the loss to it; None for 0.
    """

    __slots__ = ("is_backward", "maker", "sensitivities", "uses")

    def __init__(self, maker: Call | None = None, is_backward: bool = False) -> None:
        self.maker, self.is_backward = maker, is_backward
        self.uses: list[Call] = []
        self.sensitivities: list[Any] = [None, None]


class Variable:
    """A value of the step, which lives as long as the program needs it.

    Args:
        value: an array.
        node: its place; None for a new one, which no call returned.

    Attributes:
        origin: of what is not finite in it, where a tape traces that.
        losers: the calls whose values became zero, if it has such zeros, where a tape traces that.
    """

    __slots__ = ("losers", "node", "origin", "value")

    def __init__(self, value: Any, node: Node | None = None) -> None:
        self.value, self.node = value, node or Node()
        self.origin: Origin | None = None
        self.losers: frozenset[int] = frozenset()


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


class Origin(NamedTuple):
    """Where inf and NaN come from.

    Attributes:
        what: "inf" or "NaN".
        operation: what makes it first, of finite numbers, or NaN of an inf that the program is given.
        is_given: whether the operation is given it, by the program's arguments or constants.
        losers: the calls whose values became zero in what the operation makes it of, by index.
    """

    what: str
    operation: Operation
    is_given: bool
    losers: frozenset[int] = frozenset()


class Call:
    """One evaluation of an operation.

    Args:
        operation: what runs.
        operands: what it takes.
        index: its place among all evaluations of a tape.

    Attributes:
        results: those that are floating or complex.
        kept: for each operand, the value that the derivative needs; None where it needs none.
        losses: for each of the results, what it lost; empty if that is not known, or if float32 is the same.
        overflowed: how many values of the results are not finite, but are in float32.
        breaks: what makes inf or NaN of those that became zero; empty if nothing does.
        is_backward: whether it belongs to the backward pass.
    """

    __slots__ = (
        "breaks",
        "index",
        "is_backward",
        "kept",
        "losses",
        "operands",
        "operation",
        "overflowed",
        "results",
    )

    def __init__(self, operation: Runs, operands: list[Node], index: int) -> None:
        self.operation, self.operands, self.index = operation, operands, index
        self.results: list[Node] = []
        self.kept: list[Any] = []
        self.losses: list[Lost] = []
        self.overflowed = 0
        self.breaks = ""
        self.is_backward = any(each.is_backward for each in operands)

    @property
    def active(self) -> tuple[bool, ...]:
        """For each operand, whether the sensitivity to it is wanted."""
        return tuple(each.maker is not None for each in self.operands)


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
        repairs: replace what overflows by the largest number of its precision.
        without_nan: replace what is not a number, though its inputs are, by 0.
        traces: note the origin of what is not finite.
        follows: the tape whose branches and numbers of turns are taken, so that the same evaluations run in
            the same order; None to decide anew.
        errors: by the index of a call of that tape, what to add to each of its results that is floating or
            complex; None for nothing.

    Attributes:
        calls: what ran, in order; not what depends on nothing that low precision may change.
        count: the number of evaluations, those that are not in the list among them.
        flops: the floating-point operations of the forward pass's products.
        notes: sentences about what could not be compared with float32.
        decisions: which branches were taken, and whether loops went on, in order.
    """

    def __init__(
        self,
        *,
        in_float32: bool = False,
        stops: bool = False,
        repairs: bool = True,
        without_nan: bool = False,
        traces: bool = False,
        follows: Tape | None = None,
        errors: Mapping[int, Sequence[Any]] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.count = self.flops = 0
        self.notes: dict[str, None] = {}
        self.decisions: list[int] = []
        self._in_float32, self._stops, self._without_nan = in_float32, stops, without_nan
        self._repairs, self._traces = repairs, traces
        self._followed = None if follows is None else iter(follows.decisions)
        self._errors = errors or {}
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
        equations = [each for each in jaxprs.alive(jaxpr.eqns, results) if each.outvars]  # others print
        for equation, unneeded in zip(equations, _last_used(equations, results), strict=True):
            given = [self._read(atom, known) for atom in equation.invars]
            used = [atom not in unneeded for atom in equation.outvars]
            known.update(zip(equation.outvars, self._visit(equation, given, at, used), strict=True))
            for atom in unneeded:
                known.pop(atom, None)
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

    def _visit(
        self, equation: Equation, operands: list[Variable], at: tuple[str, str], wanted: list[bool]
    ) -> list[Variable]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(equation, operands, _inside(equation, at), wanted)
        if name == "while":
            return self._while(equation, operands, _inside(equation, at))
        if name == "cond":
            last = len(params["branches"]) - 1
            branch = params["branches"][self._decided(min(max(int(operands[0].value), 0), last))]
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
        while self._decided(bool(self.run(params["cond_jaxpr"], [*operands[:first], *carried], at)[0].value)):
            carried = self.run(params["body_jaxpr"], [*operands[first:second], *carried], at)
        return carried

    def _decided(self, decision: int) -> int:
        """Return a decision of the program, or that of the tape which is followed."""
        if self._followed is not None:
            return next(self._followed)
        self.decisions.append(decision)
        return decision

    @property
    def operations(self) -> list[Operation]:
        """The operations that have run, each once, in order."""
        return [operation for _, operation in self._operations.values()]

    def _operation(self, equation: Equation, at: tuple[str, str]) -> Operation:
        """Return an equation as an operation, the same one in every turn of a loop."""
        key = id(equation), *at
        if key not in self._operations:
            self._operations[key] = equation, Operation(equation, *_inside(equation, at))
        return self._operations[key][1]

    def _call(self, operation: Runs, operands: list[Variable]) -> list[Variable]:
        self.count += 1
        if isinstance(operation, Operation) and operation.passes:
            return operands[:1]
        values = [each.value for each in operands]
        if self._in_float32:
            exact = _exact(operation, values) if isinstance(operation, Operation) else operation(*values)
            made = list(map(Variable, self._with_errors(exact)))
            if self._traces:
                _trace(made, operation, operands, frozenset())
            return made
        wide: list[Any] | None = None
        if isinstance(operation, Operation):
            results, wide = operation.compared(*values)
        else:
            results = operation(*values)
        call = Call(operation, [each.node for each in operands], self.count)
        if isinstance(operation, Operation) and not call.is_backward:
            self.flops += flops_of(operation.equation)
        differs = isinstance(operation, Operation) and operation.differs
        is_kept = differs or any(call.active)
        variables = [
            Variable(value, Node(call if is_kept and is_inexact(value) else None, call.is_backward))
            for value in results
        ]
        floats = [each for each in variables if each.node.maker]
        if floats:
            call.results = [each.node for each in floats]
            self.calls.append(call)
            for each in call.operands:
                each.uses.append(call)
            if isinstance(operation, Operation):
                needed = operation.needed(call.active)
                call.kept = [each.value if it else None for each, it in zip(operands, needed, strict=True)]
                if differs:
                    self._compare(call, operation, values, floats, wide)
            if self._without_nan:
                self._remove_nan(call, floats)
        if self._traces:
            is_loser = any(int(each.count) for each in call.losses)
            _trace(variables, operation, operands, frozenset([call.index] if is_loser else []))
        return variables

    def join_backward(self, loss: Node) -> None:
        """Count to the backward pass what nothing else uses, such as the slope of a function."""
        for call in reversed(self.calls):
            users = [user for each in call.results for user in each.uses]
            is_needed = not users or loss in call.results or not all(user.is_backward for user in users)
            if not (call.is_backward or is_needed):
                call.is_backward = True
                self.flops -= (
                    flops_of(call.operation.equation) if isinstance(call.operation, Operation) else 0
                )

    def _with_errors(self, exact: list[Any]) -> Iterator[Any]:
        """Yield the results of a call with the errors that were given for it."""
        errors = iter(self._errors.get(self.count, ()))
        for value in exact:
            error = next(errors, None) if is_inexact(value) else None
            yield value if error is None else value + error.astype(value.dtype)

    def _compare(
        self,
        call: Call,
        operation: Operation,
        values: list[Any],
        results: Sequence[Variable],
        exact: list[Any] | None,
    ) -> None:
        """Keep what the results lost, and count and repair what overflowed."""
        try:
            exact = operation.in_float32(*values) if exact is None else exact
        except Exception as error:  # a library's own primitive may raise anything
            self.notes[refusal(operation, error)] = None
            return
        limit = float(jnp.finfo(operation.low or np.float32).max)
        for variable, value in zip(results, filter(is_inexact, exact), strict=True):
            if self._repairs and not np.isfinite(variable.value).all():
                variable.value, count, amax = repaired(variable.value, value, limit)
                call.overflowed += int(count)
                if count and call.is_backward and self._stops:
                    raise BackwardOverflow(float(amax) / limit)
            call.losses.append(what_is_lost(variable.value, value))

    def _remove_nan(self, call: Call, results: Sequence[Variable]) -> None:
        for variable in results:
            bad = np.isnan(variable.value)
            if bad.any():
                variable.value = jnp.where(bad, 0, variable.value)
                if isinstance(call.operation, Operation):
                    self.notes[
                        f"{call.operation.name} at {call.operation.source} gave NaN, and does so in float32, "
                        "given what it was given. Zeros were put there to go on: what feeds it is to blame."
                    ] = None


def what_is_in(value: Any) -> str:
    """Return "NaN" or "inf" if an array has one, else ""."""
    if not is_inexact(value) or np.isfinite(value).all():
        return ""
    return "NaN" if np.isnan(value).any() else "inf"


def _trace(
    results: Sequence[Variable], operation: Runs, operands: Sequence[Variable], losers: frozenset[int]
) -> None:
    """Note where inf, NaN and zeros in results come from; losers are the calls that lose values here."""
    before = frozenset[int]().union(*(each.losers for each in operands))
    for each in results:
        each.origin = _origin(each.value, operation, operands, before)
        if (losers or before) and is_inexact(each.value) and (each.value == 0).any():
            each.losers = losers or before


def _origin(
    value: Any, operation: Runs, operands: Sequence[Variable], losers: frozenset[int]
) -> Origin | None:
    """Return the origin of what is not finite in a result; None if it is finite."""
    what = what_is_in(value)
    if not what:
        return None
    bad = [(each, kind) for each in operands if (kind := what_is_in(each.value))]
    if not isinstance(operation, Operation) or (operation.is_cast and bad):
        return next((each.origin for each, _ in bad if each.origin), None)
    bad.sort(key=lambda pair: pair[1] != what)  # NaN comes of NaN
    origins = [each.origin or Origin(kind, operation, is_given=True) for each, kind in bad]
    origin = next((each for each in origins if each.what == "NaN" or not each.is_given), None)
    if origin is None and origins and not _makes(what, operation, operands):
        return origins[0]
    return origin or Origin(what, operation, is_given=False, losers=losers)


def _makes(what: str, operation: Operation, operands: Sequence[Variable]) -> bool:
    """Return whether an operation that is given inf, as of a mask, makes what it returns by itself."""
    values = [each.value for each in operands]
    finite = [jnp.where(jnp.isfinite(each), each, 1) if is_inexact(each) else each for each in values]
    return what == "NaN" or any(map(what_is_in, _exact(operation, finite)))


def refusal(operation: Operation, error: Exception) -> str:
    """Return the note on an operation that float32 refuses."""
    why = str(error).partition("\n")[0]
    return (
        f"{operation.name} at {operation.source} cannot be computed or differentiated in float32 "
        f"({type(error).__name__}: {why:.100}): what it loses is not known, nor what is lost before it."
    )


def made_by(node: Node) -> Call | None:
    """Return the call that computed a value, before its layout was changed; None for arguments."""
    maker = node.maker
    while maker is not None and maker.operation.name in LAYOUT:
        maker = maker.operands[0].maker
    return maker


def _last_used(equations: Sequence[Equation], results: Sequence[Atom]) -> list[set[Atom]]:
    """Return for each equation the variables that nothing needs after it."""
    needed = {atom for atom in results if not jaxprs.is_literal(atom)}
    found = []
    for equation in reversed(equations):
        atoms = {atom for atom in (*equation.invars, *equation.outvars) if not jaxprs.is_literal(atom)}
        found.append(atoms - needed)
        needed |= atoms
    return found[::-1]


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
def _unstacked(array: Any) -> list[Any]:
    return [array[place] for place in range(array.shape[0])]


@jax.jit
def _stacked(arrays: list[Any]) -> Any:
    return jnp.stack(arrays)
