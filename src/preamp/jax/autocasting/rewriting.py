"""Jaxpr to jaxpr: the same program with casts, so that every operator runs in the precision of its rule.

Each variable of the old program is mapped to an operand of the new one and its precision there; nothing is
traced again.

A rehearsal has the same casts and dtypes. Its products compute in float32, as tensor cores do. A compiler may
keep low numbers in float32 from one operator to the next, so each is followed by a rounding that stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import reduce_precision_p

from preamp.autocasting.tables import Rule
from preamp.errors import UsageError
from preamp.jax import jaxprs
from preamp.jax.autocasting import delayed
from preamp.jax.autocasting.delayed import State
from preamp.jax.autocasting.lookahead import EXACT, MOVES, SPREADS, Lookahead
from preamp.jax.autocasting.precision import FLOAT32, LOWS, Precision, Value, precision_of
from preamp.jax.autocasting.products import PRODUCTS, Quants, fits, product_of
from preamp.jax.autocasting.settings import Settings
from preamp.jax.jaxprs import AnyJaxpr, Atom, Aval, Equation, Jaxpr
from preamp.recipes import Recipe

WEIGHTS = (MOVES | SPREADS) - {"gather"}
"""Primitives whose result is a weight if their operands are: not rows that are looked up in a table."""


class Rewriter:
    """One region's rewriting: its programs, each rewritten once for the precisions it is called with.

    Args:
        settings: the settings of the region.
        handlers_of: takes rules, and returns the function that writes each primitive into a program.
            Equations of other primitives stay as they were written.
    """

    def __init__(
        self,
        settings: Settings,
        handlers_of: Callable[[Mapping[str, Rule]], Mapping[str, Callable[[Program, Any], None]]],
    ) -> None:
        self.settings = settings
        self.path: list[Any] = []  # the equations that are being rewritten, from the outermost one
        self._handlers_of = handlers_of
        self._handlers: dict[int, Mapping[str, Callable[[Program, Any], None]]] = {}
        self._programs: dict[Any, tuple[Any, Program]] = {}
        self._lookaheads: dict[Any, tuple[Any, Lookahead]] = {}

    def rewrite(self, program: Program, equation: Equation) -> None:
        """Write the equations that replace an equation."""
        settings = program.settings
        if id(settings) not in self._handlers:
            self._handlers[id(settings)] = self._handlers_of(settings.rules)
        name = settings.name_in_table(equation)
        handler = self._handlers[id(settings)].get(name) if settings.enters(equation) else None
        self.path.append(equation)
        if handler:
            handler(program, equation)
        else:
            program.as_written(equation)
        floats = [value for value in program.operands(equation) if value.precision]
        if equation.primitive.name in WEIGHTS and floats and all(value.weight for value in floats):
            program.keep_weight(equation.outvars[0])
        self.path.pop()

    def program(
        self, jaxpr: AnyJaxpr, values: Sequence[Value], wanted: tuple[bool, ...], path: str
    ) -> Program:
        """Return a program rewritten for the precisions of its operands.

        Args:
            jaxpr: open or closed.
            values: its operands; programs are shared where the same is known of their operands.
            wanted: for each result, whether it is wanted in float32 where it is used.
            path: the path of the module that it is called in.
        """
        key = id(jaxpr), tuple(value[1:] for value in values), wanted, path
        if key not in self._programs:
            self._programs[key] = jaxpr, Program(self, jaxpr, values, wanted, path)
        return self._programs[key][1]

    def lookahead(self, jaxpr: Jaxpr, wanted: tuple[bool, ...], path: str) -> Lookahead:
        """Return what is known of an open jaxpr's variables."""
        key = id(jaxpr), wanted, path
        if key not in self._lookaheads:
            self._lookaheads[key] = jaxpr, Lookahead(jaxpr, wanted, path, self)
        return self._lookaheads[key][1]


class Program:
    """A program while it is rewritten: the new equations so far, and the new values of the old variables.

    Args:
        rewriter: the rewriter of the region.
        jaxpr: the old program, open or closed.
        values: its operands.
        wanted: for each result, whether it is wanted in float32 where it is used.
        path: the path of the module that it is called in.
        within: the program that the equations are written into; None for one of its own.

    Attributes:
        path: the path of the module whose equation is being rewritten.
        settings: the settings of that module.
        low: their low precision.
        states: of its products with delayed scales, in order; they are operands after all others.
    """

    def __init__(
        self,
        rewriter: Rewriter,
        jaxpr: AnyJaxpr,
        values: Sequence[Value],
        wanted: tuple[bool, ...],
        path: str,
        within: Program | None = None,
    ) -> None:
        self.rewriter, self.path = rewriter, path
        self.settings = rewriter.settings.inside(path)
        self.low = self.settings.dtype
        self.ahead = rewriter.lookahead(jaxprs.inner(jaxpr), wanted, path)
        self._jaxpr, self._old, self._fresh = jaxpr, jaxprs.inner(jaxpr), within is not None
        self._equations: list[Equation] = within._equations if within else []
        self._casts: dict[tuple[Any, Precision], Any] = within._casts if within else {}
        self._moved: dict[Any, tuple[Any, Value]] = within._moved if within else {}
        self._values: dict[Any, Value] = {}
        self.states: list[State] = within.states if within else []
        self._beside: Any = None
        self._finished: dict[Any, tuple[Any, list[Precision | None]]] = {}
        for atom in self._old.constvars:
            self._values[atom] = Value(atom, precision_of(atom.aval))
        for atom, value in zip(self._old.invars, values, strict=True):
            self._values[atom] = value if within else self._operand(atom, value)
        for equation in self._old.eqns:
            self._beside = equation
            self.path = rewriter.settings.path_of(equation, path)
            self.settings = rewriter.settings.inside(self.path)
            self.low = self.settings.dtype
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
            self._casts[key] = self._newly_cast(value, precision)
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
        is_product = equation.primitive.name in PRODUCTS and "paired" not in equation.params
        if self.settings.emulate and is_product and precisions[0] in LOWS:
            params = {**(params or equation.params), "paired": (), "frozen": ()}
            product = product_of(equation.primitive, in_float32=True)
            quants = self._quants(equation, values)
            params |= {"quants": quants} if quants else {}
            if quants and quants.recipe.delayed:
                source = PurePath(jaxprs.source_line(equation).rpartition(" (")[0]).name
                states = self.state(self.path or source, quants.recipe)
                equation = delayed.product_of(equation, states, operands, quants)
                operands, params = equation.invars, equation.params
            else:
                equation = equation.replace(primitive=product, params=params)
        if params is None and operands == equation.invars and results == equation.outvars:
            self._equations.append(equation)
        else:
            params = equation.params if params is None else params
            self._equations.append(equation.replace(invars=operands, outvars=results, params=params))
        if self.settings.emulate and _is_to_be_rounded(equation):
            for atom in filter(self._values.__contains__, equation.outvars):
                value = self._values[atom]
                self._values[atom] = value._replace(atom=self._rounded(value.atom))

    def state(self, name: str, recipe: Recipe) -> list[Atom]:
        """Return the variables of a new state, which the program is given."""
        self.states.append(State.new(name, recipe))
        return self.states[-1].atoms

    def _quants(self, equation: Equation, values: Sequence[Value]) -> Quants | None:
        """Return how a recipe quantizes a product; None if it stays high."""
        recipe, weights = self.settings.recipe, [value.weight for value in values]
        if recipe is None or equation.primitive.name != "dot_general":
            return None
        if jaxprs.is_transposed(equation):
            raise UsageError(
                f"{jaxprs.source_line(equation)} is differentiated inside of a region with a recipe, which "
                "does not know there which product is a gradient's. Write jax.grad(autocast(loss_fn, "
                "recipe=recipe, weights=(0,)))."
            )
        if sum(weights) != 1 or not fits(recipe, equation):
            return None
        if recipe.delayed and equation.params["dimension_numbers"][1][0]:
            raise delayed.refusal("vmap", equation)
        return Quants(recipe, 0, first=weights.index(False))

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

    def keep_weight(self, atom: Atom) -> None:
        """Remember that the result of a move is still a weight."""
        if atom in self._values:
            self._values[atom] = self._values[atom]._replace(weight=True)

    def splice(self, equation: Equation, jaxpr: AnyJaxpr, values: Sequence[Value]) -> None:
        """Inline a program that an equation holds."""
        wanted = self.ahead.wanted(equation.outvars)
        inside = Program(self.rewriter, jaxpr, values, wanted, self.path, self)
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
        invars += [atom for state in self.states for atom in state.atoms]
        outvars = [value.atom for value in results]
        new = jaxprs.rebuilt(self._jaxpr, invars, outvars, jaxprs.alive(self._equations, outvars))
        self._equations, self._casts = equations, casts
        return new, [value.precision for value in results]

    def _operand(self, atom: Atom, value: Value) -> Value:
        """Return a variable that stands for a value outside of the program."""
        if value.precision is None or value.precision == atom.aval.dtype:
            return value._replace(atom=atom)
        return value._replace(atom=jaxprs.variable(_with_dtype(atom.aval, value.precision)))

    def _result(self, atom: Atom, precision: Precision | None) -> Any:
        """Return the variable of a result, and remember what it is."""
        same = precision is None or precision == atom.aval.dtype
        aval = atom.aval if precision is None or same else _with_dtype(atom.aval, precision)
        if jaxprs.drops(atom):
            return atom if same else jaxprs.dropped(aval)
        new = atom if same and not self._fresh else jaxprs.variable(aval)
        weak = precision is not None and atom.aval.weak_type and atom.aval.shape == ()
        self._values[atom] = Value(new, precision, None, weak)
        return new

    def _newly_cast(self, value: Value, precision: Precision) -> Any:
        """Write a cast, or for a scalar that was broadcast, the broadcast of another scalar."""
        old, new = value.atom, jaxprs.variable(_with_dtype(value.atom.aval, precision))
        if old in self._moved:
            equation, operand = self._moved[old]
            operand = self.cast(operand, precision)
            self._equations.append(equation.replace(invars=[operand.atom], outvars=[new]))
            return new
        self._equations.append(jaxprs.cast_equation(old, new, precision, self._beside))
        if precision == FLOAT32 and value.precision is not None:
            self._casts[new, value.precision] = old  # nothing was lost on the way up
        return self._rounded(new)

    def _rounded(self, atom: Atom) -> Any:
        """In a rehearsal, return a low variable rounded to its dtype: no compiler drops that."""
        if not self.settings.emulate or precision_of(atom.aval) not in LOWS:
            return atom
        new, low = jaxprs.variable(atom.aval), jnp.finfo(atom.aval.dtype)
        params = {"exponent_bits": low.nexp, "mantissa_bits": low.nmant}
        self._equations.append(jaxprs.made_equation([atom], new, reduce_precision_p, params, self._beside))
        return new


def _is_to_be_rounded(equation: Equation) -> bool:
    """Return whether an equation computes low numbers, and does not round them itself."""
    rounds = equation.primitive.name in EXACT or "paired" in equation.params
    return not rounds and not any(jaxprs.subprograms(equation))


def _is_real_scalar(aval: Aval) -> bool:
    return aval.shape == () and (aval.dtype.kind in "biuf" or precision_of(aval) is not None)


@lru_cache(maxsize=4096)
def _with_dtype(aval: Aval, dtype: Precision) -> Any:
    return aval.update(dtype=dtype, weak_type=False)


def _number(scalar: float, aval: Aval, precision: Precision) -> Any:
    with np.errstate(over="ignore"):  # inf where it is beyond the range, as in an array
        number = np.float32(scalar).astype(precision)
    return jaxprs.literal(number, _with_dtype(aval, precision))
