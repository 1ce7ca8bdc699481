"""The settings of a region and of the modules in it: in which precision an equation runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from preamp.autocasting.tables import DEFAULT, EXPLICIT_PRECISION, Casting, Rule, Scope
from preamp.jax import jaxprs
from preamp.jax.autocasting.names import rules_in, scope_of
from preamp.jax.autocasting.precision import FLOAT32, LOWS, is_explicit, precision_of
from preamp.jax.jaxprs import AnyJaxpr, Equation
from preamp.recipes.values import KNOWN, Recipe


@dataclass(frozen=True)
class Settings:
    """The settings of a region, or of a module in it.

    Attributes:
        dtype: the low precision.
        rules: primitive to rule.
        emulate: rehearse: compute products in float32, and let no compiler drop a rounding.
        name: identifies the region; regions with the same settings share it.
        flat: inline nested `jit`s.
        table: the region's edits. Those of modules are not in `rules`.
        recipe: how products with a weight are quantized; None if they stay high.
    """

    dtype: np.dtype[Any]
    rules: Mapping[str, Rule]
    emulate: bool
    name: str
    flat: bool = False
    table: Casting = DEFAULT
    recipe: Recipe | None = None
    _in_modules: dict[str, Settings] = field(init=False, default_factory=dict, compare=False, repr=False)
    _in_scopes: dict[Scope, Settings] = field(init=False, default_factory=dict, compare=False, repr=False)

    @cached_property
    def has_modules(self) -> bool:
        """Whether the table has edits of modules, or scales are to be named by them."""
        return bool(self.table.modules) or self.delayed

    @cached_property
    def delayed(self) -> bool:
        """Whether the region, or a module in it, takes scales of earlier steps."""
        found = (self.recipe, *map(KNOWN.get, self.table.modules.values())) if self.recipe else ()
        return any(recipe is not None and recipe.delayed for recipe in found)

    def path_of(self, equation: Equation, within: str) -> str:
        """Return the path of the module that an equation is in, or `within` if no edit names a module.

        Args:
            equation: the equation.
            within: the path of the equation that holds the program it is in.
        """
        return jaxprs.module_path(equation, within) if self.has_modules else within

    def inside(self, path: str) -> Settings:
        """Return the settings of a module: this object, if the table has no edit for it."""
        if not self.has_modules:
            return self
        if path not in self._in_modules:
            scope = scope_of(self.table, path)
            self._in_modules[path] = self if scope is None else self._inside(scope)
        return self._in_modules[path]

    def _inside(self, scope: Scope) -> Settings:
        if scope not in self._in_scopes:
            rules = rules_in(scope)
            dtype = next((each for each in LOWS if each.name == scope.rule), self.dtype)
            recipe = self.recipe if scope.rule == "default" else KNOWN.get(scope.rule)
            same = rules == self.rules and dtype == self.dtype and recipe == self.recipe
            self._in_scopes[scope] = self if same else replace(self, rules=rules, dtype=dtype, recipe=recipe)
        return self._in_scopes[scope]

    def enters(self, equation: Equation) -> bool:
        """Return whether an equation, and the programs that it holds, are part of this region.

        A product of a region inside that knows what its operands were cast from stays as it is.
        """
        return "paired" not in equation.params and jaxprs.region_name(equation) in (None, self.name)

    def bodies(self, equation: Equation) -> Iterator[tuple[AnyJaxpr, int]]:
        """Yield the programs of an equation that are rewritten with it, and where their operands begin."""
        if self.enters(equation) and equation.primitive.name not in self.rules:
            yield from jaxprs.bodies(equation)

    def name_in_table(self, equation: Equation) -> str:
        """Return the name whose rule an equation runs by: its primitive's, unless it asks for a precision."""
        name: str = equation.primitive.name
        asks = self.rules.get(name) == "lower" and is_explicit(equation, self.dtype)
        return EXPLICIT_PRECISION if asks else name

    def rule(self, equation: Equation) -> Rule | None:
        """Return the rule that an equation runs by; None for what is left as written."""
        if not self.enters(equation):
            return None
        name = self.name_in_table(equation)
        rule = self.rules.get(name)
        if name == EXPLICIT_PRECISION and rule == "untouched":
            # As written, such an equation runs in float32, and so does the arithmetic that feeds it.
            return "float32" if _is_float32(equation) else None
        return rule


def _is_float32(equation: Equation) -> bool:
    """Return whether all that autocast may cast of an equation is float32."""
    precisions = {precision_of(atom.aval) for atom in (*equation.invars, *equation.outvars)}
    return precisions <= {FLOAT32, None}
