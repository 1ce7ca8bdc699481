"""Read a policy from a record, change its settings, and write it as code or as flags."""

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
from preamp.systems.dialects import ALL, Dialect

PLAIN_BELOW = 2.0**10  # powers of two up to here are written as plain numbers


def recorded_policy(text: object) -> Policy[Any] | None:
    """Return the policy whose `repr` a record holds; None for an unknown one.

    >>> recorded_policy("Dynamic(growth_interval=100)").growth_interval
    100
    """
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of text that may be anything
            return _evaluated(ast.parse(str(text), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, PolicyError):
        return None


def _evaluated(node: ast.expr) -> Policy[Any] | None:
    """Return the policy of an expression: a name of ours, perhaps called with literals. Runs nothing else."""
    if not isinstance(node, ast.Call):
        return _named(node) if isinstance(node, ast.Attribute) else None
    make: Any = _named(node.func)
    # The run itself warned of what is inexact.
    with warnings.catch_warnings(action="ignore", category=InexactScale):
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
    """Return a policy with other settings; a `Dynamic` where the policy lacks one of them.

    Args:
        policy: the one in use; None if unknown.
        settings: new values by name. Where they contradict others, such as a bound, the others give way.
    """
    before = policy.policy if isinstance(policy, Dialect) else policy or Dynamic()
    known, usual = before.get_config(), Dynamic().get_config()
    with warnings.catch_warnings(action="ignore", category=InexactScale):
        if set(settings) <= set(known):
            # A setting that imitates how another system rounds is of no use in the line to write.
            plain = {}
            if isinstance(before, Moving):
                plain["compat"] = replace(before.compat, factor_dtype=Compat.factor_dtype)
            return replace(before, **_within_bounds(known, {**plain, **settings}))
        if "scale" in known:  # a constant scale becomes a dynamic one
            settings = {"init_scale": settings.get("scale", known["scale"]), **settings}
        settings = {name: value for name, value in settings.items() if name in usual}
        return Dynamic(**_within_bounds({name: known.get(name, usual[name]) for name in usual}, settings))


def _within_bounds(known: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the first scale between the bounds."""
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
    """Return the Python expression for a policy.

    >>> as_code(Dynamic(init_scale=2.0**24, growth_interval=500))
    'Dynamic(init_scale=2.0**24, growth_interval=500)'
    """
    settings = ", ".join(f"{name}={_number(value)}" for name, value in _non_defaults(policy).items())
    return f"{type(policy).__name__}({settings})"


def as_flags(policy: Policy[Any], settings: Mapping[str, Any]) -> str:
    """Return the command-line flags for a policy; "" where there are none.

    >>> as_flags(Dynamic(init_scale=2.0**24), {"growth_interval": 2000})
    '--policy.init-scale 16777216 --policy.growth-interval 2000'
    """
    name = type(policy).__name__
    if RULES.get(name) is not type(policy) or any(
        isinstance(value, Compat) for value in _non_defaults(policy).values()
    ):
        return ""
    shown = {
        **_non_defaults(policy),
        **{name: getattr(policy, name) for name in settings if hasattr(policy, name)},
    }
    rule = [] if isinstance(policy, Dynamic) else [f"--rule {kebab(name)}"]
    words = [f"--policy.{name.replace('_', '-')} {_word(value)}" for name, value in shown.items()]
    return " ".join([*rule, *words])


def _non_defaults(policy: Policy[Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
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
