"""Jaxpr to jaxpr: the same program with casts, so that every operator runs in the precision of its rule.

Each variable of the old program is mapped to an operand of the new one and its precision there; nothing is
traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from preamp.autocasting.tables import EXPLICIT_PRECISION, Rule
from preamp.jax import jaxprs
from preamp.jax.autocasting.lookahead import Lookahead
from preamp.jax.autocasting.precision import FLOAT32, Precision, Value, is_explicit, precision_of
from preamp.jax.autocasting.rounding import ROUNDED
from preamp.jax.jaxprs import AnyJaxpr, Atom, Aval, Equation, Jaxpr


@dataclass(frozen=True)
class Settings:
    """The settings of a region.

    Attributes:
        dtype: the low precision.
        rules: primitive to rule.
        emulate: round to `dtype` in float32 instead of casting.
        name: identifies the region; regions with the same settings share it.
        flat: inline nested `jit`s.
    """

    dtype: np.dtype[Any]
    rules: Mapping[str, Rule]
    emulate: bool
    name: str
    flat: bool = False

    @property
    def low(self) -> Precision:
        """The precision that the rule 'lower' stands for."""
        return Precision(np.dtype(np.float32), self.dtype) if self.emulate else Precision(self.dtype)

    def name_in_table(self, equation: Equation) -> str:
        """Return the name whose rule an equation runs by: its primitive's, unless it asks for a precision."""
        name: str = equation.primitive.name
        asks = self.rules.get(name) == "lower" and is_explicit(equation, self.low)
        return EXPLICIT_PRECISION if asks else name


class Rewriter:
    """One region's rewriting: its programs, each rewritten once for the precisions it is called with.

    Args:
        settings: the region's.
        handlers: for the name of each primitive, what writes an equation of it into a program. Equations of
            other primitives stay as they were written.
    """

    def __init__(self, settings: Settings, handlers: Mapping[str, Callable[[Program, Any], None]]) -> None:
        self.settings = settings
        self.rules = settings.rules
        self.path: list[Any] = []  # the equations that are being rewritten, from the outermost one
        self._handlers = handlers
        self._programs: dict[Any, tuple[Any, Program]] = {}
        self._lookaheads: dict[Any, tuple[Any, Lookahead]] = {}

    def rewrite(self, program: Program, equation: Equation) -> None:
        """Write the equations that replace an equation."""
        handler = self._handlers.get(self.name(equation)) if self.enters(equation) else None
        self.path.append(equation)
        if handler:
            handler(program, equation)
        else:
            program.as_written(equation)
        self.path.pop()

    def program(self, jaxpr: AnyJaxpr, values: Sequence[Value], wanted: tuple[bool, ...]) -> Program:
        """Return a program rewritten for the precisions of its operands.

        Args:
            jaxpr: open or closed.
            values: its operands; programs are shared where what is known of the operands is the same.
            wanted: for each result, whether it is wanted in float32 where it goes.
        """
        key = id(jaxpr), tuple(value[1:] for value in values), wanted
        if key not in self._programs:
            self._programs[key] = jaxpr, Program(self, jaxpr, values, wanted)
        return self._programs[key][1]

    def lookahead(self, jaxpr: Jaxpr, wanted: tuple[bool, ...]) -> Lookahead:
        """Return what is known of an open jaxpr's variables."""
        key = id(jaxpr), wanted
        if key not in self._lookaheads:
            self._lookaheads[key] = jaxpr, Lookahead(jaxpr, wanted, self)
        return self._lookaheads[key][1]

    def bodies(self, equation: Equation) -> Iterator[tuple[AnyJaxpr, int]]:
        """Yield the programs of an equation that are rewritten with it, and where their operands begin."""
        if self.enters(equation) and equation.primitive.name not in self.rules:
            yield from jaxprs.bodies(equation)

    def name(self, equation: Equation) -> str:
        """Return the name whose rule an equation runs by, as `Settings.name_in_table` does."""
        return self.settings.name_in_table(equation)

    def rule(self, equation: Equation) -> Rule | None:
        """Return the rule that an equation runs by; None for what is left as written."""
        if not self.enters(equation):
            return None
        name = self.name(equation)
        rule = self.rules.get(name)
        if name == EXPLICIT_PRECISION and rule == "untouched":
            # As written, such an equation runs in float32, and so does the arithmetic that feeds it.
            return "float32" if _is_float32(equation) else None
        return rule

    def enters(self, equation: Equation) -> bool:
        """Return whether the programs that an equation holds are part of this region."""
        return jaxprs.region_name(equation) in (None, self.settings.name)


class Program:
    """A program while it is rewritten: the new equations so far, and what became of the old variables.

    Args:
        rewriter: the region's.
        jaxpr: the old program, open or closed.
        values: its operands.
        wanted: for each result, whether it is wanted in float32 where it goes.
        within: the program that the equations are written into; None for one of its own.
    """

    def __init__(
        self,
        rewriter: Rewriter,
        jaxpr: AnyJaxpr,
        values: Sequence[Value],
        wanted: tuple[bool, ...],
        within: Program | None = None,
    ) -> None:
        self.rewriter, self.settings, self.low = rewriter, rewriter.settings, rewriter.settings.low
        self.ahead = rewriter.lookahead(jaxprs.inner(jaxpr), wanted)
        self._jaxpr, self._old, self._fresh = jaxpr, jaxprs.inner(jaxpr), within is not None
        self._equations: list[Equation] = within._equations if within else []
        self._casts: dict[tuple[Any, Precision], Any] = within._casts if within else {}
        self._moved: dict[Any, tuple[Any, Value]] = within._moved if within else {}
        self._values: dict[Any, Value] = {}
        self._beside: Any = None
        self._finished: dict[Any, tuple[Any, list[Precision | None]]] = {}
        for atom in self._old.constvars:
            self._values[atom] = Value(atom, precision_of(atom.aval))
        for atom, value in zip(self._old.invars, values, strict=True):
            self._values[atom] = value if within else self._operand(atom, value)
        for equation in self._old.eqns:
            self._beside = equation
            rewriter.rewrite(self, equation)

    def read(self, atom: Atom) -> Value:
        """Return the value in the new program of an old variable or literal."""
        if not jaxprs.is_literal(atom):
            return self._values[atom]
        scalar = jaxprs.number_of(atom) if _is_real_scalar(atom.aval) else None
        return Value(atom, precision_of(atom.aval), scalar)

    def operands(self, equation: Equation) -> list[Value]:
        """Return the values of an equation's operands."""
        return [self.read(atom) for atom in equation.invars]

    def set(self, atom: Atom, value: Value) -> None:
        """Set the value of a variable of the old program."""
        self._values[atom] = value

    def cast(self, value: Value, precision: Precision) -> Value:
        """Return a value in a precision. The same cast is written once."""
        if value.precision is None or value.precision == precision:
            return value
        key = value.atom, precision
        if value.scalar is not None and value.atom.aval.shape == ():
            return value._replace(atom=_number(value.scalar, value.atom.aval, precision), precision=precision)
        if key not in self._casts:
            self._casts[key] = self._newly_cast(value, value.precision, precision)
        return value._replace(atom=self._casts[key], precision=precision)

    def written(self, value: Value, aval: Aval) -> Value:
        """Return a value in the dtype that the old program has at its place."""
        precision = precision_of(aval)
        return value if precision is None else self.cast(value, precision)

    def emit(
        self,
        equation: Equation,
        values: Sequence[Value],
        precisions: Sequence[Precision | None],
        params: dict[str, Any] | None = None,
    ) -> None:
        """Write an equation with these operands, precisions of its results, and parameters."""
        operands = [value.atom for value in values]
        results = [self._result(*pair) for pair in zip(equation.outvars, precisions, strict=True)]
        if params is None and operands == equation.invars and results == equation.outvars:
            self._equations.append(equation)
        else:
            params = equation.params if params is None else params
            self._equations.append(equation.replace(invars=operands, outvars=results, params=params))

    def as_written(self, equation: Equation, params: dict[str, Any] | None = None) -> None:
        """Write an equation in the dtypes that the old program has."""
        values = [self.written(self.read(atom), atom.aval) for atom in equation.invars]
        self.emit(equation, values, [precision_of(atom.aval) for atom in equation.outvars], params)

    def keep_scalar(self, equation: Equation, before: Value) -> None:
        """Remember that the result of a broadcast or move is still a known scalar."""
        result = equation.outvars[0]
        if result in self._values and (before.scalar is not None or before.weak):
            value = self._values[result]._replace(scalar=before.scalar, weak=before.weak)
            self._values[result] = value
            self._moved[value.atom] = equation, before

    def round_results(self, equation: Equation) -> None:
        """Round the results of an equation to the low precision, where that is emulated."""
        for atom in equation.outvars:
            value = self._values.get(atom)
            if value is not None and value.precision == self.low:
                exact = value._replace(precision=Precision(value.atom.aval.dtype))
                self._values[atom] = self.cast(exact, self.low)

    def rounded_again(self, value: Value) -> Value:
        """Return a value rounded to the precision that it is rounded to."""
        if value.precision is None or jaxprs.is_literal(value.atom):
            return value
        return value._replace(atom=self._round(value.atom, value.precision))

    def splice(self, equation: Equation, jaxpr: AnyJaxpr, values: Sequence[Value]) -> None:
        """Inline a program that an equation holds."""
        inside = Program(self.rewriter, jaxpr, values, self.ahead.wanted(equation.outvars), self)
        for atom, result in zip(equation.outvars, jaxprs.inner(jaxpr).outvars, strict=True):
            self._values[atom] = inside.read(result)

    def finish(self, targets: Sequence[Precision | None] | None = None) -> tuple[Any, list[Precision | None]]:
        """Return the new program and the precisions of its results.

        Args:
            targets: for each result, the precision it must have; None leaves it as it comes.
        """
        targets = tuple(targets or [None] * len(self._old.outvars))
        if targets not in self._finished:
            self._finished[targets] = self._close(targets)
        return self._finished[targets]

    def _close(self, targets: Sequence[Precision | None]) -> tuple[Any, list[Precision | None]]:
        equations, casts = self._equations, self._casts
        self._equations, self._casts = [*equations], {**casts}
        results = [
            self.read(atom) if target is None else self.cast(self.read(atom), target)
            for atom, target in zip(self._old.outvars, targets, strict=True)
        ]
        invars = [self._values[atom].atom for atom in self._old.invars]
        outvars = [value.atom for value in results]
        new = jaxprs.rebuilt(self._jaxpr, invars, outvars, _alive(self._equations, outvars))
        self._equations, self._casts = equations, casts
        return new, [value.precision for value in results]

    def _operand(self, atom: Atom, value: Value) -> Value:
        """Return a variable that stands for a value outside of the program."""
        if value.precision is None or value.precision.dtype == atom.aval.dtype:
            return value._replace(atom=atom)
        return value._replace(atom=jaxprs.variable(_with_dtype(atom.aval, value.precision.dtype)))

    def _result(self, atom: Atom, precision: Precision | None) -> Any:
        """Return the variable of a result, and remember what it is."""
        dtype = precision.dtype if precision else None
        same = dtype is None or dtype == atom.aval.dtype
        aval = atom.aval if dtype is None or same else _with_dtype(atom.aval, dtype)
        if jaxprs.drops(atom):
            return atom if same else jaxprs.dropped(aval)
        new = atom if same and not self._fresh else jaxprs.variable(aval)
        weak = precision is not None and atom.aval.weak_type and atom.aval.shape == ()
        self._values[atom] = Value(new, precision, None, weak)
        return new

    def _newly_cast(self, value: Value, before: Precision, after: Precision) -> Any:
        """Write a cast, or for a scalar that was broadcast, the broadcast of another scalar."""
        if value.atom not in self._moved:
            return self._rounded(self._stored(value, after), before, after)
        equation, operand = self._moved[value.atom]
        new = jaxprs.variable(_with_dtype(value.atom.aval, after.dtype))
        self._equations.append(equation.replace(invars=[self.cast(operand, after).atom], outvars=[new]))
        return new

    def _stored(self, value: Value, precision: Precision) -> Any:
        """Return a value's variable in the dtype that a precision is stored in."""
        old = value.atom
        if old.aval.dtype == precision.dtype:
            return old
        new = jaxprs.variable(_with_dtype(old.aval, precision.dtype))
        self._equations.append(jaxprs.cast_equation(old, new, precision.dtype, self._beside))
        if precision == FLOAT32 and value.precision is not None:
            self._casts[new, value.precision] = old  # nothing was lost on the way up
        return new

    def _rounded(self, atom: Atom, before: Precision, after: Precision) -> Any:
        if after.rounded in (None, before.name):
            return atom
        new = self._round(atom, after)
        self._casts[new, after] = new
        return new

    def _round(self, atom: Atom, precision: Precision) -> Any:
        new = jaxprs.variable(atom.aval)
        params = {"dtype": precision.rounded}
        self._equations.append(jaxprs.made_equation(atom, new, ROUNDED, params, self._beside))
        return new


def _is_float32(equation: Equation) -> bool:
    """Return whether all that autocast may cast of an equation is float32."""
    precisions = {precision_of(atom.aval) for atom in (*equation.invars, *equation.outvars)}
    return precisions <= {FLOAT32, None}


def _is_real_scalar(aval: Aval) -> bool:
    return aval.shape == () and (aval.dtype.kind in "biuf" or precision_of(aval) is not None)


@lru_cache(maxsize=4096)
def _with_dtype(aval: Aval, dtype: np.dtype[Any]) -> Any:
    return aval.update(dtype=dtype, weak_type=False)


def _number(scalar: float, aval: Aval, precision: Precision) -> Any:
    number = np.float32(scalar).astype(precision.name).astype(precision.dtype)
    return jaxprs.literal(number, _with_dtype(aval, precision.dtype))


def _alive(equations: list[Equation], results: Sequence[Atom]) -> list[Any]:
    """Return the equations that results depend on, and those with effects."""
    needed = {atom for atom in results if not jaxprs.is_literal(atom)}
    alive = []
    for equation in reversed(equations):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            alive.append(equation)
            needed.update(atom for atom in equation.invars if not jaxprs.is_literal(atom))
    return alive[::-1]
