"""The conversion of guards to and from JSON, for a saved model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preamp.guards.base import Guard
from preamp.guards.norm_limit import NormLimit
from preamp.guards.spike_guard import SpikeGuard
from preamp.guards.systems import ALL, GuardDialect, NormThreshold, Rolling
from preamp.policy.registry import made_of, name_to_save, saved_parts

RULES: dict[str, type[Guard[Any]]] = {
    rule.__name__: rule for rule in (NormLimit, NormThreshold, Rolling, SpikeGuard)
}
DIALECTS = {dialect.name: dialect for dialect in ALL}


def to_json(
    guard: Guard[Any], name_of: Callable[[type], str], find: Callable[[str], object]
) -> dict[str, Any]:
    """Return a guard's class and settings; of a dialect with its defaults, its name.

    Args:
        guard: a guard whose fields JSON can hold.
        name_of: the framework's name for a class that is registered with it.
        find: the class of such a name, or None.

    Raises:
        PolicyError: for a class that could not be found again.
    """
    if isinstance(guard, GuardDialect):
        return {"class": guard.name, "settings": {}}
    return {"class": name_to_save("guard", guard, RULES, name_of, find), "settings": guard.get_config()}


def from_json(saved: object, find: Callable[[str], object]) -> Guard[Any]:
    """Return the guard that was saved.

    Raises:
        PolicyError: for an unknown class, and for anything that `to_json` did not write.
    """
    name, settings = saved_parts("guard", saved, "SpikeGuard")
    if name in DIALECTS:
        return DIALECTS[name]
    kind: object = RULES.get(name) or find(name)
    guard: Guard[Any] = made_of("guard", kind, Guard, name, settings)
    return guard
