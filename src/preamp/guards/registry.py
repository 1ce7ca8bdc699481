"""The conversion of guards to and from JSON, for a saved model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from preamp.checks import shown
from preamp.errors import PolicyError
from preamp.guards.base import Guard
from preamp.guards.norm_limit import NormLimit
from preamp.guards.spike_guard import SpikeGuard
from preamp.guards.systems import ALL, GuardDialect, LossRatio, NormThreshold, Rolling, Scored

RULES: dict[str, type[Guard[Any]]] = {
    rule.__name__: rule for rule in (LossRatio, NormLimit, NormThreshold, Rolling, Scored, SpikeGuard)
}
DIALECTS = {dialect.name: dialect for dialect in ALL}
REGISTER = '@keras.saving.register_keras_serializable(package="mine")'


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
    kind = type(guard)
    name = kind.__name__ if RULES.get(kind.__name__) is kind else name_of(kind)
    if RULES.get(name, find(name)) is not kind:
        raise PolicyError(
            f"guard={guard!r} cannot be saved: {kind.__name__} could not be found again. "
            f"Write {REGISTER} above the class."
        )
    return {"class": name, "settings": guard.get_config()}


def from_json(saved: object, find: Callable[[str], object]) -> Guard[Any]:
    """Return the guard that was saved.

    Raises:
        PolicyError: for an unknown class, and for anything that `to_json` did not write.
    """
    parts = saved if isinstance(saved, Mapping) else {}
    name, settings = parts.get("class"), parts.get("settings")
    if not (isinstance(name, str) and isinstance(settings, Mapping)):
        raise PolicyError(
            f"{shown(saved)} is not a saved guard: that has a class and settings. "
            'Write {"class": "SpikeGuard", "settings": {}}.'
        )
    if name in DIALECTS:
        return DIALECTS[name]
    kind = RULES.get(name) or find(name)
    if not (inspect.isclass(kind) and issubclass(kind, Guard)):
        raise PolicyError(
            f"the guard {shown(name)} of a saved optimizer is not known. Import its module, where "
            f"{REGISTER} stands above the class."
        )
    try:
        guard: Guard[Any] = kind(**settings)
    except TypeError as error:  # settings of another release, or of something else
        raise PolicyError(f"the saved settings of {name} cannot work: {error}. Make a new guard.") from None
    return guard
