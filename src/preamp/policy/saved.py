"""A policy as JSON and back, for a model's file.

This room names classes and their settings. It refuses to load code: a policy of your own has to be known to
the framework that reads the file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from preamp.errors import InexactScale, PolicyError
from preamp.policy.base import Policy
from preamp.policy.dynamic import Dynamic
from preamp.policy.floor_schedule import FloorSchedule
from preamp.policy.headroom import Headroom
from preamp.policy.histogram import Histogram
from preamp.policy.log_max import LogMax
from preamp.policy.static import Static
from preamp.policy.tolerant import Tolerant

__all__ = ["OURS", "from_json", "to_json"]

_KINDS: tuple[type[Policy[Any]], ...] = (
    Dynamic,
    Tolerant,
    Static,
    FloorSchedule,
    Headroom,
    Histogram,
    LogMax,
)
OURS = {kind.__name__: kind for kind in _KINDS}
REGISTER = '@keras.saving.register_keras_serializable(package="mine")'


def to_json(
    policy: Policy[Any], name_of: Callable[[type], str], find: Callable[[str], Any]
) -> dict[str, Any]:
    """Return a policy's class and settings.

    Args:
        policy: a policy whose fields JSON can hold.
        name_of: the framework's name for a class that is registered with it.
        find: the class of such a name, or None.

    Raises:
        PolicyError: for a class that nobody could find again.
    """
    kind = type(policy)
    name = kind.__name__ if OURS.get(kind.__name__) is kind else name_of(kind)
    if OURS.get(name, find(name)) is not kind:
        raise PolicyError(
            f"policy={policy!r} cannot be saved: {kind.__name__} could not be found again. "
            f"Write {REGISTER} above the class."
        )
    return {"class": name, "settings": policy.get_config()}


def from_json(saved: Mapping[str, Any], find: Callable[[str], Any]) -> Policy[Any]:
    """Return the policy that was saved.

    Raises:
        PolicyError: for a class that is not known here.
    """
    kind = OURS.get(saved["class"]) or find(saved["class"])
    if kind is None:
        raise PolicyError(
            f"the policy {saved['class']!r} of a saved optimizer is not known. Import its module, where "
            f"{REGISTER} stands above the class."
        )
    settings = {name: _tuples(value) for name, value in saved["settings"].items()}
    with warnings.catch_warnings(action="ignore", category=InexactScale):  # said when it was made
        policy: Policy[Any] = kind(**settings)
    return policy


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
