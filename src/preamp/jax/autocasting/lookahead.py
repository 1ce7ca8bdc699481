"""Analyze how the rest of a jaxpr uses each value, before anything is rewritten.

The pass goes from the last equation to the first. It finds the values that feed operators in float32, those
that feed only operators in low precision, and the additions of a bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from preamp.jax.autocasting.precision import FLOAT32, Precision, cast_of, precision_of
from preamp.jax.autocasting.settings import Settings
from preamp.jax.jaxprs import Atom, Equation, Jaxpr, hoistable, inner, is_literal


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

SPREADS = _names("all_gather all_gather_invariant pbroadcast pcast pvary")
"""Primitives that change no number, but what devices have it."""

EXACT = MOVES | _names("abs clamp dynamic_update_slice max min neg reduce_max reduce_min select_n sign")
"""Primitives that map numbers of a low precision to numbers of the same: no rounding is needed after them."""

SUMS = _names("reduce_prod reduce_sum reduce_window_sum")
"""Primitives that `jnp` gives low numbers cast to float32, and whose result it casts back."""

INDEPENDENT = _names("device_put optimization_barrier sort")
"""Primitives whose operands do not mix: each result is as precise as the operand in its place."""


class Reader(Protocol):
    """What the lookahead has to know about a region."""

    @property
    def settings(self) -> Settings:
        """The region's settings."""

    def lookahead(self, jaxpr: Jaxpr, wanted: tuple[bool, ...], path: str) -> Lookahead:
        """Return the lookahead of a program that an equation holds."""


class Lookahead:
    """How an open jaxpr uses its variables.

    The lookahead stops where the settings of a module begin or end, as it does where a region begins or ends:
    beyond that, nothing counts as wanted in float32.

    Args:
        jaxpr: the program.
        wanted: for each of its results, whether it is wanted in float32 where it is used.
        path: the path of the module that the program is called in.
        reader: knows the settings, and the programs that equations hold.

    Attributes:
        wants_float32: variables that an operator in float32 uses, directly or after arithmetic.
        products: results of operators in low precision, perhaps rearranged.
        biases: result to bias, for additions of a product and a smaller array that was broadcast.
        sums: sums, and their means, of low numbers that the program cast to float32, and the dtype of these.
    """

    def __init__(self, jaxpr: Jaxpr, wanted: tuple[bool, ...], path: str, reader: Reader) -> None:
        self.wants_float32: set[Atom] = set()
        self.products: set[Atom] = set()
        self.biases: dict[Atom, Atom] = {}
        self.sums: dict[Atom, Precision] = {}
        self._origins: dict[Atom, Precision | None] = {}  # None: integers and numbers only
        self._spread: set[Atom] = set()
        self._lows: dict[Atom, set[Precision | None]] = {}
        self._reader, self._region = reader, reader.settings
        self._path = path
        around = self._region.inside(path)
        self._made_in: dict[Atom, Settings] = dict.fromkeys(jaxpr.invars, around)
        casts = map(cast_of, jaxpr.eqns)
        self._casts_up = any(after == FLOAT32 and before not in (None, FLOAT32) for before, after in casts)
        for equation in jaxpr.eqns:  # biases are known by what they are added to, uses by what comes after
            self._read_forward(equation)
        for atom, is_wanted in zip(jaxpr.outvars, wanted, strict=True):
            self._use(atom, around, float32=is_wanted)
        for equation in reversed(jaxpr.eqns):
            self._read_backward(equation)

    def low_of(self, atom: Atom) -> Precision | None:
        """Return the low precision of the operators that use a variable, if nothing else uses it."""
        return common(self._lows.get(atom, ()))

    def wanted(self, atoms: list[Atom]) -> tuple[bool, ...]:
        """Return for each variable whether it is wanted in float32."""
        return tuple(atom in self.wants_float32 for atom in atoms)

    def uses(self, equation: Equation) -> dict[int, list[tuple[Lookahead, Atom]]]:
        """Return, by operand number, the inner variables of operands that may be cast before the equation."""
        entered = self._entered(equation)
        return {place: entered[place] for place in hoistable(equation) if place in entered}

    def _settings(self, equation: Equation) -> Settings:
        return self._region.inside(self._region.path_of(equation, self._path))

    def _use(
        self, atom: Atom, settings: Settings, low: Precision | None = None, *, float32: bool = False
    ) -> None:
        """Note that a variable is used where these settings hold.

        Args:
            atom: the variable, or a literal.
            settings: the settings of the equation that uses it.
            low: the low precision that it is cast to there, None if it is not cast to one.
            float32: whether it is wanted in float32 there.
        """
        if is_literal(atom):
            return
        self._lows.setdefault(atom, set()).add(low)
        if float32 and self._made_in.get(atom) is settings:
            self.wants_float32.add(atom)

    def _read_forward(self, equation: Equation) -> None:
        name, operands, results = equation.primitive.name, equation.invars, equation.outvars
        settings = self._settings(equation)
        self._made_in.update(dict.fromkeys(results, settings))
        if self._casts_up:
            self._note_sum(equation, settings)
        if settings.rule(equation) == "lower":
            self.products.update(results)
        elif name == "add":
            self._note_bias(results[0], *operands)
        elif name in MOVES:
            self._note_move(name, operands[0], results[0])
        else:
            path = self._region.path_of(equation, self._path)
            for body, _ in settings.bodies(equation):
                inside = self._reader.lookahead(inner(body), (False,) * len(results), path).products
                self.products.update(
                    result
                    for atom, result in zip(inner(body).outvars, results, strict=True)
                    if not is_literal(atom) and atom in inside
                )

    def _note_sum(self, equation: Equation, settings: Settings) -> None:
        """Note which values are computed from low numbers that the program itself cast to float32."""
        name, results = equation.primitive.name, equation.outvars
        if [precision_of(atom.aval) for atom in results] != [FLOAT32]:
            return
        floats = [atom for atom in equation.invars if not is_literal(atom) and precision_of(atom.aval)]
        casts = name == "convert_element_type" and precision_of(equation.invars[0].aval) != FLOAT32
        arrays = [atom for atom in floats if atom.aval.shape or atom in self._origins]
        origins = {atom.aval.dtype if casts else self._origins.get(atom, FLOAT32) for atom in arrays}
        origins.discard(None)
        if len(origins) > 1 or FLOAT32 in origins:
            return
        origin = self._origins[results[0]] = next(iter(origins), None)
        summed = [self._origins.get(atom) is None or atom in self.sums for atom in floats]
        sums = name in SUMS and settings.rule(equation) == "float32"
        if origin is not None and (sums or (all(summed) and not casts)):
            self.sums[results[0]] = origin

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
        settings = self._settings(equation)
        rule = settings.rule(equation)
        if rule in ("lower", "float32"):
            low = settings.dtype if rule == "lower" else None
            for atom in equation.invars:
                self._use(atom, settings, low, float32=rule == "float32")
        elif rule == "widest":
            self._read_widest(equation, settings)
        else:
            self._read_others(equation, settings)

    def _read_widest(self, equation: Equation, settings: Settings) -> None:
        name, results, low = equation.primitive.name, equation.outvars, settings.dtype
        float32 = (name in ARITHMETIC or name in MOVES) and any(map(self.wants_float32.__contains__, results))
        is_moved = name in MOVES and self.low_of(results[0]) == low
        bias = None if float32 else self.biases.get(results[0])
        for atom in equation.invars:
            smaller = is_moved and math.prod(atom.aval.shape) <= math.prod(results[0].aval.shape)
            is_cast = smaller or (bias is not None and atom is bias)
            self._use(atom, settings, low if is_cast else None, float32=float32)

    def _read_others(self, equation: Equation, settings: Settings) -> None:
        entered, outside = self._entered(equation), self.uses(equation)
        is_cast = equation.primitive.name == "convert_element_type"
        widens = is_cast and equation.outvars[0] in self.wants_float32
        for place, atom in enumerate(equation.invars):
            inner_uses = entered.get(place, ())
            float32 = widens or any(taken in inside.wants_float32 for inside, taken in inner_uses)
            low = common(inside.low_of(taken) for inside, taken in outside.get(place, ()))
            self._use(atom, settings, low, float32=float32)

    def _entered(self, equation: Equation) -> dict[int, list[tuple[Lookahead, Atom]]]:
        """Return, by operand number, the variables that take the operand inside an equation."""
        uses: dict[int, list[tuple[Lookahead, Atom]]] = {}
        path = self._region.path_of(equation, self._path)
        for body, first in self._settings(equation).bodies(equation):
            inside = self._reader.lookahead(inner(body), self.wanted(equation.outvars), path)
            for place, taken in enumerate(inner(body).invars, first):
                uses.setdefault(place, []).append((inside, taken))
        return uses


def common(precisions: Iterable[Precision | None]) -> Precision | None:
    """Return the precision that all these are, None if they differ or there are none."""
    found = set(precisions)
    return found.pop() if len(found) == 1 else None


def _spreads(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether an array gets more dimensions or more numbers."""
    return math.prod(before) < math.prod(after) or 0 < len(before) < len(after)
