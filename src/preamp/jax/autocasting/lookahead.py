"""How the rest of a program uses each value, found before anything is rewritten.

A program is read from its end to its beginning, to find the values that feed operators in float32, those that
feed only operators in low precision, and the additions of a bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from preamp.autocasting.tables import Rule
from preamp.jax.jaxprs import AnyJaxpr, Atom, Equation, Jaxpr, hoistable, inner, is_literal


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARITHMETIC = _names("add sub mul div neg square integer_pow sqrt abs select_n")
"""Primitives that run in float32 when their result feeds an operator that runs in float32."""

REARRANGEMENTS = _names(
    "convert_element_type copy copy_p expand_dims name reshape rev sharding_constraint squeeze stop_gradient"
    " transpose"
)
MOVES = REARRANGEMENTS | _names("broadcast_in_dim concatenate dynamic_slice gather pad slice")
"""Primitives that change no number, so that a cast may be before or after them."""

EXACT = MOVES | _names("abs clamp dynamic_update_slice max min neg reduce_max reduce_min select_n sign")
"""Primitives that map numbers of a low precision to numbers of the same: no rounding is needed after them."""

INDEPENDENT = _names("device_put optimization_barrier sort")
"""Primitives whose operands do not mix: each result is as precise as the operand in its place."""


class Reader(Protocol):
    """What the lookahead has to know about primitives and the programs they hold."""

    def rule(self, equation: Equation) -> Rule | None:
        """Return the rule that an equation runs by; None for what is left as written."""

    def bodies(self, equation: Equation) -> Iterator[tuple[AnyJaxpr, int]]:
        """Yield the programs of an equation that are rewritten with it, and where their operands begin."""

    def lookahead(self, jaxpr: Jaxpr, wanted: tuple[bool, ...]) -> Lookahead:
        """Return the lookahead of such a program."""


class Lookahead:
    """How an open jaxpr uses its variables.

    Args:
        jaxpr: the program.
        wanted: for each of its results, whether it is wanted in float32 where it goes.
        reader: knows primitives, and the programs they hold.

    Attributes:
        wants_float32: variables that an operator in float32 uses, directly or after arithmetic.
        products: results of operators in low precision, perhaps rearranged.
        biases: result to bias, for additions of a product and a smaller array that was broadcast.
    """

    def __init__(self, jaxpr: Jaxpr, wanted: tuple[bool, ...], reader: Reader) -> None:
        self.wants_float32: set[Atom] = set()
        self.products: set[Atom] = set()
        self.biases: dict[Atom, Atom] = {}
        self._spread: set[Atom] = set()
        self._low: set[Atom] = set()
        self._elsewhere: set[Atom] = set()
        self._reader = reader
        for equation in jaxpr.eqns:  # biases are known by what they are added to, uses by what comes after
            self._read_forward(equation)
        for atom, is_wanted in zip(jaxpr.outvars, wanted, strict=True):
            self._use(atom, float32=is_wanted)
        for equation in reversed(jaxpr.eqns):
            self._read_backward(equation)

    def wants_low(self, atom: Atom) -> bool:
        """Return whether operators in low precision use a variable, and nothing else does."""
        return atom in self._low and atom not in self._elsewhere

    def wanted(self, atoms: list[Atom]) -> tuple[bool, ...]:
        """Return for each variable whether it is wanted in float32."""
        return tuple(atom in self.wants_float32 for atom in atoms)

    def uses(self, equation: Equation) -> dict[int, list[tuple[Lookahead, Atom]]]:
        """Return by place which variables of which programs take the operands that may be cast before."""
        entered = self._entered(equation)
        return {place: entered[place] for place in hoistable(equation) if place in entered}

    def _use(self, atom: Atom, *, low: bool = False, float32: bool = False) -> None:
        if is_literal(atom):
            return
        (self._low if low else self._elsewhere).add(atom)
        if float32:
            self.wants_float32.add(atom)

    def _read_forward(self, equation: Equation) -> None:
        name, operands, results = equation.primitive.name, equation.invars, equation.outvars
        if self._reader.rule(equation) == "lower":
            self.products.update(results)
        elif name == "add":
            self._note_bias(results[0], *operands)
        elif name in MOVES:
            self._note_move(name, operands[0], results[0])
        else:
            for body, _ in self._reader.bodies(equation):
                inside = self._reader.lookahead(inner(body), (False,) * len(results)).products
                self.products.update(
                    result
                    for atom, result in zip(inner(body).outvars, results, strict=True)
                    if not is_literal(atom) and atom in inside
                )

    def _note_bias(self, result: Atom, *terms: Atom) -> None:
        if not any(map(is_literal, terms)):
            for one, other in (terms, terms[::-1]):
                if one in self.products and other in self._spread:
                    self.biases[result] = other

    def _note_move(self, name: str, before: Atom, after: Atom) -> None:
        if is_literal(before):
            return
        if name in REARRANGEMENTS and before in self.products:
            self.products.add(after)
        spreads = name in ("broadcast_in_dim", "reshape") and _spreads(before.aval.shape, after.aval.shape)
        if spreads or (name in REARRANGEMENTS and before in self._spread):
            self._spread.add(after)

    def _read_backward(self, equation: Equation) -> None:
        name, operands = equation.primitive.name, equation.invars
        rule = self._reader.rule(equation)
        if rule in ("lower", "float32"):
            for atom in operands:
                self._use(atom, low=rule == "lower", float32=rule == "float32")
        elif rule == "widest":
            self._read_widest(name, operands, equation.outvars)
        else:
            self._read_others(equation)

    def _read_widest(self, name: str, operands: list[Atom], results: list[Atom]) -> None:
        float32 = (name in ARITHMETIC or name in MOVES) and any(map(self.wants_float32.__contains__, results))
        low = name in MOVES and self.wants_low(results[0])
        bias = None if float32 else self.biases.get(results[0])
        for atom in operands:
            smaller = low and math.prod(atom.aval.shape) <= math.prod(results[0].aval.shape)
            self._use(atom, low=smaller or (bias is not None and atom is bias), float32=float32)

    def _read_others(self, equation: Equation) -> None:
        entered = self._entered(equation)
        outside = self.uses(equation)
        for place, atom in enumerate(equation.invars):
            float32 = any(taken in inside.wants_float32 for inside, taken in entered.get(place, ()))
            low = place in outside and all(inside.wants_low(taken) for inside, taken in outside[place])
            self._use(atom, low=low, float32=float32)

    def _entered(self, equation: Equation) -> dict[int, list[tuple[Lookahead, Atom]]]:
        """Return for each place of an operand what takes it inside of an equation."""
        uses: dict[int, list[tuple[Lookahead, Atom]]] = {}
        for body, first in self._reader.bodies(equation):
            inside = self._reader.lookahead(inner(body), self.wanted(equation.outvars))
            for place, taken in enumerate(inner(body).invars, first):
                uses.setdefault(place, []).append((inside, taken))
        return uses


def _spreads(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether an array gets more dimensions or more numbers."""
    return math.prod(before) < math.prod(after) or 0 < len(before) < len(after)
