"""The list of our policies, and their conversion to and from JSON, for a saved model.

Guards are saved in the same form, by the functions that are shared here.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from preamp.checks import shown
from preamp.errors import InexactScale, PolicyError
from preamp.policy.base import Policy
from preamp.policy.dynamic import Dynamic
from preamp.policy.headroom import Headroom
from preamp.policy.static import Static
from preamp.policy.tolerant import Tolerant

# The command line takes the first that has all settings given: the usual rule comes first.
RULES: dict[str, type[Policy[Any]]] = {rule.__name__: rule for rule in (Dynamic, Headroom, Static, Tolerant)}
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
    return {"class": name_to_save("policy", policy, RULES, name_of, find), "settings": policy.get_config()}


def from_json(saved: Mapping[str, Any], find: Callable[[str], object]) -> Policy[Any]:
    """Return the policy that was saved.

    Raises:
        PolicyError: for an unknown class, and for anything that `to_json` did not write.
    """
    name, settings = saved_parts("policy", saved, "Dynamic")
    with warnings.catch_warnings(action="ignore", category=InexactScale):  # warned of when it was made
        policy: Policy[Any] = made_of("policy", RULES.get(name) or find(name), Policy, name, settings)
    return policy


def name_to_save(
    what: str,
    rule: object,
    ours: Mapping[str, type],
    name_of: Callable[[type], str],
    find: Callable[[str], object],
) -> str:
    """Return the name under which the class of a rule can be found again.

    Args:
        what: "policy" or "guard", for the message.
        rule: of the class.
        ours: the classes of this library by their names.
        name_of: as for `to_json`.
        find: as for `to_json`.

    Raises:
        PolicyError: if it could not be found again.
    """
    kind = type(rule)
    name = kind.__name__ if ours.get(kind.__name__) is kind else name_of(kind)
    if ours.get(name, find(name)) is not kind:
        raise PolicyError(
            f"{what}={rule!r} cannot be saved: {kind.__name__} could not be found again. "
            f"Write {REGISTER} above the class."
        )
    return name


def saved_parts(what: str, saved: object, example: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the class and the settings.

    Raises:
        PolicyError: if either is missing.
    """
    parts = saved if isinstance(saved, Mapping) else {}
    name, settings = parts.get("class"), parts.get("settings")
    if not (isinstance(name, str) and isinstance(settings, Mapping)):
        raise PolicyError(
            f"{shown(saved)} is not a saved {what}: that has a class and settings. "
            f'Write {{"class": "{example}", "settings": {{}}}}.'
        )
    return name, settings


def made_of(what: str, kind: object, base: type, name: str, settings: Mapping[str, Any]) -> Any:
    """Return a rule made of saved settings.

    Args:
        what: "policy" or "guard", for the messages.
        kind: the class that was found, if one was.
        base: what it has to be a subclass of.
        name: of the class.
        settings: by name.

    Raises:
        PolicyError: for an unknown class, and for settings that it does not have.
    """
    if not (inspect.isclass(kind) and issubclass(kind, base)):
        raise PolicyError(
            f"the {what} {shown(name)} of a saved optimizer is not known. Import its module, where "
            f"{REGISTER} stands above the class."
        )
    try:
        return kind(**{key: _tuples(value) for key, value in settings.items()})
    except TypeError as error:  # settings of another release, or of something else
        raise PolicyError(f"the saved settings of {name} cannot work: {error}. Make a new {what}.") from None


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
