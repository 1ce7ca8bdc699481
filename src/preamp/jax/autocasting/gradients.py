"""Jaxpr to jaxpr: the same numbers, and each use of a cast hands its cotangent on in float32.

A weight is cast once, outside of loops. Differentiated as written, the cotangents of all its uses would be
added in the low precision, before the cast back. Here the float32 weight goes along with its low numbers,
through moves and into loops, and each use is differentiated with respect to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core.primitives import broadcast_in_dim_p, stop_gradient_p

from preamp.jax import jaxprs
from preamp.jax.autocasting.lookahead import ARITHMETIC, MOVES, SPREADS
from preamp.jax.autocasting.precision import FLOAT32, cast_of, precision_of
from preamp.jax.autocasting.products import PRODUCTS, USED, product_of
from preamp.jax.jaxprs import AnyJaxpr, Atom, ClosedJaxpr, Equation

MOVED = (MOVES | SPREADS) - {"convert_element_type"}
"""Primitives that what a number was cast from goes through with it: their transposes may add up."""


HOLDERS = {*jaxprs.CALLS, "cond", "scan"}
"""Primitives whose programs have casts of their own, or are given what operands were cast from."""


SPREADING = ARITHMETIC | {"max", "min", "rem"}
"""Primitives whose operands may have axes of one entry where the result has more."""


def with_float32_gradients(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr in which each use of a float32 number that is cast has a float32 cotangent."""
    new: ClosedJaxpr = _Program(jaxpr, (False,) * len(jaxpr.jaxpr.invars), {}).rebuilt(
        len(jaxpr.jaxpr.invars)
    )
    return new


class _Program:
    """A program while it is rewritten.

    Args:
        jaxpr: open or closed.
        paired: for each operand, whether it is given what it was cast from as well.
        programs: those that were rewritten, by what they are and were given.
    """

    def __init__(self, jaxpr: AnyJaxpr, paired: Sequence[bool], programs: dict[Any, tuple[Any, Any]]) -> None:
        self._jaxpr, self._programs = jaxpr, programs
        old = jaxprs.inner(jaxpr)
        self._wide: dict[Atom, Atom] = {}
        self._equations: list[Equation] = []
        self._casts: set[Atom] = set()
        self._roundings: dict[Atom, Equation] = {}  # of casts, in a rehearsal
        atoms = [atom for equation in old.eqns for atom in equation.invars] + old.outvars
        self._uses = Counter(atom for atom in atoms if not jaxprs.is_literal(atom))
        for atom, is_paired in zip(old.invars, paired, strict=True):
            if is_paired:
                self._wide[atom] = _float32(atom)
        self._extra = [*self._wide.values()]
        for equation in old.eqns:
            self._write(equation)
        self._outvars = [self._used(atom) for atom in old.outvars]

    def rebuilt(self, place: int) -> Any:
        """Return the new program, which takes what its operands were cast from at a place among them."""
        invars = jaxprs.inner(self._jaxpr).invars
        invars = [*invars[:place], *self._extra, *invars[place:]]
        return jaxprs.rebuilt(
            self._jaxpr, invars, self._outvars, jaxprs.alive(self._equations, self._outvars)
        )

    def _write(self, equation: Equation) -> None:
        name, (*operands,) = equation.primitive.name, equation.invars
        wides = [None if jaxprs.is_literal(atom) else self._wide.get(atom) for atom in operands]
        if _is_cast_down(equation):
            self._wide[equation.outvars[0]] = operands[0]
            self._casts.add(equation.outvars[0])
            self._equations.append(equation)
        elif jaxprs.keeps_numbers(equation) and any(wides) and operands[0] in self._casts:
            self._wide[equation.outvars[0]] = self._wide[operands[0]]
            self._casts.add(equation.outvars[0])
            self._roundings[equation.outvars[0]] = equation
            self._equations.append(equation)
        elif (
            name in PRODUCTS
            and not equation.params.get("paired")
            and any(wides)
            and precision_of(equation.outvars[0].aval) != FLOAT32
        ):
            is_plain = "paired" not in equation.params
            paired = tuple(place for place, wide in enumerate(wides) if wide)
            frozen = tuple(place for place in paired if operands[place] not in self._casts)
            self._equations.append(
                equation.replace(
                    primitive=product_of(equation.primitive) if is_plain else equation.primitive,
                    invars=[*operands, *filter(None, wides)],
                    params={**equation.params, "paired": paired, "frozen": frozen},
                )
            )
        elif not any(wides) and name not in HOLDERS:
            self._equations.append(equation)
        elif not (name in MOVED and self._moves(equation, wides)) and not self._enter(equation, wides):
            used = [self._used(self._spread(atom, equation), equation) for atom in operands]
            self._equations.append(equation if used == operands else equation.replace(invars=used))

    def _moves(self, equation: Equation, wides: list[Atom | None]) -> bool:
        """Move what the operands were cast from, if all were; return whether they were.

        What is used nowhere else is cast after the move instead.
        """
        floats = [place for place, atom in enumerate(equation.invars) if precision_of(atom.aval)]
        is_literal = [jaxprs.is_literal(atom) for atom in equation.invars]
        if not all(wides[place] or is_literal[place] for place in floats):
            return False
        operands = list(equation.invars)
        for place in floats:
            operands[place] = wides[place] or _float32_literal(operands[place])
        results = [_float32(atom) for atom in equation.outvars]
        self._wide.update(zip(equation.outvars, results, strict=True))
        self._equations.append(equation.replace(invars=operands, outvars=results))
        if all(self._is_one_cast(equation.invars[place]) for place in floats) and len(results) == 1:
            self._cast(equation.outvars[0], equation.invars[floats[0]], equation)
        else:
            self._equations.append(equation)
        return True

    def _cast(self, atom: Atom, before: Atom, beside: Equation) -> None:
        """Cast to a number that is known by what it is cast from, as the number before a move was cast."""
        self._casts.add(atom)
        rounding, dtype = self._roundings.get(before), atom.aval.dtype
        low = jaxprs.variable(atom.aval) if rounding else atom
        self._equations.append(jaxprs.cast_equation(self._wide[atom], low, dtype, beside))
        if rounding:
            self._roundings[atom] = rounding.replace(invars=[low], outvars=[atom])
            self._equations.append(self._roundings[atom])

    def _is_one_cast(self, atom: Atom) -> bool:
        """Return whether a number is the result of a cast, and used once; its derivative is right then."""
        return not jaxprs.is_literal(atom) and atom in self._casts and self._uses[atom] <= 1

    def _enter(self, equation: Equation, wides: list[Atom | None]) -> bool:
        """Rewrite what an equation holds, if gradients are added up there; return whether it did."""
        name, params = equation.primitive.name, equation.params
        if name in jaxprs.CALLS:
            key, start, end = jaxprs.CALLS[name], 0, len(wides)
        elif name == "cond":
            key, start, end = "branches", 1, len(wides)
        elif name == "scan":
            key, start, end = "jaxpr", 0, jaxprs.scan_layout(params)[0]
        else:
            return False
        programs = params[key] if name == "cond" else (params[key],)
        if any(jaxprs.inner(each).effects for each in programs):
            return False  # some are known by the number of an operand
        taken = [bool(wide) and start <= place < end for place, wide in enumerate(wides)]
        new = tuple(self._program(each, tuple(taken[start:]), end - start) for each in programs)
        if all(a is b for a, b in zip(new, programs, strict=True)):
            return False
        operands = [
            self._frozen(atom, equation) if pairs else self._used(atom, equation)
            for atom, pairs in zip(equation.invars, taken, strict=True)
        ]
        extra = [wide for wide, pairs in zip(wides, taken, strict=True) if wide and pairs]
        places = [place for place, pairs in enumerate(taken) if pairs]
        params = jaxprs.with_operands(equation, places) | {key: new if name == "cond" else new[0]}
        operands[end:end] = extra
        self._equations.append(equation.replace(invars=operands, params=params))
        return True

    def _program(self, jaxpr: AnyJaxpr, paired: tuple[bool, ...], place: int) -> Any:
        key = id(jaxpr), paired
        if key not in self._programs:
            inside = _Program(jaxpr, paired, self._programs)
            changed = any(paired) or inside._equations != jaxprs.inner(jaxpr).eqns
            self._programs[key] = jaxpr, inside.rebuilt(place) if changed else jaxpr
        return self._programs[key][1]

    def _used(self, atom: Atom, beside: Equation | None = None) -> Atom:
        """Return a low number, differentiated as what it was cast from."""
        wide = None if jaxprs.is_literal(atom) else self._wide.get(atom)
        if wide is None or self._is_one_cast(atom):
            return atom
        new = jaxprs.variable(jaxprs.without_weak_type(atom.aval))
        self._equations.append(jaxprs.made_equation([atom, wide], new, USED, {}, beside))
        return new

    def _spread(self, atom: Atom, equation: Equation) -> Atom:
        """Return an operand in the shape of the result: what spreads it would add its cotangents up."""
        if jaxprs.is_literal(atom) or not equation.outvars:
            return atom
        shape, wide = equation.outvars[0].aval.shape, self._wide.get(atom)
        if wide is None or equation.primitive.name not in SPREADING or atom.aval.shape in ((), shape):
            return atom
        params = {"shape": shape, "broadcast_dimensions": (*range(len(shape)),), "sharding": None}
        new, spread = (jaxprs.variable(it.aval.update(shape=shape, weak_type=False)) for it in (atom, wide))
        self._equations.append(jaxprs.made_equation([wide], spread, broadcast_in_dim_p, params, equation))
        self._wide[new] = spread
        self._cast(new, atom, equation)
        return new

    def _frozen(self, atom: Atom, beside: Equation) -> Atom:
        """Return a low number without a derivative of its own, which a loop would add up for nothing."""
        new = jaxprs.variable(atom.aval)
        self._equations.append(jaxprs.made_equation([atom], new, stop_gradient_p, {}, beside))
        return new


def _is_cast_down(equation: Equation) -> bool:
    before, after = cast_of(equation)
    is_down = before == FLOAT32 and after not in (None, FLOAT32)
    return is_down and not jaxprs.is_literal(equation.invars[0])


def _float32(atom: Atom) -> Atom:
    aval = atom.aval.update(dtype=np.dtype(np.float32)) if precision_of(atom.aval) else atom.aval
    return jaxprs.dropped(aval) if jaxprs.drops(atom) else jaxprs.variable(aval)


def _float32_literal(atom: Atom) -> Atom:
    return jaxprs.literal(np.float32(jaxprs.number_of(atom)), atom.aval.update(dtype=np.dtype(np.float32)))
