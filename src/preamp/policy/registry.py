"""The list of our policies, and their conversion to and from JSON, for a saved model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from preamp.checks import shown
from preamp.errors import InexactScale, PolicyError
from preamp.policy.base import Policy
from preamp.policy.dynamic import Dynamic
from preamp.policy.floor_schedule import FloorSchedule
from preamp.policy.headroom import Headroom
from preamp.policy.histogram import Histogram
from preamp.policy.log_max import LogMax
from preamp.policy.static import Static
from preamp.policy.tolerant import Tolerant

# The command line takes the first that has all settings given: the usual rule comes first.
RULES: dict[str, type[Policy[Any]]] = {
    rule.__name__: rule for rule in (Dynamic, FloorSchedule, Headroom, Histogram, LogMax, Static, Tolerant)
}
REGISTER = '@keras.saving.register_keras_serializable(package="mine")'


def to_json(
    policy: Policy[Any], name_of: Callable[[type], str], find: Callable[[str], object]
) -> dict[str, Any]:
    """Return a policy's class and settings.

    Args:
        policy: a policy whose fields JSON can hold.
        name_of: the framework's name for a class that is registered with it.
        find: the class of such a name, or None.

    Raises:
        PolicyError: for a class that could not be found again.
    """
    kind = type(policy)
    name = kind.__name__ if RULES.get(kind.__name__) is kind else name_of(kind)
    if RULES.get(name, find(name)) is not kind:
        raise PolicyError(
            f"policy={policy!r} cannot be saved: {kind.__name__} could not be found again. "
            f"Write {REGISTER} above the class."
        )
    return {"class": name, "settings": policy.get_config()}


def from_json(saved: Mapping[str, Any], find: Callable[[str], object]) -> Policy[Any]:
    """Return the policy that was saved.

    Raises:
        PolicyError: for an unknown class, and for anything that `to_json` did not write.
    """
    name, settings = _parts(saved)
    kind = RULES.get(name) or find(name)
    if not (inspect.isclass(kind) and issubclass(kind, Policy)):
        raise PolicyError(
            f"the policy {shown(name)} of a saved optimizer is not known. Import its module, where "
            f"{REGISTER} stands above the class."
        )
    try:
        with warnings.catch_warnings(action="ignore", category=InexactScale):  # warned of when it was made
            policy: Policy[Any] = kind(**{key: _tuples(value) for key, value in settings.items()})
    except TypeError as error:  # settings of another release, or of something else
        raise PolicyError(f"the saved settings of {name} cannot work: {error}. Make a new policy.") from None
    return policy


def _parts(saved: object) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the class and the settings."""
    name, settings = (
        (saved.get("class"), saved.get("settings")) if isinstance(saved, Mapping) else (None, None)
    )
    if not (isinstance(name, str) and isinstance(settings, Mapping)):
        raise PolicyError(
            f"{shown(saved)} is not a saved policy: that has a class and settings. "
            'Write {"class": "Dynamic", "settings": {}}.'
        )
    return name, settings


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
