"""The list of our policies, and the conversion of policies and guards to and from JSON, for a saved model."""

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
    rule: Any,
    name_of: Callable[[type], str],
    find: Callable[[str], object],
    ours: Mapping[str, object] = RULES,
) -> dict[str, Any]:
    """Return the class and the settings of a policy or a guard; of a guard in `ours`, its name.

    Args:
        rule: a policy or a guard whose fields JSON can hold.
        name_of: the framework's name for a class that is registered with it.
        find: the class of such a name, or None.
        ours: this library's own by their names: `preamp.guards.RULES` for a guard.

    Raises:
        PolicyError: for a class that could not be found again.
    """
    for name, known in ours.items():
        if known is rule:  # a dialect of guards
            return {"class": name, "settings": {}}
    kind = type(rule)
    name = kind.__name__ if ours.get(kind.__name__) is kind else name_of(kind)
    if ours.get(name, find(name)) is not kind:
        what = "policy" if isinstance(rule, Policy) else "guard"
        raise PolicyError(
            f"{what}={rule!r} cannot be saved: {kind.__name__} could not be found again. "
            f"Write {REGISTER} above the class."
        )
    return {"class": name, "settings": rule.get_config()}


def from_json(
    saved: object,
    find: Callable[[str], object],
    ours: Mapping[str, object] = RULES,
    base: type = Policy,
) -> Any:
    """Return the policy or the guard that was saved.

    Args:
        saved: what `to_json` returned.
        find: as for `to_json`.
        ours: as for `to_json`.
        base: `Policy` or `Guard`.

    Raises:
        PolicyError: for an unknown class, and for anything that `to_json` did not write.
    """
    what, parts = base.__name__.lower(), saved if isinstance(saved, Mapping) else {}
    name, settings = parts.get("class"), parts.get("settings")
    if not (isinstance(name, str) and isinstance(settings, Mapping)):
        raise PolicyError(
            f"{shown(saved)} is not a saved {what}: that has a class and settings. "
            f'Write {{"class": "{next(iter(ours))}", "settings": {{}}}}.'
        )
    kind = ours.get(name) or find(name)
    if isinstance(kind, base):
        return kind
    if not (inspect.isclass(kind) and issubclass(kind, base)):
        raise PolicyError(
            f"the {what} {shown(name)} of a saved optimizer is not known. Import its module, where "
            f"{REGISTER} stands above the class."
        )
    try:
        with warnings.catch_warnings(action="ignore", category=InexactScale):  # warned of when it was made
            return kind(**{key: _tuples(value) for key, value in settings.items()})
    except TypeError as error:  # settings of another release, or of something else
        raise PolicyError(f"the saved settings of {name} cannot work: {error}. Make a new {what}.") from None


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
