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

KINDS: Mapping[str, Any] = {**RULES, "Compat": Compat}


def recorded_policy(text: object) -> Policy[Any] | None:
    """Return the policy whose `repr` a record holds; None for an unknown one.

    >>> recorded_policy("Dynamic(growth_interval=100)").growth_interval
    100
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the run itself warned of what is inexact
            found = _evaluated(ast.parse(str(text), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, PolicyError):
        return None
    return found if isinstance(found, Policy) else None


def _evaluated(node: ast.expr) -> Any:
    """Return the value of a literal, or of a name of ours, perhaps called. Runs nothing else."""
    if isinstance(node, ast.Attribute):
        return ALL.get(node.attr)
    if isinstance(node, ast.Call):
        make: Any = KINDS.get(node.func.id) if isinstance(node.func, ast.Name) else _evaluated(node.func)
        settings = {str(word.arg): _evaluated(word.value) for word in node.keywords}
        return make(*map(_evaluated, node.args), **settings)
    return ast.literal_eval(node)


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
            if isinstance(before, Moving):  # how another system rounds is of no use in the line to write
                known["compat"] = replace(before.compat, factor_dtype=Compat.factor_dtype)
            return replace(before, **_within_bounds(known, settings))
        if "scale" in known:  # a constant scale becomes a dynamic one
            settings = {"init_scale": settings.get("scale", known["scale"]), **settings}
        held = _within_bounds({**usual, **known}, settings)
        return Dynamic(**{name: held[name] for name in usual})


def _within_bounds(known: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the first scale between the bounds."""
    held = {**known, **settings}
    if "init_scale" in held:
        first = held["init_scale"] = min(held["init_scale"], settings.get("max_scale", math.inf))
        for name, farther in (("min_scale", min), ("max_scale", max)):
            if held.get(name) is not None:
                held[name] = farther(held[name], first)
    return held


def as_code(policy: Policy[Any]) -> str:
    """Return the Python expression for a policy.

    >>> as_code(Dynamic(init_scale=2.0**24, growth_interval=500))
    'Dynamic(init_scale=2.0**24, growth_interval=500)'
    """
    settings = ", ".join(f"{name}={_number(value)}" for name, value in _non_defaults(policy).items())
    return f"{type(policy).__name__}({settings})"


def as_flags(policy: Policy[Any], settings: Mapping[str, Any]) -> str:
    """Return the command-line flags for a policy with some settings changed; "" where there are none.

    >>> as_flags(Dynamic(init_scale=2.0**24), {"growth_interval": 2000})
    '--policy.init-scale 16777216 --policy.growth-interval 2000'
    """
    name, shown = type(policy).__name__, _non_defaults(policy)
    if name not in RULES or "compat" in shown:
        return ""
    shown |= {name: value for name, value in policy.get_config().items() if name in settings}
    rule = "" if isinstance(policy, Dynamic) else f"--rule {kebab(name)} "
    flags = (
        f"--policy.{name.replace('_', '-')} {str(value).removesuffix('.0')}" for name, value in shown.items()
    )
    return rule + " ".join(flags)


def _non_defaults(policy: Policy[Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    values = {field.name: (getattr(policy, field.name), field.default) for field in fields(policy)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _number(value: Any) -> str:
    is_large = isinstance(value, float) and not 1.0 <= value <= 1024.0
    return f"2.0**{math.frexp(value)[1] - 1}" if is_large and math.frexp(value)[0] == 0.5 else repr(value)
