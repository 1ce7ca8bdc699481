"""A rule for the scale as a record names it, with other settings, and as the line to write.

This room turns settings into policies and policies into text. It refuses to know why a setting should change.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from preamp.errors import InexactScale, PolicyError
from preamp.policy import Compat, Dynamic, Moving, Policy
from preamp.policy.registry import RULES
from preamp.record.formatting import kebab
from preamp.systems.definition import Dialect
from preamp.systems.dialects import ALL

PLAIN_BELOW = 2.0**10  # powers of two up to here are read as they are


def recorded_policy(text: object) -> Policy[Any] | None:
    """Return the policy whose `repr` a record holds; None for a rule that is not known here.

    >>> recorded_policy("Dynamic(growth_interval=100)").growth_interval
    100
    """
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # whoever wrote it
            return _evaluated(ast.parse(str(text), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, PolicyError):
        return None


def _evaluated(node: ast.expr) -> Policy[Any] | None:
    """Return what a name of ours stands for, called with literals or not. Nothing else is run."""
    if not isinstance(node, ast.Call):
        return _named(node) if isinstance(node, ast.Attribute) else None
    make: Any = _named(node.func)
    with warnings.catch_warnings(action="ignore", category=InexactScale):  # said when it was made
        settings = {str(word.arg): _value(word.value) for word in node.keywords}
        return make and make(*map(ast.literal_eval, node.args), **settings)  # type: ignore[no-any-return]


def _value(node: ast.expr) -> Any:
    """Return a literal, or the `Compat` of literals."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == Compat.__name__:
        return Compat(**{str(word.arg): ast.literal_eval(word.value) for word in node.keywords})
    return ast.literal_eval(node)


def _named(node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute):
        return ALL.get(node.attr)
    return RULES.get(node.id) if isinstance(node, ast.Name) else None


def changed(policy: Policy[Any] | None, settings: Mapping[str, Any]) -> Policy[Any]:
    """Return a policy with other settings. One that lacks such a setting gives way to a `Dynamic`.

    Args:
        policy: the rule in use; None for one that is not known.
        settings: values by name, that hold together with the others or take precedence over them.
    """
    before = policy.policy if isinstance(policy, Dialect) else policy or Dynamic()
    known, usual = before.get_config(), Dynamic().get_config()
    with warnings.catch_warnings(action="ignore", category=InexactScale):
        if set(settings) <= set(known):
            # How another system rounds a product is of no use to whoever writes the line.
            plain = {}
            if isinstance(before, Moving):
                plain["compat"] = replace(before.compat, factor_dtype=Compat.factor_dtype)
            return replace(before, **_holding(known, {**plain, **settings}))
        if "scale" in known:  # of a constant that is to move
            settings = {"init_scale": settings.get("scale", known["scale"]), **settings}
        settings = {name: value for name, value in settings.items() if name in usual}
        return Dynamic(**_holding({name: known.get(name, usual[name]) for name in usual}, settings))


def _holding(known: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which the first scale lies between the bounds."""
    held = {**known, **settings}
    first, low, high = (held.get(name) for name in ("init_scale", "min_scale", "max_scale"))
    if first is not None and low is not None and "min_scale" not in settings:
        held["min_scale"] = min(low, first)
    if first is not None and high is not None:
        name, value = (
            ("init_scale", min(first, high)) if "max_scale" in settings else ("max_scale", max(first, high))
        )
        held[name] = value
    return held


def as_code(policy: Policy[Any]) -> str:
    """Return the expression that makes a policy.

    >>> as_code(Dynamic(init_scale=2.0**24, growth_interval=500))
    'Dynamic(init_scale=2.0**24, growth_interval=500)'
    """
    settings = ", ".join(f"{name}={_number(value)}" for name, value in _told(policy).items())
    return f"{type(policy).__name__}({settings})"


def as_flags(policy: Policy[Any], settings: Mapping[str, Any]) -> str:
    """Return the flags of the command line that ask for a policy; "" where none do.

    >>> as_flags(Dynamic(init_scale=2.0**24), {"growth_interval": 2000})
    '--policy.init-scale 16777216 --policy.growth-interval 2000'
    """
    name = type(policy).__name__
    if RULES.get(name) is not type(policy) or any(
        isinstance(value, tuple | Compat) for value in _told(policy).values()
    ):
        return ""
    told = {**_told(policy), **{name: getattr(policy, name) for name in settings if hasattr(policy, name)}}
    rule = [] if isinstance(policy, Dynamic) else [f"--rule {kebab(name)}"]
    words = [f"--policy.{name.replace('_', '-')} {_word(value)}" for name, value in told.items()]
    return " ".join([*rule, *words])


def _told(policy: Policy[Any]) -> dict[str, Any]:
    """Return the settings that are not their defaults."""
    values = {field.name: (getattr(policy, field.name), field.default) for field in fields(policy)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _number(value: Any) -> str:
    if isinstance(value, float) and 0.0 < value < math.inf and math.frexp(value)[0] == 0.5:
        is_plain = 1.0 <= value <= PLAIN_BELOW
        return repr(value) if is_plain else f"2.0**{math.frexp(value)[1] - 1}"
    return repr(value)


def _word(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer() and value < 1e15
    return str(int(value)) if is_whole else str(value)
