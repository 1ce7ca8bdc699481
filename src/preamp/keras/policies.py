"""A policy as JSON and back, for a model's file.

This room names classes and their settings. It refuses to load code: a policy of your own has to be registered
with Keras before it can be read back.
"""

from __future__ import annotations

import warnings
from dataclasses import fields, is_dataclass
from typing import Any

import keras

from preamp.errors import InexactScale, PolicyError
from preamp.policy import Dynamic, Policy, Static, Tolerant

__all__ = ["from_json", "to_json"]

OURS: dict[str, type[Policy[Any]]] = {kind.__name__: kind for kind in (Dynamic, Static, Tolerant)}


def to_json(policy: Policy[Any]) -> dict[str, Any]:
    """Return a policy's class and settings.

    Raises:
        PolicyError: for a class that nobody could find again.
    """
    kind = type(policy)
    name = kind.__name__ if OURS.get(kind.__name__) is kind else keras.saving.get_registered_name(kind)
    if name not in OURS and keras.saving.get_registered_object(name) is not kind:
        raise PolicyError(
            f"policy={policy!r} cannot be saved: {kind.__name__} could not be found again. "
            'Write @keras.saving.register_keras_serializable(package="mine") above the class.'
        )
    settings = (
        {field.name: getattr(policy, field.name) for field in fields(policy)} if is_dataclass(policy) else {}
    )
    return {"class": name, "settings": settings}


def from_json(saved: Any, custom_objects: dict[str, Any] | None = None) -> Policy[Any]:
    """Return the policy that was saved.

    Raises:
        PolicyError: for a class that is not known here.
    """
    name = saved["class"]
    kind = OURS.get(name) or keras.saving.get_registered_object(name, custom_objects=custom_objects)
    if kind is None:
        raise PolicyError(
            f"the policy {name!r} of a saved optimizer is not known. Import its module first, where "
            '@keras.saving.register_keras_serializable(package="mine") stands above the class.'
        )
    settings = {
        key: tuple(value) if isinstance(value, list) else value for key, value in saved["settings"].items()
    }
    with warnings.catch_warnings(action="ignore", category=InexactScale):  # said when it was made
        policy: Policy[Any] = kind(**settings)
    return policy
